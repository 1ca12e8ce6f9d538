"""Cases of plans: their digests, the facts that they derive for each rank, and the planner's choices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from seqpar import Mask, plan_batch, plan_step

from .facts import PlanCase, drawn, named
from .groups import Cases, refused

TOO_LONG = (3, 6, 7, 14)  # random batches that do not fit the memory of their only rank
CALL: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 16}


def every() -> list[PlanCase]:
    rng = np.random.default_rng(17)
    return list(dict.fromkeys([*named(), *(drawn(rng) for _ in range(200))]))


def plan_of(case: PlanCase) -> Any:
    plan = case.plan()
    found: list[Any] = [plan.digest(), plan.mask.digest(), plan.layout.digest(), plan.widths, plan.degrees, plan.merges]
    found.append(plan.padded().digest() if case.mask != "cross" else None)
    for rank in range(plan.ranks):
        found += [plan.positions(rank), plan.positions(rank, "kv"), plan.rope_positions(rank)]
        found += [plan.bytes(rank, **CALL, backward=backward) for backward in (False, True)]
        found.append(plan.traffic(rank, **CALL))
    return found


def steps_of(case: PlanCase) -> Any:
    plan = case.plan()
    return [[(*_values(step), step.area) for step in plan.steps(rank)] for rank in range(plan.ranks)]


def _values(step: Any) -> list[Any]:
    """The fields of a step and of its part, with the bounds of a single band where earlier versions had them."""
    part = vars(step.part) | dict(
        zip(("lo", "hi"), step.part.bands[0], strict=False) if hasattr(step.part, "bands") else ()
    )
    fields = ("width", "share", "members", "q", "kv", "pos", "lo", "hi", "keys")
    others = [value for name, value in vars(step).items() if not name.startswith("_") and name != "part"]
    return [part[name] for name in fields] + others


def plans() -> Cases:
    return {str(case): partial(plan_of, case) for case in every()}


def steps() -> Cases:
    return {str(case): partial(steps_of, case) for case in every()}


def batch_plan(lengths: list[int], ranks: int, options: dict[str, Any]) -> Any:
    return plan_batch(lengths, ranks, **options).digest()


def step_plan(lengths: list[int], ranks: int) -> Any:
    return [(batch.documents, batch.plan.digest()) for batch in plan_step(lengths, ranks)]


def planner() -> Cases:
    rng = np.random.default_rng(18)
    calls: Cases = {}
    for number in range(24):
        lengths = np.exp(rng.uniform(4, 11, int(rng.integers(1, 40)))).astype(int).clip(1).tolist()
        ranks = int(rng.choice([1, 2, 4, 8, 16, 64]))
        options: dict[str, Any] = [{}, {"token_slack": 0.1}, {"node": 1}][number % 3]
        if number % 4 == 3:
            options = options | {"masks": Mask(lengths, causal=False)}
        plan = partial(batch_plan, lengths, ranks, options)
        calls[f"batch {number} {ranks} ranks {options}"] = partial(refused, plan) if number in TOO_LONG else plan
        if ranks <= 8:
            calls[f"step {number} {ranks} ranks"] = partial(step_plan, lengths, ranks)
    return calls
