"""`rotary`, the verb: gradients of any order, torch.compile, positions of a layout, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import seqpar
from seqpar.facts.layout import Layout
from seqpar.ops.attention.rotary import rotary


def inputs(dtype: torch.dtype = torch.float64, dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(5, 2, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.requires_grad_(), torch.tensor([0, 3, 1, 100, 7]), torch.tensor([1.0, 0.25])


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_first_and_second_order(interleaved) -> None:
    x, positions, freq = inputs()

    def turned(x: Tensor) -> Tensor:
        return rotary(x, positions, freq, interleaved=interleaved, scaling=1.5)

    assert torch.autograd.gradcheck(turned, x)
    assert torch.autograd.gradgradcheck(turned, x)


def test_scores_depend_on_distance_alone() -> None:
    q, positions, freq = inputs(dim=4)
    k = q.detach().flip(0)
    near, far = (torch.einsum("ihd,jhd->hij", rotary(q, p, freq), rotary(k, p, freq)) for p in
                 (positions, positions + 4096))  # fmt: skip
    torch.testing.assert_close(near, far, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(near, torch.einsum("ihd,jhd->hij", q, k))


def test_a_rank_turns_its_rows_as_the_whole_batch_is_turned() -> None:
    layout = Layout.zigzag([9, 14], 3)
    x = torch.randn(23, 2, 6, generator=torch.Generator().manual_seed(0))
    freq = torch.tensor([1.0, 0.25])
    whole = rotary(x, torch.arange(23), freq)
    for rank in range(3):
        at = torch.from_numpy(layout.positions(rank))
        assert torch.equal(rotary(x[at], at, freq), whole[at])


def test_gradients_that_are_one_number_everywhere() -> None:
    """The gradient of a sum has strides of zero."""
    x, positions, freq = inputs()
    (dense,) = torch.autograd.grad(rotary(x, positions, freq), x, torch.ones_like(x))
    (expanded,) = torch.autograd.grad(rotary(x, positions, freq).sum(), x)
    assert torch.equal(dense, expanded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.sampled(3)
def test_the_operator_keeps_torchs_contract(dtype, interleaved) -> None:
    x, positions, freq = inputs(dtype)
    samples = [x, x.detach()[1:1], x.detach().transpose(0, 1).contiguous().transpose(0, 1)]
    for sample in samples:
        args = (sample, positions[: len(sample)], freq, interleaved, 1.25, False)
        result = torch.library.opcheck(torch.ops.seqpar.rotary.default, args)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_without_a_break_it_gives_the_same_bits() -> None:
    x, positions, freq = inputs(torch.float32)

    def model(x: Tensor) -> Tensor:
        return rotary(2 * x, positions, freq, scaling=1.5).square()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for function in (model, compiled):
        out = function(x)
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, p, f: (x[0], p, f), ValueError, r"expected x \[T, H, D\].*got x torch.float64\[2, 6\] on cpu"),
        (lambda x, p, f: (x, p[1:], f), ValueError, r"expected x \[T, H, D\], positions \[T\].*int64\[4\]"),
        (lambda x, p, f: (x, p, f[None]), ValueError, r"frequencies \[R/2\]"),
        (lambda x, p, f: (x, p, torch.ones(4)), ValueError, "2 \\* 4 frequencies for heads of 6"),
        (lambda x, p, f: (x.to(torch.complex64), p, f), ValueError, "x must be one of .*complex64"),
        (lambda x, p, f: (x, p, f.long()), ValueError, "frequencies floating point.*int64"),
        (lambda x, p, f: (x, p.float().requires_grad_(), f), ValueError, "positions must be int32 or int64.*float32"),
        (lambda x, p, f: (x, p.to("meta"), f), ValueError, "must be on one device.*meta"),
        (lambda x, p, f: (x, p, f.requires_grad_()), NotImplementedError, "frequencies have no gradient; detach them"),
        (lambda x, p, f: (None, p, f), TypeError, "rotary: x must be a tensor, got None"),
        (lambda x, p, f: (x, p, f.numpy()), TypeError, r"rotary: frequencies must be a tensor, got array\("),
        (lambda x, p, f: (x.to_sparse(), p, f), NotImplementedError, "rotary got a tensor of layout torch.sparse_coo"),
        (lambda x, p, f: (torch.nested.nested_tensor([x]), p, f), NotImplementedError, "rotary got a nested tensor"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message) -> None:
    with pytest.raises(error, match=message):
        rotary(*change(*inputs()))


@pytest.mark.parametrize("scaling", [float("nan"), float("inf")])
def test_a_scaling_is_finite(scaling) -> None:
    with pytest.raises(ValueError, match="scaling must be finite"):
        rotary(*inputs(), scaling=scaling)


def test_forward_mode_and_transforms_are_refused() -> None:
    x, positions, frequencies = torch.ones(3, 2, 4), torch.arange(3), torch.ones(2)
    for transform in (
        lambda: torch.func.jvp(lambda y: seqpar.rotary(y, positions, frequencies), (x,), (x,)),
        lambda: torch.func.grad(lambda y: seqpar.rotary(y, positions, frequencies).sum())(x),
        lambda: torch.func.vmap(lambda y: seqpar.rotary(y, positions, frequencies))(x[None]),
    ):
        with pytest.raises(NotImplementedError, match="rotary inside a transform of torch.func"):
            transform()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="rotary has no forward-mode derivative"):
        seqpar.rotary(forward_ad.make_dual(x, x), positions, frequencies)
