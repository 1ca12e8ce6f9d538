"""A model's logits: their softcap, by the config, whose tokens they are of, who reads them, and own losses."""

from __future__ import annotations

import sys
import threading
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.foreign.wrap import replaced

_step = threading.local()


def softcap_of(model: PreTrainedModel) -> float:
    """The softcap of the logits, by the config; 0 for none."""
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return float(next((cap for cap in caps if cap), 0.0))


def tokens_of(model: PreTrainedModel) -> int | None:
    """How many tokens the output embeddings have; None if that is unknown."""
    return getattr(model.get_output_embeddings(), "out_features", None)


def loss_alone() -> bool:
    """Whether this thread is in a step of `Trainer` that reads the loss alone.

    The first call after Trainer was imported has its `prediction_step` tell it; that is as before in all else.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(method := trainer.prediction_step, "_seqpar_former"):
        return getattr(_step, "loss_alone", False)

    @wraps(method)
    def step(trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **named: Any) -> Any:
        with replaced(_step, {"loss_alone": prediction_loss_only}):
            return method(trainer, model, inputs, prediction_loss_only, *args, **named)

    step._seqpar_former = method  # type: ignore[attr-defined]
    trainer.prediction_step = step
    return False


def mean_of_rows(model: PreTrainedModel, rows: Tensor, labels: Tensor, shift: str) -> Tensor:
    """The mean of a model's own loss_function over rows of logits [T, n] with a label [T] that counts.

    Where it shifts labels itself, each row is followed by a row of which nothing is predicted, and has its label there.
    """
    if shift == "row":
        rows, labels = torch.stack([rows, rows], 1), torch.stack([torch.full_like(labels, -100), labels], 1)
    else:
        rows, labels = rows[None], labels[None]
    config = model.config.get_text_config()
    return model.loss_function(logits=rows, labels=labels, vocab_size=config.vocab_size)  # type: ignore[no-any-return]
