"""The picture of a stage plan: what is sharded in every stage, and what each stage and move takes.

matplotlib is imported by the one function that writes a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqpar.plan.plot import checked_path

if TYPE_CHECKING:
    from seqpar.dsp.planner import StagePlan

COLOURS = ("#2563a8", "#e07b28", "#3a8f4f", "#7d5ba6", "#8c6248", "#1f9aa8", "#a3962b", "#cf6fa5")
WHOLE, MOVES, MUTED = "#aeb6c2", "#b5443f", "#6b7280"


def plot(plan: StagePlan, path: str | Path) -> None:
    """Write the picture; the file's suffix decides its format.

    Raises: ImportError without matplotlib, OSError and ValueError for a file that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError(
            "StagePlan.plot needs matplotlib, which is not installed: pip install 'seqpar[plot]'"
        ) from None
    path = checked_path(path)
    figure: Any = Figure(figsize=(max(6.0, min(24.0, 2 + 0.35 * len(plan.stages))), 4.5), layout="constrained")
    axis = figure.subplots()
    costs = plan.costs
    colours = {dim: COLOURS[n % len(COLOURS)] for n, dim in enumerate(costs.dims)} | {None: WHOLE}
    for n, (stage, choice, after) in enumerate(zip(plan.stages, plan.choices, plan.afters, strict=True)):
        inside = costs.modes(stage, choice.layout)[choice.mode]
        shown = costs.through(stage, inside, choice.before, choice.layout, after, choice.parts) - inside
        axis.bar(n, inside * 1e3, color=colours[choice.layout], hatch="" if choice.mode == "local" else "//")
        axis.bar(n, shown * 1e3, bottom=inside * 1e3, color=MOVES)
    names = [stage.name for stage in plan.stages]
    if plan.gathers:
        axis.bar(len(names), costs.gather.seconds(plan.stages[-1].bytes) * 1e3, color=MOVES)
        names.append("end")
    axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axis.set(ylabel="milliseconds", title=plan.describe().splitlines()[0].split(": ")[0])
    keys = [Patch(color=colour, label=f"{dim or 'nothing'} sharded") for dim, colour in colours.items()]
    axis.legend(handles=[*keys, Patch(color=MOVES, label="changes of layout, as far as shown")], fontsize=8, ncols=3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
