"""What errors of diffusers models say to do, done: outputs and gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.advice.advised import advised

diffusers = pytest.importorskip("diffusers")
transformer_flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")

from diffusers.models.attention_dispatch import attention_backend  # noqa: E402

from tests.integrations.diffusers_models import made  # noqa: E402

MODEL, INPUTS = made("flux", samples=1)
with torch.no_grad():
    OUT = MODEL(**INPUTS).sample


def is_right(model: nn.Module) -> bool:
    """Whether the output is that of one process."""
    with torch.no_grad():
        return torch.allclose(model(**INPUTS).sample, OUT, atol=1e-10)


def right_after(mistake: Callable[[Comm, nn.Module], None]) -> bool:
    """Whether the parallel model is right on two ranks after each has made a mistake with it."""

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        seqpar.parallelize(model, comm)
        mistake(comm, model)
        return is_right(model)

    return run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_is_disabled(when: str) -> None:
    """Its hooks take the place of a module's forward, and put back what was there."""
    cache = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL)
        if when == "before":
            model.enable_cache(cache)
            with advised(NotImplementedError, "by the model's disable_cache()"):
                seqpar.parallelize(model, comm)
            model.disable_cache()
        handle = seqpar.parallelize(model, comm)
        if when == "after":
            model.enable_cache(cache)
            with advised((NotImplementedError, ValueError), "by the model's disable_cache()"):
                is_right(model)
            model.disable_cache()
        right = is_right(model)
        handle.undo()
        return right and is_right(model)

    assert run_threads(2, rank) == [True, True]


def test_dropout_is_set_to_0() -> None:
    """Computing the list whole would not help."""

    def rank(comm: Comm) -> bool:
        model = copy.deepcopy(MODEL).train()
        model.transformer_blocks[0].ff.net[1].p = 0.5
        seqpar.parallelize(model, comm)
        with advised(NotImplementedError, "set the p of its dropout to 0"):
            is_right(model)
        model.transformer_blocks[0].ff.net[1].p = 0.0
        return is_right(model)

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("way", ["its own", "in force"])
def test_attention_is_that_of_pytorch(way: str) -> None:
    def mistake(comm: Comm, model: nn.Module) -> None:
        if way == "its own":
            model.set_attention_backend("flex")  # type: ignore[operator]
        with advised((NotImplementedError, ValueError), "call set_attention_backend('native')"):
            is_right(model)
        model.set_attention_backend("native")  # type: ignore[operator]

    with attention_backend("native" if way == "its own" else "flex"):
        assert right_after(mistake)
