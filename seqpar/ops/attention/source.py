"""Where a call's plan, comm and dropout seed come from: its arguments, their handle, or what looks them up.

A backward pass may make a call again. Arguments are then what is given again; what looks up must know what forward had,
or raise (see `seqpar.parallel.surrounding`). The stamp that a call saves (`seqpar.ops.core.collective_op`) tells where
it was made again with something else, except inside torch's reentrant checkpoint, whose forward records nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops.attention.signature import Options
from seqpar.ops.core.handles import carried, checked_values
from seqpar.plan import Plan


class Given(NamedTuple):
    """What a call is made with besides its arguments."""

    plan: Plan
    comm: Comm
    seed: int | None


class PlanSource:
    """Looks up plan, comm and seed when a call is made, in compiled models too; subclasses say where."""

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """What a call is made with that was given these values, (plan, comm) or none, and this seed or none."""
        raise NotImplementedError


def resolved(values: Sequence[Any], options: Options) -> tuple[Plan, Comm, Options]:
    """The plan, comm and options of a call. values: plan and comm, or their handle; before them, or alone, a source.

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
