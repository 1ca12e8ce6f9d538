"""Attention over the keys of all ranks, from what each rank computes over its own: `part_of` and `merge_ranks`."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.entry import uncompiled
from seqpar.kernels import Operands, Score, Sums, acc_dtype, call_spec, choose, merge
from seqpar.kernels.blockwise import attend
from seqpar.ops.attention.call import uploaded
from seqpar.ops.core.agreement import abort_on_error, agreement, check_comm
from seqpar.ops.core.collective_op import check_dense
from seqpar.ops.core.device import current_device_of, no_autocast
from seqpar.plan import Plan


@uncompiled
def merge_ranks(out: Tensor, lse: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
    """Attention of the same queries over the keys of all ranks, from each rank's part. A collective, without backward.

    Spec over ranks: ``functools.reduce(lambda a, b: merge(*a, *b), zip(outs, lses))``. With 3 ranks, of which the last
    sees no key::

        rank 0   out0, lse0  ──►  merge of 0, 1, 2
        rank 1   out1, lse1  ──►  merge of 0, 1, 2
        rank 2   0, -inf     ──►  merge of 0, 1, 2

    out [T, H, D_v]: this rank's normalised output. lse [T, H]: natural log of its sum of exponentials, float32 or
    float64; -inf where it sees no key, and then ``out`` is ignored. Returns both merged, in the dtype of ``lse``. Parts
    are sent in that dtype, in one exchange of ``T * H * (D_v + 1)`` numbers to each other rank, and are merged in the
    order of ranks, so that every rank gets the same bits. A sink is not a key: merge it afterwards, once.

    Raises: on every rank, ValueError for other shapes and for ranks that differ; TypeError for other dtypes;
    NotImplementedError for tensors that require a gradient, which would be lost.

    Source: Milakov and Gimelshein 2018 (online softmax); vLLM's decode context parallelism.
    """
    check_comm("merge_ranks", comm)
    with agreement("merge_ranks", comm) as call:
        _check(out, lse)
        call.facts = {"shape": list(out.shape), "dtype": lse.dtype, "device": out.device.type}
    parts = torch.empty(comm.size, *out.shape[:2], out.shape[2] + 1, dtype=lse.dtype, device=out.device)
    own = parts[comm.rank]
    own[..., :-1] = out.masked_fill((lse == -torch.inf)[..., None], 0.0)  # merging ignores it, and one rank merges none
    own[..., -1] = lse
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    if peers:
        tag = Tag(call.digest, comm.next_call(), 0, 0, "merge_ranks")
        with abort_on_error(comm, "merge_ranks"):
            comm.exchange({peer: [own] for peer in peers}, {peer: [parts[peer]] for peer in peers}, tag=tag).wait()
    merged, total = parts[0, ..., :-1], parts[0, ..., -1]
    for part in parts[1:]:
        merged, total = merge(merged, total, part[..., :-1], part[..., -1])
    return merged, total


def part_of(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of queries to this rank's own keys, for `merge_ranks`, with neither communication nor a gradient.

    q [T, H, D], k [N, H_kv, D], v [N, H_kv, D_v], any strides with a dense last dim: the rows of a plan of one rank.
    Returns out [T, H, D_v] and lse [T, H], both in the accumulation dtype: parts that were rounded to that of ``q``
    would add a rounding for each rank.
    """
    score = Score(q.shape[2] ** -0.5 if scale is None else scale, softcap)
    kernel = choose("auto", call_spec(q, k, v, score, grads=False, deterministic=True, merges=True))
    acc = torch.zeros(*q.shape[:2], v.shape[2], dtype=acc_dtype(q.dtype), device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=acc.dtype, device=q.device)
    steps = plan.steps(0)
    with no_autocast(q.device.type), current_device_of(q):
        for bands in uploaded(plan, steps, q.device).facts.values():
            for facts in bands:
                attend(kernel, Operands(q, k, v, facts, score), Sums(acc, lse, None, first=False))
    return acc, lse.t()


def _check(out: object, lse: object) -> None:
    for name, x in (("out", out), ("lse", lse)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"merge_ranks: {name} must be a floating tensor, got {x!r:.200}")
    assert isinstance(out, Tensor) and isinstance(lse, Tensor)
    check_dense("merge_ranks", (out, lse))
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"merge_ranks: lse must be float32 or float64, got {lse.dtype}; give that of attention")
    if out.dim() != 3 or lse.shape != out.shape[:2] or lse.device != out.device:
        raise ValueError(
            f"merge_ranks: expected out [T, H, D_v] and lse [T, H] on one device, got {list(out.shape)} on "
            f"{out.device} and {list(lse.shape)} on {lse.device}"
        )
    if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
        raise NotImplementedError("merge_ranks has no backward; call it under torch.no_grad()")
