"""Rotary embeddings whose angles depend on the longest position: of all ranks' batches, as one process would have it.

``dynamic`` and ``longrope`` of transformers choose their frequencies by the largest of the positions that they are
given. Ranks exchange how long their batches are, and each embedding gets one position more than its rows: the longest.
Its angles are dropped again. ``dynamic`` also keeps the largest length so far. A forward of one rank alone must not
change that length, or ranks would rotate the next batch by different angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.data.host import read_entries
from seqpar.data.rows import POSITIONS, STARTS
from seqpar.integrations.hf.config import by_longest
from seqpar.integrations.hf.forward import current


def lengthy(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model that depend on the longest position."""
    return [
        module for module in model.modules()
        if any(by_longest(kind, getattr(module, "config", None)) for kind in _kinds(module))
    ]  # fmt: skip


def _kinds(module: nn.Module) -> list[Any]:
    kind = getattr(module, "rope_type", None)
    if kind is None or not _frequencies(module):
        return []
    return list(kind.values()) if isinstance(kind, Mapping) else [kind]


def lengths_kept(rotaries: Sequence[nn.Module]) -> list[dict[str, int]]:
    """The largest lengths of rotary embeddings so far, by the name of the attribute. Waits for the device."""
    return [{name: int(length) for name, length in _lengths(rotary).items()} for rotary in rotaries]


@contextmanager
def forgotten(rotaries: Sequence[nn.Module]) -> Iterator[None]:
    """A block whose forwards leave the lengths and frequencies of rotary embeddings as they were."""
    kept = [(rotary, _lengths(rotary), _frequencies(rotary)) for rotary in rotaries]
    try:
        yield
    finally:
        for rotary, lengths, frequencies in kept:
            for name in _lengths(rotary).keys() - lengths.keys():
                delattr(rotary, name)
            vars(rotary).update(lengths)
            for name, now in _frequencies(rotary).items():
                rotary._buffers[name] = frequencies[name].to(now)  # the model may have moved


def _lengths(rotary: nn.Module) -> dict[str, Any]:
    return {name: length for name, length in vars(rotary).items() if name.endswith("max_seq_len_cached")}


def _frequencies(rotary: nn.Module) -> dict[str, Tensor]:
    """The buffers of frequencies. ``dynamic`` puts others in their place and never writes to them."""
    return {name: x for name, x in rotary._buffers.items() if x is not None and name.endswith("inv_freq")}


def length_of(batch: Mapping[str, Any]) -> int:
    """The positions that a model would count in a batch that the host has read, padding included."""
    batch = read_entries(batch, (POSITIONS, *STARTS))
    if POSITIONS in batch:
        return int(batch[POSITIONS].max()) + 1 if batch[POSITIONS].numel() else 0
    for name in STARTS:
        if batch.get(name) is not None:
            return int(batch[name].diff().max()) if len(batch[name]) > 1 else 0
    lead = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]
    return int(lead.shape[-1]) if len(lead) else 0


def turn(
    rotary: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *rest: Any, **named: Any
) -> Any:
    """Replaces a rotary embedding's forward: the angles as if the longest position of all ranks were among its own.

    Raises: RuntimeError if it is called again in a backward pass.
    """
    if (state := current()) is None:
        raise RuntimeError(
            f"{type(rotary).__name__} depends on the longest position of all ranks' batches, and is called outside the "
            "model's forward, as when a checkpoint repeats it; checkpoint the layers, which get its angles"
        )
    last = position_ids.new_full((*position_ids.shape[:-1], 1), max(state.longest - 1, 0))
    angles = forward(x, torch.cat([position_ids, last], -1), *rest, **named)
    return angles[..., :-1, :] if isinstance(angles, Tensor) else tuple(y[..., :-1, :] for y in angles)
