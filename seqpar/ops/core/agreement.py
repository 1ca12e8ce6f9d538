"""Around every verb's exchanges: ranks agree on the call first, and report a failure to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from seqpar.comm import Comm, PeerError
from seqpar.comm.entry import entered, refuse_transforms
from seqpar.comm.header import hash63
from seqpar.facts.mask import Mask
from seqpar.ops.core.compared import UNDER_WAY, comparable, due, overdue
from seqpar.plan import Plan

REMEMBERED = 4096  # signatures that a comm keeps; all ranks forget the same ones, since they see them in the same order


def digest_of_call(what: str, facts: Mapping[str, object], *more: object) -> int:
    """63 bits that name a call and its arguments in every message."""
    return hash63((what, sorted((name, str(value)) for name, value in facts.items()), more))


class agreement:
    """``with agreement(what, comm) as call:`` all ranks agree, at the end of the block, on what each has checked in it.

    Inside, set ``call.facts`` to the facts that must be equal on all ranks. An error inside is raised on this rank, and
    ValueError quoting it on every other rank, before anything is sent. A single rank only checks.

    Ranks compare a call when its facts are new, or always with ``check="call"`` or ``every``.
    """

    # facts: name -> value. values: may differ from call to call, small tensors included; compared along with the facts,
    # but no reason to compare again. digest: names the call in messages, by default the facts' digest; 0 for a single
    # rank. keys: under which the facts are remembered, by default the digest; ranks that remember all keys do not
    # compare again.
    facts: Mapping[str, object] = {}
    values: Mapping[str, object] = {}
    digest = 0
    keys: Sequence[int] = ()

    def __init__(self, what: str, comm: Comm, *, every: bool = False) -> None:
        self.what, self.comm, self.every = what, comm, every

    def __enter__(self) -> agreement:
        return self

    def of(self, owner: Any, facts: Mapping[str, object], *, apart: bool = False) -> None:
        """Set the facts, and their digest, which the owner, a plan or a layout, caches.

        apart: ranks that have compared the plan, and such a call under another one, need not compare them together.
        """
        self.facts = facts
        if self.comm.size > 1:
            key = self.what, *facts.values()
            self.digest = owner.memo(key, lambda: digest_of_call(self.what, facts))
            if apart:
                self.keys = owner.memo(("keys", key), lambda: plan_and_call_keys(self.what, owner, facts))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.comm.size == 1 or not isinstance(error, (Exception, type(None))):
            return
        if error is None:
            self.digest = self.digest or digest_of_call(self.what, self.facts)
            self.keys = self.keys or (self.digest,)
            known = not self.every and self.comm.check_every == "batch" and self.comm.agreed.keys() >= set(self.keys)
            if known and not (UNDER_WAY in self.comm.agreed and overdue(self.comm)):
                return
        self._compare(error)

    def _compare(self, error: Exception | None) -> None:
        if error is None:
            at_once = self.every or self.comm.check_every == "call"
            facts = {**self.facts, **comparable(self.what, self.values, self.comm, at_once=at_once)}
        else:
            facts = self.facts
            due(self.comm)  # other ranks compare these now
        try:
            self.comm.agree(self.what, facts, error)
        except PeerError:
            if error is None:
                raise
            return  # the other ranks rely on what they remember; this rank's own error is raised
        if not self.every:
            remember(self.comm, *self.keys)


class errors_on_all_ranks:
    """``with errors_on_all_ranks(what, comm):`` an error of a verb's local checks reaches all ranks.

    It is raised on this rank, and quoted on every other, as in `agreement`. While a graph is traced it is
    raised on this rank alone, as is that of a transform of `torch.func`.
    """

    def __init__(self, what: str, comm: Comm) -> None:
        self.what, self.comm = what, comm

    def __enter__(self) -> None:
        refuse_transforms(self.what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not torch.compiler.is_compiling():
            check_comm(self.what, self.comm)
            with agreement(self.what, self.comm):
                raise error


class gathering:
    """``with gathering(what, comm) as facts:`` each rank sets ``facts.own``; the block fills ``facts.every``.

    An error inside is raised on this rank, and ValueError quoting it on every other rank.

    gather: (value, error) -> every rank's value, if they do not go in a message of `Comm.gather`.
    """

    own: Any = None
    every: Sequence[Any] = ()

    def __init__(
        self, what: str, comm: Comm, gather: Callable[[Any, Exception | None], Sequence[Any]] | None = None
    ) -> None:
        self._gather = partial(comm.gather, what) if gather is None else gather

    def __enter__(self) -> gathering:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (Exception, type(None))):
            self.every = self._gather(self.own, error)


def remember(comm: Comm, *keys: int, known: object = True) -> None:
    """Count the call behind these keys as agreed, on all ranks: it follows from facts that they have exchanged.

    known: the value to store in ``comm.agreed`` under the keys.
    """
    if comm.size > 1:
        for key in keys:
            comm.agreed[key] = known
        while len(comm.agreed) > REMEMBERED:
            del comm.agreed[next(iter(comm.agreed))]


class PlanFact(str):
    """A plan as a fact: its digest; messages describe the plan in words. Keeps no plan alive."""

    mask: Mask
    ranks: int

    def __repr__(self) -> str:
        lengths = ", ".join(map(str, self.mask.lengths[:8])) + (", ..." if len(self.mask.lengths) > 8 else "")
        return f"{self.mask!r} of lengths {lengths} on {self.ranks} ranks, plan {self[:16]}"


def plan_fact(plan: Plan) -> PlanFact:
    """A plan as ranks compare it; cached."""
    return plan.memo("fact", lambda: _plan_fact(plan))  # type: ignore[no-any-return]


def _plan_fact(plan: Plan) -> PlanFact:
    fact = PlanFact(plan.digest())
    fact.mask, fact.ranks = plan.mask, plan.ranks
    return fact


def plan_key(plan: Plan) -> int:
    """The key under which ranks remember that all have this plan, for any call."""
    return digest_of_call("plan", {"plan": plan.digest()})


def plan_and_call_keys(what: str, plan: Plan, facts: Mapping[str, object]) -> tuple[int, int]:
    """The keys of a call under a plan, one for each: ranks that have compared both need not compare them together."""
    return plan_key(plan), digest_of_call(what, {name: value for name, value in facts.items() if name != "plan"})


def check_comm(what: str, comm: object) -> None:
    """Raise TypeError unless a verb got a comm: without one, no other rank can hear of the error."""
    if not hasattr(comm, "exchange"):
        raise TypeError(f"{what} got {comm!r:.200} for its comm; give it a seqpar.GroupComm() or seqpar.LocalComm()")


def check_ranks(plan: Plan, comm: Comm) -> None:
    """Raise ValueError unless the plan is for the comm's ranks."""
    if plan.ranks != comm.size:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, the comm has {comm.size}; make the plan for the comm's ranks"
        )


# ``with abort_on_error(comm, what):`` a call of a comm. An error inside tells the other ranks why this one leaves it.
abort_on_error = partial(entered, aborts=True)
