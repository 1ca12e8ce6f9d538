"""What recurrent layers pass between ranks under a layout, and what they cost, without deriving any rank's moves.

A rank receives what the runs before its last one in each document have left, from the ranks that hold them, and for
each run the rows before it (see `seqpar.plan.runs`)::

    document    | run 0 | run 1 | run 2 |
    rank        |   0   |   1   |   0   |      rank 1 receives run 0's state, rank 0 receives run 1's

A layer costs a row the same wherever it is, and more in a run that others continue, whose state and map it makes. Its
rank then waits for one exchange of rows and one of states in each direction, which nothing hides. This is the "gather"
of `seqpar.plan.travel`; a layer may choose another way, which costs less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqpar.facts.intervals import expand
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.plan.counts import summed
from seqpar.plan.residence import Residence
from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner.hardware import Hardware, Link
from seqpar.planner.shape import ModelShape


class RunCounts(NamedTuple):
    """Counts of one layer's forward; in backward the gradients go the other way.

    states: runs whose state a rank receives and sends, in its node and beyond: int64 [2, 2, ranks]. maps: the same of
    those that something enters, whose map goes with the state. halos: of runs whose rows before them are on another
    rank. leaving: rows of a rank's runs that others continue, int64 [ranks].
    peers: other ranks of a node, at least 1.
    """

    states: Ints
    maps: Ints
    halos: Ints
    leaving: Ints
    peers: int


def carried_by(mask: Mask, layout: Layout, *, node: int) -> RunCounts:
    """The counts of a layout of a mask's documents."""
    pieces, rank, document = Residence(mask, layout, layout).pieces("q")
    if (pieces.step > 1).any():
        rank, document = (np.repeat(x, pieces.count) for x in (rank, document))
        start = expand(*pieces)
        return carried_of(document, start, np.ones_like(start), rank, ranks=layout.ranks, node=node)
    return carried_of(document, pieces.start, pieces.count, rank, ranks=layout.ranks, node=node)


def carried_of(document: Ints, start: Ints, count: Ints, rank: Ints, *, ranks: int, node: int) -> RunCounts:
    """The counts of a layout, given by pieces: consecutive tokens of documents on ranks, in any order."""
    order = np.lexsort((start, document))
    document, rank, count = document[order], rank[order], count[order]
    first = np.flatnonzero(np.append(True, (np.diff(document) != 0) | (np.diff(rank) != 0)))
    document, rank, count = document[first], rank[first], np.add.reduceat(count, first)
    new = np.diff(document) != 0
    opens, closes = np.append(True, new), np.append(new, True)
    some = ~(opens & closes)
    document, rank, count, opens, closes = (x[some] for x in (document, rank, count, opens, closes))
    nodes = -(-ranks // node)
    by_document, by_node, by_rank = document, document * nodes + rank // node, document * ranks + rank
    before, in_node, own = (_before(key) for key in (by_document, by_node, by_rank))
    final = _after(by_rank, np.ones_like(rank)) == 0  # a rank's last run in a document
    received = np.where(final, [in_node - own, before - in_node], 0)
    asking, near = (_after(key, final) for key in (by_document, by_node))
    sent = np.stack([near - ~final, asking - near])
    states = np.stack([_by_rank(rank, received, ranks), _by_rank(rank, sent, ranks)])
    opener = np.flatnonzero(opens)[opens.cumsum() - 1]  # the first run of each run's document
    beside = rank[opener] // node == rank // node
    opening = np.where(final & (rank[opener] != rank), [beside, ~beside], False)
    maps = states - np.stack([_by_rank(rank, opening, ranks), _by_rank(rank, sent * opens, ranks)])
    behind = np.flatnonzero(~opens)
    close = rank[behind] // node == rank[behind - 1] // node
    halo = np.stack([close, ~close]).astype(np.int64)
    halos = np.stack([_by_rank(rank[behind], halo, ranks), _by_rank(rank[behind - 1], halo, ranks)])
    return RunCounts(states, maps, halos, summed(rank, count * ~closes, ranks), max(1, min(node, ranks) - 1))


def _by_rank(rank: Ints, values: Ints, ranks: int) -> Ints:
    return np.stack([summed(rank, row, ranks) for row in values])


def _before(key: Ints) -> Ints:
    """How many earlier runs have the same key, for each run."""
    order = key.argsort(kind="stable")
    found = np.empty_like(key)
    found[order] = np.arange(key.size) - key[order].searchsorted(key[order])
    return found


def _after(key: Ints, counted: Ints) -> Ints:
    """How many later runs of the same key are counted, for each run."""
    order = key.argsort(kind="stable")
    so_far = np.append(0, counted[order].cumsum())
    stop = key[order].searchsorted(key[order], side="right")
    found = np.empty_like(key)
    found[order] = so_far[stop] - so_far[1:]
    return found


class Passing(NamedTuple):
    """Ticks of a link for what one recurrent layer passes in one direction: a state, its map, and a halo.

    hop_...: of one that goes to one peer or comes from it. latency: of an exchange.
    """

    latency: int
    state: int
    map: int
    halo: int
    hop_state: int
    hop_map: int
    hop_halo: int


class RecurrentWeights(NamedTuple):
    """The recurrent layers of a model on a machine, in ticks, all layers, forward and backward.

    row: of a row. leave: of a row in a run that others continue, besides. inside, across: links of one exchange.
    exchanges: of states in a step, and as many of halos.
    """

    row: int
    leave: int
    inside: Passing
    across: Passing
    exchanges: int

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware, second: float) -> RecurrentWeights:
        """The weights of a model that has recurrent layers. second: the seconds of a tick.

        Operations take as long as those of linear layers; nobody has measured a kernel of them on a GPU.
        """
        layer, layers = shape.recurrent, shape.recurrent_layers
        assert layer is not None
        repeated = shape.recompute in ("attention", "full")
        # backward computes the forward's products again, and then two for each of them
        operation = (5 if repeated else 4) / hardware.linear_rate / second
        size = DTYPE_BYTES[shape.dtype]

        def passing(link: Link) -> Passing:
            bytes_ = layer.state_bytes(size), layer.map_bytes(size), layer.halo_bytes(size)
            times = (b / rate for rate in (link.bandwidth, link.alone) for b in bytes_)
            return Passing(*(round(s / second) for s in (link.latency, *times)))

        return cls(
            row=round(operation * shape.recurrent_flops),
            leave=round(operation * layers * layer.leave_flops),
            inside=passing(hardware.inside),
            across=passing(hardware.across),
            exchanges=layers * (3 if repeated else 2),
        )

    def ticks(self, rows: Ints, passed: RunCounts | None) -> tuple[Ints, Ints]:
        """Ticks of each rank computing recurrent layers, and waiting for what they pass.

        A rank that only sends waits as long as one that receives as much, and its peers are taken to have equal parts.

        Raises: ValueError if what they pass was not counted.
        """
        if passed is None:
            raise ValueError("the model has recurrent layers: count what they pass under the layout (recurrent=True)")
        waiting = np.zeros_like(rows)
        for kind, counts in (("state", passed.states), ("map", passed.maps), ("halo", passed.halos)):
            near, far = counts.max(0)
            hop = -(-near // passed.peers) * getattr(self.inside, f"hop_{kind}")
            waiting += np.maximum(np.maximum(near * getattr(self.inside, kind), hop), far * getattr(self.across, kind))
            if kind != "map":  # maps go with the states
                waiting += np.where(far > 0, self.across.latency, (near > 0) * self.inside.latency)
        return rows * self.row + passed.leaving * self.leave, self.exchanges * waiting

    def most(self, tokens: int) -> int:
        """An upper bound of a rank's ticks besides those of its rows, if it passes at most as many runs as tokens."""
        links = (self.inside, self.across)
        each = sum(max(link[1:4]) + max(link[4:]) for link in links) * 3
        return self.leave * tokens + self.exchanges * (each * tokens + 2 * sum(link.latency for link in links))
