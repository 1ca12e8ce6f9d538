"""Sums over ranks of the gradients of replicated parameters.

Backward leaves the gradient of a rank's share of the loss; the sum over ranks is the gradient of the loss. DDP and
FSDP2 reduce gradients themselves; under them only the norm is needed from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.comm import Comm, PeerError, Tag
from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.comm.protocol import has_memory
from seqpar.facts.value import integer
from seqpar.ops.core.agreement import abort_on_error, check_comm, digest_of_call, remember
from seqpar.ops.core.collective_op import is_dtensor
from seqpar.private import torch as torch_private
from seqpar.train.checks import checks_of, mark_summed, summed_already
from seqpar.train.sums import adds, sum_in_place
from seqpar.train.wrappers import Averaging, global_rank, in_flat, local, mesh_apart

BUCKET_BYTES = 1 << 26


@uncompiled
def sync_gradients(parameters: Tensor | Iterable[Tensor], comm: Comm, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace every parameter's gradient by its sum over ranks, with the same bits on all ranks. A collective.

    parameters: the same on every rank, in the same order; duplicates count once. comm: all ranks that hold a copy of
    them, not only those that share a sequence. A parameter without a gradient counts as zero on that rank and
    gets the sum; without a gradient on any rank it gets none. fp16 and bf16 gradients are summed in fp32; the same
    gradients in the same buckets give the same bits. bucket_bytes: bytes of gradients that are summed at a time; on the
    CPU a bucket of extra memory is used, on CUDA two, and four for 16 bits. Each rank sends ``2 (n - 1) / n`` of the
    gradients' bytes on n ranks, except that few bytes go by pairs on the CPU, up to 2 MiB from a rank, and that 16 bits
    are reduced as 32 on CUDA, on the CPU up to 2 MiB. After a `PeerError` some gradients may be sums and others not.

    After several backward passes (micro-batches) call it once, after the last one: what a backward adds
    to a sum cannot be distinguished from it, and would count the sum once more.

    Raises: ValueError if ranks differ in parameters or in which are frozen; for gradients that are sums over ranks
    already on some rank; for a model given to `seqpar.parallelize` if a rank has left out its backward, if it is
    parallel with `average_over`, and under DistributedDataParallel over these ranks. NotImplementedError for sharded
    parameters, whose gradients FSDP has reduced, for sparse gradients, and for dtypes that `all_sum` refuses. On every
    rank, before any gradient moves.
    """
    refuse_transforms("sync_gradients")
    check_comm("sync_gradients", comm)
    try:
        several, bucket_bytes = each_once(parameters), integer("bucket_bytes", bucket_bytes, 1)
        claim = _Claim.of(several, bucket_bytes)
    except Exception as error:
        with suppress(PeerError):  # of ranks that rely on what they remember
            comm.gather("sync_gradients", None, error)  # as `_agreed` does, which raises it on all ranks
        raise
    if not _sum_as_before(several, claim, comm, bucket_bytes):
        present = _agreed(several, claim, comm)
        call = comm.next_call()
        _sum([p for p, some in zip(several, present) if some], comm, Tag(claim.digest, call, 0, 0), bucket_bytes)
    for checks in checks_of(several):
        checks.summed()


class _Claim(NamedTuple):
    """A rank's announcement of its parameters. digest: of their shapes. flags: which have a gradient.

    frozen: which get none. repeated: which gradients are already sums over ranks. skipped: whether this rank has
    computed a forward and no gradient. rank: its global rank. reduced: models whose gradients a wrapper has reduced.
    """

    digest: int
    flags: list[bool]
    frozen: list[bool]
    repeated: list[bool]
    skipped: bool
    rank: int
    reduced: list[tuple[str, Averaging]]

    @property
    def odd(self) -> bool:
        """Whether there may be something to refuse."""
        return True in self.repeated or self.skipped or bool(self.reduced)

    @classmethod
    def of(cls, parameters: list[Tensor], bucket_bytes: int) -> _Claim:
        """This rank's announcement."""
        shapes = tuple([_shape(p) for p in parameters])
        flags, frozen = [p.grad is not None for p in parameters], [not p.requires_grad for p in parameters]
        every = checks_of(parameters)
        skipped = not any(flags) and any(checks.unanswered() for checks in every)
        reduced = [(checks.name, by) for checks in every if (by := checks.reduced) and not by.sharded]
        digest, repeated = _digest(shapes, bucket_bytes), summed_already(parameters)
        return cls(digest, flags, frozen, repeated, skipped, global_rank(), reduced)


def _shape(p: Tensor) -> tuple[Any, ...]:
    """What ranks compare of a parameter."""
    part = local(p)
    return part.shape, part.dtype, _grad_dtype(p), part.device.type, part is not p


def _grad_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient, which a user may set apart from the parameter's."""
    try:
        return p.grad_dtype or p.dtype
    except (AttributeError, RuntimeError):  # of a PyTorch that lacks it, and of tensors that are not leaves
        return p.dtype


@lru_cache(maxsize=16)
def _digest(shapes: tuple[tuple[Any, ...], ...], bucket_bytes: int) -> int:
    return digest_of_call("sync_gradients", {"parameters": shapes, "bucket bytes": bucket_bytes})


def _agreed(several: list[Tensor], claim: _Claim, comm: Comm) -> list[bool]:
    """Which parameters have a gradient on some rank, after checking all ranks' announcements. A collective."""
    # only the comm's global ranks show whether a mesh shards over them or over others
    meshed = any(is_dtensor(p) for p in several)
    ranks = frozenset(comm.gather("sync_gradients (which ranks)", global_rank()) if meshed else ())
    # the set of gradients may change at every step, so the agreement on parameters rides along
    found = comm.gather("sync_gradients", claim, _refusal(several, ranks))
    for rank, other in enumerate(found):
        if other.digest != found[0].digest:
            shapes = [f"{_grad_dtype(p)}{list(local(p).shape)}".removeprefix("torch.") for p in several]
            raise ValueError(
                f"sync_gradients: rank {rank} has other parameters than rank 0, or another bucket_bytes (here they are "
                f"{len(several)}, {', '.join(shapes):.500}); give every rank the same parameters in the "
                "same order, and one bucket_bytes"
            )
    present = [any(flags) for flags in zip(*(other.flags for other in found))]
    for index, (some, frozen) in enumerate(zip(present, zip(*(other.frozen for other in found)))):
        if some and len(set(frozen)) > 1:
            raise ValueError(
                f"sync_gradients: parameter {index} of shape {list(several[index].shape)} is frozen on rank "
                f"{frozen.index(True)} and not on rank {frozen.index(False)}, so its share is missing; freeze "
                "the same parameters on every rank"
            )
    if any(present):
        _check_backward(found)
    _check_unsummed(several, found, comm)
    plain = not meshed and all(p.device.type == "cpu" and p.numel() for p in several)
    if plain and any(present) and comm.size > 1 and comm.check_every == "batch":
        remember(comm, claim.digest, known={"claim": claim[:3], "present": present})
    return present


def _sum_as_before(several: list[Tensor], claim: _Claim, comm: Comm, bucket_bytes: int) -> bool:
    """Sum gradients without asking, if every rank has the same ones as at the last sum. A collective.

    A rank with other or wrong gradients says so in the first bucket, and then none is replaced. Returns whether the
    gradients were summed. On the CPU only: elsewhere the host would have to wait for the device.
    """
    if (known := comm.agreed.get(claim.digest)) is None:
        return False
    facts: Any = known
    changed = claim[:3] != facts["claim"] or claim.odd
    changed = changed or _refusal(several, frozenset()) is not None
    chosen = [p for p, some in zip(several, facts["present"]) if some]
    return _sum(chosen, comm, Tag(claim.digest, comm.next_call(), 0, 0), bucket_bytes, changed=changed)


def _sum(parameters: list[Tensor], comm: Comm, tag: Tag, bucket_bytes: int, *, changed: bool | None = None) -> bool:
    """Replace the gradients by their sums, bucket after bucket; each bucket is a phase of the call.

    changed: whether this rank has others than it had, summed with the first bucket. Returns whether the gradients were
    replaced: not if any rank set the flag.
    """
    if comm.size == 1:
        return True
    # so that new gradients have versions, which those of inference mode lack
    with torch.inference_mode(False), torch.no_grad(), abort_on_error(comm, "sync_gradients"):
        if not changed:
            separate(parameters)
        for index, bucket in enumerate(_buckets(parameters, bucket_bytes)):
            sums = [_addend(p, changed=changed) for p in bucket]
            asked = changed is not None and not index
            part = tag._replace(phase=index, name=f"sync_gradients (bucket {index})")
            if not sum_in_place(sums, comm, part, veto=bool(changed) if asked else None):
                return False
            for p, x in zip(bucket, sums):
                _set_grad(p, x)
        mark_summed(parameters)  # at the end, since gradients that share memory have one version
    return True


def separate(parameters: list[Tensor]) -> None:
    """Give gradients copies of their own where they share memory, since the sum of one would change another.

    Autograd makes such gradients: of ``a + torch.cat([b, c])`` those of b and c may lie in that of a. Views that a user
    has made, as of one flat tensor, stay where they are unless they overlap.
    """
    seen, views = set(), []
    for p in parameters:
        if (grad := p.grad) is None:
            continue
        part = local(grad)
        if id(grad) not in seen and torch_private.is_view(part)():
            views.append(p)
        elif id(grad) in seen or _is_shared(part):
            p.grad = grad.clone()
        seen.add(id(grad))
    end = 0
    for (start, stop), _, p in sorted((_span(local(p.grad)), index, p) for index, p in enumerate(views)):
        if start < min(stop, end):
            p.grad = p.grad.clone()  # type: ignore[union-attr]
        else:
            end = max(end, stop)


def _is_shared(x: Tensor) -> bool:
    """Whether another tensor has its memory too. A tensor and its storage's Python object hold it once each."""
    return torch_private.storage_Use_Count(torch_private.cdata(x.untyped_storage())) > 2  # type: ignore[no-any-return]


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to its last one; none for a tensor without elements."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    return start, start + (sum([(n - 1) * step for n, step in zip(x.shape, x.stride())]) + 1) * x.itemsize


def _addend(p: Tensor, *, changed: bool | None) -> Tensor:
    """What a rank adds for a parameter, contiguous and in memory that its sum may replace: its gradient, if that is so.

    A rank that only announces a change sends no gradients.
    """
    if changed or (grad := p.grad) is None:
        return torch.zeros_like(local(p), dtype=_grad_dtype(p), memory_format=torch.contiguous_format)
    grad = local(grad)
    if grad.is_contiguous() and is_writable(grad):
        return grad
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)


def _set_grad(p: Tensor, value: Tensor) -> None:
    """Make a tensor a parameter's gradient, unless it is already."""
    if p.grad is value:
        return
    if p.grad is None or not is_writable(local(p.grad)):
        p.grad = torch.zeros_like(p, dtype=_grad_dtype(p), requires_grad=False)
    if (grad := local(p.grad)) is not value:
        grad.copy_(value)


def is_writable(x: Tensor) -> bool:
    """Whether every element has memory of its own that may be written, as an expanded gradient has not."""
    if x.is_inference() or x.is_conj() or x.is_neg() or (not has_memory(x) and x.numel()):
        return False
    return x.is_contiguous() or not any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride()))


def _check_backward(found: list[_Claim]) -> None:
    """Raise for gradients that a wrapper has reduced over these ranks, and for a rank that left out its backward."""
    ranks = {other.rank for other in found}
    for other in found:
        for name, by in other.reduced:
            if by.ranks & ranks - {other.rank}:
                raise ValueError(
                    f"sync_gradients: {by.who} reduces the gradients of {name} over these ranks in its backward, and "
                    "their sum would count them once for each rank; leave sync_gradients out"
                )
    if skipping := [rank for rank, other in enumerate(found) if other.skipped]:
        raise ValueError(
            f"sync_gradients: rank {skipping[0]} has computed a forward in training since the last sum, and has no "
            "gradient of any parameter, so that the sum would lack its share; call backward on every rank, even where "
            "no label counts"
        )


def _check_unsummed(several: list[Tensor], found: list[_Claim], comm: Comm) -> None:
    """Raise for gradients that were not written to since they were summed."""
    again = [index for index, sums in enumerate(zip(*(other.repeated for other in found))) if any(sums)]
    if again:
        ranks = [rank for rank, other in enumerate(found) if True in other.repeated]
        where = "every rank" if len(ranks) == comm.size else f"rank{'s' * (len(ranks) > 1)} {str(ranks)[1:-1]:.200}"
        raise ValueError(
            f"sync_gradients: on {where} these gradients are sums over ranks already ({len(again)} of {len(several)}, "
            f"the first of shape {list(several[again[0]].shape)}), and no backward has added to them since; call it "
            "once, after the last backward of a step, with all parameters and all ranks that hold them, and set "
            "gradients that no backward computes any more to None"
        )


def _refusal(parameters: list[Tensor], ranks: frozenset[int]) -> Exception | None:
    """The error in this rank's parameters, or None. ranks: the comm's global ranks, if there are DTensors."""
    for checks in checks_of(parameters):
        if checks.averages_over(ranks):
            return ValueError(
                f"sync_gradients: {checks.name} is parallel with average_over={checks.average_over}, for a wrapper "
                f"that averages its gradients; their sum would be {checks.average_over} times too large; leave "
                "sync_gradients out under a wrapper over these ranks, and average_over without one"
            )
    for index, p in enumerate(parameters):
        grad, dtype = p.grad, _grad_dtype(p)
        dense = grad is None or (grad.layout == torch.strided and grad.dtype == dtype)
        if dense and (grad is None or adds(dtype)) and not is_dtensor(p) and not in_flat(p):
            continue
        what = f"parameter {index} of shape {list(p.shape)}"
        if in_flat(p):
            return NotImplementedError(
                f"sync_gradients: {what} holds a shard of FullyShardedDataParallel, which has reduced its gradient "
                "over ranks that are not known; leave sync_gradients out over the same ranks, and shard with "
                "fully_shard over others"
            )
        if is_dtensor(p) and not mesh_apart(p, ranks):
            return NotImplementedError(
                f"sync_gradients: {what} is a DTensor with placements {p.placements} over ranks of this comm, where "
                "what shards it (fully_shard) has reduced its gradient; leave it out"
            )
        if is_dtensor(p) and grad is not None and grad.placements != p.placements:
            return NotImplementedError(
                f"sync_gradients: {what} is a DTensor with placements {p.placements}, and its gradient has "
                f"{grad.placements}; give it p.grad = p.grad.redistribute(placements=p.placements) before"
            )
        if grad is not None and not dense:
            return NotImplementedError(
                f"sync_gradients: {what} has a gradient of layout {grad.layout} and dtype {grad.dtype}, expected "
                f"a dense one of {dtype}; give it p.grad = p.grad.to_dense().to({dtype}) before"
            )
        if grad is not None and not adds(dtype):
            return NotImplementedError(
                f"sync_gradients: {what} has a gradient of {dtype}, in which PyTorch does not add; set p.grad = None, "
                "then p.grad_dtype = torch.float32, and give it a gradient of that dtype"
            )
    return None


def _buckets(parameters: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Parameters in order, in groups of one dtype and device that fit `size` bytes; at least one each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in parameters:
        kinds.setdefault((_grad_dtype(p), p.device), []).append(p)
    for (dtype, _), several in kinds.items():
        bucket: list[Tensor] = []
        held = 0
        for p in several:
            more = local(p).numel() * dtype.itemsize
            if bucket and held + more > size:
                yield bucket
                bucket, held = [], 0
            bucket.append(p)
            held += more
        yield bucket


def each_once(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once, in order."""
    if isinstance(parameters, nn.Module):
        raise TypeError(f"expected parameters, got the model {type(parameters).__name__}; give model.parameters()")
    several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if odd := [x for x in several if not isinstance(x, Tensor)]:
        raise TypeError(f"expected parameters, as of model.parameters(), got {odd[0]!r:.200}")
    return list(dict.fromkeys(several))
