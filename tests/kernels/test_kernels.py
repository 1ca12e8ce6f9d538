"""One suite for every kernel, through the kernel protocol, against the dense oracle in float64.

Whatever a kernel must write holds NaN before, and tensors are views into larger ones, as the schedule hands them over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar import native
from seqpar.facts.mask import Mask
from seqpar.kernels import (
    KERNELS,
    CallSpec,
    Grads,
    Kernel,
    Operands,
    Sums,
    acc_dtype,
    blockwise,
    choose,
    dropout,
)  # fmt: skip
from seqpar.kernels.blockwise import attend
from seqpar.kernels.native import ISAS, Native
from seqpar.kernels.protocol import DTYPES
from seqpar.kernels.reference import Reference
from seqpar.kernels.vendor import Aten, varlen
from seqpar.testing import relative_rms
from tests.facts.tables import visited
from tests.kernels.cases import (
    LARGE,
    LOW,
    Case,
    able,
    equals_oracle,
    facts_of,
    fitted,
    inputs,
    named,
    run_backward,
    run_forward,
    seen_by,
    small_cases,
)

# the compiled kernel also as processors with fewer instructions run it
OLDER = [Native(isa=isa) for isa in range(0 if native.missing() else native.ops().isa())]


def pairs(cases: list[Case]) -> list[object]:
    """Each kernel with each case that it can do."""
    found = dict.fromkeys((kernel, fitted(kernel, case)) for kernel in (*KERNELS, *OLDER) for case in cases)
    return [pytest.param(k, case, id=f"{k.name}-{named(case)}") for k, case in found if case]


@pytest.mark.parametrize(("kernel", "case"), pairs(small_cases() + LARGE))
@pytest.mark.sampled(12)
def test_forward_and_backward_equal_the_oracle(kernel, case) -> None:
    equals_oracle(kernel, case)


@pytest.mark.parametrize(("kernel", "case"), pairs(small_cases() + LARGE))
@pytest.mark.sampled(12)
def test_the_largest_scores_are_those_of_the_pairs_seen_and_change_no_bit(kernel, case) -> None:
    q, k, _, *_ = (x.double() for x in inputs(case))
    products = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(case.heads // case.kv_heads, 1))
    facts = [facts_of(case.made(), np.arange(case.keys), band=band) for band in range(len(case.made().bands))]
    seen = torch.stack([seen_by(each) for each in facts]).any(0)
    want = (products * case.score().scale).masked_fill(~seen, -torch.inf).amax(-1)
    top = torch.full((case.heads + 2, case.queries + 5), -torch.inf, dtype=acc_dtype(case.dtype))[1:-1, 2:-3]
    results = run_forward(kernel, case, top)
    assert all(torch.equal(a, b) for a, b in zip(results, run_forward(kernel, case), strict=True))
    limit = 1e-13 if case.dtype == torch.float64 else 1e-6
    assert torch.equal(top == -torch.inf, want == -torch.inf)
    assert ((top - want).masked_fill(want == -torch.inf, 0.0).abs() <= limit * products.abs().max()).all()


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.name != "triton_tf32"], ids=lambda k: k.name)
def test_a_score_that_is_not_a_number_is_the_largest_one(kernel) -> None:
    case = fitted(kernel, Case("causal", dim=32, v_dim=32, dtype=torch.float32))
    q, k, v = inputs(case)[:3]
    k[40, 0, 0] = torch.nan
    top = torch.zeros(case.heads, case.queries, dtype=acc_dtype(case.dtype))
    sums = Sums(None, torch.empty_like(top), torch.empty(*q.shape[:2], case.v_dim, dtype=q.dtype), True, top)
    if case.dtype == acc_dtype(case.dtype):
        sums.acc, sums.out = sums.out, None
    facts = facts_of(case.made(), np.arange(case.keys))
    attend(kernel, Operands(q, k, v, facts, case.score()), sums)
    assert torch.equal(top[: case.heads // case.kv_heads].isnan(), seen_by(facts)[None, :, 40].expand(2, -1))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
def test_no_rows_and_no_keys(kernel, dtype) -> None:
    case = Case(dtype=dtype)
    q, k, v = inputs(case)[:3]
    if (able := fitted(kernel, case)) is None or able.dtype != dtype:
        none = (torch.float64, torch.float16)
        known = {"native": none, "aten": LOW, "triton": (torch.float64, torch.bfloat16), "triton_tf32": DTYPES}
        assert dtype in known[kernel.name]
        return
    acc = acc_dtype(dtype)
    mask, none = Mask([70]), np.zeros(0, np.int64)
    out, lse = torch.full_like(q, torch.nan), torch.full((4, 70), torch.nan, dtype=acc)
    wide, score = dtype == acc, case.score()
    nothing = Operands(q, k[:0], v[:0], facts_of(mask, none), score)
    kernel.forward(nothing, Sums(out if wide else None, lse, None if wide else out, first=True))
    assert not out.any() and (lse == -torch.inf).all()
    held = (torch.rand(70, 4, 8, dtype=acc), torch.rand(4, 70, dtype=acc))
    total, sums = held[0].clone(), held[1].clone()
    kernel.forward(nothing, Sums(total, sums, None if wide else out, first=False))
    assert torch.equal(sums, held[1]) and torch.equal(total, held[0])
    assert torch.equal(total if dtype == acc else out, held[0].to(dtype))
    nobody = facts_of(mask, np.arange(70), none)
    grads = [torch.zeros_like(x, dtype=acc) for x in (q[:0], k, v)]
    empty = Operands(q[:0], k, v, nobody, score)
    kernel.forward(empty, Sums(total[:0], sums[:, :0], None, first=True))
    kernel.backward(empty, Grads(q[:0], sums[:, :0], sums[:, :0], q[:0], *grads))
    assert not any(x.any() for x in grads)


LONG = {mask: Case(mask, 700, 1300, 1, 1, dtype=torch.float32) for mask in ("causal", "tree")}


@pytest.mark.parametrize(
    ("kernel", "mask", "row"),
    [
        pytest.param(kernel, mask, row, id=f"{kernel.name}-{mask}-{row}")
        for kernel in KERNELS
        for mask, row in (("causal", 3), ("causal", 640), ("tree", 1030))
        if "triton" not in kernel.name and able(kernel, LONG[mask])
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.sampled(6)
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(kernel, mask, row, bad, where) -> None:
    """Rows 640 and 1030 lie in a full tile for some queries and in partial and empty ones for others."""
    case = LONG[mask]
    q, k, v, dout, _ = inputs(case)
    (k if where == "k" else v)[row, 0, 2] = bad
    facts = facts_of(case.made(), np.arange(1300))
    sees = seen_by(facts)[:, row]
    assert sees.any()
    out, lse = torch.full((700, 1, 8), torch.nan), torch.full((1, 700), torch.nan)
    kernel.forward(Operands(q, k, v, facts, case.score()), Sums(out, lse, None, first=True))
    clean = inputs(case)
    want, want_lse = torch.empty_like(out), torch.empty_like(lse)
    kernel.forward(Operands(*clean[:3], facts, case.score()), Sums(want, want_lse, None, first=True))
    assert torch.isfinite(out[~sees]).all() and torch.allclose(out[~sees], want[~sees], atol=1e-5)
    if where == "v":
        assert not torch.isfinite(out[sees][:, 0, 2]).any()
        other = [c for c in range(8) if c != 2]
        assert torch.allclose(out[..., other], want[..., other], atol=1e-5)
    elif bad != bad:
        assert out[sees].isnan().all() and lse[0, sees].isnan().all()
    else:  # a score of +inf makes NaN, one of -inf leaves the key out
        drop = q[:, 0, 2] * bad < 0
        assert out[sees & ~drop].isnan().all()
        assert torch.isfinite(out[sees & drop]).all()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    delta = (dout * torch.nan_to_num(out)).sum(-1).t().contiguous()
    kernel.backward(Operands(q, k, v, facts, case.score()), Grads(dout, lse, delta, None, *grads))
    assert torch.isfinite(grads[0][~sees]).all()
    if bad != bad:
        assert grads[0][sees].isnan().any(-1).all()


@pytest.mark.parametrize("size", [1e2, 3e4, 1e15])
@pytest.mark.parametrize("kernel", [k for k in (*KERNELS, *OLDER) if "triton" not in k.name], ids=lambda k: k.name)
def test_large_scores_lose_no_row(kernel, size) -> None:
    """Where one key has all the weight, it has it whatever the size of its score, forward and backward."""
    case = Case(dtype=torch.float32, dim=16, v_dim=16, heads=2, kv_heads=2)
    q, k, v, dout, _ = inputs(case)
    q, k = q * size, k * size
    facts = facts_of(case.made(), np.arange(70))

    def run(by: Kernel, *tensors: Tensor) -> list[Tensor]:
        a, b, c, d = tensors
        out, lse = torch.full_like(d, torch.nan), torch.full((2, 70), torch.nan, dtype=d.dtype)
        x = Operands(a, b, c, facts, case.score())
        by.forward(x, Sums(out, lse, None, first=True))
        grads = [torch.zeros_like(y) for y in (a, b, c)]
        by.backward(x, Grads(d, lse, (d * out).sum(-1).t().contiguous(), out, *grads))
        return [out, lse, grads[2]]

    exact = run(Reference(), *(x.double() for x in (q, k, v, dout)))
    plain, found = run(Reference(), q, k, v, dout), run(kernel, q, k, v, dout)
    for name, got, own, wanted in zip(("out", "lse", "dv"), found, plain, exact, strict=True):
        assert relative_rms(got, wanted) <= 2 * relative_rms(own, wanted) + 1e-6, name


@dataclass
class Counted:
    """Tiles that a blockwise call computed, as (query tile, first key row)."""

    tiles: list[tuple[int, int]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    result = Counted([])
    scores = blockwise._Walk.scores

    def counting(self, i, keys, scaled, seen):
        result.tiles.append((i, keys.start))
        return scores(self, i, keys, scaled, seen)

    monkeypatch.setattr(blockwise._Walk, "scores", counting)
    return result


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mask", ["causal", "full", "packed", "window", "band", "tree", "ends"])
def test_blockwise_computes_the_tiles_of_the_table_and_no_empty_one(mask, splits, counted, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "QUERY_ROWS", 32)
    monkeypatch.setattr(blockwise, "KEY_ROWS", 16)
    case = Case(mask, 200, 200 if mask == "packed" else 330, 2, 1, splits=splits, dtype=torch.float64)
    kernel = next(k for k in KERNELS if k.name == "blockwise")
    q, k, v, dout, _ = inputs(case)
    for n, at in enumerate(np.array_split(np.arange(case.keys), splits)):
        facts = facts_of(case.made(), at)
        seen = seen_by(facts).numpy()
        table = facts.tiles(16, 16)
        wanted = {(i, n * 16) for i, n in visited(table)}
        tiles = product(range(len(table.begin)), range(0, len(at), 16))
        holding = {(i, j) for i, j in tiles if seen[table.rows[i] : table.rows[i + 1], j : j + 16].any()}
        assert holding == wanted or (mask == "ends" and holding < wanted), "an empty tile is not visited"
        total, lse = torch.zeros_like(dout), torch.full((2, 200), -torch.inf, dtype=torch.float64)
        del counted.tiles[:]
        operands = Operands(q, k[at], v[at], facts, case.score())
        kernel.forward(operands, Sums(total, lse, None, first=n == 0))
        assert sorted(counted.tiles) == sorted(wanted)
        del counted.tiles[:]
        grads = [torch.zeros_like(x) for x in (q, k[at], v[at])]
        kernel.backward(operands, Grads(dout, lse, lse, None, *grads))
        assert sorted(counted.tiles) == sorted(wanted)


@pytest.mark.parametrize("mask", ["window", "band"])
def test_full_tiles_read_no_bound(mask, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "KEY_ROWS", 16)
    read = []
    seen = blockwise._Walk.seen
    monkeypatch.setattr(blockwise._Walk, "seen", lambda self, i, keys: read.append((i, keys)) or seen(self, i, keys))
    case = Case(mask, 700, 1300, 1, 1)
    out, lse = run_forward(next(k for k in KERNELS if k.name == "blockwise"), case)
    table = facts_of(case.made(), np.arange(1300)).tiles(512, 16)
    partial = int((table.end - table.begin - (table.full_end - table.full_begin)).sum())
    assert len(read) == partial


@pytest.mark.parametrize(
    "case", [c for c in LARGE if c.dtype == torch.float32 and c.mask not in ("bounds", "tree")], ids=named
)
def test_aten_computes_the_attended_pairs_and_nothing_else(case, monkeypatch) -> None:
    """Rectangles and causal squares whose areas sum to the area of the step, and no tile besides."""
    area = []

    def counting(method):
        def counted(self, q, k, *others):
            n, m = q.shape[0], k.shape[0]
            causal = next(x for x in others if isinstance(x, varlen.VarlenCall)).causal
            assert not causal or n == m
            area.append(n * (n + 1) // 2 if causal else n * m)
            return method(self, q, k, *others)

        return counted

    for method in ("attend", "differentiate"):
        monkeypatch.setattr(Aten, method, counting(getattr(Aten, method)))
    monkeypatch.setattr(blockwise._Walk, "__init__", None)  # a tile would fail
    kernel = next(k for k in KERNELS if k.name == "aten")
    out, lse = run_forward(kernel, case)
    assert sum(area) == case.made().area()
    run_backward(kernel, case, out, lse)
    assert sum(area) == 2 * case.made().area()


def test_heads_far_into_a_model_drop_their_own_pairs() -> None:
    """A share of the heads counts dropout from the model's first head, in every kernel alike."""
    case = Case(dropout=0.5)
    q, k, v = inputs(case)[:3]
    facts = facts_of(case.made(), np.arange(70))
    results = []
    for kernel in (k for k in KERNELS if able(k, case)):
        whole, part = torch.empty_like(q), torch.empty_like(q[:, :2])
        lse = torch.empty(4, 70, dtype=torch.float64)
        kernel.forward(Operands(q, k, v, facts, case.score()), Sums(whole, lse, None, first=True))
        score = replace(case.score(), first_head=2)
        kernel.forward(Operands(q[:, 2:], k[:, 1:], v[:, 1:], facts, score), Sums(part, lse[2:], None, first=True))
        torch.testing.assert_close(part, whole[:, 2:])
        results.append(whole)
    assert len(results) >= 2
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    a, b = dropout.words(torch.arange(3), torch.arange(5), range(2, 4), 1)
    assert a.shape == (2, 3) and b.shape == (2, 5)


CALL = CallSpec("cpu", 0, torch.float32, heads=2, kv_heads=2, dim=8, v_dim=8)


def test_kernels_are_chosen_by_name_or_by_what_they_can() -> None:
    for kernel in KERNELS:
        if kernel.refuses(CALL) is None:
            assert choose(kernel.name, CALL) is kernel
    for call in (CALL, replace(CALL, dtype=torch.bfloat16), replace(CALL, softcap=True), replace(CALL, until=True)):
        assert choose("auto", call).name == "native"
    assert choose("auto", replace(CALL, dim=1025, v_dim=1025)).name == "aten"
    with pytest.raises(NotImplementedError, match="native has head dims up to 1024, got 1025 and 8"):
        choose("native", replace(CALL, dim=1025))
    assert choose("auto", replace(CALL, dtype=torch.float64)).name == "aten"
    assert choose("auto", replace(CALL, dtype=torch.float64, softcap=True)).name == "blockwise"
    assert choose("auto", replace(CALL, dtype=torch.float16)).name == "blockwise"


def test_without_the_extension_kernels_in_python_serve(monkeypatch) -> None:
    monkeypatch.setattr(native, "missing", lambda: "seqpar._C was not built")
    assert choose("auto", CALL).name == "aten"
    assert choose("auto", replace(CALL, dtype=torch.bfloat16)).name == "blockwise"
    with pytest.raises(NotImplementedError, match="seqpar._C was not built"):
        choose("native", CALL)


def test_an_extension_from_before_keys_could_end_is_told_apart(monkeypatch) -> None:
    monkeypatch.setattr(native, "lacks", lambda operator: f"seqpar._C was built before it had {operator}")
    assert choose("auto", CALL).name == "native"
    assert choose("auto", replace(CALL, until=True, softcap=True)).name == "blockwise"
    with pytest.raises(NotImplementedError, match="built before it had attention_has_until"):
        choose("native", replace(CALL, until=True))


def test_the_instruction_sets_are_the_extension_s() -> None:
    assert 0 <= native.ops().isa() < len(ISAS)


def test_what_a_kernel_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="kernel must be auto or one of .*blockwise.*got 'magic'"):
        choose("magic", CALL)
    said = (
        "no kernel for int32 on cpu, 2 query heads and 2 key heads of dim 8, values of dim 8, with gradients, the same "
    )
    with pytest.raises(NotImplementedError, match=said + ".*: blockwise has no torch.int32"):
        choose("blockwise", replace(CALL, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="aten has no softcap"):
        choose("aten", replace(CALL, softcap=True))
