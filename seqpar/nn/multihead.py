"""`MultiheadAttention`: torch's module, on this rank's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.nn.attention import Attention

if TYPE_CHECKING:
    from seqpar.comm import Comm
    from seqpar.plan import Plan


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
