"""What every verb does before and around its exchanges: agree on the call, and tell the others if it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, PeerError
from seqpar.comm.entry import entered
from seqpar.comm.header import hash63
from seqpar.plan import Plan

REMEMBERED = 4096  # signatures that a comm keeps; all ranks forget the same ones, as they see them in one order


def digest_of_call(what: str, facts: Mapping[str, object], *more: object) -> int:
    """63 bits that name a call and its arguments in every message."""
    return hash63((what, sorted((name, str(value)) for name, value in facts.items()), more))


class agreement:
    """``with agreement(what, comm) as call:`` what a rank checks inside, all ranks agree on when the block ends.

    Inside, set ``call.facts`` to what must be equal on all ranks. An error inside is raised here, and on every other
    rank a ValueError that quotes it: all before anything is sent. A rank by itself only checks.

    Ranks compare a call when they first see its facts, with ``check="call"`` always, and so they do with ``every``.
    """

    # facts: name -> value. values: what may differ from call to call, small tensors too; compared along with the facts,
    # but no reason to compare again. digest: what names the call in messages, by default that of the facts; 0 for a
    # rank by itself. keys: under which the facts are remembered, by default the digest; ranks that remember all do not
    # compare again.
    facts: Mapping[str, object] = {}
    values: Mapping[str, object] = {}
    digest = 0
    keys: Sequence[int] = ()

    def __init__(self, what: str, comm: Comm, *, every: bool = False) -> None:
        self.what, self.comm, self.every = what, comm, every

    def __enter__(self) -> agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.comm.size == 1 or not isinstance(error, (Exception, type(None))):
            return
        if error is None:
            self.digest = self.digest or digest_of_call(self.what, self.facts)
            self.keys = self.keys or (self.digest,)
            if not self.every and self.comm.check_every == "batch" and self.comm.agreed.keys() >= set(self.keys):
                return
        self._compare(error)

    def _compare(self, error: Exception | None) -> None:
        facts = self.facts if error is not None else {**self.facts, **_plain(self.values)}
        try:
            self.comm.agree(self.what, facts, error)
        except PeerError:
            if error is None:
                raise
            return  # the others went on with what they remember; this rank's own error is raised
        if not self.every:
            remember(self.comm, *self.keys)


class errors_on_all_ranks:
    """``with errors_on_all_ranks(what, comm):`` what a verb checks before it gets as far as its agreement.

    An error inside is raised here, and on every other rank as `agreement` says. While a graph is traced it is raised on
    this rank alone.
    """

    def __init__(self, what: str, comm: Comm) -> None:
        self.what, self.comm = what, comm

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not torch.compiler.is_compiling():
            check_comm(self.what, self.comm)
            self.comm.next_call()
            with agreement(self.what, self.comm):
                raise error


class gathering:
    """``with gathering(what, comm) as facts:`` where each rank sets ``facts.own``, and ``facts.every`` has all of them
    when the block ends.

    An error inside is raised here, and on every other rank a ValueError that quotes it.

    gather: of a value and an error, where they travel with something else than `Comm.gather`'s own message.
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
    """Have what these keys stand for count as agreed: on all ranks, which told each other what it follows from.

    known: what to find in ``comm.agreed`` under the keys.
    """
    if comm.size > 1:
        for key in keys:
            comm.agreed[key] = known
        while len(comm.agreed) > REMEMBERED:
            del comm.agreed[next(iter(comm.agreed))]


def plan_key(plan: Plan) -> int:
    """The key under which ranks remember that all have a plan, whatever they call under it."""
    return digest_of_call("plan", {"plan": plan.digest()})


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Values that print alike on all ranks if they are alike: of a tensor its elements."""
    plain: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            plain[f"values of {name}"] = value.detach().double().tolist()
        elif value is not None:
            plain[name] = value
    return plain


def check_comm(what: str, comm: object) -> None:
    """Return if a verb was given a comm. Without one nobody else can hear of an error.

    Raises: TypeError for anything else.
    """
    if not hasattr(comm, "exchange"):
        raise TypeError(f"{what} got {comm!r:.200} for its comm; give it a seqpar.GroupComm() or seqpar.LocalComm()")


# ``with abort_on_error(comm, what):`` a call of a comm. An error inside tells the other ranks why this one leaves it.
abort_on_error = partial(entered, aborts=True)
