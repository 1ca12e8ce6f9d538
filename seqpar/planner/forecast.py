"""The forecast of a plan: seconds by rank and phase, bytes of memory, and the distance from the best possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.value import Ints
from seqpar.planner.cost import PHASES, Ticks
from seqpar.planner.hardware import Hardware
from seqpar.planner.memory import Memory
from seqpar.planner.shape import ModelShape
from seqpar.planner.training import Training

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Forecast:
    """The prediction of a training step, forward and backward.

    ticks: of each rank by phase. bound: a lower bound on the ticks of any plan of this batch. second: the seconds of a
    tick. rows: of each rank. memory: the bytes that rows take. node: consecutive ranks that share fast links.
    """

    ticks: Ticks
    bound: int
    second: float
    rows: Ints
    memory: Memory
    model: ModelShape
    hardware: Hardware
    node: int

    @property
    def phases(self) -> dict[str, Seconds]:
        """Seconds of every rank by phase: attention, recurrent, exposed (waiting for transfers), linear, head.

        Only models with recurrent layers have the second.
        """
        names = [name for name in PHASES if name != "recurrent" or self.model.recurrent is not None]
        return {name: getattr(self.ticks, name) * self.second for name in names}

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return int(self.ticks.total.max()) * self.second

    @property
    def least(self) -> float:
        """A lower bound on the seconds of any plan of this batch on these ranks, under this cost model."""
        return self.bound * self.second

    @property
    def gap(self) -> float:
        """By how much the slowest rank exceeds the bound, relative to it: 0.01 is 1 %."""
        return int(self.ticks.total.max()) / self.bound - 1

    @property
    def imbalance(self) -> float:
        """The part of the gap that remains if transfers take no time."""
        return int((self.ticks.total - self.ticks.exposed).max()) / self.bound - 1

    @property
    def bytes(self) -> int:
        """Bytes of the rank with most rows, with the model's state if the plan counts it."""
        return self.memory.bytes(int(self.rows.max()))

    @property
    def call(self) -> dict[str, Any]:
        """The model's heads, key heads, dims and dtype of attention, as in `Plan.bytes`."""
        m = self.model
        call = {"heads": m.heads, "kv_heads": m.key_heads, "dim": m.dim, "v_dim": m.v_dim, "dtype": m.dtype}
        return {**call, "latent": (m.kv_rank, m.rope_dim)} if m.latents else call

    @property
    def what(self) -> str:
        """The model and the machine, in a few words."""
        return f"{self.model.name} (recompute {self.model.recompute}) on {self.hardware.name}"

    @property
    def headline(self) -> str:
        """Seconds of the slowest rank and the gap to the bound, in a few words."""
        return f"{in_words(self.seconds)} a step, gap {self.gap:.2%}"

    def facts(self) -> dict[str, Any]:
        """The forecast as plain data; times are in seconds unless named otherwise."""
        return {
            "model": self.model.name,
            "recompute": self.model.recompute,
            "hardware": self.hardware.name,
            "kernel": self.hardware.kernel,
            "channels": self.hardware.inside.channels,
            "hop": self.hardware.inside.alone,
            "node": self.node,
            "seconds": self.seconds,
            "bound": self.least,
            "gap": self.gap,
            "imbalance": self.imbalance,
            "memory_bytes": self.bytes,
            "usable_bytes": self.memory.usable,
            "phases": {name: values.tolist() for name, values in self.phases.items()},
        }

    def __str__(self) -> str:
        slowest = int(self.ticks.total.argmax())
        own = ", ".join(f"{name} {in_words(values[slowest])}" for name, values in self.phases.items())
        mean = self.ticks.total.mean() * self.second
        parts = ", ".join(f"{name} {values.mean() / mean:.1%}" for name, values in self.phases.items())
        transfers = self.gap - self.imbalance
        return (
            f"predicted for {self.what}: {in_words(self.seconds)} a step\n"
            f"  gap {self.gap:.2%} above the lower bound of {in_words(self.least)}: "
            f"{self.imbalance:.2%} imbalance, {transfers:.2%} exposed transfers\n"
            f"  slowest rank {slowest}: {own}\n"
            f"  mean of the ranks: {parts}\n"
            f"  {self._memory}\n"
            f"  {self.figures}"
        )

    @property
    def _memory(self) -> str:
        """The memory of the rank with most rows, in words."""
        said = f"memory up to {self.bytes / 1e9:.1f} of {self.memory.usable / 1e9:.1f} GB"
        if self.memory.state:
            peak, state = self.memory.peak(int(self.rows.max())), self.memory.state
            return f"{said} {peak}, of which {state / 1e9:.1f} GB are state"
        left_out = Training().state_bytes * self.model.parameters / self.rows.size / 1e9
        return f"{said}, without the model's state: {left_out:.1f} GB a rank with AdamW in float32 over all ranks"

    @property
    def figures(self) -> str:
        """The kernel and the links that the forecast is for, and figures that are assumptions."""
        link, machine = self.hardware.inside, self.hardware
        kernel = f"kernel {machine.kernel}" if machine.kernel else "kernel unknown"
        over = "" if link.channels is None else f" over {link.channels} NCCL channels"
        guesses = [machine.assumed] * bool(machine.assumed)
        if self.model.recurrent is not None:
            guesses.append("recurrences at the rate of linear layers")
        assumed = f"; unmeasured assumptions: {', '.join(guesses)}" if guesses else ""
        return f"{kernel}; one peer of a node{over} {link.alone / 1e9:.4g} of {link.bandwidth / 1e9:.4g} GB/s{assumed}"


def in_words(value: float) -> str:
    """Seconds in words: 12.3 ms."""
    return f"{value:.4g} s" if value >= 1 or not value else f"{value * 1e3:.4g} ms"
