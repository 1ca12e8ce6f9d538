"""Llama 3.1 8B on documents of up to 131,072 tokens, with Trainer and FSDP2.

    torchrun --nproc-per-node 8 examples/recipes/llama_trainer.py             # 8 GPUs
    torchrun --nproc-per-node 2 examples/recipes/llama_trainer.py --small     # 2 CPU ranks: a tiny Llama

Trainer shards weights over all ranks by FSDP2, and seqpar spreads each batch over the same ranks. Each rank loads its
own documents; they are computed together, so a rank never holds a whole long document.
"""

import os
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import seqpar

SMALL = "--small" in sys.argv
MODEL = "meta-llama/Llama-3.1-8B"
TOKENS = 300 if SMALL else 131_072


def documents():
    """Token ids of every document; put your own dataset here."""
    vocabulary = 64 if SMALL else 128_000
    for n in range(16):
        generator = torch.Generator().manual_seed(n)
        yield torch.randint(1, vocabulary, (TOKENS // (1 + n % 4),), generator=generator)


def padded(batch):
    """A batch of documents, padded on the right. seqpar computes no padding."""
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def build():
    """The model with its weights, the same on every rank."""
    if SMALL:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)


ranks = int(os.environ.get("WORLD_SIZE", 1))
arguments = TrainingArguments(
    tempfile.mkdtemp() if SMALL else "out/llama",
    max_steps=3,
    per_device_train_batch_size=4 // ranks if SMALL else 1,
    learning_rate=1e-2 if SMALL else 1e-5,
    bf16=not SMALL,
    use_cpu=SMALL,
    gradient_checkpointing=not SMALL,
    fsdp=ranks > 1,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if ranks > 1 else None,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
)  # makes the process group, and takes this rank's GPU
model = build()
seqpar.parallelize(model, seqpar.GroupComm())
trainer = Trainer(model, arguments, train_dataset=list(documents()), data_collator=padded)
trainer.train()
for step, entry in enumerate(entry for entry in trainer.state.log_history if "loss" in entry):
    print(f"step {step} loss {entry['loss']}")
