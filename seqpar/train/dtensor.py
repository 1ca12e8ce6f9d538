"""What is a DTensor, without loading DTensors, half a second of an import, where nobody has made one."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(x: Tensor) -> bool:
    """Whether x is sharded or replicated over a DeviceMesh."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(x, loaded.DTensor)


def local(x: Any) -> Tensor:
    """What of x lies on this rank."""
    return x.to_local() if is_dtensor(x) else x
