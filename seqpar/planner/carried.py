"""What recurrent layers pass between ranks under a layout, and what they cost, without deriving any rank's moves.

A layer costs a row the same wherever it is, and more in a run that others continue, whose state and map it makes. Its
rank then waits for states and for the rows before its runs, in each direction, without overlap. Both travel in the way
that the layer will choose, by `seqpar.plan.travel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqpar.facts.intervals import summed
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.plan.recurrence import LayerBytes, LayerWork
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel import LATENCY, halo_way, inside, layer_way
from seqpar.plan.travel_counts import Counts, chained, gathered, neighbours, relaid
from seqpar.planner.hardware import Hardware
from seqpar.planner.place import Pieces
from seqpar.planner.shape import ModelShape


class Items(NamedTuple):
    """What each rank passes with ranks of its node and beyond, the more of sent and received: int64 [ranks] each."""

    near: Ints
    far: Ints

    @classmethod
    def of(cls, count: Callable[[int], Counts], ranks: int, node: int) -> Items:
        """The items of a function of `seqpar.plan.travel_counts`, of a node."""
        every, none = count(1), np.zeros(ranks, np.int64)
        far = count(node) if node < ranks else Counts(none, none)
        near = np.maximum(every.sent - far.sent, every.received - far.received)
        return cls(near, np.maximum(far.sent, far.received))

    def plus(self, other: Items, times: int = 1) -> Items:
        """These plus a number of times the others."""
        return Items(self.near + times * other.near, self.far + times * other.far)

    @property
    def exchange(self) -> Items:
        """The exchange in which all of them are passed: beyond the node, if some are."""
        far = (self.far > 0).astype(np.int64)
        return Items((self.near > 0) * (1 - far), far)


class LayerTraffic(NamedTuple):
    """What one layer passes in forward; in backward the gradients go the other way.

    items: the "state" and "map" of runs, the "row" that is relaid with its results, the "halo" before a run and its
    "halo_grad", the "filtered" row that is relaid for a convolution. exchanges: that a rank waits for, one after
    another. late: parts of states that pass from run to run before a rank's own; `blocks` make a state. leaving: rows
    of a rank's runs whose state is computed beforehand, since others continue them. waited: rows that others compute in
    a pipeline before a rank can; int64 [ranks] each. peers: other ranks of a node, at least 1.
    """

    items: Mapping[str, Items]
    exchanges: Items
    late: Items
    blocks: int
    leaving: Ints
    waited: Ints
    peers: int


def carried_of(mask: Mask, pieces: Pieces, layer: LayerBytes, *, ranks: int, node: int) -> LayerTraffic:
    """What a layer passes under the layout of a placement's pieces."""
    start = mask.offsets[pieces.document] + pieces.start
    order = start.argsort()
    start, count, rank, document = (x[order] for x in (start, pieces.count, pieces.rank, pieces.document))
    return traffic_of(DocumentRuns.of_pieces(start, count, rank, document, ranks, mask.offsets), layer, node=node)


def traffic_of(runs: DocumentRuns, layer: LayerBytes, *, node: int) -> LayerTraffic:
    """What a layer passes between the ranks that hold these runs."""
    ranks, none = runs.ranks, np.zeros(runs.ranks, np.int64)
    items: dict[str, Items] = {}
    late, blocks, leaving, waited = Items(none, none), 1, none, none

    def passed(kind: str, count: Callable[[int], Counts]) -> Items:
        items[kind] = Items.of(count, ranks, node)
        return items[kind].exchange

    exchanges, peers = Items(none, none), max(1, min(node, ranks) - 1)
    if not runs.of_cut_documents.start.size:
        return LayerTraffic(items, exchanges, late, blocks, leaving, waited, peers)
    way = layer_way(runs, layer)
    if way.inside is not None:
        exchanges = exchanges.plus(passed("row", lambda node: relaid(runs, node)), times=2)
    among, states = inside(runs, way)
    if states.steps and states.travel != "pipeline":
        leaving = among.leaving
    if states.steps and states.travel == "gather":
        exchanges = exchanges.plus(passed("state", lambda node: gathered(among, node)[0]))
        passed("map", lambda node: gathered(among, node)[1])  # with the states
    elif states.steps:
        passed("state", lambda node: chained(among, node))
        blocks, hops = states.blocks, _hops(among, node)
        exchanges, late = exchanges.plus(hops).plus(hops.exchange, blocks - 1), hops.plus(hops.exchange, -1)
        if states.travel == "pipeline" and layer.work is not None:
            waited = _waited(among, hops, layer.work, blocks)
    halo = halo_way(runs, layer.reach, layer.tap)
    if halo.inside is not None:
        exchanges = exchanges.plus(passed("filtered", lambda node: relaid(runs, node)), times=2)
    beside, rows = inside(runs, halo)
    if rows.steps:
        exchanges = exchanges.plus(passed("halo", lambda node: neighbours(beside, layer.reach, node)))
        items["halo"] = items["halo_grad"] = Items(*(-(-rows // layer.reach) for rows in items["halo"]))
    return LayerTraffic(items, exchanges, late, blocks, leaving, waited, peers)


def _waited(runs: DocumentRuns, hops: Items, work: LayerWork, blocks: int) -> Ints:
    """Rows of all heads in whose time a rank waits for the runs before its own, and has heads of one block alone."""
    once, each = work.rounds(), work.rounds(blocks)
    longest = int(runs.of_cut_documents.count.max())
    return ((hops.near + hops.far) * longest * each + runs.tokens * (blocks * each - once)) // once


def _hops(runs: DocumentRuns, node: int) -> Items:
    """The most hops along a document that a rank has a run of: inside nodes, and from node to node."""
    runs = runs.of_cut_documents
    passed, document = np.flatnonzero(~runs.closes), runs.document
    far = (runs.rank[passed] // node != runs.rank[passed + 1] // node).astype(np.int64)
    hops = Items(np.zeros(runs.ranks, np.int64), np.zeros(runs.ranks, np.int64))
    for most, counted in zip(hops, (1 - far, far), strict=True):
        if counted.any():
            np.maximum.at(most, runs.rank, summed(document[passed], counted, runs.offsets.size - 1)[document])
    return hops


class ItemTicks(NamedTuple):
    """Ticks of an item: among all peers of a node, with one of them, and beyond; and how often it passes in a step."""

    near: int
    hop: int
    far: int
    times: int


@dataclass(frozen=True)
class RecurrentWeights:
    """The recurrent layers of a model on a machine, in ticks, all layers, forward and backward.

    layer: what one of them passes. row: of a row. leave: of a row in a run that others continue, in addition. items: as
    of `LayerTraffic`. passes: of a layer, in a step. near, far: the latency of an exchange inside a node and beyond.
    """

    layer: LayerBytes
    row: int
    leave: int
    items: Mapping[str, ItemTicks]
    passes: int
    near: int
    far: int

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware, second: float) -> RecurrentWeights:
        """The weights of a model that has recurrent layers. second: the seconds of a tick.

        Operations take as long as those of linear layers, an assumption: no kernel of them was measured on a GPU.
        """
        assert shape.recurrent is not None
        device = "cpu" if hardware.kernel == "native" else "cuda"
        layer, layers = shape.recurrent.bytes(shape.dtype, device=device), shape.recurrent_layers
        repeated = shape.recompute != "none"
        # backward computes the forward's products again, and then two for each of them
        operation = (5 if repeated else 4) / hardware.linear_rate / second
        passes = layers * (3 if repeated else 2)
        sizes = {
            "state": layer.state, "map": layer.map, "row": layer.row + layer.out, "filtered": 2 * layer.tap,
            "halo": layer.reach * layer.tap, "halo_grad": layer.reach * layer.tap_grad,
        }  # fmt: skip
        times = {"halo": passes - layers, "halo_grad": layers}
        near, far = hardware.inside, hardware.across

        def rated(size: int) -> tuple[int, int, int]:
            near_by, hop, beyond = (round(size / rate / second) for rate in (near.bandwidth, near.alone, far.bandwidth))
            return near_by, hop, beyond

        return cls(
            layer=layer,
            row=round(operation * (layers * shape.recurrent.flops)),
            leave=round(operation * layers * shape.recurrent.leave_flops),
            items={kind: ItemTicks(*rated(size), times.get(kind, passes)) for kind, size in sizes.items()},
            passes=passes,
            near=round(near.latency / second),
            far=round(far.latency / second),
        )

    def ticks(self, rows: Ints, carried: LayerTraffic) -> tuple[Ints, Ints]:
        """Ticks of each rank computing recurrent layers, and waiting for what they pass.

        A rank that only sends waits as long as one that receives as much, and its peers are taken to have equal parts.
        """
        waiting = self.passes * (carried.exchanges.near * self.near + carried.exchanges.far * self.far)
        for kind, (near, far) in carried.items.items():
            each = self.items[kind]
            hop = -(-near // carried.peers) * each.hop
            waiting = waiting + each.times * np.maximum(np.maximum(near * each.near, hop), far * each.far)
        state = self.items["state"]
        late = carried.late.near * (state.hop // carried.blocks) + carried.late.far * (state.far // carried.blocks)
        waiting = waiting + state.times * late + carried.waited * self.row
        return rows * self.row + carried.leaving * self.leave, waiting

    def most(self, tokens: int) -> int:
        """An upper bound of a rank's ticks in addition to its rows, if it passes at most as many runs as tokens."""
        passed = sum(each.times * sum(each[:3]) for each in self.items.values())
        # a chain is taken only if its exchanges cost less than what would be gathered
        exchanges = 8 + tokens * (self.layer.state + self.layer.map) // LATENCY
        # in a pipeline every rank waits for all rows at most, and once more for heads of a block alone
        return (self.leave + 2 * self.row + 2 * passed) * tokens + self.passes * exchanges * (self.near + self.far)
