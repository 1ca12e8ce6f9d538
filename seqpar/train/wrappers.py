"""The wrapper that averages a model's gradients: DistributedDataParallel around its forward, or FSDP2 inside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Averaging(NamedTuple):
    """A wrapper's effect on gradients: their sum over ``ranks`` ranks, divided by ``divisor``."""

    who: str
    ranks: int
    divisor: float

    def average_over(self, size: int) -> float | None:
        """The `average_over` for which gradients are the mean over comms of ``size`` ranks; None if unknown."""
        return self.divisor * size / self.ranks if self.ranks % size == 0 else None


def by_ddp(model: nn.Module) -> Averaging | None:
    """The reduction of this pass's gradients by DistributedDataParallel, called inside its forward."""
    ddp: Any = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync or ddp._comm_hooks:
        return None  # only its author knows what a hook does
    if not any(module is model for module in ddp.module.modules()):
        return None
    ranks = ddp.process_group.size()
    return Averaging("DistributedDataParallel", ranks, ranks)


def by_fsdp(model: nn.Module) -> Averaging | None:
    """The reduction of a model's gradients by `fully_shard`, or of the first part of it that is sharded."""
    for module in sharded_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            ranks = group.mesh_info.mesh.size()
            return Averaging("fully_shard", ranks, group.gradient_divide_factor or ranks)
    return None


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules of a model that `fully_shard` was called for."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (module for module in model.modules() if isinstance(module, fsdp.FSDPModule)) if fsdp else iter(())
