"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from seqpar.plan.steps import count

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
        "steps for keys and values of 4 KiB a token; a call has more stages if its own are larger",
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
