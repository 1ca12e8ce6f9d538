"""Pictures of the rows of `bench/gpu/run.py`."""

from __future__ import annotations

import re
from pathlib import Path

from bench.gpu.rows import Row


def plot(rows: list[Row], path: Path) -> Path | None:
    """Draw rates by tokens and the ring tax by ranks in one picture; None without matplotlib or rows."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [row for row in rows if row.get("tflops") and row.get("ratio") is not None]
    panels = [
        (slice, mask, dim) for slice in ("forward", "backward") for mask in ("causal", "full") for dim in (128, 64)
    ]
    panels = [p for p in panels if _lines(timed, *p)]
    taxes = [row for row in timed if row["slice"] == "ring"]
    count = len(panels) + bool(taxes)
    if not count:
        return None
    figure, axes = plt.subplots(-(-count // 2), 2, figsize=(11, 3.5 * -(-count // 2)), squeeze=False)
    flat = list(axes.flat)
    for axis, panel in zip(flat, panels):
        for name, points in sorted(_lines(timed, *panel).items()):
            axis.plot(*zip(*sorted(points)), marker="o", label=name)
        axis.set(
            title=f"{panel[0]}, {panel[1]}, head dim {panel[2]}", xlabel="tokens", ylabel="TFLOP/s", ylim=(0, None)
        )
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=7)
    if taxes:
        _tax(flat[len(panels)], taxes)
    for axis in flat[count:]:
        axis.remove()
    figure.suptitle(f"{rows[0]['device']}, commit {rows[0]['commit'][:12]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _lines(rows: list[Row], slice: str, mask: str, dim: int) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        case = re.fullmatch(rf"{mask} (\d+), \d+ heads of {dim}, .*", row["case"])
        if row["slice"] == slice and case:
            name = row["kernel"] + row["mode"].removeprefix(slice)
            found.setdefault(name, []).append((int(case[1]), row["tflops"]))
    return found


def _tax(axis: object, rows: list[Row]) -> None:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        layout, transport, ranks = row["case"].split(", ")
        found.setdefault(f"{layout}, {transport}, {row['mode']}", []).append((int(ranks.split()[0]), row["ratio"]))
    for name, points in sorted(found.items()):
        axis.plot(*zip(*sorted(points)), marker="o", label=name)  # type: ignore[attr-defined]
    axis.set(title="one launch over the sum of ranks", xlabel="ranks")  # type: ignore[attr-defined]
    axis.set_xscale("log", base=2)  # type: ignore[attr-defined]
    axis.legend(fontsize=5, ncols=2)  # type: ignore[attr-defined]
