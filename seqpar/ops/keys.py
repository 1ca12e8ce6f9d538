"""The keys of a call on their way."""

from __future__ import annotations

from torch import Tensor

from seqpar.comm import Work
from seqpar.kernels.rows import pack, place
from seqpar.ops.call import Call, Phase, named
from seqpar.ops.rows import received_keys, relays, sent_keys, take
from seqpar.plan import Part, Step, head_share
from seqpar.plan.steps import count


class Keys:
    """The keys of a call's steps: posted ahead, received into two slots of memory that the whole call reuses.

    On CUDA all of it is ordered by the current stream: an exchange starts when the stream reaches its posting, which
    is after the last reader of its slot, and before the kernels that it is to hide behind.
    """

    def __init__(self, call: Call, steps: list[Step], phase: Phase) -> None:
        self.call, self.steps, self.phase = call, steps, phase
        self.works: dict[int, Work | None] = {}
        self.slots: list[Tensor | None] = [None, None]
        self.buffers: dict[int, Tensor] = {}
        self.turn = 0
        sizes = [len(s.pos) * self._row(s.part) for s in steps if not self._is_own(s)]
        self.size = max(sizes, default=0)

    def _row(self, part: Part) -> int:
        _, kv = head_share(self.call.heads, self.call.kv_heads, part.width, part.share)
        return (kv.stop - kv.start) * (self.call.dim + self.call.v_dim)

    @staticmethod
    def _is_own(step: Step) -> bool:
        """Whether the buffer is the rank's own keys as they lie."""
        return step.local or (step.own is not None and count(step.own) == len(step.pos))

    def _slot(self, rows: int, row: int) -> Tensor:
        """The next of the two slots, [rows, row]. It was last read by the step before the one now computed."""
        self.turn = 1 - self.turn
        slot = self.slots[self.turn]
        if slot is None:
            slot = self.slots[self.turn] = self.call.comm.empty((self.size,), self.call.dtype, self.call.device)
        return slot[: rows * row].view(rows, row)

    def post(self, n: int, k: Tensor, v: Tensor) -> None:
        """Post the exchange that brings the keys of step n; k, v are the inside keys of its part."""
        step = self.steps[n]
        row = self._row(step.part)
        if not (step.sends or step.recvs) or not row:
            self.works[n] = None
            return
        with named("post keys", step.number):
            recvs: dict[int, list[Tensor]] = {}
            if step.recvs:
                arriving = received_keys(step)
                flat = self._slot(len(step.pos) if arriving.rows is None else arriving.count, row)
                recvs = {peer: [flat[rows]] for peer, rows in arriving.of.items()}
                self.buffers[n] = flat
            sends: dict[int, list[Tensor]] = {}
            if step.sends:
                source = self._packed(n, k, v)
                sends = {peer: [source[rows]] for peer, rows in sent_keys(self.steps, n).of.items()}
            self.works[n] = self.call.comm.exchange(sends, recvs, tag=self.call.tag(self.phase, step.number))

    def _packed(self, n: int, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values side by side as they are sent; what was received that way goes on as it is."""
        leaving = sent_keys(self.steps, n)
        rows = None if leaving.rows is None else self.call.uploaded.rows(leaving.rows)
        if relays(self.steps, n):
            return self.buffers[n - 1] if rows is None else take(self.buffers[n - 1], rows)
        out = k.new_empty(leaving.count, self._row(self.steps[n].part))
        if rows is not None:
            pack([k, v], rows, out)
        return out

    def wait(self, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of step n, in position order."""
        work = self.works.pop(n, None)
        step = self.steps[n]
        if work is not None:
            with named("wait keys", step.number):
                work.wait()
        self.buffers.pop(n - 2, None)
        if self._is_own(step):
            return k, v
        flat = self.buffers.get(n)
        if flat is None:
            flat = self.buffers[n] = k.new_empty(len(step.pos), self._row(step.part))
        rows = received_keys(step).rows if step.recvs else None
        if rows is not None and flat.numel():
            # into the other slot: the first is then free to receive
            received, flat = flat, self._slot(len(step.pos), flat.shape[1])
            place(received, self.call.uploaded.rows(rows), flat)
            self.buffers[n] = flat
        keys, values = flat.split([k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], dim=1)
        keys, values = keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])
        if step.own is not None and flat.numel():
            own = self.call.uploaded.rows(step.own)
            place(k, own, keys)
            place(v, own, values)
        return keys, values
