"""Bytes of one block of a model under each policy of recomputation, as `seqpar.train.trace` measures them.

A block *holds* bytes from its forward to its backward: its input, if it needs it, but not its output. In its backward
it *works with* others: gradients, and what it computes again. So in the backward of block j there are on a rank

    held_0 + ... + held_j + working_j        bytes a row

besides state, weights and the exchanges of attention. Later in that backward, rows take less and gradients of the
block's weights more, which is the peak for blocks of many experts and few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PolicyBytes(NamedTuple):
    """Bytes of a block under a policy, such as "full" (`seqpar.planner.shape.POLICIES`).

    held, working: bytes a row that the block holds, and that its backward works with in addition. late: bytes a row,
    held or not, when most gradients of its weights are there. fixed: bytes of its backward for any number of rows, as
    of a tile. Gradients of weights are not counted.
    """

    policy: str
    held: int
    working: int
    late: int
    fixed: int


@dataclass(frozen=True)
class BlockBytes:
    """A block's number of parameters, and its bytes under several policies."""

    parameters: int
    policies: tuple[PolicyBytes, ...]

    def under(self, policy: str) -> PolicyBytes:
        """The bytes under a policy. Raises ValueError for one that was not measured."""
        if policy == "offload":  # tiled, and the input is on the host until backward
            tiled = self.under("tiled")
            return tiled._replace(policy=policy, held=0, working=tiled.held + tiled.working)
        found = next((each for each in self.policies if each.policy == policy), None)
        if found is None:
            known = ", ".join(each.policy for each in self.policies)
            raise ValueError(f"recompute={policy!r} was not traced; traced: {known}")
        return found
