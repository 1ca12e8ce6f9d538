"""`channel_scan` beside the definition on one device: kinds, layouts, states, gradients, isolation, compilers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.mask import Mask
from seqpar.plan import Plan
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel import layer_way, state_bytes
from seqpar.testing import COMMS, dense_linear_attention, run_processes, run_threads
from tests.cases import LAYOUTS, examples
from tests.ops.recurrent.cases import plan_of, plans, poisoned, put

NAMES = ("queries", "keys", "update", "decay", "rates", "initial_state")


@dataclass(frozen=True)
class Case:
    """A scan. given: which of queries, keys, rates and initial states there are. strength: of decays."""

    given: tuple[str, ...] = ("queries", "keys", "rates")
    strength: float = 0.3
    channels: int = 3
    dims: int = 2

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


ALL = ("queries", "keys", "rates", "initial_state")
CASES = {"selective": Case(ALL), "alone": Case(()), "keys": Case(("keys", "initial_state")), "rates": Case(("rates",))}


def one_device(tensors: list[Any], mask: Mask) -> tuple[Tensor, Tensor]:
    """out and final states by the definition of linear attention, with a head for each channel."""
    queries, keys, update, decay, rates, initial = tensors
    dims = next((x.shape[-1] for x in (queries, keys, rates, initial) if x is not None), 1)
    ones = torch.ones(mask.tokens, 1, dims, dtype=torch.float64)
    q, k = (ones if x is None else x[:, None] for x in (queries, keys))
    decay = decay[..., None].expand(-1, -1, dims) if rates is None else decay[..., None] * rates
    initial = None if initial is None else initial[..., None]
    out, states = dense_linear_attention(
        q, k, update[..., None], mask, decay=decay, scale=1.0, initial_state=initial
    )  # fmt: skip
    return out[..., 0], states[..., 0]


def on_a_rank(
    comm: Comm, plan: Plan, case: Case, seed: int, dtype: torch.dtype, weights: list[Tensor], options: dict[str, str]
) -> tuple[Tensor, recurrent.States, list[Tensor | None], tuple[int, int]]:
    """A rank's output, final states and gradients, and the exchanges and bytes of its forward."""
    *rows, rates, initial = case.inputs(plan.mask, seed, dtype)
    mine = [poisoned(x, plan, comm.rank) for x in rows]
    mine += [None if x is None else x.requires_grad_() for x in (rates, initial)]
    before = comm.stats.exchanges, comm.stats.bytes_sent
    named = dict(zip(NAMES, mine, strict=True))
    out, states = recurrent.channel_scan(
        named.pop("update"), named.pop("decay"), plan, comm, return_state=True, **named, **options
    )
    sent = comm.stats.exchanges - before[0], comm.stats.bytes_sent - before[1]
    dout, dstates = seqpar.shard(weights[0], plan, comm.rank), weights[1][states.documents]
    pads = torch.from_numpy(plan.positions(comm.rank)) < 0
    ((out * dout).masked_fill(pads[:, None], 0.0).sum() + (states.states * dstates).sum()).backward()
    grads = [None if x is None else x.grad for x in mine]
    return out.detach(), states._replace(states=states.states.detach()), grads, sent


def agrees(plan: Plan, case: Case, run=run_threads, *, seed=0, dtype=torch.float64, tolerance=1e-10, **options) -> None:
    """Assert that ranks return what one device does, in output, states and every gradient."""
    leaves = [None if x is None else x.double().requires_grad_() for x in case.inputs(plan.mask, seed, dtype)]
    expected = one_device(leaves, plan.mask)
    g = torch.Generator().manual_seed(seed + 1)
    weights = [torch.randn(*x.shape, dtype=torch.float64, generator=g) for x in expected]
    sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()
    out, states = (torch.full_like(x, torch.nan).detach() for x in expected)
    grads = [None if x is None else torch.zeros_like(x).detach() for x in leaves]
    for rank, (part, final, found, _) in enumerate(
        run(plan.ranks, on_a_rank, plan, case, seed, dtype, weights, options)
    ):
        put(out, part, plan, rank)
        states[list(final.documents)] = final.states.double()
        for n, (total, own) in enumerate(zip(grads, found, strict=True)):
            if total is not None and n < 4:
                put(total, own, plan, rank)
            elif total is not None:
                total += own.double()
    pairs = [(out, expected[0].detach()), (states, expected[1].detach())]
    pairs += [(x, y.grad) for x, y in zip(grads, leaves, strict=True) if x is not None and y is not None]
    for got, want in pairs:
        assert float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["selective", "alone"])
@pytest.mark.sampled(3)
def test_kinds_under_layouts(name, layout) -> None:
    agrees(plan_of(layout, (1, 9, 2, 17), 3), CASES[name])


@examples(40)
@given(
    plans(), st.sampled_from(sorted(CASES)), st.sampled_from([0.0, 0.3, 80.0]), st.integers(1, 4),
    st.sampled_from(["auto", "gather", "chain", "pipeline", "rows"]), st.sampled_from(["steps", "reference"]),
    st.integers(0, 9),
)  # fmt: skip
def test_ranks_compute_what_one_device_does(plan, name, strength, channels, travel, kernel, seed) -> None:
    case = Case(CASES[name].given, strength, channels, dims=1 + seed % 3)
    agrees(plan, case, seed=seed, travel=travel, kernel=kernel)


@pytest.mark.parametrize("cut", range(13))
def test_three_documents_cut_at_every_place(cut) -> None:
    ranks = (2, 3)[cut % 2]
    shards = [np.zeros(0, int)] * ranks
    shards[0], shards[-1] = np.arange(cut), np.arange(cut, 12)
    agrees(Plan(Mask((5, 3, 4)), seqpar.Layout(shards)), CASES["selective" if cut % 3 else "alone"])


@pytest.mark.parametrize("travel", ["gather", "chain", "pipeline", "rows"])
def test_documents_of_several_chunks_and_groups(monkeypatch, travel) -> None:
    monkeypatch.setitem(seqpar.kernels.recurrent.steps.AT_ONCE, "cpu", 1000)
    agrees(plan_of("zigzag", (150, 70, 300), 2), CASES["selective"], travel=travel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["selective", "alone"])
def test_a_long_document(name) -> None:
    agrees(plan_of("contiguous", (65_536,), 4), Case(CASES[name].given, dims=16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("comm", COMMS)
def test_over_processes(comm) -> None:
    def run(ranks, *arguments):
        return run_processes(ranks, *arguments, comm=comm)

    agrees(plan_of("zigzag", (9, 20, 3), 3), CASES["selective"], run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_fewer_bits_are_summed_in_fp32(dtype) -> None:
    plan, case = plan_of("zigzag", (40, 90, 30), 3), CASES["selective"]
    agrees(plan, case, dtype=dtype, tolerance=1e-5 if dtype is torch.float32 else 2e-2)


def bytes_sent(comm: Comm, plan: Plan, case: Case, travel: str) -> int:
    """The bytes that a rank sends in forward."""
    *rows, rates, _ = case.inputs(plan.mask)
    queries, keys, update, decay = (None if x is None else seqpar.shard(x, plan, comm.rank) for x in rows)
    before = comm.stats.bytes_sent
    recurrent.channel_scan(update, decay, plan, comm, rates=rates, keys=keys, queries=queries, travel=travel)
    return comm.stats.bytes_sent - before


@pytest.mark.parametrize(("travel", "layout"), [("gather", "zigzag"), ("chain", "zigzag"), ("rows", "striped")])
@pytest.mark.parametrize(("name", "dims"), [("selective", 2), ("alone", 1)])
def test_bytes_counted_are_bytes_predicted(name, dims, travel, layout) -> None:
    plan, case = plan_of(layout, (14, 9, 21), 3), Case(CASES[name].given[:3], channels=4)
    layer = recurrent.RecurrentLayer(heads=4, groups=1, key_dim=dims, value_dim=1, decay="rates")
    size, runs = layer.bytes("float64", gates="float64", device="cpu"), DocumentRuns.of(plan.residence)
    expected = state_bytes(runs, size, layer_way(runs, size, travel))
    assert run_threads(3, bytes_sent, plan, case, travel) == expected.sent.tolist() != [0, 0, 0]


def test_documents_that_no_two_ranks_share_move_nothing() -> None:
    mask = Mask((9, 9, 5, 5))
    plan = Plan(mask, seqpar.Layout([np.arange(18), np.arange(18, 28)]))
    weights = [torch.ones(28, 3), torch.ones(4, 3, 2)]
    results = run_threads(2, on_a_rank, plan, CASES["selective"], 0, torch.float64, weights, {})
    assert [sent for *_, sent in results] == [(0, 0)] * 2


@pytest.mark.parametrize("name", ["selective", "alone"])
@pytest.mark.parametrize("value", [3.0, torch.nan])
def test_a_document_changes_no_bit_of_another(name, value) -> None:
    plan, case = plan_of("blocks", (5, 6, 7), 2), CASES[name]
    inside, found = torch.arange(5, 11), []
    weights = [torch.ones(18, 3), torch.ones(3, 3, 2 if name == "selective" else 1)]
    for changed in (False, True):

        class Changed(Case):
            def inputs(self, *arguments, changed=changed):
                tensors = super().inputs(*arguments)
                for x in (x for x in tensors[:4] if x is not None and changed):
                    x[7] = -value if x is tensors[3] and name == "alone" else value
                return tensors

        own = Changed(case.given)
        parts = [torch.zeros(18, 3, dtype=torch.float64) for _ in range(3)]
        for rank, (out, _, grads, _) in enumerate(run_threads(2, on_a_rank, plan, own, 0, torch.float64, weights, {})):
            for total, part in zip(parts, (out, *grads[2:4]), strict=True):
                put(total, part, plan, rank)
        found.append(parts)
    for before, after in zip(*found, strict=True):
        same = (before == after).all(1)
        same[inside] = True
        assert same.all()
    assert not torch.equal(found[0][0][inside], found[1][0][inside])


def repeated(comm: Comm, plan: Plan, reentrant: bool) -> list[Tensor]:
    """Gradients under a checkpoint, and without."""
    found = []
    for wrap in (False, True):
        *rows, rates, _ = CASES["selective"].inputs(plan.mask)
        mine = [*(poisoned(x, plan, comm.rank) for x in rows), rates.requires_grad_()]

        def layer(q, k, update, decay, rates):
            return recurrent.channel_scan(update, decay, plan, comm, rates=rates, keys=k, queries=q)

        out = checkpoint(layer, *mine, use_reentrant=reentrant) if wrap else layer(*mine)
        out.sum().backward()
        found.append(torch.cat([x.grad.flatten() for x in mine]))
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_it(reentrant) -> None:
    for plain, recomputed in run_threads(2, repeated, plan_of("zigzag", (9, 7), 2), reentrant):
        assert torch.equal(plain, recomputed)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.exhaustive
def test_one_graph_serves_all_plans() -> None:
    comm, counter = LocalComm(), CompileCounterWithBackend("aot_eager")

    def layer(queries, keys, update, decay, rates, handle):
        y = recurrent.channel_scan(2 * update, decay, handle, rates=rates, keys=keys, queries=queries)
        return (y * y).sum() + recurrent.channel_scan(update, -decay, handle).sum()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for lengths in ((9, 7), (4, 4, 8), (16,)):
        plan = Plan(Mask(lengths), seqpar.Layout.contiguous(16, 1))
        results = []
        for function in (layer, compiled):
            leaves = [x.requires_grad_() for x in CASES["selective"].inputs(plan.mask)[:5]]
            loss = function(*leaves, seqpar.bind(plan, comm))
            loss.backward()
            results.append([loss.detach(), *(x.grad for x in leaves)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert counter.frame_count == 1


def refused(comm: Comm, plan: Plan, change: str) -> str:
    """The error of a call with one argument that does not fit."""
    queries, keys, update, decay, rates, initial = CASES["selective"].inputs(plan.mask)
    mine = [seqpar.shard(x, plan, comm.rank) for x in (queries, keys, update, decay)]
    named: dict[str, Any] = dict(zip(NAMES, [*mine, rates, initial], strict=True))
    wrong = {
        "update": named["update"][..., None], "decay": None, "rates": rates[:2], "keys": named["keys"][:, :1],
        "queries": named["queries"].long(), "initial_state": initial[:1], "kernel": "chunked", "travel": "car",
        "rows": named["update"][1:],
    }  # fmt: skip
    if change in wrong:
        named["update" if change == "rows" else change] = wrong[change]
    before = comm.stats.bytes_sent
    with pytest.raises((ValueError, NotImplementedError)) as error:
        recurrent.channel_scan(named.pop("update"), named.pop("decay"), plan, comm, **named)
    assert comm.stats.bytes_sent == before
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("update", "update must be floating [rows, channels]"), ("decay", "decay must be floating [8, 3]"),
        ("rates", "rates must be floating [3, 2]"), ("keys", "keys must be floating [8, 2]"),
        ("queries", "queries must be floating [8, 2]"), ("initial_state", "initial_state must be floating [2, 3, 2]"),
        ("kernel", "kernel must be one of auto, steps, reference, got 'chunked'"),
        ("travel", "travel must be one of auto, gather, chain, pipeline, rows"), ("rows", "must have 8 rows"),
        ("full", "causal inside documents"), ("cross", "without a kv_layout"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error_on_all_ranks(change, text) -> None:
    plan = Plan(Mask((9, 7), causal=change != "full"), seqpar.Layout.contiguous(16, 2))
    if change == "cross":
        plan = Plan(Mask((9, 7)), seqpar.Layout.contiguous(16, 2), kv_layout=seqpar.Layout.striped(16, 2))
    errors = run_threads(2, refused, plan, change)
    assert all(error.startswith("channel_scan: ") and text in error for error in errors), errors


def checked(comm: Comm, plan: Plan, case: Case, change: str) -> str:
    """The error where every call is checked."""
    comm.check_every = "call"
    queries, keys, update, decay, rates, _ = case.inputs(plan.mask)
    mine = [None if x is None else seqpar.shard(x, plan, comm.rank) for x in (queries, keys, update, decay)]
    if change == "growing":
        mine[3] = -mine[3]
    elif comm.rank:
        rates = 2 * rates
    with pytest.raises(ValueError) as error:
        recurrent.channel_scan(mine[2], mine[3], plan, comm, rates=rates, keys=mine[1], queries=mine[0])
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("selective", "growing", "decay, times rates, holds logarithms at or below 0"),
        ("alone", "growing", "decay, times rates, holds logarithms at or below 0"),
        ("selective", "rates", "ranks differ in a hash of rates"),
    ],
)
def test_values_are_read_where_every_call_is_checked(name, change, text) -> None:
    errors = run_threads(2, checked, plan_of("contiguous", (16,), 2), CASES[name], change)
    assert all(text in error for error in errors), errors


def test_no_channels_and_no_states() -> None:
    plan = Plan(Mask([10, 6]), seqpar.Layout.contiguous(16, 1))
    none = torch.ones(16, 0)
    assert recurrent.channel_scan(none, -none, plan, LocalComm()).shape == (16, 0)
    assert recurrent.channel_scan(torch.ones(16, 2), -torch.ones(16, 2), plan, LocalComm(), keys=none).shape == (16, 2)
    out = recurrent.channel_scan(torch.ones(16, 2), -torch.ones(16, 2), plan, LocalComm(), rates=torch.ones(2, 0))
    assert torch.equal(out, torch.zeros(16, 2))
    with pytest.raises(
        ValueError, match=r"initial_state must be floating \[2, 2, 1\] on cpu, got torch.float32 \[2, 2\]"
    ):
        recurrent.channel_scan(torch.ones(16, 2), -torch.ones(16, 2), plan, LocalComm(), initial_state=torch.ones(2, 2))


def requiring(comm: Comm, plan: Plan, name: str, alone: bool) -> str:
    """The error of a scan whose rates or initial states require a gradient, or do so on the last rank alone."""
    queries, keys, update, decay, *both = CASES["selective"].inputs(plan.mask)
    mine = [seqpar.shard(x, plan, comm.rank) for x in (queries, keys, update, decay)]
    given = dict(zip(("rates", "initial_state"), both))
    given[name].requires_grad_(comm.rank == comm.size - 1 or not alone)
    try:
        out = recurrent.channel_scan(mine[2].requires_grad_(), mine[3], plan, comm, queries=mine[0], **given)
    except ValueError as error:
        return str(error)
    out.sum().backward()
    return ""


@pytest.mark.parametrize("name", ["rates", "initial_state"])
def test_ranks_that_differ_in_what_requires_a_gradient_are_told(name: str) -> None:
    plan = plan_of("contiguous", (16,), 3)
    assert run_threads(3, requiring, plan, name, False) == [""] * 3
    errors = run_threads(3, requiring, plan, name, True)
    assert all("ranks differ in " + name + " require" in error for error in errors), errors
