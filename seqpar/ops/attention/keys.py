"""Fetch each step's keys: packed, sent one or two steps ahead, and received into a few buffers, in position order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from seqpar.comm import Work
from seqpar.kernels.memory.copy import Pair, copy
from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.rows import SharedRows
from seqpar.ops.core.device import profile_range
from seqpar.ops.move.pack import Message, packed, rows_of, some_of
from seqpar.plan import Step

T = TypeVar("T")
Messages = dict[int, list[Message]]


class Slots(Generic[T]):
    """Two pieces of memory used in turns, allocated when first needed, while at most two of their views are in use.

    view(memory, ...) makes a view of one; views are kept, since steps of a ring need equal ones.
    """

    def __init__(self, make: Callable[[], Tensor], view: Callable[..., T]) -> None:
        self.make, self.view = make, view
        self.memory: list[Tensor | None] = [None, None]
        self.views: dict[tuple[int, ...], T] = {}
        self.turn = 0

    def next(self, *shape: int) -> T:
        """The next piece, viewed in this shape."""
        self.turn = 1 - self.turn
        view = self.views.get((self.turn, *shape))
        if view is None:
            memory = self.memory[self.turn]
            if memory is None:
                memory = self.memory[self.turn] = self.make()
            view = self.views[(self.turn, *shape)] = self.view(memory, *shape)
        return view


class Buffer(NamedTuple):
    """Rows of keys and values, side by side [rows, elements], and views of both [rows, heads, dim].

    slot: the memory that they lie in.
    """

    slot: Tensor
    rows: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, slot: Tensor, count: int, heads: int, dim: int, v_dim: int) -> Buffer:
        """So many rows for so many heads, in this memory."""
        size, start = heads * (dim + v_dim), slot.storage_offset()
        return cls(
            slot,
            slot.as_strided((count, size), (size, 1)),
            slot.as_strided((count, heads, dim), (size, dim, 1)),
            slot.as_strided((count, heads, v_dim), (size, v_dim, 1), start + heads * dim),
        )


class KeySlots:
    """Pieces of memory for keys; each is lent again once its last reader has been issued.

    dims: of a key and of a value.
    """

    def __init__(self, make: Callable[[], Tensor], dims: tuple[int, int]) -> None:
        self.make, self.dims = make, dims
        self.free: list[Tensor] = []
        self.lent: dict[tuple[int, int, int], Buffer] = {}  # steps of a ring have equal buffers

    def lend(self, count: int, heads: int) -> Buffer:
        """A buffer of so many rows for so many heads, in a slot that is free or new."""
        slot = self.free.pop() if self.free else self.make()
        key = id(slot), count, heads
        buffer = self.lent.get(key)
        if buffer is None:
            buffer = self.lent[key] = Buffer.of(slot, count, heads, *self.dims)
        return buffer

    def take_back(self, buffer: Buffer) -> None:
        """Use the memory of a buffer again."""
        self.free.append(buffer.slot)


def steps_ahead(call: Call) -> int:
    """How many steps ahead the keys of a call are posted.

    Two on CUDA if they come from their owners: then a transfer may last as long as two steps. Keys that are handed on
    must have arrived first.
    """
    plan = call.plan
    return 2 if call.signature.device.type == "cuda" and plan.transport == "fetch" and plan.node is None else 1


class KeyExchange:
    """The exchange of keys for a call's steps in some order of parts, posted `ahead` steps before they are used.

    Keys are received into one slot more than that, which the whole call reuses, and into two more if keys enter a node
    and are forwarded.

    On CUDA the current stream orders everything: an exchange starts when the stream reaches its posting, after the last
    reader of its slot and before the kernels that hide it. With two steps ahead this is still right after the reader:
    the slot of step n + 2 is that of step n - 1.
    """

    def __init__(self, call: Call, phase: Phase, steps: Sequence[Step]) -> None:
        recipe, signature = call.recipe, call.signature
        self.call, self.phase, self.comm, self.steps = call, phase, call.comm, steps
        self.widths, self.dims = recipe.widths, signature.wire
        self.rows = call.uploaded.steps
        self.ahead = steps_ahead(call)
        self.arrivals: dict[int, Work] = {}
        self.buffers: dict[int, Buffer] = {}
        self.entries: dict[int, Tensor] = {}
        self.slots = KeySlots(lambda: call.comm.empty((recipe.slot,), signature.dtype, signature.device), self.dims)
        self.entry_slots: Slots[Tensor] = Slots(
            lambda: call.comm.empty((recipe.entry_slot,), signature.dtype, signature.device),
            lambda memory, rows, size: memory.as_strided((rows, size), (size, 1)),
        )

    def post(self, n: int, k: Tensor, v: Tensor) -> None:
        """Post the exchange that brings the keys of step n; k, v are the inside keys of its part."""
        step, heads = self.steps[n], self.widths[self.steps[n].part.width].key_heads
        if not step.moves or not heads:
            return
        with profile_range("post keys", step.number):
            rows = self.rows[step.number]
            recvs: dict[int, list[Tensor]] = {}
            if rows.recvs:
                buffer = self.buffers[n] = self.slots.lend(rows.arriving, heads)  # last read before the current step
                recvs = {peer: [some_of(buffer.rows, taken)] for peer, taken in rows.recvs.items()}
            sends: Messages = {}
            if rows.sends:
                tensors = [k, v]
                if step.spread is not None:  # forwarded unchanged, like those that a ring hands on
                    tensors = [self.entries[n - 1]]
                elif step.relay and not self.steps[n - 1].local:
                    tensors = [self.buffers[n - 1].rows]
                _add(sends, rows.sends, tensors)
            if step.entry is not None:
                _add(sends, rows.entering, [k, v])
                if step.entry.recvs:
                    entry = self.entries[n] = self.entry_slots.next(step.entry.rows, heads * sum(self.dims))
                    for peer, taken in step.entry.recvs.items():
                        recvs.setdefault(peer, []).append(entry[taken])
            tag = self.call.message(self.phase, step.number)
            self.arrivals[n] = self.comm.exchange(packed(self.comm, sends), recvs, tag=tag)

    def wait(self, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of step n, in position order."""
        step = self.steps[n]
        if n in self.arrivals:
            with profile_range("wait keys", step.number):
                self.arrivals.pop(n).wait()
        if n - 1 in self.buffers:
            self.slots.take_back(self.buffers.pop(n - 1))
        if step.own_alone:
            return k, v
        heads, count = self.widths[step.part.width].key_heads, len(step.pos)
        if not (heads and count):
            return k[:0], v[:0]
        rows, copies = self.rows[step.number], []
        arrived = self.buffers.get(n)
        buffer = arrived
        if arrived is None or rows.places is not None:
            buffer = self.buffers[n] = self.slots.lend(count, heads)
            if arrived is not None:
                copies.append(Pair(buffer.rows, arrived.rows, dst_rows=rows.places))
        entered = self.entries.pop(n - 1, None)
        if rows.spread is not None and entered is not None:
            where = rows_of(buffer.rows, rows.spread)
            copies.append(Pair(where.x, entered, where.rows))
        if rows.own is not None:
            for where, x in ((rows_of(buffer.keys, rows.own), k), (rows_of(buffer.values, rows.own), v)):
                copies.append(Pair(where.x, x, where.rows))
        if copies:
            copy(copies)
        if arrived is not None and arrived is not buffer:
            self.slots.take_back(arrived)
        return buffer.keys, buffer.values


def _add(sends: Messages, lists: Sequence[SharedRows], tensors: Sequence[Tensor]) -> None:
    """Add a message of some rows of all tensors, side by side, for each peer; peers with the same rows share it."""
    for rows, peers in lists:
        message = [rows_of(x, rows) for x in tensors]
        for peer in peers:
            sends.setdefault(peer, []).append(message)
