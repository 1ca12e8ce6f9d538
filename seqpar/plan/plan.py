"""The choice of how a batch is computed: a value, equal on every rank, from which each rank derives its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqpar.layout import Layout, Runs, cut
from seqpar.mask import Fact, Ints, Mask, digest_of, frozen, whole
from seqpar.plan import routes
from seqpar.plan.heads import head_share, replicated
from seqpar.plan.steps import Part, Rows, Step, Trade, as_rows, count
from seqpar.plan.traffic import Shape, traffic

TRANSPORTS = ("fetch", "ring", "double_ring", "gather")
NOMINAL_ROW_BYTES = 4096  # keys and values of 8 heads of 128 in bf16


class Plan(Fact):
    """Who computes what with whose keys, for one batch.

    layout: where the query rows live; kv_layout: where the keys live if not with the queries, needed when their
    numbers differ. ulysses: how many consecutive ranks trade tokens for heads, dividing the ranks, as one number or
    one per document; in a list, documents held by one rank keep width 1 and move nothing. transport: how keys travel
    among the rest. node: ranks per node: Ulysses groups then lie inside a node, and it is the inner ring of
    "double_ring", which without it takes the largest divisor not above the square root. stage_bytes: the most that one
    fetched stage of keys and values may take. rows: rows of each rank's query shard (and key shard, if not laid out
    apart), at least its tokens; the rows after the tokens are pads.

    Raises: ValueError for facts that do not fit each other, on every rank alike, since none of it depends on a rank.
    NotImplementedError for ``node`` with "fetch", and for a width per document with bounds that cross documents.
    """

    mask: Mask
    layout: Layout
    kv_layout: Layout
    ranks: int
    ulysses: int | tuple[int, ...]
    transport: str
    node: int | None
    stage_bytes: int
    _widths: Ints
    _rows: Ints

    def __init__(
        self,
        mask: Mask,
        layout: Layout,
        *,
        kv_layout: Layout | None = None,
        ulysses: int | Sequence[int] = 1,
        transport: str = "fetch",
        node: int | None = None,
        stage_bytes: int = 64 << 20,
        rows: int | Sequence[int] | None = None,
    ) -> None:
        keys = _checked_layouts(mask, layout, kv_layout)
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        stage_bytes = whole("stage_bytes", stage_bytes, 1)
        node = None if node is None else whole("node", node, 1)
        if node is not None and layout.ranks % node:
            raise ValueError(f"node must divide the {layout.ranks} ranks, got {node}")
        if node is not None and transport == "fetch":
            raise NotImplementedError("fetch with node: forwarding inside a node is not built; leave node out")
        per_document = not isinstance(ulysses, (int, np.integer))
        given = ulysses if per_document and np.ndim(ulysses) == 1 else [ulysses]
        width = tuple(whole("the Ulysses width", u, 1) for u in given)  # type: ignore[union-attr]
        self._fill(
            mask=mask,
            layout=layout,
            kv_layout=keys,
            ranks=layout.ranks,
            ulysses=width if per_document else width[0],
            transport=transport,
            node=node,
            stage_bytes=stage_bytes,
            _rows=_checked_rows(layout, rows),
        )
        self.__dict__["_widths"] = self._checked_widths(width, per_document)
        facts = (self.mask.digest(), self.layout.digest(), self.kv_layout.digest(), self._widths, self._rows)
        self.__dict__["_digest"] = digest_of("plan", *facts, transport, node, stage_bytes)

    def _checked_widths(self, width: tuple[int, ...], per_document: bool) -> Ints:
        documents = len(self.mask.lengths)
        if per_document and len(width) != documents:
            raise ValueError(f"ulysses has {len(width)} widths for {documents} documents")
        for u in set(width):
            if self.ranks % u:
                raise ValueError(f"the Ulysses width must divide the {self.ranks} ranks, got {u}")
            if self.node is not None and self.node % u:
                raise ValueError(f"the Ulysses width must divide node={self.node}, got {u}")
        if not per_document or set(width) == {1}:
            return frozen(np.full(documents, width[0], np.int64))
        if not self.mask.within_documents:
            raise NotImplementedError("a Ulysses width per document needs bounds inside documents; give one width")
        widths = np.asarray(width, np.int64)
        alone = (self.degrees == 1) & (self._held_alike())
        return frozen(np.where(alone, 1, widths))

    def _held_alike(self) -> Ints:
        """Whether a document's keys are all where its queries are, for documents on one rank."""
        if self.kv_layout is self.layout:
            return np.ones(len(self.mask.lengths), bool)
        queries, keys = self.layout.owner(), self.kv_layout.owner()
        first = queries[self.mask.offsets[:-1]]
        other = keys != np.repeat(first, self.mask.kv_lengths)
        return np.add.reduceat(other, self.mask.kv_offsets[:-1]) == 0

    @property
    def widths(self) -> Ints:
        """Ulysses width of each document."""
        return self._widths

    @property
    def degrees(self) -> Ints:
        """Ranks that hold tokens of each document, [documents]."""
        return self.memo("degrees", self._degrees)

    def _degrees(self) -> Ints:
        runs, rank = self.layout.all_runs()
        piece, source = cut(runs, self.mask.offsets[:-1])
        pairs = np.unique(self.mask.documents(piece.start) * self.ranks + rank[source])
        return np.bincount(pairs // self.ranks, minlength=len(self.mask.lengths))

    @property
    def merges(self) -> bool:
        """Whether keys of some row come in several steps, so that partial results are merged. The same on all ranks."""
        return self.memo("merges", self._merges)

    def _merges(self) -> bool:
        if self.transport == "gather" or (self._widths == self.ranks).all():
            return False
        if not self.mask.within_documents:
            return True
        held = []
        for layout, offsets in ((self.layout, self.mask.offsets), (self.kv_layout, self.mask.kv_offsets)):
            runs, rank = layout.all_runs()
            piece, source = cut(runs, offsets[:-1])
            document = np.searchsorted(offsets, piece.start, side="right") - 1
            held.append(np.unique(document * self.ranks + rank[source] // self._widths[document]))
        return len(held[0]) != len(self.mask.lengths) or not np.array_equal(held[0], held[1])

    def sums_key_gradients(self, heads: int, kv_heads: int) -> bool:
        """Whether gradients of some key may be sums over ranks: of keys that several hold or that share a key head."""
        if self.merges or any(replicated(heads, kv_heads, w) for w in set(self._widths.tolist())):
            return True
        return self.transport == "gather" and bool((self._widths < self.ranks).any())

    def rows(self, rank: int, side: str = "q") -> int:
        """Rows of a rank's tensors, pads included; ``side`` "q" or "kv"."""
        if side not in ("q", "kv"):
            raise ValueError(f'side must be "q" or "kv", got {side!r}')
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of the plan's {self.ranks} ranks")
        if side == "kv" and self.kv_layout is not self.layout:
            return self.kv_layout.tokens(rank)
        return int(self._rows[rank])

    def positions(self, rank: int, side: str = "q") -> Ints:
        """Global positions [rows] of a rank's rows, -1 for pads."""
        layout = self.layout if side == "q" else self.kv_layout
        at = layout.positions(rank)
        return np.append(at, np.full(self.rows(rank, side) - at.size, -1, np.int64))

    def rope_positions(self, rank: int) -> Ints:
        """Positions [rows] inside the document of a rank's query rows, 0 for pads."""
        at = self.positions(rank)
        start = self.mask.offsets[np.maximum(self.mask.documents(at), 0)]
        return np.where(at < 0, 0, at - start)

    def with_mask(self, mask: Mask) -> Plan:
        """The same layout, transport and widths under another mask, as for a window in some layers; cached."""
        if mask == self.mask:
            return self
        return self.memo(("mask", mask), lambda: self._with_mask(mask))

    def _with_mask(self, mask: Mask) -> Plan:
        own = None if self.kv_layout is self.layout else self.kv_layout
        rows = self._rows.tolist()
        return Plan(
            mask, self.layout, kv_layout=own, ulysses=self.ulysses, transport=self.transport, node=self.node,
            stage_bytes=self.stage_bytes, rows=rows,
        )  # fmt: skip

    def steps(self, rank: int, *, row_bytes: int = NOMINAL_ROW_BYTES) -> list[Step]:
        """The steps of a rank, part after part; row_bytes: of one token's keys and values in a stage, same on all."""
        stage_rows = max(1, self.stage_bytes // row_bytes)
        if self.transport != "fetch":
            stage_rows = 0  # the other transports have no stages to bound
        return self.memo(("steps", rank, stage_rows), lambda: self._steps(rank, stage_rows))

    def _steps(self, rank: int, stage_rows: int) -> list[Step]:
        result: list[Step] = []
        number = 0
        for width in np.unique(self._widths).tolist():
            part = self.memo(("part", rank, width), partial(self._part, rank, width))
            demand = self.memo(("demand", width), partial(self._demand, width))
            me = rank // part.width
            mine = part.keys
            if self.transport == "gather":
                found = list(routes.gather(demand, me, mine))
            elif self.transport == "fetch":
                found = list(routes.fetch(demand, me, mine, stage_rows))
            else:
                inner = self._inner(part.width) if self.transport == "double_ring" else demand.groups
                found = list(routes.ring(demand, me, inner))
            if self.transport != "gather":
                found.insert(0, routes.LOCAL)
            result += self._numbered(part, number, found)
            number += len(found)
        return result

    def _numbered(self, part: Part, number: int, found: list[routes.Route]) -> list[Step]:
        """Steps of one part. Every rank has every number, also where it has nothing: exchanges are posted in an order
        that follows the numbers, and it must be one order on all ranks."""
        last = max((n for n, route in enumerate(found) if route.pos.size), default=0)
        result = []
        for n, route in enumerate(found):
            local = route is routes.LOCAL
            onward = found[n + 1].pos.size if route.carry is not None else 0
            result.append(
                Step(
                    part, number + n, part.keys if local else route.pos, local=local, own=route.own,
                    relay="ring" in self.transport, sends=_ranked(part, route.sends), recvs=_ranked(part, route.recvs),
                    grad_sends=_ranked(part, route.grad_sends), grad_recvs=_ranked(part, route.grad_recvs),
                    carry=None if route.carry is None else route.carry * part.width + part.share, carry_rows=onward,
                    first=n == 0, last=n == last, ends=n == len(found) - 1,
                )
            )  # fmt: skip
        return result

    def _inner(self, width: int) -> int:
        """Groups in the inner ring."""
        groups = self.ranks // width
        if self.node is not None:
            return self.node // width
        return max(d for d in range(1, int(groups**0.5) + 1) if groups % d == 0)

    def _part(self, rank: int, width: int) -> Part:
        first = rank // width * width
        members = range(first, first + width)
        q, at = self._trade(rank, members, "q")
        kv, keys = self._trade(rank, members, "kv")
        lo, hi = self.mask.bounds(at)
        return Part(width, rank - first, members, q, kv, self.mask.key_positions(at), lo, hi, keys)

    def _trade(self, rank: int, members: range, side: str) -> tuple[Trade, Ints]:
        """One side of the head trade, and the positions of the inside rows."""
        width = len(members)
        held: dict[int, Ints] = {}
        mine = np.zeros(0, np.int64)
        for member in members:
            layout = self.layout if side == "q" else self.kv_layout
            at = layout.positions(member)
            row = np.arange(at.size)
            if (self._widths != self._widths[0]).any():
                row = row[self._document_width(at, side) == width]
            if (at[row][1:] < at[row][:-1]).any():
                row = row[np.argsort(at[row], kind="stable")]
            held[member] = at[row]
            if member == rank:
                mine = row
        inside = np.concatenate(list(held.values()))
        if width > 1:
            inside = np.sort(inside, kind="stable")
        dest = {m: as_rows(np.searchsorted(inside, at)) for m, at in held.items()}
        return Trade(as_rows(mine) if (np.diff(mine) > 0).all() else mine, dest, inside.size), inside

    def _document_width(self, positions: Ints, side: str) -> Ints:
        offsets = self.mask.offsets if side == "q" else self.mask.kv_offsets
        return self._widths[np.searchsorted(offsets, positions, side="right") - 1]

    def _demand(self, width: int) -> routes.Demand:
        """Who needs and who has the keys of the documents of one width."""
        groups = self.ranks // width
        runs, rank = self._runs_of_width(width, "q")
        needs = routes.needs_of(self.mask, runs, rank // width, groups)
        key_runs, key_rank = self._runs_of_width(width, "kv")
        owner = self.kv_layout.owner() // width if width > 1 else self.kv_layout.owner()
        if (self._widths != width).any():
            owner = np.where(np.repeat(self._widths == width, self.mask.kv_lengths), owner, -1)
        anchor = np.full(groups, self.mask.kv_tokens, np.int64)
        np.minimum.at(anchor, key_rank // width, key_runs.start)
        return routes.Demand(needs, owner, anchor, groups)

    def _runs_of_width(self, width: int, side: str) -> tuple[Runs, Ints]:
        runs, rank = (self.layout if side == "q" else self.kv_layout).all_runs()
        if (self._widths == width).all():
            return runs, rank
        offsets = self.mask.offsets if side == "q" else self.mask.kv_offsets
        piece, source = cut(runs, offsets[:-1])
        kept = self._document_width(piece.start, side) == width
        return piece.pick(kept), rank[source][kept]

    def traffic(self, rank: int, **shape: Any) -> dict[int, int]:
        """Bytes that a rank sends to each peer in one attention call; arguments as in `bytes`."""
        return traffic(self, rank, Shape(**shape))

    def row_bytes(self, heads: int, kv_heads: int, dim: int, v_dim: int, size: int) -> int:
        """Bytes of one token's keys and values on the rank with most key heads: what bounds the stages of all ranks."""

        def most() -> int:
            shares = (head_share(heads, kv_heads, w, s)[1] for w in set(self._widths.tolist()) for s in range(w))
            return max(s.stop - s.start for s in shares)

        return max(1, int(self.memo(("key heads", heads, kv_heads), most)) * (dim + v_dim) * size)

    def bytes(
        self,
        rank: int,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int | None = None,
        dtype: str = "bfloat16",
        backward: bool = False,
        return_lse: bool = False,
        kv_grads: bool = True,
    ) -> int:
        """Bytes that a rank sends in one attention call: forward, or with ``backward`` in its backward.

        Counted are tensors' contents, as `Comm.stats` counts them. dtype: "float64", "float32", "bfloat16", "float16".
        kv_grads: whether keys or values require a gradient.
        """
        shape = Shape(heads, kv_heads, dim, v_dim, dtype, backward, return_lse, kv_grads)
        return sum(traffic(self, rank, shape).values())

    def describe(self) -> str:
        """The plan as text: what it was given, and for each rank its rows, area and keys received."""
        from seqpar.plan.describe import describe

        return describe(self)

    def __repr__(self) -> str:
        return f"Plan({self.mask!r}, {self.layout!r}, ulysses={self.ulysses}, transport={self.transport!r})"


def _ranked(part: Part, by_group: Mapping[int, Rows]) -> dict[int, Rows]:
    """What goes to a group goes to its rank with the same share of the heads."""
    return {g * part.width + part.share: rows for g, rows in sorted(by_group.items()) if count(rows)}


def _checked_layouts(mask: Mask, layout: Layout, kv_layout: Layout | None) -> Layout:
    if layout.total != mask.tokens:
        raise ValueError(f"the layout holds {layout.total} tokens, the mask {mask.tokens}")
    if kv_layout is None and mask.kv_tokens != mask.tokens:
        raise ValueError(f"{mask.tokens} queries and {mask.kv_tokens} keys need a kv_layout of their own")
    if max(mask.tokens, mask.kv_tokens) >= 1 << 31:
        raise NotImplementedError(f"positions of kernels are int32, the mask has {mask.tokens} tokens; split the batch")
    # An equal layout of the keys is the same choice as none: plans that are equal must give every rank the same rows.
    keys = layout if kv_layout is None or kv_layout == layout else kv_layout
    if keys.total != mask.kv_tokens:
        raise ValueError(f"kv_layout holds {keys.total} tokens, the mask has {mask.kv_tokens} keys")
    if keys.ranks != layout.ranks:
        raise ValueError(f"kv_layout has {keys.ranks} ranks, the layout {layout.ranks}")
    return keys


def _checked_rows(layout: Layout, rows: int | Sequence[int] | None) -> ArrayLike:
    tokens = np.array([layout.tokens(r) for r in range(layout.ranks)])
    if rows is None:
        return frozen(tokens)
    given = np.asarray(rows)
    if given.dtype.kind not in "iu":
        raise ValueError(f"rows must be integers, got {rows!r:.200}")
    given = np.broadcast_to(given, tokens.shape) if given.ndim == 0 else given
    if given.shape != tokens.shape:
        raise ValueError(f"rows has {given.size} entries for {layout.ranks} ranks")
    if (given < tokens).any():
        rank = int(np.flatnonzero(given < tokens)[0])
        raise ValueError(f"rows gives rank {rank} {given[rank]} rows, it holds {tokens[rank]} tokens")
    return frozen(given.astype(np.int64))
