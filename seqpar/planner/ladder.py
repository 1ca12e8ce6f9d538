"""`fit`: how long a document fits, at which price in time, and how many ranks pay.

Each rung of the ladder keeps less in a rank's memory and takes more time than the one before::

    plain            the model's own loss, which has all logits in memory
    own-loss         `seqpar.train.linear_cross_entropy`, as parallelize sets it
    keep-attention   layers are recomputed, but for attention
    full             layers are recomputed
    tiled            their ffn and norms run in tiles of rows
    offload          the layers' inputs are in the host's memory
    state-on-host    weights, gradients and optimizer too (FSDP2's CPUOffloadPolicy)

A step takes two of them: the first n layers have the cheaper one in memory, the rest the other. Layers that keep more
come last, since the backward of the last layer begins with what all layers before it hold. For equal layers this is
within 2 % of a step of the exact choice for each layer; two neighbours are not (`bench/planner/rungs.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from numpy.typing import ArrayLike

from seqpar.facts.mask import Mask
from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.bound import document_ticks, weights_for
from seqpar.planner.forecast import Forecast
from seqpar.planner.hardware import Hardware
from seqpar.planner.memory import Memory, Moment
from seqpar.planner.problem import STAGE_BYTES, Problem
from seqpar.planner.shape import ModelShape
from seqpar.planner.step import MOST, plan_step
from seqpar.planner.training import Training

RUNGS = {  # the policy of its layers, and whether all logits are in memory
    "plain": ("none", True), "own-loss": ("none", False), "keep-attention": ("keep-attention", False),
    "full": ("full", False), "tiled": ("tiled", False), "offload": ("offload", False),
    "state-on-host": ("offload", False),
}  # fmt: skip
HOST = ("offload", "state-on-host")  # rungs that take memory of the host
MORE = 16  # micro-batches more than the fewest that are tried
ROOMY = 1 << 50  # bytes
ROOM = 1.02  # rows a rank for each of the mean, so that documents go into the fewest micro-batches


class Mix(NamedTuple):
    """What each layer keeps. The first ``number`` layers recompute by one policy, the rest by another."""

    number: int
    first: str
    rest: str
    whole_logits: bool = False
    state_on_host: bool = False

    @property
    def planned(self) -> str:
        """The policy that needs the least memory, for which batches are planned."""
        return self.first if self.number else self.rest

    def __str__(self) -> str:
        layers = f"{self.first} for the first {self.number} layers, {self.rest} for the rest"
        said = layers if self.number else f"{self.rest} for all layers"
        return said + ", state on the host" * self.state_on_host


@dataclass(frozen=True)
class LadderRow:
    """One rung on the ranks of the choice: what fits, and this batch on it.

    longest: tokens of the longest document, or of a micro-batch, that fits; 0 if none. memory: of a rank with ``rows``
    rows: those of this batch, or, if it does not fit, those of its longest document. seconds, micro_batches: of a step;
    None if the longest document does not fit.
    """

    name: str
    longest: int
    rows: int
    memory: Memory
    micro_batches: int | None = None
    seconds: float | None = None

    @property
    def limit(self) -> Moment:
        """The moment that has the most bytes for its limit."""
        return max(self.memory.limits, key=lambda each: each[0].bytes(self.rows) / max(1, each[1]))[0]


@dataclass(frozen=True)
class Choice:
    """A configuration for a batch. rows: of a rank at most. exposed: of the seconds, those that wait for weights."""

    ranks: int
    mix: Mix
    rows: int
    micro_batches: int
    seconds: float
    exposed: float
    memory: Memory


class Machine(NamedTuple):
    """A model that is trained on ranks of a machine."""

    shape: ModelShape
    hardware: Hardware
    training: Training
    ranks: int

    def of(self, micro_batches: int) -> Machine:
        """The same with so many micro-batches; from the second on all gradients are in memory."""
        several = self.training.accumulates or micro_batches > 1
        return self._replace(training=replace(self.training, accumulates=several))

    def memory(self, mix: Mix) -> Memory:
        """The memory of a rank."""
        shape, training = replace(self.shape, recompute=mix.rest), self.training
        if training.state_on_host != mix.state_on_host:
            training = replace(training, state_on_host=mix.state_on_host)
        machine = self.hardware.among(min(self.ranks, self.hardware.node))
        first, own = (mix.number, mix.first), not mix.whole_logits
        return Memory.of(shape, machine, STAGE_BYTES[-1], training, self.ranks, first=first, own_loss=own)

    def mixes(self, names: Sequence[str]) -> list[list[Mix]]:
        """Lists of two of these rungs, each mix with room for more rows than the one before.

        A list for each pair of rungs with the state on the device, and with it on the host, as far as anything fits
        there. "plain" is not mixed, and is no use where own-loss is named.
        """
        plain = Mix(0, "none", "none", True, self.training.state_on_host)
        found = [[plain]] if "plain" in names and "own-loss" not in names else []
        if list(names) == ["plain"]:
            return found
        on_host = [False] * (not self.training.state_on_host and list(names) != ["state-on-host"])
        on_host += [True] * (self.training.state_on_host or "state-on-host" in names)
        policies = list(dict.fromkeys(RUNGS[name][0] for name in names if not RUNGS[name][1]))
        layers = self.shape.layers
        for held in on_host:
            for rest, first in list(combinations(policies, 2)) or [(policies[0], policies[0])]:
                part = [Mix(n, first, rest, False, held) for n in range(layers)]
                part[0] = Mix(0, rest, rest, False, held)
                part.append(Mix(0, first, first, False, held))
                if "offload" in (rest, first) or held:  # from some layer on, the host may be the limit
                    rows = [self.memory(mix).rows for mix in part]
                    part = part[: rows.index(max(rows)) + 1] if any(rows) else part
                found.append(part)
        return found

    def longest(self, names: Sequence[str]) -> int:
        """Tokens of the longest document that fits."""
        return min(MOST, self.ranks * max(self.memory(part[-1]).rows for part in self.mixes(names)))

    def waits(self, mix: Mix, forward: float, backward: float, rows: int) -> float:
        """Seconds of a micro-batch in which a rank waits for weights, gradients or the host.

        forward, backward: seconds of the micro-batch without. FSDP2 gathers a layer's weights while the layer before
        computes, once more in backward, and reduces gradients meanwhile. The first gather and the last sum are waited
        for.
        """
        shape, t, machine = self.shape, self.training, self.hardware
        shards, weight, summed = t.over(self.ranks), DTYPE_BYTES[t.weights], DTYPE_BYTES[t.reductions]
        layer = (shape.parameters - shape.embeddings) / shape.layers
        forward, backward = forward / shape.layers, backward / shape.layers

        def gather(size: float, among: int) -> float:
            link = machine.inside if among <= machine.node else machine.across
            return size * (among - 1) / among / link.bandwidth

        again = 0.0 if t.reshard is False else gather(weight * layer, shards if t.reshard is True else int(t.reshard))
        arriving, leaving = gather(weight * layer, shards), gather(summed * layer, shards)
        copies = self.ranks // shards
        leaving += 2 * gather(summed * layer / shards, copies) if copies > 1 else 0.0
        if mix.state_on_host:  # float32 shards come from the host, and their gradients go there
            moved = summed * layer / shards / machine.host
            arriving, again, leaving = max(arriving, moved), max(again, moved), max(leaving, moved)
        ends = gather(weight * shape.embeddings, shards) + arriving + leaving
        waited = shape.layers * (max(0.0, arriving - forward) + max(0.0, again + leaving - backward))
        offloaded = (mix.first == "offload") * mix.number + (mix.rest == "offload") * (shape.layers - mix.number)
        inputs = rows * shape.hidden * DTYPE_BYTES[shape.dtype] / machine.host
        waited += offloaded * (max(0.0, inputs - forward) + max(0.0, inputs - backward))
        return waited + ends

    def step(self, mix: Mix) -> float:
        """Seconds of the optimizer's step where the state is on the host: it reads and writes the state there."""
        size = self.training.state_bytes * self.shape.parameters / self.training.over(self.ranks)
        return size / self.hardware.host if mix.state_on_host else 0.0

    @property
    def hiding(self) -> int:
        """Rows a rank from which on a layer's weights arrive while the layer before computes, attention not counted."""
        shape, shards = self.shape, self.training.over(self.ranks)
        link = self.hardware.inside if shards <= self.hardware.node else self.hardware.across
        size = DTYPE_BYTES[self.training.weights] * (shards - 1) / shards / link.bandwidth
        return -int(-size * (shape.parameters - shape.embeddings) * self.hardware.linear_rate // shape.linear_flops)


class Batch:
    """The lengths of a step, and how long they take."""

    def __init__(self, lengths: ArrayLike | Mask, shape: ModelShape, hardware: Hardware):
        self.lengths, self.shape, self.hardware = lengths, shape, hardware
        problem = Problem.of(lengths, 1, model=shape, hardware=hardware)
        self.layers, self.tokens, self.longest = problem.layers, problem.tokens, int(problem.lengths.max())
        self._alone = lru_cache(self._on_one_rank)
        self._planned = lru_cache(self._by_plans)

    def _on_one_rank(self, policy: str) -> float:
        """The least seconds of all documents on one rank, if it had the memory."""
        weights = weights_for(self.layers, replace(self.shape, recompute=policy), self.hardware)
        return int(document_ticks(self.layers, weights).sum()) * weights.second

    def alone(self, mix: Mix) -> float:
        """The least seconds of all documents on one rank, with this mix of layers."""
        n, layers = mix.number, self.shape.layers
        return (n * self._alone(mix.first) + (layers - n) * self._alone(mix.rest)) / layers

    def need(self, ranks: int, parts: int) -> int:
        """Rows a rank of so many micro-batches of about equal size."""
        rows = -(-int(self.tokens * (ROOM if parts > 1 else 1)) // (ranks * parts))
        return max(rows, -(-self.longest // ranks))

    def _by_plans(self, ranks: int, rows: int, policy: str) -> tuple[int, float, int]:
        """Micro-batches, seconds and the most rows of a rank, of a step that is planned."""
        shape = replace(self.shape, recompute=policy)
        roomy = replace(self.hardware, memory=ROOMY, reserve=0)  # the rows are what fits
        parts = plan_step(self.lengths, ranks, model=shape, hardware=roomy, max_tokens_per_rank=rows)
        forecasts = [f for part in parts if isinstance(f := part.plan.forecast, Forecast)]
        return len(parts), sum(f.seconds for f in forecasts), max(int(f.rows.max()) for f in forecasts)

    def planned(self, at: Machine, mix: Mix, memory: Memory) -> Choice:
        """A step that is planned with as many rows a rank as fit."""
        most = min(memory.rows, -(-min(self.tokens, MOST) // at.ranks))
        parts, seconds, rows = self._planned(at.ranks, most, mix.planned)
        seconds *= self.alone(mix) / self._alone(mix.planned)
        exposed = self._waits(at, mix, seconds, parts, rows)
        return Choice(at.ranks, mix, most, parts, seconds + exposed, exposed, memory)

    def _waits(self, at: Machine, mix: Mix, seconds: float, parts: int, rows: int) -> float:
        """Seconds of a step in which a rank waits. A forward takes a third of a step that recomputes nothing."""
        forward = seconds * self._alone("none") / self.alone(mix) / 3
        return parts * at.waits(mix, forward / parts, (seconds - forward) / parts, rows) + at.step(mix)

    def guessed(self, at: Machine, names: Sequence[str]) -> tuple[float, Mix, Memory] | None:
        """The mix whose step takes the least, at a lower bound of its seconds; None if the longest does not fit."""
        best: tuple[float, Mix, Memory] | None = None
        for part in at.mixes(names):
            if (most := at.memory(part[-1]).rows) < -(-self.longest // at.ranks):
                continue
            fewest = -(-self.tokens // (most * at.ranks))
            for parts in range(fewest, fewest + MORE):
                rows, of = self.need(at.ranks, parts), at.of(parts)
                mix = first_with_room(of, part, rows)
                if (memory := of.memory(mix)).rows < -(-self.longest // at.ranks):
                    continue
                seconds = self.alone(mix) / at.ranks
                seconds += self._waits(at, mix, seconds, parts, rows)
                if best is None or seconds < best[0]:
                    best = seconds, mix, memory
                if mix == part[0]:
                    break
        return best


def first_with_room(at: Machine, mixes: Sequence[Mix], rows: int) -> Mix:
    """The first with room for these rows, among mixes each of which has more than the one before; or the last."""
    return mixes[min(bisect_left(mixes, rows, key=lambda mix: at.memory(mix).rows), len(mixes) - 1)]
