"""Fetch each step's keys: pack, exchange one step ahead, double-buffer in position order."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import Tensor

from seqpar.comm import Work
from seqpar.kernels.memory.rows import pack, place
from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.rows import Parcels, entering_keys, received_keys, relays, sent_keys, take
from seqpar.ops.core.device import profile_range

Messages = dict[int, list[Tensor]]


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


class KeyExchange:
    """The exchange of keys for a call's steps: posted one step ahead, received into two slots that the whole call
    reuses, and two more for keys that enter a node before they are forwarded.

    On CUDA the current stream orders everything: an exchange starts when the stream reaches its posting, after the last
    reader of its slot and before the kernels that hide it.
    """

    def __init__(self, call: Call, phase: Phase) -> None:
        recipe, signature = call.recipe, call.signature
        self.call, self.steps, self.phase, self.size = call, recipe.steps, phase, recipe.key_size
        self.works: dict[int, Work | None] = {}
        self.buffers: dict[int, Tensor] = {}
        self.entries: dict[int, Tensor] = {}
        self.slots = Slots(lambda: call.comm.empty((recipe.slot,), signature.dtype, signature.device))
        self.entry_slots = Slots(lambda: call.comm.empty((recipe.entry_slot,), signature.dtype, signature.device))

    def post(self, n: int, k: Tensor, v: Tensor) -> None:
        """Post the exchange that brings the keys of step n; k, v are the inside keys of its part."""
        step = self.steps[n]
        if not step.moves or not self.size[step.part.width]:
            self.works[n] = None
            return
        with profile_range("post keys", step.number):
            sends, recvs = self._step_keys(n, k, v)
            if step.entry is not None:
                self._add_entry(n, k, v, sends, recvs)
            self.works[n] = self.call.comm.exchange(sends, recvs, tag=self.call.message(self.phase, step.number))

    def _step_keys(self, n: int, k: Tensor, v: Tensor) -> tuple[Messages, Messages]:
        """The messages sent and received for step n."""
        step, sends, recvs = self.steps[n], {}, {}
        if step.recvs:
            arriving = received_keys(step)
            count = len(step.pos) if arriving.rows is None else arriving.count
            flat = self.slots.next(count, self.size[step.part.width])  # last read before the current step
            recvs = {peer: [flat[rows]] for peer, rows in arriving.of.items()}
            self.buffers[n] = flat
        if step.sends:
            leaving = sent_keys(self.steps, n)
            before = self.entries if step.spread else self.buffers if relays(self.steps, n) else None
            source = self._packed(leaving, k, v) if before is None else self._onward(leaving, before[n - 1])
            sends = {peer: [source[rows]] for peer, rows in leaving.of.items()}
        return sends, recvs

    def _add_entry(self, n: int, k: Tensor, v: Tensor, sends: Messages, recvs: Messages) -> None:
        """Add the messages of keys that enter this rank's node, or other nodes, with the keys of step n."""
        step = self.steps[n]
        entry = step.entry
        assert entry is not None
        if entry.recvs:
            flat = self.entries[n] = self.entry_slots.next(entry.rows, self.size[step.part.width])
            for peer, rows in entry.recvs.items():
                recvs.setdefault(peer, []).append(flat[rows])
        if entry.sends:
            leaving = entering_keys(step)
            source = self._packed(leaving, k, v)
            for peer, piece in leaving.of.items():
                sends.setdefault(peer, []).append(source[piece])

    def _packed(self, leaving: Parcels, k: Tensor, v: Tensor) -> Tensor:
        """Rows of the inside keys and values, side by side for sending."""
        width = k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
        out = k.new_empty(leaving.count, width)
        if leaving.rows is not None:
            pack([k, v], self.call.uploaded.rows(leaving.rows), out)
        return out

    def _onward(self, leaving: Parcels, buffer: Tensor) -> Tensor:
        """Rows of received keys, forwarded unchanged."""
        return buffer if leaving.rows is None else take(buffer, self.call.uploaded.rows(leaving.rows))

    def wait(self, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of step n, in position order."""
        work = self.works.pop(n, None)
        step = self.steps[n]
        if work is not None:
            with profile_range("wait keys", step.number):
                work.wait()
        self.buffers.pop(n - 2, None)
        if step.own_alone:
            return k, v
        flat = self.buffers.get(n)
        if flat is None:
            empty = self.slots.next if len(step.pos) and self.size[step.part.width] else k.new_empty
            flat = self.buffers[n] = empty(len(step.pos), self.size[step.part.width])
        rows = received_keys(step).rows if step.recvs else None
        if rows is not None and flat.numel():
            # into the other slot: the first one can then receive
            received, flat = flat, self.slots.next(len(step.pos), flat.shape[1])
            place(received, self.call.uploaded.rows(rows), flat)
            self.buffers[n] = flat
        entered = self.entries.pop(n - 1, None)
        if step.spread is not None and entered is not None:
            place(entered, self.call.uploaded.rows(step.spread.place), flat)
        keys, values = flat.split([k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], dim=1)
        keys, values = keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])
        if step.own is not None and flat.numel():
            own = self.call.uploaded.rows(step.own)
            place(k, own, keys)
            place(v, own, values)
        return keys, values
