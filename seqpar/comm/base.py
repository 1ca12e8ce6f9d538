"""The base of all comms: their ranks and counters; for comms of processes also the agreement by messages."""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.comm.arguments import subset
from seqpar.comm.entry import ThreadEntry, enters, uncompiled
from seqpar.comm.failure import Owner, RootCause
from seqpar.comm.header import AGREEING, Header, describe, hash63
from seqpar.comm.protocol import (
    NO_FACTS,
    Collectives,
    Contribution,
    PeerError,
    Sides,
    Stats,
    Tag,
    Work,
    checked_sides,
    raise_first,
)


class Channel:
    """A connection of a group's ranks, shared by a comm and its subs, and whether it is alive."""

    rank: int
    size: int

    @property
    def cause(self) -> tuple[int, str] | None:
        """The (rank, reason) that killed the group, as far as this rank knows; else None."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """Mark the group dead for `reason`, unless it has a root cause already."""
        raise NotImplementedError

    def error(self, doing: str) -> PeerError:
        """The error of a rank that found the group dead while it was `doing` something."""
        assert self.cause is not None
        return PeerError.quoting(self.rank, doing, *self.cause)

    def check(self, doing: str = "cannot go on") -> None:
        """Raise PeerError if this rank knows that the group is dead."""
        if self.cause is not None:
            raise self.error(doing)

    def close(self) -> None:
        """Let go of what the channel holds. Every rank calls it, after its last wait."""
        raise NotImplementedError


class ProcessChannel(Channel):
    """A channel of processes. timeout: seconds after which a wait fails. calls: the latest exchanges posted."""

    owner: Owner
    timeout: float
    root_cause: RootCause
    calls: deque[Tag]

    def check(self, doing: str = "cannot go on") -> None:
        """Raise PeerError if the group is dead, or if this process is a fork of the rank's."""
        self.owner.check()
        if self.cause is not None:
            raise self.error(doing)

    def refused(self, rank: int, header: Header) -> str:
        """Why a rank refused the call in whose agreement it is, by the header; "" if it did not."""
        return self.root_cause.refusal(_agreement(header.scope, header.call), rank) if header.phase == AGREEING else ""


def _agreement(scope: int, call: int) -> str:
    return f"{scope:x}/{call}"


COMPARING, GATHERING = "comparing arguments", "gathering"  # the forms of a collective

# bytes of what a rank brings to a collective that still fit the first message; all are equally long, since ranks may be
# in different collectives
ALONG = 2048

# Up to this many ranks exchange messages with all others in one round. More ranks use rounds of pairs; each round
# doubles the ranks whose word they know: O(log n) messages per rank instead of n - 1.
DIRECT = 8
REFUSED = 1 << 62  # more bytes than any pickle has
SWAPPING = 64  # the rounds' stages come before those of messages to all others


C = TypeVar("C", bound=Channel)
P = TypeVar("P", bound=ProcessChannel)
B = TypeVar("B", bound="CommBase[Any]")


class CommBase(Generic[C]):
    """Some ranks of a group, renumbered. Subclasses add `_post`, how bytes move, and `_met`, how ranks agree."""

    direct = False

    def _join(
        self, channel: C, scope: tuple[int, ...], stats: Stats, counters: dict[object, Any], check_every: str
    ) -> None:
        self._channel, self._scope, self._counters, self.check_every = channel, scope, counters, check_every
        self._ranks: Sequence[int] = scope or range(channel.size)  # this comm's rank -> the group's
        self.rank, self.size, self.stats = self._ranks.index(channel.rank), len(self._ranks), stats
        self.agreed: dict[int, object] = counters.setdefault(("agreed", scope), {})
        self._scope_id = hash63(scope) if scope else 0
        self.entry: ThreadEntry = counters.setdefault("entry", ThreadEntry())
        self._calls = self._counter("call")

    @uncompiled
    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], recvs: Mapping[int, Sequence[Tensor]], *, tag: Tag
    ) -> Work:
        """Post one exchange: see `Comm.exchange`."""
        sides = checked_sides(self.rank, self._ranks, sends, recvs, direct=self.direct)
        self._admit(sides.devices, tag)
        self._channel.check()
        if not (sides.sends or sides.recvs):
            return CompletedWork()
        self.stats.count(sides.sends, sides.recvs)
        return self._post(sides, tag, self.stats)

    def _admit(self, devices: Set[torch.device], tag: Tag) -> None:
        """Raise for an exchange of tensors on these devices, if this comm cannot make it now."""

    def _post(self, sides: Sides, tag: Tag, stats: Stats) -> Work:
        raise NotImplementedError

    def sub(self: B, ranks: Sequence[int]) -> B:
        """The same connection for some of its ranks, renumbered."""
        ranks = subset(self.rank, self.size, ranks)
        view = type(self).__new__(type(self))
        scope = tuple(self._ranks[r] for r in ranks)
        view._join(self._channel, scope, self.stats, self._counters, self.check_every)
        return view

    def __copy__(self: B) -> B:
        return self

    def __deepcopy__(self: B, memo: object) -> B:
        return self  # a copy of a model has the same ranks; a comm of its own takes all of them to make

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be pickled: it belongs to this process; make another seqpar.{name} there")

    def check(self) -> None:
        """Raise PeerError if this rank knows that the group is dead, or in a fork of its process."""
        self._channel.check()

    def abort(self, reason: str) -> None:
        """Make this rank's reason the root cause, unless there is one, and wake every rank that waits for it."""
        self._channel.fail(reason)

    @enters
    def agree(self, what: str, facts: Mapping[str, object], error: Exception | None = None) -> None:
        """Compare the facts of all ranks: see `Comm.agree`."""
        self.check()
        self._met(COMPARING, what, Contribution.of(what, facts, error), "")

    @enters
    def gather(
        self, what: str, value: Any, error: Exception | None = None, *, facts: Mapping[str, object] = NO_FACTS,
        hint: str = "",
    ) -> list[Any]:  # fmt: skip
        """Every rank's value: see `Comm.gather`."""
        self.check()
        found = self._met(GATHERING, what, Contribution.of(what, facts, error, value), hint)
        return [pickle.loads(packed) for packed in found]

    def _met(self, form: str, what: str, own: Contribution, hint: str) -> list[bytes]:
        """What each rank brings to a collective, packed, by rank, if their claims are equal; else raises why not."""
        raise NotImplementedError

    def close(self) -> None:
        """End the comm on all ranks: see `Comm.close`."""
        self._refuse_sub()
        if self._channel.cause is None:
            self.agree(f"{type(self).__name__}.close", {})
        self._channel.close()

    def _refuse_sub(self) -> None:
        if self._scope:
            raise ValueError(
                f"a comm of ranks {list(self._scope)} of another comm is closed with it; close that comm, on all ranks"
            )

    def next_call(self) -> int:
        """The number of a verb on which ranks have agreed."""
        return next(self._calls)

    def _counter(self, kind: str) -> Iterator[int]:
        # kept by scope, so that a sub created twice keeps counting
        return self._counters.setdefault((kind, self._scope), itertools.count())

    def sums(self, like: Tensor) -> Collectives | None:
        """None: sums go by exchanges."""
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, kept: bool = False) -> Tensor:
        """Uninitialised memory of this process."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)


class ProcessComm(CommBase[P]):
    """Ranks that are processes and agree by messages. Subclasses add `_post`."""

    def _met(self, form: str, what: str, own: Contribution, hint: str) -> list[bytes]:
        """See `CommBase`.

        Up to 8 ranks send one message to every other rank if what they bring is small. More ranks send 24 bytes, and of
        a value all that they know, to a few others in turns; their claims only if these differ.
        """
        claim, packed, error = own.claim, own.packed if form == GATHERING else b"", own.error
        tag = Tag(0, next(self._counter("agree")), AGREEING, 0, f"{what} ({form})", hint)
        if form == COMPARING and claim.error is not None:
            self._channel.root_cause.note_refusal(_agreement(self._scope_id, tag.call), claim.error)
        if self.size > DIRECT:
            most = self._double(hash63((form, claim)), len(packed) if error is None else REFUSED, tag)
            if most is not None and most != REFUSED:
                return self._gather_by_rounds(packed, most, tag)
            packed = b""  # the claims differ
        found = self._swap_packed((form, claim, packed), tag._replace(stage=SWAPPING))
        mixed = len({form for form, *_ in found}) > 1
        claims = [claim._replace(what=f"{claim.what} ({form})") if mixed else claim for form, claim, _ in found]
        raise_first(claims, error)
        return [packed for *_, packed in found]

    def _gather_by_rounds(self, own: bytes, most: int, tag: Tag) -> list[bytes]:
        """Every rank's bytes, filled up with zeros to those of the longest, of which pickle takes no notice."""
        # block i is that of the rank i places after this one; each round doubles the known blocks
        blocks = torch.zeros(self.size, most, dtype=torch.uint8, device="cpu")
        if own:
            blocks[0, : len(own)] = _bytes(own)
        known = 1 if most else self.size
        while known < self.size:
            count = min(known, self.size - known)
            to, source = (self.rank - known) % self.size, (self.rank + known) % self.size
            stage = SWAPPING + known.bit_length()
            arrived = {source: [blocks[known : known + count]]}
            self._post_control({to: [blocks[:count]]}, arrived, tag._replace(stage=stage)).wait()
            known += count
        return [block.numpy().tobytes() for block in blocks.roll(self.rank, 0)]

    def _double(self, digest: int, word: int, tag: Tag) -> int | None:
        """The largest of all ranks' words, or None if their digests differ: by messages of 24 bytes between pairs.

        The largest digest equals the negative of the largest negated one only if all digests are equal.
        """
        own = torch.tensor([digest, -digest, word], device="cpu")
        for stage, peer in pairs(self.rank, self.size):
            heard = torch.empty_like(own)
            self._post_control({peer: [own]}, {peer: [heard]}, tag._replace(stage=stage)).wait()
            own = torch.maximum(own, heard)
        largest, smallest, most = own.tolist()
        return int(most) if largest == -smallest else None

    def _swap_packed(self, own: Any, tag: Tag) -> list[Any]:
        """Every rank's object, by rank, as a pickle; one too long for the first message comes in a second one."""
        packed = pickle.dumps(own)
        first = _bytes(len(packed).to_bytes(8, "little") + packed[:ALONG].ljust(ALONG, b"\0"))
        found = [each.numpy().tobytes() for each in self._swap(first, [first] * self.size, tag)]
        lengths = [int.from_bytes(each[:8], "little") for each in found]
        if max(lengths) > ALONG:
            like = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths]
            second = self._swap(_bytes(packed), like, tag._replace(stage=tag.stage + 1))
            found = [each.numpy().tobytes() for each in second]
        else:
            found = [each[8 : 8 + n] for each, n in zip(found, lengths, strict=True)]
        objects = {each: own if each == packed else pickle.loads(each) for each in set(found)}  # most are this rank's
        return [objects[each] for each in found]

    def _swap(self, own: Tensor, like: Sequence[Tensor], tag: Tag) -> list[Tensor]:
        """Every rank's `own` CPU tensor, by rank; rank r's has the shape of ``like[r]``. Not counted in the stats."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        found = [self.empty(tensor.shape, tensor.dtype, tensor.device) for tensor in like]
        found[self.rank] = own
        self._post_control({p: [own] for p in peers}, {p: [found[p]] for p in peers}, tag).wait()
        return found

    def _post_control(self, sends: Mapping[int, list[Tensor]], recvs: Mapping[int, list[Tensor]], tag: Tag) -> Work:
        """An exchange of CPU tensors that the stats do not count; peers are this comm's ranks."""
        sent, expected = ({self._ranks[peer]: several for peer, several in side.items()} for side in (sends, recvs))
        return self._post(Sides(sent, expected, {torch.device("cpu")}), tag, Stats())


class WorkBase(Generic[C]):
    """`Work` with its waiting: it counts the time and reports to all ranks an error, or a work dropped without a wait.

    Subclasses add `_finish`, and `_keep` if peers may still read or write the tensors after an error.
    """

    def __init__(self, channel: C, tag: Tag, stats: Stats | None) -> None:
        self._channel, self.tag, self._stats, self._waited = channel, tag, stats, False

    @property
    def doing(self) -> str:
        """What a rank does that waits for it, for errors."""
        return f"in {describe(self.tag)}"

    def awaited(self) -> int | None:
        """The peer that a wait stands for; None if it is over, or stands for all peers. From any thread."""
        return None

    @uncompiled
    def wait(self) -> None:
        """Return when the exchange is complete: see `Work.wait`."""
        if self._waited:
            return
        self._waited = True
        start = time.perf_counter()
        try:
            self._finish()
        except BaseException as error:
            self._keep()
            if not isinstance(error, PeerError):
                self._channel.fail(f"{self.doing}: {type(error).__name__}: {error}")
            raise
        finally:
            if self._stats is not None:
                self._stats.wait_seconds += time.perf_counter() - start

    def _finish(self) -> None:
        raise NotImplementedError

    def _keep(self) -> None:
        """Keep tensors alive that peers may still read or write."""

    def __del__(self) -> None:
        if not self._waited:
            self._waited = True
            self._keep()
            self._channel.fail(f"dropped the work of {describe(self.tag)} without waiting for it")


class CompletedWork:
    """`Work` of an exchange without messages."""

    def wait(self) -> None:
        """Return."""


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def pairs(rank: int, size: int) -> list[tuple[int, int]]:
    """(stage, peer) of the rounds after which a rank knows all ranks' words, if both peers exchange all they know.

    Ranks that differ in one bit meet, up to the largest power of 2; each rank beyond meets one of these before and
    after.
    """
    bits = size.bit_length() - 1
    beyond = rank ^ 1 << bits
    rounds = [] if rank >> bits else [(1 + bit, rank ^ 1 << bit) for bit in range(bits)]
    return rounds if beyond >= size else [(0, beyond), *rounds, (1 + bits, beyond)]


def is_group(x: object) -> bool:
    """Whether a comm can be made of x: a process group or a device mesh."""
    return dist.is_available() and isinstance(x, (dist.ProcessGroup, dist.device_mesh.DeviceMesh))


def process_group(name: str, group: Any) -> dist.ProcessGroup:
    """The process group of a constructor's argument: a group, a 1-D mesh, or None for the default group.

    Raises: ValueError, beginning with `name`, for anything else and for a group without this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{name}: torch.distributed has no default group; call init_process_group first")
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name}: a mesh of {group.ndim} dimensions {group.mesh_dim_names}; give one, mesh[name]")
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{name}: got {group!r}, expected a group that this process is in, a 1-D mesh, or None")
    return group
