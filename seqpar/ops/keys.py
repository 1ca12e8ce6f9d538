"""The keys of a call on their way."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.comm import Work
from seqpar.ops.call import Call, Phase
from seqpar.ops.rows import index, take
from seqpar.plan import Part, Rows, Step, head_share
from seqpar.plan.steps import count


class Keys:
    """The keys of a call's steps: posted ahead, received into two slots of memory that the whole call reuses."""

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

    def _slot(self) -> Tensor:
        """The next of the two slots. It was last read by the step before the one now computed."""
        self.turn = 1 - self.turn
        slot = self.slots[self.turn]
        if slot is None:
            slot = self.slots[self.turn] = self.call.comm.empty((self.size,), self.call.dtype, self.call.device)
        return slot

    def post(self, n: int, k: Tensor, v: Tensor) -> None:
        """Post the exchange that brings the keys of step n; k, v are the inside keys of its part."""
        step = self.steps[n]
        if not step.sends and not step.recvs:
            self.works[n] = None
            return
        row = self._row(step.part)
        packed: dict[object, Tensor] = {}
        sends = {}
        for peer, rows in step.sends.items():
            key = (rows.start, rows.stop) if isinstance(rows, slice) else peer
            if key not in packed:
                packed[key] = self._pack(n, rows, k, v)
            sends[peer] = [packed[key]]
        recvs: dict[int, list[Tensor]] = {}
        if step.recvs and row:
            total = sum(count(rows) for rows in step.recvs.values())
            rows_in_place = all(isinstance(rows, slice) for rows in step.recvs.values())
            flat = self._slot()[: (len(step.pos) if rows_in_place else total) * row].view(-1, row)
            first = 0
            for peer, rows in step.recvs.items():
                recvs[peer] = [flat[rows] if rows_in_place else flat[first : first + count(rows)]]
                first += count(rows)
            self.buffers[n] = flat
        self.works[n] = self.call.comm.exchange(sends, recvs, tag=self.call.tag(self.phase, step.number))

    def _pack(self, n: int, rows: Rows, k: Tensor, v: Tensor) -> Tensor:
        """Rows of keys and values side by side; what was received that way goes on as it is."""
        step = self.steps[n]
        at = index(step, rows, self.call.device)
        if step.relay and not self.steps[n - 1].local:
            return take(self.buffers[n - 1], at)
        return torch.cat([take(k, at).flatten(1), take(v, at).flatten(1)], dim=1)

    def wait(self, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of step n, in position order."""
        work = self.works.pop(n, None)
        if work is not None:
            work.wait()
        step = self.steps[n]
        self.buffers.pop(n - 2, None)
        if self._is_own(step):
            return k, v
        flat = self.buffers.get(n)
        if flat is None:
            flat = self.buffers[n] = k.new_empty(len(step.pos), self._row(step.part))
        if not all(isinstance(rows, slice) for rows in step.recvs.values()):
            flat = self.buffers[n] = self._ordered(step, flat)
        if step.own is not None:
            at = index(step, step.own, self.call.device)
            flat[at] = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        keys, values = flat.split([k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], dim=1)
        return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])

    def _ordered(self, step: Step, received: Tensor) -> Tensor:
        """Rows that came peer by peer, in position order in the other slot; the first is then free to receive."""
        flat = self._slot()[: len(step.pos) * received.shape[1]].view(len(step.pos), -1)
        first = 0
        for rows in step.recvs.values():
            flat[index(step, rows, self.call.device)] = received[first : first + count(rows)]
            first += count(rows)
        return flat
