"""A check of slice `correct`: what users call besides attention, on ranks that share the device and on the CPU.

Ranks are threads. Outputs and gradients in float32 are compared with those of the same call, ranks and inputs on the
CPU, which the tests hold to float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from bench.gpu.calls import verdict
from bench.gpu.machine import Machine, unable
from bench.gpu.rows import Row
from seqpar import data, dsp, recurrent, train
from seqpar.comm import Comm
from seqpar.testing import relative_rms, run_threads

LENGTHS = (300, 1, 70, 129)
HEADS, DIM, VOCABULARY = 3, 16, 50
RANKS = (1, 2, 3)
TOLERANCE = 2e-5
Tensors = list[Tensor]
Call = Callable[[Comm, torch.device], Tensors]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planned(ranks: int) -> seqpar.Plan:
    """Documents over ranks."""
    return seqpar.Plan(seqpar.Mask(LENGTHS), seqpar.Layout.zigzag(LENGTHS, ranks), transport="ring")


def rows_of(comm: Comm, device: torch.device, *widths: tuple[int, ...]) -> tuple[seqpar.Plan, Tensors]:
    """A plan, and this rank's rows of a leaf for each shape of a row."""
    plan = planned(comm.size)
    whole = [drawn(sum(LENGTHS), *width, seed=n) for n, width in enumerate(widths)]
    return plan, [seqpar.shard(x, plan, comm.rank).to(device).requires_grad_() for x in whole]


def graded(out: Tensor, leaves: Tensors) -> Tensors:
    """out, and the gradients of a sum of it in which all elements have other weights."""
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def of_rows(verb: Callable[..., Tensor], *widths: tuple[int, ...]) -> Call:
    """A call of a verb with this rank's rows, a plan and a comm."""

    def call(comm: Comm, device: torch.device) -> Tensors:
        plan, leaves = rows_of(comm, device, *widths)
        return graded(verb(*leaves, plan, comm), leaves)

    return call


def linear(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, plan: seqpar.Plan, comm: Comm) -> Any:
    """The gated delta rule."""
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    return recurrent.linear_attention(q, k, v, plan, comm, decay=-decay.exp(), beta=beta.sigmoid())


def state_space(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, plan: seqpar.Plan, comm: Comm) -> Any:
    """A state space with a decay for each head."""
    return recurrent.linear_attention(q, k, v, plan, comm, decay=-decay.exp())


def channels(update: Tensor, decay: Tensor, plan: seqpar.Plan, comm: Comm) -> Any:
    """A scan of channels."""
    return recurrent.channel_scan(update, -decay.exp(), plan, comm)


def convolved(x: Tensor, plan: seqpar.Plan, comm: Comm) -> Tensor:
    """A short convolution."""
    weight = drawn(x.shape[1], 4, seed=9).to(x.device)
    return recurrent.causal_conv1d(x, weight, None, plan, comm, activation="silu")


def switched(comm: Comm, device: torch.device) -> Tensors:
    """Rows for channels."""
    x = drawn(7, 42, 12).tensor_split(comm.size, 1)[comm.rank].to(device).requires_grad_()
    return graded(seqpar.switch(x, comm, split_dim=2, concat_dim=1), [x])


def laid_out(x: Tensor, plan: seqpar.Plan, comm: Comm) -> Tensor:
    """Rows of another layout."""
    return seqpar.relayout(x, comm, src=plan.layout, dst=seqpar.Layout.contiguous(sum(LENGTHS), comm.size))


def trained(comm: Comm, device: torch.device) -> Tensors:
    """A loss in chunks, log-probabilities, means, and gradients that are summed and clipped."""
    plan, (hidden,) = rows_of(comm, device, (DIM,))
    weight = drawn(VOCABULARY, DIM, seed=5).to(device).requires_grad_()
    labels = seqpar.shard(torch.arange(sum(LENGTHS)) % VOCABULARY, plan, comm.rank).to(device)
    loss = train.linear_cross_entropy(hidden, weight, labels, valid=sum(LENGTHS), chunk=64)
    log_probs, entropy = train.token_log_probs(hidden, weight, labels, entropy=True, chunk=64)
    (loss + (log_probs * 0.01).sum() + train.token_mean(hidden, comm).sum() + entropy.sum() * 0.01).backward()
    train.sync_gradients([weight], comm)
    norm = train.clip_grad_norm([weight], 0.5)
    found = [train.all_sum(loss.detach(), comm), log_probs, entropy, norm]
    return found + [x.grad for x in (hidden, weight) if x.grad is not None]


def shared(comm: Comm, device: torch.device) -> Tensors:
    """A padded batch of each rank, its share, and results that return to it."""
    ids = torch.arange(1, 41).reshape(2, 20).to(device) + 40 * comm.rank
    mask = torch.arange(20, device=device) < torch.tensor([[20 - comm.rank], [7]], device=device)
    batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    one = data.share(batch, comm)
    home = data.back(one, one.tensors["input_ids"].float())
    return [one.tensors["input_ids"], one.tensors["labels"], *([home] if isinstance(home, Tensor) else home)]


class Along(nn.Module):
    """Attention along dimension 2 of x [batch, other, mixed, channels]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """x of the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, DIM // 2)).movedim(-3, 0).transpose(-2, -3)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Video(nn.Module):
    """Attention over space, then over time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.space, self.time, self.leave = nn.Linear(4, DIM), Along(), Along(), nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[batch, time, space, 4]`` of the same shape."""
        x = self.space(self.enter(x))
        return self.leave(self.time(x.transpose(1, 2)).transpose(1, 2))


ANY = ("b", "t", "s", None)
VIDEO = dsp.Spec(
    model="Video",
    dims=lambda model, given: dict(zip("bts", given["x"].shape)),
    blocks=(
        dsp.Block("space", {"x": "b t s c"}, whole=("s",), rest=ANY),
        dsp.Block("time", {"x": "b s t c"}, whole=("t",), rest=ANY),
    ),
    exit=dsp.Exit("leave", "b t s c", rest=ANY),
    outside=("enter",),
)


def video(comm: Comm, device: torch.device) -> Tensors:
    """A model whose stages shard other dimensions."""
    model = Video()
    with torch.no_grad():
        for n, weight in enumerate(model.parameters()):
            weight.copy_(drawn(*weight.shape, seed=n) * 0.2)
    model.to(device)
    dsp.parallelize(model, comm, VIDEO)
    out = model(drawn(1, 7, 30, 4).to(device))
    out.square().mean().backward()
    train.sync_gradients(model.parameters(), comm)
    return [out, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


HEAD, ROW = (HEADS, DIM), (HEADS,)
CALLS: dict[str, Call] = {
    "linear_attention, gated delta rule": of_rows(linear, HEAD, HEAD, HEAD, ROW, ROW),
    "linear_attention, state space": of_rows(state_space, HEAD, HEAD, HEAD, ROW),
    "channel_scan": of_rows(channels, (DIM,), (DIM,)),
    "causal_conv1d": of_rows(convolved, (DIM,)),
    "shift": of_rows(recurrent.shift, (DIM,)),
    "halo": of_rows(partial(recurrent.halo, reach=3), (DIM,)),
    "fetch": of_rows(seqpar.fetch, (DIM,)),
    "relayout": of_rows(laid_out, (DIM,)),
    "unshard": of_rows(seqpar.unshard, (DIM,)),
    "switch": switched,
    "train": trained,
    "data.share and back": shared,
    "dsp.parallelize": video,
}


def verbs(machine: Machine) -> Iterator[Row]:
    """The rows of all calls."""
    for name, call in CALLS.items():
        yield {"kernel": "auto", "mode": "check", "what": name, "baseline": "the CPU", **_attempted(machine, call)}


def _attempted(machine: Machine, call: Call) -> Row:
    try:
        return _compared(machine, call)
    except Exception as error:
        machine.wait()
        return unable(error)


def _compared(machine: Machine, call: Call) -> Row:
    errors: dict[str, float] = {}
    for ranks in RANKS:
        want, got = (run_threads(ranks, call, device) for device in (torch.device("cpu"), machine.device))
        for rank, (these, those) in enumerate(zip(want, got)):
            for n, (a, b) in enumerate(zip(these, those, strict=True)):
                if a.dtype != b.dtype or a.shape != b.shape or b.device.type != machine.device.type:
                    kinds = [f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (a, b)]
                    raise TypeError(f"result {n} of rank {rank} of {ranks} is {kinds[1]}, where the CPU has {kinds[0]}")
                error = relative_rms(b.detach().cpu(), a.detach()) if a.numel() else 0.0
                errors[f"{ranks} ranks, rank {rank}, result {n}"] = error
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    off = verdict({worst: errors[worst]}, TOLERANCE)
    row: Row = {"ok": not off, "errors": {worst: errors[worst]}, "ratio": errors[worst] / TOLERANCE}
    return row | ({"refused": off} if off else {})
