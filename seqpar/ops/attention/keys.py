"""Fetch each step's keys: packed, sent one or two steps ahead, and received into a few buffers, in position order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from seqpar.kernels.memory.copy import Pair, copy
from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.rows import received_keys
from seqpar.ops.core.device import profile_range
from seqpar.ops.move.pack import Message, Place, post, rows_of
from seqpar.plan import Rows

Messages = dict[int, list[Message]]


class Slots:
    """Two pieces of memory used in turns, allocated when first needed, while at most two of its tensors are alive."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.memory: list[Tensor | None] = [None, None]
        self.turn = 0

    def next(self, *shape: int) -> Tensor:
        """The next piece as a tensor of this shape."""
        self.turn = 1 - self.turn
        memory = self.memory[self.turn]
        if memory is None:
            memory = self.memory[self.turn] = self.make()
        return memory.view(-1)[: prod(shape)].view(shape)


class Buffer(NamedTuple):
    """Rows of received keys and values [rows, elements], and views of both.

    slot: the memory that they lie in, None if they are empty.
    """

    slot: Tensor | None
    rows: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, slot: Tensor | None, rows: Tensor, k: Tensor, v: Tensor) -> Buffer:
        """A buffer of rows; k, v: keys and values with the same heads and dims."""
        (_, *of_keys), (_, *of_values) = k.shape, v.shape
        keys, values = rows.split([prod(of_keys), prod(of_values)], dim=1)
        return cls(slot, rows, keys.unflatten(1, of_keys), values.unflatten(1, of_values))


class KeySlots:
    """Pieces of memory for keys; each is lent again once its last reader has been issued."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.free: list[Tensor] = []
        self.lent: dict[Hashable, Buffer] = {}  # steps of a ring have equal buffers

    def lend(self, count: int, k: Tensor, v: Tensor) -> Buffer:
        """A buffer of so many rows like those of k and v, in a slot that is free or new."""
        slot = self.free.pop() if self.free else self.make()
        key = id(slot), count, k.shape[1:], v.shape[1:]
        buffer = self.lent.get(key)
        if buffer is None:
            size = k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
            rows = slot.view(-1)[: count * size].view(count, size)
            buffer = self.lent[key] = Buffer.of(slot, rows, k, v)
        return buffer

    def take_back(self, buffer: Buffer | None) -> None:
        """Use the memory of a buffer again."""
        if buffer is not None and buffer.slot is not None:
            self.free.append(buffer.slot)


def steps_ahead(call: Call) -> int:
    """How many steps ahead the keys of a call are posted.

    Two on CUDA if they come from their owners: then a transfer may last as long as two steps. Keys that are handed on
    must have arrived first.
    """
    plan = call.plan
    return 2 if call.signature.device.type == "cuda" and plan.transport == "fetch" and plan.node is None else 1


class KeyExchange:
    """The exchange of keys for a call's steps, posted `ahead` steps before they are used.

    Keys are received into one slot more than that, which the whole call reuses, and into two more if keys enter a node
    and are forwarded.

    On CUDA the current stream orders everything: an exchange starts when the stream reaches its posting, after the last
    reader of its slot and before the kernels that hide it. With two steps ahead this is still right after the reader:
    the slot of step n + 2 is that of step n - 1.
    """

    def __init__(self, call: Call, phase: Phase) -> None:
        recipe, signature = call.recipe, call.signature
        self.call, self.steps, self.phase, self.size = call, recipe.steps, phase, recipe.key_size
        self.ahead = steps_ahead(call)
        self.arrivals: dict[int, Callable[[], None]] = {}
        self.buffers: dict[int, Buffer] = {}
        self.entries: dict[int, Tensor] = {}
        self.slots = KeySlots(lambda: call.comm.empty((recipe.slot,), signature.dtype, signature.device))
        self.entry_slots = Slots(lambda: call.comm.empty((recipe.entry_slot,), signature.dtype, signature.device))

    def post(self, n: int, k: Tensor, v: Tensor) -> None:
        """Post the exchange that brings the keys of step n; k, v are the inside keys of its part."""
        step = self.steps[n]
        size = self.size[step.part.width]
        if not step.moves or not size:
            return
        with profile_range("post keys", step.number):
            recvs: Messages = {}
            if step.recvs:
                by_peer, places = received_keys(step)
                count = len(step.pos) if places is None else len(places)
                self.buffers[n] = self.slots.lend(count, k, v)  # last read before the current step
                flat = self.buffers[n].rows
                recvs = {peer: [[Place(flat[rows])]] for peer, rows in by_peer.items()}
            sends: Messages = {}
            if step.sends:
                tensors = [k, v]
                if step.spread is not None:  # forwarded unchanged, like those that a ring hands on
                    tensors = [self.entries[n - 1]]
                elif step.relay and not self.steps[n - 1].local:
                    tensors = [self.buffers[n - 1].rows]
                sends = self._messages(step.sends, tensors)
            if step.entry is not None:
                self._add_entry(n, k, v, sends, recvs)
            tag = self.call.message(self.phase, step.number)
            self.arrivals[n] = post(self.call.comm, sends, recvs, tag)

    def _add_entry(self, n: int, k: Tensor, v: Tensor, sends: Messages, recvs: Messages) -> None:
        """Add the messages of keys that enter this rank's node, or other nodes, with the keys of step n."""
        step = self.steps[n]
        entry = step.entry
        assert entry is not None
        if entry.recvs:
            flat = self.entries[n] = self.entry_slots.next(entry.rows, self.size[step.part.width])
            for peer, rows in entry.recvs.items():
                recvs.setdefault(peer, []).append([Place(flat[rows])])
        for peer, messages in self._messages(entry.sends, [k, v]).items():
            sends.setdefault(peer, []).extend(messages)

    def _messages(self, by_peer: Mapping[int, Rows], tensors: Sequence[Tensor]) -> Messages:
        """For each peer a message of its rows of all tensors, side by side; peers with the same rows share it."""
        messages: dict[object, Message] = {}
        sends: Messages = {}
        for peer, rows in by_peer.items():
            key = (rows.start, rows.stop) if isinstance(rows, slice) else id(rows)
            if key not in messages:
                messages[key] = [rows_of(x, self.call.uploaded.rows(rows)) for x in tensors]
            sends[peer] = [messages[key]]
        return sends

    def wait(self, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of step n, in position order."""
        step, at = self.steps[n], self.call.uploaded.rows
        arrive = self.arrivals.pop(n, None)
        if arrive is not None:
            with profile_range("wait keys", step.number):
                arrive()
        self.slots.take_back(self.buffers.pop(n - 1, None))
        if step.own_alone:
            return k, v
        buffer = self.buffers.get(n)
        if buffer is None:
            size = self.size[step.part.width]
            empty = Buffer.of(None, k.new_empty(len(step.pos), size), k, v) if not (size and len(step.pos)) else None
            buffer = empty or self.slots.lend(len(step.pos), k, v)
        copies = []
        places, arrived = received_keys(step)[1] if step.recvs else None, None
        if places is not None and buffer.rows.numel():
            arrived, buffer = buffer, self.slots.lend(len(step.pos), k, v)
            copies.append(Pair(buffer.rows, arrived.rows, dst_rows=at(places)))
        self.buffers[n], flat = buffer, buffer.rows
        entered = self.entries.pop(n - 1, None)
        if step.spread is not None and entered is not None:
            where = rows_of(flat, at(step.spread.place))
            copies.append(Pair(where.x, entered, where.rows))
        keys, values = buffer.keys, buffer.values
        if step.own is not None and flat.numel():
            own = at(step.own)
            for where, x in ((rows_of(keys, own), k), (rows_of(values, own), v)):
                copies.append(Pair(where.x, x, where.rows))
        copy(copies)
        self.slots.take_back(arrived)
        return keys, values
