"""All ranks' batches as one batch, what transformers makes of it on one process, and what ranks make of it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import transformers
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.integrations.hf.config import caching
from seqpar.testing import run_threads
from tests.ecosystem import architectures
from tests.ecosystem.architectures import Architecture
from tests.ecosystem.ways import islands, union
from tests.integrations.hf import hybrids
from tests.integrations.hf.hybrids import contiguous, gradients

Outcome = tuple[float, dict[str, Tensor]]
_building = threading.Lock()


def build(row: Architecture, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    """The model of a row, in training. The same whenever it is called."""
    with _building, islands(dtype):
        return architectures.build(row, dtype=dtype)


def one(
    model: torch.nn.Module,
    every: list[dict[str, Tensor]],
    dtype: torch.dtype,
    *,
    pad: int = 0,
    kept: bool = False,
    **more: Any,
) -> Outcome:
    """The loss of one call of the model on the union, by transformers' own code, and its gradients.

    pad: the padding token. kept: call the model itself, not a copy, and let gradients add up.
    """
    own = model if kept else copy.deepcopy(model)
    with islands(dtype):
        loss = own(**union(every, pad), **more, **caching(own)).loss
        loss.backward()
    return float(loss.detach()), gradients(own)


def on_ranks(
    comm: Comm, model: torch.nn.Module, every: list[dict[str, Tensor]], dtype: torch.dtype, more: dict[str, Any],
    options: dict[str, Any] | None = None, checkpoints: bool = False,
) -> Outcome:  # fmt: skip
    """The loss, and this rank's part of the gradients, of a copy of the model; documents are cut between ranks."""
    own = copy.deepcopy(model)
    if checkpoints:
        own.gradient_checkpointing_enable({"use_reentrant": False})
    with islands(dtype), seqpar.parallelize(own, comm, **{"plan": contiguous} | (options or {})):
        loss = own(**every[comm.rank], **more).loss
        loss.backward()
    return float(loss.detach()), gradients(own)


def check(found: list[Outcome], expected: Outcome, tolerance: float) -> None:
    """Losses on every rank and sums of gradients are the expected ones, relative to a tensor's largest element.

    A gradient below a hundredth of the model's largest is judged against that: one may be zero but for rounding.
    """
    hybrids.check(found, expected, tolerance, least=1e-2)


def agree(
    model: torch.nn.Module, every: list[dict[str, Tensor]], tolerance: float = 1e-9, *, pad: int = 0,
    checkpoints: bool = False,
) -> Outcome:  # fmt: skip
    """Ranks with these batches have the loss and gradients of one process, which are returned."""
    dtype = next(model.parameters()).dtype
    whole = one(model, every, dtype, pad=pad)
    check(run_threads(len(every), on_ranks, model, every, dtype, {}, None, checkpoints), whole, tolerance)
    return whole
