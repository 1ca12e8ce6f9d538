"""Whether a model has the weights that a trial needs; else a small model of the same classes is tried in its place.

On the meta device parameters hold nothing, sharded ones are there in part, and DeepSpeed's ZeRO 3 leaves them empty.
A trial finds out masks, positions, losses and rows that meet, which follow from the classes and the config, not from
the weights. So the trial takes a new model of that config with random weights: few layers, each kind of layer once, two
heads of the same dim, and a small vocabulary.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from seqpar.foreign import kind_of, name_of
from seqpar.foreign.wrap import ForwardWrapper, replaced
from seqpar.integrations.hf.attention import implementation
from seqpar.integrations.hf.config import FFN, HEADS, HIDDEN, KEY_HEADS, LAYERS
from seqpar.integrations.hf.rewritten_attention import replacements
from seqpar.private.transformers import ATTENTION, LOSS_FUNCTION, attention_of

_making = threading.Lock()  # the generator is one for all threads
VOCABULARY, WIDTH, EXPERTS = 64, 48, 4
WRAPPERS = {"CheckpointWrapper", "OffloadWrapper", "OptimizedModule"}  # torch's, around modules that compute the same
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
AT_MOST = {
    **dict.fromkeys((*FFN, "moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


class NoWeights(NotImplementedError):
    """A model that cannot be tried, because its weights are elsewhere or not loaded yet."""


def elsewhere(model: PreTrainedModel) -> str:
    """Where the weights of a model are, if not in it; else ""."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "fully_shard has sharded it"
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            return f"{name} is a DTensor"
        if p.is_meta:
            return f"{name} is on the meta device"
        if hasattr(p, "ds_id"):
            return f"DeepSpeed's ZeRO 3 has sharded {name}"
    return ""


@contextmanager
def twin_of(model: PreTrainedModel, where: str) -> Iterator[PreTrainedModel]:
    """A small model of the same classes, with seqpar's attention and mixers as the model has them.

    Raises: NoWeights for a model whose config cannot be made small, or with modules that its config does not name.
    """
    try:
        twin = _made(model)
    except Exception as error:
        raise unlike(model, where, f"a small one of its config failed: {type(error).__name__}: {error}") from error
    if other := sorted({name_of(m) for m in model.modules()} - {name_of(m) for m in twin.modules()} - WRAPPERS):
        raise unlike(model, where, f"it has modules that one of its config lacks: {', '.join(other)}")
    with ExitStack() as stack:
        for module, written in replacements(twin):
            around = ForwardWrapper(module, getattr(module, written.method), written.replacement)
            stack.enter_context(replaced(module, {written.method: around}))
        stack.enter_context(implementation(twin, attention_of(model.config)))
        yield twin


def unlike(model: PreTrainedModel, where: str, why: str) -> NoWeights:
    """The error for a model whose twin does not show what it does."""
    return NoWeights(
        f"parallelize({name_of(model)}): {where}, so a small model of its config is tried in its place, but {why}; "
        "load the weights on every rank, then call parallelize"
    )


def check_weights(model: PreTrainedModel) -> None:
    """Raise NoWeights for a model with embeddings that tell no tokens apart."""
    for name, module in model.named_modules():
        # an embedding of two rows or fewer is of token types, which may be zero
        if isinstance(module, nn.Embedding) and len(module.weight) > 2:
            if not bool(module.weight.isfinite().all()):
                raise _later(model, f"{name}.weight has infinities or NaN")
            if bool((module.weight == module.weight[-1]).all()):
                raise _later(model, f"{name}.weight is the same for every token")


def check_shown(model: PreTrainedModel, apart: Tensor, together: Tensor) -> None:
    """Raise NoWeights if a trial showed nothing. Rows [1, T, n]: each token alone, and all in one document."""
    if not (apart.isfinite().all() and together.isfinite().all()):
        raise _later(model, "it gives infinities or NaN for a few tokens")
    if apart.equal(together):
        raise _later(model, "its attention changes nothing")


def _later(model: PreTrainedModel, what: str) -> NoWeights:
    return NoWeights(
        f"parallelize({type(model).__name__}): {what}, as if its weights were not loaded yet; "
        "load or initialise the weights, then call parallelize"
    )


def _made(model: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    _shrink(config)
    setattr(config, ATTENTION, "eager")
    kind: Any = kind_of(model)
    with _making, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        twin: PreTrainedModel = kind(config)
        # 16 bits would show less
        twin = twin.double() if model.dtype is torch.float64 else twin.float()
        for p in twin.parameters():
            if p.dim() > 1:  # weights at which attention matters
                nn.init.normal_(p, 0.0, p.shape[-1] ** -0.5)
    if (own := vars(model).get(LOSS_FUNCTION)) is not None:
        twin.loss_function = own
    return twin.train(model.training)


def _shrink(config: PreTrainedConfig) -> None:
    """Make a config small, in its own terms."""
    if config.get_text_config() is not config:
        raise NotImplementedError(f"{type(config).__name__} consists of several configs")
    own = config.__dict__
    heads, few = _first(config, HEADS), 2
    several = _first(config, KEY_HEADS)
    hidden = _first(config, HIDDEN)
    key_heads = few if several is None or heads is None or several >= heads else 1
    sizes: dict[str, int] = {}
    if heads is not None and hidden is not None and heads > few and hidden % heads == 0:
        sizes |= dict.fromkeys(HEADS, few) | dict.fromkeys(KEY_HEADS, key_heads)
        sizes |= dict.fromkeys(HIDDEN, hidden // heads * few)
    sizes |= {name: min(most, own[name]) for name, most in AT_MOST.items() if type(own.get(name)) is int}
    layers = _first(config, LAYERS)
    kept = _layers(config, layers or 0)
    for name, value in own.items():
        if isinstance(value, list) and len(value) == layers:
            own[name] = value[:kept]
    sizes |= dict.fromkeys(LAYERS, kept)
    for name, value in sizes.items():
        if type(own.get(name)) is int and value:
            setattr(config, name, value)
    for name in TOKENS:
        token = getattr(config, name, None)
        if isinstance(token, int) and token >= VOCABULARY:
            setattr(config, name, 0)


def _layers(config: PreTrainedConfig, layers: int) -> int:
    """How many layers have each kind at least once."""
    kinds = getattr(config, "layer_types", None) or ["only"] * layers
    last = max((kinds.index(kind) for kind in set(kinds)), default=0)
    dense = getattr(config, "first_k_dense_replace", 0) or 0
    return min(layers, max(2, last + 1, dense + 1))


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if type(value := getattr(config, name, None)) is int), None)
