"""A batch as a loader makes it, read into packed documents: which tokens it has, where documents start, what they
predict. Local: nothing is sent, and nothing is known of ranks or plans."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.mask import Ints

TOKENS = ("input_ids", "inputs_embeds")
LABELS = ("labels", "shift_labels")
STARTS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_seqlen", "max_length_q", "max_length_k")
POSITIONS = "position_ids"
SHIFTS = ("row", "document", "none")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Reading(NamedTuple):
    """How a batch is read: arguments of `seqpar.data.share`."""

    shift: str = "row"
    ignore_index: int = -100
    keep: Sequence[str] = ()
    device: torch.device | str | None = None


class Home(NamedTuple):
    """The shape that a batch came in, for results to go back to.

    shape: of the rows, [B, S] or [T]; None for a list of documents. lengths: of the list's documents. kept: which of
    the flat rows are tokens, None for all.
    """

    shape: tuple[int, ...] | None
    lengths: tuple[int, ...] = ()
    kept: Ints | None = None

    def fill(self, x: Tensor) -> Tensor | list[Tensor]:
        """Rows of tokens [tokens, ...] in the batch's own shape, 0 where it has no token."""
        if self.shape is None:
            return list(torch.split(x, list(self.lengths)))
        if self.kept is not None:
            at = torch.from_numpy(self.kept).to(x.device)
            x = x.new_zeros(math.prod(self.shape), *x.shape[1:]).index_copy(0, at, x)
        return x.reshape(*self.shape, *x.shape[1:])


class Packed(NamedTuple):
    """The tokens of a batch, document after document.

    lengths: tokens of each document, all positive. tensors: name -> [tokens, ...]; "labels" belong to the token that
    predicts them, "position_ids" are always there. places: distances from the first token of the document, masked-out
    tokens counted, [tokens]; None where there are none. valid: labels that count. others: entries that are no rows.
    """

    lengths: Ints
    tensors: dict[str, Tensor]
    places: Ints | None
    valid: int
    home: Home
    others: dict[str, Any]

    def digest(self) -> str:
        """Equal for equal batches."""
        h = hashlib.blake2b(repr((self.home.shape, self.home.lengths)).encode(), digest_size=16)
        for array in (self.lengths, self.home.kept, self.places):
            h.update(b"-" if array is None else np.ascontiguousarray(array, "<i8").tobytes())
        for name, x in self.tensors.items():
            h.update(repr((name, x.dtype, list(x.shape))).encode())
            flat = x.detach().cpu().reshape(-1)
            h.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"-")
        return h.hexdigest()


EMPTY = Packed(np.zeros(0, np.int64), {}, None, 0, Home((0,)), {})


class _Rows(NamedTuple):
    """The rows of a batch laid out flat: entries by name, and where rows start and end, [rows + 1]."""

    entries: dict[str, Any]
    edges: Ints
    home: Home

    @property
    def column(self) -> Ints:
        """The index of every token in its row."""
        return np.arange(self.edges[-1]) - np.repeat(self.edges[:-1], np.diff(self.edges))

    def where(self, at: int) -> str:
        """A flat index as row and column."""
        row = int(np.searchsorted(self.edges, at, side="right")) - 1
        return f"row {row}, token {at - int(self.edges[row])}"


def read(batch: Mapping[str, Any] | None, how: Reading) -> Packed:
    """The packed tokens of a batch; None is an empty one. What it may hold says `seqpar.data.share`.

    Raises: ValueError for a batch that cannot be read in one way only; NotImplementedError for masks and positions of
    other dims.
    """
    if how.shift not in SHIFTS:
        raise ValueError(f"shift must be one of {', '.join(SHIFTS)}, got {how.shift!r}")
    if batch is None:
        return EMPTY
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a mapping of names to tensors, got {type(batch).__name__}")
    given = {name: value for name, value in batch.items() if value is not None}
    others = {name: given.pop(name) for name in how.keep if name in given}
    rows = _flat(given)
    kept = _kept(rows.entries.pop("attention_mask", None))
    first = _first(rows, kept)
    at = np.flatnonzero(kept) if kept is not None else np.arange(rows.edges[-1])
    starts = np.flatnonzero(first[at])
    lengths = np.diff(np.append(starts, at.size))
    tensors = {name: rows.entries[name] for name in TOKENS if name in rows.entries}
    tensors[POSITIONS] = _positions(rows, first)
    labels = _labels(rows, kept, first, how)
    if labels is not None:
        tensors["labels"] = labels
    for name, value in rows.entries.items():
        if name not in (*tensors, *LABELS, *STARTS, *LONGEST):
            tensors[name] = value
    some = None if at.size == rows.edges[-1] else at
    home = rows.home._replace(kept=some)
    tensors = {name: _taken(x, some, how.device) for name, x in tensors.items()}
    valid = int((tensors["labels"] != how.ignore_index).sum()) if labels is not None else 0
    return Packed(lengths, tensors, _places(rows, at, starts, lengths), valid, home, others)


def _taken(x: Tensor, kept: Ints | None, device: torch.device | str | None) -> Tensor:
    if kept is not None:
        x = x.index_select(0, torch.from_numpy(kept).to(x.device))
    return x if device is None else x.to(device)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _flat(given: Mapping[str, Any]) -> _Rows:
    """Every tensor of rows as [rows, ...], and the facts about documents as they were given."""
    names = [name for name in TOKENS if name in given]
    if not names:
        raise ValueError(f"a batch has input_ids or inputs_embeds, got {sorted(given)}")
    lead = given[names[0]]
    if isinstance(lead, (list, tuple)):
        return _of_list(given, names[0])
    dims = lead.dim() - (names[0] == "inputs_embeds") if isinstance(lead, Tensor) else 0
    if dims not in (1, 2):
        raise ValueError(f"{names[0]} must be a tensor [B, S] or [T] or a list of tensors, got {_shown(lead)}")
    shape = tuple(lead.shape[:dims])
    entries: dict[str, Any] = {}
    for name, value in given.items():
        entries[name] = value if name in (*STARTS, *LONGEST) else _rows_of(name, value, shape)
    count, width = (1, shape[0]) if dims == 1 else shape
    _check_types(entries)
    return _Rows(entries, np.arange(count + 1) * width, Home(shape))


def _rows_of(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """A row-aligned entry with its leading dims made one."""
    if name in ("attention_mask", POSITIONS) and isinstance(value, Tensor) and value.dim() != len(shape):
        if not (name == POSITIONS and value.dim() == 1 and value.shape == shape[1:]):
            raise NotImplementedError(
                f"{name} {list(value.shape)} beside rows {list(shape)}: only {list(shape)} is built; give documents by "
                "cu_seqlens or position_ids, and windows to the plan's mask"
            )
        value = value[None]
    if name == POSITIONS and isinstance(value, Tensor) and value.shape == (1, *shape[1:]):
        value = value.expand(shape)
    if not isinstance(value, Tensor) or tuple(value.shape[: len(shape)]) != shape:
        raise ValueError(
            f"{name} must be a tensor whose first dims are {list(shape)}, as rows move, got {_shown(value)}; "
            f"keep=({name!r},) hands an entry on as it is"
        )
    return value.reshape(-1, *value.shape[len(shape) :])


def _of_list(given: Mapping[str, Any], lead: str) -> _Rows:
    """Documents in a list, each of them a row."""
    entries: dict[str, Any] = {}
    lengths = [x.shape[0] if isinstance(x, Tensor) and x.dim() else -1 for x in given[lead]]
    for name, value in given.items():
        if name in (*STARTS, *LONGEST, "attention_mask"):
            raise ValueError(f"{name} beside a list of documents says twice where documents are; leave it out")
        good = isinstance(value, (list, tuple)) and [len(x) if isinstance(x, Tensor) and x.dim() else -2 for x in value]
        if good != lengths:
            raise ValueError(
                f"{name} must be a list of tensors of lengths {lengths!r:.200}, one per document, got {_shown(value)}"
            )
        entries[name] = torch.cat(list(value)) if value else torch.zeros(0, dtype=torch.int64)
    _check_types(entries)
    return _Rows(entries, np.append(0, np.cumsum(np.array(lengths, np.int64))), Home(None, tuple(lengths)))


def _check_types(entries: Mapping[str, Any]) -> None:
    for name in ("input_ids", POSITIONS, *LABELS):
        if name in entries and (entries[name].dtype not in INTEGERS or entries[name].dim() != 1):
            raise ValueError(f"{name} must hold one integer per token, got {_shown(entries[name])} of flat rows")
    if "inputs_embeds" in entries and entries["inputs_embeds"].dim() != 2:
        raise ValueError(f"inputs_embeds must be one vector per token, got {_shown(entries['inputs_embeds'])} flat")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {[_shown(x) for x in value[:4]]}{'...' if len(value) > 4 else ''}"
    return f"{value!r:.200}"


# --- documents --------------------------------------------------------------------------------------------------------


def _kept(mask: Tensor | None) -> NDArray[np.bool_] | None:
    """Which flat rows are tokens; None if all are, or no mask is given."""
    if mask is None:
        return None
    values = mask.detach().cpu()
    if values.dim() != 1 or not ((values == 0) | (values == 1)).all():
        raise ValueError(
            f"attention_mask must hold 0 or 1 for each token, got {_shown(mask)} with values other than these; give "
            "documents by cu_seqlens or position_ids"
        )
    kept: NDArray[np.bool_] = values.bool().numpy()
    return kept


def _first(rows: _Rows, kept: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Which flat rows begin a document, by what says it best: cu_seqlens, else position_ids, else the rows."""
    first = np.zeros(int(rows.edges[-1]), bool)
    starts = _starts(rows, kept)
    if starts is not None:
        first[starts[:-1][starts[:-1] < starts[-1]]] = True
        return first
    at = np.flatnonzero(kept) if kept is not None else np.arange(first.size)
    row = np.searchsorted(rows.edges, at, side="right") - 1
    begins = np.append(True, np.diff(row) != 0)[: at.size]
    if POSITIONS in rows.entries:
        step = np.diff(_host(rows.entries[POSITIONS]).astype(np.int64)[at])
        if kept is None:
            begins[1:] |= step != 1
        elif (anew := (step <= 0) & ~begins[1:]).any():
            raise ValueError(
                f"position_ids start anew at {rows.where(int(at[1:][anew][0]))}, and attention_mask says that the row "
                "is one document: one device would let it attend to what is before; leave attention_mask out if "
                "nothing is padded, or give cu_seqlens"
            )
    first[at[begins]] = True
    return first


def _starts(rows: _Rows, kept: NDArray[np.bool_] | None) -> Ints | None:
    """Where documents start, [documents + 1], if the batch says it; empty documents may be among them."""
    given = {name: np.asarray(_host(rows.entries[name])) for name in STARTS if name in rows.entries}
    if not given:
        if said := [name for name in LONGEST if name in rows.entries]:
            raise ValueError(f"{said[0]} without cu_seqlens says nothing of where documents are; give both or none")
        return None
    tokens = int(rows.edges[-1])
    name, starts = next(iter(given.items()))
    wrong = starts.ndim != 1 or starts.size < 1 or starts.dtype.kind not in "iu"
    if wrong or starts[0] != 0 or starts[-1] != tokens or (np.diff(starts.astype(np.int64)) < 0).any():
        raise ValueError(f"{name} must ascend from 0 to the batch's {tokens} tokens, got {starts!r:.200}")
    if len(rows.edges) != 2:
        raise ValueError(f"{name} belongs to one packed row [1, T] or [T], got {len(rows.edges) - 1} rows")
    for other, value in given.items():
        if not np.array_equal(value, starts):
            raise ValueError(f"{other} must be equal to {name}: a document's keys are its tokens, got {value!r:.200}")
    if kept is not None and not kept.all():
        raise ValueError(f"{name} beside an attention_mask with zeros: documents are given twice; give only {name}")
    longest = int(np.diff(starts.astype(np.int64)).max(initial=0))
    for other in LONGEST:
        if other in rows.entries and int(rows.entries[other]) != longest:
            raise ValueError(f"{other} is {rows.entries[other]}, the longest document of {name} has {longest} tokens")
    return starts.astype(np.int64)


def _host(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _positions(rows: _Rows, first: NDArray[np.bool_]) -> Tensor:
    """The given position ids; else the place in the row, or in the document where cu_seqlens says where it starts."""
    if POSITIONS in rows.entries:
        given: Tensor = rows.entries[POSITIONS]
        return given.long()
    lead = next(rows.entries[name] for name in TOKENS if name in rows.entries)
    at = rows.column
    if any(name in rows.entries for name in STARTS):
        at = at - np.maximum.accumulate(np.where(first, at, 0))
    return torch.from_numpy(at).to(lead.device)


def _places(rows: _Rows, at: Ints, starts: Ints, lengths: Ints) -> Ints | None:
    """Distance of each token from the first of its document in the row as given; None if none is left out between."""
    column = rows.column[at]
    places = column - np.repeat(column[starts], lengths)
    inside = np.arange(at.size) - np.repeat(starts, lengths)
    return None if np.array_equal(places, inside) else places


# --- labels -----------------------------------------------------------------------------------------------------------


def _labels(rows: _Rows, kept: NDArray[np.bool_] | None, first: NDArray[np.bool_], how: Reading) -> Tensor | None:
    """For every flat row the label that it predicts, or ignore_index."""
    given = [name for name in LABELS if name in rows.entries]
    if len(given) > 1:
        raise ValueError("labels and shift_labels are both given; give labels, or labels that are shifted already")
    if not given:
        return None
    name = given[0]
    labels: Tensor = rows.entries[name].long()
    shift = "none" if name == "shift_labels" else how.shift
    if shift == "row":
        labels = _shifted(labels, rows.edges[1:][np.diff(rows.edges) > 0] - 1, how.ignore_index)
    if kept is not None:
        lost = (labels != how.ignore_index).cpu().numpy() & ~kept
        if lost.any():
            where = rows.where(int(np.flatnonzero(lost)[0]))
            said = (
                f"attention_mask leaves out {where}, which predicts {name} of the token after it (as after "
                "padding on the left): set that label to ignore_index, or ask for shift='document', in which a "
                "document's first token is never predicted"
                if shift == "row"
                else f"attention_mask leaves out {where}, which has a label in {name}: set it to ignore_index"
            )
            raise ValueError(f"{said} ({how.ignore_index}); one device would count it")
    if shift == "document":
        at = np.flatnonzero(kept) if kept is not None else np.arange(len(first))
        last = np.append(np.flatnonzero(first[at])[1:], at.size)[: at.size] - 1
        index = torch.from_numpy(at).to(labels.device)
        labels = labels.index_copy(0, index, _shifted(labels[index], last, how.ignore_index))
    return labels


def _shifted(labels: Tensor, last: Ints, ignore_index: int) -> Tensor:
    """Labels moved to the token before, ignore_index for the last one of each stretch."""
    moved = labels.roll(-1)
    moved[torch.from_numpy(last).to(labels.device)] = ignore_index
    return moved
