"""What passes between ranks for one recurrent layer of a plan, as text, and by pairs of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.value import Ints
from seqpar.plan.derive import Derived
from seqpar.plan.recurrence import LayerBytes, RecurrentLayer
from seqpar.plan.report import QUANTILES, RANKS, columns, quantiles
from seqpar.plan.runs import DocumentRuns, check_unbranched
from seqpar.plan.travel import (
    LATENCY,
    LAYER_WAYS,
    TravelWay,
    check_travel,
    halo_bytes,
    halo_way,
    inside,
    layer_way,
    state_bytes,
)
from seqpar.plan.travel_counts import Counts, chained, gathered, neighbours, relaid, stretches

MIB = 1 << 20


def runs_of(what: str, plan: Derived, layer: RecurrentLayer, travel: str) -> DocumentRuns:
    """The runs of a plan's documents, after checking the arguments of `describe`."""
    for x, kind, word in ((plan, Derived, "Plan"), (layer, RecurrentLayer, "RecurrentLayer")):
        if not isinstance(x, kind):
            raise TypeError(f"{what}: expected a {word}, got {type(x).__name__} {x!r:.200}")
    check_travel(what, travel, LAYER_WAYS)
    check_unbranched(what, plan.mask)
    return DocumentRuns.of(plan.residence)


def describe(
    plan: Derived,
    layer: RecurrentLayer,
    *,
    dtype: str = "bfloat16",
    gates: str = "float32",
    device: str = "cuda",
    threads: int = 1,
    travel: str = "auto",
) -> str:
    """What ranks send for one recurrent layer of a plan in forward. Text; nothing is sent.

    Backward sends the gradients back, those of rows before runs in the dtype of sums. layer: its heads and dims. dtype:
    of q, k, v and the convolution's rows. gates: of decay and beta. device: "cuda" or "cpu", with so many threads of a
    rank. travel: as of `seqpar.recurrent.linear_attention`. The text has the runs and the number of documents on
    several ranks; the method that sends states or rows, and the cost of each method; how rows reach the convolution;
    and for each rank, up to 64, its runs, the exchanges it takes part in, states, rows and bytes.

    Raises: TypeError unless these are a plan and a layer, ValueError for an unknown travel, dtype or device,
    NotImplementedError for a plan of trees.
    """
    runs = runs_of("describe", plan, layer, travel)
    of_layer = layer.bytes(dtype, gates=gates, device=device, threads=threads)
    way, halo = layer_way(runs, of_layer, travel), halo_way(runs, of_layer.reach, of_layer.tap)
    spread = np.bincount(runs.document)
    cut, most = int((spread > 1).sum()), int(spread.max())
    lines = [
        f"{_many(spread.size, 'document')} of {_many(plan.mask.tokens, 'token')} on {_many(plan.ranks, 'rank')}",
        f"{_many(runs.start.size, 'run')}: {_many(cut, 'document')} {'has' if cut == 1 else 'have'} several, "
        f"at most {most:,}",
    ]
    if layer.heads:
        costs = {name: layer_way(runs, of_layer, name) for name in LAYER_WAYS}
        lines += [
            f"a state has {_mib(of_layer.state)}, its map {_mib(of_layer.map)}; a row {of_layer.row:,} bytes, its "
            f"result {of_layer.out:,}",
            f"states: {describe_way(way)}",
        ]
    if layer.taps:
        lines.append(f"convolution of {_many(layer.taps, 'tap')}: {describe_way(halo)}")
    if layer.heads:
        listed = ", ".join(f"{name} {_mib(x.cost)}" for name, x in costs.items())
        lines.append(f"cost of the busiest rank, an exchange as {_mib(LATENCY)}: {listed}")
    facts = _facts(runs, of_layer, way, halo)
    if plan.ranks > RANKS:
        table: list[tuple[str, ...]] = [("of a rank", *QUANTILES, "mean")]
        table += [(name, *quantiles(values)) for name, values in facts.items()]
        return "\n".join([*lines, *columns(table, (-22, *(14,) * 6))])
    table = [("rank", *facts)]
    table += [(f"{rank}", *(f"{x[rank]:,}" for x in facts.values())) for rank in range(plan.ranks)]
    return "\n".join([*lines, *columns(table, (5, *(10,) * len(facts)))])


def _facts(runs: DocumentRuns, layer: LayerBytes, way: TravelWay, halo: TravelWay) -> dict[str, Ints]:
    """The columns of the table, [ranks] each."""
    where, inner = inside(runs, way)
    moved, none = relaid(runs), np.zeros(runs.ranks, np.int64)
    states = _states(where, inner)
    both = state_bytes(runs, layer, way).plus(halo_bytes(runs, layer, halo))
    beside = neighbours(inside(runs, halo)[0], layer.reach)
    return {
        "runs": np.bincount(runs.rank, minlength=runs.ranks), "exchanges": exchanges(runs, way),
        "states out": states.sent, "states in": states.received,
        "rows relaid": moved.sent if way.inside else none, "halo rows in": beside.received,
        "bytes out": both.sent, "bytes in": both.received,
    }  # fmt: skip


def _states(runs: DocumentRuns, way: TravelWay) -> Counts:
    """The states that ranks send and receive; a convolution alone has none."""
    if not way.steps:
        return Counts(np.zeros(runs.ranks, np.int64), np.zeros(runs.ranks, np.int64))
    return gathered(runs)[0] if way.travel == "gather" else chained(runs)


def exchanges(runs: DocumentRuns, way: TravelWay) -> Ints:
    """The exchanges that each rank takes part in, [ranks], in each direction."""
    where, inner = inside(runs, way)
    if inner.travel == "chain":
        taken = np.array([_steps(where, rank, inner.blocks) for rank in range(runs.ranks)])
    elif inner.travel == "pipeline":
        taken = inner.blocks * np.array([_between_depths(where, rank).size for rank in range(runs.ranks)])
    else:
        states = _states(where, inner)
        taken = np.minimum(states.sent + states.received, 1)
    return taken + (0 if way.inside is None else 2 * np.minimum(relaid(runs).sent, 1))


def _steps(runs: DocumentRuns, rank: int, blocks: int) -> int:
    """The steps of a chain in which a rank sends or receives a block."""
    begin = _between_depths(runs, rank)
    return int(np.minimum(np.diff(begin), blocks).sum()) + blocks if begin.size else 0


def _between_depths(runs: DocumentRuns, rank: int) -> Ints:
    """The ordinals of runs whose states a rank sends, or receives for the runs after them."""
    own, ordinal = runs.of_rank(rank), runs.ordinal
    return np.unique(np.append(ordinal[own[~runs.closes[own]]], ordinal[own[~runs.opens[own]]] - 1))


def between(runs: DocumentRuns, layer: LayerBytes, way: TravelWay) -> Ints:
    """Bytes [receiver, sender] of states, and of rows and results where these are relaid, in forward."""
    total = np.zeros((runs.ranks, runs.ranks), np.int64)
    where, inner = inside(runs, way)
    sender, receiver, mapped = passed(where, inner)
    to, size = where.rank[receiver], layer.state + layer.map * mapped
    np.add.at(total, (to, where.rank[sender]), size)
    if way.inside is not None:
        source, target, count = stretches(runs)
        count = count * (source != target)
        np.add.at(total, (target, source), count * layer.row)
        np.add.at(total, (source, target), count * layer.out)
    return total


def passed(runs: DocumentRuns, way: TravelWay) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """The states that are sent: whose run, for which next run of the receiver, and whether with its map."""
    if way.travel != "gather":
        sender = np.flatnonzero(~runs.closes)
        return sender, sender + 1, np.zeros(sender.size, bool)
    asked = runs.earlier_runs()
    order = np.lexsort((np.arange(runs.start.size), runs.rank))
    key = runs.rank[order] * runs.start.size + order
    receiver = order[np.searchsorted(key, asked.asking * runs.start.size + asked.item)]
    return asked.item, receiver, ~runs.opens[asked.item]


def describe_way(way: TravelWay) -> str:
    """A way in words."""
    if not way.steps:
        return "nothing is sent"
    name = _named(way)
    if way.inside is not None:
        name = f"rows to a contiguous layout and back, between them {_named(way.inside)}"
    return f"{name}; {_many(way.steps, 'exchange')} each way"


def _named(way: TravelWay) -> str:
    if not way.steps:
        return "nothing"
    return way.travel + (f" in {way.blocks} blocks" if way.blocks > 1 else "")


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB" if size >= MIB // 10 else f"{size:,} bytes"
