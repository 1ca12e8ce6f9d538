"""The name "seqpar" in transformers' registries, and who may use it: models loaded with it, and parallel ones.

Importing this module registers the name, and makes `PreTrainedModel` check that models loaded with it call it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from seqpar.comm.entry import uncompiled
from seqpar.foreign.wrap import replaced
from seqpar.integrations.hf.attention import EDITED, KEY, attention_function, edits_mask, mask_of
from seqpar.integrations.hf.config import NO_INTERFACE, mixing_layers, nested, unserved_attention
from seqpar.integrations.hf.forward import current, inside
from seqpar.ops.core.collective_op import layer_calls
from seqpar.parallel import surrounding

REGISTRIES = (AttentionInterface, AttentionMaskInterface)
# Methods of `PreTrainedModel` that say which attention a model uses.
ATTENTION_SETTERS = ("__init__", "set_attn_implementation")
MADE = "_seqpar_made"  # on models: whether they were made for `KEY`, or told to use it, whatever their config says now
OCCUPIED = "_seqpar_occupied"  # on modules whose attention keeps its name: whether that attention is parallel
CUT = "_maybe_slice_kv_shared_inputs"  # a method of Gemma 4's text models, around which `uncut` is

_entering = threading.Lock()
_entered: dict[str, tuple[int, list[Any]]] = {}  # key -> number of its models, former registry entries


class _Watch(threading.local):
    """Whether this thread is in a call that `asking` checks."""

    on = False


_watch = _Watch()


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
                made = part.__dict__[MADE] = part.config._attn_implementation == KEY
                if made and hasattr(part, CUT):
                    part.__dict__.setdefault(CUT, partial(uncut, None, None))

    give._seqpar_former = method  # type: ignore[attr-defined]
    return give


def uncut(module: nn.Module, cut: object, *given: Any, **options: Any) -> Any:
    """Inputs of layers that share keys, whole: a rank's last rows are not those whose logits are kept.

    given: the inputs, and ``logits_to_keep``, which the head heeds after them.
    """
    return given[:-1]


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

    Raises: NotImplementedError if it did not, or edits its mask. transformers accepts the name for every model, even
    for those with their own attention code or a state, and each rank would compute such a model on its rows alone.
    """
    if _watch.on or not _rows_of_a_plan(model):
        return nn.Module.__call__(model, *args, **named)
    before = layer_calls.begun
    _watch.on = True
    try:
        out = nn.Module.__call__(model, *args, **named)
    except IndexError as error:
        if edits_mask(error):
            raise _refused(model, f"cannot run inside seqpar.parallel: {EDITED}") from error
        raise
    finally:
        _watch.on = False
    if layer_calls.begun == before:
        config = model.config.get_text_config()
        reasons = [*unserved_attention(config), *mixing_layers(config)] or [NO_INTERFACE]
        what = "never called it inside seqpar.parallel and saw this rank's rows alone"
        raise _refused(model, f"{what}: {', and '.join(reasons)}")
    return out


def _refused(model: PreTrainedModel, why: str) -> NotImplementedError:
    """The error for a call of a model that was loaded with `KEY`."""
    return NotImplementedError(
        f"{type(model).__name__}, loaded with attn_implementation={KEY!r}, {why}; load it with "
        "attn_implementation='eager' and give each rank whole documents of its own, outside of seqpar.parallel"
    )


def _rows_of_a_plan(model: PreTrainedModel) -> bool:
    """Whether the user passes a rank's rows to this model; `seqpar.parallelize` tries the models that it calls."""
    if inside() or model.main_input_name != "input_ids":
        return False
    try:
        surrounding()
    except RuntimeError:
        return False
    return True


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
        state = current()
        ours = state is not None and state.text in (None, named.get("config"))
        return (mask_of if ours else mask)(*args, **named)

    return function


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
