"""Attention of this rank's rows as modules: of q, k, v, or torch's multi-head one; and checkpoints that keep it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from seqpar.comm import Comm
from seqpar.ops import bind
from seqpar.ops.attention.op import ATTENTION
from seqpar.ops.attention.signature import Accuracy, Options
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.ops.core.device import autocasts
from seqpar.parallel import derived_seed, surrounding
from seqpar.plan import Plan
from seqpar.private.torch import next_node, node_under_way

_layers = count()


class LayerPlan(PlanSource):
    """One layer's plan: the window that narrows its masks, the number that its dropout depends on, and its binding.

    A copy is another layer, with its own number unless one was given, and without a binding.
    """

    used = False  # whether a call without a plan has used it
    since = 0  # the first node recorded under the current binding; 0 without calls under an earlier one

    def __init__(self, window: tuple[int | None, int | None] | None, layer: int | None) -> None:
        self.window, self.layer = window, layer
        self.number = next(_layers) if layer is None else layer
        self.bound: tuple[Plan, Comm, int | None] | None = None
        bind(self)  # gives it a name for compiled code

    def bind(self, bound: tuple[Plan, Comm, int | None] | None) -> None:
        """Use this plan for calls that give none; None for the surrounding one."""
        self.since = next_node() if self.used else 0
        self.bound = bound

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """The plan, comm and seed of a call; see `PlanSource`.

        Raises: RuntimeError in a backward pass that repeats a call whose layer was bound or unbound since.
        """
        plan, comm, seed = (*given, seed) if given else self._looked_up(seed)
        if self.window is not None and isinstance(plan, Plan):  # anything else is refused by the call, on every rank
            plan = plan.memo(("window", self.window), lambda: plan.with_mask(plan.mask.windowed(self.window)))
        return Given(plan, comm, None if seed is None else derived_seed(seed, self.number))

    def _looked_up(self, seed: int | None) -> Given:
        """The bound or the surrounding plan and comm; the call's seed takes precedence."""
        if 0 <= node_under_way() < self.since:
            raise RuntimeError(
                "a layer is called again in a backward pass, as a checkpoint does, and was bound or unbound since its "
                "forward; bind it after the backward, or give the layer its plan, or seqpar.bind(plan, comm)"
            )
        self.used = True
        if self.bound is not None:
            plan, comm, of_step = self.bound
        else:
            plan, comm, _, of_step = surrounding()
        return Given(plan, comm, of_step if seed is None else seed)

    def __deepcopy__(self, memo: object) -> LayerPlan:
        return LayerPlan(self.window, self.layer)

    def __getstate__(self) -> dict[str, object]:
        return {"window": self.window, "layer": self.layer, "number": self.number, "bound": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        bind(self)


class Attention(nn.Module):
    """Attention as a layer without parameters, under the plan of the call, of the layer, or of the surrounding block.

        with seqpar.parallel(plan, comm):
            out = attention(q, k, v)

    scale, softcap, deterministic, kernel, accuracy: as in `seqpar.attention`. window: (left, right), narrows every
    plan's mask to keys within this distance, as some layers of some models do. dropout: of the probabilities, while
    training; its seed follows from the step's (given by `seqpar.parallel`, `bind` or the call) and the layer's number.
    layer: that number, equal on all ranks; by default layers, and copies, are numbered as they are created. A layer
    that is called several times in a step drops the same pairs each time, unless the calls give seeds.

    When an activation checkpoint repeats a call, the call looks plan, comm and seed up again: its arguments, else what
    the layer was bound to in forward if it still is, else what surrounded the forward (see `seqpar.parallel`);
    otherwise it raises RuntimeError. Under autocast q, k and v are cast as for torch's own attention.
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: tuple[int | None, int | None] | None = None,
        dropout: float = 0.0,
        deterministic: bool = True,
        kernel: str = "auto",
        accuracy: Accuracy = "exact",
        layer: int | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.deterministic, self.kernel, self.accuracy = deterministic, kernel, accuracy
        self.source = LayerPlan(window, layer)

    def bind(self, plan: Plan, comm: Comm, *, seed: int | None = None) -> None:
        """Use this plan for calls that give none, until `unbind` or another `bind`. Copies are not bound.

        seed: the step's, required with dropout.
        """
        self.source.bind((plan, comm, seed))

    def unbind(self) -> None:
        """Let calls that give no plan use the surrounding one again."""
        self.source.bind(None)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan | Tensor | None = None,
        comm: Comm | None = None,
        *,
        seed: int | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """This rank's rows of attention [T, H, D_v]. A collective, forward and backward.

        q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v]: this rank's rows; or all three [1, ...], and then the
        result too. plan, comm: of this call; or the handle of both in place of the plan. seed: the step's. sinks,
        alibi_slopes [H].

        Raises: as `seqpar.attention`; RuntimeError without a plan, and in a recomputation that is not recognised as one
        or that makes other calls than forward.
        """
        if comm is not None and plan is None:
            raise ValueError("a layer was given a comm without a plan")
        batched = q.dim() == 4
        if batched:
            q, k, v = (_unbatched(x) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        options = Options(
            self.scale, self.softcap, dropout, seed, self.deterministic, self.kernel, self.accuracy, False
        )  # fmt: skip
        given = [] if plan is None else [plan] if comm is None else [plan, comm]
        out = ATTENTION((*autocasts([q, k, v]), sinks, alibi_slopes), [self.source, *given], *options)[0]
        return out.unsqueeze(0) if batched else out

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        shown = {
            "scale": self.scale, "softcap": self.softcap or None, "window": self.source.window,
            "dropout": self.dropout or None, "kernel": None if self.kernel == "auto" else self.kernel,
            "accuracy": None if self.accuracy == "exact" else self.accuracy,
        }  # fmt: skip
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


def _unbatched(x: Tensor) -> Tensor:
    if x.dim() != 4 or x.shape[0] != 1:
        raise ValueError(
            f"q, k, v must be this rank's rows, packed [T, heads, dim] or [1, T, heads, dim], got {list(x.shape)}: "
            "several documents are one packed batch, which the plan cuts apart (seqpar.data.share packs a padded one)"
        )
    return x[0]


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on packed rows under a plan, with the same constructor, parameters and state dict.

    Called with this rank's rows of query, key and value, [T, E] or a batch of one, it returns the rows that torch's
    module returns for each document under the plan's mask. That mask is the only one: ``attn_mask``, ``is_causal`` and
    ``key_padding_mask`` are refused. ``need_weights`` is False by default, as no rank has all weights. The plan, and
    the seed of dropout, are the bound or the surrounding ones, as for `Attention`.

    Raises: NotImplementedError for add_bias_kv, and at a call for masks, ``need_weights=True`` and nested tensors;
    ValueError for a batch of several.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias_k is not None:
            raise NotImplementedError("MultiheadAttention: add_bias_kv=True is not supported")
        self.attention = Attention()

    def _reset_parameters(self) -> None:
        # torch's encoder layers read a module's parameters directly if it offers this, and would skip the plan
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def bind(self, plan: Plan, comm: Comm, *, seed: int | None = None) -> None:
        """As `Attention.bind`."""
        self.attention.bind(plan, comm, seed=seed)

    def unbind(self) -> None:
        """As `Attention.unbind`."""
        self.attention.unbind()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """This rank's rows of attention, in the query's shape; None in place of weights. A collective."""
        masks = {"key_padding_mask": key_padding_mask is not None, "attn_mask": attn_mask is not None}
        for name, given in {**masks, "is_causal=True": is_causal}.items():
            if given:
                raise NotImplementedError(f"MultiheadAttention: {name}: the plan's mask takes its place")
        if need_weights:
            raise NotImplementedError("MultiheadAttention: need_weights=True: no rank has all weights")
        if query.is_nested or key.is_nested or value.is_nested:
            raise NotImplementedError("MultiheadAttention: nested tensors; give this rank's rows [T, E]")
        same = query is key and key is value
        rows, *others = (self._rows(x) for x in ((query,) if same else (query, key, value)))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in self._project(rows, *others))
        sinks = q.new_zeros(self.num_heads) if self.add_zero_attn else None  # a key of zeros: logit 0, value 0
        self.attention.dropout = self.dropout
        out = self.out_proj(self.attention(q, k, v, sinks=sinks).flatten(1))
        return out.reshape(*query.shape[:-1], self.embed_dim), None

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x
        batch = 0 if self.batch_first else 1
        if x.dim() != 3 or x.shape[batch] != 1:
            raise ValueError(
                f"MultiheadAttention: expected this rank's rows [T, E] or a batch of one, got {list(x.shape)} with "
                f"batch_first={self.batch_first}: several documents are one packed batch, which the plan cuts apart"
            )
        return x.squeeze(batch)

    def _project(self, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        if not others and self.in_proj_weight is not None:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        given = (query, *(others or (query, query)))
        return tuple(F.linear(x, w, b) for x, w, b in zip(given, weights, biases, strict=True))


def save_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Keep attention outputs (no repeated exchange) and recompute everything else in an activation checkpoint.

        checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.nn.save_attention)

    It costs the memory of ``out`` and ``lse``, and of the exchanged q, k, v under Ulysses; results and gradients
    match a call without a checkpoint. As with every selective checkpoint of torch, only one backward pass is possible.
    """
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]


def _policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keep the results of attention, seqpar's or another library's, which is known by the name of its operator."""
    attends = "attention" in str(op) or "attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE
