"""The demo's picture: both loss curves, their difference, who holds which document, where each rank's time went."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a file, never a window

from matplotlib import pyplot  # noqa: E402  (the backend is chosen before pyplot loads)
from matplotlib.ticker import NullFormatter  # noqa: E402

from seqpar.facts.drawing import INK, MUTED, STYLE  # noqa: E402
from seqpar.plan.plot import holders, timeline  # noqa: E402

SECONDS = {  # activity -> its colour
    "attention": "#2563a8",
    "recurrences": "#5b8f5b",
    "rest of the model": "#8fb8de",
    "waiting for peers": "#f0a202",
    "gradient sum": "#b5544a",
}


def draw(path: Path, args, rows, loaded, seconds, *, tolerance: float, verdict: str) -> None:
    """Write the picture. loaded: the first batch and its plan. seconds: for each rank, activity -> seconds."""
    plan, forecast = loaded.plan, loaded.plan.forecast
    how = "planned for every batch" if forecast is not None else f"{args.layout} layout · Ulysses {args.ulysses}"
    about = f"{how} · {args.transport} transport · {args.dtype} · {args.tokens:,} tokens per batch"
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(16, 9.4), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
        title = f"One decoder, trained on {_ranks(args.ranks)} and in one process\n"
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.5)
        figure.text(0.5, 0.948, about, ha="center", color=MUTED)
        third = ["times"] * 2 if forecast is None else ["times", "planned"]
        mosaic = [["losses", "who", "who"], ["differences", *third]]
        axes = figure.subplot_mosaic(mosaic, height_ratios=(1.15, 1), width_ratios=(1.15, 1, 1))
        _losses(axes["losses"], rows)
        _differences(axes["differences"], rows, tolerance)
        holders(axes["who"], plan, names=loaded.batch.names)
        axes["who"].set_title("Who holds which document (first batch)")
        _times(axes["times"], seconds)
        if forecast is not None:
            timeline(axes["planned"], plan, forecast)
            axes["planned"].set_title(f"Predicted step (first batch): gap {forecast.gap:.1%}")
        figure.supxlabel(verdict, fontsize=10.5, color="#20733f" if verdict.startswith("PASS") else "#b3261e")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _losses(axis, rows) -> None:
    """Both loss curves: the reference wide and pale, so that the sharded curve on top does not hide it."""
    steps = np.arange(len(rows))
    axis.plot(steps, [r.reference for r in rows], color="#f3b27a", linewidth=6, label="one process, ordinary attention")
    axis.plot(steps, [r.sharded for r in rows], color="#2563a8", linewidth=1.8, marker=".", label="sharded, seqpar")
    axis.set(title="Loss, nats per byte", xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False)


def _differences(axis, rows, tolerance: float) -> None:
    """The difference of the curves, the drift that rounding alone causes, and the tolerance, on a log axis."""
    steps = np.arange(len(rows))
    # a log axis cannot show zero: it is drawn at the smallest nonzero value
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
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8.5)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _times(axis, seconds) -> None:
    """A stacked bar per rank."""
    left = np.zeros(len(seconds))
    for name, colour in SECONDS.items():
        if name not in seconds[0]:
            continue
        widths = np.array([rank[name] for rank in seconds])
        axis.barh(range(len(seconds)), widths, left=left, color=colour, height=0.72, label=name, edgecolor="white")
        for rank, width in enumerate(widths):
            if width > 0.07 * sum(seconds[rank].values()):
                dark = name in ("attention", "recurrences", "gradient sum")
                x = left[rank] + width / 2
                axis.text(x, rank, f"{width:.1f}", ha="center", va="center", color="white" if dark else INK)
        left += widths
    axis.set(title="Where each rank's time went", xlabel="seconds over all sharded steps")
    axis.set_yticks(range(len(seconds)), [f"rank {rank}" for rank in range(len(seconds))])
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.spines["left"].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8.5)
