"""Parallel models inside what wraps them: FSDP2 and DDP on processes, autocast, and adapters that call forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from tests.integrations.models import batches, build, largest, one_process

RANKS = 2


def wrapped(comm: Comm, how: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the averaged gradients, of a model in a wrapper."""
    model = build("llama", tie_word_embeddings=how == "fsdp tied")
    seqpar.parallelize(model, comm, average_over=comm.size)
    if how == "ddp":
        whole: nn.Module = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (comm.size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
    for _ in range(2):  # the second pass finds what the first one left sharded
        model.zero_grad()
        loss = whole(**batches("right", comm.size)[comm.rank]).loss
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in grads.items()}


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp tied"])
def test_wrappers_that_average(how: str) -> None:
    whole = one_process(build("llama", tie_word_embeddings=how == "fsdp tied"), batches("right", RANKS), True)
    for loss, grads in run_processes(RANKS, wrapped, how):
        assert abs(loss - float(whole.loss)) <= 1e-6 * float(whole.loss)
        assert grads.keys() == whole.grads.keys()
        for name, grad in grads.items():
            most = max(float(whole.grads[name].abs().max()), 1e-6 * largest(whole.grads))
            assert float((grad - whole.grads[name]).abs().max()) <= 1e-5 * most, name


def test_autocast_reaches_the_layers_and_the_head() -> None:
    model, every = build("llama"), batches("right", RANKS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = [float(model(**batch).loss.detach()) for batch in every]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in every]
    mean = sum(x * n for x, n in zip(expected, counts, strict=True)) / sum(counts)

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            with torch.autocast("cpu", torch.bfloat16):
                loss = own(**every[comm.rank]).loss
            loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in own.named_parameters()}

    exact = one_process(model, every, True)
    for loss, grads in run_threads(RANKS, rank):
        assert loss == pytest.approx(mean, rel=2e-2) and loss == pytest.approx(float(exact.loss), rel=2e-2)
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())


class Adapter(nn.Module):
    """Calls the forward of a model, and not the model, as adapters do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **named: Any) -> Any:
        return self.model.forward(**named)


def test_a_forward_that_is_called_directly_is_parallel_too() -> None:
    model, batch = build("llama"), batches("left", 1)[0]
    expected = float(model(**batch).loss)
    with seqpar.parallelize(model, LocalComm()):
        out = Adapter(model)(**batch)
    assert out.logits is None and float(out.loss) == pytest.approx(expected, rel=1e-6)
