"""Positions that a model counts itself when it gets no position_ids: from places, from attention_mask, or from tokens.

Ranks hold parts of rows, so each counts the positions of its own batch before its rows move, and the model gets them.
So it counts the mask tokens of a row, by whose share ESM-2 with token_dropout scales the embeddings of the row.

    tokens         5 6 7 0 0       padding is 0, on the left: 0 0 5 6 7
    by columns     0 1 2 3 4       0 1 2 3 4
    by tokens      0 1 2 - -       - - 0 1 2       those that attention_mask keeps (OPT)
    by words       1 2 3 0 0       0 0 1 2 3       padding + 1 for the first token that is not padding (RoBERTa)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.data.rows import MASK, POSITIONS, STARTS
from seqpar.foreign import name_of
from seqpar.foreign.wrap import replaced
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
