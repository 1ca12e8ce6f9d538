"""Hooks of diffusers in a model: what moves or casts weights may stay, anything else sees a share of the rows.

A blur over queries mixes a rank's rows alone, dropout draws numbers for them, and a cache that decides by the rows
decides otherwise than for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from seqpar.foreign import name_of
from seqpar.private.diffusers import HOOKS, hooks_of, streams_of

Named = Sequence[tuple[str, nn.Module]]  # a model and all modules in it, by name: one walk serves several checks
HARMLESS = (
    "GroupOffloadingHook", "LazyPrefetchGroupOffloadingHook", "LayerExecutionTrackerHook", "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)  # fmt: skip
SKIPPING = ("TransformerBlockSkipHook", "FeedForwardSkipHook")  # leave out a module, or drop some of its numbers
OF_BLOCKS = ("FBCHeadBlockHook", "FBCBlockHook", "MagCacheHeadHook", "MagCacheBlockHook")  # of caches, around blocks
CACHING = ("PyramidAttentionBroadcastHook",)  # return a module's earlier output, whatever the rows are


def check_hooks(named: Named, also: Iterable[str] = ()) -> None:
    """Raise NotImplementedError for a hook that may look at rows. also: more kinds of hooks that may stay."""
    model = named[0][1]
    for path, key, hook in _hooks_of(named):
        kind = type(hook).__name__
        if not (kind in HARMLESS or kind in also or (kind in SKIPPING and _skips_all(hook))):
            raise NotImplementedError(
                f"{name_of(model)} has the hook {kind} of diffusers on {path or 'itself'}, which sees a rank's share "
                "of the rows, and may mix them, draw random numbers for them, or decide by them; remove it, by the "
                "model's disable_cache() if it is a cache, or by "
                f"HookRegistry.check_if_exists_or_initialize(model).remove_hook({key!r})"
            )


def with_cache(named: Named) -> list[str]:
    """Modules with a hook that returns earlier outputs, so that they must get the same rows every time."""
    return [path for path, _, hook in _hooks_of(named) if type(hook).__name__ in CACHING]


def _skips_all(hook: Any) -> bool:
    """Whether a hook leaves out a whole module of one stream; it would exchange the two of others."""
    streams = streams_of(hook, None)
    return bool(hook.dropout == 1.0) and getattr(streams, "return_encoder_hidden_states_index", None) is None


def _hooks_of(named: Named) -> Iterator[tuple[str, str, object]]:
    """The hooks of diffusers in a model: the module's name, the name of registration, the hook."""
    for path, module in named:
        if HOOKS in module.__dict__:
            for key, hook in hooks_of(module).items():
                yield path, key, hook
