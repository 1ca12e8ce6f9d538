"""Random batches of every form on every rank, shared and brought back, and ranks that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from seqpar.comm import Comm
from seqpar.data import back, share
from tests.data import cases as batches
from tests.data.checks import check
from tests.fuzz.outcome import Left, World, Wrong, ends, refused

PLANNERS = ("ring", "ulysses", "2-D", "default")


@dataclass(frozen=True)
class Shared:
    """One batch for each rank. kinds: their forms."""

    seed: int
    world: World
    kinds: tuple[str, ...]
    shift: str
    planner: str
    misuse: str | None = None
    culprit: int = 0


def drawn(draw: Random, seed: int) -> Shared:
    """A random batch for every rank, mostly of one form."""
    ranks = draw.choice((1, 2, 3, 4))
    kind = draw.choice(batches.KINDS)
    kinds = tuple(draw.choice((kind, kind, kind, "none")) for _ in range(ranks))
    world = World(ranks, every=draw.choice(("call", "batch")))
    misuse = draw.choice(list(MISUSES)) if ranks > 1 and draw.random() < 0.4 else None
    shift, planner = draw.choice(("row", "document", "none")), draw.choice(PLANNERS)
    return Shared(seed, world, kinds, shift, planner, misuse, draw.randrange(ranks))


MISUSES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a list for a batch": lambda a: a | {"batch": [1, 2]},
    "a number": lambda a: a | {"batch": 3},
    "text": lambda a: a | {"batch": {"input_ids": "text"}},
    "no ids": lambda a: a | {"batch": {"labels": torch.zeros(1, 4, dtype=torch.int64)}},
    "another entry": lambda a: a | {"batch": dict(a["batch"] or {}) | {"more": torch.zeros(1)}},
    "an entry of one rank": lambda a: a | {"batch": dict(a["batch"] or {}) | {"note": "seen"}},
    "shift": lambda a: a | {"shift": "sideways"},
    "source": lambda a: a | {"source": "replicated"},
    "no source": lambda a: a | {"source": None},
    "plan": lambda a: a | {"plan": lambda lengths, ranks: None},
    "no comm": lambda a: a | {"comm": None},
    "back": lambda a: a | {"rows": 1},
    "left": lambda a: {},
}


def program(case: Shared, made: list[batches.Case], comm: Comm) -> Any:
    """A rank's share, and what comes back of it."""
    call: dict[str, Any] = {
        "batch": made[comm.rank].batch, "comm": comm, "plan": batches.PLANNERS[case.planner], "shift": case.shift,
    }  # fmt: skip
    if case.misuse is not None and comm.rank == case.culprit:
        call = MISUSES[case.misuse](call)
        if not call:
            raise Left
    more = call.pop("rows", 0)
    s = share(call.pop("batch"), call.pop("comm"), **call)
    ids = s.tensors["input_ids"]
    home = back(s, torch.cat([ids, ids[:more]]))
    return s, home, back(s, s.positions), back(s, s.tensors["weight"])


def judge(case: Shared) -> str:
    """How the case ends. Raises: Wrong."""
    made = [batches.make(kind, case.seed * 8 + n, case.shift) for n, kind in enumerate(case.kinds)]
    results = ends(case.world, lambda comm: program(case, made, comm))
    why = refused(results, by_all=case.misuse is None)
    if why is not None or any(end.value is None for end in results):
        return f"refused: {why}"
    try:
        check(made, [end.value for end in results])
    except AssertionError as error:
        raise Wrong(f"shares are not the batches: {error}") from error
    return "right"
