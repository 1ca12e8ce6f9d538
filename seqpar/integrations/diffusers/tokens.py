"""Which tokens each rank has, and the plans of attention over them, by the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.foreign.wrap import ParallelModel
from seqpar.ops.attention.signature import Numerics
from seqpar.plan import Plan
from seqpar.train.checks import StepChecks

MakePlan = Callable[..., Plan]  # of a mask, a layout, and kv_layout= where keys are other tokens than queries
Array = np.ndarray[Any, Any]
Streams = tuple[str, ...]  # kinds of tokens, in the order of an attention's rows


@dataclass(frozen=True)
class TokenCounts:
    """Samples of a forward, and tokens of each, by stream. valid: the text that is seen, if not all is."""

    samples: int
    text: int = 0
    image: int = 0
    audio: int = 0
    history: int = 0
    valid: bytes | None = None

    def of(self, streams: Streams) -> list[int]:
        """How many tokens a sample has in each stream."""
        return [getattr(self, stream) for stream in streams]


@dataclass
class Sharing:
    """How a model's tokens are shared among ranks, with the plans of the latest sizes.

    handle: of the model. numerics: of attention. average_over: how many times as large the model makes gradients.
    checks: of the training steps of the model and of its copies.
    """

    handle: ParallelModel
    comm: Comm
    make: MakePlan
    numerics: Numerics
    average_over: int
    plans: dict[TokenCounts, dict[Hashable, Plan]] = field(default_factory=dict)
    checks: WeakKeyDictionary[nn.Module, StepChecks] = field(default_factory=WeakKeyDictionary)

    def plan(self, sizes: TokenCounts, queries: Streams, keys: Streams) -> Plan:
        """The plan of attention from the tokens of some streams to those of some, sample by sample."""
        return self._known(sizes, (queries, keys), partial(self._made, sizes, queries, keys))

    def gathered(self, sizes: TokenCounts, stream: str) -> Plan:
        """The plan of one sample's tokens of a stream, for the gather."""
        (count,) = sizes.of((stream,))
        parts = [self.part(count, rank) for rank in range(self.comm.size)]
        return self._known(sizes, stream, lambda: Plan(Mask([count], causal=False), Layout(parts)))

    def _known(self, sizes: TokenCounts, what: Hashable, make: Callable[[], Plan]) -> Plan:
        if sizes not in self.plans:
            if len(self.plans) >= 16:
                del self.plans[next(iter(self.plans))]
            self.plans[sizes] = {}
        plans = self.plans[sizes]
        if what not in plans:
            plans[what] = make()
        return plans[what]

    def part(self, count: int, rank: int) -> range:
        """A rank's range of ``count`` tokens."""
        return range(count * rank // self.comm.size, count * (rank + 1) // self.comm.size)

    def kept(self, sizes: TokenCounts, streams: Streams) -> Tensor | None:
        """The rows of attention that are tokens, as a mask; None if all are."""
        counts = [(len(self.part(n, self.comm.rank)), n) for n in sizes.of(streams)]
        if all(own or not n for own, n in counts):
            return None
        flags = [flag for own, n in counts for flag in ([True] * own or [False] * bool(n))]
        return torch.tensor(flags * sizes.samples, device="cpu")

    def _made(self, sizes: TokenCounts, queries: Streams, keys: Streams) -> Plan:
        """The plan of the user's function. Raises: TypeError or ValueError for one of another mask or layout."""
        lengths, key_lengths = ([sum(sizes.of(streams))] * sizes.samples for streams in (queries, keys))
        layout, seen, kv = self._layout(sizes, queries), _seen(sizes, queries), dict[str, Layout]()
        if queries != keys:
            mask = Mask(lengths, causal=False, kv_lengths=key_lengths)
            kv["kv_layout"] = self._layout(sizes, keys)
        elif seen.all():
            mask = Mask(lengths, causal=False)
        else:
            start = lengths[0] * np.arange(sizes.samples)
            lo, hi = (np.repeat(x, lengths[0]) for x in (start, start + seen.sum(1)))
            mask = Mask.from_bounds(lo, hi, lengths=lengths)
        plan = self.make(mask, layout, **kv)
        if not isinstance(plan, Plan):
            raise TypeError(f"diffusers: plan= gave {plan!r:.200}, expected a Plan of the mask and layout that it got")
        if plan.mask != mask:
            raise ValueError(f"diffusers: plan= gave a plan of {plan.mask}, expected the mask that it got, {mask}")
        if (plan.layout, plan.kv_layout) != (layout, kv.get("kv_layout", layout)):
            raise ValueError("diffusers: plan= gave a plan of another layout, expected the one that it got")
        return plan

    def _layout(self, sizes: TokenCounts, streams: Streams) -> Layout:
        """Each rank's tokens. Those that no token sees come last in a sample, so that keys are a range."""
        seen = _seen(sizes, streams)
        places = np.where(seen, seen.cumsum(1), seen.sum(1, keepdims=True) + (~seen).cumsum(1)) - 1
        places += seen.shape[1] * np.arange(sizes.samples)[:, None]
        several = np.split(places, np.cumsum(sizes.of(streams))[:-1], axis=1)

        def own(rank: int) -> list[Array]:
            return [x[:, self.part(x.shape[1], rank)] for x in several]

        return Layout([np.concatenate(own(rank), axis=1).ravel() for rank in range(self.comm.size)])


def _seen(sizes: TokenCounts, streams: Streams) -> Array:
    """Which tokens of each sample are seen, a row for each sample."""
    seen = [np.ones((sizes.samples, n), bool) for n in sizes.of(streams)]
    if sizes.valid is not None and "text" in streams:
        seen[streams.index("text")] = np.frombuffer(sizes.valid, bool).reshape(sizes.samples, sizes.text)
    return np.concatenate(seen, axis=1)
