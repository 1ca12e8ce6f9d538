"""Gradients of received keys return to their owners: summed, sent and added, one exchange at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from seqpar.comm import Work
from seqpar.kernels.memory.rows import add_
from seqpar.ops.attention.call import Call, Phase
from seqpar.ops.attention.keys import Messages, Slots
from seqpar.ops.attention.rows import sent_grads, take
from seqpar.ops.core.device import profile_range
from seqpar.plan import Step
from seqpar.plan.steps import Entry, Rows, count

# a peer's message, and the rows of a tensor to which it is added; None for the current step's gradients
Landing = tuple[int, Tensor | None, Rows]


class GradientExchange:
    """The exchange of gradients of a part's received keys, one step at a time.

    A step's gradients are summed in one of two buffers while the previous step's leave from the other. Sums for keys
    that entered the node through this rank leave once the gradients of their step have arrived. Arrivals are added
    before the next exchange is posted, so one receive buffer is enough.
    """

    def __init__(self, call: Call, steps: list[Step], home: Tensor) -> None:
        self.call, self.home = call, home
        self.work: Work | None = None
        self.stage = 0
        self.landed: list[tuple[Landing, Tensor]] = []
        self.entered: tuple[Entry, Tensor] | None = None  # sums that leave with the next exchange
        self.sums = self._slots(len(s.pos) for s in steps if not s.local)
        self.entry_sums = self._slots(s.spread.rows for s in steps if s.spread)
        entries = [None, *(s.spread for s in steps)]
        self.space = max(map(self._received, [*steps, None], entries))
        self.received: Tensor | None = None

    def _slots(self, rows: Iterable[int]) -> Slots:
        home, most = self.home, max(rows, default=0)
        return Slots(lambda: home.new_empty(most, *home.shape[1:]))

    @staticmethod
    def _received(step: Step | None, entered: Entry | None) -> int:
        """Rows that arrive with a step's gradients, and with the sums for keys that entered for the step before."""
        own = 0 if step is None else sum(map(count, step.grad_recvs.values())) + step.carry_rows
        return own + (0 if entered is None else sum(map(count, entered.sends.values())))

    def blank(self, step: Step) -> Tensor:
        """Zeros to which a step's gradients are added."""
        return self.sums.next(len(step.pos), *self.home.shape[1:]).zero_()

    def depart(self, step: Step, grads: Tensor) -> None:
        """Post a step's key gradients, and receives for own keys and, in a ring, for the next step's."""
        if not self.call.signature.kv_grads:
            return
        with profile_range("post grads", step.number):
            before, self.entered, target = self.entered, None, self.home
            if step.spread is not None:
                target = self.entry_sums.next(step.spread.rows, *self.home.shape[1:])
                target.copy_(take(grads, self.call.uploaded.rows(step.spread.place)))
                self.entered = step.spread, target
            landings: list[Landing] = [(peer, target, rows) for peer, rows in step.grad_recvs.items()]
            if step.carry is not None and step.carry_rows:
                landings.append((step.carry, None, slice(0, step.carry_rows)))
            self._post(step.number, self._leaving(step, grads), landings, before)

    def _leaving(self, step: Step, grads: Tensor) -> Messages:
        if not step.grad_sends:
            return {}
        leaving = sent_grads(step)
        source = grads if leaving.rows is None else take(grads, self.call.uploaded.rows(leaving.rows))
        return {peer: [source[rows]] for peer, rows in leaving.of.items()}

    def _post(self, stage: int, sends: Messages, landings: list[Landing], entered: tuple[Entry, Tensor] | None) -> None:
        """Post one exchange, including the sums for entered keys: sent to their owners, and received for own keys."""
        if entered is not None:
            entry, sums = entered
            for peer, rows in entry.recvs.items():
                sends.setdefault(peer, []).append(sums[rows])
            landings = landings + [(peer, self.home, rows) for peer, rows in entry.sends.items()]
        if not (sends or landings):
            return
        if self.received is None:
            self.received = self.call.comm.empty(
                (self.space, *self.home.shape[1:]), self.call.recipe.acc, self.call.signature.device
            )
        sizes = [count(rows) for *_, rows in landings]
        self.landed = list(zip(landings, self.received[: sum(sizes)].split(sizes), strict=True))
        recvs: Messages = {}
        for (peer, *_), values in self.landed:
            recvs.setdefault(peer, []).append(values)
        self.work = self.call.comm.exchange(sends, recvs, tag=self.call.message(Phase.BACK_GRADS, stage))
        self.stage = stage

    def arrive(self, grads: Tensor | None) -> None:
        """Wait for arrivals and add them: to own keys in rank order, and to the current gradients."""
        if self.work is None:
            return
        with profile_range("wait grads", self.stage):
            self.work.wait()
        for (_, target, rows), values in self.landed:
            if target is not None:
                add_(target, self.call.uploaded.rows(rows), values)
            elif grads is not None:
                grads += values
        self.work = None
        self.landed = []

    def finish(self, stage: int) -> None:
        """Add the last arrivals, and return the last sums for entered keys; ``stage`` is one that no step uses."""
        self.arrive(None)
        if self.entered is not None:
            with profile_range("post grads", stage):
                self._post(stage, {}, [], self.entered)
            self.arrive(None)
