"""The best plan of a small batch by mixed-integer programming, by which the planner and its bound are judged.

Documents are cut into blocks; each rank takes some whole blocks; width 1, and transfers take no time. With ``x[b, r]``
whether rank ``r`` has block ``b``, the slowest rank's ticks ``T`` are minimised under::

    sum_r x[b, r] = 1                                              every block once
    sum_b rows[b] x[b, r] <= room                                  the rows of a rank
    s[b, r] >= x[b, r] - x[b - 1, r]                               a piece starts at b
    g[c, r] >= seen[b, c] (x[b, r] - x[c, r])                      keys of c that rank r fetches
    z[r] >= m[b, r] >= x[b, r] - x[c, r]   where seen[b, c] > 0    rank r fetches at all, b is merged
    T >= sum_b (rows, pairs)[b] x[b, r] + piece s[b, r] + key g[b, r] + query rows[b] m[b, r] + stage z[r]

which under causal and full masks is what `cost.ticks` counts where all fetched keys come in one stage, and never more
under any other. Ranks are alike, so the blocks in order of their cost may be taken to lie on the first ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

from seqpar.facts.intervals import expand
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, integer
from seqpar.plan import Plan
from seqpar.planner.bound import lower_bound
from seqpar.planner.cost import Layers, Weights, counted, ticks
from seqpar.planner.forecast import Forecast
from seqpar.planner.problem import STAGE_BYTES, Problem
from seqpar.planner.scale import weights_for

TOLERANCE = 1e-6  # of HiGHS' feasibility, relative to the bound


class Optimum(NamedTuple):
    """The best plan that was found, and the ticks that no plan of whole blocks and width 1 can beat.

    Both count what ranks compute: ``plan.forecast`` has the exposed transfers besides.
    """

    plan: Plan
    least: int


class Blocks(NamedTuple):
    """Consecutive tokens of documents, in position order: start and rows of each, and whether it begins a document."""

    start: Ints
    rows: Ints
    begins: NDArray[np.bool_]


def optimum(problem: Problem, *, block: int = 1, seconds: float = 60.0) -> Optimum:
    """The best plan of whole blocks and width 1 that HiGHS finds: its slowest rank computes least.

    block: tokens of a block; a document's last may have fewer. seconds: for HiGHS; ``least`` is valid whenever it
    stops, and equals the ticks of the plan where it finished. Meant for some tens of blocks on a few ranks.

    Raises: ValueError where `plan_batch` does, and if no plan was found: blocks too long for the rows of the ranks, or
    too little time.
    """
    lengths, ranks, layers, room = problem.lengths, problem.ranks, problem.layers, problem.room
    shape, machine = problem.model, problem.hardware
    w = weights_for(layers, shape, machine, stage_bytes=STAGE_BYTES[-1], rows=int(room.max()))
    blocks, bound = blocks_of(lengths, integer("block", block, 1)), lower_bound(layers, w, ranks)
    rank, least = _solved(blocks, layers, w, room, bound, seconds)
    order = np.argsort(rank, kind="stable")
    layout = Layout.from_pieces(blocks.start[order], blocks.rows[order], rank[order], ranks, name="optimal")
    counts = counted(layers, layout, widths=np.ones_like(lengths), node=1, forwarded=False)
    plan = Plan(layers[0][0], layout, stage_bytes=STAGE_BYTES[-1])
    t = ticks(counts, w, stage_bytes=STAGE_BYTES[-1])
    forecast = Forecast(t, bound, w.second, counts.rows, problem.memory, shape, machine, problem.node)
    return Optimum(plan.with_forecast(forecast), least)


def blocks_of(lengths: Ints, block: int) -> Blocks:
    """Documents cut into blocks."""
    count = -(-lengths // block)
    inside = expand(np.zeros_like(count), count)
    start = np.repeat(np.cumsum(lengths) - lengths, count) + inside * block
    rows = np.minimum(block, np.repeat(lengths, count) - inside * block)
    return Blocks(start, rows, inside == 0)


class _Program:
    """Variables and constraints of a mixed-integer program while it is written down."""

    def __init__(self) -> None:
        self.least: list[Ints] = []
        self.most: list[Ints] = []
        self.integer: list[Ints] = []
        self.size = self.rows = 0
        self.entries: list[tuple[Any, Any, Any]] = []
        self.sides: list[tuple[Any, Any]] = []

    def variables(self, *shape: int, least: float = 0.0, most: Any = 1.0, integer: bool = False) -> Ints:
        """The indices of new variables."""
        index = self.size + np.arange(int(np.prod(shape)))
        self.size += index.size
        self.least.append(np.full(index.size, least))
        self.most.append(np.broadcast_to(most, shape).ravel())
        self.integer.append(np.full(index.size, int(integer)))
        return index.reshape(shape)

    def at_least(self, side: Any, *terms: tuple[Any, Any], most: float = np.inf) -> None:
        """New constraints ``side <= sum of factors * variables <= most``; terms: (factors, variables [rows, n])."""
        rows = self.rows + np.arange(len(terms[0][1]))
        self.rows += rows.size
        for factor, variables in terms:
            shape = variables.shape
            at = np.broadcast_to(rows.reshape(-1, *[1] * (variables.ndim - 1)), shape)
            self.entries.append((np.broadcast_to(factor, shape).ravel(), at.ravel(), variables.ravel()))
        self.sides.append((np.broadcast_to(side, rows.shape), np.full(rows.size, most)))

    def solve(self, cost: int, seconds: float) -> Any:
        """The solution of HiGHS, which minimises the variable ``cost``."""
        value, row, column = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        matrix = sparse.csr_array((value, (row, column)), shape=(self.rows, self.size))
        low, high = (np.concatenate(part) for part in zip(*self.sides, strict=True))
        objective = np.zeros(self.size)
        objective[cost] = 1.0
        return optimize.milp(
            objective,
            integrality=np.concatenate(self.integer),
            bounds=optimize.Bounds(np.concatenate(self.least), np.concatenate(self.most)),
            constraints=optimize.LinearConstraint(matrix, low, high),
            options={"time_limit": seconds, "mip_rel_gap": TOLERANCE},
        )


def _solved(blocks: Blocks, layers: Layers, w: Weights, room: Ints, bound: int, seconds: float) -> tuple[Ints, int]:
    """The rank of each block, and the ticks that no choice of them can beat."""
    count, ranks = blocks.rows.size, room.size
    fixed = blocks.rows * (w.row + w.label)
    program = _Program()
    slowest = program.variables(1, least=1.0, most=np.inf)
    by_cost = np.empty(count, np.int64)
    by_cost[np.lexsort((np.arange(count), -_compute(blocks, layers, w)))] = np.arange(count)
    x = program.variables(count, ranks, most=(np.arange(ranks) <= by_cost[:, None]).astype(float), integer=True)
    program.at_least(1.0, (1.0, x), most=1.0)
    program.at_least(-room.astype(float), (-blocks.rows, x.T))
    terms: list[tuple[Any, Any]] = []
    for mask, layer in layers:
        own, more = _of_mask(program, x, blocks, mask, layer, w)
        fixed, terms = fixed + own, terms + more
    scale = float(bound)
    start = (w.forward.stage + w.backward.stage) * sum(layer for _, layer in layers)
    terms = [(-(factor / scale), variables) for factor, variables in [(fixed, x.T), *terms]]
    program.at_least(start / scale, (1.0, np.repeat(slowest[None], ranks, 0)), *terms)
    answer = program.solve(int(slowest[0]), seconds)
    if answer.x is None:
        raise ValueError(
            f"HiGHS found no plan of {count} blocks on {ranks} ranks of at most {int(room[0])} rows within {seconds} s "
            f"({answer.message}); give more seconds, smaller blocks or more token_slack"
        )
    # HiGHS computes in floating point
    least = int(answer.mip_dual_bound * scale * (1 - TOLERANCE))
    return np.rint(answer.x[x]).astype(np.int64).argmax(1), max(bound, least)


def _compute(blocks: Blocks, layers: Layers, w: Weights) -> Ints:
    """The ticks of the rows and pairs of each block."""
    ticks = blocks.rows * (w.row + w.label)
    for mask, layer in layers:
        ticks = ticks + layer * (w.query * blocks.rows + w.pair * w.areas(_pairs(blocks, mask)))
    return ticks


def _pairs(blocks: Blocks, mask: Mask) -> Ints:
    """The attended pairs of the queries of each block."""
    lo, hi = mask.bounds(np.arange(mask.tokens))
    return np.add.reduceat(hi - lo, blocks.start)


def _seen(blocks: Blocks, mask: Mask) -> Ints:
    """The number of keys of each block that some query of each block sees, [blocks, blocks]."""
    lo, hi = mask.bounds(np.arange(mask.tokens))
    seen = np.zeros((blocks.rows.size, blocks.rows.size), np.int64)
    for b, (start, rows) in enumerate(zip(blocks.start.tolist(), blocks.rows.tolist(), strict=True)):
        low, high = lo[start : start + rows], hi[start : start + rows]
        change = np.bincount(low, minlength=mask.tokens + 1) - np.bincount(high, minlength=mask.tokens + 1)
        seen[b] = np.add.reduceat(np.cumsum(change)[:-1] > 0, blocks.start, dtype=np.int64)
    return seen


def _of_mask(
    program: _Program, x: Ints, blocks: Blocks, mask: Mask, layer: int, w: Weights
) -> tuple[Ints, list[tuple[Any, Any]]]:
    """The ticks that layers of one mask add: of each block, and factors of new variables [ranks, n]."""
    count, ranks = x.shape
    # tally counts pieces from one kink of the bounds to the next
    kinks = mask.breaks
    inside = np.searchsorted(kinks, blocks.start + blocks.rows) - np.searchsorted(kinks, blocks.start)
    always = inside + (~np.isin(blocks.start, kinks) & blocks.begins)
    fixed = layer * (w.query * blocks.rows + w.pair * w.areas(_pairs(blocks, mask)) + w.piece * always)
    follows = np.flatnonzero(~np.isin(blocks.start, kinks) & ~blocks.begins)
    starts, merged = program.variables(follows.size, ranks), program.variables(count, ranks)
    if follows.size:
        program.at_least(0.0, (1.0, starts.reshape(-1, 1)), (-1.0, x[follows].reshape(-1, 1)),
                         (1.0, x[follows - 1].reshape(-1, 1)))  # fmt: skip
    seen = _seen(blocks, mask)
    fetched = program.variables(count, ranks, most=blocks.rows[:, None].astype(float))
    fetches = program.variables(ranks)
    sees, by = np.nonzero(seen * (1 - np.eye(count, dtype=np.int64)))
    if sees.size:
        query, key = x[sees].reshape(-1, 1), x[by].reshape(-1, 1)
        many = np.repeat(seen[sees, by], ranks)[:, None].astype(float)
        program.at_least(0.0, (1.0, fetched[by].reshape(-1, 1)), (-many, query), (many, key))
        program.at_least(0.0, (1.0, merged[sees].reshape(-1, 1)), (-1.0, query), (1.0, key))
        program.at_least(0.0, (1.0, np.tile(fetches, count)[:, None]), (-1.0, merged.reshape(-1, 1)))
    stage = w.forward.stage + w.backward.stage
    return fixed, [
        (float(layer * w.piece), starts.T),
        (float(layer * w.key), fetched.T),
        (layer * w.query * blocks.rows.astype(float), merged.T),
        (float(layer * stage), fetches[:, None]),
    ]
