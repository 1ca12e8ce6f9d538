"""The rows of a loader's batch, laid out flat, and the shape that results return to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.data.host import placed
from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints

TOKENS = ("input_ids", "inputs_embeds")
LABELS = ("labels", "shift_labels")
STARTS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_seqlen", "max_length_q", "max_length_k")
PARENTS = "parents"
POSITIONS = "position_ids"
MASK = "attention_mask"
READ = {*TOKENS, *STARTS, *LONGEST, MASK, PARENTS, POSITIONS}  # what a batch is read by
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class BatchShape(NamedTuple):
    """The original shape of a batch, to which results return.

    shape: of the rows, [B, S] or [T]; None for a list of documents. lengths: those of the list's documents. kept: the
    flat rows that get results; None for all.
    """

    shape: tuple[int, ...] | None
    lengths: tuple[int, ...] = ()
    kept: Ints | None = None

    def pick(self, rows: Ints) -> BatchShape:
        """The shape of some of the rows with results."""
        return self._replace(kept=rows if self.kept is None else self.kept[rows])

    def fill(self, x: Tensor) -> Tensor | list[Tensor]:
        """Results [rows, ...] in the batch's own shape, 0 elsewhere."""
        if self.kept is not None:
            total = sum(self.lengths) if self.shape is None else math.prod(self.shape)
            x = x.new_zeros(total, *x.shape[1:]).index_copy(0, placed([self.kept], x.device)[0], x)
        if self.shape is None:
            return list(torch.split(x, list(self.lengths))) or [x]  # of no documents: one with the graph
        return x.reshape(*self.shape, *x.shape[1:])


class PackedRows(NamedTuple):
    """The rows of a batch, laid out flat: entries by name, and the edges of rows, [rows + 1]."""

    entries: dict[str, Any]
    edges: Ints
    home: BatchShape

    @property
    def column(self) -> Ints:
        """The index of every token in its row."""
        return np.arange(self.edges[-1]) - np.repeat(self.edges[:-1], np.diff(self.edges))

    def where(self, at: int) -> str:
        """The row and token of a flat index, in words."""
        row = int(np.searchsorted(self.edges, at, side="right")) - 1
        return f"row {row}, token {at - int(self.edges[row])}"


def flat(given: Mapping[str, Any]) -> PackedRows:
    """Every row tensor as [rows, ...], and the entries about documents unchanged."""
    names = [name for name in TOKENS if name in given]
    if not names:
        raise ValueError(f"a batch needs input_ids or inputs_embeds, got {sorted(given)}")
    lead = given[names[0]]
    if isinstance(lead, (list, tuple)):
        return _of_list(given, names[0])
    dims = lead.dim() - (names[0] == "inputs_embeds") if isinstance(lead, Tensor) else 0
    if dims not in (1, 2):
        raise ValueError(f"{names[0]} must be a tensor [B, S] or [T] or a list of tensors, got {shown(lead)}")
    shape = tuple(lead.shape[:dims])
    entries: dict[str, Any] = {}
    for name, value in given.items():
        entries[name] = value if name in (*STARTS, *LONGEST, PARENTS) else _rows_of(name, value, shape)
    count, width = (1, shape[0]) if dims == 1 else shape
    _check_types(entries)
    return PackedRows(entries, np.arange(count + 1) * width, BatchShape(shape))


def _rows_of(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """An entry with a value per row, with its leading dims flattened."""
    if name in (MASK, POSITIONS) and isinstance(value, Tensor) and value.dim() != len(shape):
        if not (name == POSITIONS and value.dim() == 1 and value.shape == shape[1:]):
            raise NotImplementedError(
                f"{name} {list(value.shape)} with rows {list(shape)}: only {list(shape)} works; give documents by "
                "position_ids, a window by sliding_window of the config, and another mask by a plan with it, to a "
                "model with attn_implementation='seqpar' inside seqpar.parallel"
            )
        value = value[None]
    if name == POSITIONS and isinstance(value, Tensor) and value.shape == (1, *shape[1:]):
        value = value.expand(shape)
    if not isinstance(value, Tensor) or tuple(value.shape[: len(shape)]) != shape:
        found = f"{name} must be a tensor whose first dims are {list(shape)}, as rows move, got {shown(value)}"
        if name in (*READ, *LABELS):
            raise ValueError(found)
        raise ValueError(f"{found}; give such rows, or keep=({name!r},) to hand it on as it is")
    return value.flatten(0, len(shape) - 1)


def _of_list(given: Mapping[str, Any], lead: str) -> PackedRows:
    """Documents in a list, one row each."""
    entries: dict[str, Any] = {}
    if not all(isinstance(x, Tensor) and x.dim() for x in given[lead]):
        raise ValueError(f"{lead} must be a tensor, or a list of tensors [S_i], got {shown(given[lead])}")
    lengths = [len(x) for x in given[lead]]
    for name, value in given.items():
        if name in (*STARTS, *LONGEST, MASK):
            raise ValueError(f"{name} with a list of documents gives the documents twice")
        if name == PARENTS:
            entries[name] = value
            continue
        several = isinstance(value, (list, tuple)) and all(isinstance(x, Tensor) and x.dim() for x in value)
        if not several or [len(x) for x in value] != lengths:
            raise ValueError(
                f"{name} must be a list of tensors of lengths {lengths!r:.200}, one per document, got {shown(value)}"
            )
        if len({(x.shape[1:], x.dtype) for x in value}) > 1:
            raise ValueError(f"{name} must have one dtype and the same dims behind the first, got {shown(value)}")
        entries[name] = torch.cat(list(value)) if value else torch.zeros(0, dtype=torch.int64, device="cpu")
    _check_types(entries)
    return PackedRows(entries, edges(np.array(lengths, np.int64)), BatchShape(None, tuple(lengths)))


def _check_types(entries: Mapping[str, Any]) -> None:
    for name in ("input_ids", POSITIONS, *LABELS):
        if name in entries and (entries[name].dtype not in INTEGERS or entries[name].dim() != 1):
            raise ValueError(f"{name} must hold one integer per token, got {shown(entries[name])} of flat rows")
    if "inputs_embeds" in entries and entries["inputs_embeds"].dim() != 2:
        raise ValueError(f"inputs_embeds must be one vector per token, got {shown(entries['inputs_embeds'])} flat")


def shown(value: Any) -> str:
    """A value in a few words, for messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {[shown(x) for x in value[:4]]}{'...' if len(value) > 4 else ''}"
    return f"{value!r:.200}"
