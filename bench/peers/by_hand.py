"""Methods that a user writes in thirty lines over torch.distributed: all-gather of the keys, Ulysses, a zigzag ring.

Each is exact and differentiable, rests on torch's fused operator, and uses the default group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn.functional import scaled_dot_product_attention

from bench.peers.case import Case, Method, contiguous, whole, zigzag

# torch 2.13 has another name for it
GATHER = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
TRADE = collectives.all_to_all_single_autograd
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def one_process(case: Case, rank: int, size: int) -> Method:
    """Rank 0 computes all, with a thread for each rank."""
    rows = np.arange(case.tokens if rank == 0 else 0)
    documents = case.documents() if rank == 0 else []
    return Method(rows, lambda q, k, v: whole(q, k, v, documents, case.causal), threads=size)


def whole_documents(case: Case, rank: int, size: int) -> Method:
    """Data parallelism: the longest document left goes to the rank with least work so far."""
    work, mine = [0] * size, []
    for document in sorted(case.documents(), key=lambda d: d.start - d.stop):
        least = work.index(min(work))
        work[least] += (document.stop - document.start) ** 2
        if least == rank:
            mine.append(np.arange(document.start, document.stop))
    ends = np.cumsum([0, *map(len, mine)]).tolist()
    local = [slice(a, b) for a, b in zip(ends, ends[1:])]
    return Method(np.concatenate([*mine, np.arange(0)]), lambda q, k, v: whole(q, k, v, local, case.causal))


def all_gather(case: Case, rank: int, size: int) -> Method:
    """All ranks gather all keys; each chunk of queries takes those of its document, up to its end if causal."""
    chunks = zigzag(case, rank, size)
    order = np.concatenate([rows for r in range(size) for rows in zigzag(case, r, size)])
    position = torch.from_numpy(np.argsort(order))
    documents = [document for document in case.documents() for _ in range(2)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (GATHER(x, 0, dist.group.WORLD)[position] for x in (k, v))
        parts, at = [], 0
        for document, rows in zip(documents, chunks):
            seen = slice(document.start, int(rows[-1]) + 1) if case.causal else document
            mask = torch.from_numpy(rows)[:, None] >= torch.arange(seen.start, seen.stop) if case.causal else None
            one = (x.transpose(0, 1)[None] for x in (q[at : at + len(rows)], keys[seen], values[seen]))
            out = scaled_dot_product_attention(*one, attn_mask=mask, enable_gqa=case.heads != case.kv_heads)
            parts.append(out[0].transpose(0, 1))
            at += len(rows)
        return torch.cat(parts)

    return Method(np.concatenate(chunks), attend)


def ulysses(case: Case, rank: int, size: int) -> Method:
    """All-to-alls trade rows for heads and back; too few key heads are repeated."""
    if case.tokens % size or case.heads % size:
        raise ValueError(f"{case.name}: expected tokens and heads in multiples of {size}")
    documents = case.documents()

    def traded(x: Tensor) -> Tensor:
        """[T, H, D] of a rank's rows -> [size * T, H / size, D] of all rows."""
        if x.shape[1] % size:
            x = x.repeat_interleave(size // x.shape[1], 1)
        parts = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        return TRADE(parts, None, None, dist.group.WORLD).flatten(0, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = whole(traded(q), traded(k), traded(v), documents, case.causal).unflatten(0, (size, -1)).contiguous()
        parts = TRADE(out, None, None, dist.group.WORLD)
        return parts.transpose(0, 1).flatten(1, 2)

    return Method(contiguous(case, rank, size), attend)


def ring(case: Case, rank: int, size: int) -> Method:
    """Keys travel around the ranks; partial outputs are merged by their logsumexp."""
    chunks = zigzag(case, rank, size)
    ends = np.cumsum([0, *(2 * len(rows) for rows in chunks[::2])]).tolist()
    documents = [slice(a, b) for a, b in zip(ends, ends[1:])]
    return Method(np.concatenate(chunks), lambda q, k, v: _Ring.apply(q, k, v, documents, case.causal))  # type: ignore[no-any-return]


def _passed_on(*tensors: Tensor) -> list[Tensor]:
    """The tensors of the rank before this one; its own go to the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % size, tag=n) for n, x in enumerate(tensors)]
    ops += [dist.P2POp(dist.irecv, x, (rank - 1) % size, tag=n) for n, x in enumerate(arrived)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return arrived


def _attended(document: slice, step: int, causal: bool) -> tuple[slice, slice]:
    """The rows of queries and of keys that meet: all at home; elsewhere, if causal, early keys or late queries."""
    middle = (document.start + document.stop) // 2
    if step == 0 or not causal:
        return document, document
    if step <= dist.get_rank():
        return document, slice(document.start, middle)
    return slice(middle, document.stop), document


def _headed(x: Tensor, rows: slice, heads: int) -> Tensor:
    """[T, H, D] -> [1, heads, rows, D], as the operator takes it."""
    return x[rows].transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)[None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: list[slice], causal: bool) -> Tensor:  # type: ignore[override]
        heads, keys, values = q.shape[1], k, v
        out = torch.zeros(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:2], -torch.inf)
        for step in range(dist.get_world_size()):
            for document in documents:
                rows, cols = _attended(document, step, causal)
                one = (_headed(q, rows, heads), _headed(keys, cols, heads), _headed(values, cols, heads))
                part, part_lse = FORWARD(*one, 0.0, causal and step == 0)
                both = torch.logaddexp(lse[rows], part_lse[0].T)
                old, new = ((x - both).exp()[..., None] for x in (lse[rows], part_lse[0].T))
                out[rows] = out[rows] * old + part[0].transpose(0, 1) * new
                lse[rows] = both
            if step + 1 < dist.get_world_size():
                keys, values = _passed_on(keys, values)
        out = out.to(q.dtype)
        ctx.documents, ctx.causal = documents, causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        q, keys, values, out, lse = ctx.saved_tensors
        heads, group = q.shape[1], q.shape[1] // keys.shape[1]
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, keys, values))
        for step in range(dist.get_world_size()):
            for document in ctx.documents:
                rows, cols = _attended(document, step, ctx.causal)
                one = (_headed(q, rows, heads), _headed(keys, cols, heads), _headed(values, cols, heads))
                of_out = (_headed(out, rows, heads), lse[rows].T[None])
                grads = BACKWARD(_headed(dout, rows, heads), *one, *of_out, 0.0, ctx.causal and step == 0)
                dq[rows] += grads[0][0].transpose(0, 1)
                for total, grad in ((dk, grads[1]), (dv, grads[2])):
                    total[cols] += grad[0].unflatten(0, (-1, group)).float().sum(1).transpose(0, 1)
            if step + 1 < dist.get_world_size():
                keys, values, dk, dv = _passed_on(keys, values, dk, dv)
            else:
                dk, dv = _passed_on(dk, dv)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None
