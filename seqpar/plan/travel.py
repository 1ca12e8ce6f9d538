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
a run, so with W for the work of the longest run's rows, in bytes, and `LATENCY` L, beside the bytes::

    n (W / B + L + S / B) + (B - 1) L

and more where a device computes several heads at once, but a block has fewer: `seqpar.plan.travel_work` has the work.
Everything is computed from integers that all ranks have, so they choose alike. Sources: Sun et al. 2025 (LASP-2)
gather; Sun et al. 2024 (LASP) is the pipeline of one block; Chou et al. 2025 (ZeCO) is the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints, whole
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.plan.travel_work import RATES, LayerWork

STATE_WAYS = ("gather", "chain")
LAYER_WAYS = (*STATE_WAYS, "pipeline", "rows")
HALO_WAYS = ("halo", "rows")
LATENCY = 1 << 19  # what an exchange costs besides its bytes, in bytes: 10 microseconds of a link of 50 GB/s
DECAYS = ("none", "scalar", "channel")


@dataclass(frozen=True)
class RecurrentShape:
    """The heads, dims and dtypes of one recurrent layer, as `seqpar.recurrent.linear_attention` takes them.

    groups: heads of queries and keys, by default ``heads``. dim, values: of a key and of a value. decay: "none",
    "scalar" for one of each head, "channel" for one of each dim of a key. beta: whether it is a delta rule. dtype: of
    q, k, v and the convolution's rows; gates: of decay and beta. taps: of the convolution before it, 1 for none.
    channels: of that convolution, by default those of q, k and v. device: "cuda" or "cpu". threads: of a rank on
    the CPU.
    """

    heads: int
    dim: int
    values: int
    groups: int | None = None
    decay: str = "scalar"
    beta: bool = False
    dtype: str = "bfloat16"
    gates: str = "float32"
    taps: int = 4
    channels: int | None = None
    device: str = "cuda"
    threads: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for heads, dims, dtypes or decays that no layer has."""
        given = [name for name in ("groups", "channels") if getattr(self, name)]
        for name in ("heads", "dim", "values", "taps", "threads", *given):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        for name in ("dtype", "gates"):
            object.__setattr__(self, name, str(getattr(self, name)).removeprefix("torch."))
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(f"{name} must be one of {', '.join(DTYPE_BYTES)}, got {getattr(self, name)!r:.200}")
        if self.decay not in DECAYS:
            raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {self.decay!r:.200}")
        if self.device not in RATES:
            raise ValueError(f"device must be one of {', '.join(RATES)}, got {self.device!r:.200}")
        if self.heads % (self.groups or self.heads):
            raise ValueError(f"heads must be a multiple of groups, got {self.heads} and {self.groups}")

    @property
    def bytes(self) -> LayerBytes:
        """The bytes of this layer's states and rows, and its work."""
        size, gate, groups = DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.gates], self.groups or self.heads
        factors = self.heads * {"none": 0, "scalar": 1, "channel": self.dim}[self.decay]
        keys, values = 2 * groups * self.dim, self.heads * self.values
        mapped = self.heads * {"none": 1, "scalar": 1, "channel": self.dim}[self.decay]
        wide = max(size, 4)
        return LayerBytes(
            self.heads,
            self.heads * self.dim * self.values * wide,
            (self.heads * self.dim**2 if self.beta else mapped) * wide,
            (keys + values) * size + (factors + (self.heads if self.beta else 0)) * gate,
            values * size,
            LayerWork.of(
                self.heads, groups, self.dim, self.values, beta=self.beta, device=self.device, threads=self.threads
            ),
        )

    @property
    def row(self) -> int:
        """Bytes of one of the convolution's rows."""
        groups = self.groups or self.heads
        channels = self.channels or 2 * groups * self.dim + self.heads * self.values
        return channels * DTYPE_BYTES[self.dtype]


class LayerBytes(NamedTuple):
    """Bytes of a layer: of a run's state and its map, and of a row of all inputs and of the output.

    heads: between which blocks are cut. work: None where states are given and not computed.
    """

    heads: int
    state: int
    map: int
    row: int = 0
    out: int = 0
    work: LayerWork | None = None


class TravelWay(NamedTuple):
    """A way of travel. travel: its name. blocks: of heads. steps: exchanges in each direction. cost: in bytes.

    inside: of rows, how states travel in the contiguous layout.
    """

    travel: str
    blocks: int
    steps: int
    cost: int
    inside: TravelWay | None = None


class Counts(NamedTuple):
    """States, maps or rows that each rank sends and receives in forward, [ranks] each; backward swaps the two."""

    sent: Ints
    received: Ints

    def times(self, size: int) -> Counts:
        """The bytes, if each has so many."""
        return Counts(self.sent * size, self.received * size)

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(self.sent + other.sent, self.received + other.received)

    @property
    def busiest(self) -> int:
        """The most that a rank sends or receives."""
        return int(max(self.sent.max(), self.received.max()))


def _by_rank(ranks: int, *pairs: tuple[Ints, Ints]) -> Ints:
    """Sums of pairs of a rank and a number."""
    sums = np.zeros(ranks, np.int64)
    for rank, number in pairs:
        np.add.at(sums, rank, number)
    return sums


def gathered(runs: DocumentRuns) -> tuple[Counts, Counts]:
    """The states and the maps that ranks gather: those of `DocumentRuns.earlier_runs`, counted without listing them."""
    return runs.memo("gathered", lambda: _gathered(runs))


def _gathered(runs: DocumentRuns) -> tuple[Counts, Counts]:
    number, first, opens = np.arange(runs.start.size), runs.first, runs.opens
    pair = runs.document * runs.ranks + runs.rank
    order = np.argsort(pair, kind="stable")
    final = np.flatnonzero(np.append(np.diff(pair[order]) > 0, True))
    last, own = order[final], np.diff(final, prepend=-1)  # of each rank in each document, and how many it has
    received = last - first[last] + 1 - own
    opened = runs.rank[first[last]] == runs.rank[last]
    final_of = np.empty_like(number)
    final_of[order] = np.repeat(last, own)
    last_in_order = np.sort(last)
    stop = np.searchsorted(runs.document, runs.document, side="right")
    takers = np.searchsorted(last_in_order, stop) - np.searchsorted(last_in_order, number, side="right")
    takers -= final_of > number  # itself
    states = Counts(_by_rank(runs.ranks, (runs.rank, takers)), _by_rank(runs.ranks, (runs.rank[last], received)))
    maps = Counts(
        _by_rank(runs.ranks, (runs.rank, np.where(opens, 0, takers))),
        _by_rank(runs.ranks, (runs.rank[last], received - ~opened)),
    )
    return states, maps


def chained(runs: DocumentRuns) -> Counts:
    """The states that ranks pass on in a chain or a pipeline: one for each run that is not its document's last."""
    passed = np.flatnonzero(~runs.closes)
    once = np.ones_like(passed)
    return Counts(_by_rank(runs.ranks, (runs.rank[passed], once)), _by_rank(runs.ranks, (runs.rank[passed + 1], once)))


def neighbours(runs: DocumentRuns, reach: int) -> Counts:
    """The rows that ranks send and receive for the `reach` rows before their runs."""
    asked = runs.rows_before(reach)
    once = np.ones_like(asked.item)
    return Counts(_by_rank(runs.ranks, (asked.owner, once)), _by_rank(runs.ranks, (asked.asking, once)))


def relaid(runs: DocumentRuns) -> Counts:
    """The rows that ranks send and receive to be in a contiguous layout, or on their way back."""
    edge = edges(runs.tokens)
    begin, end = edge[runs.rank], edge[runs.rank + 1]
    stay = np.minimum(runs.start + runs.count, end) - np.maximum(runs.start, begin)
    moved = runs.tokens - _by_rank(runs.ranks, (runs.rank, np.maximum(stay, 0)))
    return Counts(moved, moved)


# --- the choice ------------------------------------------------------------------------------------------------------


def check_travel(call: str, travel: object, ways: Sequence[str]) -> None:
    """Raise ValueError unless a call's `travel` is "auto" or one of the ways."""
    if travel not in ("auto", *ways):
        raise ValueError(f"{call}: travel must be one of auto, {', '.join(ways)}, got {travel!r:.200}")


def hops(runs: DocumentRuns) -> int:
    """How often the state of the document with most runs passes from rank to rank."""
    return int(runs.ordinal.max(initial=0))


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
        for blocks in (n for n in range(1, max(layer.heads, 1) + 1) if layer.heads % n == 0):
            steps = serial + blocks - 1
            # before a rank's first block and after its last one, others pass on theirs
            cost = steps * LATENCY + busiest + (serial - 1) * (layer.state // blocks) + made
            ways.append(TravelWay("chain", blocks, steps, cost))
    return min(ways, key=lambda way: way.cost)


def _making(runs: DocumentRuns, work: LayerWork | None) -> int:
    """The time, in bytes, that the busiest rank takes for the states and maps of runs that others continue."""
    if work is None:
        return 0
    leaving = np.flatnonzero(~runs.closes)
    rows = _by_rank(runs.ranks, (runs.rank[leaving], runs.count[leaving]))
    return int(rows.max()) * work.rounds() * work.leave


def _pipeline(runs: DocumentRuns, layer: LayerBytes, work: LayerWork) -> TravelWay:
    serial = hops(runs)
    if not serial:
        return TravelWay("pipeline", 1, 0, 0)
    longest, most = int(runs.count[~(runs.opens & runs.closes)].max()), int(runs.tokens.max())
    busiest, ways = chained(runs).busiest * layer.state, []
    for blocks in work.blocks:
        hop = longest * work.rounds(blocks) * work.row + LATENCY + layer.state // blocks
        idle = most * (blocks * work.rounds(blocks) - work.rounds()) * work.row  # of a device with heads of one block
        cost = serial * hop + (blocks - 1) * LATENCY + busiest + idle
        ways.append(TravelWay("pipeline", blocks, serial * blocks, cost))
    return min(ways, key=lambda way: way.cost)


def layer_way(runs: DocumentRuns, layer: LayerBytes, travel: str = "auto") -> TravelWay:
    """How states or rows travel: by the named way, or by the cheapest one."""
    ways = [] if travel == "rows" else _between_runs(runs, layer, travel)
    if travel == "rows" or (travel == "auto" and ways[0].steps):
        inside = min(_between_runs(runs.relaid(), layer), key=lambda way: way.cost)
        ways.append(_rows_way(runs, layer.row + layer.out, inside))
    return min(ways, key=lambda way: way.cost)


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
        ways.append(_rows_way(runs, 2 * row, _halo(runs.relaid(), reach, row)))
    return min(ways, key=lambda way: way.cost)


def _halo(runs: DocumentRuns, reach: int, row: int) -> TravelWay:
    busiest = neighbours(runs, reach).busiest * row if reach else 0
    return TravelWay("halo", 1, 1, LATENCY + busiest) if busiest else TravelWay("halo", 1, 0, 0)


def _rows_way(runs: DocumentRuns, size: int, inside: TravelWay) -> TravelWay:
    moved = relaid(runs).busiest
    steps, cost = (2, 2 * LATENCY + moved * size) if moved else (0, 0)
    return TravelWay("rows", 1, steps + inside.steps, cost + inside.cost, inside)


# --- bytes -----------------------------------------------------------------------------------------------------------


def state_bytes(runs: DocumentRuns, layer: LayerBytes, way: TravelWay) -> Counts:
    """The bytes that ranks send and receive for states, and for rows where these are relaid, in forward.

    Not those of the states that a call returns, where rows are relaid.
    """
    if way.inside is not None:
        return relaid(runs).times(layer.row + layer.out).plus(state_bytes(runs.relaid(), layer, way.inside))
    if way.travel in ("chain", "pipeline"):
        return chained(runs).times(layer.state)
    states, maps = gathered(runs)
    return states.times(layer.state).plus(maps.times(layer.map))


def halo_bytes(runs: DocumentRuns, reach: int, row: int, way: TravelWay) -> Counts:
    """The bytes that ranks send and receive for a filter of `reach` rows, in forward."""
    if way.inside is not None:
        return relaid(runs).times(2 * row).plus(halo_bytes(runs.relaid(), reach, row, way.inside))
    return neighbours(runs, reach).times(row)
