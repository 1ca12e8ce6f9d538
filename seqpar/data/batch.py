"""A loader's batch, read into packed documents. Local: it knows no ranks and no plans."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.data.documents import (
    Nodes,
    check_labels,
    first_of,
    kept_of,
    labels_of,
    labels_on_paths,
    later_labels_of,
    nodes_of,
    places_of,
    positions_of,
    starts_of,
)
from seqpar.data.host import moved, placed, read_entries
from seqpar.data.rows import (
    LABELS,
    LONGEST,
    MASK,
    PARENTS,
    POSITIONS,
    READ,
    STARTS,
    TOKENS,
    BatchShape,
    PackedRows,
    flat,
)
from seqpar.facts.intervals import expand
from seqpar.facts.value import Ints, integer
from seqpar.kernels.memory.copy import picked
from seqpar.ops.core.collective_op import check_dense

SHIFTS = ("row", "document", "none")
MTP_LABELS = "mtp_labels"
FACTS = (MASK, PARENTS, POSITIONS, *STARTS, *LONGEST, *LABELS)  # entries that the host reads


class Reading(NamedTuple):
    """How to read a batch: the arguments of `seqpar.data.share`.

    optional: entries with a value per token that a rank may lack; it then has zeros. vocabulary: the number of tokens
    that labels are checked against; None for labels that are not tokens.
    """

    shift: str = "row"
    ignore_index: int = -100
    keep: Sequence[str] = ()
    device: torch.device | str | None = None
    mtp_depth: int = 0
    optional: Sequence[str] = ()
    vocabulary: int | None = None


class Packed(NamedTuple):
    """The tokens of a batch, document after document.

    lengths: tokens of each document, all positive. tensors: name -> [tokens, ...]; "labels" and the columns of
    "mtp_labels" are at the token that predicts them; "position_ids" always exist. places: distance of each token from
    its document's first one, counting masked-out tokens, [tokens]; None if there are no such tokens. valid: labels that
    count, [documents, 1 + mtp_depth]. others: entries that are not rows. nodes: of documents that are trees.
    """

    lengths: Ints
    tensors: dict[str, Tensor]
    places: Ints | None
    valid: Ints
    home: BatchShape
    others: dict[str, Any]
    nodes: Nodes | None = None

    def pick(self, documents: Ints) -> Packed:
        """Some of the documents, in the given order; without `places` and `nodes`."""
        first = np.cumsum(self.lengths) - self.lengths
        rows = expand(first[documents], self.lengths[documents])
        return self._replace(
            lengths=self.lengths[documents], tensors=taken(self.tensors, rows), places=None, nodes=None,
            valid=self.valid[documents], home=self.home.pick(rows),
        )  # fmt: skip

    def digest(self) -> str:
        """A hash, equal for equal batches; of tensors on the host."""
        h = hashlib.blake2b(repr((self.home.shape, self.home.lengths)).encode(), digest_size=16)
        nodes = () if self.nodes is None else self.nodes[:2]
        for array in (self.lengths, self.home.kept, self.places, *nodes):
            h.update(b"-" if array is None else np.ascontiguousarray(array, "<i8").tobytes())
        for name, x in sorted(self.tensors.items()):  # a collator may order them otherwise on each rank
            h.update(repr((name, x.dtype, list(x.shape))).encode())
            flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
            h.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"-")
        return h.hexdigest()


NONE = np.zeros(0, np.int64)


def read(batch: Mapping[str, Any] | None, how: Reading) -> Packed:
    """The packed tokens of a batch; None is an empty batch. See `seqpar.data.share` for the accepted entries.

    Raises: ValueError for a batch that can be read in two ways; NotImplementedError for masks and positions of other
    dims.
    """
    if how.shift not in SHIFTS:
        raise ValueError(f"shift must be one of {', '.join(SHIFTS)}, got {how.shift!r}")
    depth = integer("mtp_depth", how.mtp_depth, 0)
    integer("ignore_index", how.ignore_index, -(1 << 63))
    if depth and batch is not None and PARENTS in batch:
        raise NotImplementedError(f"mtp_depth={depth}: a token of a tree has several next ones; give mtp_depth=0")
    if meant := sorted(READ & {*how.keep}):
        raise ValueError(f"keep={list(how.keep)} would leave {meant} unread; keep only entries that are not rows")
    if batch is None:
        return Packed(NONE, {}, None, np.zeros((0, 1 + depth), np.int64), BatchShape((0,)), {})
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a mapping of names to tensors, got {type(batch).__name__}")
    if odd := [name for name in batch if not isinstance(name, str)]:
        raise ValueError(f"a batch is a mapping of names to tensors, got the name {odd[0]!r}")
    given = {name: value for name, value in batch.items() if value is not None}
    others = {name: given.pop(name) for name in how.keep if name in given}
    check_dense("share", [*given.values()])
    rows, on_host = flat(given), read_entries(given, FACTS)
    facts = rows if on_host is given else flat(on_host)
    kept, numbers = kept_of(facts.entries.pop(MASK, None))
    rows.entries.pop(MASK, None)
    parents = facts.entries.pop(PARENTS, None)
    rows.entries.pop(PARENTS, None)
    if not rows.edges[-1]:
        parents = None  # no trees
    nodes = None if parents is None else nodes_of(facts, kept, parents)
    first = first_of(facts, kept, numbers) if nodes is None else starts_of(nodes)
    at = np.flatnonzero(kept) if kept is not None else np.arange(rows.edges[-1])
    starts = np.flatnonzero(first[at])
    lengths = np.diff(np.append(starts, at.size))
    tensors = {name: rows.entries[name] for name in TOKENS if name in rows.entries}
    if nodes is None:
        tensors[POSITIONS] = positions_of(rows, first, numbered=numbers is not None)
        labels = labels_of(facts, kept, first, how.shift, how.ignore_index)
    else:
        depths = nodes.mask.depths(at)
        tensors[POSITIONS] = rows.entries.get(POSITIONS, torch.from_numpy(depths)).long()
        first = depths == 0  # if its root has no token, a tree has several
        labels = labels_on_paths(facts, first, how.ignore_index)
    check_labels(facts, first, how.shift if nodes is None else "document", how.ignore_index, how.vocabulary)
    if labels is not None:
        tensors["labels"] = labels
    if depth and (labels is None or MTP_LABELS in rows.entries):
        raise ValueError(
            f"mtp_depth={depth} makes {MTP_LABELS!r} out of labels, got a batch of {sorted(rows.entries)}; give labels "
            f"or shift_labels, and no {MTP_LABELS}"
        )
    for name, value in rows.entries.items():
        if name not in (*tensors, *LABELS, *STARTS, *LONGEST):
            tensors[name] = value
    home = rows.home
    if at.size < rows.edges[-1]:
        home, tensors = home.pick(at), taken(tensors, at)
    valid = np.zeros((lengths.size, 1 + depth), np.int64)
    if labels is not None and lengths.size:
        columns = tensors["labels"][:, None]
        if depth:
            crossing = np.append(first, False)[at + 1] & (how.shift == "row" and "labels" in rows.entries)
            later = later_labels_of(tensors["labels"], crossing, lengths, depth, how.ignore_index)
            tensors[MTP_LABELS], columns = later, torch.cat([columns, later], 1)
        valid = np.add.reduceat((columns != how.ignore_index).long().numpy(), starts)
    tensors |= _with_tokens(rows, tensors)
    if how.device is not None:
        tensors = {name: moved(x, how.device) for name, x in tensors.items()}
    places = None if kept is None else places_of(rows, at, starts, lengths)  # without a mask nothing is left out
    return Packed(lengths, tensors, places, valid, home, others, nodes)


def _with_tokens(rows: PackedRows, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Positions and labels that were made on the host, where the batch's tokens and labels lie."""
    lead = next(rows.entries[name] for name in TOKENS if name in rows.entries)
    labels = next((rows.entries[name] for name in LABELS if name in rows.entries), lead)
    given = {POSITIONS: lead, "labels": labels, MTP_LABELS: labels}
    goals: dict[torch.device, list[str]] = {}
    for name, x in given.items():
        if name in tensors and tensors[name].is_cpu and not x.is_cpu:
            goals.setdefault(x.device, []).append(name)
    found: dict[str, Tensor] = {}
    for device, names in goals.items():
        found |= zip(names, placed([tensors[name].numpy() for name in names], device), strict=True)
    return found


def taken(tensors: Mapping[str, Tensor], rows: Ints) -> dict[str, Tensor]:
    """Some rows of tensors; their numbers go to a device once."""
    numbers = {device: placed([rows], device)[0] for device in {x.device for x in tensors.values()}}
    return {name: picked(x, 0, numbers[x.device]) for name, x in tensors.items()}
