"""Sketches of gradients: how far two tensors are apart, from a few sums of each."""

import torch
from torch import Tensor

from seqpar.ops.core.compared import SUMS, sketch


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
