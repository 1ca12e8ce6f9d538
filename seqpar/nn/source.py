"""The plan of a layer's attention: the call's, the one bound to the layer, or the surrounding one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.parallel import derived_seed, surrounding
from seqpar.plan import Plan
from seqpar.private.torch import next_node, node_under_way

_layers = count()


class LayerPlan(PlanSource):
    """One layer's plan: the window that narrows its masks, the number that its dropout depends on, and its binding.

    A copy is another layer, with its own number unless one was given, and without a binding.
    """

    used = False  # whether a call without a plan has used it
    since = 0  # the first node recorded under the current binding; 0 without calls under an earlier one

    def __init__(self, window: tuple[int | None, int | None] | None, layer: int | None) -> None:
        self.window, self.layer = window, layer
        self.number = next(_layers) if layer is None else layer
        self.bound: tuple[Plan, Comm, int | None] | None = None
        bind(self)  # gives it a name for compiled code

    def bind(self, bound: tuple[Plan, Comm, int | None] | None) -> None:
        """Use this plan for calls that give none; None for the surrounding one."""
        self.since = next_node() if self.used else 0
        self.bound = bound

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """The plan, comm and seed of a call; see `PlanSource`.

        Raises: RuntimeError in a backward pass that repeats a call whose layer was bound or unbound since.
        """
        plan, comm, seed = (*given, seed) if given else self._looked_up(seed)
        if self.window is not None and isinstance(plan, Plan):  # anything else is refused by the call, on every rank
            plan = plan.memo(("window", self.window), lambda: plan.with_mask(plan.mask.windowed(self.window)))
        return Given(plan, comm, None if seed is None else derived_seed(seed, self.number))

    def _looked_up(self, seed: int | None) -> Given:
        """The bound or the surrounding plan and comm; the call's seed takes precedence."""
        if 0 <= node_under_way() < self.since:
            raise RuntimeError(
                "a layer is called again in a backward pass, as a checkpoint does, and was bound or unbound since its "
                "forward; bind it after the backward, or give the layer its plan, or seqpar.bind(plan, comm)"
            )
        self.used = True
        if self.bound is not None:
            plan, comm, of_step = self.bound
        else:
            plan, comm, _, of_step = surrounding()
        return Given(plan, comm, of_step if seed is None else seed)

    def __deepcopy__(self, memo: object) -> LayerPlan:
        return LayerPlan(self.window, self.layer)

    def __getstate__(self) -> dict[str, object]:
        return {"window": self.window, "layer": self.layer, "number": self.number, "bound": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        bind(self)
