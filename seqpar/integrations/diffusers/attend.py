"""Attention of a block on this rank's rows, under the plan of the order in which the trial found them.

Joint attention is full, so its tokens may be numbered freely: keys that are seen come first in a sample. They are one
interval then, whatever the mask. Under any other mask, and from or to tokens that every rank has whole, the keys of all
ranks are gathered, and PyTorch attends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.foreign.wrap import ParallelModel
from seqpar.integrations.rows import RowsOwner, cut, gather
from seqpar.integrations.sdpa.mask import seen_pairs
from seqpar.integrations.sdpa.reroute import dense
from seqpar.ops import attention
from seqpar.ops.attention.signature import Numerics
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.plan import Plan
from seqpar.private.torch import compiled_alike
from seqpar.train.checks import StepChecks
from seqpar.trial.finding import Attended, AttentionCall, Finding, MaskForm
from seqpar.trial.segments import RowPlace, RowSegments, ranges, total

MakePlan = Callable[..., Plan]  # of a mask, a layout, and kv_layout= where keys are other tokens than queries
Array = np.ndarray[Any, Any]


@dataclass
class Sharing:
    """How a model's tokens are shared among ranks: options, and what was found so far.

    handle: of the model. numerics: of attention. average_over: how many times as large the model makes gradients.
    blocks: the names of the blocks. findings: of a block and its arguments, by the values that the block reads.
    compiled: `compiled_alike`. checks: of the training steps of the model and of its copies. attended: whether any
    forward called attention, as a cache may skip all blocks of a later one. plan: `_plan`.
    """

    handle: ParallelModel
    comm: Comm
    make: MakePlan
    numerics: Numerics
    average_over: int
    blocks: Collection[str]
    findings: Callable[..., dict[Any, Finding | None]] = field(default_factory=lambda: lru_cache(512)(lambda *key: {}))
    compiled: Callable[..., Any] = field(default_factory=lambda: lru_cache(512)(compiled_alike))
    checks: WeakKeyDictionary[nn.Module, StepChecks] = field(default_factory=WeakKeyDictionary)
    attended: bool = False

    def __post_init__(self) -> None:
        self.plan: Callable[..., Plan] = lru_cache(64)(self._plan)

    def _plan(self, samples: int, queries: RowSegments, keys: RowSegments, seen: bytes | None, causal: bool) -> Plan:
        """The plan of the user's function, sample by sample. seen: [samples, keys], which are seen, if not all are.

        Raises: TypeError or ValueError, on all ranks, for a plan of another mask or layout.
        """
        joint, count, kv_count = queries == keys, total(queries), total(keys)
        known = None if seen is None else np.frombuffer(seen, bool).reshape(samples, kv_count)
        lengths = [count] * samples
        if known is not None:
            start = kv_count * np.arange(samples)
            lo, hi = (np.repeat(x, count) for x in (start, start + known.sum(1)))
            mask = Mask.from_bounds(lo, hi, **{"lengths": lengths} if joint else {"kv_tokens": kv_count * samples})
        else:
            mask = Mask(lengths, causal=causal, kv_lengths=None if joint else [kv_count] * samples)
        layout = self._layout(samples, queries, known if joint else None)
        kv_layout = layout if joint else self._layout(samples, keys, known)
        with errors_on_all_ranks("diffusers: plan=", self.comm):
            plan = self.make(mask, layout, **{} if joint else {"kv_layout": kv_layout})
            if not isinstance(plan, Plan):
                raise TypeError(f"diffusers: plan= gave {plan!r:.200}, expected a Plan of the mask and layout given")
            if (plan.mask, plan.layout, plan.kv_layout) != (mask, layout, kv_layout):
                raise ValueError(f"diffusers: plan= gave {plan!r:.200}, expected one of the mask and layout given")
        return plan

    def _layout(self, samples: int, segments: RowSegments, seen: Array | None) -> Layout:
        """Each rank's rows, of each segment a part. Those that no token sees come last in a sample."""
        count, size = total(segments), self.comm.size
        seen = np.ones((samples, count), bool) if seen is None else seen
        places = np.where(seen, seen.cumsum(1), seen.sum(1, keepdims=True) + (~seen).cumsum(1)) - 1
        places = places + count * np.arange(samples)[:, None]
        own = [[places[:, slice(*each)] for each in ranges(segments, rank, size)] for rank in range(size)]
        return Layout([np.concatenate(each, axis=1).ravel() for each in own])


def attend(sharing: Sharing, owner: RowsOwner, attended: Attended, call: AttentionCall) -> Tensor:
    """What the call returns for this rank's queries over the keys of all ranks; its tensors have this rank's rows."""
    queries, keys, form = attended
    mask, seen = call.attn_mask, None
    if mask is not None and form is not None and form.own_keys:
        mask = _over_all_keys(mask, form, keys, owner)
    if all(each.cut for each in (*queries, *keys)) and (not call.is_causal or queries == keys):
        if mask is not None and form is not None and form.one:
            seen = _seen(mask, call.query.shape[0] if call.query.dim() == 4 else 1, total(keys))
        if mask is None or seen is not None:
            return _under_plan(sharing, attended, call, seen)
    if call.is_causal:
        at = torch.arange(total(queries), device=call.query.device)[:, None]
        mask = cut(at, RowPlace(0, queries), owner) >= torch.arange(total(keys), device=at.device)
    elif mask is not None and form is not None and not (form.one or form.own_rows):
        mask = cut(mask, RowPlace(mask.dim() - 2, queries), owner)
    key, value = (gather(x, RowPlace(x.dim() - 2, keys), owner) for x in (call.key, call.value))
    return call._replace(key=key, value=value, attn_mask=mask, is_causal=False).computed()


def _over_all_keys(mask: Tensor, form: MaskForm, keys: RowSegments, owner: RowsOwner) -> Tensor:
    """A mask of this rank's keys over those of all ranks.

    Raises: NotImplementedError if it has another form than in the trial.
    """
    if not form.own_rows:
        return gather(mask, RowPlace(mask.dim() - 1, keys), owner)
    flags = mask.diagonal(dim1=-2, dim2=-1)
    rows = torch.ones_like(flags) if form.one else flags
    with errors_on_all_ranks("diffusers: mask", owner.comm):
        if (mask != rows.unsqueeze(-1) & flags.unsqueeze(-2)).any():
            raise NotImplementedError(
                f"diffusers: a mask {list(mask.shape)} of a rank's rows and keys that depends on both"
            )
    every = gather(flags, RowPlace(flags.dim() - 1, keys), owner).unsqueeze(-2)
    return every if form.one else rows.unsqueeze(-1) & every


def _seen(mask: Tensor, samples: int, keys: int) -> Array | None:
    """The keys that each sample sees [samples, keys], None if a mask [.., 1, keys] does not say it by 0 and -inf."""
    with suppress(NotImplementedError):
        if mask.dim() < 4 or mask.shape[1] == 1:
            return seen_pairs(mask).reshape(-1, keys).expand(samples, keys).cpu().numpy()  # type: ignore[no-any-return]
    return None


def _under_plan(sharing: Sharing, attended: Attended, call: AttentionCall, seen: Array | None) -> Tensor:
    """Attention under the plan."""
    single = call.query.dim() == 3
    q, k, v = (x[None] if single else x for x in call[:3])
    samples, known = len(q), None if seen is None or seen.all() else seen.tobytes()
    plan = sharing.plan(samples, *attended[:2], known, call.is_causal)
    q, k, v = (dense(x.transpose(1, 2).flatten(0, 1)) for x in (q, k, v))
    out = attention(q, k, v, plan, sharing.comm, scale=call.scale, **sharing.numerics._asdict())
    out = out.unflatten(0, (samples, -1)).transpose(1, 2)
    return out[0] if single else out
