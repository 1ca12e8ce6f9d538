"""Layers of attention whose class does more than transformers' interface hands over, under the surrounding plan.

Most are of models from before that interface: their classes compute scores, masks and ALiBi biases inline. Some have a
method for the product alone, ``_attn``, which is replaced (from transformers 5.24 on, GPT-J and CodeGen call the
interface in its place); of the others the whole forward is written anew here, from their own projections. Whether it
computes what the class does is tried on a few tokens when a model becomes parallel
(`seqpar.integrations.hf.trial.runs`).

    ALiBi    a bias of keys, slope * position, is -slope * distance but for a constant in each row, which softmax drops.
             Falcon's is not served: transformers rounds it to bf16, and adds it twice with its "eager" attention.
    places   Llama 4 scales queries by their place, which its class counts in the rows at hand; here it is the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.foreign import name_of
from seqpar.integrations.hf.attention import DEFAULT, NUMERICS, attention_function, layer_of, without_seed
from seqpar.integrations.hf.forward import Forward, current, dropped
from seqpar.integrations.hf.indexed import attend, layers
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.hf.positions import dropping_tokens, scaled
from seqpar.integrations.hf.recurrent.mixers import mix, mixers
from seqpar.ops import bind
from seqpar.ops.attention.op import ATTENTION
from seqpar.ops.attention.signature import Options
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.ops.core.device import autocast
from seqpar.parallel import derived_seed, surrounding
from seqpar.private.transformers import ATTEND, reshape, split_heads
from seqpar.trial.record import under_trial

CAUSAL = Rule(causal=True)


class SurroundingRule(PlanSource):
    """Looks up the surrounding plan at the time of a call, with the mask of a rule, and a layer's seed of dropout."""

    def __init__(self, rule: Rule, layer: int) -> None:
        self.rule, self.layer = rule, layer
        bind(self)  # gives it a name for compiled code

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """The surrounding plan with the rule's mask, its comm, and the seed."""
        plan, comm, _, step = surrounding()
        make = (current() or Forward()).make
        return Given(make(plan, self.rule, None), comm, derived_seed(step, self.layer))


_source = lru_cache(maxsize=256)(SurroundingRule)  # of (rule, layer): values without a state


def attended(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, layer: int | None, scale: float, dropout: float = 0.0,
    slopes: Tensor | None = None, rule: Rule = CAUSAL,
) -> Tensor:  # fmt: skip
    """Attention of a layer over this rank's rows, [1, H, T, D_v]. q, k, v [1, heads, T, dim], of v's dtype.

    Raises: NotImplementedError for dropout in a layer without a number.
    """
    if not torch.compiler.is_compiling() and (record := under_trial()) is not None:
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        return record.attended((*rows[0].shape[:2], v.shape[-1]), *rows).transpose(0, 1)[None]
    dropout, layer = dropped(dropout) if module.training else 0.0, layer_of(module) if layer is None else layer
    if dropout and layer is None:
        raise without_seed(module)
    numerics = module.__dict__.get(NUMERICS, DEFAULT)
    rows = [autocast(x[0].transpose(0, 1).to(v.dtype)) for x in (q, k, v)]
    options = Options(scale, 0.0, dropout, None, numerics.deterministic, "auto", numerics.accuracy, False)
    out = ATTENTION((*rows, None, slopes), [_source(rule, layer or 0)], *options)[0]
    return out.transpose(0, 1)[None]


def gptj(module: Any, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """The product of GPT-J and CodeGen."""
    scale, dropout = 1 / float(module.scale_attn), module.attn_dropout.p
    return attended(module, query, key, value, layer=module.layer_idx, scale=scale, dropout=dropout), None


def gpt_neo(module: Any, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """The product of GPT-Neo, without a scale; local layers see a window."""
    rule = Rule(causal=True, left=module.config.window_size - 1) if _local(module) else CAUSAL
    dropout = module.attn_dropout.p
    return attended(module, query, key, value, layer=module.layer_id, scale=1.0, dropout=dropout, rule=rule), None


def _local(module: Any) -> bool:
    return bool(module.attention_type == "local")


def bloom(module: Any, forward: Callable[..., Any], hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> Any:
    """Bloom's layer of attention: with its residual, [1, T, hidden]."""
    q, k, v = reshape(module)(module.query_key_value(hidden_states))
    out = attended(
        module, q, k, v, layer=module.layer_idx, scale=module.inv_norm_factor, dropout=module.attention_dropout.p,
        slopes=_slopes(module.num_heads, q.device),
    )  # fmt: skip
    out = F.dropout(module.dense(_merged(out)), p=module.hidden_dropout, training=module.training)
    return residual + out, None


def mpt(
    module: Any, forward: Callable[..., Any], hidden_states: Tensor, position_bias: Tensor | None, *_: Any, **__: Any
) -> Any:
    """MPT's layer of attention, [1, T, hidden]. position_bias [H, 1, S]: slope * (1 - S), ..., slope * -1, 0."""
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))
    slopes = None if position_bias is None else -position_bias[:, 0, -2]
    out = attended(
        module, q, k, v, layer=module.layer_idx, scale=module.softmax_scale, dropout=module.attn_dropout_p,
        slopes=slopes,
    )  # fmt: skip
    return module.out_proj(_merged(out)), None


def falcon(
    module: Any, forward: Callable[..., Any], hidden_states: Tensor, *_: Any,
    position_embeddings: tuple[Tensor, Tensor], **__: Any,
) -> Any:  # fmt: skip
    """Falcon's layer of attention with rotary embeddings, [1, T, hidden]."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    q, k, v = (x.transpose(1, 2) for x in split_heads(module)(module.query_key_value(hidden_states)))
    if module.new_decoder_architecture:  # each key is there once for each query head of its group
        k, v = (x.unflatten(1, (module.num_kv_heads, -1))[:, :, 0] for x in (k, v))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    scale = 1 / math.sqrt(module.head_dim)
    out = attended(module, q, k, v, layer=module.layer_idx, scale=scale)  # without dropout, as in the class
    return module.dense(_merged(out)), None


def llama4_layer(layer: Any, forward: Callable[..., Any], hidden_states: Tensor, *given: Any, **named: Any) -> Any:
    """A layer of Llama 4, whose attention gets the positions too."""
    return forward(hidden_states, *given, positions=named["position_ids"], **named)


def llama4(
    module: Any, forward: Callable[..., Any], hidden_states: Tensor, *_: Any, attention_mask: Tensor,
    position_embeddings: Any, positions: Tensor, **rest: Any,
) -> Any:  # fmt: skip
    """Llama 4's attention without rotary embeddings, [1, T, hidden]: queries are scaled by their positions [1, T].

    Source: Llama4TextAttention, after Nakanishi 2025 (Scalable-Softmax Is Superior for Attention).
    """
    q, k, v = (
        f(hidden_states).unflatten(-1, (-1, module.head_dim)) for f in (module.q_proj, module.k_proj, module.v_proj)
    )
    scale = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    q = (q * scale[..., None, None]).to(q.dtype)
    dropout = module.attention_dropout if module.training else 0.0
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = attention_function(module, *heads, attention_mask, dropout=dropout, scaling=module.scaling, **rest)
    return module.o_proj(out.flatten(2)), None


def _tuned(module: Any) -> bool:
    return bool(module.attn_temperature_tuning and not module.use_rope)


def _merged(x: Tensor) -> Tensor:
    """Rows [1, H, T, D] as [1, T, H * D]."""
    return x.transpose(1, 2).flatten(2)


@lru_cache(maxsize=16)
def _powers(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes, as Press et al. 2022 (Train Short, Test Long) have them: of 2^n heads, then of 2^(n + 1)."""
    whole = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return tuple(first + [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)])


def _slopes(heads: int, device: torch.device) -> Tensor:
    return torch.tensor(_powers(heads), dtype=torch.float32, device=device)


class Replacement(NamedTuple):
    """What replaces a method of a class.

    places: whether it depends on a token's index in its row, so that gaps in a padding mask matter. serves: whether
    it applies to a module of the class.
    """

    method: str
    replacement: Callable[..., Any]
    places: Callable[[Any], bool] = lambda module: False
    serves: Callable[[Any], bool] = lambda module: True


CLASSES: dict[str, Replacement] = {
    "GPTJAttention": Replacement(ATTEND, gptj),
    "CodeGenAttention": Replacement(ATTEND, gptj),
    "GPTNeoSelfAttention": Replacement(ATTEND, gpt_neo, _local),
    "BloomAttention": Replacement("forward", bloom),
    "MptAttention": Replacement("forward", mpt, lambda module: True),
    "FalconAttention": Replacement("forward", falcon, serves=lambda module: not module.config.alibi),
    "Llama4TextAttention": Replacement("forward", llama4, serves=_tuned),
    "Llama4TextDecoderLayer": Replacement("forward", llama4_layer, serves=lambda layer: _tuned(layer.self_attn)),
}
MIXER = Replacement("forward", mix)
SCALED = Replacement("forward", scaled)
INDEXED = Replacement("forward", attend)


def rewritten_attention(model: nn.Module) -> list[tuple[nn.Module, Replacement]]:
    """The layers of attention of a model that are replaced, and by what."""
    found = ((module, CLASSES.get(name_of(module))) for module in model.modules())
    return [(m, written) for m, written in found if written and hasattr(m, written.method) and written.serves(m)]


def replacements(model: nn.Module) -> list[tuple[nn.Module, Replacement]]:
    """The modules of a model that seqpar computes itself, wholly or in part, and what replaces a method of each."""
    known = ((mixers(model), MIXER), (dropping_tokens(model), SCALED), (layers(model), INDEXED))
    return [*rewritten_attention(model), *((module, written) for modules, written in known for module in modules)]


def sees_places(model: nn.Module) -> bool:
    """Whether such a layer depends on places in a row, including tokens that a mask leaves out."""
    return any(written.places(module) for module, written in rewritten_attention(model))
