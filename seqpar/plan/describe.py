"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seqpar.plan.steps import Part, Step, count

if TYPE_CHECKING:
    from seqpar.plan.plan import Plan


def describe(plan: Plan) -> str:
    """What the plan was given, its degrees, and a line for each rank: rows, area, keys received, peers, steps."""
    degrees, documents = np.unique(plan.degrees, return_counts=True)
    widths = ", ".join(str(w) for w in np.unique(plan.widths))
    area = plan.mask.area()
    lines = [
        f"{plan.mask!r}",
        f"{plan.layout!r}" + ("" if plan.kv_layout is plan.layout else f", keys in {plan.kv_layout!r}"),
        f"transport {plan.transport}, Ulysses width {widths}, digest {plan.digest()[:12]}",
        "documents by degree: " + ", ".join(f"{n} on {d}" for d, n in zip(degrees, documents, strict=True)),
        f"area {area:,} pairs, {area / plan.ranks:,.0f} per rank",
        f"steps for keys and values of 4 KiB a token, more if they are larger; partial results: {_merging(plan)}",
        f"{'rank':>5}{'rows':>10}{'tokens':>10}{'area':>18}{'of mean':>9}{'keys in':>10}{'from':>6}{'steps':>7}",
    ]
    for rank in range(plan.ranks):
        steps = plan.steps(rank)
        # Inside a head trade each member computes its share of the heads of the group's whole area.
        mine = sum(s.area / s.part.width for s in steps)
        keys = sum(count(r) for s in steps for r in s.recvs.values())
        peers = {p for s in steps for p in s.recvs} | {m for s in steps for m in s.part.members if m != rank}
        ratio = f"{mine * plan.ranks / area:.2f}" if area else "-"
        lines.append(
            f"{rank:>5}{plan.rows(rank):>10,}{plan.layout.tokens(rank):>10,}{mine:>18,.0f}{ratio:>9}{keys:>10,}"
            f"{len(peers):>6}{sum(bool(s.local or s.sends or s.recvs) for s in steps):>7}"
        )
    return "\n".join(lines)


def _merging(plan: Plan) -> str:
    """Over how many steps the keys of a row come, and what that costs kernels that round their results."""
    if not plan.merges:
        summed = "; key gradients are summed over ranks" if plan.transport == "gather" and plan.ranks > 1 else ""
        return f"none merged, every row has one step{summed}"
    most = 0
    for rank in range(plan.ranks):
        for part in (s.part for s in plan.steps(rank) if s.first):
            met = [_met(s, part) for s in plan.steps(rank) if s.part is part]
            most = max(most, int(np.sum(met, axis=0).max(initial=0)))
    return (
        f"merged over up to {most} steps in float32, or float64; a kernel that rounds its results (aten_flash, cudnn, "
        "flash2, flash3, flash4) rounds each of them, so auto takes none of these"
    )


def _met(step: Step, part: Part) -> NDArray[np.bool_]:
    """Which query rows see keys of a step."""
    return np.searchsorted(step.pos, part.lo) < np.searchsorted(step.pos, part.hi)
