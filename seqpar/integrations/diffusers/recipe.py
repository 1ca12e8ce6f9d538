"""Recipes: which arguments of a model have tokens, and which of its modules see them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.foreign import name_of
from seqpar.foreign.hooks import Named, check_hooks
from seqpar.foreign.wrap import is_surrounded
from seqpar.integrations.diffusers.forward import SharedForward
from seqpar.integrations.diffusers.tokens import Streams, TokenCounts
from seqpar.integrations.diffusers.wrappers import attending, attending_whole, gathering_rows
from seqpar.private.diffusers import BACKENDS, backend_of, chunk_dim, chunk_size, parallel_config
from seqpar.trial.randomness import active_dropout


def attentions(named: Named) -> list[tuple[str, nn.Module]]:
    """Those modules of a model that have an attention processor."""
    return [(name, module) for name, module in named if hasattr(module, "processor")]


def check_alone(named: Named) -> None:
    """Raise NotImplementedError for a model under another wrapper of diffusers, or with hooks that see a share."""
    model = named[0][1]
    name = name_of(model)
    if parallel_config(model, None) is not None:
        raise NotImplementedError(f"diffusers: {name} is under enable_parallelism, which splits its tokens too")
    if getattr(model, "is_cache_enabled", False):
        raise NotImplementedError(
            f"diffusers: {name} is under enable_cache, which skips attention; call its disable_cache() first"
        )
    check_hooks(named)


Count = Callable[[nn.Module, Mapping[str, Any]], int]


def tokens_of(argument: str, dim: int = 1) -> Count:
    """A count of the tokens of an argument, which are its elements in a dim."""
    return lambda model, arguments: arguments[argument].shape[dim]  # type: ignore[no-any-return]


def _unchanged(run: SharedForward, arguments: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelRecipe:
    """Which arguments of a model have tokens, in which dim, and which modules see them.

    processors: of its attention, by class. shared: argument -> (dim of the tokens, their stream). whole: other
    arguments. mask: the argument with the valid text. joint: the streams of an attention's tokens, in their order.
    attends: modules whose attention is over others, by the last word of their names -> (streams of queries, of keys).
    cross: those whose attention is over tensors that every rank has whole. text: the argument with tokens of text that
    take part in joint attention, if any. counts: stream -> its tokens in one sample. modules: wrappers for other
    modules; ``blocks.*`` are all children of ``blocks``. exits: modules whose results are gathered -> their stream.
    change: adjusts arguments that depend on the forward. masks: whether the model counts the valid text, which comes
    first, and makes a mask of its own. settings: values of the model's config that are supported.
    """

    processors: tuple[str, ...]
    shared: Mapping[str, tuple[int, str]]
    whole: tuple[str, ...]
    mask: str | None = None
    joint: Streams = ("text", "image")
    attends: Mapping[str, tuple[Streams, Streams]] = field(default_factory=dict)
    cross: tuple[str, ...] = ()
    text: str | None = None
    counts: Mapping[str, Count] = field(default_factory=lambda: {"image": tokens_of("hidden_states")})
    modules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    exits: Mapping[str, str] = field(default_factory=lambda: {"proj_out": "image"})
    change: Callable[[SharedForward, dict[str, Any]], dict[str, Any]] = _unchanged
    masks: bool = False
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def surrounding(self, named: Named) -> dict[str, Callable[..., Any]]:
        """The wrappers of modules that see tokens, by the modules' names."""
        model, found = named[0][1], dict[str, Callable[..., Any]]()
        for pattern, wrapper in self.modules.items():
            parent, every, _ = pattern.partition(".*")
            names = [f"{parent}.{name}" for name, _ in model.get_submodule(parent).named_children()]
            found |= dict.fromkeys(names if every else [parent], wrapper)
        for name, _ in attentions(named):
            words = name.split(".")
            over = self.attends.get(words[-1], (self.joint, self.joint))
            found[name] = attending_whole if {*words} & {*self.cross} else partial(attending, *over)
        return found | {name: partial(gathering_rows, stream) for name, stream in self.exits.items()}

    def check(self, named: Named, arguments: Mapping[str, Any]) -> None:
        """Raise NotImplementedError for arguments, settings and modules that cannot be shared."""
        model = named[0][1]
        self._check_surrounding(named)
        self._check_arguments(model, arguments)
        self._check_processors(named)
        check_alone(named)
        _check_modules(named)
        self._check_settings(model)

    def _check_surrounding(self, named: Named) -> None:
        """Raise NotImplementedError for modules that see tokens and are not parallel."""
        model = named[0][1]
        for name in self.surrounding(named):
            if not _is_parallel(model.get_submodule(name)):
                raise NotImplementedError(
                    f"diffusers: {name} of {name_of(model)} was put there when the model was parallel, as by an "
                    "adapter, or a wrapper that it had before was taken off, and it would compute a rank's share "
                    "alone; call undo() of the handle and parallelize the model again"
                )

    def _check_arguments(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Raise NotImplementedError for arguments that cannot be shared, TypeError for missing ones."""
        known = {"hidden_states", "return_dict", *self.shared, *self.whole, *filter(None, [self.mask])}
        others = {name: value for name, value in arguments.items() if name not in known and value is not None}
        if unknown := sorted(name for name, value in others.items() if not _is_default(model, name, value)):
            raise NotImplementedError(f"diffusers: {name_of(model)} with {', '.join(unknown)} is not supported")
        if missing := sorted(_needed(type(model)) - {*arguments}):
            raise TypeError(f"diffusers: {name_of(model)} got no {', no '.join(missing)}")
        for name in ("joint_attention_kwargs", "attention_kwargs"):
            if unknown := sorted(set(arguments.get(name) or {}) - {"scale"}):
                raise NotImplementedError(f"diffusers: {name} with {', '.join(unknown)} is not supported")

    def _check_processors(self, named: Named) -> None:
        """Raise NotImplementedError for attention by another processor or backend."""
        for name, module in attentions(named):
            if (kind := type(module.processor).__name__) not in self.processors:
                raise NotImplementedError(f"diffusers: the processor {kind} of {name}, expected {self.processors}")
            if (kind := backend_of(module.processor)) not in BACKENDS:
                raise NotImplementedError(
                    f"diffusers: the attention backend {kind} of {name}, expected {BACKENDS}; call "
                    "set_attention_backend('native')"
                )

    def _check_settings(self, model: nn.Module) -> None:
        """Raise NotImplementedError for a config with another value of a setting."""
        for name, supported in self.settings.items():
            # other versions of diffusers may not have the setting
            if (value := model.config.get(name, supported[0])) not in supported:  # type: ignore[union-attr, operator]
                raise NotImplementedError(
                    f"diffusers: {name_of(model)} with {name}={value!r:.200}, expected one of {supported}"
                )

    def expand_text(self, arguments: dict[str, Any]) -> None:
        """Give text of one sample, and its mask, to all samples of a call, as models of joint attention do."""
        samples = arguments["hidden_states"].shape[0]
        for name in filter(None, (self.text, self.mask)):
            if (x := arguments.get(name)) is not None and self.text is not None and x.shape[0] == 1:
                arguments[name] = x.expand(samples, *x.shape[1:])

    def sizes(self, model: nn.Module, arguments: Mapping[str, Any]) -> TokenCounts:
        """The tokens of a call.

        Raises: ValueError for inputs of another number of dims, or a mask whose shape differs from the text's.
        """
        x = arguments["hidden_states"]
        counts = {stream: count(model, arguments) for stream, count in self.counts.items()}
        if self.text is not None:
            encoded = arguments[self.text]
            if encoded.dim() != 3 or encoded.shape[0] != x.shape[0]:
                raise ValueError(
                    f"diffusers: {self.text} {list(encoded.shape)} with hidden_states {list(x.shape)}, expected "
                    "[samples, tokens, features]"
                )
            counts["text"] = encoded.shape[1]
        seen, text = None, counts.get("text", 0)
        valid: Tensor | None = arguments.get(self.mask) if self.mask else None
        if valid is not None:
            if tuple(valid.shape) != (x.shape[0], text):
                raise ValueError(f"diffusers: {self.mask} {list(valid.shape)}, expected {[x.shape[0], text]}")
            array = valid.detach().bool().cpu().numpy()
            if self.masks:
                array = np.arange(text) < valid.detach().sum(1, keepdim=True, dtype=torch.int).cpu().numpy()
            seen = None if array.all() else array.tobytes()
        return TokenCounts(x.shape[0], **counts, valid=seen)


def _check_modules(named: Named) -> None:
    """Raise NotImplementedError for dropout, and for layers that run in parts along tokens."""
    if drops := active_dropout(named):
        raise NotImplementedError(
            f"diffusers: {drops}, which would drop other values on each rank than in one process; set its p to 0"
        )
    for name, module in named:
        if chunk_size(module, None) is not None and chunk_dim(module, None):
            raise NotImplementedError(
                f"diffusers: {name} runs its feed-forward layer in parts along tokens, which are fewer on each "
                "rank; call disable_forward_chunking(), or enable_forward_chunking(dim=0) for parts along samples"
            )


@cache
def _needed(kind: type[nn.Module]) -> frozenset[str]:
    """The arguments without which a model cannot be called."""
    parameters = inspect.signature(kind.forward).parameters.items()
    needed = [name for name, x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return frozenset(needed[1:])


def _is_default(model: nn.Module, name: str, value: Any) -> bool:
    """Whether an argument of a forward is what it would be anyway."""
    parameter = inspect.signature(type(model).forward).parameters.get(name)
    return parameter is not None and type(value) is type(parameter.default) and bool(value == parameter.default)


def _is_parallel(module: nn.Module) -> bool:
    """Whether a module is parallel, or a wrapper of peft's that passes calls on to a copy of it."""
    saved = getattr(module, "modules_to_save", None)
    passes_on = isinstance(saved, nn.ModuleDict) and all(map(_is_parallel, saved.values()))
    return is_surrounded(module) or passes_on
