"""Gradients of received keys return to their owners: summed, sent and added, one exchange at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from seqpar.kernels.memory.copy import Pair, copy
from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.keys import Messages, Slots
from seqpar.ops.core.device import profile_range
from seqpar.ops.move.pack import Place, post, rows_of
from seqpar.plan import Step
from seqpar.plan.steps import Entry


class GradientExchange:
    """The exchange of gradients of a part's received keys, one step at a time.

    A step's gradients are summed in one of two buffers while the previous step's leave from the other. Sums for keys
    that entered the node through this rank leave once the gradients of their step have arrived. Arrivals are added
    before the next exchange is posted, so one receive buffer is enough.
    """

    def __init__(self, call: Call, steps: list[Step], home: Tensor) -> None:
        self.call, self.home = call, home
        self.arrival: Callable[[], None] | None = None
        self.stage = 0
        self.carried: Tensor | None = None  # the next step's sums in a ring, to which the arriving ones are added
        self.entered: tuple[Entry, Tensor] | None = None  # sums that leave with the next exchange
        self.sums = self._slots(len(s.pos) for s in steps if not s.local)
        self.entry_sums = self._slots(s.spread.rows for s in steps if s.spread)
        self.received: Tensor | None = None

    def _slots(self, rows: Iterable[int]) -> Slots:
        home, most = self.home, max(rows, default=0)
        return Slots(lambda: home.new_empty(most, *home.shape[1:]))

    def blank(self, step: Step) -> Tensor:
        """Zeros to which a step's gradients are added."""
        sums, self.carried = self.carried, None
        return self.sums.next(len(step.pos), *self.home.shape[1:]).zero_() if sums is None else sums

    def depart(self, step: Step, grads: Tensor) -> None:
        """Post a step's key gradients, and receives for own keys and, in a ring, for the next step's."""
        if not self.call.signature.kv_grads:
            return
        with profile_range("post grads", step.number):
            before, self.entered, target = self.entered, None, self.home
            at = self.call.uploaded.rows
            if step.spread is not None:
                target = self.entry_sums.next(step.spread.rows, *self.home.shape[1:])
                source = rows_of(grads, at(step.spread.place))
                copy([Pair(target, source.x, src_rows=source.rows)])
                self.entered = step.spread, target
            sends: Messages = {peer: [[rows_of(grads, at(rows))]] for peer, rows in step.grad_sends.items()}
            recvs: Messages = {
                peer: [[rows_of(target, at(rows), summed=True)]] for peer, rows in step.grad_recvs.items()
            }
            if step.carry is not None and step.carry_rows:
                self.carried = self.sums.next(step.carry_rows, *self.home.shape[1:]).zero_()
                recvs.setdefault(step.carry, []).append([Place(self.carried, summed=True)])
            self._post(step.number, sends, recvs, before)

    def _post(self, stage: int, sends: Messages, recvs: Messages, entered: tuple[Entry, Tensor] | None) -> None:
        """Post one exchange, including the sums for entered keys: sent to their owners, and received for own keys."""
        if entered is not None:
            (entry, sums), at = entered, self.call.uploaded.rows
            for peer, rows in entry.recvs.items():
                sends.setdefault(peer, []).append([rows_of(sums, at(rows))])
            for peer, rows in entry.sends.items():
                recvs.setdefault(peer, []).append([rows_of(self.home, at(rows), summed=True)])
        if sends or recvs:
            tag = self.call.message(Phase.BACK_GRADS, stage)
            self.arrival, self.stage = post(self.call.comm, sends, recvs, tag, empty=self._empty), stage

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for arrivals, which all exchanges reuse."""
        size = prod(shape)
        if self.received is None or self.received.numel() < size:
            self.received = None  # the smaller one is freed first
            self.received = self.call.comm.empty(shape, dtype, device)
        return self.received.view(-1)[:size].view(shape)

    def arrive(self) -> None:
        """Wait for arrivals and add them, to own keys in ascending order of ranks."""
        if self.arrival is not None:
            with profile_range("wait grads", self.stage):
                self.arrival()
            self.arrival = None

    def finish(self, stage: int) -> None:
        """Add the last arrivals, and return the last sums for entered keys; ``stage`` is one that no step uses."""
        self.arrive()
        if self.entered is not None:
            with profile_range("post grads", stage):
                self._post(stage, {}, {}, self.entered)
            self.arrive()
