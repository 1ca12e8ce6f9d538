"""Tables of a plan's first recurrent calls, made before them: who sends what, and where rows of runs lie.

The next plan is mostly called as the last one was (see `seqpar.ops.attention.ahead`). So what each verb derives from a
plan is remembered for a comm, and a thread that plans ahead derives the same. Transfers to a device are left to the
call: they are ordered by its stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from seqpar.comm import Comm
from seqpar.plan import Plan

CALLS = 16  # remembered for a comm: those of all kinds of layers, of training and of evaluation

_seen: WeakKeyDictionary[Comm, OrderedDict[tuple[Callable[..., Any], tuple[Any, ...]], None]] = WeakKeyDictionary()


def note(comm: Comm, tables: Callable[..., Any], *arguments: Any) -> None:
    """Remember that a call has taken ``tables(plan, rank, *arguments)``, which the plan caches."""
    seen = _seen.setdefault(comm, OrderedDict())
    call = tables, arguments
    seen[call] = None
    seen.move_to_end(call)
    if len(seen) > CALLS:
        seen.popitem(last=False)


def derive(plan: Plan, comm: Comm) -> None:
    """Derive what calls with a plan will need, if they are like earlier calls of the comm; local, in any thread."""
    for tables, arguments in list(_seen.get(comm, ())):
        with suppress(ValueError, NotImplementedError):  # the call itself will raise, on all ranks
            tables(plan, comm.rank, *arguments)
