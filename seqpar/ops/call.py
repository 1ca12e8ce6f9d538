"""One attention call: what it is named in messages, and its share of heads, tensors and facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.kernels import Facts, Kernel, Score, acc_dtype
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
        size = self.dtype.itemsize
        row_bytes = self.plan.row_bytes(self.heads, self.kv_heads, self.dim, self.v_dim, size)
        return self.plan.steps(self.comm.rank, row_bytes=row_bytes)

    @property
    def alone(self) -> bool:
        """Whether one rank computes all of it in one step: no schedule, no exchange."""
        return self.comm.size == 1 and self.steps()[0].part.trivial

    def parts(self) -> list[Part]:
        """The parts of this rank's steps, in order."""
        return [s.part for s in self.steps() if s.first]

    def tag(self, phase: Phase, stage: int) -> Tag:
        """The number of one of its exchanges."""
        return Tag(self.digest, self.number, phase + len(Phase) * self.repeat, stage)

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


def facts_of(step: Step, device: torch.device) -> Facts:
    """A step's facts on a device, uploaded once per batch; those of its queries once per part."""

    def put(array: object) -> Tensor:
        return torch.as_tensor(array, dtype=torch.int32).to(device)

    def make() -> Facts:
        p = step.part
        pos, lo, hi = p.memo(("facts", device), lambda: (put(p.pos), put(p.lo), put(p.hi)))
        return Facts(pos, lo, hi, put(step.pos), step.tiles, lambda: step.segments, step.memo)

    return step.memo(("facts", device), make)  # type: ignore[no-any-return]
