"""The decisions of a policy for a batch, and their cost under the planner's model.

A policy puts documents into micro-batches. A `Micro` is one packed step of ``width`` consecutive ranks. Either they
share all its documents evenly, whose costs are closed forms of tokens, pairs and documents, or a `Layout` assigns its
tokens to ranks, and the costs are counted. The ways of sharing evenly:

    ulysses   tokens are traded for heads, every rank sees all tokens for its heads; width at most the query heads
    fetch     each document zigzag over the ranks, keys come from those that hold them, as far as they are seen
    ring      the same, but all keys of the group pass every rank

With a mask of its own instead of causal documents, a batch is counted in its zigzag layouts, for "fetch" and "ring".

Every policy has the kernels, sizes of stages, overlap and link prices of `seqpar.planner.cost`. A micro-batch starts
when all ranks of its group have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.plan.counts import Tally
from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.bound import document_ticks, lower_bound
from seqpar.planner.cost import Ticks, Weights, counted, ticks, timeline
from seqpar.planner.count import areas
from seqpar.planner.hardware import Hardware
from seqpar.planner.memory import Memory
from seqpar.planner.problem import STAGE_BYTES, layers_of
from seqpar.planner.shape import ModelShape

ONE_STAGE = 1 << 62
STATE = 16  # bytes of a parameter with gradient and optimiser in mixed precision, sharded over all ranks


class Micro(NamedTuple):
    """A packed step of ranks ``first`` to ``first + width``. documents: indices of the batch, in packed order.

    layout: who holds what; None shares every document evenly. With a layout: ulysses, the width of each document;
    forwarded, whether a key enters a node once and is forwarded inside it, both to choose the cheaper.
    """

    first: int
    width: int
    documents: Ints
    layout: Layout | None = None
    ulysses: Ints | None = None
    forwarded: tuple[bool, ...] = (False, True)


class Cost(NamedTuple):
    """The ticks of micro-batches or ranks: in all, without waiting for transfers, and of the head alone."""

    total: Ints
    busy: Ints
    head: Ints


class Outcome(NamedTuple):
    """Ticks of a batch.

    free: the slowest rank's own path. lockstep: the sum over layers of the slowest rank's. imbalance: `free` if
    transfers took no time. rounds: micro-batches of the rank with most. rows: most of a micro.
    """

    free: int
    lockstep: int
    imbalance: int
    rounds: int
    rows: int


@dataclass(frozen=True)
class Case:
    """A batch, and the machine that runs it.

    room: rows that a micro-batch may have on a rank. micro: fixed ticks of a micro-batch; the first one is free, since
    every policy has one. mask: of the documents, if they are not causal with the model's windows.
    """

    lengths: Ints
    ranks: int
    shape: ModelShape
    machine: Hardware
    room: int
    micro: int
    weights: Weights
    mask: Mask | None = None

    @classmethod
    def of(
        cls, lengths: Ints, ranks: int, shape: ModelShape, machine: Hardware, *, micro: float = 0.01,
        room: int | None = None, mask: Mask | None = None,
    ) -> Case:  # fmt: skip
        """A case. micro: seconds. room: by default the rows that memory holds beside the sharded state of the model."""
        if shape.recurrent is not None:
            raise NotImplementedError(f"{shape.name} has recurrent layers, whose exchanges no policy here counts")
        machine = with_state(machine.among(min(ranks, machine.node)), shape, ranks)
        rows = Memory.of(shape, machine, STAGE_BYTES[-1]).rows if room is None else room
        w = Weights.of(shape, machine)
        return cls(np.asarray(lengths, np.int64), ranks, shape, machine, rows, round(micro / w.second), w, mask)

    @cached_property
    def layers(self) -> list:
        """The masks of the layers."""
        return list(layers_of(self.lengths, self.mask, self.shape))

    def layers_for(self, documents: Ints) -> list:
        """The masks of the layers, of some of the documents."""
        mask = None if self.mask is None else self.mask.pick(documents)
        return list(layers_of(self.lengths[documents], mask, self.shape))

    @cached_property
    def areas(self) -> Ints:
        """Attended pairs of each document."""
        return areas(self.layers[0][0])

    @cached_property
    def bound(self) -> int:
        """Ticks that no layout of the batch beats."""
        return lower_bound(self.layers, self.weights, self.ranks)

    @cached_property
    def work(self) -> Ints:
        """Ticks of each document whole on one rank."""
        return document_ticks(self.layers, self.weights)

    @property
    def mean(self) -> int:
        """The mean rows of a rank, rounded up."""
        return -(-int(self.lengths.sum()) // self.ranks)

    @cached_property
    def widths(self) -> list[int]:
        """Powers of two that divide the ranks."""
        return [1 << i for i in range(self.ranks.bit_length()) if self.ranks % (1 << i) == 0]

    def alone(self, width: int, ways: Sequence[str]) -> Ints:
        """The ticks of each document in a group of its own, without the launches and latencies of every step."""
        if self.mask is not None:
            raise NotImplementedError(f"documents are priced alone if they are causal, not under {self.mask!r}")
        key = (width, *ways)
        if key not in self._known:
            self._known[key] = self._alone(width, ways)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int | str, ...], Ints]:
        return {}

    def _alone(self, width: int, ways: Sequence[str]) -> Ints:
        free = {"forward": self.weights.forward._replace(stage=0), "backward": self.weights.backward._replace(stage=0)}
        wires = {name: getattr(self.weights, name)._replace(latency=0) for name in ("inside", "across")}
        w = replace(self.weights, **free, **wires)
        ones = np.ones_like(self.lengths)
        sums = Sums(self.lengths, self.lengths**2, self.areas, ones, 0 * ones)
        return shared(self, sums, width, ways, w, ranks=samples(width, self.machine.node)).total

    def step(self, width: int) -> int:
        """Ticks of a micro-batch of a group beside its documents."""
        w, layers = self.weights, self.shape.layers
        link = w.across if width > self.machine.node else w.inside
        return self.micro + layers * (w.forward.stage + w.backward.stage + (3 * link.latency if width > 1 else 0))


def with_state(machine: Hardware, shape: ModelShape, ranks: int) -> Hardware:
    """The machine with less memory: the model's state, sharded over the ranks, takes its part."""
    return replace(machine, reserve=machine.reserve + STATE * shape.parameters // ranks)


def samples(width: int, node: int) -> Ints:
    """Some ranks of a group, the first and last of its first and last nodes and one between, for estimates."""
    return np.unique(np.clip([0, node - 1, node, width // 2, width - node, width - 1], 0, width - 1))


class Sums(NamedTuple):
    """Sums over each group's documents: tokens, squared lengths, attended pairs, number; and the group's first rank."""

    tokens: Ints
    squares: Ints
    pairs: Ints
    documents: Ints
    first: Ints


def shared(
    case: Case, sums: Sums, width: int, ways: Sequence[str], w: Weights, *, ranks: Ints | None = None
) -> Cost:  # fmt: skip
    """Costs of groups of one width that share their documents evenly, each in the best of the ways.

    ranks: the ranks of a group that count, all by default.
    """
    if width == 1:
        return _whole(case, sums, w)
    ranks = np.arange(width) if ranks is None else ranks
    known = {
        "ulysses": lambda: _ulysses(case, sums, width, w),
        "fetch": lambda: _fetch(case, sums, width, w, ranks),
        "ring": lambda: _ring(case, sums, width, w),
    }
    found = [known[way]() for way in ways if way != "ulysses" or width <= w.heads]
    best = np.argmin(np.stack([cost.total for cost in found]), axis=0)
    pick = np.arange(best.size)
    return Cost(*(np.stack(column)[best, pick] for column in zip(*found, strict=True)))


def _cost(case: Case, rows: Ints, busy: Ints, waiting: Ints, w: Weights) -> Cost:
    """The costs of ranks, from their ticks of one layer [2, ranks]."""
    head = rows * w.label
    work = case.shape.layers * busy.sum(0) + rows * w.row + head
    return Cost(work + case.shape.layers * waiting.sum(0), work, head)


def _slowest(cost: Cost, width: int) -> Cost:
    """The cost of the slowest rank of each group, from the costs of all ranks, group after group."""
    return Cost(*(column.reshape(-1, width).max(axis=1) for column in cost))


def _tally(rows: Ints, **counts: Ints) -> Tally:
    none = np.zeros_like(rows)
    return Tally(rows, *(counts.get(name, none) for name in Tally._fields[1:]))


def _whole(case: Case, sums: Sums, w: Weights) -> Cost:
    t = _tally(sums.tokens, pieces=sums.documents, near=sums.pairs)
    times = timeline(t, w, width=1, stage_bytes=ONE_STAGE)
    return _cost(case, sums.tokens, times.busy, times.waiting, w)


def _ulysses(case: Case, sums: Sums, width: int, w: Weights) -> Cost:
    t = _tally(sums.tokens, pieces=sums.documents, near=sums.pairs)
    times = timeline(t, w, width=width, stage_bytes=ONE_STAGE)
    rows = -(-sums.tokens // width)
    enter, leave = trade(case, rows, width, w)
    waiting = np.stack([enter + leave, leave + enter])
    return _cost(case, rows, times.busy, waiting, w)


def trade(case: Case, rows: Ints, width: int, w: Weights) -> tuple[Ints, Ints]:
    """Ticks of trading tokens for heads on the way in and out: `cost.trades`, over nodes as well.

    What goes to other nodes uses the links across while the rest uses those inside. Key heads that are fewer than the
    ranks go to each that needs them.
    """
    node = case.machine.node
    inside, across = min(width, node) - 1, max(0, width - node)
    copies = max(1, width // w.kv_heads)
    kv = case.shape.row_bytes
    queries = case.shape.heads * case.shape.dim * DTYPE_BYTES[case.shape.dtype]
    parts = []
    for kind in ("enter", "leave"):
        scale = queries + kv * copies if kind == "enter" else 1
        whole = queries + kv if kind == "enter" else 1
        near, far = (
            rows * many * getattr(link, kind) // width for many, link in ((inside, w.inside), (across, w.across))
        )
        near = np.maximum(near, rows * min(inside, 1) * getattr(w.inside, f"hop_{kind}") // width)
        latency = w.across.latency if across else w.inside.latency
        parts.append(latency + np.maximum(near, far) * scale // whole)
    return parts[0], parts[1]


def _zigzag(sums: Sums, width: int, ranks: Ints) -> tuple[Ints, Ints, dict[str, Ints]]:
    """Tokens of a chunk, ranks in their groups, and the costs by rank that do not depend on the transport."""
    rank = np.tile(ranks, sums.tokens.size)

    def each(values: Ints) -> Ints:
        return np.repeat(values, ranks.size)

    chunk = each(-(-sums.tokens // (2 * width)))
    square = each(-(-sums.squares // (4 * width * width)))
    counts = {
        "pieces": each(sums.documents) * (2 - (rank == width - 1)),
        "near": 2 * square + chunk,
        "far": (2 * width - 2) * square,
        "merging": chunk * (2 - (rank == 0)),
    }
    return chunk, rank, counts


def _fetch(case: Case, sums: Sums, width: int, w: Weights, ranks: Ints) -> Cost:
    chunk, rank, counts = _zigzag(sums, width, ranks)
    node, first = case.machine.node, np.repeat(sums.first, ranks.size)
    start = np.maximum((first + rank) // node * node - first, 0)
    stop = np.minimum(((first + rank) // node + 1) * node - first, width)
    keys, sent = chunk * (2 * width - 2 - rank), chunk * (width - 1 + rank)
    entering = keys - chunk * (stop - start - 1 + stop - 1 - rank)
    leaving = sent - chunk * (stop - start - 1 + rank - start)
    t = _tally(2 * chunk, keys=keys, sent=sent, entering=entering, leaving=leaving, **counts)
    found = []
    for stage_bytes in STAGE_BYTES:
        times = timeline(t, w, width=1, stage_bytes=stage_bytes)
        found.append(_slowest(_cost(case, 2 * chunk, times.busy, times.waiting, w), ranks.size))
    best = np.argmin(np.stack([cost.total for cost in found]), axis=0)
    return Cost(*(np.stack(column)[best, np.arange(best.size)] for column in zip(*found, strict=True)))


def _ring(case: Case, sums: Sums, width: int, w: Weights) -> Cost:
    chunk, rank, counts = _zigzag(sums, width, np.arange(width))
    node, first = case.machine.node, np.repeat(sums.first, width)
    rows = 2 * chunk
    keys = rows * (width - 1)
    here = (first + rank) // node
    before, after = (first + (rank - 1) % width) // node, (first + (rank + 1) % width) // node
    t = _tally(
        rows, keys=keys, sent=keys, entering=keys * (before != here), leaving=keys * (after != here),
        **(counts | {"merging": rows}),
    )  # fmt: skip
    busy, waiting = np.empty((2, 2, rows.size), np.int64)
    w = replace(w, inside=w.inside._replace(key=w.inside.hop_key, grad=w.inside.hop_grad))  # all keys from one peer
    # a stage has the keys of one rank
    for group in range(sums.tokens.size):
        at = slice(group * width, (group + 1) * width)
        mine = Tally(*(column[at] for column in t))
        times = timeline(mine, w, width=1, stage_bytes=max(1, int(mine.rows[0])) * w.row_bytes)
        busy[:, at], waiting[:, at] = times
    return _slowest(_cost(case, rows, busy, waiting, w), width)


def laid_out(case: Case, micro: Micro) -> list[Cost]:
    """Costs of the ranks of a micro-batch with a layout, in each way that its keys may travel."""
    layers, w = case.layers, case.weights
    if not np.array_equal(micro.documents, np.arange(case.lengths.size)):
        layers = case.layers_for(micro.documents)
    widths = np.ones(micro.documents.size, np.int64) if micro.ulysses is None else micro.ulysses
    options = []
    for forwarded in micro.forwarded:
        found = counted(layers, micro.layout, widths=widths, node=case.machine.node, forwarded=forwarded)
        options += [ticks(found, w, stage_bytes=size) for size in STAGE_BYTES]
    return [Cost(t.total, t.total - t.exposed, t.head) for t in options]


class Shared(NamedTuple):
    """Ticks of a group that shares its documents evenly, and how: a transport, and the ranks that share heads."""

    ticks: Ticks
    transport: str
    ulysses: int


def shared_by_count(case: Case, micro: Micro, ways: Sequence[str]) -> Shared:
    """As `shared` for one group, by the counts of its layout; a ring is of groups that share heads, if that is cheaper.

    Heads are shared by up to as many ranks as there are key heads, as Transformer Engine's ``a2a+p2p`` does.
    """
    w, node, options = case.weights, case.machine.node, []
    lengths = case.lengths[micro.documents]
    layers, layout = case.layers_for(micro.documents), Layout.zigzag(lengths, micro.width)
    one_peer = replace(w, inside=w.inside._replace(key=w.inside.hop_key, grad=w.inside.hop_grad))
    if "fetch" in ways:
        found = counted(layers, layout, widths=np.ones_like(lengths), node=node, forwarded=False)
        options += [Shared(ticks(found, w, stage_bytes=size), "fetch", 1) for size in STAGE_BYTES]
    shares = [n for n in case.widths if n <= min(micro.width, node, w.kv_heads)]
    for heads in shares if "ring" in ways else []:
        found = counted(layers, layout, widths=np.full_like(lengths, heads), node=node, forwarded=False)
        masks = [[p._replace(tally=_around(p.tally, max(1, node // heads))) for p in parts] for parts in found.masks]
        rows = int(masks[0][0].tally.rows.max())  # a stage has the keys of one group
        stage_bytes = max(1, rows * -(-w.kv_heads // heads) * (w.row_bytes // w.kv_heads))
        cost = ticks(found._replace(masks=masks), one_peer, stage_bytes=stage_bytes)
        options.append(Shared(cost, "ring", heads))
    return min(options, key=lambda option: int(option.ticks.total.max()))


def _around(t: Tally, node: int) -> Tally:
    """The counts if all keys pass every group, and each merges all its rows. node: groups of a node."""
    keys = t.rows.sum() - t.rows
    at = np.arange(keys.size) // node
    return t._replace(
        merging=np.where(keys > 0, np.maximum(t.merging, t.rows), 0), keys=keys, sent=keys,
        entering=keys * (at != np.roll(at, 1)), leaving=keys * (at != np.roll(at, -1)),
    )  # fmt: skip


def run(case: Case, micros: Sequence[Micro], ways: Sequence[str] = ("ulysses", "fetch")) -> Outcome:
    """Seconds of the micro-batches, in the given order. Raises ValueError for an invalid schedule."""
    rows = check(case, micros)
    if len(micros) == 1 and micros[0].layout is not None:
        ways_of_keys = laid_out(case, micros[0])
        best = min(ways_of_keys, key=lambda cost: int(cost.total.max()))
        together = min(int((cost.total - cost.head).max() + cost.head.max()) for cost in ways_of_keys)
        return Outcome(int(best.total.max()), together, int(best.busy.max()), 1, rows)
    cost = costs(case, micros, ways)
    done, least = np.zeros((2, case.ranks), np.int64)
    turn = np.zeros(case.ranks, np.int64)
    layer, tail = {}, {}  # of the slowest rank, by round
    for micro, total, busy, head in zip(micros, *(column.tolist() for column in cost), strict=True):
        at = slice(micro.first, micro.first + micro.width)
        done[at] = done[at].max() + total + case.micro
        least[at] = least[at].max() + busy + case.micro
        index = int(turn[at].max())
        turn[at] = index + 1
        layer[index] = max(layer.get(index, 0), total - head)
        tail[index] = max(tail.get(index, 0), head)
    lockstep = sum(layer.values()) + sum(tail.values()) + (len(layer) - 1) * case.micro
    return Outcome(int(done.max()) - case.micro, lockstep, int(least.max()) - case.micro, int(turn.max()), rows)


def costs(case: Case, micros: Sequence[Micro], ways: Sequence[str]) -> Cost:
    """The cost of each micro-batch, of its slowest rank."""
    if case.mask is not None:
        each = [shared_by_count(case, micro, ways).ticks for micro in micros]
        parts = [(t.total, t.total - t.exposed, t.head) for t in each]
        return Cost(*np.array([[int(x.max()) for x in part] for part in parts]).T)
    cost = Cost(*np.zeros((3, len(micros)), np.int64))
    by_width: dict[int, list[int]] = {}
    for index, micro in enumerate(micros):
        if micro.layout is not None:
            raise ValueError("a layout is for a step of all ranks, and a batch of one such step")
        by_width.setdefault(micro.width, []).append(index)
    for width, indices in by_width.items():
        found = shared(case, _sums(case, [micros[i] for i in indices]), width, ways, case.weights)
        for column, values in zip(cost, found, strict=True):
            column[indices] = values
    return cost


def _sums(case: Case, micros: Sequence[Micro]) -> Sums:
    count = np.array([len(m.documents) for m in micros])
    documents = np.concatenate([m.documents for m in micros])
    edge = np.append(0, np.cumsum(count))[:-1]
    lengths = case.lengths[documents]
    first = np.array([m.first for m in micros])
    return Sums(*(np.add.reduceat(x, edge) for x in (lengths, lengths**2, case.areas[documents])), count, first)


def check(case: Case, micros: Sequence[Micro]) -> int:
    """The most rows that a rank has in a micro-batch.

    Raises: ValueError if a document is in no micro-batch or in two, or if rows do not fit.
    """
    seen = np.concatenate([m.documents for m in micros])
    if seen.size != case.lengths.size or (np.bincount(seen, minlength=case.lengths.size) != 1).any():
        raise ValueError(f"{seen.size} documents are placed, of {case.lengths.size}; place each once")
    rows = 0
    for micro in micros:
        if micro.layout is not None:
            rows = max(rows, int(micro.layout.sizes().max()))
        else:
            rows = max(rows, -(-int(case.lengths[micro.documents].sum()) // micro.width))
        if not (micro.first >= 0 and micro.first + micro.width <= case.ranks and len(micro.documents)):
            raise ValueError(f"ranks {micro.first} + {micro.width} are not among {case.ranks}, or hold no document")
    if rows > case.room:
        raise ValueError(f"{rows:,} rows on a rank, and {case.room:,} fit; share the documents among more ranks")
    return rows
