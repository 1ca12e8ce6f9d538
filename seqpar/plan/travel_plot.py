"""The picture of what ranks pass for one recurrent layer: who sends which state, and bytes by pairs of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from seqpar.facts.drawing import EDGE, INK, LONG, instead, picture
from seqpar.plan.derive import Derived
from seqpar.plan.recurrence import RecurrentLayer
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel import TravelWay, inside, layer_way
from seqpar.plan.travel_report import between, describe_way, passed, runs_of

DRAWN = 2000  # runs, or states on their way, at most
RANKS = 64


def plot(
    plan: Derived,
    layer: RecurrentLayer,
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    gates: str = "float32",
    device: str = "cuda",
    threads: int = 1,
    travel: str = "auto",
) -> None:
    """Write the picture of one recurrent layer of a plan; the file's suffix decides its format.

    Left: the document runs of each rank over the tokens of the batch, in the layout where states pass, coloured by
    document, and an arrow for each state that is sent. Right: bytes in forward by sender and receiver. The other
    arguments are those of `describe`.

    Raises: TypeError unless these are a plan and a layer, ValueError for an unknown travel, dtype or device, more than
    64 ranks or a suffix of an unknown format, ImportError without matplotlib, OSError for a file that is not writable.
    """
    runs = runs_of("plot", plan, layer, travel)
    if plan.ranks > RANKS:
        raise ValueError(f"at most {RANKS} ranks are drawn, the plan has {plan.ranks}; describe has their quantiles")
    of_layer = layer.bytes(dtype, gates=gates, device=device, threads=threads)
    way = layer_way(runs, of_layer, travel)
    where, inner = inside(runs, way)
    with picture("this picture", path, (14, 2.6 + 0.35 * max(plan.ranks, 8))) as figure:
        figure.suptitle(
            f"One recurrent layer on {plan.ranks} ranks: {describe_way(way)}", fontsize=13, fontweight="bold"
        )
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        senders(left, where, inner)
        if way.inside is not None:
            left.set_title("Who sends which state, in the contiguous layout")
        moved = between(runs, of_layer, way) / 2**20
        image = right.imshow(moved, cmap="Blues", vmin=0, vmax=max(moved.max(), 1e-9), aspect="auto")
        right.set(title="Who sends to whom", xlabel="sender", ylabel="receiver")
        for ticks in (right.xaxis, right.yaxis):
            ticks.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=right, label="MiB in one layer, forward", shrink=0.9)


def senders(axis: Any, runs: DocumentRuns, way: TravelWay) -> None:
    """The runs of each rank over the tokens of the batch, and an arrow for each state from its run to the next one."""
    axis.set(title="Who sends which state", xlabel="token of the batch", ylabel="rank")
    axis.set_xlim(0, int(runs.offsets[-1]))
    axis.set_ylim(runs.ranks - 0.4, -0.6)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if runs.start.size > DRAWN:
        return instead(axis, f"{runs.start.size:,} runs; at most {DRAWN:,} are drawn")
    colours = [LONG[document % len(LONG)] for document in runs.document.tolist()]
    axis.barh(runs.rank, runs.count, left=runs.start, height=0.5, color=colours, edgecolor="white", linewidth=0.6)
    for edge in runs.offsets[1:-1].tolist():
        axis.axvline(edge, color=EDGE, linewidth=0.8, zorder=0)
    sender, receiver, _ = passed(runs, way) if way.steps else (np.zeros(0, np.int64),) * 3
    if sender.size > DRAWN:
        axis.set_title(f"Who sends which state ({sender.size:,} are not drawn)")
        return
    x, y = runs.start[sender] + runs.count[sender], runs.rank[sender]
    if sender.size:
        axis.quiver(
            x, y, runs.start[receiver] - x + runs.count[receiver] * 0.15, runs.rank[receiver] - y, angles="xy",
            scale_units="xy", scale=1, width=0.0025, color=INK, alpha=0.8, zorder=3,
        )  # fmt: skip
