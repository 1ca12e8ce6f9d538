"""Layers that choose their keys by an indexer: their own code, on this rank's queries and the rows that these may see.

Their classes (DeepSeek-V3.2 and later, transformers 5.24) score keys by a few small heads, and attend to the best
``index_topk`` of them. They give what they compute of their tokens to a cache, and use what they get back. Here a cache
brings the rows of other ranks, and gradients of latents return to their owners::

    latent, rotated  ──► cache.update          ──► fetch_all ──► expand_kv ──► keys, values ──┐
    indexer's key    ──► cache.update_indexer  ──► fetch_all ──► scores, best keys ───────────┴──► attention [T, N]

Which keys are best is the same on any number of ranks as long as scores differ. Of equal scores PyTorch takes one or
another, depending on how many keys there are, on one process too. A trial shows whether random weights lead to such a
choice, as with few heads, whose scores are 0 where no head has a positive product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from seqpar.comm.entry import uncompiled
from seqpar.foreign.wrap import replaced
from seqpar.integrations.hf.attention import FETCHED, handle_of
from seqpar.integrations.hf.latents import EXPAND, INDEXER
from seqpar.ops import fetch_all
from seqpar.ops.attention.source import plan_and_comm

TOPK = "index_topk"  # of an indexer: how many keys it chooses
FEW = 4  # of those in a trial


class FetchingCache(Cache):
    """A cache that keeps nothing: what a layer gets back are the rows that this rank's queries may see, [.., N, dim].

    handle: of the layer's plan and the comm.
    """

    def __init__(self, handle: Tensor) -> None:
        super().__init__(layers=[])
        self._handle = handle

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Latents [1, 1, T, R] and rotated parts [1, 1, T, E] of this rank -> those of N rows. A collective."""
        latent, rotated = self._fetched(key_states[0, 0], value_states[0, 0])
        return latent[None, None], rotated[None, None]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """An indexer's keys [1, T, D] of this rank -> those of N rows. A collective."""
        return self._fetched(indexer_key_states[0])[0][None]

    def _fetched(self, *rows: Tensor) -> list[Tensor]:
        """Fetched rows; one of zeros if there are none, as the classes cannot reshape none."""
        return [x if len(x) else torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in fetch_all(rows, self._handle)]


def layers(model: nn.Module) -> list[Any]:
    """The layers that choose their keys by an indexer, of their own or of a layer before."""
    return [m for m in model.modules() if hasattr(m, INDEXER) and callable(getattr(m, EXPAND, None))]


@uncompiled
def attend(
    module: Any, forward: Callable[..., Any], hidden_states: Tensor, *given: Any, attention_mask: Any, **named: Any
) -> Any:
    """What replaces the forward of such a layer: itself, with a cache that fetches and a mask [1, 1, T, N].

    attention_mask: the handle from `seqpar.integrations.hf.attention.mask_of`.
    """
    handle = handle_of(module, attention_mask)
    storage: Any = handle.untyped_storage()
    if getattr(storage, "_seqpar_seen", None) is None:  # all layers of a forward have this mask, and checkpoints too
        plan, comm = plan_and_comm("fetch", [handle])
        seen = torch.from_numpy(plan.fetch_table(comm.rank).seen())
        blind = ~seen.any(-1, keepdim=True)  # pads, which see all rows so that their softmax has no NaN
        seen = seen | blind if seen.shape[1] else blind
        storage._seqpar_seen = seen[None, None].to(hidden_states.device)
        setattr(storage._seqpar_seen, FETCHED, True)
    named |= {"cache": FetchingCache(handle), "attention_mask": storage._seqpar_seen}
    return forward(hidden_states, *given, **named)


def described(model: nn.Module) -> list[str]:
    """What these layers of a model exchange, a line for each class and kind."""
    lines = Counter((type(layer).__name__, _exchanges(layer)) for layer in layers(model))
    return [f"{count} layers ({name}) exchange {what}" for (name, what), count in lines.items()]


def _exchanges(layer: Any) -> str:
    # layers may use the latents of a layer before, or the keys that it has chosen
    own = {"latents": getattr(layer, "kv_a_proj_with_mqa", None), "keys of an indexer": layer.indexer}
    return " and ".join(what for what, part in own.items() if part is not None) or "nothing"


@contextmanager
def few_chosen(model: nn.Module) -> Iterator[None]:
    """A context in which indexers choose few keys, so that a trial of few tokens shows which."""
    with ExitStack() as stack:
        for indexer in _indexers(model):
            stack.enter_context(replaced(indexer, {TOPK: min(FEW, getattr(indexer, TOPK))}))
        yield


@contextmanager
def chosen_by_order(model: nn.Module) -> Iterator[list[str]]:
    """A context that lists the indexers whose choice depends on the order of keys, as they run inside."""
    found: list[str] = []
    with ExitStack() as stack:
        for indexer in _indexers(model):
            hook = indexer.register_forward_hook(partial(_compare, found), with_kwargs=True)
            stack.callback(hook.remove)
        yield found


def _indexers(model: nn.Module) -> list[Any]:
    return [layer.indexer for layer in layers(model) if hasattr(layer.indexer, TOPK)]


def _compare(found: list[str], indexer: Any, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
    """Let an indexer choose again among the same keys in reverse order. out: the numbers of those chosen, [1, T, k]."""
    is_mask = [isinstance(x, Tensor) and x.dtype is torch.bool for x in given]
    seen = given[is_mask.index(True)]
    reverse = [x.flip(-1) if mask else x for x, mask in zip(given, is_mask, strict=True)]
    backwards = SimpleNamespace(update_indexer=lambda *keys: named["cache"].update_indexer(*keys).flip(1))
    again = indexer.forward(*reverse, **named | {"cache": backwards})
    one, other = (torch.zeros_like(seen).scatter(-1, x.long(), True) for x in (out, seen.shape[-1] - 1 - again))
    if not torch.equal(one & seen, other & seen):
        found.append(type(indexer).__name__)
