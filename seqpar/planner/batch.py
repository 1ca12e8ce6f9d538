"""`plan_batch`: the layout, degrees, widths and transport of one packed batch, from its lengths alone.

Candidates are placements under a few settings of `place`'s knobs. They depend on lengths, masks, ranks and memory only;
links decide among those with about equal computation. Every rank makes the same choice without a message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.plan import Plan
from seqpar.plan.plan import check_positions
from seqpar.planner.bound import document_ticks, launches_in, layers_in, lower_bound, weights_for
from seqpar.planner.carried import LayerTraffic, RecurrentWeights, carried_of
from seqpar.planner.cost import (
    Layers,
    LayoutCounts,
    Ticks,
    counted,
    counted_each,
    ticks_of_each,
)
from seqpar.planner.forecast import Forecast
from seqpar.planner.groups import Fetching
from seqpar.planner.hardware import Hardware
from seqpar.planner.lines import in_line, near_sighted
from seqpar.planner.nested import Nest, all_whole, nested
from seqpar.planner.place import Documents, Knobs, Pieces, Placement, layout_of, placements
from seqpar.planner.problem import STAGE_BYTES, Problem
from seqpar.planner.shape import ModelShape
from seqpar.planner.training import Training
from seqpar.planner.weights import Weights

TYPICAL_STAGE = 32 << 20  # bytes of a stage's keys, while documents are placed
ALONE = Knobs(80, 40, 4, 0, 1)  # long documents on single ranks, no head trade
FEW = 8  # with up to this many ranks, all candidates are compared
SMALL = 1 << 11  # ranks * documents, up to which placing is cheap
# Out of several hundred settings, those that together come closest to the bound for 8,192 tokens on each of 8 ranks,
# with fewer and with more than 4 documents per rank on average.
NESTS_OF_FEW = [
    Nest(*counts) for counts in ((2, 4, 4, 3), (1, 6, 4, 3), (1, 4, 4, 3), (1, 0, 2, 3), (3, 3, 0, 12), (1, 3, 0, 3))
]
NESTS_OF_MANY = [
    Nest(*counts) for counts in ((2, 8, 4, 3), (1, 8, 4, 3), (2, 6, 0, 6), (1, 6, 0, 3), (2, 2, 0, 3), (3, 2, 0, 3))
]
NESTS_OF_UNEVEN = [Nest(many, 0, 0, 64) for many in (1, 2)]  # where ranks may have unequal rows
NEAR = 200  # a plan within 1/200 of the mean of all ranks is good enough: no plan gains more


def plan_batch(
    lengths: ArrayLike | Mask,
    ranks: int,
    *,
    masks: Mask | Sequence[Mask] | None = None,
    model: str | ModelShape = "llama-8b",
    hardware: str | Hardware = "h100",
    node: int | None = None,
    token_slack: float = 0.0,
    max_tokens_per_rank: int | None = None,
    lockstep: bool = True,
    training: Training | None = None,
) -> Plan:
    """The plan of a packed batch whose slowest rank is predicted to finish earliest.

    lengths: tokens of each document, or the batch as a mask, for example of trees or unions; the model's windows are
    added to it. masks: one for all layers, or one per layer; by default causal with the model's windows. The plan has
    the mask of most layers; the others are ``plan.with_mask(mask)``. model, hardware: values, or names of presets; a
    model given by name recomputes as little in backward as memory allows. node: consecutive ranks that share fast
    links, by default the machine's. token_slack: the fraction by which a rank's rows may exceed the mean (plus one
    row). max_tokens_per_rank: a limit in addition to memory. lockstep: whether ranks wait for each other in every layer
    and before the head, as with FSDP; False if they wait only at the end of a step, as with DDP. Without token_slack it
    changes nothing. training: counts the model's state, gathered weights and the head in the memory of a rank; None
    leaves them out, and ``plan.describe()`` says how large the state is.

    ``plan.forecast`` has the predicted seconds of every rank, a lower bound for any plan, and the gap between them.

    Raises: ValueError for lengths that `Mask` refuses, for masks of other lengths, and for a batch that does not fit,
    naming the number of ranks that would suffice. NotImplementedError for 2**31 tokens or more, which kernels cannot
    number.
    """
    problem = Problem.of(
        lengths, ranks, masks=masks, model=model, hardware=hardware, node=node, token_slack=token_slack,
        max_tokens_per_rank=max_tokens_per_rank, lockstep=lockstep, training=training,
    )  # fmt: skip
    return plan_of(problem)


def plan_of(problem: Problem) -> Plan:
    """The plan of a batch, with its forecast. Raises: as `plan_batch`."""
    check_positions(problem.tokens)
    layers, room, node = problem.layers, problem.room, problem.node
    shape, machine = problem.model, problem.hardware
    weights = weights_for(layers, shape, machine, stage_bytes=STAGE_BYTES[0])
    try:
        total = document_ticks(layers, weights)
        best = choose(layers, weights, total, problem.ranks, node=node, room=room, lockstep=problem.lockstep)
    except OverflowError:  # a candidate costs more ticks for merging than for computing
        weights = weights_for(layers, shape, machine, stage_bytes=STAGE_BYTES[0], rows=int(room.max()) * node)
        total = document_ticks(layers, weights)
        best = choose(layers, weights, total, problem.ranks, node=node, room=room, lockstep=problem.lockstep)
    mask, width = layers[0][0], int(best.widths[0])
    plan = Plan(
        mask,
        layout_of(mask, best.pieces, problem.ranks),
        ulysses=width if (best.widths == width).all() else best.widths.tolist(),
        node=best.node,
        stage_bytes=best.stage_bytes,
    )
    bound = lower_bound(layers, weights, problem.ranks, least=total)
    forecast = Forecast(best.ticks, bound, weights.second, best.rows, problem.memory, shape, machine, node)
    return plan.with_forecast(forecast)


class Candidate(NamedTuple):
    """A placement with its counts of work and traffic: plain, and perhaps with keys that enter a node once."""

    placement: Placement
    plain: LayoutCounts
    once: LayoutCounts | None

    @property
    def moved(self) -> tuple[int, ...]:
        """Pieces, and rows moved by kind, without nodes."""
        return len(self.placement.pieces.count), self.plain.moved, self.plain.crossing, self.plain.traded


class Decision(NamedTuple):
    """The candidate chosen, with everything that its plan needs."""

    pieces: Pieces
    widths: Ints
    node: int | None
    stage_bytes: int
    ticks: Ticks
    rows: Ints


def choose(
    layers: Layers, w: Weights, total: Ints, ranks: int, *, node: int, room: Ints, lockstep: bool = True
) -> Decision:
    """The candidate whose slowest rank has the fewest ticks; ties go to fewest cuts, then fewest bytes.

    total: the ticks of each document, of `document_ticks`. lockstep: as in `plan_batch`; where rows may be uneven, what
    layers take is balanced without the head, since all ranks begin that together.
    """
    mask = layers[0][0]
    every, documents = layers_in(layers), len(mask.lengths)
    stage = launches_in(layers) * w.both.stage
    fetch = Fetching(every * w.both.key, every * w.both.merge, stage, max(1, TYPICAL_STAGE // w.row_bytes))
    batch = Documents(mask.lengths, total, w.per_row + every * w.both.query, fetch)
    even = np.minimum(room, mask.tokens // ranks + 1)
    rooms, spare = [(batch, even)], bool((even != room).any())
    costs = batch
    if spare:  # spare rows must not make a plan worse
        if lockstep:
            costs = batch._replace(ticks=total - w.label * mask.lengths, row=batch.row - w.label)
        rooms.append((costs, room))
    single = not all(m.within_documents for m, _ in layers)
    whole = all_whole(costs, ranks, room=room) if spare else []
    nestable = 1 < ranks <= min(FEW, node) and not single
    if spare and nestable:
        whole += nested(costs, ranks, room=room, nests=NESTS_OF_UNEVEN, uneven=True)
    cheap = node >= ranks and 192 * ranks * stage < int(total.sum())
    if nestable and documents >= 8 * ranks and cheap:
        near = _near_the_bound(layers, w, batch, ranks, node=node, room=even, whole=whole, lockstep=lockstep)
        if near is not None:
            return near
    # transfers and linear layers may matter more than evenly balanced attention
    thorough = documents < max(8 * ranks, SMALL // ranks + 1) or fetch.key * 32 > batch.row
    few = ranks <= FEW and ranks * documents <= SMALL
    if few:
        attention = int(total.sum()) - batch.row * mask.tokens
        knobs = candidates_of_few(ranks, math.gcd(ranks, node), documents, 4 * attention // int(total.sum()))
    else:
        knobs = candidates(ranks, node, documents, thorough=thorough, single=single)
    chosen: list[Placement] = []
    for each, space in rooms:
        placed = list(zip(knobs, placements(each, ranks, room=space, knobs=knobs), strict=True))
        # bounds that cross documents allow only one width for all
        placed = [(k, p) for k, p in placed if not single or p.widths.min() == p.widths.max()]
        chosen += {id(p): p for _, p in placed}.values() if few else shortlist(placed, thorough=thorough)
    if few and nestable:
        nests = NESTS_OF_FEW if documents < 4 * ranks else NESTS_OF_MANY
        chosen += nested(batch, ranks, room=even, nests=nests if documents > 1 else nests[:1])
    if ranks > 1 and near_sighted(layers):
        chosen += [in_line(each, ranks, room=space) for each, space in rooms]
    rivals = _counted(layers, chosen + whole, ranks, node)
    return _decided(rivals, mask, w, node, layerwise=spare and lockstep)


def _near_the_bound(
    layers: Layers, w: Weights, batch: Documents, ranks: int, *, node: int, room: Ints, whole: list[Placement],
    lockstep: bool,
) -> Decision | None:  # fmt: skip
    """A plan for many documents that no other plan beats by much, if one is found at once; else None.

    If no document has more attention than a rank's fair share: whole documents, with the shortest as filling. Otherwise
    a nest, unless its exchanges alone take too long.
    """
    attention, mean = batch.ticks - batch.row * batch.lengths, int(batch.ticks.sum()) // ranks
    enough = 0
    if int(attention.max()) * ranks <= int(attention.sum()):
        placed = placements(batch, ranks, room=room, knobs=[ALONE])
        enough = mean * 1001 // 1000  # fewer exchanges could gain next to nothing beyond this
    elif layers_in(layers) * 4 * w.inside.latency * NEAR > mean:
        return None
    else:
        placed = nested(batch, ranks, room=room, nests=NESTS_OF_MANY[: 2 if ranks * batch.lengths.size <= SMALL else 1])
    rivals = _counted(layers, placed + whole, ranks, node)
    decision = _decided(rivals, layers[0][0], w, node, layerwise=bool(whole) and lockstep)
    near = int(decision.ticks.total.max()) * NEAR <= mean * (NEAR + 1)
    return decision if near or placed[0].level <= enough else None


def _decided(rivals: list[Candidate], mask: Mask, w: Weights, node: int, *, layerwise: bool) -> Decision:
    """Fewest ticks of the slowest rank, then fewest pieces, then least traffic, then the smallest stage.

    layerwise: layers and head count apart, since ranks in lockstep wait for each other in each layer and before the
    head. Candidates do not depend on links, so faster links never make the result slower.
    """
    ways = [(nth, counts) for nth, candidate in enumerate(rivals) for counts in candidate[1:] if counts is not None]

    def slowest_of(ticks: Ticks) -> Ints:
        return (ticks.total - ticks.head).max(-1) + ticks.head.max(-1) if layerwise else ticks.total.max(-1)

    counts_of = [counts for _, counts in ways]
    ticks = ticks_of_each(counts_of, w, stage_bytes=STAGE_BYTES)
    if w.recurrent is not None:
        layer, rows = w.recurrent.layer, np.array([counts.rows for counts in counts_of])

        @cache
        def passed(nth: int) -> LayerTraffic:
            return carried_of(mask, rivals[nth].placement.pieces, layer, ranks=rows.shape[1], node=node)

        ticks = _with_recurrent(ticks, w.recurrent, rows, lambda way: passed(ways[way][0]), slowest_of)
    slowest = slowest_of(ticks)
    equal = list(zip(*(at.tolist() for at in (slowest == slowest.min()).nonzero()), strict=True))
    if equal[0][0] != equal[-1][0]:
        equal.sort(key=lambda at: (rivals[ways[at[0]][0]].moved, at[1]))
    way, stage = equal[0]
    nth, counts = ways[way]
    pieces, widths, _ = rivals[nth].placement
    once = node if counts is rivals[nth].once else None
    return Decision(pieces, widths, once, STAGE_BYTES[stage], ticks.of(way, stage), counts.rows)


def _with_recurrent(
    ticks: Ticks, w: RecurrentWeights, rows: Ints, passed: Callable[[int], LayerTraffic],
    slowest_of: Callable[[Ticks], Ints],
) -> Ticks:  # fmt: skip
    """The ticks of candidates, including recurrent layers. rows: [candidates, ranks].

    What these layers pass is counted last, and only for candidates that may be the fastest. One that is slower without
    it than another one with it has too few ticks then, but not so few that it would be chosen.
    """
    ticks = ticks._replace(recurrent=(rows * w.row)[:, None])
    least = slowest_of(ticks).min(1)
    best = int(least.max())
    for way in least.argsort(kind="stable").tolist():
        if least[way] > best:
            break
        ticks.recurrent[way], waiting = w.ticks(rows[way], passed(way))
        ticks.exposed[way] += waiting
        best = min(best, int(slowest_of(Ticks(*(x[way] for x in ticks))).min()))
    return ticks


def candidates(ranks: int, node: int, documents: int, *, thorough: bool, single: bool) -> list[Knobs]:
    """Settings of the knobs: many where placing is cheap, few for batches that take long to place.

    thorough: also settings that compute less evenly but move less. single: all documents must have the same width.
    """
    width = math.gcd(ranks, node)
    shared = [Knobs(0, 64, 0, 16, ranks)] * (1 < ranks == width)  # every document on all ranks
    whole = [Knobs(80, 0, 4, 4, 1)]
    if ranks * documents <= SMALL:
        widths = [w for w in range(1, width + 1) if width % w == 0]
        parts = itertools.product((64, 160), (16, 40), (1, 4), widths)
        tiers = [Knobs(most, spread, 4, octaves, w) for most, spread, octaves, w in parts]
        return whole + shared + [Knobs(80, 40, 4, 0, w) for w in widths] + tiers
    if single:
        return whole + shared + [Knobs(80, 40, 4, 0, 1), Knobs(64, 40, 4, 1, 1)]
    if ranks > FEW:
        # waiting for keys and for traded rows depends on links: each of these is best on some
        settings = ((48, 1, 0, 0), (64, 1, 0, 0), (112, 1, 0, 0), (96, 1, 1, 0), (64, 1, 1, 8), (64, 2, 0, 16))
        grouped = [Knobs(most, 40, fill, 0, width, trade=trade, wait=wait) for most, fill, trade, wait in settings]
    else:
        grouped = [Knobs(80, 40, 4, 0, width)] + [Knobs(80, 40, 4, 0, width, trade=1)] * thorough
    if thorough:
        if ranks * documents > 1 << 22:
            return [Knobs(80, 40, 4, 0, width), Knobs(80, 24, 4, 4, width)] + [Knobs(80, 40, 4, 0, 1)] * (width > 1)
        tiers = [Knobs(64, 40, 4, 1, width), Knobs(80, 24, 4, 4, width)]
        if ranks * documents <= 8 * SMALL:
            tiers += [
                Knobs(80, 40, 4, 2, width),
                Knobs(80, 40, 4, 0, width),
                Knobs(80, 40, 4, 0, width, trade=1),
            ]
        return whole + shared + grouped + tiers + [Knobs(80, 40, 4, 0, 1), Knobs(64, 40, 4, 1, 1)] * (width > 1)
    return grouped + [Knobs(64, 40, 4, 1, width)]


def candidates_of_few(ranks: int, width: int, documents: int, quarters: int) -> list[Knobs]:
    """Settings of the knobs for few ranks: those without which some batch among thousands takes 0.4 % longer.

    width: the largest. quarters: attention's part of the batch's cost, in quarters. If all ranks may share heads,
    `nested` adds the rest.
    """
    widths = [w for w in range(1, width + 1) if width % w == 0]
    if width < ranks or width == 1:
        return _apart(ranks, widths, documents, quarters)
    shared = Knobs(0, 64, 0, 16, ranks)  # every document on all ranks
    if documents == 1:
        return [ALONE] + [Knobs(160, 16, 4, 4, 1)] * (ranks > 2)
    half = widths[-2]
    attentive = quarters >= 2
    if documents < 4 * ranks:
        knobs = [ALONE, shared, Knobs(160, 16, 4, 1, 1), Knobs(160, 16, 4, 4, 1)]
        knobs += [Knobs(80, 40, 4, 0, half)] * (ranks > 2)
        if ranks > 4:
            knobs += [Knobs(160, 16, 4, 1, w) for w in widths[1:-1]]
            knobs += [Knobs(80, 0, 4, 4, 1), Knobs(64, 40, 4, 4, half)] * attentive
        return knobs
    knobs = [ALONE, Knobs(160, 16, 4, 1, 1)] + [shared, Knobs(64, 40, 4, 1, ranks)] * (quarters >= 1)
    if ranks == 2:
        return knobs + [Knobs(64, 40, 4, 4, 1)] * attentive
    if ranks == 3:
        return knobs + [Knobs(64, 40, 4, 4, 1), Knobs(160, 16, 4, 4, 1)] * (quarters >= 1)
    if ranks > 4:
        knobs += [Knobs(80, 40, 4, 0, half)] + [Knobs(64, 40, 4, 4, 1)] * (quarters >= 1)
        knobs += [Knobs(80, 0, 4, 4, 1)] * (attentive and documents < 64 * ranks)
    return knobs + [Knobs(80, 40, 4, 0, 2)] * (ranks == 6)


def _apart(ranks: int, widths: list[int], documents: int, quarters: int) -> list[Knobs]:
    """As `candidates_of_few`, if not all ranks may share heads."""
    knobs = [ALONE, Knobs(160, 16, 4, 1, 1)]
    if quarters >= 2 and documents < 64 * ranks:
        knobs += [Knobs(80, 0, 4, 4, 1), Knobs(64, 16, 4, 4, 1)] + [Knobs(64, 40, 4, 4, w) for w in widths]
    if len(widths) == 1:
        return knobs + [
            Knobs(160, 40, 4, 4, 1),
            Knobs(64, 40, 4, 4, 1),
            Knobs(64, 16, 4, 4, 1),
            Knobs(64, 16, 4, 1, 1),
        ]
    half, width = widths[-2:]
    knobs += [
        Knobs(80, 40, 4, 0, half),
        Knobs(80, 40, 4, 0, width),
        Knobs(64, 40, 4, 1, width),
    ]
    knobs += [
        Knobs(160, 16, 4, 4, half),
        Knobs(160, 16, 4, 1, width),
        Knobs(160, 40, 4, 4, width),
    ]
    return knobs + [Knobs(64, n, 4, 4, w) for n in (16, 40) for w in (1, width)]


def shortlist(placed: list[tuple[Knobs, Placement]], *, thorough: bool) -> list[Placement]:
    """The fastest placement of each kind, and among those about as fast the one with the fewest pieces.

    thorough: of every kind, not only of those about as fast as the fastest. Equal time and pieces count as the same.
    """
    kinds: dict[tuple[int, ...], dict[tuple[int, int], Placement]] = {}
    for knobs, p in placed:
        kind = (int(p.widths.max()), *knobs[3:])
        kinds.setdefault(kind, {}).setdefault((p.level, len(p.pieces.count)), p)
    best = min(level for of_kind in kinds.values() for level, _ in of_kind)
    chosen: dict[tuple[int, int], Placement] = {}
    for of_kind in kinds.values():
        least = min(of_kind)
        if thorough or (least[0] - best) * 200 <= best:
            close = [key for key in of_kind if (key[0] - least[0]) * 200 <= least[0]]
            for key in (least, min(close, key=lambda key: key[::-1])):
                chosen.setdefault(key, of_kind[key])
    return list(chosen.values())


def _counted(layers: Layers, placed: list[Placement], ranks: int, node: int) -> list[Candidate]:
    """The placements with their counts, and where it may be worthwhile also with keys that enter a node once."""
    rivals, placed = [], [_as_planned(p, layers[0][0].lengths) for p in placed]
    each = counted_each(layers, placed, ranks=ranks, node=node)
    for placement, plain in zip(placed, each, strict=True):
        once = None
        # a few rows fetched at the borders of ranks are not forwarded, which would cost steps and planning time
        if node < ranks and ranks % node == 0 and plain.crossing * 64 > int(plain.rows.sum()) * layers_in(layers):
            layout = layout_of(layers[0][0], placement.pieces, ranks)
            once = counted(layers, layout, widths=placement.widths, node=node, forwarded=True)
        rivals.append(Candidate(placement, plain, once))
    return rivals


def _as_planned(placement: Placement, lengths: Ints) -> Placement:
    """A placement with width 1 for documents on one rank, as `Plan` has them where documents differ in width.

    Only documents with fewer tokens than their width can lie on one rank.
    """
    pieces, widths, _ = placement
    if not (lengths < widths).any() or (widths == widths[0]).all():
        return placement
    first, last = np.full(widths.size, np.iinfo(np.int64).max), np.full(widths.size, -1)
    np.minimum.at(first, pieces.document, pieces.rank)
    np.maximum.at(last, pieces.document, pieces.rank)
    return placement._replace(widths=np.where(first == last, 1, widths))
