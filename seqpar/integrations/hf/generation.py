"""Generation with a parallel model: each rank makes tokens for its own prompts with its own cache, as under DDP.

    rank 0   its prompts ──► its cache ──► its tokens, as many as they are
    rank 1   its prompts ──► its cache ──► its tokens

Nothing is sent, and ranks may call it at different times or not at all. Where weights are sharded, a forward gathers
them from all ranks, so there every rank must call it, and continues with the others until the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from transformers import PreTrainedModel

from seqpar.foreign.wrap import ParallelModel
from seqpar.train.wrappers import by_fsdp, sharded_modules


def generators(handle: ParallelModel, model: PreTrainedModel) -> dict[str, Callable[..., Any]]:
    """The model's methods that generate, each for one rank, by name."""
    own = {name: getattr(model, name) for name in ("generate", "generate_batch") if hasattr(model, name)}
    return {name: update_wrapper(partial(rank_generates, handle, name, f), f) for name, f in own.items()}


def rank_generates(handle: ParallelModel, name: str, generate: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What a model's own method generates for the prompts of this rank alone.

    Raises: NotImplementedError for ``generate_batch`` on sharded weights, where ranks cannot stay in step.
    """
    sharded = by_fsdp(handle.model)
    if sharded is None or len(sharded.ranks) == 1:
        with handle.local():
            return generate(*args, **named)
    if name != "generate":
        raise NotImplementedError(
            f"{name} on weights that {sharded.who} shards over {len(sharded.ranks)} ranks: each forward gathers "
            "weights from all ranks, and ranks make different numbers of them; call generate, which keeps ranks in step"
        )
    try:
        with handle.local():
            return generate(*args, **named | {"synced_gpus": True})  # transformers itself does not see fully_shard
    finally:
        for module in sharded_modules(handle.model):  # the last forward leaves some weights whole
            module.reshard()
