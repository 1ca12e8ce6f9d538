"""Policies of who computes which document, published ones and this package's: functions of a `Case` and a knob.

A policy returns micro-batches in the order in which their ranks run them, or None where the knob cannot hold the batch.
To add one, write the function and a line in `POLICIES`. They were written from papers and repositories, not copied;
each may use the ways of sharing documents that its line names, and `schedules` gives its cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.planner.schedules import Case, Micro
from seqpar import plan_batch
from seqpar.facts.intervals import Runs, cut, summed
from seqpar.facts.layout import Layout
from seqpar.facts.value import Ints
from seqpar.plan.counts import areas_of

Schedule = list[Micro] | None
SLACK = 1 / 4  # rows of a rank above the mean that this package's plans may have


class Policy(NamedTuple):
    """A policy and its sweep.

    place: the function. knobs: the values that are tried. ways: how a group may share documents. each: choose the knob
    for every batch, by its cost; otherwise one knob serves all batches of a cell. most: the number of ranks above which
    the policy takes too long. slow: so slow that it gets few batches.
    """

    place: Callable[[Case, Any], Schedule]
    knobs: Callable[[Case], Sequence[Any]]
    ways: tuple[str, ...] = ("ulysses", "fetch")
    each: bool = False
    most: int = 1 << 20
    slow: bool = False


def lightest(values: Ints, sizes: Ints, bins: int, room: int) -> list[list[int]] | None:
    """Documents by bin: the most valuable first, to the bin of least value with enough room; None if there is none.

    Graham 1969, bounds on multiprocessing timing anomalies.
    """
    order = np.lexsort((np.arange(len(values)), -values))
    left, held = [room] * bins, [[] for _ in range(bins)]
    heap = [(0, index) for index in range(bins)]
    full: list[tuple[int, int, int]] = []  # bins that lacked room for an earlier document: -left, load, bin
    for document, value, size in zip(order.tolist(), values[order].tolist(), sizes[order].tolist(), strict=True):
        while full and -full[0][0] >= size:
            _, load, index = heapq.heappop(full)
            heapq.heappush(heap, (load, index))
        while heap and left[heap[0][1]] < size:
            load, index = heapq.heappop(heap)
            heapq.heappush(full, (-left[index], load, index))
        if not heap:
            return None
        load, index = heap[0]
        heapq.heapreplace(heap, (load + value, index))
        left[index] -= size
        held[index].append(document)
    return held


def dealt(case: Case, width: int, bins: list[list[int]]) -> list[Micro]:
    """Bins as rounds of groups of one width; bins with most pairs share a round."""
    groups = case.ranks // width
    bins = sorted((np.array(b) for b in bins if b), key=lambda b: -int(case.work[b].sum()))
    return [Micro(index % groups * width, width, b) for index, b in enumerate(bins)]


def fixed(case: Case, width: int, values: Ints) -> Schedule:
    """Groups of one width, as few rounds as hold the batch, equal values in all bins."""
    groups, room = case.ranks // width, case.room * width
    least = -(-int(case.lengths.sum()) // (room * groups))
    for rounds in range(least, 2 * least + 3):
        bins = lightest(values, case.lengths, groups * rounds, room)
        if bins is not None:
            return dealt(case, width, bins)
    return None


def static(case: Case, width: int) -> Schedule:
    """Data parallel groups of one width for the whole run, each with about the same number of tokens.

    As in DeepSpeed-Ulysses (Jacobs et al. 2023), or Megatron-LM's context parallelism as a ring (Liu et al. 2023), with
    packing.
    """
    return fixed(case, width, case.lengths)


def wlb(case: Case, width: int) -> Schedule:
    """Groups of one width, packed to equal costs of documents; each document is cut in the same way over its group.

    WLB-LLM (Wang et al. 2025, OSDI), without delaying outliers to later batches.
    """
    return fixed(case, width, case.alone(width, ("fetch",)))


def degrees(case: Case, room: int) -> Ints:
    """The least power of two of ranks that has enough rows for each document."""
    need = np.maximum(1, -(-case.lengths // room))
    return 1 << np.ceil(np.log2(need)).astype(np.int64)


def megatron(case: Case, room: int) -> Schedule:
    """Rounds of packed power-of-two groups, with degrees by memory, and squared lengths as work.

    Megatron-LM's dynamic context parallelism (``next_hdp_group_packing_aware``). Longest first, a document joins or
    opens the group with which the busiest rank has least, at most as much as the longest would give all ranks; others
    wait for the next round. Idle ranks widen the narrowest groups.
    """
    need = degrees(case, room)
    if room > case.room or need.max() > case.ranks:
        return None
    left = np.lexsort((np.arange(need.size), -case.lengths)).tolist()
    micros: list[Micro] = []
    while left:
        groups, left = _round(case, left, need, room)
        first = 0
        for width, documents in sorted(groups, key=lambda g: -g[0]):
            micros.append(Micro(first, width, np.array(documents)))
            first += width
    return micros


def _round(case: Case, documents: list[int], need: Ints, room: int) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Groups of one round as (width, documents), and the documents that are left."""
    cap = 1.05 * float(case.lengths[documents[0]]) * room
    widths = [width for width in case.widths if width <= case.ranks]
    count = {width: 0 for width in widths}
    work = {width: np.zeros(case.ranks // width) for width in widths}
    rows = {width: np.zeros(case.ranks // width) for width in widths}
    held: dict[tuple[int, int], list[int]] = {}
    free, busiest, later = case.ranks, 0.0, []
    for document in documents:
        length, best = int(case.lengths[document]), None
        if free == case.ranks:
            least = int(need[document])
            best = (length * length / least, least, 0)
        for width in [] if best else widths[int(need[document]).bit_length() - 1 :]:
            each, n = length * length / width, count[width]
            fits = np.flatnonzero(rows[width][:n] + length / width <= room)
            if fits.size:
                after = np.maximum(work[width][fits] + each, busiest)
                at = int(np.argmin(after))
                if after[at] <= cap and (best is None or after[at] < best[0]):
                    best = (after[at], width, int(fits[at]))
            if free >= width and max(each, busiest) <= cap and (best is None or max(each, busiest) < best[0]):
                best = (max(each, busiest), width, n)
            if best is not None and best[0] <= busiest:
                break
        if best is None:
            later.append(document)
            continue
        busiest, width, at = best
        if at == count[width]:
            count[width], free = at + 1, free - width
        work[width][at] += length * length / width
        rows[width][at] += length / width
        held.setdefault((width, at), []).append(document)
    return _widened([(width, list(group)) for (width, _), group in held.items()], free, case.ranks), later


def _widened(groups: list[tuple[int, list[int]]], free: int, ranks: int) -> list[tuple[int, list[int]]]:
    """Groups, with the narrowest doubled one by one until no rank is idle."""
    heap = [(width, index) for index, (width, _) in enumerate(groups)]
    heapq.heapify(heap)
    while free and heap[0][0] <= free and heap[0][0] < ranks:
        width, index = heap[0]
        heapq.heapreplace(heap, (2 * width, index))
        free -= width
        groups[index] = (2 * width, groups[index][1])
    return groups


def hybrid(case: Case, room: int) -> Schedule:
    """The same degrees, with every document a micro-batch of its own; the longest first, to the group with least work.

    Megatron-LM's hybrid context parallelism (main, ``hybrid_cp_schedule.py``, 2025).
    """
    need = degrees(case, room)
    if room > case.room or need.max() > case.ranks:
        return None
    load = np.zeros(case.ranks)
    micros = []
    for width in np.unique(need)[::-1].tolist():
        mine = np.flatnonzero(need == width)
        mine = mine[np.lexsort((mine, -case.lengths[mine]))]
        heap = [(float(work), at) for at, work in enumerate(load.reshape(-1, width).max(axis=1).tolist())]
        heapq.heapify(heap)
        for document, length in zip(mine.tolist(), case.lengths[mine].tolist(), strict=True):
            work, at = heap[0]
            heapq.heapreplace(heap, (work + length * length / width, at))
            load[at * width : (at + 1) * width] = work + length * length / width
            micros.append(Micro(at * width, width, np.array([document])))
    return micros


def bytescale(case: Case, room: int) -> Schedule:
    """Each long document on as many neighbours as it needs; short ones packed, as many steps as a rank has time for.

    ByteScale (Ge et al. 2025), hybrid data parallelism, with the costs of documents instead of their operations.
    """
    need = np.maximum(1, -(-case.lengths // room))
    if room > case.room or need.max() > case.ranks:
        return None
    load = np.zeros(case.ranks, np.int64)
    micros = []
    for width in np.unique(need[need > 1])[::-1].tolist():
        cost = case.alone(width, ("fetch",)) + case.step(width)
        mine = np.flatnonzero(need == width)
        for document in mine[np.lexsort((mine, -case.lengths[mine]))].tolist():
            start = np.lib.stride_tricks.sliding_window_view(load, width).max(axis=1)
            first = int(np.argmin(start))
            load[first : first + width] = start[first] + cost[document]
            micros.append(Micro(first, width, np.array([document])))
    short = np.flatnonzero(need == 1)
    order = short[np.lexsort((short, -case.lengths[short]))]
    return micros + _lines(case, 1, order, case.alone(1, ("fetch",)), load, room)


def laminar(case: Case, share: float) -> Schedule:
    """Aligned power-of-two groups, widest first, so that no rank waits: list scheduling of malleable jobs.

    Every document is as narrow as lets it end within a share of the bound; the longest goes to the group that is free
    first, into its open step. The strongest known planner of groups (Turek et al. 1992; Ludwig and Tiwari 1994)."""
    ways, widths = ("ulysses", "fetch"), case.widths
    times = np.stack([case.alone(width, ways) for width in widths])
    fits = np.stack([case.lengths <= width * case.room for width in widths])
    if not fits[-1].all():
        return None
    area = times * np.array(widths)[:, None]
    quick = fits & (times <= share * case.bound)
    fastest = np.where(fits, times, np.iinfo(np.int64).max).argmin(axis=0)
    chosen = np.where(quick.any(axis=0), np.where(quick, area, np.iinfo(np.int64).max).argmin(axis=0), fastest)
    load, micros = np.zeros(case.ranks, np.int64), []
    for level in np.unique(chosen)[::-1].tolist():
        mine = np.flatnonzero(chosen == level)
        order = mine[np.lexsort((mine, -times[level][mine]))]
        micros += _lines(case, widths[level], order, times[level], load, case.room)
    return micros


def _lines(case: Case, width: int, order: Ints, times: Ints, load: Ints, room: int) -> list[Micro]:
    """Micro-batches of groups of one width, each document in turn to the group with least; raises their ranks' load."""
    step, most = case.step(width), room * width
    heap = [(int(value), at) for at, value in enumerate(load.reshape(-1, width).max(axis=1))]
    heapq.heapify(heap)
    open_, left = {}, {}
    made: list[tuple[int, list[int]]] = []
    for document, length, time in zip(order.tolist(), case.lengths[order].tolist(), times[order].tolist(), strict=True):
        value, at = heap[0]
        if left.get(at, -1) >= length:
            open_[at].append(document)
        else:
            open_[at], left[at], time = [document], most, time + step
            made.append((at, open_[at]))
        left[at] -= length
        heapq.heapreplace(heap, (value + time, at))
    for value, at in heap:
        load[at * width : (at + 1) * width] = value
    return [Micro(at * width, width, np.array(documents)) for at, documents in made]


BUCKETS, SECONDS = 16, 5.0


def flexsp(case: Case, knob: tuple[int, tuple[str, ...], float]) -> Schedule:
    """Rounds of consecutive lengths; a mixed-integer program gives each round's documents to power-of-two groups.

    FlexSP (Wang et al. 2025, ASPLOS), with groups of at least two ranks, solved by HiGHS instead of SCIP within the
    given seconds for each round. A round without a better solution gets groups of one width.

    knob: rounds, ways of sharing a document, seconds.
    """
    rounds, ways, seconds = knob
    order = np.lexsort((np.arange(case.lengths.size), case.lengths))
    micros: list[Micro] = []
    for documents in _blasted(case.lengths[order], order, rounds):
        made = _solved(case, documents, ways, seconds)
        if made is None:
            return None
        micros += made
    return micros


def _blasted(lengths: Ints, order: Ints, rounds: int) -> list[Ints]:
    """Consecutive parts whose largest has as few tokens as possible."""
    edge = np.append(0, np.cumsum(lengths))
    low, high = int(lengths.max()), int(edge[-1])

    def cuts(most: int) -> list[int]:
        at = [0]
        while at[-1] < lengths.size:
            at.append(int(np.searchsorted(edge, edge[at[-1]] + most, side="right")) - 1)
        return at

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cuts(middle)) - 1 <= rounds else (middle + 1, high)
    at = cuts(low)
    return [order[a:b] for a, b in zip(at, at[1:])]


def _buckets(case: Case, documents: Ints) -> list[Ints]:
    """Documents of similar lengths together, so that rounding lengths up to their bucket's longest adds least."""
    order = documents[np.lexsort((documents, case.lengths[documents]))]
    lengths = case.lengths[order]
    edge = np.append(0, np.cumsum(lengths))
    n = order.size
    start, stop = np.arange(n)[:, None], np.arange(1, n + 1)[None]
    padding = np.where(stop > start, lengths[stop - 1] * (stop - start) - (edge[stop] - edge[start]), 1 << 60)
    best, splits = padding[0], []
    for _ in range(min(BUCKETS, n) - 1):
        # the documents before `start` in one bucket less, the others in a last one
        ways = np.append(0, best)[:-1, None] + padding
        splits.append(ways.argmin(axis=0))
        best = ways.min(axis=0)
    cuts = [n]
    for split in reversed(splits):
        cuts.append(int(split[cuts[-1] - 1]) if cuts[-1] else 0)
    edges = sorted({0, *cuts})
    return [order[a:b] for a, b in zip(edges, edges[1:])]


def _solved(case: Case, documents: Ints, ways: Sequence[str], seconds: float) -> Schedule:
    """One round: how many documents of each bucket each group takes, so that the slowest group is fastest."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix, hstack, identity, kron, vstack

    buckets = _buckets(case, documents)
    sizes = np.array([b.size for b in buckets])
    longest = np.array([int(case.lengths[b].max()) for b in buckets])
    widths = [w for w in case.widths if w > 1 and (w <= case.weights.heads or "fetch" in ways)]
    group = np.concatenate([np.full(case.ranks // w, w) for w in widths])
    time = {w: case.alone(w, ways) / 1e9 for w in widths}
    times = np.array([[time[w][b].max() for b in buckets] for w in group])
    n, k, many = group.size, sizes.size, int(sizes.sum())
    # unknowns: documents of each group and bucket, groups that exist, the time of the round
    blocks = identity(n, format="csr")

    def rows(counts: Any, exist: Any, last: Any) -> Any:
        return hstack([csr_matrix(counts), csr_matrix(exist), csr_matrix(last)])

    def each(values: np.ndarray) -> Any:
        return csr_matrix((values.ravel(), (np.repeat(np.arange(n), k), np.arange(n * k))), shape=(n, n * k))

    zero, none = np.zeros((n, 1)), np.zeros((k, n))
    fixed_ = np.array([case.step(w) for w in group]) / 1e9
    ones = each(np.ones((n, k)))
    a = vstack([
        rows(kron(np.ones((1, n)), identity(k)), none, np.zeros((k, 1))),
        rows(each(np.tile(longest, (n, 1))), -blocks.multiply(case.room * group[:, None]), zero),
        rows(each(times), blocks.multiply(fixed_[:, None]), zero - 1),
        rows(ones, -many * blocks, zero),
        rows(-ones, blocks, zero),
        rows(np.zeros((1, n * k)), group[None], np.zeros((1, 1))),
    ])  # fmt: skip
    low = np.concatenate([sizes, np.full(4 * n + 1, -np.inf)])
    high = np.concatenate([sizes, np.zeros(4 * n), [case.ranks]])
    found = milp(
        np.append(np.zeros(n * k + n), 1), constraints=LinearConstraint(a, low, high),
        integrality=np.append(np.ones(n * k + n), 0),
        bounds=Bounds(0, np.concatenate([np.tile(sizes, n), np.ones(n), [np.inf]])), options={"time_limit": seconds},
    )  # fmt: skip
    plain = _one_width(case, documents, ways)
    if found.x is None or (plain is not None and plain[0] / 1e9 < found.x[-1]):
        return None if plain is None else plain[1]
    return _groups_of(np.rint(found.x[: n * k]).astype(int).reshape(n, k), group, buckets)


def _groups_of(taken: np.ndarray, group: Ints, buckets: Sequence[Ints]) -> list[Micro]:
    """Micro-batches from the documents that each group takes of each bucket, widest first."""
    micros, first, used = [], 0, np.zeros(len(buckets), int)
    for at in np.argsort(-group, kind="stable"):
        parts = [b[used[i] : used[i] + taken[at, i]] for i, b in enumerate(buckets)]
        used += taken[at]
        if taken[at].any():
            micros.append(Micro(first, int(group[at]), np.concatenate(parts)))
            first += int(group[at])
    return micros


def _one_width(case: Case, documents: Ints, ways: Sequence[str]) -> tuple[int, list[Micro]] | None:
    """Ticks and groups of one round in groups of one width, the best that has the rows."""
    found = []
    for width in case.widths:
        bins = lightest(case.lengths[documents], case.lengths[documents], case.ranks // width, case.room * width)
        if bins is not None and (width <= case.weights.heads or "fetch" in ways):
            parts = [documents[b] for b in bins if b]
            time = case.alone(width, ways)
            micros = [Micro(index * width, width, part) for index, part in enumerate(parts)]
            found.append((max(int(time[part].sum()) for part in parts) + case.step(width), micros))
    return min(found, key=lambda item: item[0]) if found else None


def _blocks(case: Case, start: Ints, count: Ints, rank: Ints) -> Schedule:
    if np.bincount(rank, count, case.ranks).max() > case.room:
        return None
    order = np.lexsort((start, rank))
    layout = Layout.from_pieces(start[order], count[order], rank[order], case.ranks)
    return [Micro(0, case.ranks, np.arange(case.lengths.size), layout)]


def _area(case: Case, start: Ints, stop: Ints) -> Ints:
    """Attended pairs of stretches of the packed batch."""
    mask = case.layers[0][0]
    piece, source = cut(Runs(start, stop - start, np.ones_like(start)), mask.breaks)
    return summed(source, areas_of(mask, piece).sum(0), start.size)


def dispatch(case: Case, chunk: int) -> Schedule:
    """Equal chunks of the packed batch, as many on every rank; the one with most pairs goes to the rank with fewest.

    MagiAttention (SandAI 2025), its default min-heap dispatch solver.
    """
    tokens = int(case.lengths.sum())
    chunks = -(-tokens // chunk)
    most = -(-chunks // case.ranks)
    start = np.arange(chunks) * chunk
    stop = np.minimum(start + chunk, tokens)
    pairs = _area(case, start, stop)
    bins = lightest(pairs, np.ones_like(pairs), case.ranks, most)
    rank = np.empty(chunks, np.int64)
    for at, mine in enumerate(bins or []):
        rank[mine] = at
    return _blocks(case, start, stop - start, rank)


def bytes_first(case: Case, knob: tuple[int, float]) -> Schedule:
    """Blocks of documents to ranks that hold the document already, within a tolerance of the mean of pairs and rows.

    DCP (Jiang et al. 2025, SOSP), with its hypergraph partitioned greedily. The longest document goes first; a block
    goes to the least loaded rank of its document, or of all if those would exceed the tolerance."""
    block, tolerance = knob
    count = -(-case.lengths // block)
    document = np.repeat(np.arange(count.size), count)
    index = np.arange(document.size) - np.repeat(np.cumsum(count) - count, count)
    begin = (np.cumsum(case.lengths) - case.lengths)[document]
    start = begin + index * block
    rows = np.minimum(block, case.lengths[document] - index * block)
    w = case.weights
    work = case.shape.layers * (w.both.pair * _area(case, start, start + rows) + w.both.query * rows)
    work_cap = (1 + tolerance) * int(work.sum()) / case.ranks
    row_cap = min(case.room, int((1 + tolerance) * case.mean) + 1)
    order = np.lexsort((-index, document, -case.lengths[document]))
    ranks = _Ranks(case.ranks, row_cap)
    target = np.empty(document.size, np.int64)
    holders: list[int] = []
    last = -1
    items = zip(order.tolist(), document[order].tolist(), rows[order].tolist(), work[order].tolist(), strict=True)
    for at, doc, size, value in items:
        holders, last = (holders if doc == last else []), doc
        mine = [r for r in holders if ranks.left[r] >= size and ranks.load[r] + value <= work_cap]
        rank = min(mine, key=ranks.load.__getitem__) if mine else ranks.least(size)
        if rank is None:
            return None
        if not mine:
            holders = [*holders, rank]
        ranks.give(rank, size, value)
        target[at] = rank
    return _blocks(case, start, rows, target)


class _Ranks:
    """Ranks by load; some are too full for the last blocks."""

    def __init__(self, ranks: int, rows: int) -> None:
        self.load, self.left = [0] * ranks, [rows] * ranks
        self._free = [(0, rank) for rank in range(ranks)]
        self._full: list[tuple[int, int]] = []

    def give(self, rank: int, size: int, value: int) -> None:
        """Put a block on a rank."""
        self.load[rank] += value
        self.left[rank] -= size
        heapq.heappush(self._free, (self.load[rank], rank))

    def least(self, size: int) -> int | None:
        """The rank of least load with so many free rows, or None."""
        while self._full and -self._full[0][0] >= size:
            rank = heapq.heappop(self._full)[1]
            heapq.heappush(self._free, (self.load[rank], rank))
        while self._free:
            load, rank = self._free[0]
            if load == self.load[rank] and self.left[rank] >= size:
                return rank
            heapq.heappop(self._free)
            # entries with outdated loads are dropped
            if load == self.load[rank]:
                heapq.heappush(self._full, (-self.left[rank], rank))
        return None


def ours(case: Case, lockstep: bool) -> Schedule:
    """This package's plan. Rivals may fill a rank's memory with rows; here one has at most a quarter above the mean.

    lockstep: how the ranks run, not a knob to sweep: each figure has the plan that was made for it.
    """
    plan = plan_batch(
        case.lengths, case.ranks, masks=case.mask, model=case.shape, hardware=case.machine, token_slack=SLACK,
        max_tokens_per_rank=case.room, lockstep=lockstep,
    )  # fmt: skip
    widths = np.broadcast_to(np.asarray(plan.ulysses, np.int64), case.lengths.shape)
    return [Micro(0, case.ranks, np.arange(case.lengths.size), plan.layout, widths, (plan.node is not None,))]


def _rooms(case: Case) -> list[int]:
    """Numbers of rows of a rank that group policies may fill: parts and multiples of the mean."""
    parts = (1, 2, 4, 6, 8) if case.ranks <= 512 else (1, 2)
    return sorted({min(case.room, case.mean * part // 4) for part in parts})


def _shares(case: Case) -> Sequence[float]:
    return (0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 1.0, 1.15) if case.ranks <= 512 else (0.25, 0.5, 0.8, 0.95)


def _blocking(case: Case) -> list[tuple[int, float]]:
    sizes = (512, 1024, 2048, 4096) if case.ranks <= 64 else (2048, 4096) if case.ranks <= 512 else (4096,)
    return [(size, part) for size in sizes for part in ((0.01, 0.03, 0.1) if case.ranks <= 64 else (0.1,))]


def _chunks(case: Case) -> list[int]:
    return [256, 512, 1024, 2048, 4096] if case.ranks <= 512 else [512, 2048]


def _widths(case: Case) -> list[int]:
    return [width for width in case.widths if (1 if case.ranks <= 512 else 8) <= width <= 64]


def _head_widths(case: Case) -> list[int]:
    return [width for width in case.widths if width <= case.weights.heads]


def _rounds(case: Case) -> list[tuple[int, tuple[str, ...], float]]:
    least = -(-int(case.lengths.sum()) // (case.room * case.ranks))
    return [(least + more, ("ulysses", "fetch"), 2.0) for more in range(2 if case.ranks > 8 else 3)]


RIVALS: dict[str, Policy] = {
    "static ring": Policy(static, _widths, ways=("ring",)),
    "static ulysses": Policy(static, _head_widths, ways=("ulysses",)),
    "homogeneous": Policy(static, _widths, each=True),
    "megatron": Policy(megatron, _rooms),
    "megatron hybrid": Policy(hybrid, _rooms),
    "wlb": Policy(wlb, _widths, ways=("fetch",)),
    "bytescale": Policy(bytescale, _rooms, ways=("fetch",)),
    "laminar": Policy(laminar, _shares, each=True),
    "dispatch": Policy(dispatch, _chunks),
    "bytes first": Policy(bytes_first, _blocking),
    # beyond 64 ranks the program finds nothing within its authors' seconds
    "flexsp": Policy(flexsp, _rounds, each=True, most=64, slow=True),
}
POLICIES: dict[str, Policy] = {"seqpar": Policy(ours, lambda case: [False, True])} | RIVALS
