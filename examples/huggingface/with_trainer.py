"""A transformers model trained by Trainer, on all ranks."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import seqpar


def padded(documents):
    """A batch of documents, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


arguments = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    accelerator_config={"split_batches": True}, logging_steps=1, report_to="none", save_strategy="no",
)  # fmt: skip
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
seqpar.parallelize(model, seqpar.GroupComm())
documents = [torch.randint(1, 64, (5 + 7 * n % 31,), generator=torch.Generator().manual_seed(n)) for n in range(32)]
trainer = Trainer(model, arguments, train_dataset=documents, eval_dataset=documents[:8], data_collator=padded)
trainer.train()
print("evaluation loss", trainer.evaluate()["eval_loss"])
for step, entry in enumerate(e for e in trainer.state.log_history if "loss" in e):
    print(f"step {step} loss {entry['loss']}")
