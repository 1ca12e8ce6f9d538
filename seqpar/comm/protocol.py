"""The contract of every transport: the exchange, its order, its errors.

An exchange is a global step. Messages that rank ``r`` posts under tag ``t`` match those that its peers post under the
same tag. A rank without messages under a tag posts nothing and does not shift anyone's numbering, since the tag is
data, not a counter of the backend. Spec over all ranks, with ``sends[r][p]`` the tensors that rank ``r`` posts for peer
``p``::

    after wait():  recvs[r][p][i][...] == sends[p][r][i]      for all r, p, i

    rank 0   sends {1: [a]}          recvs {2: [x]}      x <- c
    rank 1   sends {2: [b]}          recvs {0: [y]}      y <- a
    rank 2   sends {0: [c]}          recvs {1: [z]}      z <- b

The adjoint of an exchange is the exchange with the roles swapped; the receiver adds to its tensors.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from seqpar import native
from seqpar.comm.entry import ThreadEntry

DIMS = native.DIMS  # of an exchanged tensor that is not contiguous
MESSAGES_PER_EXCHANGE = 64  # sends and receives together; `rounds` splits a larger exchange


DEAD = "; the comm is dead"
NO_FACTS: Mapping[str, object] = MappingProxyType({})


class PeerError(RuntimeError):
    """A rank died, never sent, sent something else, or gave up. The comm is then dead, and every verb raises."""

    @classmethod
    def quoting(cls, rank: int, doing: str, first: int, reason: str) -> PeerError:
        """The error of `rank` while `doing` something, quoting the root cause: `reason`, written by rank `first`."""
        own = f" {doing}; root cause: rank {first}" if first != rank else ""
        # a reason with a remedy ends in it, and mentions the dead comm before
        return cls(f"rank {rank}{own}: {reason}{'' if DEAD in reason else DEAD}")


class Tag(NamedTuple):
    """The number of an exchange, equal on every rank that takes part.

    digest: 63 bits of the plan and of the call's signature; call: the verb's number on this comm (`Comm.next_call`);
    phase: the part of the verb (forward, backward, ...); stage: the step inside the phase. name: verb and phase in
    words, hint: what to do where a rank does not come; for errors, not sent.
    """

    digest: int
    call: int
    phase: int
    stage: int
    name: str = ""
    hint: str = ""

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The part of the tag that sender and receiver share."""
        return self[:4]

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}, call {self.call} stage {self.stage}"
        return f"call {self.call} phase {self.phase} stage {self.stage} with plan {self.digest:x}"


@dataclass
class Stats:
    """Counts since the last `reset`: bytes, messages and exchanges posted, and seconds spent in waits.

    staged_bytes: received bytes that were copied once more, because peers could not write to their destination.
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
    """An exchange in progress. It owns all tensors of the exchange until `wait` returns."""

    def wait(self) -> None:
        """Return when all received tensors hold their data and all sent ones may be overwritten.

        On CUDA this orders the current stream and returns at once. Dropping a work without waiting is an error that
        marks the comm dead.

        Raises: PeerError, naming the rank waited for, the tag, and the group's root cause.
        """
        ...


class Collectives(Protocol):
    """Sums over all ranks of a comm by its backend's collectives."""

    def sum_(self, flat: Tensor, tag: Tag) -> None:
        """Replace a 1-D tensor, a multiple of the ranks long, by its sum over ranks; fp16 and bf16 are summed in fp32.

        Every rank gets the same bits. On CUDA this is put on the current stream. Uses the tag's stage and the next one.
        """
        ...


@runtime_checkable
class Comm(Protocol):
    """A communicator: this rank's end of a fixed set of ranks.

    Ranks match calls by order: every rank makes the same calls in the same order, and one thread at a time is inside a
    comm and its subs. Differences between ranks raise where they can be detected: another verb, plan, option, shape or
    dtype, a call that one rank omits, and a second thread during a call. Calls of the same form cannot always be told
    apart: if one rank computes ``f(x), f(y)`` and another ``f(y), f(x)`` with equal shapes and plans, or two threads of
    a rank take turns in another order than on other ranks, x is combined with y without an error.
    """

    rank: int
    size: int
    stats: Stats
    direct: bool  # whether tensors of any strides go from source to destination in one copy
    check_every: str  # "batch": verbs compare a signature over ranks when it is new; "call": every time
    entry: ThreadEntry  # of threads, one at a time
    agreed: dict[int, object]  # agreed keys of 63 bits -> what a verb caches with each

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """Post one exchange and return without blocking.

        sends, recvs: peer -> tensors of any dtype that PyTorch copies; contiguous, unless the comm is `direct` and they
        have at most `DIMS` dims. Empty tensors are dropped. The rank itself is not a peer. Both sides of a pair give
        the same number of tensors, shapes and dtypes.

        Raises: ValueError for a peer outside the comm, a non-contiguous tensor, or devices that the comm does not
        serve together; NotImplementedError while a CUDA graph is captured; PeerError if the comm is dead.
        """
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Uninitialised memory, which peers can write directly if the transport has such memory.

        kept: it may outlive the verb, as results and tensors saved for backward do; a transport whose memory for peers
        is small gives ordinary memory then.
        """
        ...

    def sums(self, like: Tensor) -> Collectives | None:
        """Sums of tensors of this dtype and device by collectives; None if there are none, as of some of the ranks."""
        ...

    def sub(self, ranks: Sequence[int]) -> Comm:
        """The same comm for some of its ranks, renumbered in the given order; no group is created, nothing is sent.

        Every one of `ranks` calls it; this rank is one of them.
        """
        ...

    def check(self) -> None:
        """Raise PeerError if this comm is dead."""
        ...

    def next_call(self) -> int:
        """The number of a verb on which ranks have agreed: local, and equal on all ranks that run the same verbs.

        A call that raises an error has none, since ranks may raise errors in different calls.
        """
        ...

    def agree(self, what: str, facts: Mapping[str, object], error: Exception | None = None) -> None:
        """Return if every rank passes equal facts and no error; otherwise raise on every rank. A collective.

        what: the call, for messages. facts: name -> value, compared by `repr`. error: an error in this rank's own
        arguments; this rank raises it, and every other rank raises a ValueError that quotes it.

        Raises: ValueError naming the differing ranks, the fact and both values; PeerError after the timeout.
        """
        ...

    def gather(
        self, what: str, value: Any, error: Exception | None = None, *, facts: Mapping[str, object] = NO_FACTS,
        hint: str = "",
    ) -> list[Any]:  # fmt: skip
        """Every rank's value, by rank, on every rank. A collective over the CPU channel, for facts rather than tensors.

        what: the call, for messages. value: any small object that pickles. error: an error on this rank in place of a
        value. facts: must be equal on all ranks, as in `agree`, which is included. hint: what to do if a rank does not
        take part, for the error.

        Raises: the error on this rank, and ValueError quoting it on every other; ValueError if ranks are in different
        calls or differ in a fact; PeerError after the timeout.
        """
        ...

    def abort(self, reason: str) -> None:
        """Publish (rank, reason) as the root cause for peers, unless there is one, and mark this comm dead."""
        ...

    def close(self) -> None:
        """Free connections and release the group's store, after the last wait. A collective; the comm is dead then.

        Call it before `destroy_process_group`. Tensors keep their memory, except those of a `PeerComm`. If the comm is
        dead already, each rank closes its own part, so a `finally` may call it, even twice.

        Raises: ValueError for a sub; PeerError if a rank does not close the comm.
        """
        ...


# The lanes of an exchange, in the order of posting: the slower one starts first.
LANES = ACROSS, INSIDE = 0, 1


class Round(NamedTuple):
    """Messages of an exchange that a transport takes at once, peer -> tensors. key: equal on all ranks that take part.

    The key is a lane and a block of offsets and of indices, see `rounds`.
    """

    key: tuple[int, int, int]
    sends: dict[int, list[Tensor]]
    recvs: dict[int, list[Tensor]]

    @property
    def lane(self) -> int:
        """`ACROSS`, or `INSIDE` for pairs that have a lane of their own."""
        return self.key[0]


def rounds(
    rank: int, size: int, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]],
    nodes: Sequence[int] = (),
) -> list[Round]:  # fmt: skip
    """An exchange in rounds of at most `MESSAGES_PER_EXCHANGE` messages, none empty, in the order of posting.

    nodes: the node of each rank, if pairs inside a node have a lane of their own. A message is placed by its pair's
    lane, its offset ``(receiver - sender) mod size`` and its index in the pair's list. Sender and receiver know all
    three, so they cut identically, with no communication.
    """
    half = MESSAGES_PER_EXCHANGE // 2
    per_peer = max(1, half // max(1, min(size - 1, half)))
    found: dict[tuple[int, int, int], Round] = {}
    for sending, side in ((True, sends), (False, recvs)):
        for peer in sorted(side):
            offset = (peer - rank if sending else rank - peer) % size
            lane = INSIDE if nodes and nodes[peer] == nodes[rank] else ACROSS
            for index, tensor in enumerate(side[peer]):
                if tensor.numel():
                    key = (lane, (offset - 1) // half, index // per_peer)
                    part = found.setdefault(key, Round(key, {}, {}))
                    (part.sends if sending else part.recvs).setdefault(peer, []).append(tensor)
    return [found[key] for key in sorted(found)]


class Sides(NamedTuple):
    """Both sides of an exchange, peer -> non-empty tensors, and the devices of all tensors."""

    sends: dict[int, list[Tensor]]
    recvs: dict[int, list[Tensor]]
    devices: set[torch.device]


def checked_sides(
    rank: int, ranks: Sequence[int], sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *,
    direct: bool = False,
) -> Sides:  # fmt: skip
    """The sides of an exchange, by the peers' numbers in the group; peers without tensors are left out.

    rank: this rank in the comm. ranks: the comm's ranks, in the group.

    Raises: ValueError for a peer that is not another rank of the comm, a tensor that is not contiguous (if the comm is
    direct: and has more than `DIMS` dims), or one without memory of its own.
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
                if not has_memory(x):
                    if not x.numel():
                        continue
                    _check_memory(x, index, peer, sending=sending, direct=direct)
                filled.append(x.detach())
                checked.devices.add(x.device)
            if filled:
                side[ranks[peer]] = filled
    return checked


def has_memory(x: Tensor) -> bool:
    """Whether x has elements that lie where its pointer says; without memory that is the offset alone, or 0.

    Without it are tensors of classes that hold others, such as `AsyncCollectiveTensor`, and PyTorch's immutable zeros.
    """
    return x.data_ptr() > x.storage_offset() * x.itemsize


def _check_memory(x: Tensor, index: int, peer: int, *, sending: bool, direct: bool) -> None:
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
    if x.is_cpu and not has_memory(x):
        raise ValueError(f"{what} is a {type(x).__name__} without memory of its own; expected a copy in plain memory")


def refuse_capture(tag: Tag, *, captured: bool | None = None) -> None:
    """Raise NotImplementedError for an exchange of CUDA tensors while a CUDA graph is captured from the current stream.

    captured: whether it is, if the caller knows. A replay would not run the hosts' part: their agreement on the
    exchange, their watch over it, and on some comms the posting of messages.
    """
    if torch.cuda.is_current_stream_capturing() if captured is None else captured:
        raise NotImplementedError(
            f"exchange: {tag} in a CUDA graph under capture: the hosts take part in every exchange; capture the "
            "compute between exchanges"
        )


class Claim(NamedTuple):
    """One rank's contribution to `Comm.agree`: the call, its facts by `repr`, and its error as text, or None.

    The text begins with the act of the rank; an attribute ``rank_did`` of the error replaces the default words.
    """

    what: str
    facts: dict[str, str]
    error: str | None

    @classmethod
    def of(cls, what: str, facts: Mapping[str, object], error: Exception | None) -> Claim:
        """The claim of a rank that calls `agree` with these arguments."""
        did = getattr(error, "rank_did", "refused its arguments")
        text = None if error is None else f"{did}: {type(error).__name__}: {error}"
        return cls(what, {name: repr(value) for name, value in facts.items()}, text)


class Contribution(NamedTuple):
    """What a rank brings to `agree` or `gather`. packed: a pickle of its value. error: in place of a value, or None."""

    claim: Claim
    packed: bytes
    error: Exception | None

    @classmethod
    def of(cls, what: str, facts: Any, error: Exception | None, value: object = None) -> Contribution:
        """The contribution of a rank, with an error if facts are unnamed or have no `repr`, or a value does not pickle.

        That is not raised here, since the other ranks wait for this one's report.
        """
        if not isinstance(facts, Mapping):
            error = TypeError(f"{what}: facts must be a mapping of names to values, got {facts!r:.200}; give a dict")
        if error is None:
            try:
                return cls(Claim.of(what, facts, None), pickle.dumps(value), None)
            except Exception as raised:
                error = raised
        try:
            return cls(Claim.of(what, {}, error), b"", error)
        except Exception:  # of an error whose text cannot be made
            return cls(Claim.of(what, {}, RuntimeError(type(error).__name__)), b"", error)


SAME_CALLS = "make the same calls on all ranks, and evaluate on one rank inside `with handle.local():`"
# What to do where ranks differ in a fact of that name.
HINTS = {
    "the call": SAME_CALLS,
    "training": SAME_CALLS,
    "grad enabled": SAME_CALLS,
    "tokens": "give all ranks the same ids, and before they sample, the same seed (torch.manual_seed)",
    "plan": "make one plan from the same lengths on every rank, or where each rank loads its own batch, use "
    "seqpar.data.share",
}


def raise_first(claims: Sequence[Claim], own: Exception | None) -> None:
    """Return if all ranks' claims, in rank order, are equal and without errors; else raise as `agree` promises.

    own: this rank's error, raised unchanged. Every rank reaches the same verdict from the same claims.
    """
    if own is not None:
        raise own
    if claims[0].error is None and claims.count(claims[0]) == len(claims):
        return
    for rank, claim in enumerate(claims):
        if claim.error is not None:
            raise ValueError(f"{claim.what}: rank {rank} {claim.error}")
    values = {"the call": [claim.what for claim in claims]}
    for name in dict.fromkeys(name for claim in claims for name in claim.facts):
        values[name] = [claim.facts.get(name, "not given") for claim in claims]
    for name, by_rank in values.items():
        if len(set(by_rank)) > 1:
            hint = HINTS.get(name, "give all ranks the same")
            error = ValueError(f"{claims[0].what}: ranks differ in {name}: {_by_value(by_rank)}; {hint}")
            error.differing = name  # type: ignore[attr-defined]  # for who has a better word on that fact
            raise error


def _by_value(by_rank: Sequence[str]) -> str:
    """Values with the ranks that gave them, the most common value first: '8 on ranks 0, 1, 3; 16 on rank 2'."""
    parts = []
    for value, count in Counter(by_rank).most_common():
        ranks = [rank for rank, said in enumerate(by_rank) if said == value]
        shown = ", ".join(map(str, ranks[:8])) + (f" and {count - 8} more" if count > 8 else "")
        parts.append(f"{value} on rank{'s' if count > 1 else ''} {shown}")
    return "; ".join(parts)
