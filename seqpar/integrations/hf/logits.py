"""A model's logits: their softcap, by the config, and how many tokens they are of."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def softcap_of(model: PreTrainedModel) -> float:
    """The softcap of the logits, by the config; 0 for none."""
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return float(next((cap for cap in caps if cap), 0.0))


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Logits with their softcap; as they are if that is 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def tokens_of(model: PreTrainedModel) -> int | None:
    """How many tokens the output embeddings have; None if that is unknown."""
    return getattr(model.get_output_embeddings(), "out_features", None)
