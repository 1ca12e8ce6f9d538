"""The sizes by which elements are judged, in rows that have numbers far larger than others."""

from __future__ import annotations

import pytest
import torch

from seqpar.trial.sizes import BESIDE, PART, of_columns, units

ROWS = torch.randn(64, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
EVERY = torch.ones(40, dtype=torch.bool)


@pytest.mark.parametrize("large", [-1e9, -torch.inf, torch.nan])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_numbers_that_mask_change_no_size(large: float, share: float) -> None:
    masked = torch.rand(ROWS.shape, generator=torch.Generator().manual_seed(1)) < share
    x = ROWS.masked_fill(masked, large)
    assert (of_columns(x) < 4).all() and (of_columns(x) > 0.1).all()
    assert (units(x, EVERY)[~masked] < 4 * BESIDE).all()


def test_columns_have_their_own_sizes_down_to_a_part_of_the_rows() -> None:
    x = ROWS * torch.logspace(0, -6, 40)
    sizes = of_columns(x)
    assert (sizes[:10] < 3 * torch.logspace(0, -6, 40)[:10]).all()
    typical = x.abs().median(1).values.median()
    assert torch.allclose(sizes.min(), PART * typical, rtol=0.1)


def test_without_much_larger_elements_the_largest_is_the_unit_of_all() -> None:
    unit = units(ROWS, EVERY)
    assert (unit[ROWS.abs().argmax() // 40] == ROWS.abs().max()).all() and unit.median() == ROWS.abs().max()


def test_columns_that_are_the_same_in_all_rows_are_no_unit() -> None:
    x = torch.cat([ROWS, torch.full((64, 1), 1e3, dtype=torch.float64)], 1)
    assert (units(x, x[0] != x[1]) == units(ROWS, EVERY).max()).any()
    assert units(x, x[0] != x[1]).max() == ROWS.abs().max()


def test_zeros_have_units_too() -> None:
    assert (units(torch.zeros(3, 4), torch.zeros(4, dtype=torch.bool)) > 0).all()
