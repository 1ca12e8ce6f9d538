"""What is a DTensor, without loading DTensors, half a second of an import, where nobody has made one."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_dtensor(x: Tensor) -> bool:
    """Whether x is sharded or replicated over a DeviceMesh."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(x, loaded.DTensor)


def local(x: Any) -> Tensor:
    """What of x lies on this rank."""
    return x.to_local() if is_dtensor(x) else x


def version(x: Any) -> int:
    """The counter that every change in place of what lies here of x advances."""
    return (x._local_tensor if is_dtensor(x) else x)._version  # type: ignore[no-any-return]


def global_rank() -> int:
    """This process's rank in the default group, by which meshes count; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def beside(x: Any, ranks: frozenset[int]) -> bool:
    """Whether the mesh of a DTensor has no other one of these global ranks: all of them hold the same part of it."""
    return ranks.isdisjoint({int(rank) for rank in x.device_mesh.mesh.flatten()} - {global_rank()})


def alike(x: Any, ranks: frozenset[int]) -> bool:
    """Whether those of these global ranks that are in a DTensor's mesh hold the same part of it, as its replicas do."""
    mesh = x.device_mesh.mesh
    where = x.device_mesh.get_coordinate()
    if where is None:
        return False
    place = [slice(None) if p.is_replicate() else at for p, at in zip(x.placements, where)]
    return ranks.intersection(mesh.flatten().tolist()) <= set(mesh[tuple(place)].flatten().tolist())
