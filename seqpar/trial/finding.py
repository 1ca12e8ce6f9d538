"""What the trial of a block finds: where its arguments, attentions and outputs have rows, and which values it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.trial.segments import RowPlace, RowSegments

READS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist, Tensor.nonzero,
    torch.nonzero, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, Tensor.__contains__, Tensor.is_nonzero,
    torch.is_nonzero, Tensor.__format__,
}  # fmt: skip


class AttentionCall(NamedTuple):
    """A call of `F.scaled_dot_product_attention`, with its signature."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def computed(self) -> Tensor:
        """What PyTorch returns."""
        return F.scaled_dot_product_attention(**self._asdict())


class MaskForm(NamedTuple):
    """What a mask [.., rows, keys] has on a rank: its own rows or keys, or those of the whole mask. one: a row for all.

    With its own rows and keys it is one row for all, repeated, or the product of flags of rows and flags of keys.
    """

    own_rows: bool
    own_keys: bool
    one: bool


class Attended(NamedTuple):
    """The rows of an attention: of its queries and of its keys; and its mask, if it has one."""

    queries: RowSegments
    keys: RowSegments
    mask: MaskForm | None


@dataclass(frozen=True)
class Finding:
    """How a block is computed on this rank's rows.

    places: of each argument, None for a whole one. counts: number of an argument -> segments whose rows it counts.
    attends: its attentions in their order. outputs: the place of each output, None for a whole one. reads: values that
    it reads from whole tensors, and that may decide what it does.
    """

    places: tuple[RowPlace | None, ...]
    counts: tuple[tuple[int, RowSegments], ...]
    attends: tuple[Attended, ...]
    outputs: tuple[RowPlace | None, ...]
    reads: tuple[Any, ...]


def value_of(read: Any) -> Any:
    """A value that is read from a tensor, to be compared."""
    return str(read.tolist()) if hasattr(read, "tolist") else read
