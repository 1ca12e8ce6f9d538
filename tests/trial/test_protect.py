"""What trials put back, and which tensors they leave as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqpar.trial import protect
from seqpar.trial.protect import saved


class Holding(nn.Module):
    """A module with a plain tensor in an attribute."""

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.held = held


def test_tensors_that_are_expanded_views_of_others_or_hold_nan_are_put_back() -> None:
    base, nan = torch.zeros(4), torch.tensor([torch.nan, 1.0])
    with saved(Holding(base.expand(3, 4)), [base, nan, base[1:]]):
        base += 1
        nan[1] = 2
    assert base.tolist() == [0.0] * 4 and nan[1] == 1 and nan.isnan()[0]


def test_tensors_of_inference_mode_are_put_back_inside_of_it() -> None:
    with torch.inference_mode():
        x, nan = torch.zeros(3), torch.full((2,), torch.nan)
    with saved(Holding(x), [nan]):
        pass
    with torch.inference_mode(), saved(Holding(x), [nan]):
        x += 1
    assert x.tolist() == [0.0] * 3


def test_tensors_whose_values_cannot_be_kept_are_left_alone(monkeypatch) -> None:
    freed = torch.zeros(8)
    part = freed[2:6]
    freed.untyped_storage().resize_(0)  # as FSDP1 leaves views of its parameters
    small = torch.zeros(4, dtype=torch.uint8).view(torch.uint4)
    with saved(Holding(part), [small, torch.empty(2, device="meta"), torch.zeros(2).to_sparse()]):
        pass
    monkeypatch.setattr(protect, "LARGEST", 64)
    large, repeated = torch.zeros(17), torch.zeros(1).expand(1 << 40)
    with saved(Holding(large), [repeated]):
        large += 1
        repeated[:1] += 1
    assert large.tolist() == [1.0] * 17, "too large to be kept"
    assert repeated[0] == 0


def test_generators_and_lists_in_arguments_are_put_back() -> None:
    generator, several = torch.Generator().manual_seed(1), [1]
    before = generator.get_state()
    with saved(nn.Linear(2, 2), [{"inside": [generator, several]}]):
        torch.rand(3, generator=generator)
        several.append(2)
    assert torch.equal(generator.get_state(), before) and several == [1]
