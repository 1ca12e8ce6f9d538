"""Documents in rows: which rows are tokens, where documents start, and each token's position and label.

Masks, documents, positions and labels are read here and lie on the host; see `seqpar.data.host`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqpar.data.rows import INTEGERS, LABELS, LONGEST, PARENTS, POSITIONS, STARTS, PackedRows, shown
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints


class Nodes(NamedTuple):
    """Nodes of trees in depth-first order: lengths and parents [nodes], and the mask of the trees."""

    lengths: Ints
    parents: Ints
    mask: Mask


def kept_of(mask: Tensor | None) -> tuple[NDArray[np.bool_] | None, Ints | None]:
    """The flat rows that are tokens, as a mask, and the number of each row's document if attention_mask has numbers.

    None for both without an attention_mask.
    """
    if mask is None:
        return None, None
    values = mask.detach()
    numbers = values.dtype in INTEGERS and bool((values >= 0).all())
    if values.dim() != 1 or not (numbers or ((values == 0) | (values == 1)).all()):
        raise ValueError(
            "attention_mask must hold 0 or 1, or the number of its document, for each token, got "
            f"{shown(mask)} with other values; number the documents of a row from 1, and padding 0"
        )
    return values.bool().numpy(), values.long().numpy() if bool((values > 1).any()) else None


def first_of(rows: PackedRows, kept: NDArray[np.bool_] | None, numbers: Ints | None = None) -> NDArray[np.bool_]:
    """The flat rows that start a document, as a mask: by cu_seqlens, else by position_ids and numbers, else by rows."""
    first = np.zeros(int(rows.edges[-1]), bool)
    starts = _starts(rows, kept if numbers is None else first)
    if starts is not None:
        first[starts[:-1][starts[:-1] < starts[-1]]] = True
        return first
    at = np.flatnonzero(kept) if kept is not None else np.arange(first.size)
    row = np.searchsorted(rows.edges, at, side="right") - 1
    begins = np.append(True, np.diff(row) != 0)[: at.size]
    if numbers is not None:
        if (back := (np.diff(numbers[at]) < 0) & ~begins[1:]).any():
            raise ValueError(
                f"attention_mask numbers the documents of a row, and decreases at {rows.where(int(at[1:][back][0]))}; "
                "number them in ascending order"
            )
        begins[1:] |= np.diff(numbers[at]) > 0
    if POSITIONS in rows.entries:
        step = np.diff(_array(rows.entries[POSITIONS]).astype(np.int64)[at])
        if kept is None:
            begins[1:] |= step != 1
        elif (anew := (step <= 0) & ~begins[1:]).any():
            raise ValueError(
                f"position_ids restart at {rows.where(int(at[1:][anew][0]))} in a row with an attention_mask, which is "
                "one document: on one device it would attend to the tokens before; leave attention_mask out if nothing "
                "is padded, or give cu_seqlens"
            )
    first[at[begins]] = True
    return first


def nodes_of(rows: PackedRows, kept: NDArray[np.bool_] | None, parents: Any) -> Nodes:
    """The nodes of trees, by cu_seqlens, else by rows, and the trees that they form.

    parents: the number of each node's parent in the batch, -1 for a root. Raises: ValueError as `Mask.tree`.
    """
    if kept is not None:
        raise ValueError(
            f"{PARENTS} with an attention_mask: nodes are whole rows; leave padding out, as a list of nodes"
        )
    starts = _starts(rows, None)
    lengths = np.diff(rows.edges if starts is None else starts)
    return Nodes(lengths, np.asarray(_array(parents)), Mask.tree(lengths, _array(parents)))


def starts_of(nodes: Nodes) -> NDArray[np.bool_]:
    """The flat rows that start a tree, as a mask."""
    first = np.zeros(nodes.mask.tokens, bool)
    first[nodes.mask.offsets[:-1]] = True
    return first


def _starts(rows: PackedRows, kept: NDArray[np.bool_] | None) -> Ints | None:
    """The starts of documents, [documents + 1], if the batch has cu_seqlens; documents may be empty."""
    given = {name: _integers(name, rows.entries[name]) for name in STARTS if name in rows.entries}
    if not given:
        if said := [name for name in LONGEST if name in rows.entries]:
            raise ValueError(f"{said[0]} without cu_seqlens does not locate the documents")
        return None
    tokens = int(rows.edges[-1])
    name, starts = next(iter(given.items()))
    ends = [0, tokens]
    if starts.ndim != 1 or [*starts[:1], *starts[-1:]] != ends or (np.diff(starts.astype(np.int64)) < 0).any():
        raise ValueError(f"{name} must ascend from 0 to the batch's {tokens} tokens, got {starts!r:.200}")
    if len(rows.edges) != 2:
        raise ValueError(f"{name} belongs to one packed row [1, T] or [T], got {len(rows.edges) - 1} rows")
    for other, value in given.items():
        if not np.array_equal(value, starts):
            raise ValueError(f"{other} must be equal to {name}: a document's keys are its tokens, got {value!r:.200}")
    if kept is not None and not kept.all():
        raise ValueError(
            f"{name} with an attention_mask of zeros or numbers: gives the documents twice; give only {name}"
        )
    longest = int(np.diff(starts.astype(np.int64)).max(initial=0))
    for other in LONGEST:
        said = _array(rows.entries.get(other, longest))
        if np.size(said) != 1 or np.reshape(said, ()) != longest:
            raise ValueError(f"{other} is {said!r:.200}, the longest document of {name} has {longest} tokens")
    return starts.astype(np.int64)


def _integers(name: str, value: Any) -> NDArray[Any]:
    """Integers as an array. Raises ValueError for anything else."""
    try:
        found = np.asarray(_array(value))
    except (TypeError, ValueError):  # of a dtype that numpy lacks, or ragged
        found = np.zeros(())
    if found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers [documents + 1], got {shown(value)}")
    return found


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, Tensor) else value


def positions_of(rows: PackedRows, first: NDArray[np.bool_], *, numbered: bool = False) -> Tensor:
    """The position ids: the given ones where they lie, others on the host.

    Not given, they are the place in the document if cu_seqlens or attention_mask has its start, and otherwise the place
    in the row. numbered: whether attention_mask has it.
    """
    if POSITIONS in rows.entries:
        given: Tensor = rows.entries[POSITIONS]
        return given.long()
    at = rows.column
    if numbered or any(name in rows.entries for name in STARTS):
        at = np.arange(at.size)
        at = at - np.maximum.accumulate(np.where(first, at, 0))
    return torch.from_numpy(at)


def places_of(rows: PackedRows, at: Ints, starts: Ints, lengths: Ints) -> Ints | None:
    """Distance of each token from its document's first one in the row as given; None if no token between is masked."""
    column = rows.column[at]
    places = column - np.repeat(column[starts], lengths)
    inside = np.arange(at.size) - np.repeat(starts, lengths)
    return None if np.array_equal(places, inside) else places


def labels_of(
    rows: PackedRows, kept: NDArray[np.bool_] | None, first: NDArray[np.bool_], shift: str, ignore_index: int
) -> Tensor | None:
    """For every flat row the label that it predicts, or ignore_index."""
    given = [name for name in LABELS if name in rows.entries]
    if len(given) > 1:
        alone = [rows._replace(entries={n: x for n, x in rows.entries.items() if n != other}) for other in given]
        one, same = (labels_of(each, kept, first, shift, ignore_index) for each in alone)
        if one is None or same is None or not torch.equal(one, same):
            raise ValueError(
                "labels and shift_labels are both given, and disagree about the label of a token; leave one of them out"
            )
        return one
    if not given:
        return None
    name = given[0]
    labels: Tensor = rows.entries[name].long()
    shift = "none" if name == "shift_labels" else shift
    if shift == "row":
        labels = _shifted(labels, rows.edges[1:][np.diff(rows.edges) > 0] - 1, ignore_index)
    if kept is not None:
        lost = (labels != ignore_index).numpy() & ~kept
        if lost.any():
            raise _lost(rows, kept, int(np.flatnonzero(lost)[0]), name, shift, ignore_index)
    if shift == "document":
        at = np.flatnonzero(kept) if kept is not None else np.arange(len(first))
        last = np.append(np.flatnonzero(first[at])[1:], at.size)[: at.size] - 1
        index = torch.from_numpy(at)
        labels = labels.index_copy(0, index, _shifted(labels[index], last, ignore_index))
    return labels


def check_labels(
    rows: PackedRows, first: NDArray[np.bool_], shift: str, ignore_index: int, vocabulary: int | None
) -> None:
    """Raise ValueError for a label that counts and is not a token. vocabulary: the number of tokens; None if unknown.

    first: the tokens that begin a document, with the shift "document", or a path, in trees.
    """
    name = next((name for name in LABELS if name in rows.entries), None)
    if vocabulary is None or name is None:
        return
    labels = rows.entries[name].long().numpy()
    wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if not wrong.any():
        return
    if name == "labels" and shift != "none":  # nothing predicts these
        wrong &= rows.column > 0 if shift == "row" else ~first
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"{name} at {rows.where(at)} are {labels[at]}, expected 0 to {vocabulary - 1}, or {ignore_index} for a "
            "token that does not count"
        )


def labels_on_paths(rows: PackedRows, first: NDArray[np.bool_], ignore_index: int) -> Tensor | None:
    """The labels of tokens that the token before them on their path predicts: their own, at themselves.

    first: the tokens that begin a path.
    """
    if "shift_labels" in rows.entries:
        raise ValueError("shift_labels in a tree: the last token of a prompt predicts several; give labels")
    if "labels" not in rows.entries:
        return None
    labels: Tensor = rows.entries["labels"].long()
    return labels.masked_fill(torch.from_numpy(first), ignore_index)


def later_labels_of(
    labels: Tensor, crossing: NDArray[np.bool_], lengths: Ints, depth: int, ignore_index: int
) -> Tensor:
    """What the tokens 1 to `depth` further on in the same document predict, int64 [tokens, depth]; else ignore_index.

    labels [tokens]: what each token predicts. crossing [tokens]: whether that is the first token of the next document,
    which only the token itself predicts. lengths: tokens of each document.
    """
    labels = labels.masked_fill(torch.from_numpy(crossing), ignore_index)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(labels))  # tokens up to the document's end
    depths = [
        labels.roll(-ahead).masked_fill(torch.from_numpy(left <= ahead), ignore_index) for ahead in range(1, depth + 1)
    ]
    return torch.stack(depths, 1)


def _lost(rows: PackedRows, kept: NDArray[np.bool_], at: int, name: str, shift: str, ignore_index: int) -> ValueError:
    """The error for a label that only the masked-out token `at` could predict."""
    labelled = at + (shift == "row")
    if not kept[labelled]:
        return ValueError(
            f"{name} of pads must be {ignore_index} (ignore_index), as one device would count them: {name} at "
            f"{rows.where(labelled)} is another, where attention_mask is 0; set {name}[attention_mask == 0] = "
            f"{ignore_index}"
        )
    return ValueError(
        f"{name} at {rows.where(labelled)} would be predicted by the token before it, which attention_mask leaves out "
        "(as after padding on the left), and one device would count it; pad on the right, or set "
        f"{name}[:, 1:][attention_mask[:, :-1] == 0] = {ignore_index}"
    )


def _shifted(labels: Tensor, last: Ints, ignore_index: int) -> Tensor:
    """Labels moved to the previous token; ignore_index for the last token of each stretch."""
    moved = labels.roll(-1)
    moved[torch.from_numpy(last)] = ignore_index
    return moved
