"""How large the elements of rows are: a scale for each, so that a large element hides no change of others.

An element is judged by its own size, by its column's, or by a part of its row's, whichever is largest, since rounding
follows what the element was summed of. Columns and rows count by the median of distinct sizes. So a number that masks
many elements, such as -1e9 in logits, counts once, and sizes of 0 not at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

PART = 0.01  # of a row's size: a smaller element is the difference of larger ones, and has their rounding
SOME = 1024  # columns, enough to tell a row's size
BESIDE = 30  # times an element's own size, at most, among much larger elements
TINY = 1e-30


def of_columns(x: Tensor) -> Tensor:
    """The size of the elements of each column of [rows, columns]."""
    size = _finite(x)
    some = size[:, :: -(-size.shape[1] // SOME)]
    return torch.maximum(_upper(size), PART * _lower(some.T).median()).clamp(min=TINY)


def units(x: Tensor, varies: Tensor) -> Tensor:
    """The unit of the deviation of each element [rows, columns]: the largest size, or some of its own if that is less.

    varies: columns that have other elements than constants.
    """
    size = _finite(x)
    own = size.maximum(_upper(size)).maximum(PART * _lower(size.T)[:, None])
    largest = own[:, varies].max() if bool(varies.any()) else own.max()
    return torch.minimum(largest, BESIDE * own).clamp(min=TINY)


def _finite(x: Tensor) -> Tensor:
    return x.abs().masked_fill(~x.isfinite(), 0.0)


def _lower(size: Tensor) -> Tensor:
    """The lower median of distinct sizes in each column."""
    return _distinct(size).nanmedian(0).values.nan_to_num(0.0)


def _upper(size: Tensor) -> Tensor:
    """The upper median of distinct sizes in each column."""
    return -(-_distinct(size)).nanmedian(0).values.nan_to_num(0.0)


def _distinct(size: Tensor) -> Tensor:
    """The sizes of each column in order, NaN for those that are 0 or the same as one before."""
    size = size.sort(0).values
    again = torch.cat([torch.zeros_like(size[:1], dtype=torch.bool), size[1:] == size[:-1]])
    return size.masked_fill(again | (size == 0), torch.nan)
