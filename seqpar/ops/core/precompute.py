"""Work that a plan's first calls would do, done in advance: recipes of attention, tables of recurrent layers.

The next plan is mostly called as the last one was. So a comm remembers what its recent calls derived from their plan,
and the thread that makes the next plan derives the same from it. Transfers to a device are left to the call: they are
ordered by its stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from seqpar.comm import Comm
from seqpar.plan import Plan


class RecentCalls:
    """The last calls of each comm, up to `most`: what each derived from its plan."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: WeakKeyDictionary[Comm, OrderedDict[tuple[Callable[..., Any], tuple[Any, ...]], None]]
        self._of = WeakKeyDictionary()

    def note(self, comm: Comm, derive: Callable[..., Any], *arguments: Any) -> None:
        """Remember that a call has taken ``derive(plan, rank, *arguments)``, which the plan caches."""
        seen = self._of.setdefault(comm, OrderedDict())
        call = derive, arguments
        seen[call] = None
        seen.move_to_end(call)
        if len(seen) > self.most:
            seen.popitem(last=False)

    def derive(self, plan: Plan, comm: Comm) -> None:
        """Derive what calls with a plan will need, if they are like earlier ones of the comm; local, in any thread."""
        for derive, arguments in list(self._of.get(comm, ())):
            with suppress(ValueError, NotImplementedError):  # the call itself will raise, on all ranks
                derive(plan, comm.rank, *arguments)


recent_attention = RecentCalls(4)  # of training and of evaluation
recent_recurrent = RecentCalls(16)  # the same of all kinds of layers
