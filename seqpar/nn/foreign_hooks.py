"""Hooks that diffusers puts on modules: those that move or cast weights may stay, others see a share of the rows.

A blur over queries mixes a rank's rows alone, dropout draws numbers for them, and a cache that decides by the rows
decides otherwise than for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from seqpar.nn.kinds import name_of

HARMLESS = (
    "GroupOffloadingHook", "LazyPrefetchGroupOffloadingHook", "LayerExecutionTrackerHook", "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)  # fmt: skip
SKIPPING = ("TransformerBlockSkipHook", "FeedForwardSkipHook")  # leave out a module, or drop some of its numbers
CACHING = ("PyramidAttentionBroadcastHook",)  # return a module's earlier output, whatever the rows are


def check_hooks(model: nn.Module, also: Iterable[str] = ()) -> None:
    """Raise NotImplementedError for a hook that may look at rows. also: more kinds of hooks that may stay."""
    for path, key, hook in _hooks_of(model):
        kind = type(hook).__name__
        if not (kind in HARMLESS or kind in also or (kind in SKIPPING and _skips_all(hook))):
            raise NotImplementedError(
                f"{name_of(model)} has the hook {kind} of diffusers on {path or 'itself'}, which sees a rank's share "
                "of the rows, and may mix them, draw random numbers for them, or decide by them; remove it, by the "
                "model's disable_cache() if it is a cache, or by "
                f"HookRegistry.check_if_exists_or_initialize(model).remove_hook({key!r})"
            )


def has_cache(model: nn.Module) -> bool:
    """Whether a hook in a model returns earlier outputs, so that its modules must get the same rows every time."""
    return any(type(hook).__name__ in CACHING for _, _, hook in _hooks_of(model))


def _skips_all(hook: Any) -> bool:
    """Whether a hook leaves out a whole module of one stream; it would exchange the two of others."""
    streams = getattr(hook, "_metadata", None)
    return bool(hook.dropout == 1.0) and getattr(streams, "return_encoder_hidden_states_index", None) is None


def _hooks_of(model: nn.Module) -> Iterator[tuple[str, str, object]]:
    """The hooks of diffusers in a model: the module's name, the name of registration, the hook."""
    for path, module in model.named_modules():
        for key, hook in getattr(module.__dict__.get("_diffusers_hook"), "hooks", {}).items():
            yield path, key, hook
