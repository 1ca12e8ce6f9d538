"""``attn_implementation="seqpar"``: attention and masks of transformers models, under the plan that surrounds them.

A model loaded with it runs inside ``with seqpar.parallel(plan, comm):`` on this rank's rows ``[1, plan.rows(rank)]``
with explicit ``position_ids``; `seqpar.parallelize` does both for ordinary batches.

transformers asks a *mask function* for the mask of every kind of layer and passes the result to the layers. Here the
result is the handle of a plan with that kind's mask, a 0-d tensor. It reaches the attention function as an argument of
the layer, so recomputation, other threads and compiled layers find their plan without a context.

Importing this module enters the name in transformers' registries of attention and masks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from seqpar.comm.entry import uncompiled
from seqpar.integrations.hf.config import ASKED, mixing_layers, nested, slices_masks, unserved_attention
from seqpar.integrations.hf.forward import Forward, current, dropped
from seqpar.integrations.hf.latents import latents_of, weights
from seqpar.integrations.hf.mask import Rule, UnsupportedMask, blocks_of, rule_of
from seqpar.ops import attention, bind, latent_attention
from seqpar.ops.attention.signature import Numerics
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.collective_op import layer_calls
from seqpar.parallel import derived_seed, surrounded, surrounding
from seqpar.private.transformers import ATTENTION, registered
from seqpar.trial.record import under_trial

KEY = "seqpar"
DEFAULT = Numerics()
CHOSEN = "indices"  # the keyword of layers that choose their keys
FETCHED = "_seqpar_fetched"  # an attribute of their masks, which `seqpar.integrations.hf.indexed` makes
NUMERICS = "_seqpar_numerics"  # an attribute of the modules of a parallel model whose numerics are not the default


class OwnMask(NotImplementedError):
    """A layer of attention got a mask that transformers.masking_utils did not make."""


# Keywords that layers pass to attention functions, which ignore them or find them in the mask.
UNUSED = {
    "position_ids", "use_cache", "cache_position", "is_causal", "sliding_window", "return_dict", "output_hidden_states",
    "layer_idx", "deterministic", "token_type_ids",
}  # fmt: skip


@uncompiled
def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    config: PreTrainedConfig | None = None,
    **unused: Any,
) -> Any:
    """The handle of the surrounding plan with the mask that `mask_function` describes: 0-d, from `bind`.

    It is [1, 1, 1, 1] for models that slice their masks.

    The arguments are those of transformers' mask functions; its row indices and dtypes are not needed.

    Raises: RuntimeError outside `seqpar.parallel`; NotImplementedError for models whose config says that other layers
    see rows of other ranks, masks that are not bounds, several rows, keys of a cache, and two-dimensional padding
    masks, which `seqpar.parallelize` turns into documents.
    """
    state = current() or Forward()
    if state.note is not None:
        return state.note(mask_function, attention_mask, config)
    alone = current() is None  # a model of seqpar.parallelize has been tried, and its mixers are replaced
    if config is not None and alone and (reasons := [*unserved_attention(config), *mixing_layers(config)]):
        remedy = "; give the model to seqpar.parallelize, which knows some such layers"
        raise NotImplementedError(
            f"a model of {type(config).__name__} cannot be computed from a rank's rows: {', and '.join(reasons)}"
            f"{remedy if mixing_layers(config) != mixing_layers(config, recurrent=True, shared=True) else ''}"
        )
    if not surrounded():
        raise RuntimeError(
            f"no plan surrounds this call of a model whose attention is {KEY!r}; give the model to "
            "seqpar.parallelize(model, comm), or its rows to it inside `with seqpar.parallel(plan, comm):`"
        )
    around = surrounding()
    if batch_size != 1 or q_length != kv_length:
        raise NotImplementedError(
            f"{batch_size} rows of {q_length} queries and {kv_length} keys: seqpar takes the plan's rows [1, T], and "
            "no keys of a cache or of another sequence; give seqpar.parallelize(model, comm) for ordinary batches"
        )
    if attention_mask is not None and not state.padded and not bool(attention_mask.all()):
        raise NotImplementedError(
            f"attention_mask {list(attention_mask.shape)} with zeros inside seqpar.parallel: the plan has the "
            "mask; leave it out, or let seqpar.parallelize(model, comm) turn a padding mask into documents"
        )
    rule = rule_of(mask_function)
    if alone and (error := left_out(rule, config)):
        return error
    try:
        plan = state.make(around.plan, rule, blocks_of(mask_function))
    except UnsupportedMask as error:
        return error.with_traceback(None)  # whose frames hold the batch
    made = bind(plan, around.comm)
    storage: Any = made.untyped_storage()
    storage._seqpar_seed, storage._seqpar_shared = around.seed, not alone  # of dropout; whether a model is parallel
    return made.view(1, 1, 1, 1) if slices_masks(type(config)) else made


def left_out(rule: Rule, config: PreTrainedConfig | None) -> UnsupportedMask | None:
    """The error for a causal mask of layers that are not: "sdpa" leaves such a mask out, and "eager" applies it."""
    if not rule.causal or rule.block or getattr(config, "use_bidirectional_attention", None) not in (True, "all"):
        return None
    return UnsupportedMask(
        "layers that see ahead (use_bidirectional_attention=True) got a causal mask, which 'sdpa' leaves out where no "
        "row is padded, and 'eager' never; give token_type_ids, 0 for tokens that see each other and 1 for others, or "
        "load it with use_bidirectional_attention=False in the config of its text model"
    )


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer over this rank's rows: out [1, T, H, D_v], and no weights.

    query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, D_v]; or latents [1, 1, T, R] and their rotated parts
    [1, 1, T, E] of layers that hand these on (`seqpar.integrations.hf.latents`). attention_mask: the result of
    `mask_of`. It alone decides which keys are seen (windows, causality, documents), as in transformers' "sdpa" and
    "eager". s_aux: sinks.

    Raises: NotImplementedError for a layer whose mask is not from `mask_of`, and, by name, for keywords that would
    change the result; otherwise as `seqpar.attention`.
    """
    if not torch.compiler.is_compiling():
        layer_calls.begun += 1  # even if only shapes are computed, or a checkpoint reuses the call's saved result
        if (state := current()) is not None and state.callers is not None:
            state.callers.add(module)
        if state is not None and state.attend is not None and isinstance(attention_mask, Rule):
            _refuse_unknown(module, rest, None)
            how: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
            if (found := latents_of(module)) is not None:
                how["made"] = partial(weights, found[1], key, value)
            return state.attend(module, query, attention_mask, **how), None
    indices: Tensor | None = None
    if getattr(attention_mask, FETCHED, False):
        indices = rest.pop(CHOSEN, None)
    if indices is None:
        attention_mask = handle_of(module, attention_mask)
        _refuse_unknown(module, rest, attention_mask)
    else:
        _refuse_unknown(module, rest | {"dropout": dropped(dropout), "softcap": softcap, "s_aux": s_aux}, None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    latents = latents_of(module)
    if not torch.compiler.is_compiling() and (record := under_trial()) is not None:
        if latents is not None:
            latents[0].attends(key, value)
        return record.attended((*q.shape[:2], v.shape[2]), q, k, v)[None], None
    if indices is not None:
        seen = attention_mask & torch.zeros_like(attention_mask).scatter(-1, indices.long()[:, None], True)
        out, _ = AttentionInterface().get_interface("sdpa", None)(module, query, key, value, seen, scaling=scaling)
        return out, None
    dropout = dropped(dropout)
    seed = _seed(module, attention_mask) if dropout else None
    numerics = module.__dict__.get(NUMERICS, DEFAULT)
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "dropout_p": dropout, "dropout_seed": seed,
        "accuracy": numerics.accuracy, "deterministic": numerics.deterministic,
    }  # fmt: skip
    if latents is None or latents[0].refusal:
        return attention(q, k, v, attention_mask, **options)[None], None
    w_k, w_v = weights(latents[1], key, value)
    rotated = value[0, 0].to(key.dtype)
    return latent_attention(q, key[0, 0], rotated, w_k, w_v, attention_mask, **options)[None], None


def handle_of(module: nn.Module, mask: Any) -> Tensor:
    """The handle of a layer's plan, 0-d, of the mask that the layer got.

    Raises: NotImplementedError, the reason where there is no plan, or for a mask that is not from `mask_of`.
    """
    if isinstance(mask, UnsupportedMask):
        with errors_on_all_ranks("attention", surrounding().comm):
            raise mask
    if isinstance(mask, Tensor) and mask.shape == (1, 1, 1, 1):
        mask = mask.view(())
    if not isinstance(mask, Tensor) or mask.dim() or mask.dtype != torch.int64:
        got = list(mask.shape) if isinstance(mask, Tensor) else mask
        kind = OwnMask if isinstance(mask, Tensor) else NotImplementedError
        raise kind(
            f"{type(module).__name__} got attention_mask={got!r:.200}, which is not seqpar's: it must come from "
            f"transformers.masking_utils for {KEY!r}, inside seqpar.parallel or by a model given to seqpar.parallelize"
        )
    return mask


def _refuse_unknown(module: nn.Module, rest: dict[str, Any], mask: Tensor | None) -> None:
    """Raise NotImplementedError for keywords that would change the result. mask: the handle, if there is one."""
    # None, False and 0 have no effect
    unknown = sorted({name for name, value in rest.items() if isinstance(value, Tensor) or value} - UNUSED)
    if unknown and not (unknown == [ASKED] and mask is not None and _shared(mask)):
        made = [name for name in unknown if isinstance(rest[name], Tensor)]  # calls give none
        if current() is not None and made:
            raise NotImplementedError(
                f"{type(module).__name__} passes {', '.join(made)} to its attention, a bias that the model makes itself"
            )
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which seqpar does not know; "
            "leave it out of the call and of the config"
        )


@uncompiled
def _shared(mask: Tensor) -> bool:
    """Whether a mask was made in the forward pass of a parallel model, which computes balance losses itself."""
    return bool(getattr(mask.untyped_storage(), "_seqpar_shared", False))


@uncompiled
def _seed(module: nn.Module, mask: Tensor) -> int:
    """The seed of a layer's dropout: equal on all ranks and when recomputed, different for every layer and batch."""
    seed, layer = getattr(mask.untyped_storage(), "_seqpar_seed", None), layer_of(module)
    if seed is None or layer is None:
        raise without_seed(module)
    return derived_seed(seed, layer)


LAYER = "_seqpar_layer"  # on modules of a parallel model: a number for those that have no layer_idx


def layer_of(module: nn.Module) -> int | None:
    """The number of a layer, by which it drops other pairs than the next one; None if it is unknown."""
    own = getattr(module, "layer_idx", None)
    return module.__dict__.get(LAYER) if own is None else own


def numbered(model: nn.Module, callers: Collection[str], calls: int) -> dict[nn.Module, int]:
    """Numbers for the modules of these classes, if each makes one of the calls of attention in a forward."""
    found = [module for module in model.modules() if type(module).__name__ in callers]
    return {module: 1 << 16 | n for n, module in enumerate(found)} if len(found) >= calls else {}


def without_seed(module: nn.Module) -> NotImplementedError:
    """The error for dropout in a layer that has no seed."""
    return NotImplementedError(
        f"attention dropout in {type(module).__name__} needs a seed for every batch and layer, and there is no "
        "layer_idx, or its mask is a copy; set the dropout of attention probabilities to 0"
    )


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation, on one rank, until the block ends."""
    own = {id(m.config): m.config for m in model.modules() if isinstance(m.__dict__.get("config"), PreTrainedConfig)}
    with ExitStack() as stack:
        for config in [inner for outer in own.values() for inner, _ in nested(outer, outer)]:
            stack.callback(setattr, config, ATTENTION, getattr(config, ATTENTION))
            setattr(config, ATTENTION, name)
        yield


def register() -> None:
    """Enter the key in the registries, as importing this module does."""
    AttentionInterface.register(KEY, attention_function)
    AttentionMaskInterface.register(KEY, mask_of)


def unregister() -> None:
    """Undo `register`; models that still use the key then fail with its name."""
    for registry in (AttentionInterface, AttentionMaskInterface):
        registered(registry).pop(KEY, None)


register()
