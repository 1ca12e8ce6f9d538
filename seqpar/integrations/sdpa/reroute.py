"""PyTorch's own attention functions under a plan: ``with sdpa(plan, comm):``, and `parallelize` for a whole model.

A torch function mode sees every call that reaches torch from Python. The fused paths of `torch.nn.TransformerEncoder`
in eval are off meanwhile: eager modules leave them out under a mode, but compilers do not. A call is rerouted if its
rows are the plan's. Its mask must be the plan's, except that an explicit mask is used as it is. Any other call is an
error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.comm.local import warn_alone
from seqpar.facts.mask import Mask
from seqpar.integrations.sdpa.fused import FUSED_PATHS, attends, in_flex_attention
from seqpar.integrations.sdpa.mask import KnownMask, is_lower_triangle, plan_under, samples_meet, seen_pairs
from seqpar.integrations.sdpa.trials import ModelsInside
from seqpar.ops import attention
from seqpar.ops.attention.signature import Accuracy, Numerics
from seqpar.ops.core.agreement import errors_on_all_ranks, remember
from seqpar.ops.core.collective_op import check_dense
from seqpar.ops.core.regions import Region, run_again_inside, under_way
from seqpar.parallel import derived_seed, surround
from seqpar.plan import Plan
from seqpar.private import torch as torch_private
from seqpar.trial.record import under_trial

Local = Callable[[Tensor, Tensor], bool]

_REROUTED = {F.scaled_dot_product_attention, F.multi_head_attention_forward}


def sdpa(
    plan: Plan, comm: Comm, *, local: Local | None = None, dropout_seed: int | None = None,
    accuracy: Accuracy = "exact", deterministic: bool = True,
) -> Rerouting:  # fmt: skip
    """A block that reroutes PyTorch's attention functions to `seqpar.attention`, for this thread. Blocks nest.

        with seqpar.sdpa(plan, comm):
            loss = model(x[None])            # x [plan.rows(rank), E], this rank's rows
        loss.backward()

    Rerouted are ``F.scaled_dot_product_attention`` on [B, H, T, D] or [H, T, D], where the B * T rows of queries and of
    keys, sample after sample, are the plan's for this rank, and samples do not see each other under it; and
    ``F.multi_head_attention_forward``, hence `torch.nn.MultiheadAttention` and `torch.nn.TransformerEncoder`, on
    [T, 1, E] or [T, E]. The block is also a block of `seqpar.parallel(plan, comm)`. Calls are collective, forward and
    backward.

    The mask is the plan's, which knows the documents: ``is_causal=True`` needs a plan that is causal inside documents,
    a call without a mask one that is full inside them. ``attn_mask`` has this rank's rows over all keys in the order of
    positions, ``seqpar.shard(mask, plan, rank)`` of one process's mask: boolean or of 0 and -inf, the same for all
    heads, one interval of keys per row. It is used as it is, documents included. ``F.multi_head_attention_forward``
    also accepts its usual combination of ``is_causal=True`` and the triangle [T, T].

    local: a function of a call's query and key that returns True for a call to leave alone, such as attention over
    tensors that every rank has whole; it must return the same on all ranks. dropout_seed: the seeds of calls with
    dropout follow from it; equal on all ranks and different for every step. The same pairs are dropped on any number of
    ranks. accuracy, deterministic: as in `seqpar.attention`. Under autocast q, k and v are cast as PyTorch casts them.

    Regions of torch's checkpoints inside the block are recomputed under its plan, wherever backward runs; an autograd
    function of another library that calls attention without gradients raises. A thread that starts inside the block is
    outside of it. Compilers break their graph at every call: to compile whole models, use
    `seqpar.nn.Attention`.

    A module that attends inside the block is tried when the block first ends with it, without gradients: outside
    attention, each row's result must depend on that row alone (`seqpar.trial`). Code between modules is
    not tried.

    Raises: ValueError for rows or a mask that are not the plan's; NotImplementedError for a module that mixes rows
    outside attention, naming the first inner module where they do not follow, and for need_weights, padding masks,
    added keys, score biases, masks that differ between heads or have gaps, and other attention operators, such as
    flash-attn's and flex_attention; RuntimeError on leaving the block if no call was rerouted. All ranks raise; none
    hangs.
    """
    warn_alone(comm, "sdpa", stacklevel=3)
    return Rerouting(plan, comm, local, dropout_seed, Numerics.checked(accuracy, deterministic))


class Rerouting(TorchFunctionMode):
    """The mode of one block. first: the number of its first call, for seeds; again: whether a checkpoint recomputes."""

    def __init__(
        self, plan: Plan, comm: Comm, local: Local | None, seed: int | None, numerics: Numerics, *, first: int = 0,
        again: bool = False, tries: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.plan, self.comm, self.local, self.seed, self.again = plan, comm, local, seed, again
        self.numerics = numerics
        self.first = self.calls = first
        self.outside: list[Region | None] = []
        self.surroundings: AbstractContextManager[Any] | None = None
        self.triangle, self.masked = KnownMask(), KnownMask()
        self.shapes: tuple[torch.Size, ...] = ()  # of the last call's query and key, as `local` gets them
        self.tries = tries and not again
        self.models: ModelsInside | None = None

    def __enter__(self) -> Rerouting:
        if self.surroundings is not None:
            raise RuntimeError("sdpa: this block is entered already; enter a new one to nest them")
        self.surroundings = nullcontext() if under_trial() else surround(self.plan, self.comm, met=not self.tries)
        self.calls, self.outside = self.first, under_way()
        alike = partial(sdpa, self.plan, self.comm, local=self.local)
        self.models = ModelsInside(self.plan, self.comm, alike, sys._getframe(1)) if self.tries else None
        self.surroundings.__enter__()
        FUSED_PATHS.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        switched = torch.backends.mha.get_fastpath_enabled()
        FUSED_PATHS.__exit__()
        surroundings, self.surroundings, self.outside = self.surroundings, None, []
        self.triangle, self.masked = KnownMask(), KnownMask()
        models, self.models = self.models, None
        if surroundings is not None:
            surroundings.__exit__(kind, error, trace)
        if isinstance(error, Exception) and in_flex_attention(trace):
            self._refuse_fused("flex_attention", error)
        if kind is None and switched:
            raise RuntimeError(
                "sdpa: torch.backends.mha.set_fastpath_enabled(True) inside the block lets encoder layers in eval "
                "attend to a shard alone"
            )
        if kind is None and models is not None and not under_trial():
            models.try_all()
        if kind is None and self.calls == self.first and not self.again:
            raise RuntimeError(
                "sdpa: no attention was rerouted inside the block, in which the model called neither "
                "F.scaled_dot_product_attention nor F.multi_head_attention_forward on this thread with the plan's "
                "rows, scripted modules aside, whose calls are not seen; call F.scaled_dot_product_attention from "
                "Python where the model has its own attention code"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REROUTED:
            return self._reroute(func, args, kwargs)
        if attends(func):
            self._refuse_fused(str(func))
        return func(*args, **kwargs)

    @uncompiled
    def _refuse_fused(self, name: str, cause: Exception | None = None) -> None:
        with torch_private.DisableTorchFunction(), self._refusals():
            raise NotImplementedError(
                f"sdpa: {name} is not rerouted, and its rows may be a shard; call F.scaled_dot_product_attention"
            ) from cause

    @uncompiled
    def _reroute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the mode is off for this block's own computation, and for the blocks around it
        with torch_private.DisableTorchFunction():
            if self.local is not None and self.local(*_first_two(*args, **kwargs)):
                return func(*args, **kwargs)
            route = self._multi_head if func is F.multi_head_attention_forward else self._scaled_dot_product
            return route(*args, **kwargs)

    def _refusals(self) -> AbstractContextManager[None]:
        """A context that tells the other ranks of an error on this one."""
        return nullcontext() if under_trial() else errors_on_all_ranks("sdpa", self.comm)

    def _scaled_dot_product(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """`F.scaled_dot_product_attention`, with its signature."""
        with self._refusals():
            _check_kinds([query, key, value], attn_mask)
            self.shapes = query.shape, key.shape
            shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
            if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
                raise ValueError(f"sdpa: expected [B, H, T, D] or [H, T, D], got {shapes}")
            samples = query.shape[0] if query.dim() == 4 else 1
            if query.dim() == 4 and not samples == key.shape[0] == value.shape[0]:
                raise ValueError(f"sdpa: expected queries, keys and values of the same number of samples, got {shapes}")
            if samples > 1 and attn_mask is not None:
                raise NotImplementedError(f"sdpa: attn_mask needs one packed batch, got {samples} samples")
            if is_causal and attn_mask is not None:
                raise ValueError("sdpa: give attn_mask or is_causal=True, not both")
            if not enable_gqa and query.shape[-3] != key.shape[-3]:
                raise ValueError(f"sdpa: fewer heads of keys need enable_gqa=True, got {shapes}")
        q, k, v = (x.transpose(0, 1) if x.dim() == 3 else x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = self._attend(q, k, v, attn_mask, dropout_p, is_causal, scale, samples)
        if query.dim() == 3:
            return out.transpose(0, 1)
        return out.unflatten(0, (samples, query.shape[2])).transpose(1, 2)

    def _multi_head(
        self, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
        in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
        add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
        training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
        attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Tensor | None = None,
        static_v: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """`F.multi_head_attention_forward`, with its signature; average_attn_weights has no effect without weights."""
        with self._refusals():
            _check_kinds([query, key, value], attn_mask)
            self.shapes = query.shape, key.shape
            if need_weights:
                raise NotImplementedError(
                    "sdpa: multi-head attention with need_weights=True, torch's default, would return weights of keys "
                    "that other ranks hold; call the module with need_weights=False"
                )
            if key_padding_mask is not None:
                raise NotImplementedError(
                    f"sdpa: multi-head attention got a key_padding_mask {list(key_padding_mask.shape)}; pack the "
                    "documents without padding, as the plan's mask keeps them apart"
                )
            missing = {
                "add_zero_attn": add_zero_attn, "bias_k and bias_v": bias_k is not None or bias_v is not None,
                "static_k and static_v": static_k is not None or static_v is not None,
            }  # fmt: skip
            if named := [name for name, is_given in missing.items() if is_given]:
                raise NotImplementedError(f"sdpa: not supported in multi-head attention: {', '.join(named)}")
            shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
            single = query.dim() == 2 or (query.dim() == 3 and query.shape[1] == key.shape[1] == value.shape[1] == 1)
            if not single or not query.dim() == key.dim() == value.dim():
                told = f"sdpa: expected one packed batch, [T, 1, E] or [T, E], got {shapes}"
                if query.dim() == 3 and query.shape[:2] == (1, self.plan.rows(self.comm.rank)):
                    told += ", a batch in dim 0; build the layer with batch_first=True"
                raise ValueError(told)
            if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
                raise ValueError(f"sdpa: {shapes} with {num_heads} heads of {embed_dim_to_check} features in all")
            if is_causal and attn_mask is None:
                raise ValueError(
                    "sdpa: multi-head attention takes is_causal=True only as a hint, together with attn_mask"
                )
            mask = ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
            # the hint is ignored if it is wrong
            hinted = is_causal and attn_mask.shape[-1] == len(query) and self.triangle.of(mask, is_lower_triangle)
            # where a rank has all rows, its triangle may be the mask of one process too
            is_causal = hinted and not self._one_has_all
            mask = None if is_causal else mask
        if use_separate_proj_weight:
            biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
            weights = q_proj_weight, k_proj_weight, v_proj_weight
            projected = torch_private.in_projection(query, key, value, *weights, *biases)
        else:
            projected = torch_private.in_projection_packed(query, key, value, in_proj_weight, in_proj_bias)
        q, k, v = (x.reshape(len(x), num_heads, embed_dim_to_check // num_heads) for x in projected)
        out = self._attend(q, k, v, mask, dropout_p if training else 0.0, is_causal, None, hinted=hinted)
        return F.linear(out.reshape(query.shape), out_proj_weight, out_proj_bias), None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, samples: int = 1, *, hinted: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention over packed q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v].

        hinted: whether the mask is a triangle that the caller says is causal.
        """
        with self._refusals():
            record = under_trial()
            rows = [self.plan.rows(self.comm.rank, side) for side in ("q", "kv")]
            if record is not None and record.rows is not None and not record.rows.all:
                rows = [q.shape[0], k.shape[0]]
            if samples > 1 and [q.shape[0], k.shape[0]] == [samples * n for n in rows]:
                raise ValueError(
                    f"sdpa: got {samples} x {rows[0]} rows, the plan has {rows[0]} in all on rank {self.comm.rank}; "
                    "pack the samples into one row, [1, H, T, D], and give the mask a document for each"
                )
            if [q.shape[0], k.shape[0]] != rows or v.shape[0] != rows[1]:
                raise self._wrong_rows(q, k, rows)
            if record is not None:
                self.calls += 1
                return record.attended((*q.shape[:2], v.shape[2]), q, k, v)
            asked = self.plan, self.comm.rank, samples
            if samples > 1 and self.plan.memo(("samples meet", *asked[1:]), lambda: samples_meet(*asked)):
                told = (
                    f"sdpa: got {samples} samples of {rows[0] // samples} rows ({self._shown()}) on rank "
                    f"{self.comm.rank}, expected samples that do not see each other under {self.plan.mask!r}"
                )
                if samples == rows[0]:
                    raise ValueError(
                        f"{told}, or one sample of {samples} rows; give the model [1, T] in place of [T, 1], or select "
                        "such calls with local="
                    )
                raise ValueError(f"{told}; give the plan a document for each sample, or select such calls with local=")
            if mask is None:
                self._check_meaning(is_causal)
            elif list(mask.shape[-2:]) == rows and rows[1] != self.plan.mask.kv_tokens and not self._one_has_all:
                seen_pairs(mask)  # a bias has another remedy
                raise ValueError(
                    f"sdpa: attn_mask {list(mask.shape)} only covers this rank's own rows; give the model this rank's "
                    "rows of one process's mask over all keys, seqpar.shard(mask, plan, rank)"
                )
            seed = self._seed_of(dropout_p)
            how = self.plan, self.comm, self.local, self.seed, self.numerics
            run_again_inside(partial(Rerouting, *how, first=self.calls, again=True), self, self.outside)
        plan = (
            self.plan
            if mask is None
            else self.masked.of(mask, partial(plan_under, plan=self.plan, comm=self.comm, hinted=hinted))
        )
        self.calls += 1
        if self.models is not None:
            self.models.notice()
        q, k, v = map(dense, (q, k, v))
        out = attention(
            q, k, v, plan, self.comm, scale=scale, dropout_p=dropout_p, dropout_seed=seed,
            accuracy=self.numerics.accuracy, deterministic=self.numerics.deterministic,
        )  # fmt: skip
        if not self.again:
            self._compare_keys(k)
        return out

    def _wrong_rows(self, q: Tensor, k: Tensor, rows: list[int]) -> ValueError:
        """The error for a call with other rows than the plan's."""
        told = (
            f"sdpa: {q.shape[0]} rows attend over {k.shape[0]} ({self._shown()}), the plan has {rows[0]} and {rows[1]} "
            f"on rank {self.comm.rank}"
        )
        if all(len(shape) == 4 and shape[1] == count for shape, count in zip(self.shapes, rows)):
            return ValueError(f"{told}, which dim 1 has; give [B, H, T, D], as by x.transpose(1, 2)")
        return ValueError(f"{told}; give shards, or select with local= the calls that stay on their rank")

    def _shown(self) -> str:
        """What `local` gets of this call."""
        query, key = map(list, self.shapes)
        return f"query {query}, key {key}"

    @uncompiled
    def _compare_keys(self, k: Tensor) -> None:
        """Warn if all ranks have the same keys, perhaps whole ones. A collective of the first such call of a block."""
        rows = {self.plan.rows(rank, "kv") for rank in range(self.plan.ranks)}
        if self.comm.size == 1 or len(rows) > 1 or not all(rows):
            return
        key = hash(("keys of sdpa", self.calls, k.shape, k.dtype))
        if key in self.comm.agreed:
            return
        some = k.detach()[:: -(-len(k) // 32), 0, :16].cpu().double()
        # rows that are all alike, as of zeros, do not tell
        told = None if bool((some == some[:1]).all()) else some.numpy().tobytes()
        found = self.comm.gather("sdpa: keys", told)
        remember(self.comm, key)
        if told is not None and all(other == told for other in found):
            warnings.warn(
                f"sdpa: all ranks give the same {len(k)} keys ({self._shown()}), as the whole memory of cross "
                "attention would be, and they count as shards; select such calls with local=, or give each rank its "
                "shard",
                stacklevel=2,
            )

    def _check_meaning(self, is_causal: bool) -> None:
        """Raise ValueError if a call without attn_mask means a mask other than the plan's."""
        mask = self.plan.mask
        if is_causal and not np.array_equal(mask.lengths, mask.kv_lengths):
            raise NotImplementedError(
                "sdpa: is_causal=True aligns the first query with the first key, plans the last ones; give attn_mask"
            )
        meant = mask.memo(("sdpa", is_causal), lambda: Mask(mask.lengths, causal=is_causal, kv_lengths=mask.kv_lengths))
        if meant != mask:
            raise ValueError(
                f"sdpa: a call with is_causal={is_causal} and no attn_mask means {meant!r}, as of Mask(lengths, "
                f"causal={is_causal}), and the plan has {mask!r}; give the plan that mask, or the call its attn_mask"
            )

    def _seed_of(self, dropout_p: float) -> int | None:
        if not dropout_p:
            return None
        if self.seed is None:
            raise ValueError(
                f"sdpa: dropout_p={dropout_p} needs a seed, equal on all ranks, from which the seeds of calls follow; "
                "give parallelize(..., sdpa=True, dropout_seed=0), or seqpar.sdpa(plan, comm, dropout_seed=step)"
            )
        return derived_seed(self.seed, self.calls)

    @property
    def _one_has_all(self) -> bool:
        """Whether one rank has the rows of all."""
        plan, sides = self.plan, ("q", "kv")
        every = [plan.mask.tokens, plan.mask.kv_tokens]
        return plan.memo(
            "one has all", lambda: every in [[plan.rows(rank, side) for side in sides] for rank in range(plan.ranks)]
        )


def _check_kinds(tensors: list[Tensor], mask: Tensor | None) -> None:
    """Raise NotImplementedError for tensors whose rows or values cannot be read as those of others."""
    if any(x.is_nested for x in tensors):
        raise NotImplementedError(
            "sdpa: attention of nested tensors; give this rank's rows of all documents back to back, [1, H, T, D]"
        )
    check_dense("sdpa", tensors)
    if mask is not None and type(mask) not in (Tensor, nn.Parameter):
        raise NotImplementedError(
            f"sdpa: attn_mask is a {type(mask).__name__}, which has no values of its own; give is_causal=True and a "
            "causal plan, or a plain tensor"
        )
    if mask is not None and (mask.layout != torch.strided or mask.is_nested):
        raise NotImplementedError(f"sdpa: attn_mask has layout {mask.layout}; give attn_mask.to_dense()")


def _first_two(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, key


def dense(x: Tensor) -> Tensor:
    """x with its last dim dense in memory, as `seqpar.attention` takes it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
