"""Who averages the gradients of a model: DistributedDataParallel around its forward, or FSDP2 inside it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Averaging(NamedTuple):
    """What a wrapper makes of gradients: the sum over so many ranks, divided."""

    who: str
    ranks: int
    divisor: float

    def average_over(self, size: int) -> float | None:
        """What makes gradients those of the mean over comms of so many ranks, each of its own loss; None: unknown."""
        return self.divisor * size / self.ranks if self.ranks % size == 0 else None


def by_ddp(model: nn.Module) -> Averaging | None:
    """How DistributedDataParallel, in whose forward this is called, will reduce this pass's gradients of the model."""
    ddp: Any = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync or ddp._comm_hooks:
        return None  # what a hook makes of them only its author knows
    if not any(module is model for module in ddp.module.modules()):
        return None
    ranks = ddp.process_group.size()
    return Averaging("DistributedDataParallel", ranks, ranks)


def by_fsdp(model: nn.Module) -> Averaging | None:
    """How `fully_shard` reduces the gradients of a model, or of the first part of it that it shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp else ():
        if isinstance(module, fsdp.FSDPModule):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            group = state._fsdp_param_group
            if group is not None:
                ranks = group.mesh_info.mesh.size()
                return Averaging("fully_shard", ranks, group.gradient_divide_factor or ranks)
    return None
