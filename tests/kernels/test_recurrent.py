"""Kernels of recurrences beside the definition token by token: their three parts, with the gradients of each."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar import native
from seqpar.facts.mask import Mask
from seqpar.kernels.native import ISAS
from seqpar.kernels.recurrent import KERNELS, Recurrence, RecurrentKernel, RecurrentSpec, choose, steps
from seqpar.kernels.recurrent.chunked import Chunked
from seqpar.kernels.recurrent.native import NativeChunks
from seqpar.kernels.recurrent.reference import TokenByToken
from seqpar.testing import relative_rms
from tests.kernels.recurrent.cases import COUNTS, EXPORTED, parts
from tests.ops.recurrent.cases import FAMILIES, Family

WHY = native.lacks("recurrence_backward")
BUILT = pytest.mark.skipif(WHY is not None, reason=WHY or "")
KINDS = [pytest.param(Chunked(), id="chunked"), pytest.param(NativeChunks(), id="native", marks=BUILT)]


@cache
def expected(family: Family) -> list[Tensor]:
    return parts(TokenByToken(), family)


def differences(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """The largest difference in each result, beside its largest value or 1."""
    pairs = zip(found, wanted, strict=True)
    return [float((x - y).abs().max()) / max(1.0, float(y.abs().max())) for x, y in pairs]


@BUILT
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
def test_some_heads_of_more_have_the_bits_of_their_copies(decay, beta) -> None:
    kernel, family = NativeChunks(), Family(decay, beta, groups=4, heads=4, dim=9, values=5, unit=True)
    rows = [None if x is None else x.requires_grad_() for x in family.inputs(Mask(COUNTS))[:5]]
    tables = kernel.tables(COUNTS, EXPORTED, torch.device("cpu"))
    entering = torch.ones(len(COUNTS), 2, 9, 5, dtype=torch.float64)
    found = []
    for copied in (False, True):
        mine = [None if x is None else x[:, 1:3].contiguous() if copied else x[:, 1:3] for x in rows]
        prepared = kernel.prepare(Recurrence(*mine, 0.3), tables)
        results = [*kernel.leave(prepared, entering[EXPORTED]), *kernel.compute(prepared, entering)]
        wide = torch.ones(len(rows[2]), 4, 5, dtype=torch.float64)[:, 1:3]  # a gradient of strided rows too
        grads = torch.autograd.grad(results[2:], [x for x in rows if x is not None], [wide, torch.ones_like(entering)])
        found.append([*results, *grads])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("strength", [0.0, 0.1, 80.0])
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.sampled(6)
def test_all_parts_and_gradients(kernel, decay, beta, strength) -> None:
    family = Family(decay, beta, strength=strength, dim=9, values=5, unit=True)
    assert max(differences(parts(kernel, family), expected(family))) < 1e-12


@pytest.mark.parametrize("counts", [COUNTS, np.array([20, 3, 20, 20])], ids=["long", "short"])
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
@pytest.mark.parametrize("kernel", [*KINDS, pytest.param(TokenByToken(), id="reference")])
@pytest.mark.sampled(6)
def test_a_replay_has_the_bits_of_the_gradients(kernel, decay, beta, counts) -> None:
    family, entering = Family(decay, beta, dim=9, values=5, unit=True), torch.ones(len(counts), 4, 9, 5).double()
    leaves = [x if x is None else x.requires_grad_() for x in (*family.inputs(Mask(counts))[:5], entering)]
    tables = kernel.tables(counts, EXPORTED, torch.device("cpu"))
    prepared = kernel.prepare(Recurrence(*leaves[:5], 0.3), tables)
    with torch.no_grad():
        *kept_results, kept = kernel.keep(prepared, entering)
    assert len(kept) == kernel.keeps
    # 8 chunks of 280 rows in all; 4 chunks of 63 rows are not half full
    assert [len(x) for x in kept] == [8 if counts is COUNTS else 0] * kernel.keeps
    results = kernel.compute(prepared, entering)
    assert all(torch.equal(x, y) for x, y in zip(kept_results, results, strict=True))
    given = [x for x in leaves if x is not None]
    wanted, kept_found, found = (
        torch.autograd.grad(x, given, [torch.ones_like(y) for y in x], retain_graph=True)
        for x in (results, kernel.replay(prepared, entering, kept), kernel.replay(prepared, entering, []))
    )
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(wanted, kept_found, found, strict=True))


def parts_of_channels(kernel: RecurrentKernel, dims: int, rates: bool, dtype: torch.dtype) -> list[Tensor]:
    """As `parts`, of five channels with a state in each dim."""
    g, count = torch.Generator().manual_seed(0), int(COUNTS.sum())
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    decay = -0.3 * torch.rand(count, 5, generator=g, dtype=torch.float64).to(dtype)
    rows = [draw(count, 1, dims), draw(count, 1, dims), draw(count, 5, 1), decay]
    more = [draw(len(COUNTS), 5, dims, 1), *([draw(5, dims).abs()] if rates else [])]
    leaves = [x.requires_grad_() for x in (*rows, *more)]
    x = Recurrence(*leaves[:4], None, 0.7, leaves[5] if rates else None)
    prepared = kernel.prepare(x, kernel.tables(COUNTS, EXPORTED, torch.device("cpu")))
    results = [*kernel.leave(prepared, leaves[4][EXPORTED]), *kernel.compute(prepared, leaves[4])]
    grads = torch.autograd.grad(results, leaves, [draw(*x.shape) for x in results])
    return [x.detach().double() for x in (*results, *grads)]


@pytest.mark.parametrize(("dims", "rates"), [(3, True), (3, False), (1, False)])
@pytest.mark.parametrize("at_once", [1, 1 << 18])
@pytest.mark.sampled(2)
def test_states_of_channels_in_steps(monkeypatch, at_once, dims, rates) -> None:
    monkeypatch.setitem(steps.AT_ONCE, "cpu", at_once)
    wanted = parts_of_channels(TokenByToken(), dims, rates, torch.float64)
    assert max(differences(parts_of_channels(steps.Steps(), dims, rates, torch.float64), wanted)) < 1e-12
    assert max(differences(parts_of_channels(steps.Steps(), dims, rates, torch.float32), wanted)) < 1e-5


@pytest.mark.parametrize("kernel", KINDS)
def test_no_rows_and_no_exported_runs(kernel) -> None:
    family = Family("scalar", beta=True)
    q, k, v, decay, beta, _ = family.inputs(Mask((1,)))
    for counts in (np.zeros(0, np.int64), np.array([1])):
        rows = [x[: counts.sum()].clone().requires_grad_() for x in (q, k, v, decay, beta)]
        prepared = kernel.prepare(Recurrence(*rows, 1.0), kernel.tables(counts, counts[:0], torch.device("cpu")))
        entering = torch.zeros(len(counts), 4, 3, 2, dtype=torch.float64)
        states, maps = kernel.leave(prepared, entering[:0])
        assert states.shape == (0, 4, 3, 2) and maps.shape == (0, 4, 3, 3)
        out, left = kernel.compute(prepared, entering)
        assert out.shape == rows[2].shape and left.shape == entering.shape
        (out.sum() + left.sum() + states.sum()).backward()
        assert all(x.grad.shape == x.shape for x in rows)


@BUILT
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
def test_every_instruction_set_errs_as_little_as_torch(decay, beta) -> None:
    family = Family(decay, beta, dim=40, values=24, unit=True)
    wanted = parts(Chunked(), family)
    torch_errs = [relative_rms(x, y) for x, y in zip(parts(Chunked(), family, torch.float32), wanted, strict=True)]
    for isa in range(native.ops().isa() + 1):
        found = parts(NativeChunks(isa=isa), family, torch.float32)
        for error, other in zip((relative_rms(x, y) for x, y in zip(found, wanted, strict=True)), torch_errs):
            assert error <= 4 * other + 1e-7, ISAS[isa]


@BUILT
def test_threads_change_no_bit() -> None:
    family, threads = Family("channel", beta=True, dim=20, values=33, unit=True), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(parts(NativeChunks(), family, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@BUILT
def test_an_operator_that_an_older_build_lacks_is_named() -> None:
    assert "before it had recurrent_sideways: build it again" in str(native.lacks("recurrent_sideways"))


def test_the_kernel_of_a_call() -> None:
    cpu = RecurrentSpec("cpu", torch.float32, 8, 8, "scalar", beta=True)
    assert choose("auto", cpu).name == ("native" if WHY is None else "chunked")
    with pytest.raises(
        NotImplementedError, match="kernel native cannot compute this call: native runs on the CPU, v is on cuda"
    ):
        choose("native", cpu._replace(device="cuda"))
    with pytest.raises(ValueError, match=f"kernel must be one of auto, {', '.join(KERNELS)}, got 'none'"):
        choose("none", cpu)
    channels = cpu._replace(values=1, decay="rates", beta=False)
    assert choose("auto", channels, "channel_scan").name == "steps"
    with pytest.raises(ValueError, match="channel_scan: kernel must be one of auto, steps, reference, got 'native'"):
        choose("native", channels, "channel_scan")
    with pytest.raises(NotImplementedError, match="kernel steps cannot compute this call: steps computes heads of one"):
        choose("steps", cpu, "channel_scan")
