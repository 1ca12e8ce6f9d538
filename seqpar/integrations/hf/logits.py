"""A model's logits: their softcap, by the config, how many tokens they are of, and whether Trainer reads them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

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


class LossOnly(threading.local):
    """Whether this thread is in a step of `Trainer` that reads the loss alone."""

    asked = False


loss_only = LossOnly()


def ask_trainer() -> None:
    """Have `Trainer.prediction_step` set `loss_only`; without effect for other models, and before it is imported."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and not hasattr(trainer.prediction_step, "_seqpar_former"):
        trainer.prediction_step = _asked(trainer.prediction_step)


def _asked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def prediction_step(
        trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **named: Any
    ) -> Any:
        before, loss_only.asked = loss_only.asked, bool(prediction_loss_only)
        try:
            return method(trainer, model, inputs, prediction_loss_only, *args, **named)
        finally:
            loss_only.asked = before

    prediction_step._seqpar_former = method  # type: ignore[attr-defined]
    return prediction_step
