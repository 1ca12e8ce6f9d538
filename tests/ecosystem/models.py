"""A tiny Llama, a tokenizer of numbers, and documents, as programs of several libraries train on them."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from tests.integrations.hf.models import VOCABULARY, build

RANKS = int(os.environ.get("WORLD_SIZE", 1))


def llama() -> transformers.PreTrainedModel:
    """The same weights at every call, with attention as transformers chooses it."""
    model = build("llama")
    model.set_attn_implementation("sdpa")
    return model


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words are numbers; 0 is the pad, the last one the end of a document."""
    words = {str(n): n for n in range(1, VOCABULARY - 1)} | {"<pad>": 0, "<eos>": VOCABULARY - 1}
    made = Tokenizer(WordLevel(words, unk_token="1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="1"
    )


def document(seed: int, length: int) -> list[int]:
    """Tokens of a document, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY - 1, (length,), generator=generator).tolist()


def padded(documents: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of documents, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(document) for document in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def text(seed: int, length: int) -> str:
    """The same, as words."""
    return " ".join(map(str, document(seed, length)))


def lora() -> Any:
    """Adapters of every linear layer, all of whose weights matter from the first step on."""
    import peft

    return peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
