"""Transformers of diffusers inside wrappers that average gradients: equal to one process, on processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm
from seqpar.testing import run_processes
from tests.integrations.diffusers_models import loss_of, made

RANKS = 2


def wrapped(comm: Comm, how: str, name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the averaged gradients, of a model in a wrapper."""
    model, given = made(name, torch.float32)
    whole: nn.Module = model
    if how != "fsdp first":
        seqpar.parallelize(model, comm, average_over=comm.size)
    if how == "ddp":
        whole = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (comm.size,))
        blocks = model.blocks if name == "wan" else (*model.transformer_blocks, *model.single_transformer_blocks)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
    if how == "fsdp first":
        seqpar.parallelize(model, comm, average_over=comm.size)
    for _ in range(2):  # the second pass finds what the first one left sharded
        model.zero_grad()
        _, loss = loss_of(whole, given)
        loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    return float(loss.detach()), {key: getattr(g, "full_tensor", lambda g=g: g)() for key, g in grads.items()}


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
