"""What every transport of bytes promises: the exchange, its order, its errors.

An exchange is a global step. What rank ``r`` posts under tag ``t`` is matched with what its peers post under the same
tag ``t``; a rank that has nothing to send or receive under a tag posts nothing and takes nothing from the others'
numbering, since the tag is data and not a counter of the backend. Spec over all ranks, with ``sends[r][p]`` the
tensors rank ``r`` posts for peer ``p``::

    after wait():  recvs[r][p][i][...] == sends[p][r][i]      for all r, p, i

    rank 0   sends {1: [a]}          recvs {2: [x]}      x <- c
    rank 1   sends {2: [b]}          recvs {0: [y]}      y <- a
    rank 2   sends {0: [c]}          recvs {1: [z]}      z <- b

The adjoint of an exchange is the exchange with the roles swapped, the receiver adding to what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from seqpar import native
from seqpar.comm.entry import ThreadEntry

DIMS = native.DIMS  # of a tensor that is exchanged and not contiguous
MESSAGES_PER_EXCHANGE = 64  # sends and receives together; a larger exchange is split by `rounds`


DEAD = "; the comm is dead"
NO_FACTS: Mapping[str, object] = MappingProxyType({})


class PeerError(RuntimeError):
    """A rank died, never sent, sent something else, or gave up. The comm is dead afterwards and every verb says so."""

    @classmethod
    def quoting(cls, rank: int, doing: str, first: int, reason: str) -> PeerError:
        """The error of `rank`, busy `doing`, that quotes the root cause: `reason`, which rank `first` wrote."""
        own = f" {doing}; root cause: rank {first}" if first != rank else ""
        # a reason that says what to do says so last, and that the comm is dead before
        return cls(f"rank {rank}{own}: {reason}{'' if DEAD in reason else DEAD}")


class Tag(NamedTuple):
    """The number of an exchange: equal on every rank that takes part in it.

    digest: 63 bits of the plan and of the call's signature; call: the verb's number on this comm (`Comm.next_call`);
    phase: which part of the verb (forward, backward, ...); stage: the step inside the phase. name: the verb and the
    phase in words, for errors; it does not travel.
    """

    digest: int
    call: int
    phase: int
    stage: int
    name: str = ""

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What sender and receiver have in common."""
        return self[:4]

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}, call {self.call} stage {self.stage}"
        return f"call {self.call} phase {self.phase} stage {self.stage} with plan {self.digest:x}"


@dataclass
class Stats:
    """Payload counted since the last `reset`: bytes, messages and exchanges posted, and seconds spent in waits.

    staged_bytes: those of the received that were copied once more, since peers cannot write where they belong.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    exchanges: int = 0
    staged_bytes: int = 0
    wait_seconds: float = 0.0
    sent_to: dict[int, int] = field(default_factory=dict)  # peer -> bytes

    def reset(self) -> None:
        """Set every count to zero."""
        self.__init__()  # type: ignore[misc]

    def count(self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]]) -> None:
        """Add one exchange."""
        self.exchanges += 1
        for peer, tensors in sends.items():
            size = sum([x.nbytes for x in tensors])
            self.bytes_sent += size
            self.messages_sent += len(tensors)
            self.sent_to[peer] = self.sent_to.get(peer, 0) + size
        for tensors in recvs.values():
            self.bytes_received += sum([x.nbytes for x in tensors])
            self.messages_received += len(tensors)


class Work(Protocol):
    """An exchange under way. It owns every tensor of the exchange until `wait` returns."""

    def wait(self) -> None:
        """Return when all received tensors hold their data and all sent ones may be written again.

        On CUDA this orders the current stream and returns at once. Dropping a work without waiting is an error: it
        marks the comm dead.

        Raises: PeerError, naming the rank waited for, the tag, and the group's root cause.
        """
        ...


@runtime_checkable
class Comm(Protocol):
    """A communicator: this rank's end of a fixed set of ranks.

    Ranks match calls by their order, so every rank makes the same calls in one order, and one thread at a time is
    inside a comm and its subs. What differs between ranks is an error where it can be told apart: another verb, plan,
    option, shape or dtype, a call that one rank leaves out, and a second thread while a call runs. Calls of one form
    cannot always be told apart: where one rank computes ``f(x), f(y)`` and another ``f(y), f(x)`` with equal shapes and
    plans, or two threads of a rank take turns in another order than elsewhere, x meets y and nothing shows it.
    """

    rank: int
    size: int
    stats: Stats
    direct: bool  # whether tensors of any strides travel from where they lie to where they belong in one copy
    check_every: str  # "batch": verbs compare a signature over ranks when they first see it; "call": every time
    entry: ThreadEntry  # of threads, one at a time
    agreed: dict[int, object]  # what ranks agreed on, by keys of 63 bits -> what a verb keeps with it

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """Post one exchange and return without blocking.

        sends, recvs: peer -> tensors of any dtype, contiguous unless the comm is `direct` and they have at most
        `DIMS` dims; empty tensors are dropped, never posted. Peers exclude the rank itself. Both sides give the same
        number of tensors, shapes and dtypes for a pair.

        Raises: ValueError for a peer outside the comm or a non-contiguous tensor; PeerError if the comm is dead.
        """
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory that peers can write directly where the transport has such memory."""
        ...

    def sub(self, ranks: Sequence[int]) -> Comm:
        """The same comm seen by some of its ranks, renumbered in the given order: no group is made, nothing is sent.

        Every one of `ranks` calls it; this rank is one of them.
        """
        ...

    def warm_up(self, peers: Sequence[int]) -> None:
        """Open the connections to peers, so that the first exchange does not pay for it. Called by all of them."""
        ...

    def check(self) -> None:
        """Raise PeerError if this comm is dead, else return."""
        ...

    def next_call(self) -> int:
        """The number of the verb that starts now: local, equal on all ranks, as all run the verbs in one order."""
        ...

    def agree(self, what: str, facts: Mapping[str, object], error: Exception | None = None) -> None:
        """Return if every rank gave equal facts and no error; otherwise raise on every rank. A collective.

        what: the call, for the message. facts: name -> value, compared by `repr`. error: what this rank alone found
        wrong with its own arguments; it raises that here and ValueError, quoting it, everywhere else.

        Raises: ValueError saying which rank differs, in which fact, and both values; PeerError after the timeout.
        """
        ...

    def gather(
        self, what: str, value: Any, error: Exception | None = None, *, facts: Mapping[str, object] = NO_FACTS
    ) -> list[Any]:
        """Every rank's value, by rank, on every rank. A collective over the CPU channel, for facts and not for tensors.

        what: the call, for messages. value: anything small that pickles. error: what this rank found wrong instead.
        facts: what must be equal besides, as of `agree`, which this is at once.

        Raises: the error here, and ValueError quoting it on every other rank; ValueError if ranks are in different
        calls or differ in a fact; PeerError after the timeout.
        """
        ...

    def abort(self, reason: str) -> None:
        """Write (rank, reason) where peers read the root cause, unless one stands there, and mark this comm dead."""
        ...


def rounds(
    rank: int, size: int, tensors: Mapping[int, Sequence[Tensor]], *, sending: bool
) -> dict[tuple[int, int], dict[int, list[Tensor]]]:
    """One side of an exchange, round -> peer -> tensors, at most `MESSAGES_PER_EXCHANGE` messages a round, none empty.

    A message goes by its offset ``(receiver - sender) mod size`` and its index in the pair's list, both of which
    sender and receiver know, so all ranks cut alike without talking: a round is a block of offsets and of indices.
    """
    half = MESSAGES_PER_EXCHANGE // 2
    per_peer = max(1, half // max(1, min(size - 1, half)))
    by_round: dict[tuple[int, int], dict[int, list[Tensor]]] = {}
    for peer in sorted(tensors):
        offset = (peer - rank if sending else rank - peer) % size
        for index, tensor in enumerate(tensors[peer]):
            if tensor.numel():
                key = ((offset - 1) // half, index // per_peer)
                by_round.setdefault(key, {}).setdefault(peer, []).append(tensor)
    return by_round


class Sides(NamedTuple):
    """Both sides of an exchange, peer -> tensors that hold something, and the devices of all tensors."""

    sends: dict[int, list[Tensor]]
    recvs: dict[int, list[Tensor]]
    devices: set[torch.device]


def checked_sides(
    rank: int, ranks: Sequence[int], sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *,
    direct: bool = False,
) -> Sides:  # fmt: skip
    """The sides of an exchange of a comm, by the numbers of peers in the group, without peers left with nothing.

    rank: this one in the comm. ranks: the comm's, in the group.

    Raises: ValueError for a peer that is not another rank of the comm, or a tensor that is not contiguous and, if the
    comm is direct, has more than `DIMS` dims.
    """
    checked = Sides({}, {}, set())
    for side, tensors, sending in ((checked.sends, sends, True), (checked.recvs, recvs, False)):
        for peer, several in tensors.items():
            if not 0 <= peer < len(ranks) or peer == rank:
                where = "send to" if sending else "receive from"
                raise ValueError(
                    f"exchange: rank {rank} of {len(ranks)} cannot {where} rank {peer}: peers are the other ranks"
                )
            filled = []
            for index, x in enumerate(several):
                if not x.is_contiguous() or x.is_conj() or x.is_neg():
                    _check_memory(x, index, peer, sending=sending, direct=direct)
                if x.numel():
                    filled.append(x.detach())
                    checked.devices.add(x.device)
            if filled:
                side[ranks[peer]] = filled
    return checked


def _check_memory(x: Tensor, index: int, peer: int, *, sending: bool, direct: bool) -> None:
    """Raise ValueError for a tensor that cannot travel from where it lies, or to there."""
    what = f"exchange: tensor {index} to {'send to' if sending else 'receive from'} rank {peer}"
    strided = f"{what} has shape {tuple(x.shape)} and strides {x.stride()}; expected"
    if not x.is_contiguous():
        if not (direct and x.dim() <= DIMS):
            fewer = f"at most {DIMS} dims or " if direct else ""
            raise ValueError(f"{strided} {fewer}a contiguous one: call .contiguous()")
        if not sending and x.numel() and any(n > 1 and not stride for n, stride in zip(x.shape, x.stride())):
            raise ValueError(f"{strided} memory of its own for every element")
    if x.is_conj() or x.is_neg():
        raise ValueError(
            f"{what} is a view whose elements are not what lies in its memory; expected plain memory: call "
            ".resolve_conj().resolve_neg()"
        )


def subset(rank: int, size: int, ranks: Sequence[int]) -> list[int]:
    """The argument of `Comm.sub`, checked.

    Raises: ValueError unless ranks are distinct ranks of the comm with the calling one among them.
    """
    ranks = list(ranks)
    if len(set(ranks)) != len(ranks) or rank not in ranks or not all(0 <= r < size for r in ranks):
        raise ValueError(f"sub: rank {rank} of {size} got ranks {ranks}; expected distinct ranks, itself among them")
    return ranks


class Claim(NamedTuple):
    """What one rank says in `Comm.agree`: the call, its facts by `repr`, and its own error as text, or None."""

    what: str
    facts: dict[str, str]
    error: str | None

    @classmethod
    def of(cls, what: str, facts: Mapping[str, object], error: Exception | None) -> Claim:
        """The claim of a rank that calls `agree` with these arguments."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        return cls(what, {name: repr(value) for name, value in facts.items()}, text)


def raise_first(claims: Sequence[Claim], own: Exception | None) -> None:
    """Return if the claims of all ranks, in rank order, are equal and free of errors; else raise as `agree` promises.

    own: this rank's error, raised here as it is. Every rank reaches the same verdict from the same claims.
    """
    if own is not None:
        raise own
    for rank, claim in enumerate(claims):
        if claim.error is not None:
            raise ValueError(f"{claim.what}: rank {rank} refused its arguments: {claim.error}")
    values = {"the call": [claim.what for claim in claims]}
    for name in dict.fromkeys(name for claim in claims for name in claim.facts):
        values[name] = [claim.facts.get(name, "not given") for claim in claims]
    for name, by_rank in values.items():
        if len(set(by_rank)) > 1:
            error = ValueError(
                f"{claims[0].what}: ranks differ in {name}: {_by_value(by_rank)}; give all ranks the same"
            )
            error.differing = name  # type: ignore[attr-defined]  # for who has a better word on that fact
            raise error


def _by_value(by_rank: Sequence[str]) -> str:
    """Values with the ranks that gave them, the most common one first: '8 on ranks 0, 1, 3; 16 on rank 2'."""
    parts = []
    for value, count in Counter(by_rank).most_common():
        ranks = [rank for rank, said in enumerate(by_rank) if said == value]
        shown = ", ".join(map(str, ranks[:8])) + (f" and {count - 8} more" if count > 8 else "")
        parts.append(f"{value} on rank{'s' if count > 1 else ''} {shown}")
    return "; ".join(parts)
