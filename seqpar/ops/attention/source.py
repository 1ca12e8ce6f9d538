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
    source, *given = values if isinstance(values[0], PlanSource) else (None, *values)
    by_handle = bool(given) and isinstance(given[-1], Tensor)
    if by_handle:
        given = [*given[:-1], *carried(given[-1])]
    if by_handle or len(given) not in (0, 2):
        given = checked_values(given, Plan)
    if source is None:
        plan, comm = given
        return plan, comm, options
    plan, comm, seed = source.now(given, options.dropout_seed)
    return plan, comm, options._replace(dropout_seed=seed)


def values_of(what: str, plan: Plan | Tensor, comm: Comm | None) -> list[Any]:
    """The values of a call: a plan and a comm, or their handle alone."""
    if comm is None and not isinstance(plan, Tensor):
        raise ValueError(f"{what}: expected a plan and a comm, or their handle alone, got {plan!r:.200} alone")
    return [plan] if comm is None else [plan, comm]


def plan_and_comm(what: str, values: Sequence[Any]) -> tuple[Plan, Comm]:
    """The plan and the comm of a call's values, their handle, or that of a source that looks them up now.

    `check_plan` follows, where other ranks hear of its errors.
    """
    by_handle = len(values) == 1 and isinstance(values[0], Tensor)
    if by_handle:
        values = carried(values[0])
    if len(values) == 1 and isinstance(values[0], PlanSource):
        values = values[0].now([], None)[:2]
    elif by_handle or len(values) != 2:
        values = checked_values(values, Plan)
    plan, comm = values
    check_comm(what, comm)
    return plan, comm


def check_plan(what: str, plan: object, comm: Comm) -> None:
    """Raise ValueError unless a call got a plan for the comm's ranks."""
    if not isinstance(plan, Plan):
        raise ValueError(f"{what}: plan must be a Plan or the handle of seqpar.bind(plan, comm), got {plan!r:.200}")
    check_ranks(plan, comm)
