"""ESM-2's token dropout: the embeddings of a row are scaled by its share of mask tokens.

Ranks hold parts of rows, so each computes the shares of its own batch before its rows move, as `positions` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from seqpar.data.rows import MASK
from seqpar.foreign.kinds import name_of
from seqpar.foreign.wrap import replaced
from seqpar.integrations.hf.forward import share_of_masks

SHARES = "shares_of_mask_tokens"  # an entry of a batch
IN_TRAINING = 0.15 * 0.8  # the share that EsmEmbeddings scales to


def dropping_tokens(model: nn.Module) -> list[nn.Module]:
    """The embeddings of a model that drop mask tokens."""
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
    rows = module.word_embeddings(input_ids).masked_fill((input_ids == module.mask_token_id)[..., None], 0.0)
    rows = rows * (1 - IN_TRAINING) / (1 - share_of_masks()[..., None])
    named["inputs_embeds"] = rows.to(module.word_embeddings.weight.dtype)
    with replaced(module, {"token_dropout": False}):
        return forward(input_ids, **named)  # whose positions are counted by tokens
