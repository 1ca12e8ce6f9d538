"""What the Triton kernels have beyond the suite of all kernels: tables, pieces, splits, descriptors, large strides.

Without a GPU they run through Triton's interpreter, in float32 and float16. Its bf16 products are wrong, so there bf16
runs with operands cast to float32; the shipped bf16 variant is covered by test_compile.py and on GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import Grads, Operands, Sums
from seqpar.ops.attention.call import uploaded
from seqpar.plan import Plan
from seqpar.testing import dense_attention, relative_rms, run_processes
from tests import cases
from tests.kernels import cases as suite
from tests.kernels.cases import Case
from tests.ops.cases import OUT, Options, check

pytest.importorskip("triton", reason="triton has wheels for Linux only")
from seqpar.kernels import triton as package  # noqa: E402
from seqpar.kernels.triton import Triton  # noqa: E402
from seqpar.kernels.triton.config import (  # noqa: E402
    CLASSES,
    GENERATIONS,
    Descriptor,
    LaunchConfig,
    configure,
    generation,
    pieces,
)  # fmt: skip

BASE = Case(queries=45, keys=45, heads=2, kv_heads=1, dtype=torch.float32)
SMALL = Triton(configure=lambda d: LaunchConfig(16, 16, 4, 1))


@given(st.integers(1, CLASSES[2][-1]))
def test_pieces_hold_the_head_dim_and_waste_less_than_padding(dim: int) -> None:
    one, two = pieces(dim)
    assert one + two >= dim and (one > two or one == two == 256) and 16 <= one <= 256
    assert all(n & (n - 1) == 0 for n in (one, two)) and two in {0, *(1 << b for b in range(4, 9))}
    assert one + two <= max(16, 1 << (dim - 1).bit_length())
    if dim <= CLASSES[4][-1]:
        assert sum(pieces(dim, 4)) == one + two and max(pieces(dim, 4)) <= 128


def test_pieces_of_common_head_dims() -> None:
    expected = {80: (64, 16), 96: (64, 32), 192: (128, 64), 112: (128, 0), 72: (64, 16), 64: (64, 0), 8: (16, 0)}
    expected |= {256: (256, 0), 320: (256, 64), 512: (256, 256)}
    assert {d: pieces(d) for d in expected} == expected


def test_devices_take_configurations_that_fit_them() -> None:
    made_for = {c: generation(c) for c in (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)}
    assert made_for == {75: 0, 80: 80, 86: 86, 87: 80, 89: 86, 90: 90, 100: 100, 103: 100, 120: 86, 121: 86}
    for g in GENERATIONS:
        one = Descriptor("forward", 128, 128, 2, g)
        assert configure(one) == configure(replace(one)) and isinstance(hash(one), int)


DIMS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 72))
CAST = [pytest.param(d, t) for n, d in enumerate(DIMS) for t in (torch.float32, torch.float16)[:: 1 - 2 * (n % 2)]]


@pytest.mark.parametrize(("dims", "dtype"), CAST)
@pytest.mark.sampled(6)
def test_head_dims(dims, dtype) -> None:
    suite.equals_oracle(Triton(), replace(BASE, dim=dims[0], v_dim=dims[1], dtype=dtype, splits=2, mask="packed"))


def test_head_dims_of_two_wide_pieces() -> None:
    suite.equals_oracle(Triton(), replace(BASE, dim=512, v_dim=320, dtype=torch.float16, splits=2, mask="packed"))


@pytest.mark.parametrize("mask", ["causal", "packed", "window", "bounds"])
@pytest.mark.parametrize("options", [{}, suite.OPTIONS[-1]], ids=["plain", "all options"])
@pytest.mark.sampled(4)
def test_bf16_with_operands_cast_for_the_interpreter(mask, options, monkeypatch) -> None:
    # The interpreter truncates where a GPU rounds to nearest even.
    monkeypatch.setitem(suite.LIMIT, torch.bfloat16, 6e-3)
    case = replace(BASE, mask=mask, dtype=torch.bfloat16, splits=2, dim=32, v_dim=32, **options)
    suite.equals_oracle(Triton(), case)


@pytest.mark.parametrize("mask", ["bounds", "causal", "packed", "window"])
@pytest.mark.parametrize("processors", [1000, 1])
@pytest.mark.sampled(8)
def test_split_gradients_of_keys_are_joined(mask, processors, monkeypatch) -> None:
    monkeypatch.setattr(package, "_processors", lambda device: processors)
    suite.equals_oracle(SMALL, replace(BASE, mask=mask, heads=4, kv_heads=2))


@pytest.mark.parametrize("mask", ["causal", "packed", "bounds", "window"])
@pytest.mark.sampled(4)
def test_descriptors_load_what_pointers_do(mask, monkeypatch) -> None:
    case = replace(BASE, mask=mask, dim=48, v_dim=32, splits=2)
    used = []
    described = package.describable
    monkeypatch.setattr(package, "describable", lambda *tensors: used.append(described(*tensors)) or used[-1])
    results = []
    for tma in (False, True):
        kernel = Triton(configure=lambda d, tma=tma: LaunchConfig(32, 16, 4, 1, tma))
        monkeypatch.setattr(suite, "viewed", lambda x, fill=torch.nan: x.clone())  # aligned, as descriptors need
        out, lse = suite.run_forward(kernel, case)
        results.append([out, lse, *suite.run_backward(kernel, case, out, lse)])
    assert used and all(used)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_tensors_that_descriptors_refuse_are_loaded_by_pointers() -> None:
    kernel = Triton(configure=lambda d: LaunchConfig(32, 16, 4, 1, True))
    suite.equals_oracle(kernel, replace(BASE, dim=24, v_dim=20, splits=2))


def test_the_same_call_gives_the_same_bits() -> None:
    case = replace(BASE, mask="packed", heads=4, kv_heads=2, splits=2, dtype=torch.float16, dropout=0.2)
    twice = []
    for _ in range(2):
        out, lse = suite.run_forward(Triton(), case)
        twice.append([out, lse, *suite.run_backward(Triton(), case, out, lse)])
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


@pytest.mark.parametrize(
    ("transport", "layout", "window"),
    [
        (transport, layout, (window, None))
        for transport in ("fetch", "gather")
        for layout in ("zigzag", "striped")
        for window in (None, 20)
    ],
)
@pytest.mark.sampled(8)
def test_steps_of_a_plan(transport, layout, window) -> None:
    """Tables of real plans: query tiles of any number of rows, key tiles whose queries are not consecutive."""
    exact = (layout, transport) == ("zigzag", "gather")  # has a table of exact tiles, if it has enough of them
    lengths = (75, 3, 45, 38) if exact else (43, 3, 26, 22)
    total = sum(lengths)
    mask = Mask(lengths, window=window)
    placed = Layout.zigzag(lengths, 3) if layout == "zigzag" else Layout.striped(total, 3, block=7)
    plan = Plan(mask, placed, transport=transport)
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(total, h, 16, dtype=torch.float64, generator=g) for h in (2, 1, 1, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, mask)
    dq, dk, dv = torch.autograd.grad((out * dout).sum(), leaves)
    q, k, v, dout, out, lse = (x.detach().float() for x in (q, k, v, dout, out, lse))
    score = suite.Score(16**-0.5)
    got = [torch.zeros(total, 1, 16), torch.zeros(total, 1, 16)]
    shapes = set()
    for rank in range(3):
        there = uploaded(plan, plan.steps(rank), q.device)
        steps = [s for s in plan.steps(rank) if len(s.pos)]
        at = steps[0].part.pos
        acc, sums = torch.full((len(at), 2, 16), torch.nan), torch.full((2, len(at)), torch.nan)
        delta = (dout[at] * out[at]).sum(-1).t().contiguous()
        back = torch.zeros(len(at), 2, 16)
        for n, step in enumerate(steps):
            (facts,) = there.facts[step.number]
            operands = Operands(q[at], k[step.pos], v[step.pos], facts, score)
            SMALL.forward(operands, Sums(acc, sums, None, first=n == 0))
            grads = [torch.zeros(len(step.pos), 1, 16) for _ in range(2)]
            SMALL.backward(operands, Grads(dout[at], lse[at].t().contiguous(), delta, None, back, *grads))
            for whole, part in zip(got, grads, strict=True):
                whole[step.pos] += part
            table = step.bands[0].tiles(16, 16)
            shapes.add((table.uniform, table.q_exact))
        for a, b in ((acc, out[at]), (sums.t(), lse[at]), (back, dq[at])):
            assert relative_rms(a, b) < 2e-6
    for a, b in zip(got, (dk, dv), strict=True):
        assert relative_rms(a, b) < 2e-6
    assert (False, True) in shapes or not exact


def test_a_value_that_is_not_finite_is_never_silently_left_out() -> None:
    """Rows that see it become NaN; a row that does not is right or NaN too, as it shares a tile."""
    case = replace(BASE, queries=70, keys=70, mask="packed", dim=16, v_dim=16)
    q, k, v = suite.inputs(case)[:3]
    facts = suite.facts_of(case.made(), np.arange(70))
    sums = [(torch.full((70, 2, 16), torch.nan), torch.full((2, 70), torch.nan)) for _ in range(2)]
    SMALL.forward(Operands(q, k, v, facts, case.score()), Sums(*sums[0], None, first=True))
    v[37, :, 3] = torch.nan
    SMALL.forward(Operands(q, k, v, facts, case.score()), Sums(*sums[1], None, first=True))
    sees = (facts.lo <= 37) & (facts.hi > 37)
    clean, got = sums[0][0], sums[1][0]
    assert got[sees][:, :, 3].isnan().all()
    assert ((got == clean) | got.isnan()).all()
    assert (got == clean)[:16].all(), "other tiles are as they were"


def test_offsets_beyond_32_bits() -> None:
    """Rows so far apart that the last begins beyond element 2**31; memory that is not written takes no room."""
    apart, case = (1 << 23) + 8, replace(BASE, queries=270, keys=270, heads=1, kv_heads=1, dim=16, v_dim=16)
    q, k, v = suite.inputs(case)[:3]
    far = torch.empty(269 * apart + 16, dtype=torch.float32).as_strided((270, 1, 16), (apart, 16, 1))
    assert 269 * apart > 1 << 31
    facts = suite.facts_of(case.made(), np.arange(270))
    results = []
    for keys in (k, far):
        keys.copy_(k)
        out, lse = torch.empty(270, 1, 16), torch.empty(1, 270)
        Triton().forward(Operands(q, keys, v, facts, case.score()), Sums(out, lse, None, first=True))
        results.append(out)
    assert torch.equal(*results)


def test_strides_that_a_tile_cannot_span_are_refused() -> None:
    x = torch.empty((1 << 24) + 1).as_strided((2, 1, 1), (1 << 24, 1, 1))
    facts = suite.facts_of(Mask([2]), np.arange(2))
    sums = Sums(torch.empty(2, 1, 1), torch.empty(1, 2), None, first=True)
    with pytest.raises(NotImplementedError, match="rows 16777216 elements apart"):
        Triton().forward(Operands(x, x, x, facts, suite.Score(1.0)), sums)


def test_refusals_say_why() -> None:
    spec = suite.asked(replace(BASE, dim=32))
    tf32 = Triton(tf32=True)
    assert Triton().refuses(spec) is None and Triton().accuracy_loss(spec) is None
    assert "no torch.float64" in str(Triton().refuses(replace(spec, dtype=torch.float64)))
    assert "head dims up to 256 in torch.float32, got 320" in str(Triton().refuses(replace(spec, dim=320)))
    half = replace(spec, dim=512, dtype=torch.float16)
    assert Triton().refuses(half) is None and "up to 512" in str(Triton().refuses(replace(half, dim=520)))
    assert "capability 8.0 or newer, this one has 7.5" in str(
        Triton().refuses(replace(spec, device="cuda", capability=75))
    )
    assert "q is on xpu" in str(Triton().refuses(replace(spec, device="xpu")))
    assert "for float32, got torch.float16" in str(tf32.refuses(replace(spec, dtype=torch.float16)))
    assert "10 bits" in str(tf32.accuracy_loss(spec))


@pytest.mark.parametrize(
    ("layout", "transport", "ulysses"), [("zigzag", "ring", 1), ("striped", "fetch", 1), ("zigzag", "gather", 2)]
)
@pytest.mark.sampled(3)
def test_attention_over_processes_by_name(layout, transport, ulysses) -> None:
    plan = cases.Case("packed", layout, transport, 2, ulysses, (50, 3, 40)).plan()
    options = Options(kernel="triton", sinks=True)
    check(plan, (4, 2), (16, 16), options, uses=OUT, dtype=torch.float32, run=run_processes)


@pytest.mark.parametrize("kernel", ["blockwise", "aten", "triton"])
@pytest.mark.parametrize("strides", [(0, 0, 0), (16, 0, 1), (0, 16, 1), (1, 9, 36), (4, 1, 36)])
@pytest.mark.sampled(3)
def test_incoming_gradients_of_any_strides(kernel, strides) -> None:
    """Autograd hands over what is expanded or transposed as it is; a kernel must not read it as if it were dense."""
    q, k, v = (torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    plan, comm = Plan(Mask([9]), Layout.contiguous(9, 1)), seqpar.LocalComm()
    grad = torch.randn(9 * 4 * 16, generator=torch.Generator().manual_seed(3)).as_strided((9, 4, 16), strides)
    results = []
    for dout in (grad, grad.contiguous()):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = seqpar.attention(*leaves, plan, comm, kernel=kernel)
        results.append(torch.autograd.grad(out, leaves, dout))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_slopes_of_any_stride() -> None:
    q = torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(0))
    plan, comm = Plan(Mask([9]), Layout.contiguous(9, 1)), seqpar.LocalComm()
    for slopes in (torch.arange(8.0)[::2], torch.ones(1).expand(4)):
        given, dense = (
            seqpar.attention(q, q, q, plan, comm, kernel="triton", alibi_slopes=s)
            for s in (slopes, slopes.contiguous())
        )
        assert torch.equal(given, dense)


def test_tensors_that_are_not_dense_are_refused() -> None:
    x = torch.randn(2, 1, 8)[..., ::2]
    facts = suite.facts_of(Mask([2]), np.arange(2))
    with pytest.raises(ValueError, match="dense last dim"):
        Triton().forward(
            Operands(x, x, x, facts, suite.Score(1.0)), Sums(x.clone(), torch.empty(1, 2), None, first=True)
        )
