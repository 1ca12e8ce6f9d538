"""The union of all ranks' batches: each rank announces its own, and all ranks know the union."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.data.batch import Packed, Reading, read
from seqpar.data.host import read_entries
from seqpar.facts.intervals import expand
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, frozen
from seqpar.ops.core.agreement import check_comm, gathering

SOURCES = ("sharded", "replicated")

Gather = Callable[[Any, Exception | None], list[Any]]  # (own value, own error) -> every rank's value


Brought = tuple[int, ...]  # the number of documents that each rank brings, in order


class Column(NamedTuple):
    """The properties of a tensor that ranks must share."""

    dtype: str
    dims: tuple[int, ...]  # all but the first
    device: str
    requires_grad: bool


class Facts(NamedTuple):
    """One rank's announcement of its batch."""

    lengths: Ints
    places: tuple[Ints, Ints] | None  # tokens that follow masked-out ones, and the number of these
    valid: Ints
    columns: dict[str, Column]
    ended: bool
    digest: str  # of a replicated batch
    nodes: tuple[Ints, Ints] | None  # lengths and parents, of trees

    def packed(self) -> tuple[Any, ...]:
        """The announcement as it travels: bytes and words pickle in a tenth of the time of arrays and dtypes."""
        places = None if self.places is None else tuple(x.tobytes() for x in self.places)
        columns = tuple((name, *column) for name, column in self.columns.items())
        nodes = None if self.nodes is None else tuple(x.astype(np.int64).tobytes() for x in self.nodes)
        return self.lengths.tobytes(), places, self.valid.tobytes(), columns, self.ended, self.digest, nodes

    @classmethod
    def read(cls, packed: tuple[Any, ...], depths: int) -> Facts:
        """The announcement that `packed` made; depths: columns of `valid`."""
        lengths, places, valid, columns, ended, digest, nodes = packed
        lengths, valid = (np.frombuffer(x, np.int64) for x in (lengths, valid))
        places, nodes = (None if x is None else tuple(np.frombuffer(y, np.int64) for y in x) for x in (places, nodes))
        own = {name: Column(*facts) for name, *facts in columns}
        return cls(lengths, places, valid.reshape(-1, depths), own, ended, digest, nodes)


class BatchUnion(NamedTuple):
    """The union of all batches as every rank knows it, and this rank's own batch.

    lengths: tokens of each document. brought: how many of them each rank supplied; None if every rank has all. places,
    valid: as in `Packed`, for the union. tree: the mask of documents that are trees.
    """

    own: Packed
    lengths: Ints
    brought: Brought | None
    places: Ints | None
    valid: Ints
    columns: dict[str, Column]
    tree: Mask | None = None

    @property
    def documents(self) -> Mask | Ints:
        """The union as planners take it: the mask of trees, or the lengths of documents."""
        return self.lengths if self.tree is None else self.tree

    def layout(self) -> Layout | None:
        """The layout of the rows before they move; None if every rank has all rows."""
        return None if self.brought is None else layout_of(self.lengths, self.brought)

    def pick(self, documents: Ints, rank: int) -> BatchUnion:
        """This union restricted to some of the documents, ascending, for rank `rank`."""
        first = np.cumsum(self.lengths) - self.lengths
        places = None if self.places is None else self.places[expand(first[documents], self.lengths[documents])]
        brought, own = None, documents
        if self.brought is not None:
            ends = np.cumsum(self.brought)
            brought = tuple(np.diff(np.searchsorted(documents, ends), prepend=0).tolist())
            first_own = int(ends[rank]) - self.brought[rank]
            own = documents[(documents >= first_own) & (documents < ends[rank])] - first_own
        return BatchUnion(
            self.own.pick(own), frozen(self.lengths[documents]), brought, places, self.valid[documents], self.columns,
            None if self.tree is None else self.tree.pick(documents),
        )  # fmt: skip

    def rows(self, name: str) -> Tensor:
        """This rank's rows of a tensor; a rank without it copies the tensor's properties from the others."""
        if name in self.own.tensors:
            return self.own.tensors[name]
        column = self.columns[name]
        return torch.zeros(
            int(self.own.lengths.sum()),
            *column.dims,
            dtype=getattr(torch, column.dtype),
            device=column.device,
            requires_grad=column.requires_grad,
        )


def layout_of(lengths: Ints, brought: Brought) -> Layout:
    """The layout of packed documents, rank after rank."""
    return _layout(np.ascontiguousarray(lengths, np.int64).tobytes(), brought)


@lru_cache(maxsize=8)  # used by the planner of a batch and by the mover of its rows
def _layout(packed: bytes, brought: Brought) -> Layout:
    lengths = np.frombuffer(packed, np.int64)
    ranks = len(brought)
    return Layout.from_pieces(np.cumsum(lengths) - lengths, lengths, np.repeat(np.arange(ranks), brought), ranks)


def announce(
    batch: Mapping[str, Any] | None,
    comm: Comm,
    source: str,
    how: Reading,
    *,
    error: Exception | None = None,
    ended: bool = False,
    depth: int = 0,
    gather: Gather | None = None,
) -> BatchUnion | None:
    """The union of all ranks' batches; None if all loaders have ended. A collective.

    error: why this rank has no batch. depth: how many further batches are announced while one is computed. gather: the
    exchange between ranks, if it carries more than the announcement.

    Raises: as `share`.
    """
    check_comm("share", comm)
    what = f"share(source={source!r}, shift={how.shift!r}, ignore_index={how.ignore_index}, mtp_depth={how.mtp_depth}"
    what += f", depth={depth})" if depth else ")"
    with gathering(what, comm, gather) as told:
        if error is not None:
            raise error
        if source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
        whole = source == "replicated" and isinstance(batch, Mapping)
        on_host = read_entries(batch, batch.keys() - {*how.keep}) if whole else batch  # one copy, of all that is read
        own = read(batch, how)
        digest = ""
        if source == "replicated":
            lay_there = on_host is batch and how.device is None
            digest = (own if lay_there else read(on_host, how._replace(device=None))).digest()
        nodes = None if own.nodes is None else own.nodes[:2]
        told.own = Facts(own.lengths, _gaps(own), own.valid, _columns(own), ended, digest, nodes).packed()
    every = [Facts.read(packed, 1 + how.mtp_depth) for packed in told.every]
    if source == "replicated":
        _check_equal(every)
    if all(each.ended for each in every):
        return None
    return _union(own, every, source, how.optional)


def _columns(own: Packed) -> dict[str, Column]:
    return {
        name: Column(str(x.dtype).removeprefix("torch."), tuple(x.shape[1:]), x.device.type, x.requires_grad)
        for name, x in own.tensors.items()
    }


def _gaps(own: Packed) -> tuple[Ints, Ints] | None:
    if own.places is None:
        return None
    more = np.diff(own.places, prepend=-1) - 1
    more[np.cumsum(own.lengths) - own.lengths] = 0
    return np.flatnonzero(more), more[more != 0]


def _check_equal(every: Sequence[Facts]) -> None:
    for rank, each in enumerate(every):
        if (each.digest, each.ended) != (every[0].digest, every[0].ended):
            lacks = " (one loader has ended)" if each.ended != every[0].ended else ""
            raise ValueError(
                f"share: the batch of rank {rank} is not that of rank 0{lacks}; load the same batch on every "
                "rank, or give source='sharded' for a batch of each"
            )


def _union(own: Packed, every: Sequence[Facts], source: str, optional: Sequence[str]) -> BatchUnion:
    """The documents of all ranks, one rank's after the other's; of a replicated batch, those of each."""
    if source == "replicated":
        every = every[:1]
    lengths = np.concatenate([each.lengths for each in every])
    if not lengths.size:
        raise ValueError("share: the batches of all ranks are empty; skip this batch on every rank")
    brought = tuple(each.lengths.size for each in every)
    valid = np.concatenate([each.valid for each in every])
    columns = _common(every, optional)
    if not own.lengths.size:
        own = own._replace(tensors={})  # of whatever kind: the others' is what moves
    return BatchUnion(
        own, frozen(lengths), None if source == "replicated" else brought, _places(every, lengths), valid, columns,
        _tree(every),
    )  # fmt: skip


def _tree(every: Sequence[Facts]) -> Mask | None:
    """The trees of all ranks; None if documents are not trees."""
    ranks = [rank for rank, each in enumerate(every) if each.lengths.size]
    given = [rank for rank in ranks if every[rank].nodes is not None]
    if not given:
        return None
    if given != ranks:
        plain = next(rank for rank in ranks if rank not in given)
        raise ValueError(
            f"share: the batch of rank {given[0]} has parents and that of rank {plain} has none; rows of all ranks' "
            "batches go together: give parents of -1 to nodes without one"
        )
    lengths, parents = zip(*(every[rank].nodes or () for rank in ranks), strict=True)
    before = np.cumsum([0, *(each.size for each in lengths[:-1])])
    roots = [np.where(each < 0, -1, each + first) for each, first in zip(parents, before, strict=True)]
    return Mask.tree(np.concatenate(lengths), np.concatenate(roots))


def _common(every: Sequence[Facts], optional: Sequence[str]) -> dict[str, Column]:
    """The columns of the ranks that have tokens, which must be alike. optional: those that some of them may lack."""
    ranks = [rank for rank, each in enumerate(every) if each.lengths.size]
    first = ranks[0]
    found = {name: column for rank in ranks for name, column in every[rank].columns.items() if name in optional}
    columns = {rank: found | every[rank].columns for rank in ranks}
    for rank in ranks[1:]:
        if columns[rank] == columns[first]:
            continue
        for name in sorted(columns[first].keys() | columns[rank].keys()):
            one, other = (columns[each].get(name, "missing") for each in (first, rank))
            if one != other:
                raise ValueError(
                    f"share: {name} is {_describe(one)} on rank {first} and {_describe(other)} on rank {rank}; rows of "
                    "all ranks' batches go together"
                )
    return {name: columns[first][name] for name in sorted(columns[first])}


def _describe(column: Column | str) -> str:
    if isinstance(column, str):
        return column
    grad = " that requires a gradient" if column.requires_grad else ""
    return f"torch.{column.dtype} [tokens{''.join(f', {n}' for n in column.dims)}] on {column.device}{grad}"


def _places(every: Sequence[Facts], lengths: Ints) -> Ints | None:
    if all(each.places is None for each in every):
        return None
    more = np.zeros(int(lengths.sum()), np.int64)
    begin = 0
    for each in every:
        if each.places is not None:
            more[begin + each.places[0]] = each.places[1]
        begin += int(each.lengths.sum())
    line = np.arange(more.size) + np.cumsum(more)
    places: Ints = frozen(line - np.repeat(line[np.cumsum(lengths) - lengths], lengths))
    return places
