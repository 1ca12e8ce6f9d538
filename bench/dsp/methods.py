"""One model of stages, run by five methods on the same weights: DSP as planned, Ulysses, ring, Megatron, replication.

A stage is a block of attention along some dimensions of ``x [b, p, q, c]``, and an MLP of each row. Every method starts
from the whole x and ends with a share of its rows, whose loss is this rank's part of the sum.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

import seqpar
from seqpar.comm import Comm
from seqpar.dsp import Space, Stage, StagePlan, attention_plan, move, plan_stages, rivals, split, switch, switch_all
from seqpar.dsp.costs import Costs
from seqpar.plan import Plan
from seqpar.planner import Hardware

FORM = "b p q c"
METHODS = ("dsp", "ulysses", "ring", "megatron", "replicate")
MEASURED = METHODS[:-1]


@dataclass(frozen=True)
class Model:
    """Layers of one block for each of `axes`, the dimensions that it attends along: "p", "q" or "pq"."""

    name: str
    width: int
    heads: int
    layers: int
    axes: tuple[str, ...]
    ffn: int = 4  # of the MLP, times the width
    groups: int = 1  # query heads for each key head

    def stages(self, dims: dict[str, int], element: int) -> list[Stage]:
        """The stages as the planner takes them."""
        rows = math.prod(dims.values())
        size, found = rows * self.width * element, []
        for axes in self.axes:
            mixed = math.prod(dims[axis] for axis in axes)
            stage = Stage(
                axes, frozenset(axes), bytes=size, flops=2 * rows * self.width**2 * (4 + 2 * self.ffn),
                attention=4 * rows * mixed * self.width, heads=self.heads, kv_heads=self.heads // self.groups,
                qkv=(size, 2 * size / self.groups),
            )  # fmt: skip
            found.append(stage)
        return found * self.layers

    def weights(self) -> list[dict[str, Tensor]]:
        """Random weights, the same on every rank."""
        g, c = torch.Generator().manual_seed(0), self.width
        shapes = {"q": (c, c), "k": (c // self.groups, c), "v": (c // self.groups, c), "out": (c, c)}
        shapes |= {"up": (self.ffn * c, c), "down": (c, self.ffn * c)}
        make = partial(torch.randn, generator=g)
        blocks = range(self.layers * len(self.axes))
        return [{n: (make(*s) / s[-1] ** 0.5).requires_grad_() for n, s in shapes.items()} for _ in blocks]


def project(x: Tensor, weights: list[Tensor], dim: int) -> list[Tensor]:
    """Queries, keys and values [b, p, q, heads, dim]."""
    y = F.layer_norm(x, x.shape[-1:])
    return [F.linear(y, w).unflatten(-1, (-1, dim)) for w in weights]


def attend(q: Tensor, k: Tensor, v: Tensor, axes: str) -> Tensor:
    """Attention along axes of [b, p, q, heads, dim], with all their rows on this rank."""
    if not q.numel():
        return q + 0 * (k.sum() + v.sum())
    form = {"q": "(b p) h q d", "p": "(b q) h p d", "pq": "b h (p q) d"}[axes]
    grouped = q.shape[-2] != k.shape[-2]
    y = F.scaled_dot_product_attention(*(rearrange(x, f"b p q h d -> {form}") for x in (q, k, v)), enable_gqa=grouped)
    return rearrange(y, f"{form} -> b p q h d", **dict(zip("bpq", q.shape)))


def block(x: Tensor, w: dict[str, Tensor], model: Model, attention: Callable[..., Tensor]) -> Tensor:
    parts = project(x, [w["q"], w["k"], w["v"]], model.width // model.heads)
    x = x + F.linear(attention(*parts).flatten(3), w["out"])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), w["up"])), w["down"])


def by_heads(q: Tensor, k: Tensor, v: Tensor, axes: str, space: Space, held: str) -> Tensor:
    """Ulysses: queries, keys and values are traded for heads in one exchange, and the output back.

    Grouped heads go through the verb, which copies a key head only where it must.
    """
    if q.shape[3] != k.shape[3]:
        rows = attention_plan(space, FORM, (*axes,), held, ulysses=True)
        return by_plan(q, k, v, rows, space.comm)
    over = Space(space.dims | {"h": q.shape[3]}, space.comm)
    form = "b p q h d"
    q, k, v = switch_all([q, k, v], over, [form] * 3, held, "h")
    return switch(attend(q, k, v, axes), over, form, "h", held)


def by_plan(q: Tensor, k: Tensor, v: Tensor, plan: Plan, comm: Comm) -> Tensor:
    return seqpar.attention(*(x.flatten(0, 2) for x in (q, k, v)), plan, comm).view_as(q)


def planned(
    x: Tensor, model: Model, weights: list[dict[str, Tensor]], space: Space, plan: StagePlan
) -> tuple[Any, Any]:
    """The output in the plan's last layout, and that layout."""
    sharded = None
    for stage, choice, w in zip(plan.stages, plan.choices, weights, strict=True):
        (x,) = move([x], space, [FORM], sharded, choice.sharding)
        sharded = choice.sharding
        axes, held = stage.name, choice.sharding
        attention = partial(attend, axes=axes)
        if choice.mode == "ulysses":
            attention = partial(by_heads, axes=axes, space=space, held=held)
        elif choice.mode == "ring":
            rows = attention_plan(space, FORM, (*axes,), held)
            attention = partial(by_plan, plan=Plan(rows.mask, rows.layout, transport="ring"), comm=space.comm)
        x = block(x, w, model, attention)
    return x, sharded


def megatron(x: Tensor, model: Model, weights: list[dict[str, Tensor]], space: Space, held: str) -> tuple[Any, Any]:
    """Sequence parallelism beside tensor parallelism: rows gathered before each half, summed and scattered after it."""
    comm, dim = space.comm, model.width // model.heads
    groups = share(model.heads // model.groups, comm)
    kv = slice(*(n * dim for n in groups))
    inner = slice(*(n * dim * model.groups for n in groups))
    hidden = slice(*share(model.ffn * model.width, comm))
    (x,) = move([x], space, [FORM], None, held)

    def half(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        (whole,) = move([x], space, [FORM], held, None)
        at = FORM.split().index(held) + 1
        parts = seqpar.switch(
            run(whole)[None], comm, split_dim=at, concat_dim=0, sizes=(space.shares(held), [1] * comm.size)
        )
        return x + parts.sum(0)

    for stage, w in zip(model.stages(space.dims, 4), weights, strict=True):
        axes = stage.name

        def attention(y: Tensor, w: dict[str, Tensor] = w, axes: str = axes) -> Tensor:
            if groups[0] == groups[1]:
                return F.linear(y * 0, w["out"])  # part of the graph, as in the other methods
            q, k, v = project(y, [w["q"][inner], w["k"][kv], w["v"][kv]], dim)
            return F.linear(attend(q, k, v, axes).flatten(3), w["out"][:, inner])

        def mlp(y: Tensor, w: dict[str, Tensor] = w) -> Tensor:
            return F.linear(F.gelu(F.linear(F.layer_norm(y, y.shape[-1:]), w["up"][hidden])), w["down"][:, hidden])

        x = half(half(x, attention), mlp)
    return x, held


def share(size: int, comm: Comm) -> tuple[int, int]:
    return comm.rank * size // comm.size, (comm.rank + 1) * size // comm.size


def ways(
    model: Model, dims: dict[str, int], ranks: int, hardware: Hardware, element: int, cores: Sequence[int] | None = (1,)
) -> dict[str, StagePlan]:
    """The plans of the methods that have one, from whole to whole, but for those that cannot run. cores: of grids."""
    stages = model.stages(dims, element)
    found = rivals(stages, dims, ranks, hardware=hardware)
    found = {name: plan for name, plan in found.items() if name != "dsp"}
    return {"dsp": plan_stages(stages, dims, ranks, hardware=hardware, cores=(1,))} | found


def megatron_seconds(model: Model, costs: Costs, element: int) -> float:
    """Predicted seconds of Megatron's method: two gathers and two scatters a stage, work split by heads and columns."""
    wire = costs.exchange(1 - 1 / costs.ranks, 1) if costs.ranks > 1 else costs.exchange(0.0, 0)
    total = 0.0
    for stage in model.stages(dict(costs.dims), element):
        heads = -(-model.heads // costs.ranks) / model.heads
        total += (
            4 * wire.seconds(stage.bytes)
            + costs.linear_seconds(stage) / costs.ranks
            + heads * costs.attention_seconds(stage)
        )
    return total


def measured(
    comm: Comm, model: Model, dims: dict[str, int], hardware: Hardware, repeat: int, methods: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """This rank's figures by method: seconds of each step, bytes and messages of one step, and its part of the loss.

    A method whose plan is that of "dsp" has its figures: a second run would only show the machine's noise.
    """
    torch.set_num_threads(1)
    space, weights = Space(dims, comm), model.weights()
    plans = ways(model, dims, comm.size, hardware, 4)
    g = torch.Generator().manual_seed(1)
    shape = [*dims.values(), model.width]
    x, target = (torch.randn(shape, generator=g) for _ in range(2))
    held = "q" if dims["q"] >= dims["p"] else "p"
    runs: dict[str, Callable[[], tuple[Tensor, Any]]] = {
        name: partial(planned, x, model, weights, space, plan) for name, plan in plans.items()
    }
    runs["megatron"] = partial(megatron, x, model, weights, space, held)
    same = [name for name, plan in plans.items() if plan.choices == plans["dsp"].choices and name != "dsp"]
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "waits": []} for name in methods if name in runs and name not in same
    }
    for turn in range(repeat + 1):
        # every method goes first equally often
        for name in list(found) if turn % 2 else reversed(found):
            row = found[name]
            comm.gather("a turn", turn)
            comm.stats.reset()
            started = time.perf_counter()
            loss = step(runs[name], target, space)
            took = time.perf_counter() - started
            if turn:  # the first fills caches
                row["seconds"].append(took)
                row["waits"].append(comm.stats.wait_seconds)
            counts = comm.stats
            row |= {"bytes": counts.bytes_sent, "messages": counts.messages_sent, "exchanges": counts.exchanges}
            row["loss"] = loss
    for name, plan in plans.items():
        if name in found:
            found[name]["layouts"] = " ".join(f"{c.sharding or 'whole'}:{c.mode}" for c in plan.choices)
    return found | {name: found["dsp"] for name in same if name in methods}


def step(run: Callable[[], tuple[Tensor, Any]], target: Tensor, space: Space) -> float:
    out, layout = run()
    mine = target if layout is None else split(target, space, FORM, layout)
    loss = (out * mine).sum() / (space.comm.size if layout is None else 1)
    loss.backward()
    return float(loss.detach())


def slowest(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The figures by method: the median step of the slowest rank, its share of waiting, totals, and the loss."""
    rows = {}
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        steps = [max(turn) for turn in zip(*(rank["seconds"] for rank in each))]
        waits = [statistics.median(rank["waits"]) for rank in each]
        rows[name] = {
            "seconds": statistics.median(steps), "waiting": statistics.mean(waits) / statistics.median(steps),
            "bytes": max(rank["bytes"] for rank in each), "messages": max(rank["messages"] for rank in each),
            "exchanges": max(rank["exchanges"] for rank in each), "loss": math.fsum(rank["loss"] for rank in each),
            "layouts": each[0].get("layouts", ""),
        }  # fmt: skip
    return rows
