"""How far two runs of a model may lie apart, and how far they do."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROUGH = 0.05  # of the largest result, where products are of 16 bits
LOW = {torch.bfloat16, torch.float16}


def is_rough(model: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Whether equal rows may differ by more than single precision rounds."""
    tensors = list(tensors)
    kinds = {x.device.type for x in (*tensors, *model.parameters())} - {"meta"}
    return (
        any(torch.is_autocast_enabled(kind) for kind in kinds)
        or any(x.dtype in LOW for x in (*model.parameters(), *tensors))
        or torch.get_float32_matmul_precision() != "highest"
    )
