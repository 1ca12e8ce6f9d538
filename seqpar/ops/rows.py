"""Taking and adding rows of tensors, by slices where rows are consecutive."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.mask import Memo
from seqpar.plan import Rows


def index(owner: Memo, rows: Rows, device: torch.device) -> slice | Tensor:
    """Rows of a plan as what indexes a tensor on a device; uploaded once and kept with the owner of the array."""
    if isinstance(rows, slice):
        return rows
    # The owner keeps the array alive, so its identity is a key.
    return owner.memo((id(rows), device), lambda: torch.from_numpy(rows).to(device))  # type: ignore[no-any-return]


def take(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Rows of x: a view for a slice, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def add(x: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    """Add to rows of x, none twice: deterministic on every device, which an accumulating index is not."""
    x[rows] = take(x, rows) + values
