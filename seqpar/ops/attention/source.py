"""The source of a call's plan, comm and dropout seed: its arguments, their handle, or a lookup.

A backward pass may repeat a call. Arguments are then given again; a lookup must find what forward found, or raise (see
`seqpar.parallel.surrounding`). A repetition with other values is an error (`seqpar.ops.core.regions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops.attention.signature import Options
from seqpar.ops.core.agreement import check_comm, check_ranks
from seqpar.ops.core.handles import carried, checked_values
from seqpar.plan import Plan


class Given(NamedTuple):
    """A call's plan, comm and seed."""

    plan: Plan
    comm: Comm
    seed: int | None


class PlanSource:
    """Looks up plan, comm and seed at the time of a call, in compiled models too; subclasses know where."""

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """The plan, comm and seed of a call. given: the call's (plan, comm), or empty; seed: the call's, or None."""
        raise NotImplementedError


def resolved(values: Sequence[Any], options: Options) -> tuple[Plan, Comm, Options]:
    """The plan, comm and options of a call. values: plan and comm, or their handle; a source alone or before them.

    Raises: ValueError for the handle of other values.
    """
    plan, comm, seed = _given(values, options.dropout_seed)
    return plan, comm, options if seed == options.dropout_seed else options._replace(dropout_seed=seed)


def _given(values: Sequence[Any], seed: int | None) -> Given:
    by_handle = isinstance(values[-1], Tensor)
    if by_handle:
        values = [*values[:-1], *carried(values[-1])]
    source, *given = values if isinstance(values[0], PlanSource) else (None, *values)
    if (by_handle or len(given) != 2) and (given or source is None):
        given = list(checked_values(given, Plan))
    return Given(*given, seed) if source is None else source.now(given, seed)


def values_of(what: str, plan: Plan | Tensor, comm: Comm | None) -> list[Any]:
    """The values of a call: a plan and a comm, or their handle alone."""
    if comm is None and not isinstance(plan, Tensor):
        raise ValueError(f"{what}: expected a plan and a comm, or their handle alone, got {plan!r:.200} alone")
    return [plan] if comm is None else [plan, comm]


def plan_and_comm(what: str, values: Sequence[Any]) -> tuple[Plan, Comm]:
    """The plan and the comm of a call's values, their handle, or that of a source that looks them up now.

    `check_plan` follows, where other ranks hear of its errors.
    """
    plan, comm, _ = _given(values, None)
    check_comm(what, comm)
    return plan, comm


def check_plan(what: str, plan: object, comm: Comm) -> None:
    """Raise ValueError unless a call got a plan for the comm's ranks."""
    if not isinstance(plan, Plan):
        raise ValueError(f"{what}: expected a plan and a comm, or their handle alone, got {plan!r:.200} with a comm")
    check_ranks(plan, comm)
