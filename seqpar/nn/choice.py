"""Whose plan a layer's attention runs under: the call's, the one bound to the layer, or the surrounding one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.ops.attention.recompute import Given, Late
from seqpar.parallel import derived_seed, surrounding
from seqpar.plan import Plan

_layers = count()


class Choice(Late):
    """One layer's: the window that narrows its masks, the number that makes its dropout its own, what is bound.

    A copy is another layer, with a number of its own unless one was given, and nothing is bound to it.
    """

    def __init__(self, window: tuple[int | None, int | None] | None, layer: int | None) -> None:
        self.window, self.layer = window, layer
        self.number = next(_layers) if layer is None else layer
        self.bound: tuple[Plan, Comm, int | None] | None = None
        bind(self)  # names it for compiled code

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """What a call is made with: see `seqpar.ops.attention.recompute`."""
        if given:
            plan, comm = given
        elif self.bound is not None:
            plan, comm, bound = self.bound
            seed = bound if seed is None else seed
        else:
            around = surrounding()
            plan, comm, seed = around.plan, around.comm, around.seed if seed is None else seed
        if self.window is not None and isinstance(plan, Plan):  # the call refuses what is none, on every rank
            plan = plan.memo(("window", self.window), lambda: plan.with_mask(plan.mask.windowed(self.window)))
        return Given(plan, comm, None if seed is None else derived_seed(seed, self.number))

    def __deepcopy__(self, memo: object) -> Choice:
        return Choice(self.window, self.layer)

    def __getstate__(self) -> dict[str, object]:
        return {"window": self.window, "layer": self.layer, "number": self.number, "bound": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        bind(self)
