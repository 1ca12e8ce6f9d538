"""A language model fine-tuned by TRL's SFTTrainer on packed documents, on one device."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

arguments = SFTConfig(
    tempfile.mkdtemp(), packing=True, max_length=40, max_steps=4, per_device_train_batch_size=4, use_cpu=True,
    bf16=False, accelerator_config={"split_batches": True}, logging_steps=1, report_to="none", save_strategy="no",
)  # fmt: skip
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
words = {str(n): n for n in range(62)} | {"<pad>": 62, "<eos>": 63}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="<pad>", eos_token="<eos>"
)
documents = [torch.arange(3, 5 + 7 * n % 31).remainder(62).tolist() for n in range(96)]
data = Dataset.from_list([{"input_ids": ids} for ids in documents])
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
for step, entry in enumerate(e for e in trainer.state.log_history if "grad_norm" in e):
    print(f"step {step} loss {entry['loss']}")
