"""What torch wraps around a model: DistributedDataParallel and FSDP2, which average gradients, and its DTensors.

A rank's loss is a share, and shares are summed. So under a wrapper that averages, losses must be multiplied by
`average_over`; otherwise gradients are too small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seqpar.ops.core.collective_op import is_dtensor
from seqpar.private import torch as torch_private


class Averaging(NamedTuple):
    """A wrapper's effect on gradients: their sum over the global ranks ``ranks``, divided by ``divisor``.

    sharded: whether parameters are shards, and those that are not are left alone.
    """

    who: str
    ranks: frozenset[int]
    divisor: float
    sharded: bool

    def covers(self, ranks: frozenset[int], size: int) -> bool:
        """Whether all ranks of a comm are among the wrapper's, so that it reduces gradients over the comm.

        ranks: the comm's global ranks; if they are fewer than its size, they are not known, and the numbers decide.
        """
        return ranks <= self.ranks if len(ranks) == size else len(self.ranks) % size == 0

    def average_over(self, size: int) -> float:
        """The `average_over` for which gradients are the mean over comms of ``size`` ranks that the wrapper covers."""
        return self.divisor * size / len(self.ranks)


def by_ddp(model: nn.Module) -> Averaging | None:
    """The reduction of this pass's gradients by DistributedDataParallel, called inside its forward."""
    ddp: Any = torch_private.active_ddp(DistributedDataParallel)()
    if ddp is None or not ddp.require_backward_grad_sync or torch_private.comm_hooks(ddp):
        return None  # only its author knows what a hook does
    if not any(module is model for module in ddp.module.modules()):
        return None
    ranks = frozenset(dist.get_process_group_ranks(ddp.process_group))
    return Averaging("DistributedDataParallel", ranks, len(ranks), sharded=False)


def by_fsdp(model: nn.Module, *, trained: bool = False) -> Averaging | None:
    """The reduction of a model's gradients by `fully_shard`, or of its first sharded part; if trained, not frozen."""
    for group in _groups(model):
        if trained and not any(p.sharded_param.requires_grad for p in group.fsdp_params):
            continue
        ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
        return Averaging("fully_shard", ranks, group.gradient_divide_factor or len(ranks), sharded=True)
    return None


def shards(model: nn.Module) -> dict[int, Tensor]:
    """The shards, which optimizers have, by ids of the parameters that `fully_shard` makes whole of them."""
    every = (p for group in _groups(model) for p in group.fsdp_params)
    whole = ((torch_private.unsharded(p, None), p.sharded_param) for p in every)
    return {id(p): shard for p, shard in whole if p is not None}


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules of a model that `fully_shard` was called for."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (module for module in model.modules() if isinstance(module, fsdp.FSDPModule)) if fsdp else iter(())


def gathered(module: nn.Module) -> str:
    """What gathers weights in calls of a module, or of modules in it, by name; "" if their weights are there."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    for name, part in module.named_modules():
        who = f"{name} ({type(part).__name__})" if name else "it"
        if isinstance(part, kinds):
            return f"{who} is a unit of FSDP"
        if any(hasattr(p, "ds_id") for p in part.parameters(recurse=False)):
            return f"{who} is sharded by DeepSpeed's ZeRO 3"
    return ""


def in_flat(p: object) -> bool:
    """Whether a parameter holds a shard of `FullyShardedDataParallel` (FSDP1): a flat one, or one inside that."""
    return torch_private.flattened(p, False)  # type: ignore[no-any-return]


def _groups(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters that `fully_shard` reduces together."""
    for module in sharded_modules(model):
        yield from torch_private.groups_of(module)


def local(x: Any) -> Tensor:
    """The part of x on this rank."""
    return x.to_local() if is_dtensor(x) else x


def version(x: Any) -> int:
    """The version counter of x, which every change in place advances; of a DTensor, together with its local part's.

    0 for a tensor of inference mode, which counts no versions.
    """
    if x.is_inference():
        return 0
    return x._version + (torch_private.local_tensor(x)._version if is_dtensor(x) else 0)  # type: ignore[no-any-return]


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
