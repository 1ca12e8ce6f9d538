"""Sketches of gradients: how far two tensors are apart, from a few sums of each."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar.ops.core.compared import SUMS, check_gradient, sketch
from seqpar.testing import run_threads
from tests.ranks import errors


def apart(x: Tensor, y: Tensor) -> float:
    """The squared norm of x - y, as sketches tell it."""
    return sum((a - b) ** 2 for a, b in zip(sketch(x)[1:], sketch(y)[1:]))


def test_a_sketch_tells_how_far_tensors_are_apart() -> None:
    x, y = torch.randn(2, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert sketch(x)[0] == torch.sum(x * x)
    assert apart(x, x) == 0
    assert 0.5 < apart(x, y) / float((x - y).square().sum()) < 2
    z = torch.complex(x, y)
    assert torch.isclose(torch.tensor(sketch(z)[0]).double(), z.abs().square().sum())
    assert apart(z, z.conj()) > 0 == apart(z, z.clone())


def test_single_elements_in_other_places_differ() -> None:
    """A gradient of one element, as of a loss over one logit, in places that a period of the sums would confuse."""
    one = torch.eye(40 * SUMS, dtype=torch.float64)[::SUMS]
    pairs = [(a, b) for a in range(len(one)) for b in range(a)]
    unnoticed = sum(apart(one[a], one[b]) == 0 for a, b in pairs)
    assert unnoticed < 0.04 * len(pairs)  # 1 / (2 SUMS) = 0.016 are expected


DIFFERENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "target": lambda grad, other: other,
    "factor": lambda grad, other: 2 * grad,
    "order of the samples": lambda grad, other: grad.view(2, -1).flip(0).flatten(),
    "one place in a hundred": lambda grad, other: torch.where(torch.arange(len(grad)) % 100 == 0, other, grad),
}


def normal(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("size", [1_000, 1 << 18])
@pytest.mark.parametrize("what", DIFFERENT)
def test_gradients_of_an_output_of_any_size_are_compared(what: str, size: int) -> None:
    grads = [normal(size, 1), normal(size, 2)]
    grads[1] = DIFFERENT[what](*grads)
    for said in errors(lambda comm: check_gradient("test", comm, grads[comm.rank])):
        assert "test: the gradient of the output differs between rank 0 and rank 1" in said


@pytest.mark.parametrize("size", [30, 1 << 18])
def test_gradients_may_differ_in_their_last_digits(size: int) -> None:
    grad = normal(size, 1)
    up = torch.randint(2, (size,), generator=torch.Generator().manual_seed(0)).short()
    grads = [grad, (grad.view(torch.int16) + up).view(torch.bfloat16)]
    run_threads(2, lambda comm: check_gradient("test", comm, grads[comm.rank]))
