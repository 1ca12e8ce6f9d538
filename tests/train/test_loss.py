"""The losses: torch's on one device, whatever rows a rank has, and without the whole of the logits."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.testing import relative_rms
from seqpar.train import cross_entropy, linear_cross_entropy, token_log_probs
from tests.train.rows import IGNORED, E, Largest, T, V, given, grads


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, s: float, z: float, cap: float
) -> Tensor:
    """The mean over all rows, by torch."""
    logits = F.linear(hidden, weight, bias)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    keep = labels != IGNORED
    squares = logits[keep].logsumexp(-1).square().mean()
    return F.cross_entropy(logits, labels, label_smoothing=s, ignore_index=IGNORED) + z * squares


CUTS = {"one rank": [T], "three ranks": [9, 1, 13], "a rank without rows": [11, 0, 12]}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("s", "z", "cap", "biased"), list(product((0.0, 0.1), (0.0, 1e-2), (0.0, 2.0), (False, True))))
@pytest.mark.sampled(3)
def test_shares_add_up_to_the_loss_of_one_device(cuts: list[int], s: float, z: float, cap: float, biased: bool) -> None:
    hidden, weight, bias, labels = given()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    bias = bias if biased else None
    expected = whole(hidden, weight, bias, labels, s=s, z=z, cap=cap)
    expected_grads = grads(expected, *leaves[:2], bias)
    valid = int((labels != IGNORED).sum())
    options = {"label_smoothing": s, "z_loss": z}
    for average_over, kept in ((1, valid), (2, torch.tensor(valid))):
        shares = [
            linear_cross_entropy(
                h, weight, t, bias=bias, valid=kept, softcap=cap, chunk=4, average_over=average_over, **options
            )
            for h, t in zip(hidden.split(cuts), labels.split(cuts))
        ]
        loss = sum(shares) / average_over
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for got, reference in zip(grads(loss, *leaves[:2], bias), expected_grads):
            torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-12)
    if not cap:
        shares = [
            cross_entropy(F.linear(h, weight, bias), t, valid=valid, **options)
            for h, t in zip(hidden.split(cuts), labels.split(cuts))
        ]
        torch.testing.assert_close(sum(shares), expected, rtol=1e-12, atol=1e-12)
        for got, reference in zip(grads(sum(shares), *leaves[:2], bias), expected_grads):
            torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("rows", [0, T])
def test_a_rank_without_labels_has_a_loss_of_zero_that_leads_to_its_rows(linear: bool, rows: int) -> None:
    hidden, weight, _, _ = (x[:rows] if i == 0 else x for i, x in enumerate(given()))
    hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.full((rows,), IGNORED)
    f = linear_cross_entropy(hidden, weight, labels, valid=5, label_smoothing=0.1, z_loss=0.1)
    f = f if linear else cross_entropy(hidden @ weight.t(), labels, valid=5, label_smoothing=0.1, z_loss=0.1)
    assert f.item() == 0.0 and f.requires_grad
    for grad, leaf in zip(grads(f, hidden, weight), (hidden, weight)):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_without_any_label_the_loss_is_what_one_device_has(kind) -> None:
    hidden, weight, _, _ = given()
    hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.full((T,), IGNORED)
    expected = F.cross_entropy(hidden @ weight.t(), labels)
    assert expected.isnan()
    for loss in (
        cross_entropy(hidden @ weight.t(), labels, valid=kind(0)),
        linear_cross_entropy(hidden, weight, labels, valid=kind(0)),
    ):
        assert loss.isnan()
        for got, reference in zip(grads(loss, hidden, weight), grads(expected, hidden, weight)):
            torch.testing.assert_close(got, reference)
        expected = F.cross_entropy(hidden @ weight.t(), labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_errs_no_more_than_torch_does(dtype: torch.dtype, autocast: bool) -> None:
    hidden, weight, _, labels = given()
    valid = int((labels != IGNORED).sum())
    leaves = [x.to(torch.float32 if autocast else dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = F.cross_entropy(exact[0] @ exact[1].t(), labels)
    with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
        naive = F.cross_entropy(F.linear(*leaves).float(), labels)
        ours = linear_cross_entropy(*leaves, labels, valid=valid, chunk=7)
    assert ours.dtype == torch.float32
    least = torch.finfo(dtype).eps / 4
    assert relative_rms(ours.detach(), expected.detach()) <= relative_rms(naive.detach(), expected.detach()) + least
    for got, other, reference, leaf in zip(
        *(grads(f, *x) for f, x in ((ours, leaves), (naive, leaves), (expected, exact))), leaves
    ):
        assert got.dtype == leaf.dtype
        assert relative_rms(got, reference) <= 1.5 * relative_rms(other, reference) + least


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [64, 1024])
def test_sums_over_a_chunk_may_exceed_the_largest_half(chunk: int, autocast: bool) -> None:
    """As where most rows have one label: their gradients add up before they are divided by the rows."""
    g, rows = torch.Generator().manual_seed(0), 1024
    hidden = torch.full((rows, 16), 100.0) + torch.rand(rows, 16, generator=g)
    weight, labels = torch.rand(32, 16, generator=g) / 100, torch.arange(rows) % 7 // 6
    leaves = [x.to(torch.float32 if autocast else torch.float16).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    (expected,) = grads(F.cross_entropy(exact[0] @ exact[1].t(), labels), exact[1])
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = linear_cross_entropy(*leaves, labels, valid=rows, chunk=chunk)
        scored = -token_log_probs(*leaves, labels, chunk=chunk).mean()
    for ours in (loss, scored):
        (got,) = grads(ours, leaves[1])
        assert relative_rms(got, expected) < 2e-3


def test_double_precision_stays_under_autocast() -> None:
    """As in one device's `F.linear`."""
    hidden, weight, _, labels = given()
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*leaves), labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(*leaves, labels, valid=int((labels != IGNORED).sum()), chunk=7)
        scored = token_log_probs(*leaves, labels, chunk=7, ignore_index=IGNORED)
    assert found.dtype == scored.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(-scored.sum() / (labels != IGNORED).sum(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [np.int64(4), np.int32(4)])
def test_labels_are_counted_by_integers_of_numpy_too(count: Any) -> None:
    logits, labels = torch.randn(4, 8), torch.arange(4)
    assert torch.equal(cross_entropy(logits, labels, valid=count), cross_entropy(logits, labels, valid=4))


def test_the_logits_never_exist_as_a_whole() -> None:
    """By what the operators of both passes make, not by what an allocator reports."""
    rows, vocabulary, chunk = 256, 64, 16

    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.arange(rows) % vocabulary
    with Largest(vocabulary) as largest:
        linear_cross_entropy(hidden, weight, labels, valid=rows, chunk=chunk).backward()
        for head in (weight, weight.detach()):
            sum(x.sum() for x in token_log_probs(hidden, head, labels, entropy=True, chunk=chunk)).backward()
    assert largest.elements == chunk * vocabulary


@pytest.mark.parametrize(("rows", "cached"), [(65, 64), (65, 1000), (2, 1), (3, 1), (1, 1), (0, 1)])
def test_how_many_rows_a_core_computes_at_a_time_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, rows: int, cached: int
) -> None:
    vocabulary, made = 64, list[int]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.extend(args[0].shape[:1] if func is torch.ops.aten.logsumexp.default else ())
            return func(*args, **(kwargs or {}))

    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    labels = (torch.arange(rows) % 64).masked_fill(torch.arange(rows) % 5 == 0, IGNORED)
    options = {"valid": 60, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
    whole = linear_cross_entropy(hidden, weight, labels, **options)
    monkeypatch.setattr("seqpar.train.head.CACHED", cached)
    with Watch():
        blocks = linear_cross_entropy(hidden, weight, labels, **options)
    assert torch.equal(whole, blocks)
    for one, other in zip(grads(whole, hidden, weight), grads(blocks, hidden, weight)):
        assert torch.equal(one, other)
    at_most = max(3, 2 * cached * torch.get_num_threads() // vocabulary)
    assert sum(made) == rows and max(made, default=0) <= at_most


def test_half_precision_gradients_do_not_underflow_by_the_number_of_tokens() -> None:
    leaves = [x.to(torch.float16).requires_grad_() for x in given()[:2]]
    *_, labels = given()
    scaler, valid = 2.0**24, 10**8
    (d_hidden, _) = grads(linear_cross_entropy(*leaves, labels, valid=valid, chunk=8) * scaler, *leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    (reference, _) = grads(cross_entropy(exact[0] @ exact[1].t(), labels, valid=valid) * scaler, *exact)
    assert relative_rms(d_hidden, reference) < 2e-3


def test_nothing_is_made_for_gradients_that_nobody_needs() -> None:
    hidden, weight, bias, labels = given()
    assert not linear_cross_entropy(hidden, weight, labels, valid=T, bias=bias).requires_grad
    loss = linear_cross_entropy(hidden, weight, labels, valid=T, bias=bias.requires_grad_())
    (d_bias,) = grads(loss, bias)
    assert d_bias.shape == bias.shape and d_bias.abs().sum() > 0


def test_what_cannot_be_is_refused() -> None:
    hidden, weight, _, labels = given()
    logits = hidden @ weight.t()
    for change in (
        {"valid": -1}, {"valid": 2.5}, {"valid": torch.ones(2)}, {"label_smoothing": 1.5}, {"average_over": 0},
        {"valid": True}, {"valid": torch.tensor(-3)}, {"valid": torch.tensor(True)}, {"valid": torch.tensor(math.nan)},
        {"valid": torch.ones(1)}, {"valid": "9"}, {"label_smoothing": math.nan}, {"z_loss": math.nan},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(change))):
            cross_entropy(logits, labels, **({"valid": T} | change))
        with pytest.raises(ValueError, match=next(iter(change))):
            linear_cross_entropy(hidden, weight, labels, **({"valid": T} | change))
    for rows, kept in ((logits[None], labels[None]), (logits, labels[1:]), (logits, labels.int())):
        with pytest.raises(ValueError, match=r"expected \[T, n\]"):
            cross_entropy(rows, kept, valid=T)
    with pytest.raises(ValueError, match="at least one row"):
        linear_cross_entropy(hidden, weight, labels, valid=T, chunk=0)
    with pytest.raises(ValueError, match=r"expected \[T, E\], \[V, E\]"):
        linear_cross_entropy(hidden, weight.t(), labels, valid=T)
    for bias in (torch.zeros(T, V), torch.zeros(1), torch.zeros(V - 1), torch.zeros(V, 1), torch.zeros(V).long()):
        with pytest.raises(ValueError, match=r"bias \[.*, expected floating point \[11\]"):
            linear_cross_entropy(hidden, weight, labels, valid=T, bias=bias)
    for cap in (-3.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"softcap={cap}"):
            linear_cross_entropy(hidden, weight, labels, valid=T, softcap=cap)

    for change in ({"chunk": 2.5}, {"softcap": None}):
        with pytest.raises(ValueError, match=next(iter(change))):
            linear_cross_entropy(hidden, weight, labels, valid=T, **change)


@pytest.mark.parametrize("call", [partial(linear_cross_entropy, valid=T), token_log_probs])
def test_a_head_on_another_device_is_named(call: Any) -> None:
    hidden, weight, bias, labels = given()
    for name in ("weight", "bias"):
        there = {"weight": weight, "bias": bias}
        there[name] = there[name].to("meta")
        with pytest.raises(ValueError, match=f"the {name} is on meta, hidden on cpu; give both on one device"):
            call(hidden, there["weight"], labels, bias=there["bias"])
    with pytest.raises(ValueError, match="labels on meta, hidden on cpu; give both on one device"):
        call(hidden, weight, labels.to("meta"))


@pytest.mark.parametrize("valid", [0.25, 2.5])
def test_a_count_that_is_no_integer_divides_gradients_too(valid: float) -> None:
    hidden, weight, _, labels = given()
    w = weight.clone().requires_grad_()
    ours, theirs = (
        torch.autograd.grad(loss, w)[0]
        for loss in (
            linear_cross_entropy(hidden, w, labels, valid=torch.tensor(valid)),
            cross_entropy(hidden @ w.t(), labels, valid=torch.tensor(valid)),
        )
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("call", [partial(linear_cross_entropy, valid=T), token_log_probs])
@pytest.mark.parametrize("name", ["logits", "hidden", "labels", "weight", "bias"])
def test_what_is_no_tensor_is_named(name: str, call: Any) -> None:
    hidden, weight, bias, labels = given()
    for other in (np.zeros((T, E)), [0.0] * V, *([] if name == "bias" else [None])):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got"):
            if name == "logits":
                cross_entropy(other, labels, valid=T)
            else:
                arguments = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias, name: other}
                call(**arguments)


def test_a_sum_of_many_chunks_keeps_the_digits_of_each() -> None:
    rows = 4096
    hidden, weight = torch.ones(rows, 1), torch.tensor([[0.0], [-1.0]])
    hidden[0] = 1e8  # beside this row's loss that of another is half a unit of single precision
    labels = torch.ones(rows, dtype=torch.long)
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), labels)
    got = linear_cross_entropy(hidden, weight, labels, valid=rows, chunk=1)
    assert abs(float(got) - float(exact)) < 1e-7 * float(exact)
