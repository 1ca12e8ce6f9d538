"""How states of recurrent layers travel between ranks: four ways, what each sends, and which one costs least.

A document with runs on ranks 0, 1, 2 and 3, and the bytes that a rank sends of it, with states S and maps M::

    gather     0 ──► 1, 2, 3    1 ──► 2, 3    2 ──► 3  S and M (not the first run's) to each later rank, one exchange
    chain      0 ──► 1 ──► 2 ──► 3                     S once, to the next run, in blocks of heads, one a step
    pipeline   0 ──► 1 ──► 2 ──► 3                     S once, to the next run, each block of heads when it is computed
    rows       rows go to a contiguous layout, and results back; between the two, states travel by one of the others

A state that is gathered or passed on in a chain is what a run leaves from zero, computed beforehand with its map. In a
pipeline a run is computed once, from the state that enters it, and ranks wait for each other's blocks. Of a chain::

    step          1      2      3      4
    rank 0 to 1   b0     b1
    rank 1 to 2          b0     b1
    rank 2 to 3                 b0     b1               3 hops and 2 blocks: 4 exchanges

Costs are in bytes: those of the busiest rank; `LATENCY` for each exchange that follows another one; and what a link
moves while a rank computes more than it would alone, or waits for others' computation. In a chain and a gather the
busiest rank computes states and maps beforehand. In a pipeline of B blocks the last of n hops begins after n blocks of
a run, so with W for the work of the longest run's rows, in bytes, and `LATENCY` L, in addition to the bytes::

    n (W / B + L + S / B) + (B - 1) L

and more where a device computes several heads at once, but a block has fewer: `seqpar.plan.recurrence` has the work.
Everything is computed from integers that all ranks have, so all make the same choice. Sources: Sun et al. 2025 (LASP-2)
gather; Sun et al. 2024 (LASP) is the pipeline of one block; Chou et al. 2025 (ZeCO) is the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from seqpar.plan.recurrence import LayerBytes, LayerWork, head_cuts
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel_counts import Counts, chained, gathered, neighbours, relaid

STATE_WAYS = ("gather", "chain")
LAYER_WAYS = (*STATE_WAYS, "pipeline", "rows")
HALO_WAYS = ("halo", "rows")
LATENCY = 1 << 19  # what an exchange costs besides its bytes, in bytes: 10 microseconds of a link of 50 GB/s


class TravelWay(NamedTuple):
    """A way of travel. travel: its name. blocks: of heads. steps: exchanges in each direction. cost: in bytes.

    inside: of rows, how states travel in the contiguous layout.
    """

    travel: str
    blocks: int
    steps: int
    cost: int
    inside: TravelWay | None = None


def check_travel(call: str, travel: object, ways: Sequence[str]) -> None:
    """Raise ValueError unless a call's `travel` is "auto" or one of the ways."""
    if travel not in ("auto", *ways):
        raise ValueError(f"{call}: travel must be one of auto, {', '.join(ways)}, got {travel!r:.200}")


def hops(runs: DocumentRuns) -> int:
    """The longest chain of hand-offs of a state from rank to rank."""
    return max(0, int(np.bincount(runs.document).max(initial=0)) - 1)


def state_way(runs: DocumentRuns, layer: LayerBytes, travel: str = "auto") -> TravelWay:
    """How the states of all runs travel: by the named way, or by the cheaper one."""
    serial = hops(runs)
    if not serial:
        return TravelWay("gather" if travel == "auto" else travel, 1, 0, 0)
    ways, made = [], _making(runs, layer.work)
    if travel != "chain":
        states, maps = gathered(runs)
        cost = LATENCY + states.times(layer.state).plus(maps.times(layer.map)).busiest + made
        ways.append(TravelWay("gather", 1, 1, cost))
    if travel != "gather":
        busiest = chained(runs).busiest * layer.state
        for blocks in head_cuts(max(layer.heads, 1), max(layer.heads, 1)):
            steps = serial + blocks - 1
            # before a rank's first block and after its last one, others pass on theirs
            cost = steps * LATENCY + busiest + (serial - 1) * (layer.state // blocks) + made
            ways.append(TravelWay("chain", blocks, steps, cost))
    return min(ways, key=lambda way: way.cost)


def _making(runs: DocumentRuns, work: LayerWork | None) -> int:
    """The time, in bytes, that the busiest rank takes for the states and maps of runs that others continue."""
    if work is None:
        return 0
    return int(runs.leaving.max()) * work.rounds() * work.leave


def _pipeline(runs: DocumentRuns, layer: LayerBytes, work: LayerWork) -> TravelWay:
    serial = hops(runs)
    if not serial:
        return TravelWay("pipeline", 1, 0, 0)
    longest, most = int(runs.of_cut_documents.count.max()), int(runs.tokens.max())
    busiest, ways = chained(runs).busiest * layer.state, []
    for blocks in work.blocks:
        hop = longest * work.rounds(blocks) * work.row + LATENCY + layer.state // blocks
        idle = most * (blocks * work.rounds(blocks) - work.rounds()) * work.row  # of a device with heads of one block
        cost = serial * hop + (blocks - 1) * LATENCY + busiest + idle
        ways.append(TravelWay("pipeline", blocks, serial * blocks, cost))
    return min(ways, key=lambda way: way.cost)


def layer_way(runs: DocumentRuns, layer: LayerBytes, travel: str = "auto") -> TravelWay:
    """How states or rows travel: by the named way, or by the cheapest one."""
    if not layer.heads:
        return TravelWay("gather", 1, 0, 0)
    ways = [] if travel == "rows" else _between_runs(runs, layer, travel)
    if travel == "rows" or (travel == "auto" and ways[0].steps):
        between = lambda within: min(_between_runs(within, layer), key=lambda way: way.cost)  # noqa: E731
        ways += _rows_ways(runs, layer.row + layer.out, between, ways)
    return min(ways, key=lambda way: way.cost)


def inside(runs: DocumentRuns, way: TravelWay) -> tuple[DocumentRuns, TravelWay]:
    """The runs between which states or halos pass, and how."""
    return (runs, way) if way.inside is None else (runs.relaid(), way.inside)


def _between_runs(runs: DocumentRuns, layer: LayerBytes, travel: str = "auto") -> list[TravelWay]:
    """The ways of states from run to run: the named one, or all."""
    ways = [state_way(runs, layer, travel)] if travel != "pipeline" else []
    if travel == "pipeline" or (travel == "auto" and layer.work is not None):
        assert layer.work is not None
        ways.append(_pipeline(runs, layer, layer.work))
    return ways


def halo_way(runs: DocumentRuns, reach: int, row: int, travel: str = "auto") -> TravelWay:
    """How rows of `row` bytes reach a filter: "halo" for those before each run, "rows" for all to be relaid."""
    ways = [_halo(runs, reach, row)] if travel != "rows" else []
    if travel == "rows" or (travel == "auto" and ways[0].steps):
        ways += _rows_ways(runs, 2 * row, lambda within: _halo(within, reach, row), ways)
    return min(ways, key=lambda way: way.cost)


def _halo(runs: DocumentRuns, reach: int, row: int) -> TravelWay:
    busiest = neighbours(runs, reach).busiest * row if reach else 0
    return TravelWay("halo", 1, 1, LATENCY + busiest) if busiest else TravelWay("halo", 1, 0, 0)


def _rows_ways(
    runs: DocumentRuns, size: int, inside: Callable[[DocumentRuns], TravelWay], others: Sequence[TravelWay]
) -> list[TravelWay]:
    """The way of relaid rows; none if moving them alone costs more than another way."""
    moved = relaid(runs).busiest
    steps, cost = (2, 2 * LATENCY + moved * size) if moved else (0, 0)
    if any(way.cost <= cost for way in others):
        return []
    within = inside(runs.relaid())
    return [TravelWay("rows", 1, steps + within.steps, cost + within.cost, within)]


def state_bytes(runs: DocumentRuns, layer: LayerBytes, way: TravelWay) -> Counts:
    """The bytes that ranks send and receive for states, and for rows where these are relaid, in forward.

    Backward sends the same the other way. Not counted are the states that a call returns, where rows are relaid.
    """
    if way.inside is not None:
        return relaid(runs).times(layer.row + layer.out).plus(state_bytes(runs.relaid(), layer, way.inside))
    if way.travel in ("chain", "pipeline"):
        return chained(runs).times(layer.state)
    states, maps = gathered(runs)
    return states.times(layer.state).plus(maps.times(layer.map))


def halo_bytes(runs: DocumentRuns, layer: LayerBytes, way: TravelWay, *, backward: bool = False) -> Counts:
    """The bytes that ranks send and receive for a layer's convolution, in forward or in backward."""
    if way.inside is not None:
        inside = halo_bytes(runs.relaid(), layer, way.inside, backward=backward)
        return relaid(runs).times(2 * layer.tap).plus(inside)
    counts = neighbours(runs, layer.reach)
    return counts.swapped.times(layer.tap_grad) if backward else counts.times(layer.tap)
