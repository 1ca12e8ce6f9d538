"""Derivations of a plan's first call, made before it: steps, tile tables, and memory that one transfer uploads.

The next plan is mostly called as the last one was. So the signatures of a comm's calls are remembered, and a thread
that plans ahead makes the recipe of each, and packs all that goes to the device. The transfer itself is left to the
call: it is ordered by the call's stream.
"""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakKeyDictionary

from seqpar.comm import Comm
from seqpar.ops.attention.call import prepare, recipe_of
from seqpar.ops.attention.signature import Signature
from seqpar.plan import Plan

SIGNATURES = 4  # remembered for a comm: those of training and of evaluation

_seen: WeakKeyDictionary[Comm, OrderedDict[Signature, None]] = WeakKeyDictionary()


def note(comm: Comm, signature: Signature) -> None:
    """Remember that a plan was called so."""
    seen = _seen.setdefault(comm, OrderedDict())
    seen[signature] = None
    seen.move_to_end(signature)
    if len(seen) > SIGNATURES:
        seen.popitem(last=False)


def derive(plan: Plan, comm: Comm) -> None:
    """Derive what calls with a plan will need, if they are like earlier calls of the comm; local, in any thread."""
    for signature in list(_seen.get(comm, ())):
        try:
            recipe = plan.memo((comm.rank, signature), lambda: recipe_of(plan, comm.rank, signature))  # noqa: B023
        except (ValueError, NotImplementedError):
            continue  # the call itself will raise, on all ranks
        prepare(plan, recipe, signature)
