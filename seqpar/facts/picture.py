"""The picture of a mask: which keys a query sees, by band; next to it, for a tree, the nodes on each query's path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.bands import Band
from seqpar.facts.drawing import EDGE, LONG, instead, picture
from seqpar.facts.intervals import interval_of
from seqpar.facts.trees import Paths
from seqpar.facts.value import Ints

SAMPLES, CELLS = 2048, 512  # queries and keys that are looked at, and cells of the picture, at most
DRAWN = 4096  # nodes at most
EDGES = 64  # documents at most whose borders are drawn


class MaskPicture(NamedTuple):
    """What a picture shows of a mask. offsets: the starts of documents, and the last end. areas: pairs of each band."""

    title: str
    bands: Sequence[Band]
    areas: Sequence[int]
    offsets: Ints
    kv_offsets: Ints
    paths: Paths | None


def plot(shown: MaskPicture, path: str | Path) -> None:
    """Write the picture; the file's suffix decides its format.

    Raises: ImportError without matplotlib, OSError and ValueError for a file that cannot be written.
    """
    tree = shown.paths is not None
    with picture("Mask.plot", path, (13 if tree else 9, 8)) as figure:
        figure.suptitle(shown.title, fontsize=13, fontweight="bold")
        axes = figure.subplots(1, 1 + tree, width_ratios=(1, 2) if tree else None, sharey=True, squeeze=False)[0]
        pairs(axes[-1], shown)
        if shown.paths is not None:
            nodes(axes[0], shown.paths)


def pairs(axis: Any, shown: MaskPicture, *, columns: int = 4) -> None:
    """Queries downwards and keys to the right; a cell is darker the more of its pairs a band shows.

    columns: of the legend; one in a small panel.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    tokens, keys = int(shown.offsets[-1]), int(shown.kv_offsets[-1])
    share = raster(shown)
    ink = 1 - np.array([to_rgb(LONG[n % len(LONG)]) for n in range(len(shown.bands))])
    cells = 1 - np.einsum("bqk,bc->qkc", np.sqrt(share), ink).clip(0, 1)
    image = axis.imshow(cells, aspect="auto", interpolation="nearest", extent=(0, keys, tokens, 0))
    image.set_rasterized(True)
    if shown.offsets.size <= EDGES + 1:
        for query, key in zip(shown.offsets[1:-1].tolist(), shown.kv_offsets[1:-1].tolist(), strict=True):
            axis.axhline(query, color=EDGE, linewidth=0.8)
            axis.axvline(key, color=EDGE, linewidth=0.8)
    sampled = max(tokens, keys) > SAMPLES
    axis.set(
        title="Keys that a query sees", xlabel="key" + (f" ({SAMPLES:,} are drawn)" if sampled else ""), ylabel="query",
    )  # fmt: skip
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.get_major_locator().set_params(integer=True, nbins=6)
        ticks.set_major_formatter(lambda value, _: f"{value:,.0f}")
    names = [f"band {n}: {area:,} pairs" for n, area in enumerate(shown.areas)]
    handles = [Patch(color=LONG[n % len(LONG)], label=name) for n, name in enumerate(names)]
    below = -0.08 if columns > 1 else -0.13
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, below), ncols=columns, fontsize=8.5)


def nodes(axis: Any, paths: Paths) -> None:
    """The tree on its side: a node is as wide as it has tokens, and as high as all tokens below it with its own."""
    axis.set(title="Nodes on the path of a query", xlabel="depth: tokens from the root", ylabel="query")
    count = np.diff(np.append(paths.start, paths.end.max()))
    axis.set_xlim(0, int((paths.depth + count).max()))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if count.size > DRAWN:
        return instead(axis, f"{count.size:,} nodes; at most {DRAWN:,} are drawn")
    colours = [LONG[n % len(LONG)] for n in range(count.size)]
    axis.barh(
        paths.start, count, paths.end - paths.start, paths.depth, align="edge", color=colours, alpha=0.55,
        edgecolor="white", linewidth=0.8 if count.size <= 256 else 0.2,
    )  # fmt: skip


def raster(shown: MaskPicture) -> NDArray[np.float64]:
    """The share of the pairs of each cell that each band shows, [bands, cells of queries, cells of keys]; sampled."""
    rows, columns = (_sampled(int(offsets[-1])) for offsets in (shown.offsets, shown.kv_offsets))
    document = interval_of(rows, shown.offsets[:-1]) + 1
    at = rows + (shown.kv_offsets - shown.offsets)[document]  # in key coordinates: documents end together
    found = []
    for band in shown.bands:
        lo, hi = (x[:, None] for x in band.bounds(rows))
        seen = (lo <= columns) & (columns < hi)
        if band.until is not None:
            seen &= at[:, None] < band.until.of(columns)
        found.append(_averaged(_averaged(seen.astype(np.float64), 0), 1))
    return np.stack(found)


def _sampled(total: int) -> Ints:
    """Positions spread over a side, all of them if they are few."""
    many = min(total, SAMPLES)
    return np.array([n * total // many for n in range(many)])


def _averaged(values: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """The means of cells along a dim."""
    size = values.shape[dim]
    edge = np.arange(min(size, CELLS) + 1) * size // min(size, CELLS)
    counts = np.expand_dims(np.diff(edge), 1 - dim)
    means: NDArray[np.float64] = np.add.reduceat(values, edge[:-1], axis=dim) / counts
    return means
