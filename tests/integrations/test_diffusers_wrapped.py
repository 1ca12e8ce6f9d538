"""Transformers of diffusers inside wrappers that average gradients: equal to one process, on processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.testing import run_processes
from tests.integrations.diffusers_models import loss_of, made
from tests.ranks import in_wrapper, whole_gradients

RANKS = 2


def wrapped(comm: Comm, how: str, name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the averaged gradients, of a model in a wrapper."""
    model, given = made(name, torch.float32)
    if how != "fsdp first":
        seqpar.parallelize(model, comm, average_over=comm.size)
    blocks = model.blocks if name == "wan" else (*model.transformer_blocks, *model.single_transformer_blocks)
    whole = in_wrapper(model, how, blocks)
    if how == "fsdp first":
        seqpar.parallelize(model, comm, average_over=comm.size)
    for _ in range(2):  # the second pass finds what the first one left sharded
        model.zero_grad()
        _, loss = loss_of(whole, given)
        loss.backward()
    return float(loss.detach()), whole_gradients(model)


@pytest.mark.parametrize("how, name", [("ddp", "wan"), ("fsdp", "flux"), ("fsdp first", "flux")])
@pytest.mark.sampled(3)
def test_wrappers_that_average(how: str, name: str) -> None:
    model, given = made(name, torch.float32)
    _, expected = loss_of(model, given)
    expected.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for loss, found in run_processes(RANKS, wrapped, how, name):
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        assert found.keys() == grads.keys()
        for key, grad in found.items():
            most = max(float(grads[key].abs().max()), 1e-4 * largest)
            assert float((grad - grads[key]).abs().max()) <= 1e-4 * most, key
