"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqpar.facts.intervals import distinct
from seqpar.facts.mask import Mask
from seqpar.facts.value import MOST, Ints
from seqpar.plan.counts import Floats, Load, load_of, node_of
from seqpar.plan.derive import Derived
from seqpar.plan.steps import Part, count

RANKS = 64  # plans of more ranks get no line per rank
ROWS = 1 << 28  # nor do plans whose lines would have to visit more rows
STRIDED = 32  # cost of a row whose neighbours are on other ranks, in rows
DEGREES = 12  # if there are more degrees, they are grouped by powers of two
QUANTILES = ("min", "10 %", "median", "90 %", "max")


def shows_each_rank(plan: Derived) -> bool:
    """Whether every rank gets a line, which visits all of its rows."""
    runs, _ = plan.layout.all_runs()
    rows = plan.mask.tokens + STRIDED * int(runs.count[runs.step > 1].sum())
    return plan.ranks <= RANKS and plan.ranks * rows <= ROWS


def describe(plan: Derived) -> str:
    """A plan's facts, degrees and cuts, how evenly rows, area and keys are shared, and the forecast.

    Up to 64 ranks have a line each: rows, area, keys received, peers, steps. Plans with hundreds of millions of rows,
    or millions of striped ones, have none: that would take minutes.
    """
    widths = ", ".join(str(w) for w in np.unique(plan.widths))
    area, shown = plan.mask.area(), shows_each_rank(plan)
    lines = [
        f"{plan.mask!r}",
        *_paths(plan.mask),
        f"{plan.layout!r}" + ("" if plan.kv_layout is plan.layout else f", keys in {plan.kv_layout!r}"),
        f"transport {plan.transport}, Ulysses width {widths}, digest {plan.digest()[:12]}",
        f"documents by degree: {_degrees(plan)}",
        *_by_width(plan),
        f"area {area:,} pairs, {area / plan.ranks:,.0f} per rank; partial results: {_merging(plan, shown)}",
    ]
    if shown and plan.transport == "fetch" and plan.node is not None:
        lines.append(_crossing(plan, plan.node))
    load = load_of(plan)
    lines += [_cuts(plan, load), *_spread(load)]
    if shown:
        lines += _by_rank(plan, load)
    return "\n".join(lines + ([] if plan.forecast is None else [str(plan.forecast)]))


def _paths(mask: Mask) -> list[str]:
    """How many paths the trees of a mask have, and how many tokens they save."""
    if mask.paths is None:
        return []
    _, tokens = mask.paths.leaves()
    return [
        f"{tokens.size:,} paths from roots to leaves, up to {tokens.max():,} tokens long; as separate documents "
        f"they would have {tokens.sum():,}"
    ]


def _degrees(plan: Derived) -> str:
    """The number of documents by number of ranks; many different degrees are grouped by powers of two."""
    degrees, documents = np.unique(plan.degrees, return_counts=True)
    if degrees.size <= DEGREES:
        return ", ".join(f"{n} on {d}" for d, n in zip(degrees, documents, strict=True))
    octave = np.array([int(d).bit_length() - 1 for d in degrees])
    parts = []
    for power in np.unique(octave):
        low, high = degrees[octave == power][[0, -1]]
        parts.append(f"{documents[octave == power].sum()} on {low}" + (f" to {high}" if high > low else ""))
    return ", ".join(parts)


def _by_width(plan: Derived) -> list[str]:
    widths, documents = np.unique(plan.widths, return_counts=True)
    if widths.size == 1:
        return []
    return ["documents by width: " + ", ".join(f"{n} of {w}" for w, n in zip(widths, documents, strict=True))]


def _cuts(plan: Derived, load: Load) -> str:
    """How many documents are on several ranks or nodes, and the number of pieces."""
    several = int(np.count_nonzero(plan.degrees > 1))
    node, beyond = node_of(plan), ""
    if node is not None:
        on_nodes = plan.residence.groups("q", np.full(plan.mask.lengths.size, node))
        nodes = np.bincount(on_nodes // plan.ranks)
        beyond = f", {np.count_nonzero(nodes > 1)} of them on several nodes of {node} ranks"
    return (
        f"cuts: {several} of {len(plan.degrees)} documents are on several ranks{beyond}; {load.pieces.sum():,} pieces"
    )


def _spread(load: Load) -> list[str]:
    """A line each for rows, area and keys: how they are spread over the ranks."""
    facts: dict[str, Ints | Floats | None] = {"rows": load.rows, "area": load.area, "pieces": load.pieces}
    facts |= {"keys fetched": load.keys, "  from other nodes": load.crossing}
    lines: list[tuple[str, ...]] = [("of a rank", *QUANTILES, "mean", "max/mean")]
    for name, values in facts.items():
        if values is not None:
            ratio = f"{values.max() / values.mean():.3f}" if values.any() else "-"
            lines.append((name, *quantiles(values), ratio))
    return columns(lines, (-22, *(16,) * 6, 10))


def quantiles(values: Ints | Floats) -> list[str]:
    """`QUANTILES` and the mean."""
    order = np.sort(values)
    shown = [order[round(part * (order.size - 1))] for part in (0, 0.1, 0.5, 0.9, 1)]
    return [f"{x:,.0f}" for x in (*shown, values.mean())]


def _by_rank(plan: Derived, load: Load) -> list[str]:
    area = plan.mask.area()
    lines: list[tuple[str, ...]] = [("rank", "rows", "tokens", "area", "of mean", "keys in", "from", "steps")]
    for rank in range(plan.ranks):
        steps = plan.steps(rank)
        computed = float(load.area[rank])
        keys = sum(count(r) for s in steps for r in s.recvs.values()) + sum(s.entry.rows for s in steps if s.entry)
        peers = {p for s in steps for p in (*s.recvs, *(s.entry.recvs if s.entry else ()))} | {
            m for s in steps for m in s.part.members if m != rank
        }
        ratio = f"{computed * plan.ranks / area:.2f}" if area else "-"
        row = (f"{plan.rows(rank):,}", f"{plan.layout.tokens(rank):,}", f"{computed:,.0f}", ratio, f"{keys:,}")
        lines.append((f"{rank}", *row, f"{len(peers)}", f"{sum(bool(s.local or s.moves) for s in steps)}"))
    note = "steps are counted for keys and values of 4 KiB per token; larger ones take more"
    return [note, *columns(lines, (5, 10, 10, 18, 9, 10, 6, 7))]


def columns(lines: Sequence[tuple[str, ...]], widths: Sequence[int]) -> list[str]:
    """Lines with columns at least this wide, wider where needed; a negative width aligns left."""
    longest = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = [("<" if w < 0 else ">", max(abs(w), n + 2)) for w, n in zip(widths, longest, strict=True)]
    cells = ((f"{text:{side}{width}}" for text, (side, width) in zip(line, columns, strict=True)) for line in lines)
    return ["".join(parts) for parts in cells]


def _crossing(plan: Derived, node: int) -> str:
    """How many keys cross between nodes, and how many of them are forwarded inside one."""
    entered = passed = 0
    for rank in range(plan.ranks):
        for step in plan.steps(rank):
            entered += step.entry.rows if step.entry else 0
            entered += sum(count(rows) for peer, rows in step.recvs.items() if peer // node != rank // node)
            passed += sum(map(count, step.recvs.values())) if step.spread else 0
    return f"nodes of {node} ranks: {entered:,} keys cross between them, {entered + passed:,} would without nodes"


def _merging(plan: Derived, shown: bool) -> str:
    """In how many steps a row's keys come, and what that costs kernels that round their results.

    shown: whether each rank has a line.
    """
    if not plan.merges:
        summed = "; key gradients are summed over ranks" if plan.transport == "gather" and plan.ranks > 1 else ""
        return f"none merged, every row has one step{summed}"
    most = 0
    for rank in range(plan.ranks if shown else 0):
        for part in (s.part for s in plan.steps(rank) if s.first):
            most = max(most, _most_met(part, [s.pos for s in plan.steps(rank) if s.part is part]))
    return (
        f"merged over {f'up to {most}' if most else 'several'} steps in float32, or float64; a kernel that rounds its "
        "results (aten_flash, cudnn, flash2, flash3, flash4) rounds each of them, so auto takes none of these, except "
        'with accuracy="fast", which allows 1.5 times the error of one step'
    )


def _most_met(part: Part, keys: list[Ints]) -> int:
    """The most steps that a query row sees keys of. keys: of each step of the part, ascending."""
    rows = _unlike(part, keys)
    bands = [(lo[rows], hi[rows]) for lo, hi, _ in part.bands]
    met = np.zeros(rows.size, np.int64)
    for at in keys:
        met += np.any([np.searchsorted(at, lo) < np.searchsorted(at, hi) for lo, hi in bands], axis=0)
    return int(met.max(initial=0))


def _unlike(part: Part, keys: list[Ints]) -> Ints:
    """The query rows that see other runs of keys than the row before; the rows after each see keys of its steps."""
    first = [at[np.diff(at, prepend=-2) > 1] for at in keys]
    stop = [at[np.diff(at, append=MOST + 2) > 1] + 1 for at in keys]
    breaks = distinct(np.concatenate([*first, *stop]))
    unlike = np.arange(part.pos.size) == 0
    for lo, hi, _ in part.bands:
        for where in (breaks.searchsorted(lo, "right"), breaks.searchsorted(hi), lo < hi):
            unlike[1:] |= where[1:] != where[:-1]
    return np.flatnonzero(unlike)
