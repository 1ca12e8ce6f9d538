"""NCCL for `GroupComm`: one GPU for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def gpu_of(group: Any) -> torch.device:
    """The GPU that this rank uses: the one that the group is bound to, else the current one."""
    bound = group.bound_device_id
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else torch.device(bound)


def check_gpus(name: str, gpus: Sequence[str]) -> None:
    """Raise ValueError, beginning with `name`, if ranks share a GPU, which NCCL refuses. gpus: an id for each rank."""
    for gpu in gpus:
        ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
        if gpu and len(ranks) > 1:
            raise ValueError(
                f"{name}: ranks {', '.join(map(str, ranks))} all use GPU {gpu}, expected a GPU for each rank; call "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before you make the comm'
            )
