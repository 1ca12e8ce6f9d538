"""The picture of a plan: who holds which document, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seqpar.cli.output import CommandError

if TYPE_CHECKING:
    from seqpar.plan import Plan

COLUMNS = 1600  # of the raster that stands for the tokens, however many they are


def draw_plan(plan: Plan, sends: Sequence[Mapping[int, int]], path: Path) -> None:
    """Write the picture. sends: for each rank, peer -> bytes. The file's suffix decides its format.

    Raises: CommandError if the file cannot be written.
    """
    # Figure without pyplot: no backend, no window, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.6 + 0.3 * plan.ranks + 1.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.4, 1))
    owners = left.imshow(
        np.ma.masked_less(held(plan), 0), aspect="auto", interpolation="nearest", cmap="tab20", vmin=0, vmax=19,
        extent=(0, plan.mask.tokens, plan.ranks - 0.5, -0.5),
    )  # fmt: skip
    owners.set_rasterized(True)
    left.set(title="who holds what (colour: document)", xlabel="position in the batch", ylabel="rank")
    matrix = np.zeros((plan.ranks, plan.ranks))
    for rank, peers in enumerate(sends):
        for peer, count in peers.items():
            matrix[peer, rank] = count / 2**20
    image = right.imshow(matrix, cmap="magma", vmin=0)
    right.set(title="who waits for whom", xlabel="sender", ylabel="receiver")
    figure.colorbar(image, ax=right, label="MiB per layer, forward and backward")
    for axis in (left.yaxis, right.xaxis, right.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"{len(plan.mask.lengths)} documents, {plan.transport}, {plan.ranks} ranks")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path}: {error}") from None


def held(plan: Plan) -> np.ndarray:
    """Colour number of the document that a rank holds at each column, [ranks, columns], -1 for none."""
    tokens = plan.mask.tokens
    columns = min(tokens, COLUMNS)
    raster = np.full((plan.ranks, columns), -1)
    for rank in range(plan.ranks):
        at = plan.layout.positions(rank)
        raster[rank, at * columns // tokens] = plan.mask.documents(at) % 20
    return raster
