"""Cases of recurrent verbs: families, layouts with pads and empty ranks, equal inputs; and calls beside the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.plan.recurrence import LayerWork, RecurrentLayer
from seqpar.testing import dense_linear_attention, run_threads
from tests.cases import LAYOUTS, document_lengths, make_layout

NAMES = ("queries", "keys", "update", "decay", "rates", "initial_state")  # of a scan of channels
WAYS = ("gather", "chain", "pipeline", "rows")
FAMILIES = tuple((decay, beta) for decay in ("none", "scalar", "channel") for beta in (False, True))


def plan_of(layout: str, lengths: tuple[int, ...], ranks: int, seed: int = 0) -> Plan:
    """A plan with pads on some ranks."""
    rng = np.random.default_rng(seed)
    made = make_layout(layout, list(lengths), ranks, rng)
    return Plan(Mask(lengths), made, rows=[made.tokens(r) + int(rng.integers(0, 3)) for r in range(ranks)])


@st.composite
def plans(draw: st.DrawFn, longest: int = 12) -> Plan:
    """Any layout of some documents."""
    lengths = draw(document_lengths(longest, 4))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return plan_of(draw(st.sampled_from(LAYOUTS)), tuple(lengths), ranks, draw(st.integers(0, 99)))


def poisoned(x: Tensor | None, plan: Plan, rank: int) -> Tensor | None:
    """A rank's rows of a global tensor, which require a gradient, with NaN in its pad rows."""
    if x is None:
        return None
    mine = seqpar.shard(x, plan, rank)
    mine[torch.from_numpy(plan.positions(rank)) < 0] = torch.nan
    return mine.requires_grad_()


def put(total: Tensor, part: Tensor | None, plan: Plan, rank: int) -> None:
    """Write a rank's rows to their places in a global tensor; its pad rows must be zeros."""
    rows = torch.from_numpy(plan.layout.positions(rank))
    assert part is not None and not part[len(rows) :].any()
    total[rows] = part[: len(rows)].to(total.dtype)


@dataclass(frozen=True)
class Family:
    """A recurrence. strength: the log decay of a token is drawn from ``[-strength, 0]``.

    unit: keys have length 1, so that the delta rule stays bounded over many tokens; else they have other lengths.
    """

    decay: str = "scalar"
    beta: bool = False
    initial: bool = False
    strength: float = 0.3
    groups: int = 2
    heads: int = 4
    dim: int = 3
    values: int = 2
    unit: bool = False
    rows: ClassVar[int] = 5  # of the inputs, those that hold a row for each token

    def inputs(self, mask: Mask, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
        """Global q, k, v, decay, beta and initial state."""
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=g).to(dtype)

        n, h, k, v = mask.tokens, self.heads, self.dim, self.values
        decays = {"none": None, "scalar": (n, h), "channel": (n, h, k)}[self.decay]
        decay = None if decays is None else (-torch.rand(*decays, dtype=torch.float64, generator=g) * self.strength)
        queries, keys = normal(n, self.groups, k), normal(n, self.groups, k) * 0.5
        return [
            queries, normalize(keys, dim=-1) if self.unit else keys, normal(n, h, v),
            None if decay is None else decay.to(dtype),
            torch.rand(n, h, dtype=torch.float64, generator=g).to(dtype) if self.beta else None,
            normal(len(mask.lengths), h, k, v) if self.initial else None,
        ]  # fmt: skip

    def call(self, mine: list[Tensor | None], plan: Plan, comm: Comm, **options: Any) -> Any:
        """The verb, of a rank's inputs."""
        q, k, v, decay, beta, initial = mine
        return recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta, initial_state=initial, **options)

    def definition(self, inputs: list[Tensor | None], mask: Mask) -> tuple[Tensor, Tensor]:
        """Output and final states on one device."""
        q, k, v, decay, beta, initial = inputs
        return dense_linear_attention(q, k, v, mask, decay=decay, beta=beta, initial_state=initial)

    def layer(self) -> RecurrentLayer:
        """Its shape, of which bytes are predicted."""
        return RecurrentLayer(self.heads, self.dim, self.values, self.groups, decay=self.decay, delta=self.beta)


@dataclass(frozen=True)
class Scan:
    """A scan of channels. given: which of queries, keys, rates and initial states there are. strength: of decays."""

    given: tuple[str, ...] = ("queries", "keys", "rates")
    strength: float = 0.3
    channels: int = 3
    dims: int = 2
    rows: ClassVar[int] = 4

    def inputs(self, mask: Mask, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
        """Global tensors in the order of `NAMES`."""
        g, n = torch.Generator().manual_seed(seed), self.dims if set(self.given) & set(NAMES) else 1
        draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
        part = lambda *shape: torch.rand(*shape, dtype=torch.float64, generator=g)  # noqa: E731
        decay = self.strength * part(mask.tokens, self.channels)
        made = {
            "queries": draw(mask.tokens, n), "keys": draw(mask.tokens, n), "update": draw(mask.tokens, self.channels),
            "decay": decay if "rates" in self.given else -decay, "rates": -2 * part(self.channels, n),
            "initial_state": draw(len(mask.lengths), self.channels, n),
        }  # fmt: skip
        return [made[name].to(dtype) if name in (*self.given, "update", "decay") else None for name in NAMES]

    def call(self, mine: list[Tensor | None], plan: Plan, comm: Comm, **options: Any) -> Any:
        """The verb, of a rank's inputs."""
        named = dict(zip(NAMES, mine, strict=True))
        return recurrent.channel_scan(named.pop("update"), named.pop("decay"), plan, comm, **named, **options)

    def definition(self, inputs: list[Any], mask: Mask) -> tuple[Tensor, Tensor]:
        """Output and final states by the definition of linear attention, with a head for each channel."""
        queries, keys, update, decay, rates, initial = inputs
        dims = next((x.shape[-1] for x in (queries, keys, rates, initial) if x is not None), 1)
        ones = torch.ones(mask.tokens, 1, dims, dtype=torch.float64)
        q, k = (ones if x is None else x[:, None] for x in (queries, keys))
        decay = decay[..., None].expand(-1, -1, dims) if rates is None else decay[..., None] * rates
        initial = None if initial is None else initial[..., None]
        out, states = dense_linear_attention(
            q, k, update[..., None], mask, decay=decay, scale=1.0, initial_state=initial
        )  # fmt: skip
        return out[..., 0], states[..., 0]

    def layer(self) -> RecurrentLayer:
        """Its shape, of which bytes are predicted."""
        dims = self.dims if set(self.given) & set(NAMES) else 1
        return RecurrentLayer(self.channels, dims, 1, 1, decay="rates" if "rates" in self.given else "scalar")


ALL = ("queries", "keys", "rates", "initial_state")
SCANS = {"selective": Scan(ALL), "alone": Scan(()), "keys": Scan(("keys", "initial_state")), "rates": Scan(("rates",))}
Recurrence = Family | Scan


@contextmanager
def blocks(most: int) -> Iterator[None]:
    """Pipelines in as many blocks as heads allow, up to `most`."""
    allowed = LayerWork.blocks.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerWork, "blocks", property(lambda work: [max(n for n in allowed(work) if n <= most)]))
        yield


def on_a_rank(
    comm: Comm, plan: Plan, case: Recurrence, seed: int, dtype: torch.dtype, weights: list[Tensor],
    options: dict[str, str],
) -> tuple[Tensor, recurrent.States, list[Tensor | None], list[tuple[int, int, int]]]:  # fmt: skip
    """A rank's output, final states and gradients; bytes sent and received, and exchanges, of forward and backward."""
    inputs, counts = case.inputs(plan.mask, seed, dtype), []
    mine = [poisoned(x, plan, comm.rank) for x in inputs[: case.rows]]
    mine += [None if x is None else x.requires_grad_() for x in inputs[case.rows :]]

    def note() -> None:
        counts.append((comm.stats.bytes_sent, comm.stats.bytes_received, comm.stats.exchanges))
        comm.stats.reset()

    note()
    out, states = case.call(mine, plan, comm, return_state=True, **options)
    note()
    dout, dstates = seqpar.shard(weights[0], plan, comm.rank), weights[1][states.documents]
    pads = torch.from_numpy(plan.positions(comm.rank)) < 0
    ((out * dout)[~pads].sum() + (states.states * dstates).sum()).backward()
    note()
    grads = [None if x is None else x.grad for x in mine]
    return out.detach(), states._replace(states=states.states.detach()), grads, counts[1:]


def agrees(
    plan: Plan, case: Recurrence, run=run_threads, *, seed: int = 0, dtype=torch.float64, tolerance=1e-10,
    **options: str,
) -> None:  # fmt: skip
    """Assert that ranks return what one device does, in output, states and every gradient."""
    leaves = [None if x is None else x.double().requires_grad_() for x in case.inputs(plan.mask, seed, dtype)]
    expected = case.definition(leaves, plan.mask)
    g = torch.Generator().manual_seed(seed + 1)
    weights = [torch.randn(*x.shape, dtype=torch.float64, generator=g) for x in expected]
    sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()
    out, states = (torch.full_like(x, torch.nan).detach() for x in expected)
    grads = [None if x is None else torch.zeros_like(x).detach() for x in leaves]
    results = run(plan.ranks, on_a_rank, plan, case, seed, dtype, weights, options)
    for rank, (part, final, found, _) in enumerate(results):
        put(out, part, plan, rank)
        states[list(final.documents)] = final.states.double()
        for n, (total, own) in enumerate(zip(grads, found, strict=True)):
            if total is not None and n < case.rows:
                put(total, own, plan, rank)
            elif total is not None:
                total += own.double()
    pairs = [(out, expected[0].detach()), (states, expected[1].detach())]
    pairs += [(x, y.grad) for x, y in zip(grads, leaves, strict=True) if x is not None and y is not None]
    for got, want in pairs:
        # a gradient of decays that forget at once is rounding beside those of the other inputs
        assert float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))
