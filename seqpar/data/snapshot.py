"""Whether a batch that was read ahead still has its values, or its loader has filled the same memory again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from seqpar.ops.core.compared import version_of

VALUES = 1 << 16  # of a batch that are compared, evenly spread over its tensors; all of those that have few
FEWEST = 1 << 10  # of a tensor
WHOLE = {
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


class OverwrittenError(ValueError):
    """A batch that was read ahead has other values now."""

    def __init__(self) -> None:
        super().__init__(
            "prefetch: a batch that was read ahead has been written to since, as by a loader that fills the same "
            "tensors again; yield new tensors for every batch, as a DataLoader does"
        )


class Snapshot:
    """Some values of a batch's dense tensors. Those of a GPU are compared only if their version says they changed.

    Where only some values of a tensor are kept, its version shows writes to the others, unless other tensors have the
    same memory: a loop may write to its own part of a tensor that batches share.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        several = [x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,))]
        dense = [x for x in several if isinstance(x, Tensor) and _is_dense(x)]
        self._most = max(FEWEST, VALUES // max(1, len(dense)))
        self._tensors = [(x, version_of(x), _some(x, self._most)) for x in dense]

    def holds(self) -> bool:
        """Whether the tensors have the same values, bit by bit."""
        return all(self._held(*each) for each in self._tensors)

    def _held(self, x: Tensor, version: int | None, some: Tensor) -> bool:
        if version_of(x) == version:
            return not x.is_cpu or torch.equal(_some(x, self._most), some)
        alone = x.untyped_storage().nbytes() == x.nbytes
        return not (alone and x.numel() > self._most) and torch.equal(_some(x, self._most), some)


def _is_dense(x: Tensor) -> bool:
    dense = x.layout == torch.strided and not (x.is_meta or x.is_nested or x.is_quantized)
    return dense and (x.is_floating_point() or x.is_complex() or x.dtype in WHOLE)


def _some(x: Tensor, most: int) -> Tensor:
    """The bytes of at most so many values."""
    x = x.detach().resolve_conj().resolve_neg()
    step = max(1, -(-x.numel() // most))
    while math.gcd(step, x.numel()) > 1:  # so that no column, of any width, is left out
        step += 1
    if x.is_contiguous() or step == 1:
        some = x.reshape(-1)[::step].clone()
    else:  # which would copy all of it
        some = x[torch.unravel_index(torch.arange(0, x.numel(), step, device=x.device), x.shape)]
    return some.view(torch.uint8)
