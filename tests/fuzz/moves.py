"""Random moves of rows beside what they are specified to be, and ranks that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from tests.cases import LAYOUTS, make_layout
from tests.fuzz.outcome import Left, World, compare, ends, refused

DTYPES = (torch.float64, torch.float64, torch.float32, torch.int64, torch.complex128)
VERBS = ("switch", "relayout", "unshard", "fetch")


@dataclass(frozen=True)
class Move:
    """One call on every rank.

    shape: of the global tensor. dims: the one that is sharded before and, of a switch, the one after. before, after:
    elements of each rank along them, or kinds of layouts.
    """

    seed: int
    verb: str
    world: World
    shape: tuple[int, ...]
    dims: tuple[int, int]
    before: Any
    after: Any
    dtype: torch.dtype
    grad: bool
    misuse: str | None = None
    culprit: int = 0

    def whole(self) -> tuple[Tensor, Tensor]:
        """The global tensor, and the gradient of the global result."""
        g = torch.Generator().manual_seed(self.seed)
        x, dy = (torch.randint(-9, 9, self.shape, generator=g).to(self.dtype) for _ in range(2))
        return x, dy


def drawn(draw: Random, seed: int) -> Move:
    """A random call."""
    ranks = draw.choice((1, 2, 3, 4))
    verb = draw.choice(VERBS)
    shape = [draw.randint(1, 6) for _ in range(draw.randint(2, 4))]
    first, second = draw.sample(range(len(shape)), 2)
    before, after = ([draw.randint(0, 4) for _ in range(ranks)] for _ in range(2))
    if verb == "switch":
        shape[first], shape[second] = sum(before), sum(after)
    else:
        first = 0 if verb in ("relayout", "fetch") else first
        shape[first] = draw.randint(1, 20)
        before, after = draw.choice(LAYOUTS), draw.choice(LAYOUTS)
    world = World(ranks, draw.choice((0.0, 0.0005)), draw.random() < 0.5, draw.choice(("call", "batch")))
    dtype = draw.choice(DTYPES)
    grad = dtype != torch.int64 and draw.random() < 0.6
    misuse = draw.choice(list(MISUSES)) if ranks > 1 and draw.random() < 0.5 else None
    culprit = draw.randrange(ranks)
    return Move(seed, verb, world, tuple(shape), (first, second), before, after, dtype, grad, misuse, culprit)


Call = dict[str, Any]
MISUSES: dict[str, Callable[[Call], Call]] = {
    "numpy": lambda a: a | {"x": a["x"].detach().numpy()},
    "none": lambda a: a | {"x": None},
    "dtype": lambda a: a | {"x": a["x"].detach().to(torch.complex64)},
    "gradient": lambda a: (
        a
        | {
            "x": a["x"]
            .detach()
            .to(torch.promote_types(a["x"].dtype, torch.float64))
            .requires_grad_(not a["x"].requires_grad)
        }
    ),
    "scalar": lambda a: a | {"x": a["x"].detach().sum()},
    "more": lambda a: a | {"x": torch.cat([a["x"].detach(), a["x"].detach()])},
    "other dims": lambda a: a | {"x": a["x"].detach()[..., None]},
    "no comm": lambda a: a | {"comm": 3},
    "nothing": lambda a: a | {name: None for name in a if name not in ("x", "comm")},
    "text": lambda a: a | {name: "0" for name in a if name not in ("x", "comm")},
    "float": lambda a: a | {name: 0.5 for name in a if name.endswith("dim")},
    "left": lambda a: {},
}


def layouts(case: Move) -> tuple[Layout, Layout]:
    rng, tokens = np.random.default_rng(case.seed), case.shape[case.dims[0]]
    first, second = (make_layout(kind, [tokens], case.world.size, rng) for kind in (case.before, case.after))
    return first, second


def plan_of(case: Move) -> Plan:
    return Plan(Mask([case.shape[case.dims[0]]]), layouts(case)[0])


def shard_of(case: Move, x: Tensor, rank: int) -> Tensor:
    """A rank's part of the global tensor before the call."""
    if case.verb == "switch":
        return x.split(case.before, case.dims[0])[rank].clone()
    return x.index_select(case.dims[0], torch.from_numpy(layouts(case)[0].positions(rank)))


def result_of(case: Move, x: Tensor, rank: int) -> Tensor:
    """What the rank is to get, by the specification."""
    if case.verb == "switch":
        return x.split(case.after, case.dims[1])[rank]
    if case.verb == "unshard":
        return x
    if case.verb == "fetch":
        return x[plan_of(case).fetched(rank).positions]
    return x.index_select(case.dims[0], torch.from_numpy(layouts(case)[1].positions(rank)))


def program(case: Move, comm: Comm) -> dict[str, Tensor]:
    """A rank's result and gradient."""
    x, dy = case.whole()
    mine = shard_of(case, x, comm.rank).requires_grad_(case.grad)
    call: Call = {"x": mine, "comm": comm}
    first, second = case.dims
    if case.verb == "switch":
        call |= {"split_dim": second, "concat_dim": first, "sizes": (case.after, case.before)}
    elif case.verb == "relayout":
        call |= dict(zip(("src", "dst"), layouts(case), strict=True))
    else:
        call |= {"plan": plan_of(case)} | ({"dim": first} if case.verb == "unshard" else {})
    if case.misuse is not None and comm.rank == case.culprit:
        call = MISUSES[case.misuse](call)
        if not call:
            raise Left
    y = run(case.verb, call)
    if y.requires_grad:
        (y * result_of(case, dy, comm.rank)).sum().backward() if not y.is_complex() else y.backward(
            result_of(case, dy, comm.rank)
        )
    return {"y": y.detach()} | ({} if mine.grad is None else {"dx": mine.grad})


def run(verb: str, call: Call) -> Tensor:
    named = dict(call)
    x, comm = named.pop("x"), named.pop("comm")
    if verb in ("unshard", "fetch"):
        return getattr(seqpar, verb)(x, named.pop("plan"), comm, **named)
    return getattr(seqpar, verb)(x, comm, **named)


def judge(case: Move) -> str:
    """How the case ends. Raises: Wrong."""
    results = ends(case.world, lambda comm: program(case, comm))
    why = refused(results, by_all=case.misuse is None)
    if why is not None or any(end.value is None for end in results):
        return f"refused: {why}"
    x, dy = case.whole()
    if case.verb == "unshard":
        dy = dy * case.world.size
    elif case.verb == "fetch":  # a row's gradient is a sum over the ranks that fetch it
        takers = sum(np.bincount(plan_of(case).fetched(r).positions, minlength=len(x)) for r in range(case.world.size))
        dy = dy * torch.from_numpy(takers).view(-1, *[1] * (dy.dim() - 1)).to(dy.dtype)
    for rank, end in enumerate(results):
        want = {"y": result_of(case, x, rank), "dx": shard_of(case, dy, rank)}
        real = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in want.items()}
        got = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in end.value.items()}
        compare(got, real, torch.float64)
    return "right"
