"""``attn_implementation="seqpar"``: attention and masks of transformers models, under the plan that surrounds them.

Importing this module registers the key, and makes `PreTrainedModel` check that models loaded with it call it. Such a
model runs inside ``with seqpar.parallel(plan, comm):`` on this rank's rows ``[1, plan.rows(rank)]`` with explicit
``position_ids``; `seqpar.parallelize` does both for ordinary batches.

transformers asks a *mask function* for the mask of every kind of layer and passes the result to the layers. Here the
result is the handle of a plan with that kind's mask, a 0-d tensor. It reaches the attention function as an argument of
the layer, so recomputation, other threads and compiled layers find their plan without a context.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.integrations.hf.config import ASKED, NO_INTERFACE, mixing_layers, unserved_attention
from seqpar.integrations.hf.mask import Rule, blocks_of, rule_of
from seqpar.nn.wrap import replaced
from seqpar.ops import attention, bind
from seqpar.ops.attention.op import calls
from seqpar.ops.attention.signature import Numerics
from seqpar.parallel import derived_seed, surrounding
from seqpar.plan import Plan

KEY = "seqpar"
DEFAULT = Numerics()
NUMERICS = "_seqpar_numerics"  # an attribute of the modules of a parallel model whose numerics are not the default

# Keywords that layers pass to attention functions and that the mask already covers.
UNUSED = {
    "position_ids", "use_cache", "cache_position", "is_causal", "sliding_window", "return_dict", "output_hidden_states",
    "layer_idx", "deterministic",
}  # fmt: skip


class Forward(NamedTuple):
    """State of a forward pass besides the plan. make: returns the plan for a layer's rule.

    blocked: the same for a rule with blocks and the number of each row's block; None where blocks are not served.
    note: before rows are shared, returns what stands for the mask of a mask function and a padding mask; text: the
    config of the model whose masks these are.
    """

    make: Callable[[Plan, Rule], Plan] = lambda plan, rule: planned(plan, rule)
    blocked: Callable[[Plan, Rule, Tensor], Plan] | None = None
    padded: bool = False  # whether padding in a two-dimensional mask has been removed already
    note: Callable[[Callable[..., Any], Tensor | None], Any] | None = None
    text: PreTrainedConfig | None = None
    longest: int = 0  # positions of the longest row of all ranks' batches, where rotary embeddings depend on it
    drops: bool = True  # whether attention drops pairs in training


class Noted(NamedTuple):
    """In place of a mask, until rows are shared: the padding mask [B, S] that was handed over with it, or None."""

    padding: Tensor | None


class Unmade(NotImplementedError):
    """Why a mask cannot be made. It stands in the place of the mask: a layer that uses it raises it, if any does."""


def padding_of(mask: Any) -> Tensor | None:
    """The padding mask in what a model of images hands to its text model, with masks of layers or without.

    Raises: NotImplementedError for masks that `Forward.note` did not see.
    """
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    if masks and all(isinstance(each, Noted) for each in masks):
        return masks[0].padding
    if isinstance(mask, dict):
        raise NotImplementedError("attention_mask has masks that were made elsewhere; give a mask [B, S] of 0 and 1")
    return mask


class _Thread(threading.local):
    """What this thread is in. state: a forward pass of a parallel model; watching: a call that `asking` checks.

    callers: the modules that call attention, while that is asked.
    """

    state: Forward | None = None
    callers: set[nn.Module] | None = None
    watching = False


_thread = _Thread()
_entering = threading.Lock()


@contextmanager
def forward(state: Forward | None) -> Iterator[None]:
    """Make this the state of the thread's mask functions until the block ends."""
    before = _thread.state
    _thread.state = state
    try:
        yield
    finally:
        _thread.state = before


@contextmanager
def called_by(modules: set[nn.Module]) -> Iterator[None]:
    """A block that adds the modules that call attention in this thread."""
    before, _thread.callers = _thread.callers, modules
    try:
        yield
    finally:
        _thread.callers = before


def inside() -> bool:
    """Whether this thread is in a forward pass of a parallel model."""
    return _thread.state is not None


def longest() -> int | None:
    """The longest position + 1 of the forward pass that this thread is in; None outside of all."""
    state = _thread.state
    return None if state is None else state.longest


def dropped(probability: float) -> float:
    """The probability with which a layer drops pairs in the forward pass that this thread is in."""
    if not probability or torch.compiler.is_compiling():
        return probability
    state = _thread.state
    return probability if state is None or state.drops else 0.0


def making() -> Callable[[Plan, Rule], Plan]:
    """What returns the plan of a layer's rule: of the forward pass that this thread is in, if any."""
    state = _thread.state
    return planned if state is None else state.make  # type: ignore[no-any-return]


def planned(plan: Plan, rule: Rule) -> Plan:
    """The plan with a rule for its mask, in trees along their paths; cached."""
    return plan.memo(("rule", rule), lambda: plan.with_mask(rule.under(plan.mask)))  # type: ignore[no-any-return]


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: PreTrainedConfig | None = None,
    **unused: Any,
) -> Tensor:
    """The handle of the surrounding plan with the mask that `mask_function` describes: 0-d, from `bind`.

    The arguments are those of transformers' mask functions; its row indices and dtypes are not needed.

    Raises: RuntimeError outside `seqpar.parallel`; NotImplementedError for models whose config says that other layers
    see rows of other ranks, masks that are not bounds, several rows, keys of a cache, and two-dimensional padding
    masks, which `seqpar.parallelize` turns into documents.
    """
    return _mask(batch_size, q_length, kv_length, mask_function, attention_mask, config)  # type: ignore[no-any-return]


@uncompiled
def _mask(
    batch_size: int, q_length: int, kv_length: int, function: Callable[..., Any], attention_mask: Tensor | None,
    config: PreTrainedConfig | None,
) -> Any:  # fmt: skip
    state = _thread.state or Forward()
    if state.note is not None:
        return state.note(function, attention_mask)
    # a model of seqpar.parallelize has been tried, and its mixers are replaced
    if config is not None and not inside() and (reasons := [*unserved_attention(config), *mixing_layers(config)]):
        remedy = "; give the model to seqpar.parallelize, which knows some such layers"
        raise NotImplementedError(
            f"a model of {type(config).__name__} cannot be computed from a rank's rows: {', and '.join(reasons)}"
            f"{remedy if mixing_layers(config) != mixing_layers(config, recurrent=True, shared=True) else ''}"
        )
    try:
        around = surrounding()
    except RuntimeError as error:
        raise RuntimeError(
            f"no plan surrounds this call of a model whose attention is {KEY!r}; give the model to "
            "seqpar.parallelize(model, comm), or its rows to it inside `with seqpar.parallel(plan, comm):`"
        ) from error
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
    rule, ids = rule_of(function), blocks_of(function)
    try:
        if ids is None or state.blocked is None:
            plan = state.make(around.plan, rule)
        else:
            plan = state.blocked(around.plan, rule, ids)
    except Unmade as error:
        return error.with_traceback(None)  # whose frames hold the batch
    return handle(plan, around.comm, around.seed)


def handle(plan: Plan, comm: Comm, seed: int) -> Tensor:
    """The handle of a plan and a comm; in its storage, the seed of dropout, and whether a model is parallel."""
    bound = bind(plan, comm)
    bound.untyped_storage()._seqpar_seed = seed  # type: ignore[attr-defined]
    bound.untyped_storage()._seqpar_shared = inside()  # type: ignore[attr-defined]
    return bound


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

    query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, D_v]; attention_mask: the result of `mask_of`. It alone
    decides which keys are seen (windows, causality, documents), as in transformers' "sdpa" and "eager". s_aux: sinks.

    Raises: NotImplementedError for a layer whose mask is not from `mask_of`, and, by name, for keywords that would
    change the result; otherwise as `seqpar.attention`.
    """
    if not torch.compiler.is_compiling():
        calls.begun += 1  # even if only shapes are computed, or a checkpoint reuses the call's saved result
        if _thread.callers is not None:
            _thread.callers.add(module)
    if isinstance(attention_mask, Unmade):
        raise attention_mask
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() or attention_mask.dtype != torch.int64:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise NotImplementedError(
            f"{type(module).__name__} got attention_mask={got!r:.200}, which is not seqpar's: it must come from "
            f"transformers.masking_utils for {KEY!r}, inside seqpar.parallel or by a model given to seqpar.parallelize"
        )
    unknown = sorted(name for name, value in rest.items() if name not in UNUSED and _says(value))
    if unknown and not (unknown == [ASKED] and _shared(attention_mask)):
        if inside() and (made := [name for name in unknown if isinstance(rest[name], Tensor)]):  # calls give none
            raise NotImplementedError(
                f"{type(module).__name__} passes {', '.join(made)} to its attention, a bias that the model makes itself"
            )
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which seqpar does not know; "
            "leave it out of the call and of the config"
        )
    dropout = dropped(dropout)
    seed = _seed(module, attention_mask) if dropout else None
    numerics = module.__dict__.get(NUMERICS, DEFAULT)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention(
        q, k, v, attention_mask, scale=scaling, softcap=softcap or 0.0, sinks=s_aux, dropout_p=dropout,
        dropout_seed=seed, accuracy=numerics.accuracy, deterministic=numerics.deterministic,
    )  # fmt: skip
    return out[None], None


def _says(value: object) -> bool:
    """Whether a keyword's value has an effect: None, False and 0 do not."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


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
    """The number of a layer, by which it drops other pairs than the next one; None if nothing tells it."""
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


MADE = "_seqpar_made"  # on models: whether they were made for `KEY`, or told to use it, whatever their config says now


def marked(method: Callable[..., None]) -> Callable[..., None]:
    """A method that gives models their attention, which notes on each model whether that is `KEY`."""

    @wraps(method)
    def give(model: PreTrainedModel, *args: Any, **named: Any) -> None:
        asked = KEY in _asked(method, args, named) and model.config._attn_implementation != KEY
        if asked and not model._can_set_attn_implementation():  # transformers would only log it
            raise _unserved(model)
        method(model, *args, **named)
        if model.config._attn_implementation == KEY and _looks_up(model):  # the class would raise a KeyError
            raise _unserved(model)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                part.__dict__[MADE] = part.config._attn_implementation == KEY

    give._seqpar_former = method  # type: ignore[attr-defined]
    return give


def _asked(method: Callable[..., None], args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The names of attention that a call of `set_attn_implementation` asks for; none of another method."""
    if method.__name__ != "set_attn_implementation":
        return []
    names = args[0] if args else named.get("attn_implementation")
    return [names.get("")] if isinstance(names, Mapping) else [names]


def _looks_up(model: PreTrainedModel) -> bool:
    """Whether a model's class looks its layers up by the name of their attention, and has none for `KEY`."""
    if model._can_set_attn_implementation():
        return False
    names = vars(sys.modules.get(type(model).__module__, object)).items()
    return any(name.endswith("ATTENTION_CLASSES") and KEY not in table for name, table in names)


def _unserved(model: PreTrainedModel) -> NotImplementedError:
    """The error for a model that is told to use `KEY` and cannot."""
    reasons = unserved_attention(model.config.get_text_config()) or [NO_INTERFACE]
    return NotImplementedError(
        f"{type(model).__name__} cannot use attn_implementation={KEY!r}: {', and '.join(reasons)}; leave the name out "
        "and give the model to seqpar.parallelize, which knows some such models"
    )


@uncompiled
def _refuse_switched(model: PreTrainedModel) -> None:
    """Raise ValueError if a model made for `KEY`, whose config names another attention, is given a plan's rows."""
    if _rows_of_a_plan(model):
        raise ValueError(
            f"{type(model).__name__} was made with attn_implementation={KEY!r}, and its config now says "
            f"{model.config._attn_implementation!r}: it would see this rank's rows alone. A second model that shares "
            "the config object has changed it; give each model a copy.deepcopy(config) of its own"
        )


def called(model: PreTrainedModel, *args: Any, **named: Any) -> Any:
    """A call of any model: `nn.Module.__call__`, inside `asking` for models loaded with `KEY`.

    It replaces `PreTrainedModel.__call__`, so other modules are not affected. torch's global module hooks would slow
    down every module and become part of every compiled graph.
    """
    if getattr(model.__dict__.get("config"), "_attn_implementation", None) == KEY:
        return asking(model, *args, **named)
    if model.__dict__.get(MADE):
        _refuse_switched(model)
    return nn.Module.__call__(model, *args, **named)


@partial(torch.compiler.disable, recursive=False)
def asking(model: PreTrainedModel, *args: Any, **named: Any) -> Any:
    """A call of a model that was loaded with `KEY`, which must use that attention inside `seqpar.parallel`.

    Only the outermost model is checked, since parts need not attend; models of images or sound may use a rank's own
    input.

    Raises: NotImplementedError if it did not. transformers accepts the name for every model, even for those with their
    own attention code or a state, and each rank would compute such a model on its rows alone.
    """
    if _thread.watching or not _rows_of_a_plan(model):
        return nn.Module.__call__(model, *args, **named)
    before = calls.begun
    _thread.watching = True
    try:
        out = nn.Module.__call__(model, *args, **named)
    finally:
        _thread.watching = False
    if calls.begun == before:
        config = model.config.get_text_config()
        reasons = [*unserved_attention(config), *mixing_layers(config)] or [NO_INTERFACE]
        raise NotImplementedError(
            f"{type(model).__name__}, loaded with attn_implementation={KEY!r}, never called it inside seqpar.parallel "
            f"and saw this rank's rows alone: {', and '.join(reasons)}; load it with attn_implementation='eager' and "
            "give each rank whole documents of its own"
        )
    return out


def _rows_of_a_plan(model: PreTrainedModel) -> bool:
    """Whether the user passes a rank's rows to this model; `seqpar.parallelize` tries the models that it calls."""
    if inside() or model.main_input_name != "input_ids":
        return False
    try:
        surrounding()
    except RuntimeError:
        return False
    return True


REGISTRIES = (AttentionInterface, AttentionMaskInterface)
ATTENTION_SETTERS = (
    "__init__",
    "set_attn_implementation",
)  # methods of `PreTrainedModel` that say which attention a model uses
_entered: dict[str, tuple[int, list[Any]]] = {}  # key -> number of its models, former registry entries


def enter(key: str) -> Callable[[], None]:
    """Make the entries of a key serve parallel models, and all others as before; returns the undo.

    `KEY` does not need it: it is entered when this module is imported, and stays for models loaded by others.

    Raises: ValueError for a key that is not in both registries.
    """
    register()
    if key == KEY:
        return lambda: None
    with _entering:
        count, before = _entered.get(key, (0, []))
        if not count:
            before = [registry._global_mapping.get(key) for registry in REGISTRIES]
            if None in before:
                raise ValueError(
                    f"in_place=True: transformers has no attention functions named {key!r}; load with 'sdpa'"
                )
            for registry, function in zip(REGISTRIES, (_either(before[0]), _either_mask(before[1]))):
                registry.register(key, function)
        _entered[key] = count + 1, before

    def leave() -> None:
        with _entering:
            count, before = _entered.pop(key)
            if count > 1:
                _entered[key] = count - 1, before
                return
            for registry, function in zip(REGISTRIES, before):
                registry.register(key, function)

    return leave


def _either(attend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that accepts masks of either kind."""

    @wraps(attend)
    def function(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        mask = rest[0] if rest else named.get("attention_mask")
        ours = isinstance(mask, Tensor) and not mask.dim()
        if not ours and getattr(module, OCCUPIED, False):
            raise RuntimeError(
                f"{type(module).__name__} is called outside the forward of the model that was given to "
                "seqpar.parallelize(..., in_place=True), and would see one rank's rows: something has replaced that "
                "forward, or calls an inner module; call the model itself, or work inside handle.local()"
            )
        return (attention_function if ours else attend)(module, query, key, value, *rest, **named)

    return function


def _either_mask(mask: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function that returns handles inside forward passes of parallel models."""

    @wraps(mask)
    def function(*args: Any, **named: Any) -> Any:
        state = _thread.state
        ours = state is not None and state.text in (None, named.get("config"))
        return (mask_of if ours else mask)(*args, **named)

    return function


OCCUPIED = "_seqpar_occupied"  # on modules whose attention keeps its name: whether that attention is parallel


@contextmanager
def occupied(model: PreTrainedModel) -> Iterator[None]:
    """Until the block ends, the model's attention refuses calls other than from its parallel forward."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module.__dict__.get("config"), PreTrainedConfig):
                stack.enter_context(replaced(module, {OCCUPIED: True}))
        yield


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation, on one rank, until the block ends."""
    own = {id(m.config): m.config for m in model.modules() if isinstance(m.__dict__.get("config"), PreTrainedConfig)}
    with ExitStack() as stack:
        for module in model.modules():
            for mark in {OCCUPIED, MADE} & module.__dict__.keys():
                stack.enter_context(replaced(module, {mark: False}))
        for config in [inner for outer in own.values() for inner, _ in nested(outer, outer)]:
            stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
            config._attn_implementation_internal = name
        yield


def nested(old: PreTrainedConfig, new: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """A config and its nested configs, each with its counterpart in another config."""
    yield old, new
    for name, value in old.__dict__.items():
        if isinstance(value, PreTrainedConfig):
            yield from nested(value, new.__dict__[name])


def register() -> None:
    """Enter the key in the registries, `called` and `marked` in `PreTrainedModel`, as importing this module does."""
    AttentionInterface.register(KEY, attention_function)
    AttentionMaskInterface.register(KEY, mask_of)
    if "__call__" not in PreTrainedModel.__dict__:  # else it is registered, perhaps inside a wrapper
        PreTrainedModel.__call__ = called
    for name in ATTENTION_SETTERS:
        if not hasattr(getattr(PreTrainedModel, name), "_seqpar_former"):
            setattr(PreTrainedModel, name, marked(getattr(PreTrainedModel, name)))


def unregister() -> None:
    """Undo `register`; models that still use the key then fail with its name."""
    for registry in REGISTRIES:
        registry._global_mapping.pop(KEY, None)
    if PreTrainedModel.__dict__.get("__call__") is called:
        del PreTrainedModel.__call__
    for name in ATTENTION_SETTERS:
        method = PreTrainedModel.__dict__[name]
        if hasattr(method, "_seqpar_former"):
            setattr(PreTrainedModel, name, method._seqpar_former)


register()
