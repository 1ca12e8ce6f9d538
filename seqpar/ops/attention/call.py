"""One attention call: what it is named in messages, and its share of heads, tensors and facts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.kernels import Kernel, Score, StepFacts, acc_dtype
from seqpar.kernels.memory.upload import upload
from seqpar.ops.attention.rows import numbers
from seqpar.ops.core.device import Uploaded, stream_of
from seqpar.plan import Part, Plan, Step, head_blocks, head_share


class Phase(IntEnum):
    """The parts of a call that exchange, in order."""

    ENTER = 0
    KEYS = 1
    LEAVE = 2
    BACK_ENTER = 3
    BACK_KEYS = 4
    BACK_GRADS = 5
    BACK_LEAVE = 6


# for errors
NAMES = {
    Phase.ENTER: "attention (forward, sharing out heads)",
    Phase.KEYS: "attention (forward, keys and values)",
    Phase.LEAVE: "attention (forward, giving heads back)",
    Phase.BACK_ENTER: "attention (backward, sharing out heads)",
    Phase.BACK_KEYS: "attention (backward, keys and values)",
    Phase.BACK_GRADS: "attention (backward, gradients of keys and values)",
    Phase.BACK_LEAVE: "attention (backward, giving heads back)",
}


class Options(NamedTuple):
    """The options of a call as given, in the order of the op's arguments."""

    scale: float | None
    softcap: float
    dropout_p: float
    dropout_seed: int | None
    deterministic: bool
    kernel: str
    return_lse: bool


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: everything but the tensors. number, digest: its name in every message; repeat: which of the
    backward passes through it this is, as a graph that is retained has several."""

    plan: Plan
    comm: Comm
    kernel: Kernel
    score: Score
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device
    sinks: bool
    return_lse: bool
    kv_grads: bool
    number: int
    digest: int
    repeat: int = 0

    @property
    def acc(self) -> torch.dtype:
        """The accumulation dtype."""
        return acc_dtype(self.dtype)

    def steps(self) -> list[Step]:
        """This rank's steps."""
        return self._steps

    @cached_property
    def _steps(self) -> list[Step]:
        size = self.dtype.itemsize
        row_bytes = self.plan.row_bytes(self.heads, self.kv_heads, self.dim, self.v_dim, size)
        return self.plan.steps(self.comm.rank, row_bytes=row_bytes)

    @cached_property
    def alone(self) -> bool:
        """Whether this rank computes its rows in one step from its own keys: no schedule, no exchange."""
        step, *more = self.steps()
        return (self.comm.size == 1 or step.local and not more and not step.moves) and step.part.trivial

    def parts(self) -> list[Part]:
        """The parts of this rank's steps, in order."""
        return self._parts

    @cached_property
    def _parts(self) -> list[Part]:
        return [s.part for s in self.steps() if s.first]

    def tag(self, phase: Phase, stage: int) -> Tag:
        """The number of one of its exchanges."""
        return Tag(self.digest, self.number, phase + len(Phase) * self.repeat, stage, NAMES[phase])

    @property
    def stamp(self) -> int:
        """A number that tells calls of other plans, comms, scores or dtypes apart in this process."""
        s = self.score
        score = (s.scale, s.softcap, s.dropout_p, s.dropout_seed)
        # a comm and what its `sub` makes count together
        return hash((self.plan.digest(), id(self.comm.stats), self.comm.rank, self.dtype, score))

    @cached_property
    def uploaded(self) -> Uploaded:
        """What the steps need on the device."""
        return uploaded(self.plan, self.steps(), self.device)

    def shares(self, part: Part) -> tuple[list[slice], list[slice]]:
        """Query heads and key heads of every member of a part."""
        pairs = [head_share(self.heads, self.kv_heads, part.width, s) for s in range(part.width)]
        return [q for q, _ in pairs], [kv for _, kv in pairs]

    def blocks(self, part: Part) -> Iterator[tuple[slice, slice, Score]]:
        """The share of this rank in blocks of uniform grouping: inside query heads, inside key heads, their score."""
        q, kv = head_share(self.heads, self.kv_heads, part.width, part.share)
        for heads, keys in head_blocks(q, kv, self.heads // self.kv_heads) if q.stop > q.start else ():
            first = q.start + heads.start
            slopes = None if self.score.slopes is None else self.score.slopes[first : q.start + heads.stop]
            yield heads, keys, replace(self.score, slopes=slopes, first_head=first)


@dataclass(eq=False)
class Inside:
    """The tensors of one part inside the head trade: what backward needs, and the sum under way."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor  # [M, h, D_v]
    lse: Tensor  # [h, M]
    acc: Tensor | None = None  # out in the accumulation dtype, while there is more than one step


def uploaded(plan: Plan, steps: Sequence[Step], device: torch.device) -> Uploaded:
    """All that a rank's steps need on a device, in one transfer; made when the first layer of a batch asks for it, and
    freed with the plan.

    On CUDA each stream has its own: another one would have to wait for the transfer, and for its readers before the
    memory is freed.
    """
    where = stream_of(device)
    # not with the steps, to which it refers: a cycle would keep the device's memory until Python looks for cycles
    return plan.memo(("uploaded", id(steps), where), lambda: _uploaded(steps, device, where))  # type: ignore[no-any-return]


def _uploaded(steps: Sequence[Step], device: torch.device, where: Hashable) -> Uploaded:
    arrays = {id(x): x for x in numbers(steps)}  # kept alive by the steps, so that identities are keys
    for step in steps:
        arrays |= {id(x): x for x in (step.part.pos, step.part.lo, step.part.hi, step.pos)}
    there = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))

    def facts(step: Step) -> StepFacts:
        p = step.part
        pos, lo, hi, key_pos = (there[id(x)] for x in (p.pos, p.lo, p.hi, step.pos))

        def memo(key: Hashable, make: Any) -> Any:
            return step.memo((where, key), make)

        return StepFacts(pos, lo, hi, key_pos, step.tiles, lambda: step.segments, memo)

    return Uploaded({step.number: facts(step) for step in steps}, there)
