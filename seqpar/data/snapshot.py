"""Whether a batch that was read ahead still has its values, as it has not if its loader fills the same memory anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

VALUES = 1 << 16  # of a tensor that are compared, evenly spread; all of a tensor that has no more
OVERWRITTEN = (
    "prefetch: a batch that was read ahead has been written to since, as by a loader that fills the same tensors "
    "again; yield new tensors for every batch, as a DataLoader does"
)


class Snapshot:
    """Some values of a batch's dense tensors. Those of a GPU are compared only if their version says they changed."""

    def __init__(self, values: Iterable[Any]) -> None:
        several = [x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,))]
        dense = [x for x in several if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta]
        self._tensors = [(x, _version(x), _some(x)) for x in dense if not x.is_quantized]

    def holds(self) -> bool:
        """Whether the tensors have the same values, bit by bit."""
        return all(
            (not x.is_cpu and _version(x) == version) or torch.equal(_some(x), some)
            for x, version, some in self._tensors
        )


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _some(x: Tensor) -> Tensor:
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat[:: max(1, -(-len(flat) // VALUES))].clone().view(torch.uint8)
