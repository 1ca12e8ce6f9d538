"""Gradients of received keys return to their owners: summed, sent and added, one exchange at a time."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from seqpar.comm import Work
from seqpar.kernels.memory.copy import Pair, add, copy
from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.keys import Messages, Slots
from seqpar.ops.attention.rows import SummedRows
from seqpar.ops.core.device import profile_range
from seqpar.ops.move.pack import packed, rows_of, some_of
from seqpar.plan import Step


class KeyGradients(NamedTuple):
    """Gradients of keys and values, side by side [rows, heads, D + D_v], and views of both."""

    both: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def of(cls, both: Tensor, dim: int) -> KeyGradients:
        """The gradients in this memory. dim: of a key."""
        return cls(both, both[..., :dim], both[..., dim:])


class GradientArrival(NamedTuple):
    """An exchange under way: its stage, its work, and by peer the sums that are added when it has ended."""

    stage: int
    work: Work
    sums: list[tuple[int, Pair]]


class GradientExchange:
    """The exchange of gradients of a part's received keys, one step at a time.

    A step's gradients are summed in one of two buffers while the previous step's leave from the other. Sums for keys
    that entered the node through this rank leave once the gradients of their step have arrived. Arrivals are added
    before the next exchange is posted, so one receive buffer is enough.
    """

    def __init__(self, call: Call, steps: list[Step], home: KeyGradients) -> None:
        self.call, self.home, self.rows = call, home, call.uploaded.steps
        self.arrival: GradientArrival | None = None
        self.carried: KeyGradients | None = None  # the next step's sums in a ring, to which the arriving ones are added
        self.entered: tuple[Step, Tensor] | None = None  # sums that leave with the exchange after the step's
        self.sums = self._slots(max((len(s.pos) for s in steps if not s.local), default=0))
        self.entry_sums = self._slots(max((s.spread.rows for s in steps if s.spread), default=0))
        self.received = home.both[:0]

    def _slots(self, most: int) -> Slots[KeyGradients]:
        home, dim = self.home.both, self.call.signature.wire[0]
        return Slots(
            lambda: home.new_empty(most, *home.shape[1:]),
            lambda memory, rows: KeyGradients.of(some_of(memory, slice(0, rows)), dim),
        )

    def _zeros(self, rows: int) -> KeyGradients:
        sums = self.sums.next(rows)
        sums.both.zero_()
        return sums

    def blank(self, step: Step) -> KeyGradients:
        """Zeros to which a step's gradients are added; in a ring, the sums that have arrived for its keys."""
        sums, self.carried = self.carried, None
        return self._zeros(len(step.pos)) if sums is None else sums

    def depart(self, step: Step, grads: KeyGradients) -> None:
        """Post a step's key gradients, and receives for own keys and, in a ring, for the next step's."""
        if not self.call.signature.kv_grads:
            return
        with profile_range("post grads", step.number):
            rows, target = self.rows[step.number], self.home.both
            before, self.entered = self.entered, None
            if step.spread is not None and rows.spread is not None:
                target = self.entry_sums.next(step.spread.rows).both
                source = rows_of(grads.both, rows.spread)
                copy([Pair(target, source.x, src_rows=source.rows)])
                self.entered = step, target
            sends: Messages = {peer: [[rows_of(grads.both, some)]] for peer, some in rows.grad_sends.items()}
            arriving = _to(target, rows.grad_recvs)
            if step.carry is not None and step.carry_rows:
                self.carried = self._zeros(step.carry_rows)
                arriving.append((step.carry, self.carried.both, SummedRows(slice(0, step.carry_rows), step.carry_rows)))
            self._post(step.number, sends, arriving, before)

    def _post(
        self, stage: int, sends: Messages, arriving: list[tuple[int, Tensor, SummedRows]],
        entered: tuple[Step, Tensor] | None,
    ) -> None:  # fmt: skip
        """Post one exchange, including the sums for entered keys: sent to their owners, and received for own keys."""
        if entered is not None:
            step, sums = entered
            assert step.spread is not None
            for peer, rows in step.spread.recvs.items():
                sends.setdefault(peer, []).append([rows_of(sums, rows)])
            arriving = arriving + _to(self.home.both, self.rows[step.number].returning)
        if not (sends or arriving):
            return
        memory, first = self._memory(sum([added.count for *_, added in arriving])), 0
        recvs: dict[int, list[Tensor]] = {}
        pairs: list[tuple[int, Pair]] = []
        for peer, target, (some, count) in arriving:
            part = some_of(memory, slice(first, first + count))
            recvs.setdefault(peer, []).append(part)
            where = rows_of(target, some)
            pairs.append((peer, Pair(where.x, part, where.rows)))
            first += count
        comm, tag = self.call.comm, self.call.message(Phase.BACK_GRADS, stage)
        self.arrival = GradientArrival(stage, comm.exchange(packed(comm, sends), recvs, tag=tag), pairs)

    def _memory(self, rows: int) -> Tensor:
        """Memory for arrivals, which all exchanges reuse."""
        home = self.home.both
        if self.received.shape[0] < rows:
            self.received = home[:0]  # the smaller one is freed first
            self.received = self.call.comm.empty((rows, *home.shape[1:]), home.dtype, home.device)
        return self.received

    def arrive(self) -> None:
        """Wait for arrivals and add them, to own keys in ascending order of ranks."""
        if self.arrival is not None:
            stage, work, sums = self.arrival
            with profile_range("wait grads", stage):
                work.wait()
                for _, pair in sorted(sums, key=itemgetter(0)):
                    add(pair)
            self.arrival = None

    def finish(self, stage: int) -> None:
        """Add the last arrivals, and return the last sums for entered keys; ``stage`` is one that no step uses."""
        self.arrive()
        if self.entered is not None:
            with profile_range("post grads", stage):
                self._post(stage, {}, [], self.entered)
            self.arrive()


def _to(target: Tensor, by_peer: Mapping[int, SummedRows]) -> list[tuple[int, Tensor, SummedRows]]:
    """Rows that arrive from peers, with the tensor that they are added to."""
    return [(peer, target, added) for peer, added in by_peer.items()]
