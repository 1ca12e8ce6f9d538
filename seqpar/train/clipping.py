"""The norm of all gradients, and scaling them to a norm, equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqpar.comm.entry import uncompiled
from seqpar.kernels import acc_dtype
from seqpar.ops.core.collective_op import is_dtensor
from seqpar.private import torch as torch_private
from seqpar.train.checks import remark
from seqpar.train.gradients import each_once, is_writable, separate
from seqpar.train.wrappers import in_flat, local


@uncompiled
@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, fp32 or fp64, equal on every rank. No gradient counts as 0.

    Plain parameters are whole on every rank (after `sync_gradients` or DDP), and nothing is sent. For DTensors (FSDP2,
    HSDP, tensor parallel) the shards' norms are summed over the mesh dimensions that shard them, and only over these. A
    collective if there are DTensors. norm_type: at least 1, or infinity.

    Raises: ValueError for another norm_type; NotImplementedError for gradients that are sparse or still partial sums,
    and for shards of FSDP1.
    """
    try:
        norm_type = float(norm_type)  # torch takes "inf" too
    except (TypeError, ValueError):
        raise ValueError(f"grad_norm: norm_type={norm_type!r:.200}, expected a number") from None
    if not norm_type >= 1:
        raise ValueError(f"grad_norm: norm_type={norm_type}, expected at least 1, or infinity")
    largest = math.isinf(norm_type)
    several = each_once(parameters)
    if (flat := next(filter(in_flat, several), None)) is not None:
        raise NotImplementedError(
            f"grad_norm: a parameter of shape {list(flat.shape)} holds a shard of FullyShardedDataParallel "
            "over ranks that are not known; call the wrapper's own clip_grad_norm_(max_norm), which returns the norm"
        )
    grads = [p.grad for p in several if p.grad is not None]
    if not grads:
        return torch.zeros((), device="cpu")
    for grad in grads:
        if grad.layout != torch.strided:
            raise NotImplementedError(
                f"grad_norm: a gradient of shape {list(grad.shape)} has layout {grad.layout}, expected a dense one; "
                "give p.grad = p.grad.to_dense() before"
            )
    device = grads[0].device
    norms = _norms([local(grad) for grad in grads], norm_type)
    parts: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad, part in zip(grads, norms, strict=True):
        parts.setdefault(_sharding(grad), []).append(part.to(device))
    totals = []
    for sharding, several in parts.items():
        stacked = torch.stack([part.double() for part in several])
        total = stacked.max() if largest else stacked.pow(norm_type).sum()
        for dim in sharding[1] if sharding else ():
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(total, op, group=sharding[0].get_group(dim))
        totals.append(total)
    total = torch.stack(totals)
    total = total.max() if largest else total.sum().pow(1 / norm_type)
    return total if any(grad.dtype == torch.float64 for grad in grads) else total.float()


def _norms(several: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each tensor, in its accumulation dtype; on CUDA a few launches for all of a kind."""
    norms = [x.new_zeros((), dtype=acc_dtype(x.dtype).to_real()) for x in several]
    for indices in _by_kind(several):
        kind = [several[index] for index in indices]
        for index, norm in zip(indices, torch_private.foreach_norm(kind, norm_type, dtype=acc_dtype(kind[0].dtype))):
            norms[index] = norm
    return norms


def _by_kind(several: list[Tensor]) -> Iterable[list[int]]:
    """The indices of tensors that have elements, by device and dtype, since operators on lists take one kind."""
    kinds: dict[object, list[int]] = {}
    for index, x in enumerate(several):
        if x.numel():
            kinds.setdefault((x.device, x.dtype), []).append(index)
    return kinds.values()


def _sharding(grad: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """A DTensor's mesh and the mesh dimensions that shard it; None if every rank has all of it."""
    if not is_dtensor(grad):
        return None
    if any(placement.is_partial() for placement in grad.placements):
        raise NotImplementedError(
            f"grad_norm: a gradient of shape {list(grad.shape)} has placements {grad.placements}, sums that are not "
            "reduced yet; redistribute it to Shard or Replicate"
        )
    return grad.device_mesh, tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())


@uncompiled
@torch.no_grad()
def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; returns the norm before. As `grad_norm`.

    Raises: RuntimeError for a norm that is not finite, if asked to, on every rank; and what `grad_norm` does.
    """
    several = each_once(parameters)
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        max_norm = max_norm.reshape(())
    elif not isinstance(max_norm, (int, float)):
        raise TypeError(f"clip_grad_norm: max_norm must be a number, got {max_norm!r:.200}")
    norm = grad_norm(several, norm_type=norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm: the norm of the gradients is {norm.item()}, and nothing was scaled")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with remark(several):
        separate(several)
        parts = []
        for p in several:
            if (grad := p.grad) is not None:
                if not is_writable(local(grad)):
                    p.grad = grad = grad.clone(memory_format=torch.contiguous_format)
                parts.append(local(grad))
        for indices in _by_kind(parts):
            torch_private.foreach_mul_([parts[index] for index in indices], scale.to(parts[indices[0]].device))
    return norm
