"""What every verb does before and around its exchanges: agree on the call, and tell the others if it fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from seqpar.comm import Comm, PeerError
from seqpar.comm.entry import entered
from seqpar.plan import Plan

REMEMBERED = 4096  # signatures that a comm keeps; all ranks forget the same ones, as they see them in one order
KINDS = 64  # of calls that are carried over to another plan


def signature(facts: Mapping[str, object], *more: object) -> int:
    """63 bits that name a call's plan and arguments in every message."""
    text = repr((sorted((name, str(value)) for name, value in facts.items()), more))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def agree_once(
    comm: Comm,
    what: str,
    facts: Mapping[str, object],
    error: Exception | None,
    *,
    values: Mapping[str, object] | None = None,
) -> int:
    """The signature of a call that all ranks make alike, 0 for one rank.

    They compare when they first see it, or always if the comm says so.

    facts: what must be equal on all ranks. error: what this rank found wrong with its own arguments. values: what may
    differ from call to call, small tensors too; compared along with the facts, but no reason to compare again.

    Raises: error here, and ValueError elsewhere; ValueError for facts that differ.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return 0
    key = signature(facts, what)
    if error is None and comm.check_every == "batch" and key in comm.agreed:
        return key
    try:
        comm.agree(what, dict(facts) | _plain(values or {} if error is None else {}), error)
    except PeerError:
        if error is None:
            raise
        raise error from None  # the others went on with what they remember; here stands why this rank did not
    _remember(comm, key, what, facts)
    return key


def note_agreed(comm: Comm, what: str, facts: Mapping[str, object]) -> int:
    """Have a call count as one that ranks agreed on, where that follows from what they told each other: on all of them.

    Returns its signature.
    """
    if comm.size == 1:
        return 0
    key = signature(facts, what)
    _remember(comm, key, what, facts)
    return key


def _remember(comm: Comm, key: int, what: str, facts: Mapping[str, object]) -> None:
    comm.agreed[key] = what, facts
    if len(comm.agreed) > REMEMBERED:
        del comm.agreed[next(iter(comm.agreed))]


def agreed_under(plan: Plan, comm: Comm) -> dict[int, None]:
    """The signatures of the calls under a plan that ranks agreed on."""
    # signatures are looked up in the comm, so that the number of one that is gone does no harm
    return plan.memo(("agreed", id(comm.agreed)), dict)  # type: ignore[no-any-return]


def agree_alike(before: Mapping[int, None], plan: Plan, comm: Comm) -> None:
    """Have calls under a plan count as agreed that ranks agreed on under another; on both plans they must agree.

    before: `agreed_under` that one.
    """
    now = agreed_under(plan, comm)
    if before is now:
        return
    for key in list(before)[-KINDS:]:
        if (known := comm.agreed.get(key)) is not None:
            what, facts = known
            now[note_agreed(comm, what, {**facts, "plan": plan.digest()})] = None


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


@contextmanager
def abort_on_error(comm: Comm, what: str) -> Iterator[None]:
    """Inside: a call of a comm. Tells the other ranks why this one leaves it, so that they do not wait in the dark."""
    try:
        with entered(comm, what):
            yield
    except BaseException as error:
        if comm.size > 1:
            comm.abort(f"{what}: {type(error).__name__}: {error}")
        raise
