"""One device's attention beside that of ranks: options, inputs and the comparison, shared by the tests of calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from seqpar.comm import Comm, PeerComm
from seqpar.facts.layout import Layout
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import dense_attention, relative_rms, run_threads
from tests.cases import LAYOUTS, LENGTHS, MASKS, Case, divisors

Point = tuple[Case, tuple[int, int]]  # of the product of what a call can be: a case, and heads of queries and of keys
RANKS = (1, 2, 3, 4, 6, 8)
HEADS = ((8, 8), (8, 2), (6, 1), (5, 5), (7, 7), (28, 7))
# what the ranks' losses use, by rank in turn; "each" is both results, in a backward of its own
OUT, EACH, MIXED = ("out",), ("each",), ("out", "lse", "both")
TOLERANCE, LOW_TOLERANCE = 1e-10, 3e-6  # of float64, and of float32


@dataclass(frozen=True)
class Options:
    """The options of a call; a value, so that processes get it too."""

    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    dropout: float = 0.0
    kernel: str = "auto"

    def arguments(self, heads: int) -> dict[str, object]:
        """Keyword arguments that the oracle takes too."""
        made: dict[str, object] = {"softcap": self.softcap, "dropout_p": self.dropout}
        if self.dropout:
            made["dropout_seed"] = 1234567890123
        if self.sinks:
            made["sinks"] = torch.linspace(-1, 2, heads, dtype=torch.float64)
        if self.alibi:
            made["alibi_slopes"] = torch.logspace(-3, 0, heads, base=2, dtype=torch.float64)
        return made


def inputs(
    plan: Plan, heads: tuple[int, int], dims: tuple[int, int], seed: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Global q, k, v and the gradients of out and lse, the same on every rank."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g).to(dtype)

    (h, kv), (d, dv) = heads, dims
    n, m = plan.mask.tokens, plan.mask.kv_tokens
    return [normal(n, h, d), normal(m, kv, d), normal(m, kv, dv), normal(n, h, dv), normal(n, h)]


shared_inputs = lru_cache(maxsize=1)(inputs)  # once for ranks as threads, none of which changes them


def poisoned(x: Tensor, plan: Plan, rank: int, side: str) -> Tensor:
    """A rank's shard with NaN in its pad rows."""
    y = seqpar.shard(x, plan, rank, side=side)
    at = plan.positions(rank, side)
    y[torch.from_numpy(at) < 0] = torch.nan
    return y


def run_rank(
    comm: Comm, plan: Plan, heads: tuple[int, int], dims: tuple[int, int], options: Options, uses: Sequence[str],
    dtype: torch.dtype, seed: int,
) -> list[Tensor]:  # fmt: skip
    """One rank's out, lse, dq, dk, dv, dsinks."""
    q, k, v, dout, dlse = shared_inputs(plan, heads, dims, seed, dtype)
    arguments = options.arguments(heads[0])
    sinks = arguments.get("sinks")
    if isinstance(sinks, Tensor):
        sinks.requires_grad_()
    mine = [poisoned(x, plan, comm.rank, s).requires_grad_() for x, s in ((q, "q"), (k, "kv"), (v, "kv"))]
    out, lse = seqpar.attention(*mine, plan, comm, kernel=options.kernel, return_lse=True, **arguments)
    gout, glse = poisoned(dout, plan, comm.rank, "q"), poisoned(dlse, plan, comm.rank, "q")
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    pads = torch.from_numpy(plan.positions(comm.rank)) < 0
    losses = {
        "out": (out * gout).masked_fill(pads[:, None, None], 0.0).sum(),
        "lse": (finite * glse).masked_fill(pads[:, None], 0.0).sum(),
    }
    use = uses[comm.rank % len(uses)]
    if use == "both":
        sum(losses.values()).backward()
    elif use == "each":
        losses["out"].backward(retain_graph=True)
        losses["lse"].backward()
    else:
        losses[use].backward()
    assert not out[pads].any() and not mine[0].grad[pads].any()
    # of a PeerComm, traded tensors outlive the call, and are outside the pool
    staged = isinstance(comm, PeerComm) and (plan.ulysses != 1 or comm._channel.cramped)
    assert comm.stats.staged_bytes == 0 or staged, "what a verb receives is memory that peers can write"
    grads = [x.grad for x in mine] + ([] if sinks is None else [sinks.grad])
    return [out.detach(), lse.detach(), *grads]


def expected(
    plan: Plan, heads: tuple[int, int], dims: tuple[int, int], options: Options, uses: Sequence[str],
    dtype: torch.dtype, seed: int,
) -> list[Tensor]:  # fmt: skip
    """The oracle's out, lse, dq, dk, dv, dsinks, global, in float64 of the inputs as ranks get them."""
    q, k, v, dout, dlse = (x.to(torch.float64, copy=True) for x in shared_inputs(plan, heads, dims, seed, dtype))
    arguments = options.arguments(heads[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "sinks" in arguments:
        leaves.append(arguments["sinks"].requires_grad_())
    out, lse = dense_attention(q, k, v, plan.mask, **arguments)
    for rank in range(plan.ranks):
        rows, use = torch.from_numpy(plan.layout.positions(rank)), uses[rank % len(uses)]
        dout[rows] *= use != "lse"
        dlse[rows] *= use != "out"
    loss = (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def joined(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """Ranks' rows put together, without pads; NaN where no rank has a row."""
    whole = shards[0].new_full((layout.total, *shards[0].shape[1:]), torch.nan)
    for rank, shard in enumerate(shards):
        whole[layout.positions(rank)] = shard[: layout.tokens(rank)]
    return whole


def collect(results: list[list[Tensor]], plan: Plan) -> list[Tensor]:
    """Ranks' out, lse, dq, dk, dv put together; what every rank has a share of, summed."""
    sides = (plan.layout,) * 3 + (plan.kv_layout,) * 2
    by_name = list(zip(*results, strict=True))
    whole = [joined(shards, layout) for shards, layout in zip(by_name, sides, strict=False)]
    return whole + [torch.stack(shares).sum(0) for shares in by_name[5:]]


def check(
    plan: Plan,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    options: Options = Options(),  # noqa: B008 frozen
    uses: Sequence[str] = EACH,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    run=run_threads,
) -> None:
    """Sharded equals dense: in float64 every element, else each tensor's relative RMS error. uses: by rank in turn."""
    arguments = (plan, heads, dims, options, uses, dtype, seed)
    got = collect(run(plan.ranks, run_rank, *arguments), plan)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, expected(*arguments), strict=False):
        if dtype == torch.float64:
            same = bool(((a == b) | ((a - b).abs() <= TOLERANCE)).all())
        else:
            same = relative_rms(a, b) <= LOW_TOLERANCE
        assert same, f"{name} is off by {float((a - b).abs().max())} in {plan!r}, {heads}, {options}"


options_strategy = st.builds(
    Options,
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    sinks=st.booleans(),
    alibi=st.sampled_from([False, False, True]),
    dropout=st.sampled_from([0.0, 0.0, 0.3]),
    kernel=st.sampled_from(["auto", "blockwise", "reference"]),
)
uses_strategy = st.sampled_from([OUT, EACH, MIXED])


def product(
    masks: Sequence[str] = MASKS, layouts: Sequence[str] = LAYOUTS, transports: Sequence[str] = TRANSPORTS
) -> list[Point]:
    """layouts x transports x ranks x widths x masks x heads, with lengths that divide nothing."""
    result = []
    for n, (layout, transport, ranks, mask, heads) in enumerate(
        itertools.product(layouts, transports, RANKS, masks, HEADS)
    ):
        for ulysses in divisors(ranks):
            stage = (64 << 20, 5 * 4096)[n % 2]
            case = Case(mask, layout, transport, ranks, ulysses, LENGTHS[n % 3], n, stage_bytes=stage, pads=n % 5 == 0)
            result.append((case, heads))
    return result


def pairwise(points: list[Point]) -> list[Point]:
    """Few points with every pair of values of two axes that occurs in the product; greedy, in a fixed order."""

    def pairs(point: Point) -> set[tuple[object, ...]]:
        case, heads = point
        axes = (case.layout, case.transport, case.ranks, case.ulysses, case.mask, heads)
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(axes), 2)}

    order = np.random.default_rng(0).permutation(len(points))
    held = [pairs(p) for p in points]
    left = set().union(*held)
    chosen = []
    # several sweeps that take only points with many new pairs before those with few keep the set small
    for least in (12, 9, 6, 4, 2, 1):
        for i in order:
            new = held[i] & left
            if len(new) >= least:
                chosen.append(points[i])
                left -= new
    return chosen


def named(point: Point) -> str:
    """A test's name."""
    case, heads = point
    return f"{case}-H{heads[0]}_{heads[1]}"


def check_product(layout: str, transport: str, mask: str) -> None:
    """Check every point of the product with these three."""
    points = product([mask], [layout], [transport])
    assert len(points) == len(HEADS) * sum(len(divisors(r)) for r in RANKS)
    for case, heads in points:
        check(case.plan(), heads, uses=(EACH, OUT)[case.seed % 2])
