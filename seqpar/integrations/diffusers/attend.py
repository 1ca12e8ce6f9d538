"""Attention of a block on this rank's rows, under the plan of the order in which the trial found them.

Rows of segments that are cut are this rank's. Of a segment that every rank has whole, each rank computes its part, and
the results are gathered, so that a plan sees every row once::

    queries   text (whole), image (cut)    rank 0: text[:3], image[:8]    rank 1: text[3:], image[8:]
    output    text gathered, image as it is

Joint attention is full, so its tokens may be numbered freely: keys that are seen come first in a sample. They are one
interval then, whatever the mask. Under any other mask the keys of all ranks are gathered, and PyTorch attends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.foreign.wrap import ParallelModel
from seqpar.integrations.rows import RowsOwner, cut, gather
from seqpar.integrations.sdpa.mask import seen_pairs
from seqpar.ops import attention
from seqpar.ops.attention.signature import Numerics
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.plan import Plan
from seqpar.train.checks import StepChecks
from seqpar.trial.blocks import Attended, Finding
from seqpar.trial.segments import RowPlace, RowSegment, RowSegments, held, ranges, total

MakePlan = Callable[..., Plan]  # of a mask, a layout, and kv_layout= where keys are other tokens than queries
KNOWN = 64  # plans, and findings of a block
Array = np.ndarray[Any, Any]


@dataclass
class Sharing:
    """How a model's tokens are shared among ranks: options, and what was found so far.

    handle: of the model. numerics: of attention. average_over: how many times as large the model makes gradients.
    blocks: the names of the blocks. findings: of blocks and their arguments. checks: of the training steps of the model
    and of its copies. attended: whether any forward called attention.
    """

    handle: ParallelModel
    comm: Comm
    make: MakePlan
    numerics: Numerics
    average_over: int
    blocks: Collection[str]
    plans: dict[Hashable, Plan] = field(default_factory=dict)
    findings: dict[Hashable, dict[Any, Finding | None]] = field(default_factory=dict)
    checks: WeakKeyDictionary[nn.Module, StepChecks] = field(default_factory=WeakKeyDictionary)
    attended: bool = False

    def plan(
        self, samples: int, queries: RowSegments, keys: RowSegments, seen: Array | None = None, causal: bool = False
    ) -> Plan:
        """The plan of attention, sample by sample. seen [samples, keys]: the keys that are seen, if not all are."""
        known = samples, queries, keys, None if seen is None else seen.tobytes(), causal
        if known not in self.plans:
            if len(self.plans) >= KNOWN:
                del self.plans[next(iter(self.plans))]
            with errors_on_all_ranks("diffusers: plan=", self.comm):
                self.plans[known] = self._made(samples, queries, keys, seen, causal)
        return self.plans[known]

    def _made(self, samples: int, queries: RowSegments, keys: RowSegments, seen: Array | None, causal: bool) -> Plan:
        """The plan of the user's function. Raises: TypeError or ValueError for one of another mask or layout."""
        joint, lengths, kv = queries == keys, [total(queries)] * samples, dict[str, Layout]()
        layout = self._layout(samples, queries, seen if joint else None)
        if not joint:
            kv["kv_layout"] = self._layout(samples, keys, seen)
        if seen is not None:
            count = total(keys)
            start = count * np.arange(samples)
            lo, hi = (np.repeat(x, total(queries)) for x in (start, start + seen.sum(1)))
            mask = Mask.from_bounds(lo, hi, **{"lengths": lengths} if joint else {"kv_tokens": count * samples})
        else:
            kv_lengths = {} if joint else {"kv_lengths": [total(keys)] * samples}
            mask = Mask(lengths, causal=causal, **kv_lengths)
        try:
            plan = self.make(mask, layout, **kv)
        except TypeError as error:
            if joint:
                raise
            raise TypeError(
                f"diffusers: plan=: {error}, but some attention is from tokens of one stream to those of another; give "
                "a function of (mask, layout, *, kv_layout=)"
            ) from error
        if not isinstance(plan, Plan):
            raise TypeError(f"diffusers: plan= gave {plan!r:.200}, expected a Plan of the mask and layout that it got")
        if plan.mask != mask:
            raise ValueError(f"diffusers: plan= gave a plan of {plan.mask}, expected the mask that it got, {mask}")
        if (plan.layout, plan.kv_layout) != (layout, kv.get("kv_layout", layout)):
            raise ValueError("diffusers: plan= gave a plan of another layout, expected the one that it got")
        return plan

    def _layout(self, samples: int, segments: RowSegments, seen: Array | None) -> Layout:
        """Each rank's rows, of each segment a part. Those that no token sees come last in a sample."""
        count = total(segments)
        if seen is None:
            places = np.broadcast_to(np.arange(count), (samples, count))
        else:
            places = np.where(seen, seen.cumsum(1), seen.sum(1, keepdims=True) + (~seen).cumsum(1)) - 1
        places = places + count * np.arange(samples)[:, None]
        parts = [RowSegment(each.count, True) for each in segments]
        size = self.comm.size
        own = [[places[:, slice(*each)] for each in ranges(parts, rank, size)] for rank in range(size)]
        return Layout([np.concatenate(each, axis=1).ravel() for each in own])


def attend(
    sharing: Sharing, owner: RowsOwner, attended: Attended, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` over the rows of all ranks. query [.., T, D], key [.., T_kv, D]: this rank's."""
    queries, keys, form = attended
    if not any(each.cut for each in keys):
        if form is not None and mask is not None and not form.own_rows and not form.one:
            mask = cut(mask, RowPlace(mask.dim() - 2, queries), owner)
        if not is_causal:
            return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    seen = None
    if mask is not None and form is not None:
        mask = _over_all_keys(mask, form, keys, owner)
        samples = query.shape[0] if query.dim() == 4 else 1
        seen = _seen(mask, samples, total(keys)) if form.one else None
        if seen is None:
            return _over_gathered(owner, attended, query, key, value, mask, scale, enable_gqa)
    if is_causal and (queries != keys or seen is not None):
        raise NotImplementedError("diffusers: causal attention with a mask, or from some tokens to others")
    return _under_plan(sharing, owner, attended, query, key, value, seen, is_causal, scale)


def _over_all_keys(mask: Tensor, form: Any, keys: RowSegments, owner: RowsOwner) -> Tensor:
    """The mask over the keys of all ranks. Raises: NotImplementedError if it has another form than in the trial."""
    if not form.own_keys:
        return mask
    if not form.own_rows:
        return gather(mask, RowPlace(mask.dim() - 1, keys), owner)
    flags = mask[..., 0, :] if form.one else mask.diagonal(dim1=-2, dim2=-1)
    every = gather(flags, RowPlace(flags.dim() - 1, keys), owner).unsqueeze(-2)
    with errors_on_all_ranks("diffusers: mask", owner.comm):
        own = flags.unsqueeze(-2)
        if (mask != (own if form.one else flags.unsqueeze(-1) & own)).any():
            raise NotImplementedError(
                f"diffusers: a mask {list(mask.shape)} of a rank's rows and keys that depends on both"
            )
    return every if form.one else flags.unsqueeze(-1) & every


def _seen(mask: Tensor, samples: int, keys: int) -> Array | None:
    """The keys that each sample sees [samples, keys], None if a mask [.., 1, keys] does not say it by 0 and -inf."""
    if mask.requires_grad or (mask.dim() == 4 and mask.shape[1] > 1):
        return None
    try:
        seen = seen_pairs(mask)
    except NotImplementedError:
        return None
    return seen.reshape(-1, keys).expand(samples, keys).cpu().numpy()  # type: ignore[no-any-return]


def _over_gathered(
    owner: RowsOwner, attended: Attended, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Attention over the gathered keys of all ranks, under any mask."""
    queries, keys, form = attended
    if form is not None and not form.own_rows and not form.one:
        mask = cut(mask, RowPlace(mask.dim() - 2, queries), owner)
    key, value = (gather(x, RowPlace(x.dim() - 2, keys), owner) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def _under_plan(
    sharing: Sharing, owner: RowsOwner, attended: Attended, query: Tensor, key: Tensor, value: Tensor,
    seen: Array | None, is_causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention under the plan."""
    queries, keys, _ = attended
    if single := query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    if seen is not None and seen.all():
        seen = None
    parts = [tuple([RowSegment(each.count, True) for each in some]) for some in (queries, keys)]
    plan = sharing.plan(query.shape[0], parts[0], parts[1], seen, is_causal)
    q, k, v = (_own(x, some, owner) for x, some in ((query, queries), (key, keys), (value, keys)))
    samples = q.shape[0]
    q, k, v = (_dense(x.transpose(1, 2).flatten(0, 1)) for x in (q, k, v))
    out = attention(
        q, k, v, plan, sharing.comm, scale=scale, accuracy=sharing.numerics.accuracy,
        deterministic=sharing.numerics.deterministic,
    )  # fmt: skip
    out = _with_whole(out.unflatten(0, (samples, -1)), queries, owner).transpose(1, 2)
    return out[0] if single else out


def _own(x: Tensor, segments: RowSegments, owner: RowsOwner) -> Tensor:
    """x [B, H, T, D] with this rank's part of each segment that every rank has whole."""
    if all(each.cut for each in segments):
        return x
    rank, size, at, parts = owner.comm.rank, owner.comm.size, 0, []
    for each in segments:
        start, stop = (
            (0, held([each], rank, size)) if each.cut else ranges([RowSegment(each.count, True)], rank, size)[0]
        )
        parts.append(x.narrow(2, at + start, stop - start))
        at += held([each], rank, size)
    return torch.cat(parts, 2)


def _with_whole(out: Tensor, segments: RowSegments, owner: RowsOwner) -> Tensor:
    """out [B, T, H, D] with all rows of each segment that every rank has whole."""
    if all(each.cut for each in segments):
        return out
    parts = out.split([held([RowSegment(each.count, True)], owner.comm.rank, owner.comm.size) for each in segments], 1)
    return torch.cat(
        [
            part if each.cut else gather(part, RowPlace(1, (RowSegment(each.count, True),)), owner)
            for part, each in zip(parts, segments)
        ],
        1,
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
