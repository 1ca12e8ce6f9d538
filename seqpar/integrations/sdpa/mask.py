"""Masks in the form that PyTorch's attention takes, read as the interval of keys that each query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.facts.intervals import expand, linear_spans
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.ops.core.agreement import gathering
from seqpar.plan import Plan


def bounds_of(mask: Tensor, rows: int, keys: int) -> tuple[Ints, Ints]:
    """The bounds ``lo, hi`` [rows] of a mask [..., rows or 1, keys], boolean (True is seen) or added to the scores.

    Raises: ValueError for another shape; NotImplementedError for a mask that requires a gradient, differs between
    heads, adds anything but 0 and -inf (or its dtype's lowest number, in rows that see a key), or has a row whose keys
    are not an interval.
    """
    seen = seen_pairs(mask)
    if mask.dim() < 2 or mask.shape[-1] != keys or mask.shape[-2] not in (1, rows) or 0 in mask.shape[:-2]:
        raise ValueError(
            f"sdpa: attn_mask must be this rank's {rows} rows over all {keys} keys, got {list(mask.shape)}; "
            "give seqpar.shard(mask, plan, rank) of the mask of one process, or is_causal=True and no mask"
        )
    seen = seen[None].flatten(0, -3)
    if seen.shape[0] != 1 and not bool((seen == seen[:1]).all()):
        raise NotImplementedError("sdpa: attn_mask differs between heads")
    plain = seen[0].expand(rows, keys).cpu().numpy()
    count = plain.sum(1)
    lo = np.where(count > 0, plain.argmax(1) if keys else 0, 0).astype(np.int64)
    hi = lo + count
    last = np.where(count > 0, keys - plain[:, ::-1].argmax(1) if keys else 0, 0)
    if (gaps := np.flatnonzero(last != hi)).size:
        raise NotImplementedError(
            f"sdpa: row {gaps[0]} of attn_mask sees {count[gaps[0]]} keys between {lo[gaps[0]]} and "
            f"{last[gaps[0]] - 1}, expected one interval of keys"
        )
    return lo, hi


def samples_meet(plan: Plan, rank: int, samples: int) -> bool:
    """Whether a row of a rank may see a row of the rank that is in another sample, where each has as many rows."""
    mask, at, keys = plan.mask, plan.positions(rank), plan.positions(rank, "kv")
    own, others = (np.repeat(np.arange(samples), len(x) // samples) for x in (at, keys))
    if mask.within_documents:
        documents = np.append(mask.documents(at), np.searchsorted(mask.kv_offsets, keys, side="right") - 1)
        pairs = np.stack([documents, np.append(own, others)])[:, documents >= 0]
        if np.unique(pairs, axis=1).shape[1] == np.unique(pairs[0]).size:
            return False
    each = [np.sort(keys)] + [np.sort(keys[others == sample]) for sample in range(samples)]
    for band in range(len(mask.bands)):
        for sample in range(samples):
            lo, hi = mask.bounds(at[own == sample], band=band)
            of_all, of_own = (np.searchsorted(x, hi) - np.searchsorted(x, lo) for x in (each[0], each[1 + sample]))
            if (of_all > of_own).any():
                return True
    return False


def is_lower_triangle(mask: Tensor) -> bool:
    """Whether a mask [..., T, T] is the plain causal one."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    rows = mask.shape[-1]
    return bool((seen_pairs(mask) == torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()).all())


def seen_pairs(mask: Tensor) -> Tensor:
    """Where a mask of any shape lets a query see a key. Raises NotImplementedError for one that adds to scores."""
    if mask.requires_grad:
        raise NotImplementedError(
            f"sdpa: attn_mask {list(mask.shape)} requires a gradient, as a learned bias of scores does, and gets none; "
            "detach it if it is a mask alone, and compute a bias by a kernel of your own over the keys of "
            "seqpar.fetch_all, outside the block"
        )
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        raise ValueError(f"sdpa: attn_mask must be boolean or floating point, got {mask.dtype}")
    seen = mask == 0
    hidden = (mask == -torch.inf) | ((mask == torch.finfo(mask.dtype).min) & seen.any(-1, keepdim=True))
    if not bool((seen | hidden).all()):
        raise NotImplementedError(
            f"sdpa: attn_mask {list(mask.shape)} adds a bias to scores, expected 0 and -inf alone; outside the block, "
            "call seqpar.attention(..., alibi_slopes=slopes) for ALiBi, and a kernel of your own over the keys of "
            "seqpar.fetch_all for another bias"
        )
    return seen


class KnownMask:
    """The last mask and what was derived from it; layers of a model share their mask."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.version, self.known = -1, None

    def of(self, mask: Tensor, find: Callable[[Tensor], Any]) -> Any:
        """``find(mask)``, cached while the mask stays the same. Equal on all ranks, as all run the same program."""
        version = -1 if mask.is_inference() else mask._version
        if self.mask is not mask or self.version != version or version < 0:
            self.known = find(mask)
            self.mask, self.version = mask, version
        return self.known


def plan_under(mask: Tensor, plan: Plan, comm: Comm, *, hinted: bool) -> Plan:
    """The plan under the mask whose rows every rank gives. A collective.

    hinted: whether the mask is a triangle that the caller says is causal.
    """
    rank = comm.rank
    with gathering("sdpa: attn_mask", comm) as bounds:
        if hinted and np.count_nonzero(plan.mask.lengths) > 1:
            raise ValueError(
                "sdpa: multi-head attention with is_causal=True and the triangle of all rows may be causal inside "
                f"the documents of {plan.mask!r} or across them; give it the mask of the documents, "
                "~torch.block_diag(...) of their triangles, or a plan of one document"
            )
        if not plan.rows(rank):
            mask = mask.new_zeros(0, plan.mask.kv_tokens)
        rows, tokens = bounds_of(mask, plan.rows(rank), plan.mask.kv_tokens), plan.layout.tokens(rank)
        bounds.own = linear_spans(*(bound[:tokens] for bound in rows))  # without pads; small if they are regular
    lo, hi = np.zeros((2, plan.mask.tokens), np.int64)
    for peer, spans in enumerate(bounds.every):
        at = plan.layout.positions(peer)
        count = np.diff(np.append(spans.start, at.size))
        lo[at], hi[at] = expand(spans.lo, count, spans.lo_step), expand(spans.hi, count, spans.hi_step)
    lengths = plan.mask.lengths if plan.mask.tokens == plan.mask.kv_tokens else None
    return plan.with_mask(Mask.from_bounds(lo, hi, kv_tokens=plan.mask.kv_tokens, lengths=lengths))
