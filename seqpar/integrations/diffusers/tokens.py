"""Which tokens each rank has, and the plans of attention over them, by the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops.attention.signature import Numerics
from seqpar.plan import Plan

T = TypeVar("T")
MakePlan = Callable[[Mask, Layout], Plan]


@dataclass(frozen=True)
class TokenCounts:
    """Samples of a forward, and tokens of each: text in joint attention, and image. valid: the text that is seen."""

    samples: int
    text: int
    image: int
    valid: bytes | None = None


@dataclass
class Sharing:
    """How a model's tokens are shared among ranks, with the plans of the latest sizes.

    numerics: of attention. text_first: whether text comes before the image in joint attention. forwards: how many there
    were, of a model and of its copies.
    """

    comm: Comm
    make: MakePlan
    numerics: Numerics
    text_first: bool = True
    plans: dict[TokenCounts, tuple[Plan, Plan]] = field(default_factory=dict)
    forwards: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)

    def plans_of(self, sizes: TokenCounts) -> tuple[Plan, Plan]:
        """The plan of joint attention over all samples, and the plan of one sample's image, for the gather."""
        if sizes not in self.plans:
            if len(self.plans) >= 16:
                del self.plans[next(iter(self.plans))]
            image = [self.part(sizes.image, rank) for rank in range(self.comm.size)]
            alone = Plan(Mask([sizes.image], causal=False), Layout(image))
            self.plans[sizes] = self.make(*self._joint(sizes)), alone
        return self.plans[sizes]

    def part(self, count: int, rank: int) -> range:
        """A rank's range of ``count`` tokens."""
        return range(count * rank // self.comm.size, count * (rank + 1) // self.comm.size)

    def kept(self, s: TokenCounts) -> Tensor | None:
        """The rows of joint attention that are tokens, as a mask; None if all are."""
        counts = self._ordered([(len(self.part(n, self.comm.rank)), n) for n in (s.text, s.image)])
        if all(own or not n for own, n in counts):
            return None
        flags = [flag for own, n in counts for flag in ([True] * own or [False] * bool(n))]
        return torch.tensor(flags * s.samples, device="cpu")

    def _ordered(self, both: list[T]) -> list[T]:
        """What belongs to text and what belongs to the image, in the order of joint attention."""
        return both if self.text_first else both[::-1]

    def _joint(self, s: TokenCounts) -> tuple[Mask, Layout]:
        length = s.text + s.image
        valid = np.ones((s.samples, s.text), bool)
        if s.valid is not None:
            valid = np.frombuffer(s.valid, bool).reshape(valid.shape)
        start = length * np.arange(s.samples)[:, None]
        seen = valid.sum(1, keepdims=True)
        # a sample's valid text comes first, then its image, then the text that no token sees
        text = start + np.where(valid, valid.cumsum(1) - 1, seen + s.image + (~valid).cumsum(1) - 1)
        image = start + seen + np.arange(s.image)
        ranks = range(self.comm.size)
        parts = [self._ordered([text[:, self.part(s.text, r)], image[:, self.part(s.image, r)]]) for r in ranks]
        layout = Layout([np.concatenate(both, axis=1).ravel() for both in parts])
        if valid.all():
            return Mask([length] * s.samples, causal=False), layout
        lo, hi = (np.repeat(x, length) for x in (start, start + seen + s.image))
        return Mask.from_bounds(lo, hi, lengths=[length] * s.samples), layout
