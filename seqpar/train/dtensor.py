"""Parts and versions of DTensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from seqpar.ops.core.collective_op import is_dtensor
from seqpar.private.torch import local_tensor


def local(x: Any) -> Tensor:
    """The part of x on this rank."""
    return x.to_local() if is_dtensor(x) else x


def version(x: Any) -> int:
    """The version counter of x, which every change in place advances; of a DTensor, together with its local part's.

    0 for a tensor of inference mode, which counts no versions.
    """
    if x.is_inference():
        return 0
    return x._version + (local_tensor(x)._version if is_dtensor(x) else 0)  # type: ignore[no-any-return]


def global_rank() -> int:
    """This process's rank in the default group, which meshes use; 0 without a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def mesh_apart(x: Any, ranks: frozenset[int]) -> bool:
    """Whether a DTensor's mesh has no other of these global ranks than this one: then all hold the same part of it."""
    return ranks.isdisjoint({int(rank) for rank in x.device_mesh.mesh.flatten()} - {global_rank()})


def alike(x: Any, ranks: frozenset[int]) -> bool:
    """Whether those of these global ranks that are in a DTensor's mesh hold the same part of it, as replicas do."""
    mesh = x.device_mesh.mesh
    where = x.device_mesh.get_coordinate()
    if where is None:
        return False
    place = [slice(None) if p.is_replicate() else at for p, at in zip(x.placements, where)]
    return ranks.intersection(mesh.flatten().tolist()) <= set(mesh[tuple(place)].flatten().tolist())
