"""Gradients of parameters that are the same on every rank, and their norm.

A rank's backward leaves the gradient of its share of the loss; their sum over ranks is that of the loss. Under DDP and
FSDP2 the wrapper reduces them and only the norm is asked for here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seqpar.comm import Comm, Tag
from seqpar.ops.agree import signature
from seqpar.train.dtensor import is_dtensor, local
from seqpar.train.sums import flattened, sum_

BUCKET_BYTES = 1 << 26


def sync_gradients(parameters: Tensor | Iterable[Tensor], comm: Comm, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Put the sum over ranks in place of every parameter's gradient: the same bits on all ranks. A collective.

    parameters: the same on every rank, in one order; each is taken once. comm: all ranks that hold a copy of them, not
    only those that share a sequence. A parameter without a gradient on some ranks counts as zero there and gets the
    gradient of the others; without one on any rank it stays so. fp16 and bf16 gradients are summed in fp32.
    bucket_bytes: of gradients that travel together; beside the gradients there are two buckets of memory. Each rank
    sends ``2 (n - 1) / n`` of the gradients' bytes on n ranks.

    After several backward passes (micro-batches) call it once, after the last.

    Raises: ValueError if ranks differ in the parameters; NotImplementedError for sharded parameters, which FSDP2 has
    reduced already, and for sparse gradients. Both on every rank and before any gradient moves.
    """
    several = _once(parameters)
    shapes = [(list(p.shape), str(p.dtype), p.device.type) for p in several]
    digest = signature({"parameters": shapes, "bucket bytes": bucket_bytes}, "sync_gradients")
    # which ranks have which gradients is news of every step, so the agreement on the parameters rides along
    found = comm.gather("sync_gradients", (digest, [p.grad is not None for p in several]), _refusal(several))
    for rank, (other, _) in enumerate(found):
        if other != found[0][0]:
            raise ValueError(
                f"sync_gradients: rank {rank} has other parameters than rank 0, or another bucket_bytes; give every "
                f"rank the same ones in the same order; here they are {len(several)}, {shapes!r:.500}"
            )
    present = [any(flags) for flags in zip(*(flags for _, flags in found))]
    call = comm.next_call()
    if comm.size == 1:
        return
    reduced = [p for p, some in zip(several, present) if some]
    for index, bucket in enumerate(_buckets(reduced, bucket_bytes)):
        flat = flattened([torch.zeros_like(p) if p.grad is None else p.grad for p in bucket], comm)
        sum_(flat, comm, Tag(digest, call, index, 0))
        pieces = flat.split([p.numel() for p in bucket] + [flat.numel() - sum(p.numel() for p in bucket)])
        for p, piece in zip(bucket, pieces):
            if p.grad is None:
                p.grad = torch.empty_like(p, requires_grad=False)
            with torch.no_grad():
                p.grad.copy_(piece.view(p.shape))


def _refusal(parameters: list[Tensor]) -> Exception | None:
    """What is wrong with this rank's parameters."""
    for index, p in enumerate(parameters):
        what = f"parameter {index} of shape {list(p.shape)}"
        if is_dtensor(p):
            return NotImplementedError(
                f"sync_gradients: {what} is a DTensor with placements {p.placements}; what shards it (fully_shard) has "
                "reduced its gradient: leave it out"
            )
        if p.grad is not None and (p.grad.layout != torch.strided or p.grad.dtype != p.dtype):
            return NotImplementedError(
                f"sync_gradients: {what} has a gradient of layout {p.grad.layout} and dtype {p.grad.dtype}; expected a "
                f"dense one of {p.dtype}"
            )
    return None


def _buckets(parameters: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Parameters of one dtype and device, in their order, as many together as fit `size` bytes; at least one."""
    kinds: dict[object, list[Tensor]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    for several in kinds.values():
        bucket: list[Tensor] = []
        held = 0
        for p in several:
            if bucket and held + p.nbytes > size:
                yield bucket
                bucket, held = [], 0
            bucket.append(p)
            held += p.nbytes
        yield bucket


def grad_norm(parameters: Tensor | Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, fp32 or fp64, the same on every rank. Parameters without one count as 0.

    Plain parameters are whole on every rank (after `sync_gradients` or DDP) and nothing moves; of DTensors (FSDP2,
    HSDP, tensor parallel) the shards' parts are summed over the dimensions of the mesh that shard them, and only over
    these. A collective if there are DTensors. norm_type: at least 1, or infinity.

    Raises: ValueError for another norm_type; NotImplementedError for gradients that are still partial sums.
    """
    if not norm_type >= 1:
        raise ValueError(f"grad_norm: norm_type={norm_type}; expected at least 1, or infinity")
    largest = math.isinf(norm_type)
    grads = [p.grad for p in _once(parameters) if p.grad is not None]
    if not grads:
        return torch.zeros(())
    device = grads[0].device
    parts: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        x = local(grad)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        part = torch.linalg.vector_norm(x, norm_type, dtype=wide) if x.numel() else torch.zeros((), dtype=wide)
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


def _sharding(grad: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh of a DTensor and its dimensions that shard it; None where every rank has it whole."""
    if not is_dtensor(grad):
        return None
    if any(placement.is_partial() for placement in grad.placements):
        raise NotImplementedError(
            f"grad_norm: a gradient of shape {list(grad.shape)} has placements {grad.placements}, sums that are not "
            "reduced yet; redistribute it to Shard or Replicate"
        )
    return grad.device_mesh, tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; returns the norm before. As `grad_norm`.

    Raises: RuntimeError for a norm that is not finite, if asked to, on every rank; and what `grad_norm` does.
    """
    several = _once(parameters)
    norm = grad_norm(several, norm_type=norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm: the norm of the gradients is {norm.item()}; nothing was scaled")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in several:
        if p.grad is not None:
            grad = local(p.grad)
            grad.mul_(scale.to(grad.device))
    return norm


def _once(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, in order."""
    return list(dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters))
