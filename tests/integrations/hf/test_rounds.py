"""How often ranks of a parallel model ask each other before anything moves, and that what they leave out is safe."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import seqpar
from seqpar import Comm, Plan
from seqpar.comm import PeerError
from seqpar.integrations.hf import planning
from seqpar.testing import run_threads
from seqpar.train import sync_gradients
from tests.integrations.hf import hybrids
from tests.integrations.hf.models import build

MODELS = {name: build(name) for name in ("llama", "gemma3", "mistral")}
MODELS |= {name: hybrids.build(name) for name in ("mamba2", "qwen3_next")}
# what the first step asks besides: of two kinds of masks, of layers of each kind, and how many threads ranks have
FIRST = {
    "llama": {"attention": 1},
    "gemma3": {"attention": 2},
    "mamba2": {"causal_conv1d": 1, "linear_attention": 2},
    "qwen3_next": {"attention": 1, "causal_conv1d": 1, "linear_attention": 2},
}


def asking(comm: Comm) -> Counter[str]:
    """A comm that compares as those of processes do, once, and what it is asked to compare from here on."""
    counts: Counter[str] = Counter()
    comm.check_every = "batch"

    def counted(call: Any) -> Any:
        def asked(what: str, *rest: Any, **named: Any) -> Any:
            counts[what] += 1
            return call(what, *rest, **named)

        return asked

    comm.agree, comm.gather = counted(comm.agree), counted(comm.gather)
    return counts


def batch(rank: int, *lengths: int) -> dict[str, torch.Tensor]:
    """A rank's documents of these lengths, packed."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 61, (1, sum(lengths)), generator=g)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.sampled(2)
def test_a_step_asks_once_and_the_first_one_for_its_layers_and_gradients_too(name: str) -> None:
    def rank(comm: Comm) -> list[dict[str, int]]:
        counts, model, found = asking(comm), copy.deepcopy(MODELS[name]), []
        with seqpar.parallelize(model, comm):
            for n in (7, 8, 7, 9, 9):
                counts.clear()
                model(**batch(comm.rank, n, 6 + comm.rank)).loss.backward()
                sync_gradients(model.parameters(), comm)
                model.zero_grad()
                found.append(dict(counts))
        return found

    for first, second, *others in run_threads(2, rank):
        ask = f"{type(MODELS[name]).__name__}.forward"
        assert first == {ask: 1, "share: the plan of the batch": 1, "sync_gradients": 1} | FIRST[name]
        assert [second, *others] == [{ask: 1}] * 4


@pytest.mark.parametrize("stays", [False, True])
def test_a_plan_that_comes_out_otherwise_on_one_rank_is_an_error_on_all(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stays:
        monkeypatch.setattr(planning, "SPREADING", math.inf)

    def rank(comm: Comm) -> None:
        asking(comm)
        model = copy.deepcopy(MODELS["llama"])
        with seqpar.parallelize(model, comm) as handle:
            model(**batch(comm.rank, 8))
            if comm.rank:
                handle._plans._make = lambda lengths, ranks, *_: Plan(
                    seqpar.Mask(lengths), seqpar.Layout.striped(int(lengths.sum()), ranks)
                )
            with pytest.raises((ValueError, PeerError), match="forward|relayout|attention"):
                model(**batch(comm.rank, 9))

    run_threads(2, rank)


def rescaled(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scaling = 0.125


def widened(model: nn.Module) -> None:
    model.config.sliding_window = 7


@pytest.mark.parametrize(("name", "change"), [("llama", rescaled), ("mistral", widened)])
def test_a_model_that_changes_on_one_rank_between_batches_is_an_error_on_all(name: str, change: Any) -> None:
    def rank(comm: Comm) -> None:
        asking(comm)
        model = copy.deepcopy(MODELS[name])
        with seqpar.parallelize(model, comm):
            for n in (8, 9):
                model(**batch(comm.rank, n, n))
            if comm.rank:
                change(model)
            with pytest.raises((ValueError, PeerError), match="attention"):
                model(**batch(comm.rank, 10, 10))
                comm.agree("the next call", {})

    run_threads(2, rank)


def test_autocast_recomputation_and_a_dtype_on_one_rank_are_named() -> None:
    def rank(comm: Comm) -> None:
        asking(comm)
        model = copy.deepcopy(MODELS["llama"])
        with seqpar.parallelize(model, comm):
            model(**batch(comm.rank, 8))
            named = pytest.raises(ValueError, match="forward: ranks differ in autocast: None on rank 0; torch.bfloat16")
            with named, torch.autocast("cpu", torch.bfloat16, enabled=bool(comm.rank)):
                model(**batch(comm.rank, 9))
            if comm.rank:
                model.gradient_checkpointing_enable()
            with pytest.raises(ValueError, match="ranks differ in gradient checkpointing"):
                model(**batch(comm.rank, 9))
            model.to(torch.bfloat16 if comm.rank else torch.float32)
            with pytest.raises(ValueError, match="ranks differ in dtype: torch.float32 on rank 0; torch.bfloat16 on r"):
                model(**batch(comm.rank, 9))

    run_threads(2, rank)
