"""The picture of a plan: the ranks of each document, how evenly work is shared, bytes between ranks, the forecast.

Of a tree and of several bands also which keys a query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.facts.drawing import DARK, EDGE, LONG, MUTED, STYLE, instead, picture
from seqpar.facts.intervals import cut
from seqpar.facts.picture import pairs
from seqpar.facts.value import Ints
from seqpar.plan.counts import Floats, fetched_between, load_of, node_of
from seqpar.plan.derive import Derived, Prediction
from seqpar.plan.report import shows_each_rank
from seqpar.plan.traffic import HeadShape

SHORT = ("#aeb6c2", "#c6ccd6", "#bac2cd", "#d3d8e0")  # unnamed documents, in turns
PHASES = {"attention": "#2563a8", "recurrent": "#5b8f5b", "linear": "#9cc3e6", "head": "#cfd6e0", "exposed": "#e07b28"}
COLUMNS, LINES = 1600, 512  # of the raster that samples all rows of all ranks
BLOCKS = 64  # blocks of ranks in the heat map, at most
PANELS = ("documents", "degrees", "mask", "load", "time", "bytes")
# The call that a heat map counts if no model is known.
CALL = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": "bfloat16"}


def plot(
    plan: Derived, path: str | Path, *, call: dict[str, Any] | None = None, panel: str | None = None, dark: bool = False
) -> None:
    """Write the picture of a plan, as `Plan.plot` says."""
    absent = {"mask"} if plan.mask.plain else set()
    absent |= {"time"} if plan.forecast is None else set()
    drawn = [name for name in PANELS if name not in absent]
    if panel is not None and panel not in drawn:
        raise ValueError(f"panel={panel!r}: this plan has the panels {', '.join(drawn)}")
    with picture("Plan.plot", path, (16, 9.6) if panel is None else (11, 4.6), DARK if dark else STYLE) as figure:
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, hspace=0.03, wspace=0.03)
        axes = _all_panels(figure, plan) if panel is None else {panel: figure.subplots()}
        draw: dict[str, Callable[[Any], None]] = {
            "documents": lambda axis: holders(axis, plan),
            "degrees": lambda axis: degrees(axis, plan),
            "mask": lambda axis: pairs(axis, plan.mask.shown(), columns=1),
            "load": lambda axis: loads(axis, plan),
            "time": lambda axis: timeline(axis, plan, plan.forecast),  # type: ignore[arg-type]
            "bytes": lambda axis: traffic(axis, plan, call),
        }
        for name, axis in axes.items():
            draw[name](axis)


def _all_panels(figure: Any, plan: Derived) -> dict[str, Any]:
    """The axes of all panels by name, under a title."""
    documents, tokens = len(plan.mask.lengths), plan.mask.tokens
    predicted = "" if plan.forecast is None else f": {plan.forecast.headline}"
    title = f"{documents:,} documents of {tokens:,} tokens on {plan.ranks:,} ranks{predicted}\n"
    figure.suptitle(title, fontsize=15, fontweight="bold")
    figure.text(0.5, 0.948, _subtitle(plan), ha="center", color=MUTED)
    plain = ["documents"] * 8 + ["degrees"] * 4
    upper = plain if plan.mask.plain else ["documents"] * 6 + ["degrees"] * 3 + ["mask"] * 3
    lower = ["load"] * 6 + ["bytes"] * 6 if plan.forecast is None else ["load"] * 4 + ["time"] * 4 + ["bytes"] * 4
    axes: dict[str, Any] = figure.subplot_mosaic([upper, lower], height_ratios=(1.12, 1))
    return axes


def _subtitle(plan: Derived) -> str:
    node, widths = node_of(plan), np.unique(plan.widths).tolist()
    parts = [] if plan.mask.plain else [f"{plan.mask!r}"]
    parts += [f"transport {plan.transport}", "Ulysses width " + ", ".join(map(str, widths))]
    parts += [] if node is None else [f"nodes of {node} ranks"]
    parts += [] if plan.forecast is None else [f"predicted for {plan.forecast.what}"]
    return "  ·  ".join(parts)


def holders(axis: Any, plan: Derived, *, names: Sequence[str] | None = None) -> None:
    """Rows of every rank in local order, coloured by document, darker towards its end; the longest are named."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    lengths, degree = plan.mask.lengths, plan.degrees
    order = np.argsort(-lengths, kind="stable")
    named = order if order.size <= len(LONG) else order[: len(LONG) - 1]
    clear, grey = (np.array([to_rgb(c) for c in palette]) for palette in (LONG, SHORT))
    nth = np.arange(lengths.size)
    spread = (degree > 2)[:, None]
    colours = np.where(spread, 1 - 0.4 * (1 - clear[nth % len(LONG)]), grey[nth % len(SHORT)])
    colours[named] = clear[: named.size]
    document, depth = raster(plan)
    base = colours[document]
    background = np.array(to_rgb(axis.get_facecolor()))
    cells = np.where((document < 0)[..., None], background, 1 - (1 - base) * (0.4 + 0.6 * depth[..., None]))
    most = int(plan.layout.sizes().max())
    image = axis.imshow(cells, aspect="auto", interpolation="nearest", extent=(0, most, plan.ranks - 0.5, -0.5))
    image.set_rasterized(True)
    for edge in np.arange(plan.ranks - 1) + 0.5 if plan.ranks <= 32 else ():
        axis.axhline(edge, color=background, linewidth=4 if plan.ranks <= 8 else 1.5)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    darker = "later in the document" if plan.mask.paths is None else "deeper in the tree"
    axis.set(title="Who holds which document", xlabel=f"row of the rank; darker is {darker}")
    if plan.ranks <= 8:
        axis.set_yticks(range(plan.ranks), [f"rank {rank}" for rank in range(plan.ranks)])
    else:
        axis.set_ylabel("rank")
        axis.yaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    keys = []
    for d in named.tolist():
        name = _short(names[d]) if names is not None else f"document {d}:"
        keys.append(Patch(color=colours[d], label=f"{name}  {lengths[d]:,} ({_ranks(degree[d])})"))
    if named.size < order.size:
        rest = order[named.size :]
        pale = "; pale: 3 ranks or more" if spread[rest].any() else ""
        keys.append(Patch(color=SHORT[0], label=f"{rest.size:,} shorter, {lengths[rest].sum():,} tokens{pale}"))
    columns = 2 if names is not None else 3
    axis.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns, fontsize=8.5)


def raster(plan: Derived) -> tuple[Ints, Floats]:
    """Document, and relative depth in it, of sampled rows of sampled ranks, [lines, columns]; -1 for no row."""
    most = max(1, int(plan.layout.sizes().max()))
    runs, owner = plan.layout.all_runs()
    piece, source = cut(runs, plan.mask.offsets[:-1])
    owner, before = owner[source], np.cumsum(piece.count) - piece.count
    first = np.searchsorted(owner, np.arange(plan.ranks))
    row = before - np.append(before, 0)[first][owner] if before.size else before
    key = owner * most + row
    lines, columns = min(plan.ranks, LINES), min(most, COLUMNS)
    rank = (2 * np.arange(lines) + 1) * plan.ranks // (2 * lines)
    asked = rank[:, None] * most + (2 * np.arange(columns) + 1) * most // (2 * columns)
    at = np.maximum(np.searchsorted(key, asked, side="right") - 1, 0)
    nth = asked - key[at]
    held = (owner[at] == rank[:, None]) & (nth >= 0) & (nth < piece.count[at])
    position = piece.start[at] + piece.step[at] * np.where(held, nth, 0)
    document = np.searchsorted(plan.mask.offsets, position, side="right") - 1
    depth = plan.mask.depths(position) / _longest_paths(plan)[document]
    return np.where(held, document, -1), depth


def _longest_paths(plan: Derived) -> Ints:
    """Tokens of the longest path of each document."""
    paths, lengths = plan.mask.paths, plan.mask.lengths
    if paths is None:
        return lengths
    end, tokens = paths.leaves()
    return np.maximum.reduceat(tokens, np.searchsorted(end, plan.mask.offsets[:-1], side="right"))


def degrees(axis: Any, plan: Derived) -> None:
    """The number of ranks that hold each document, against its length."""
    from matplotlib.ticker import NullLocator

    for width, colour in zip(np.unique(plan.widths).tolist(), LONG * 3):
        chosen = plan.widths == width
        label = f"width {width}: {np.count_nonzero(chosen):,} documents"
        axis.scatter(
            plan.mask.lengths[chosen], plan.degrees[chosen], s=26, color=colour, alpha=0.55, linewidth=0, label=label
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_ylim(0.8, 1.3 * max(2, int(plan.degrees.max())))
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(lambda value, _: _round(value))
        ticks.set_minor_locator(NullLocator())
    axis.grid(color=EDGE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.set(title="Degree of every document", xlabel="tokens of the document", ylabel="ranks that hold some of it")
    columns = 2 if plan.mask.plain else 1  # next to a mask there is less room
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns, fontsize=8.5)


def loads(axis: Any, plan: Derived) -> None:
    """Rows and attended pairs of every rank, relative to their means."""
    load, edges = load_of(plan), np.arange(plan.ranks + 1) - 0.5
    both: tuple[tuple[str, Any, str], ...] = (("area", load.area, "#2563a8"), ("rows", load.rows, "#e07b28"))
    for name, values, colour in both:
        if values.mean():
            label = f"{name}, largest {values.max() / values.mean():.3f}x the mean"
            axis.stairs(
                values / values.mean(),
                edges,
                baseline=None,
                color=colour,
                label=label,
                linewidth=1.6 if plan.ranks <= 128 else 0.9,
            )
    axis.margins(x=0)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.95), max(high, 1.05))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", color=EDGE, linewidth=0.6)
    axis.set(title="Rows and attended pairs", xlabel="rank", ylabel="relative to the mean")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, fontsize=8.5)


def timeline(axis: Any, plan: Derived, forecast: Prediction) -> None:
    """Predicted seconds of every rank by activity, and a lower bound as a line."""
    axis.set(title="Predicted step", xlabel="rank", ylabel="seconds")
    edges, phases = np.arange(plan.ranks + 1) - 0.5, forecast.phases
    below = np.zeros(plan.ranks)
    for name, colour in ((name, PHASES[name]) for name in PHASES if name in phases):
        above = below + phases[name]
        label = "exposed transfers" if name == "exposed" else name
        axis.stairs(above, edges, baseline=below, fill=True, color=colour, label=label, linewidth=0)
        below = above
    for edge in edges[1:-1] if plan.ranks <= BLOCKS else ():
        axis.axvline(edge, color=axis.get_facecolor(), linewidth=0.8)
    axis.axhline(forecast.least, color="#b3261e", linestyle="--", linewidth=1.4, label="lower bound")
    axis.margins(x=0)
    axis.set_ylim(0, 1.06 * max(float(below.max()), forecast.least))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8.5)


def traffic(axis: Any, plan: Derived, call: dict[str, Any] | None) -> None:
    """A heat map of the bytes between ranks or blocks of them."""
    from matplotlib.colors import PowerNorm

    call = call or (plan.forecast.call if plan.forecast is not None else CALL)
    node, block, exact = node_of(plan), 1, shows_each_rank(plan)
    if not exact:
        unit = int(np.lcm.reduce([node or 1, *np.unique(plan.widths).tolist()]))
        block = unit * -(-plan.ranks // (unit * BLOCKS))
    who = "rank" if block == 1 else f"{block} ranks each"
    axis.set(title="Who sends to whom", xlabel=f"sender, {who}", ylabel=f"receiver, {who}")
    if not exact and plan.transport != "fetch":
        instead(axis, 'of so many ranks or rows drawn for transport "fetch"')
        axis.set(xticks=[], yticks=[])
        return
    if exact:
        moved, label = _bytes(plan, call), "MiB in one layer, forward and backward"
    else:
        shape, label = HeadShape(**call), "MiB of keys and values in one layer, forward"
        moved = fetched_between(plan, block) * shape.kv_heads * sum(shape.wire) * shape.size
    moved = moved / 2**20
    image = axis.imshow(
        moved, cmap="Blues", norm=PowerNorm(0.5, 0, max(moved.max(), 1e-9)), interpolation="nearest", aspect="auto"
    )
    for edge in np.arange(node, plan.ranks, node) - 0.5 if node is not None and block == 1 else ():
        for line in (axis.axvline, axis.axhline):
            line(edge, color=MUTED, linewidth=0.6)
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.get_major_locator().set_params(integer=True)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.figure.colorbar(image, ax=axis, label=label, shrink=0.9)


def _bytes(plan: Derived, call: dict[str, Any]) -> Floats:
    """Bytes of one layer, by receiving and sending rank."""
    moved = np.zeros((plan.ranks, plan.ranks))
    for rank in range(plan.ranks):
        for backward in (False, True):
            for peer, size in plan.traffic(rank, **call, backward=backward).items():
                moved[peer, rank] += size
    return moved


def _round(value: float) -> str:
    """A power of two in words: 4K."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _ranks(degree: int) -> str:
    return "1 rank" if degree == 1 else f"{degree:,} ranks"
