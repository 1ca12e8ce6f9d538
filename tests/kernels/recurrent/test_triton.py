"""The Triton kernels of recurrences, in Triton's interpreter, beside the token-by-token reference in float64.

Its bf16 products are wrong and its casts to bf16 round down, so there bf16 runs with operands cast to float32 and errs
twice as much; the shipped variant is covered by test_compile.py and on GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar import recurrent
from seqpar.facts.mask import Mask
from seqpar.kernels.recurrent import KERNELS, Recurrence, RecurrentSpec, choose
from seqpar.plan import Plan
from seqpar.testing import dense_linear_attention, relative_rms, run_processes
from tests.cases import examples
from tests.kernels.recurrent.cases import Case, errors, results

pytest.importorskip("triton", reason="triton has wheels for Linux only")
from seqpar.kernels.recurrent.triton.config import RecurrentDescriptor, configure, padded  # noqa: E402
from seqpar.kernels.recurrent.triton.tables import rows_of_chunks, tables_of  # noqa: E402

TRITON, CHUNKED = KERNELS["triton"], KERNELS["chunked"]
FAMILIES = [(decay, beta) for decay in ("none", "scalar") for beta in (False, True)]
BASE = Case()
CASES = [
    BASE,
    replace(BASE, runs=(30, 20, 40), dim=24, values=40, groups=2),  # padded dims, chunks of 64 rows
    replace(BASE, runs=(9, 17, 3, 30), groups=1, heads=3),  # of 32
    replace(BASE, runs=(1, 2, 1, 3, 1), dim=5, values=3, groups=2, heads=4),  # of 16, most of one row
    replace(BASE, runs=(66,), strength=80.0),
]


def no_worse(case: Case, times: float) -> None:
    """Assert that no result errs more than so many times what the chunks of PyTorch do."""
    for ours, theirs in zip(errors(TRITON, case), errors(CHUNKED, case), strict=True):
        assert ours <= times * theirs + 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("case", "decay", "beta"),
    [
        pytest.param(case, decay, beta, id=f"{'-'.join(map(str, case.runs))}-{decay}-{beta}")
        for case in CASES
        for decay, beta in FAMILIES
    ],
)  # fmt: skip
@pytest.mark.sampled(24)
def test_results_and_every_gradient(case, decay, beta) -> None:
    no_worse(replace(case, decay=decay, beta=beta), 2.0)


@pytest.mark.parametrize(("dtype", "times"), [(torch.float16, 1.5), (torch.bfloat16, 3.0)])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.exhaustive
def test_inputs_of_16_bits(beta, dtype, times) -> None:
    no_worse(replace(BASE, runs=(70, 9), dtype=dtype, beta=beta), times)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 192), (192, 80), (1, 1), (17, 300)])
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
def test_dims(decay, beta, dims) -> None:
    # keys of one dim are parallel, so the triangular system is conditioned as badly as can be, and four values are few
    times = 8.0 if dims == (1, 1) else 2.0
    no_worse(replace(BASE, runs=(130, 7), decay=decay, beta=beta, dim=dims[0], values=dims[1]), times)


def test_keys_of_other_lengths_than_one() -> None:
    """The triangular system of such keys is badly conditioned: its inverse errs as solving it does."""
    inputs = replace(BASE, runs=(64,)).inputs()
    assert inputs[1] is not None
    inputs[1] *= 1.6
    case = replace(BASE, runs=(64,))
    exact = results(KERNELS["reference"], case, inputs, torch.float64)
    ours, theirs = (results(kernel, case, inputs, torch.float32) for kernel in (TRITON, CHUNKED))
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert relative_rms(x.double(), z) <= 4 * relative_rms(y.double(), z) + 1e-6


@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
@pytest.mark.sampled(6)
def test_a_run_changes_no_bit_of_another(decay, beta) -> None:
    case = replace(BASE, runs=(20, 30, 70), decay=decay, beta=beta)
    inputs = case.inputs()
    changed = [None if x is None else x.clone() for x in inputs]
    for x in changed[:5]:
        if x is not None:
            x[25] = torch.nan
    before, after = (results(TRITON, case, x, torch.float32) for x in (inputs, changed))
    rows = torch.arange(120)
    others, first_and_last = (rows < 20) | (rows >= 50), torch.tensor([0, 2])
    for x, y in zip(before, after, strict=True):
        kept = others if len(x) == 120 else first_and_last if len(x) == 3 else slice(None)
        assert torch.equal(x[kept], y[kept])
    assert after[2][20:50].isnan().any()


@examples(50)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=9), st.data())
def test_chunks_hold_every_row_once_and_those_of_one_run(counts, data) -> None:
    exported = sorted(data.draw(st.sets(st.integers(0, len(counts) - 1))))
    tables = tables_of(np.array(counts), np.array(exported, np.int64), torch.device("cpu"))
    run_of_row = np.repeat(np.arange(len(counts)), counts)
    for launched, chosen in ((tables.every, range(len(counts))), (tables.exported, exported)):
        seen, numbers = [], []
        for row, stop, number, run in launched.chunks.tolist():
            rows = range(row, min(row + tables.rows, stop))
            assert set(run_of_row[rows]) == {chosen[run]}
            seen += rows
            numbers.append(number)
        assert seen == [row for row in range(sum(counts)) if run_of_row[row] in chosen]
        walked = sorted(launched.runs.tolist())
        assert [run for run, *_ in walked] == list(range(len(chosen)))
        assert [chunk for _, _, _, _, number, count, *_ in walked for chunk in range(number, number + count)] == numbers
        lengths = [count for *_, count, _, _ in launched.runs.tolist()]
        assert lengths == sorted(lengths, reverse=True)


def test_short_runs_have_short_chunks() -> None:
    assert [rows_of_chunks(np.array(runs)) for runs in ([64], [32, 32], [20, 20], [1] * 9, [])] == [64, 64, 32, 16, 64]


def test_configurations_hold_the_dims() -> None:
    for kernel in ("pairs", "walk", "outputs", "walk_back", "pair_gradients", "gradients"):
        for dim in (1, 16, 17, 100, 256):
            config = configure(RecurrentDescriptor(kernel, dim, 2 * dim, 2))
            assert config.bk >= min(dim, 32) and config.bk & (config.bk - 1) == 0 and 16 <= config.bc <= 64
            assert kernel not in ("walk", "outputs", "walk_back") or config.bk == padded(dim)


SPEC = RecurrentSpec("cpu", torch.float32, 128, 128, "scalar", True)


def test_what_the_kernels_do_not_have_is_refused_by_name() -> None:
    assert choose("triton", SPEC) is TRITON
    auto = choose("auto", SPEC._replace(device="cuda"))
    assert auto is CHUNKED, "kernels that no GPU has timed run where they are asked for"
    for change, said in (
        ({"dtype": torch.float64}, "torch.float64"),
        ({"decay": "channel"}, "each channel"),
        ({"dim": 257}, "up to 256 dims, got 257"),
        ({"device": "meta"}, "runs on CUDA devices, v is on meta"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            choose("triton", SPEC._replace(**change))


def on_a_rank(comm, plan: Plan, tensors, weights, normalize: bool) -> list[torch.Tensor]:
    """A rank's output and gradients."""
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in tensors]
    out = recurrent.linear_attention(
        *mine[:3], plan, comm, decay=mine[3], beta=mine[4], normalize=normalize, kernel="triton"
    )
    (out * seqpar.shard(weights, plan, comm.rank)).sum().backward()
    return [x.detach() for x in (out, *(x.grad for x in mine))]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.exhaustive
def test_linear_attention_on_ranks(normalize) -> None:
    plan = Plan(Mask([30, 9, 50]), seqpar.Layout.zigzag([30, 9, 50], 2))
    case = replace(BASE, runs=(30, 9, 50))
    *tensors, _ = case.inputs()
    weights = case.weights()[2]
    leaves = [x.double().requires_grad_() for x in tensors]
    q, k, v, decay, beta = leaves
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    expected, _ = dense_linear_attention(q, k, v, plan.mask, decay=decay, beta=beta)
    (expected * weights).sum().backward()
    wanted = [expected.detach(), *(x.grad for x in leaves)]
    parts = run_processes(2, on_a_rank, plan, tensors, weights, normalize)
    for n, want in enumerate(wanted):
        found = torch.zeros_like(want)
        for rank in range(2):
            found[torch.from_numpy(plan.layout.positions(rank))] = parts[rank][n].double()
        assert relative_rms(found, want) <= 2e-6


def test_no_rows_and_no_exported_runs() -> None:
    for runs, exported in (((), 0), ((3,), 0)):
        case = replace(BASE, runs=runs)
        *rows, entering = (None if x is None else x.requires_grad_() for x in case.inputs())
        tables = TRITON.tables(np.array(runs, np.int64), np.zeros(exported, np.int64), torch.device("cpu"))
        prepared = TRITON.prepare(Recurrence(*rows, 1.0), tables)
        states, maps = TRITON.leave(prepared, entering[:0])
        assert states.shape == (0, 2, 16, 16) and maps.shape == (0, 2, 16, 16)
        out, left = TRITON.compute(prepared, entering)
        assert out.shape == rows[2].shape and left.shape == entering.shape
        (out.sum() + left.sum() + states.sum()).backward()
        assert all(x.grad.shape == x.shape for x in rows)
