"""Transformers of diffusers in wrappers that average gradients, and compiled: equal to one process, on processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import seqpar
from seqpar import Comm
from seqpar.testing import run_processes
from seqpar.train import sync_gradients
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


def compiled(comm: Comm, how: str, name: str) -> tuple[float, dict[str, Tensor], list[int], list[str]]:
    """The loss and summed gradients of a compiled model; how many graphs it has after each step, and why they end."""
    torch._dynamo.reset()
    counters.clear()
    count, graphs = CompileCounter(), list[int]()
    model, given = made(name, torch.float32)
    if how == "checkpointed":
        model.enable_gradient_checkpointing()
    if how == "blocks first":
        model.compile_repeated_blocks(backend=count)
    seqpar.parallelize(model, comm)
    if how == "model":
        model.compile(backend=count)
    elif how != "blocks first":
        model.compile_repeated_blocks(backend=count, fullgraph=how == "fullgraph")
    called = torch.compile(model, backend="eager") if how == "around" else model
    for _ in range(3):
        model.zero_grad()
        _, loss = loss_of(called, given)
        loss.backward()
        graphs.append(count.frame_count)
    sync_gradients(model.parameters(), comm)
    breaks = [str(reason) for reason in counters["graph_break"]]
    torch._dynamo.reset()
    return float(loss.detach()), whole_gradients(model), graphs, breaks


@pytest.mark.parametrize(
    ("how", "name", "attentions"),
    [
        ("blocks first", "flux", 2), ("blocks", "wan", 2), ("model", "sd3", 2), ("around", "flux", 2),
        pytest.param("blocks", "ltx2", 6, marks=pytest.mark.exhaustive), ("fullgraph", "flux", 0),
        ("checkpointed", "wan", 0),
    ],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_blocks_are_compiled_between_attentions(how: str, name: str, attentions: int) -> None:
    """attentions: of all kinds of blocks that are compiled."""
    for loss, found, graphs, breaks in run_processes(RANKS, compiled, how, name):
        same(loss, found, name)
        assert bool(graphs[0]) == bool(attentions) and graphs[0] <= 6 * attentions, "a few for each attention"
        assert graphs == graphs[:1] * 3, "and none in later steps"
        assert all("_attend" in why or "disable" in why for why in breaks), breaks


@pytest.mark.parametrize("how, name", [("ddp", "wan"), ("fsdp", "flux"), ("fsdp first", "flux")])
@pytest.mark.sampled(3)
def test_wrappers_that_average(how: str, name: str) -> None:
    for loss, found in run_processes(RANKS, wrapped, how, name):
        same(loss, found, name)


def same(loss: float, found: dict[str, Tensor], name: str) -> None:
    """Equal to what one process makes of a model."""
    model, given = made(name, torch.float32)
    _, expected = loss_of(model, given)
    expected.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert found.keys() == grads.keys()
    for key, grad in found.items():
        most = max(float(grads[key].abs().max()), 1e-4 * largest)
        assert float((grad - grads[key]).abs().max()) <= 1e-4 * most, key
