"""Positions of whole rows, of which a rank has a part: those that a model counts itself, and the longest.

Without position_ids a model counts positions: from places, from attention_mask, or from tokens. Ranks hold parts of
rows, so each counts the positions of its own batch before its rows move, and the model gets them. So it counts the mask
tokens of a row, by whose share ESM-2 with token_dropout scales the embeddings of the row.

    tokens         5 6 7 0 0       padding is 0, on the left: 0 0 5 6 7
    by columns     0 1 2 3 4       0 1 2 3 4
    by tokens      0 1 2 - -       - - 0 1 2       those that attention_mask keeps (OPT)
    by words       1 2 3 0 0       0 0 1 2 3       padding + 1 for the first token that is not padding (RoBERTa)

Rotary embeddings of the types ``dynamic`` and ``longrope`` choose their frequencies by the largest of the positions
that they are given. Ranks exchange how long their batches are, and each embedding gets one position more than its rows:
the longest. Its angles are dropped again. ``dynamic`` also keeps the largest length so far. A forward of one rank alone
must not change that length, or ranks would rotate the next batch by different angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.data.host import read_entries
from seqpar.data.rows import MASK, POSITIONS, STARTS
from seqpar.foreign import name_of
from seqpar.foreign.wrap import replaced
from seqpar.integrations.hf.config import by_longest
from seqpar.integrations.hf.forward import current
from seqpar.integrations.hf.heads import pad_of

COLUMNS, BY_TOKENS, BY_WORDS = "columns", "tokens", "words"
# an entry of a batch, as messages name it: positions that do not say where documents begin
COUNTED = "position_ids (which the model counts where none are given)"
SHARES = "shares of mask tokens in rows"  # an entry of a batch
DROPPED = 0.15 * 0.8  # the share that EsmEmbeddings scales to


def counts(counting: str, batch: Mapping[str, Any]) -> bool:
    """Whether the positions of a batch are counted here; places in rows are counted where rows are read."""
    return counting in (BY_TOKENS, BY_WORDS) and POSITIONS not in batch and (
        counting == BY_TOKENS or "input_ids" in batch
    )  # fmt: skip


def counted_pad(model: PreTrainedModel) -> int:
    """The padding token by which a model counts words: its modules have it from when they were built.

    A config that changed since has another one.
    """
    owners = [*(m for m in model.modules() if not isinstance(m, nn.Embedding)), model.get_input_embeddings()]
    own = (getattr(module, "padding_idx", None) for module in owners)
    return next((pad for pad in own if isinstance(pad, int)), pad_of(model))


def counted(counting: str, batch: Mapping[str, Any], pad: int) -> Tensor:
    """The positions [B, S] that a model counts for the rows of a batch, each document separately.

    pad: the padding token, as of `counted_pad`.
    """
    lead = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]
    if counting == BY_WORDS:
        keep = lead != pad
    else:
        mask = batch.get(MASK)
        keep = torch.ones_like(lead, dtype=torch.bool) if mask is None or mask.shape != lead.shape else mask.bool()
    sums = keep.long().cumsum(-1)
    starts = next((batch[name] for name in STARTS if batch.get(name) is not None), None)
    if starts is not None and sums.numel():  # one row of documents
        first = starts[:-1].long().to(sums.device)
        before = (sums - keep.long()).reshape(-1)[first.clamp(max=sums.numel() - 1)]
        number = torch.bucketize(torch.arange(sums.numel(), device=sums.device), first, right=True) - 1
        sums = sums - before[number].view(sums.shape)
    return sums * keep + pad if counting == BY_WORDS else (sums - 1).clamp(min=0)


def counting_of(run: Callable[..., Tensor], close: Callable[[Tensor, Tensor], bool], ids: Tensor, pad: int) -> str:
    """How a model counts the positions of tokens [T]: one of the names above, or "".

    run: the model's rows [1, T, n] for tokens, with other arguments by name. close: whether rows are equal.
    """
    at = torch.arange(len(ids), device=ids.device)
    mask = (at >= 3) & (at != 6)

    def alike(counting: str, tokens: Tensor) -> bool:
        batch = {"input_ids": tokens[None], MASK: mask.long()[None]}
        positions = at[None] if counting == COLUMNS else counted(counting, batch, pad)
        found = run(tokens, attention_mask=batch[MASK])[:, mask]
        return close(run(tokens, position_ids=positions)[:, mask], found)

    both = ids, ids.where(mask, pad)
    names = (COLUMNS, BY_TOKENS, BY_WORDS)
    return next((counting for counting in names if all(alike(counting, tokens) for tokens in both)), "")


def dropping_tokens(model: nn.Module) -> list[nn.Module]:
    """The embeddings of a model that are scaled by the share of mask tokens in a row."""
    return [m for m in model.modules() if name_of(m) == "EsmEmbeddings" and m.token_dropout]


def shares(embeddings: Any, batch: Mapping[str, Any]) -> Tensor:
    """The share of mask tokens in the row of each token of a batch, float32 [B, S]."""
    ids, mask = batch["input_ids"], batch.get(MASK)
    tokens = ids.shape[-1] if mask is None else mask.sum(-1)
    return ((ids == embeddings.mask_token_id).sum(-1).float() / tokens)[:, None].expand(ids.shape)


def scaled(module: Any, forward: Callable[..., Any], input_ids: Tensor | None = None, **named: Any) -> Any:
    """The embeddings of a rank's rows [1, T], each scaled as its row of the batch. Source: EsmEmbeddings."""
    if input_ids is None:
        return forward(**named)
    if (state := current()) is None or state.masks is None:  # as in a checkpoint that computes embeddings again
        raise RuntimeError("the share of mask tokens in a row is known in forward only")
    rows = module.word_embeddings(input_ids).masked_fill((input_ids == module.mask_token_id)[..., None], 0.0)
    rows = rows * (1 - DROPPED) / (1 - state.masks[..., None])
    named["inputs_embeds"] = rows.to(module.word_embeddings.weight.dtype)
    with replaced(module, {"token_dropout": False}):
        return forward(input_ids, **named)  # whose positions are counted by tokens


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
