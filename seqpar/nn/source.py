"""Whose plan a layer's attention runs under: the call's, the one bound to the layer, or the surrounding one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.ops.core.backward import next_node, node_under_way
from seqpar.parallel import derived_seed, surrounding
from seqpar.plan import Plan

_layers = count()


class LayerPlan(PlanSource):
    """One layer's: the window that narrows its masks, the number that makes its dropout its own, what is bound.

    A copy is another layer, with a number of its own unless one was given, and nothing is bound to it.
    """

    used = False  # by a call that was given no plan
    since = 0  # the first node recorded under what is bound now, 0 if no call was made under anything else

    def __init__(self, window: tuple[int | None, int | None] | None, layer: int | None) -> None:
        self.window, self.layer = window, layer
        self.number = next(_layers) if layer is None else layer
        self.bound: tuple[Plan, Comm, int | None] | None = None
        bind(self)  # names it for compiled code

    def bind(self, bound: tuple[Plan, Comm, int | None] | None) -> None:
        """Run calls that are given no plan under this one, or with None under the surrounding one."""
        self.since = next_node() if self.used else 0
        self.bound = bound

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """What a call is made with: see `PlanSource`.

        Raises: RuntimeError if nothing was given in a backward pass that makes a call of another binding again.
        """
        plan, comm, seed = (*given, seed) if given else self._looked_up(seed)
        if self.window is not None and isinstance(plan, Plan):  # the call refuses what is none, on every rank
            plan = plan.memo(("window", self.window), lambda: plan.with_mask(plan.mask.windowed(self.window)))
        return Given(plan, comm, None if seed is None else derived_seed(seed, self.number))

    def _looked_up(self, seed: int | None) -> Given:
        """What is bound or surrounds the call; the seed of the step is the call's if that has one."""
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
