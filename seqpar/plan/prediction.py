"""The interface of a forecast as plans show it. Planners make forecasts; plans only carry them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Prediction(Protocol):
    """A prediction of a step under a plan."""

    @property
    def node(self) -> int:
        """Ranks of a node of the machine."""

    @property
    def call(self) -> dict[str, Any]:
        """A layer's heads, key heads, dims and dtype, as `Plan.bytes` takes them."""

    @property
    def phases(self) -> dict[str, NDArray[np.float64]]:
        """Seconds of every rank in a step, by activity."""

    @property
    def least(self) -> float:
        """A lower bound on the seconds of any plan."""

    @property
    def what(self) -> str:
        """The model and the machine, in a few words."""

    @property
    def headline(self) -> str:
        """Seconds of the slowest rank and the gap to the bound, in a few words."""
