"""Cases of recurrent verbs: families, layouts with pads and empty ranks, equal inputs; and calls beside the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.testing import dense_linear_attention, run_threads
from tests.cases import LAYOUTS, document_lengths, make_layout

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


def on_a_rank(
    comm: Comm, plan: Plan, family: Family, seed: int, dtype: torch.dtype, weights: list[Tensor],
    options: dict[str, str],
) -> tuple[Tensor, recurrent.States, list[Tensor | None], int]:  # fmt: skip
    """A rank's output, final states and gradients, and the exchanges of its forward."""
    *rows, initial = family.inputs(plan.mask, seed, dtype)
    mine = [poisoned(x, plan, comm.rank) for x in rows]
    initial = None if initial is None else initial.requires_grad_()
    before = comm.stats.exchanges
    out, states = recurrent.linear_attention(
        *mine[:3], plan, comm, decay=mine[3], beta=mine[4], initial_state=initial, return_state=True, **options
    )
    exchanges = comm.stats.exchanges - before
    dout, dstates = seqpar.shard(weights[0], plan, comm.rank), weights[1][states.documents]
    pads = torch.from_numpy(plan.positions(comm.rank)) < 0
    ((out * dout).masked_fill(pads[:, None, None], 0.0).sum() + (states.states * dstates).sum()).backward()
    grads = [None if x is None else x.grad for x in (*mine, initial)]
    return out.detach(), states._replace(states=states.states.detach()), grads, exchanges


def agrees(
    plan: Plan, family: Family, run=run_threads, *, seed: int = 0, dtype=torch.float64, tolerance=1e-10, **options: str
) -> None:
    """Assert that ranks return what one device does, in output, states and every gradient."""
    n, documents = plan.mask.tokens, len(plan.mask.lengths)
    g = torch.Generator().manual_seed(seed + 1)
    shapes = [n, family.heads, family.values], [documents, family.heads, family.dim, family.values]
    weights = [torch.randn(*shape, dtype=torch.float64, generator=g) for shape in shapes]
    leaves = [None if x is None else x.double().requires_grad_() for x in family.inputs(plan.mask, seed, dtype)]
    q, k, v, decay, beta, initial = leaves
    expected = dense_linear_attention(q, k, v, plan.mask, decay=decay, beta=beta, initial_state=initial)
    sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()
    out, states = torch.full_like(expected[0], torch.nan), torch.full_like(expected[1], torch.nan)
    grads = [None if x is None else torch.zeros_like(x) for x in leaves]
    results = run(plan.ranks, on_a_rank, plan, family, seed, dtype, weights, options)
    for rank, (part, final, found, _) in enumerate(results):
        put(out, part, plan, rank)
        states[list(final.documents)] = final.states.double()
        for total, own in zip(grads[:5], found[:5], strict=True):
            if total is not None:
                put(total, own, plan, rank)
        if grads[5] is not None:
            grads[5] += found[5].double()
    pairs = [(out, expected[0].detach()), (states, expected[1].detach())]
    pairs += [(x, y.grad) for x, y in zip(grads, leaves, strict=True) if x is not None and y is not None]
    for got, want in pairs:
        # a gradient of decays that forget at once is rounding beside those of the other inputs
        assert float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))
