"""The demo's picture: both loss curves, their difference, who holds which document, where each rank's time went."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a file, never a window

from matplotlib import colormaps, pyplot  # noqa: E402  (the backend is chosen before pyplot loads)
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import NullFormatter  # noqa: E402

INK = "#1f2430"
MUTED = "#6b7280"
SECONDS = {  # what a rank was doing -> its colour
    "attention": "#2563a8",
    "rest of the model": "#8fb8de",
    "waiting for peers": "#f0a202",
    "gradient sum": "#b5544a",
}
NAMED = 8  # documents of the legend; the shorter ones of a batch share its last line


def draw(path: Path, args, rows, batch, plan, seconds, *, tolerance: float, verdict: str) -> None:
    """Write the picture. seconds: one dict per rank, what it was doing -> seconds."""
    style = {"font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "text.color": INK}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(2, 2, figsize=(14, 8.6), height_ratios=(1.15, 1), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
        figure.suptitle(
            f"One decoder, trained on {_ranks(args.ranks)} and in one process\n", fontsize=15, fontweight="bold", x=0.5
        )
        figure.text(
            0.5,
            0.945,
            f"{args.layout} layout · {args.transport} transport · Ulysses {args.ulysses} · {args.dtype} · "
            f"{args.tokens:,} tokens per batch",
            ha="center",
            color=MUTED,
        )
        _losses(axes[0, 0], rows)
        _differences(axes[1, 0], rows, tolerance)
        _holders(axes[0, 1], batch, plan)
        _times(axes[1, 1], seconds)
        figure.supxlabel(verdict, fontsize=10.5, color="#20733f" if verdict.startswith("PASS") else "#b3261e")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _losses(axis, rows) -> None:
    """Both loss curves: the reference wide and pale, so that the one on top of it does not hide it."""
    steps = np.arange(len(rows))
    axis.plot(steps, [r.reference for r in rows], color="#f3b27a", linewidth=6, label="one process, ordinary attention")
    axis.plot(steps, [r.sharded for r in rows], color="#2563a8", linewidth=1.8, marker=".", label="sharded, seqpar")
    axis.set(title="Loss, nats per byte", xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False)


def _differences(axis, rows, tolerance: float) -> None:
    """How far the two curves are apart, beside what rounding alone does and what is tolerated, on a log axis."""
    steps = np.arange(len(rows))
    # an exact zero has no place on a log axis: it is drawn at the smallest value that is not one
    differences, drifts = (np.array([getattr(r, name) for r in rows]) for name in ("difference", "drift"))
    seen = np.concatenate((differences, drifts))
    floor = seen[seen > 0].min() if (seen > 0).any() else tolerance / 10
    axis.axhline(tolerance, color="#b3261e", linestyle=":", label="tolerance")
    axis.semilogy(steps, np.maximum(drifts, floor), color="#9ca3af", linestyle="--", label="nudged by one rounding")
    axis.semilogy(steps, np.maximum(differences, floor), color="#2563a8", marker=".", label="sharded")
    decades = np.log10([floor, max(tolerance, np.nanmax(seen))])
    axis.set_ylim(10 ** np.floor(decades[0]), 10 ** np.ceil(decades[1]))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set(title="Difference to the loss of one process", xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, frameon=False)


def _holders(axis, batch, plan) -> None:
    """Rows of every rank in local order, coloured by document; darker is later in the document."""
    ends = np.cumsum(batch.lengths)
    ranks = plan.layout.ranks
    most = max(len(plan.layout.positions(rank)) for rank in range(ranks))
    order = np.argsort(-np.asarray(batch.lengths), kind="stable")  # the longest documents get the clearest colours
    palette = colormaps["tab10"].colors
    colour = {int(document): np.array(palette[at % len(palette)]) for at, document in enumerate(order)}
    picture = np.ones((ranks, most, 3))
    for rank in range(ranks):
        positions = plan.layout.positions(rank)
        documents = np.searchsorted(ends, positions, side="right")
        starts = ends[documents] - np.asarray(batch.lengths)[documents]
        depth = (positions - starts) / np.asarray(batch.lengths)[documents]
        base = np.array([colour[int(d)] for d in documents]).reshape(-1, 3)
        picture[rank, : len(positions)] = 1 - (1 - base) * (0.35 + 0.65 * depth[:, None])
    axis.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, most, ranks - 0.5, -0.5))
    for edge in np.arange(ranks - 1) + 0.5:
        axis.axhline(edge, color="white", linewidth=5)
    axis.set(title="Who holds which document (last batch)", xlabel="row of the rank, darker = later in the document")
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axis.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    named = order if len(order) <= NAMED else order[: NAMED - 1]
    degrees = np.asarray(plan.degrees)
    keys = []
    for d in named:
        label = f"{_short(batch.names[d])}  {batch.lengths[d]:,} ({_ranks(degrees[d])})"
        keys.append(Patch(color=colour[int(d)], label=label))
    if len(named) < len(order):
        rest = order[len(named) :]
        tokens = sum(batch.lengths[d] for d in rest)
        keys.append(Patch(color="none", label=f"and {len(rest)} shorter documents, {tokens:,} tokens"))
    axis.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=8)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _ranks(degree: int) -> str:
    return "1 rank" if degree == 1 else f"{degree} ranks"


def _times(axis, seconds) -> None:
    """A stacked bar per rank."""
    left = np.zeros(len(seconds))
    for name, colour in SECONDS.items():
        widths = np.array([rank[name] for rank in seconds])
        axis.barh(range(len(seconds)), widths, left=left, color=colour, height=0.72, label=name, edgecolor="white")
        for rank, width in enumerate(widths):
            if width > 0.07 * sum(seconds[rank].values()):
                dark = name in ("attention", "gradient sum")
                x = left[rank] + width / 2
                axis.text(x, rank, f"{width:.1f}", ha="center", va="center", color="white" if dark else INK)
        left += widths
    axis.set(title="Where each rank's time went", xlabel="seconds over all sharded steps")
    axis.set_yticks(range(len(seconds)), [f"rank {rank}" for rank in range(len(seconds))])
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.spines["left"].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, frameon=False)
