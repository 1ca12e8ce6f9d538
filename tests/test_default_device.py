"""`torch.set_default_device` and `torch.set_default_dtype` change no result: tensors name their device and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.data import share
from seqpar.testing import run_processes, run_threads
from seqpar.train import all_sum, clip_grad_norm, linear_cross_entropy, sync_gradients, token_mean

LENGTHS = [30, 13, 21]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)


def attention(comm: Comm, transport: str, ulysses: int, dtype: torch.dtype) -> list[Tensor]:
    plan = seqpar.Plan(
        seqpar.Mask(LENGTHS), seqpar.Layout.zigzag(LENGTHS, comm.size), transport=transport, ulysses=ulysses
    )
    own = [seqpar.shard(drawn(64, heads, 16).to(dtype), plan, comm.rank) for heads in (4, 2, 2)]
    leaves = [x.detach().requires_grad_() for x in own]
    slopes, sinks = drawn(4).abs(), drawn(4).to(dtype).requires_grad_()
    out = seqpar.attention(*leaves, plan, comm, sinks=sinks, alibi_slopes=slopes, dropout_p=0.1, dropout_seed=3)
    out.backward(own[0])
    return [seqpar.unshard(x, plan, comm) for x in (out.detach(), *(x.grad for x in leaves))] + [sinks.grad]


def recurrences(comm: Comm) -> list[Tensor]:
    plan = seqpar.Plan(seqpar.Mask(LENGTHS), seqpar.Layout.contiguous(sum(LENGTHS), comm.size))
    q, k, v = (seqpar.shard(drawn(64, heads, 16), plan, comm.rank).requires_grad_() for heads in (2, 2, 2))
    mixed = recurrent.causal_conv1d(q.flatten(1), drawn(32, 4), None, plan, comm)
    beta = seqpar.shard(drawn(64, 2), plan, comm.rank).sigmoid()
    out = recurrent.linear_attention(mixed.view_as(q), k, v, plan, comm, beta=beta)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def training(comm: Comm) -> list[Tensor]:
    batch = share(
        {
            "input_ids": [torch.arange(n, device="cpu") % 50 for n in LENGTHS],
            "labels": [torch.arange(n, device="cpu") % 50 for n in LENGTHS],
        },
        comm,
    )
    hidden, weight = drawn(len(batch.tensors["labels"]), 8).requires_grad_(), drawn(50, 8).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, batch.tensors["labels"], valid=batch.valid)
    loss.backward()
    module = nn.Linear(8, 3, device="cpu", dtype=torch.float32)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    module(hidden.detach()).sum().backward()
    sync_gradients(module.parameters(), comm)
    norm = clip_grad_norm(module.parameters(), 1.0)
    many = all_sum(drawn(600_000), comm)  # by a collective of gloo
    return [loss.detach(), hidden.grad, weight.grad, module.weight.grad, norm, many, token_mean(hidden.detach(), comm)]


def everything(comm: Comm) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for transport in ("ring", "fetch", "gather"):
        for ulysses in (1, comm.size):
            for dtype in (torch.float32, torch.bfloat16):
                found[f"{transport} {ulysses} {dtype}"] = attention(comm, transport, ulysses, dtype)
    found["recurrences"] = recurrences(comm)
    found["training"] = training(comm)
    found["switch"] = [seqpar.switch(drawn(4, 6), comm, split_dim=1, concat_dim=0)]
    comm.agree("a test", {"value": 1})
    found["gather"] = [torch.tensor(comm.gather("a test", list(range(3000))), device="cpu")]  # more than one message
    return found


def on_a_rank(comm: Comm) -> tuple[dict[str, list[Tensor]], ...]:
    """Everything as ever, with another default device, and with another default dtype."""
    as_ever = everything(comm)
    try:
        torch.set_default_device("meta")
        elsewhere = everything(comm)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float64)
        return as_ever, elsewhere, everything(comm)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def check(ranks: list[Any]) -> None:
    for as_ever, *others in ranks:
        for other in others:
            for name, tensors in as_ever.items():
                for got, expected in zip(other[name], tensors, strict=True):
                    assert torch.equal(got, expected), name


@pytest.mark.parametrize("comm", ["gloo", "shm"])
def test_defaults_of_a_process_change_nothing(comm: str) -> None:
    check(run_processes(2, on_a_rank, comm=comm))


def test_defaults_change_nothing_on_one_rank() -> None:
    check(run_threads(1, on_a_rank))
