"""The choice of how a batch is computed: a value, equal on every rank, from which each rank derives its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqpar.facts.intervals import Holders, Runs, cut, expand, interval_of, order_of
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Fact, Ints, digest_of, frozen, int64_of, is_integer, whole
from seqpar.plan import routes
from seqpar.plan.heads import head_share, replicated
from seqpar.plan.hierarchy import fetch_by_node
from seqpar.plan.steps import Entry, Part, Rows, Step, Trade, as_rows, count
from seqpar.plan.traffic import HeadShape, traffic

TRANSPORTS = ("fetch", "ring", "double_ring", "gather")
LIMIT = 1 << 31  # of rows and of tokens: fewer are numbered
NOMINAL_ROW_BYTES = 4096  # keys and values of 8 heads of 128 in bf16


class Prediction(Protocol):
    """What a plan shows of a forecast, which planners make."""

    @property
    def node(self) -> int:
        """Ranks of a node of the machine."""

    @property
    def call(self) -> dict[str, Any]:
        """A layer's heads, key heads, dims and dtype, as `Plan.bytes` takes them."""

    @property
    def phases(self) -> dict[str, NDArray[np.float64]]:
        """Seconds of every rank in a step, by what it does."""

    @property
    def least(self) -> float:
        """Seconds that no plan can beat."""

    @property
    def what(self) -> str:
        """The model and the machine, in a few words."""

    @property
    def headline(self) -> str:
        """Seconds of the slowest rank and the gap to the bound, in a few words."""


class Plan(Fact):
    """Who computes what with whose keys, for one batch.

    layout: where the query rows live; kv_layout: where the keys live if not with the queries, needed when their
    numbers differ. ulysses: how many consecutive ranks trade tokens for heads, dividing the ranks, as one number or
    one per document; in a list, documents held by one rank keep width 1 and move nothing. transport: how keys travel
    among the rest. node: consecutive ranks per node: Ulysses groups then lie inside a node, "fetch" then lets a
    key enter a node once, and it is the inner ring of "double_ring", which without it takes the largest divisor not
    above the square root. stage_bytes: the most that one fetched stage of keys and values may take. rows: rows of each
    rank's query shard (and key shard, if not laid out apart), at least its tokens; the rows after the tokens are pads.

    Raises: ValueError for facts that do not fit each other, on every rank alike, since none of it depends on a rank.
    NotImplementedError for a width per document with bounds that cross documents.
    """

    mask: Mask
    layout: Layout
    kv_layout: Layout
    ranks: int
    ulysses: int | tuple[int, ...]
    transport: str
    node: int | None
    stage_bytes: int
    forecast: Prediction | None
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
        per_document = np.ndim(ulysses) == 1
        width = _whole_widths(ulysses if per_document else [ulysses])
        self._fill(
            mask=mask,
            layout=layout,
            kv_layout=keys,
            ranks=layout.ranks,
            ulysses=width if per_document else width[0],
            transport=transport,
            node=node,
            stage_bytes=stage_bytes,
            forecast=None,
            _rows=_checked_rows(layout, rows),
        )
        self.__dict__["_widths"] = self._checked_widths(width, per_document)

    def _made_digest(self) -> str:
        facts = (self.mask.digest(), self.layout.digest(), self.kv_layout.digest(), self._widths, self._rows)
        return digest_of("plan", *facts, self.transport, self.node, self.stage_bytes)

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
        return frozen(np.where(self._alone(), 1, np.asarray(width, np.int64)))

    def _alone(self) -> Ints:
        """Whether one rank holds all queries and all keys of a document."""
        queries, keys = (self._holding(side) for side in ("q", "kv"))
        first = [held[np.append(True, np.diff(held // self.ranks) > 0)] for held in (queries, keys)]
        degree = [np.bincount(held // self.ranks) for held in (queries, keys)]
        return (degree[0] == 1) & (degree[1] == 1) & (first[0] == first[1])

    def _holding(self, side: str) -> Ints:
        """The ranks that hold tokens of each document, as ascending ``document * ranks + rank``; made once."""
        if side == "kv" and self._one_side:
            side = "q"
        return self.memo(("holding", side), lambda: self._made_holding(side))

    def _made_holding(self, side: str) -> Ints:
        _, rank, document = self._pieces(side)
        pairs = document * self.ranks + rank
        pairs = pairs[order_of(pairs, len(self.mask.lengths) * self.ranks)]
        return pairs[np.append(True, np.diff(pairs) > 0)]

    def _pieces(self, side: str) -> tuple[Runs, Ints, Ints]:
        """The rows of all ranks in the order of their starts, cut at documents: runs, rank and document; made once."""
        if side == "kv" and self._one_side:
            side = "q"
        return self.memo(("pieces", side), lambda: self._made_pieces(side))

    def _made_pieces(self, side: str) -> tuple[Runs, Ints, Ints]:
        layout, offsets = self._side(side)
        holders = layout.holders()
        piece, source = cut(holders.runs, offsets[:-1])
        if (piece.start[1:] < piece.start[:-1]).any():
            order = order_of(piece.start, layout.total)
            piece, source = piece.pick(order), source[order]
        document = interval_of(piece.start, offsets[:-1])
        return piece, holders.holder[source].astype(np.int64), document

    def _side(self, side: str) -> tuple[Layout, Ints]:
        """Where rows live, and where their documents start."""
        return (self.layout, self.mask.offsets) if side == "q" else (self.kv_layout, self.mask.kv_offsets)

    @property
    def _one_side(self) -> bool:
        """Whether keys live with the queries, document by document."""
        return self.kv_layout is self.layout and np.array_equal(self.mask.offsets, self.mask.kv_offsets)

    @property
    def widths(self) -> Ints:
        """Ulysses width of each document."""
        return self._widths

    @property
    def degrees(self) -> Ints:
        """Ranks that hold tokens of each document, [documents]."""
        return self.memo("degrees", self._degrees)

    def _degrees(self) -> Ints:
        return frozen(np.bincount(self._holding("q") // self.ranks))

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
        for side in ("q", "kv"):
            document, rank = np.divmod(self._holding(side), self.ranks)
            pairs = document * self.ranks + rank // self._widths[document]
            held.append(pairs[np.append(True, np.diff(pairs) > 0)])
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
        self._check_rank(rank)
        if side == "kv" and self.kv_layout is not self.layout:
            return self.kv_layout.tokens(rank)
        return int(self._rows[rank])

    def _check_rank(self, rank: int) -> None:
        if not is_integer(rank) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank!r} is not one of the plan's {self.ranks} ranks")

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

    def padded(self) -> Plan:
        """The same plan with a pad row on every rank that holds no token: what models that take no empty tensors need.

        Raises: NotImplementedError for keys in a layout of their own, which has no pads.
        """
        if self._rows.all():
            return self
        if self.kv_layout is not self.layout:
            raise NotImplementedError("keys in a layout of their own have no pad rows; give every rank a query")
        return self.memo("padded", self._padded)

    def _padded(self) -> Plan:
        plan = Plan(
            self.mask, self.layout, ulysses=self.ulysses, transport=self.transport, node=self.node,
            stage_bytes=self.stage_bytes, rows=np.maximum(self._rows, 1).tolist(),
        )  # fmt: skip
        return plan if self.forecast is None else plan.with_forecast(self.forecast)

    def with_forecast(self, forecast: Prediction) -> Plan:
        """The same plan, with what it is predicted to take; it has no part in the plan's identity."""
        self.__dict__["forecast"] = forecast
        return self

    def steps(self, rank: int, *, row_bytes: int = NOMINAL_ROW_BYTES) -> list[Step]:
        """The steps of a rank, part after part; row_bytes: of one token's keys and values in a stage, same on all."""
        self._check_rank(rank)
        stage_rows = max(1, self.stage_bytes // whole("row_bytes", row_bytes, 1))
        if self.transport != "fetch":
            stage_rows = 0  # the other transports have no stages to bound
        return self.memo(("steps", rank, stage_rows), lambda: self._steps(rank, stage_rows))

    def _steps(self, rank: int, stage_rows: int) -> list[Step]:
        result: list[Step] = []
        number = 0
        for width in np.flatnonzero(np.bincount(self._widths)).tolist():
            part = self.memo(("part", rank, width), partial(self._part, rank, width))
            demand = self.memo(("demand", width), partial(self._demand, width))
            me = rank // part.width
            mine = part.keys
            if self.transport == "gather":
                found = list(routes.gather(demand, me, mine))
            elif self.transport == "fetch":
                inner = demand.groups if self.node is None else self.node // part.width
                found = list(fetch_by_node(demand, me, mine, stage_rows, inner))
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
        result: list[Step] = []
        for n, route in enumerate(found):
            local = route is routes.LOCAL
            onward = found[n + 1].pos.size if route.carry is not None else 0
            sends, recvs = _ranked(part, route.sends), _ranked(part, route.recvs)
            # Gradients mostly go the way that keys came: thousands of messages are renamed once.
            grad_sends = recvs if route.grad_sends is route.recvs else _ranked(part, route.grad_sends)
            grad_recvs = sends if route.grad_recvs is route.sends else _ranked(part, route.grad_recvs)
            result.append(
                Step(
                    part, number + n, part.keys if local else route.pos, local=local, own=route.own,
                    relay="ring" in self.transport, entry=_entry_of(part, route.entry),
                    spread=result[-1].entry if result else None, sends=sends, recvs=recvs, grad_sends=grad_sends,
                    grad_recvs=grad_recvs,
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
        kv, keys = (q, at) if self._one_side else self._trade(rank, members, "kv")
        lo, hi = self.mask.bounds(at)
        return Part(width, rank - first, members, q, kv, self.mask.key_positions(at), lo, hi, keys)

    def _trade(self, rank: int, members: range, side: str) -> tuple[Trade, Ints]:
        """One side of the head trade, and the positions of the inside rows."""
        held = {m: self._rows_of_width(m, len(members), side) for m in members}
        mine = held[rank][1]
        inside = np.concatenate([at for at, _ in held.values()])
        place = np.arange(inside.size)
        if len(members) > 1:
            order = np.argsort(inside, kind="stable")
            inside, place[order] = inside[order], np.arange(inside.size)
        ends = np.cumsum([at.size for at, _ in held.values()])
        dest = dict(zip(members, map(as_rows, np.split(place, ends[:-1])), strict=True))
        return Trade(as_rows(mine) if (np.diff(mine) > 0).all() else mine, dest, inside.size), inside

    def _rows_of_width(self, rank: int, width: int, side: str) -> tuple[Ints, Ints]:
        """A rank's positions in the documents of one width, ascending, and the row of each."""
        layout, offsets = self._side(side)
        piece = layout.runs(rank)
        row = np.cumsum(piece.count) - piece.count
        if (self._widths != width).any():
            parts, source = cut(piece, offsets[:-1])
            row = row[source] + (parts.start - piece.start[source]) // parts.step
            kept = self._widths[np.searchsorted(offsets, parts.start, side="right") - 1] == width
            piece, row = parts.pick(kept), row[kept]
        order = np.argsort(piece.start, kind="stable")
        piece, row = piece.pick(order), row[order]
        at, rows = expand(*piece), expand(row, piece.count)
        if (piece.start[1:] < piece.last[:-1]).any():
            order = np.argsort(at, kind="stable")
            at, rows = at[order], rows[order]
        return at, rows

    def _demand(self, width: int) -> routes.Demand:
        """Who needs and who has the keys of the documents of one width."""
        groups = self.ranks // width
        queries, keys = self._holders_of_width(width, "q"), self._holders_of_width(width, "kv")
        needs = routes.needs_of(self.mask, queries.runs, queries.holder.astype(np.int64), groups)
        anchor = np.full(groups, self.mask.kv_tokens, np.int64)
        np.minimum.at(anchor, keys.holder, keys.runs.start)
        return routes.Demand(needs, keys, anchor, groups)

    def _holders_of_width(self, width: int, side: str) -> Holders:
        """The groups that hold the rows of the documents of one width."""
        layout, _ = self._side(side)
        if (self._widths == width).all():
            held = layout.holders()
            return held if width == 1 else Holders(held.runs, held.holder // np.int32(width), held.total)
        piece, rank, document = self._pieces(side)
        kept = self._widths[document] == width
        return Holders(piece.pick(kept), (rank[kept] // width).astype(np.int32), layout.total)

    def traffic(self, rank: int, **shape: Any) -> dict[int, int]:
        """Bytes that a rank sends to each peer in one attention call; arguments as in `bytes`."""
        return traffic(self, rank, HeadShape(**shape))

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
        shape = HeadShape(heads, kv_heads, dim, v_dim, dtype, backward, return_lse, kv_grads)
        return sum(traffic(self, rank, shape).values())

    def describe(self) -> str:
        """The plan as text: what it was given, how evenly it shares rows, area and keys, and the forecast if any.

        Up to 64 ranks have a line each, unless it takes too long to look at all their rows.
        """
        from seqpar.plan.report import describe

        return describe(self)

    def plot(self, path: str | Path, *, call: dict[str, Any] | None = None) -> None:
        """Write a picture: who holds which document, degrees, rows and area by rank, bytes between ranks, the forecast.

        path: its suffix decides the format. call: heads, kv_heads, dim and dtype as in `bytes`; the forecast's by
        default.

        Raises: ImportError without matplotlib, OSError and ValueError for a file that cannot be written.
        """
        from seqpar.plan.plot import plot

        plot(self, path, call=call)

    def __repr__(self) -> str:
        return f"Plan({self.mask!r}, {self.layout!r}, ulysses={self.ulysses}, transport={self.transport!r})"


def _ranked(part: Part, by_group: Mapping[int, Rows]) -> dict[int, Rows]:
    """What goes to a group goes to its rank with the same share of the heads."""
    return {g * part.width + part.share: rows for g, rows in sorted(by_group.items()) if count(rows)}


def _entry_of(part: Part, entry: Entry | None) -> Entry | None:
    """An entry by ranks, of one by groups."""
    return None if entry is None else Entry(_ranked(part, entry.sends), _ranked(part, entry.recvs), entry.place)


def check_positions(tokens: int) -> None:
    """Raise NotImplementedError for tokens that kernels do not number."""
    if tokens >= LIMIT:
        raise NotImplementedError(f"positions of kernels are int32, the mask has {tokens} tokens; split the batch")


def _checked_layouts(mask: Mask, layout: Layout, kv_layout: Layout | None) -> Layout:
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {mask!r:.200}")
    for name, value in (("layout", layout), ("kv_layout", kv_layout)):
        if not isinstance(value, Layout) and (name == "layout" or value is not None):
            raise ValueError(f"{name} must be a Layout, got {value!r:.200}; Layout(shards) makes one of lists")
    if layout.total != mask.tokens:
        raise ValueError(f"the layout holds {layout.total} tokens, the mask {mask.tokens}")
    if kv_layout is None and mask.kv_tokens != mask.tokens:
        raise ValueError(f"{mask.tokens} queries and {mask.kv_tokens} keys need a kv_layout of their own")
    check_positions(max(mask.tokens, mask.kv_tokens))
    # An equal layout of the keys is the same choice as none: plans that are equal must give every rank the same rows.
    keys = layout if kv_layout is None or kv_layout == layout else kv_layout
    if keys.total != mask.kv_tokens:
        raise ValueError(f"kv_layout holds {keys.total} tokens, the mask has {mask.kv_tokens} keys")
    if keys.ranks != layout.ranks:
        raise ValueError(f"kv_layout has {keys.ranks} ranks, the layout {layout.ranks}")
    return keys


def _whole_widths(given: Any) -> tuple[int, ...]:
    """Widths as integers of at least 1; in one go where all are Python's own."""
    values = given.tolist() if isinstance(given, np.ndarray) else given
    if set(map(type, values)) <= {int} and min(values, default=1) >= 1:
        return tuple(values)
    return tuple(whole("the Ulysses width", u, 1) for u in values)


def _checked_rows(layout: Layout, rows: int | Sequence[int] | None) -> ArrayLike:
    tokens = layout.sizes()
    if rows is None:
        return tokens
    given = np.asarray(rows)
    if given.dtype.kind not in "iu" or (isinstance(rows, (list, tuple)) and not all(map(is_integer, rows))):
        raise ValueError(f"rows must be integers, got {rows!r:.200}")
    given = int64_of("rows", given)
    given = np.broadcast_to(given, tokens.shape) if given.ndim == 0 else given
    if given.shape != tokens.shape:
        raise ValueError(f"rows has {given.size} entries for {layout.ranks} ranks")
    if (given < tokens).any():
        rank = int(np.flatnonzero(given < tokens)[0])
        raise ValueError(f"rows gives rank {rank} {given[rank]} rows, it holds {tokens[rank]} tokens")
    if (given >= LIMIT).any():
        rank = int(np.flatnonzero(given >= LIMIT)[0])
        raise ValueError(f"rows gives rank {rank} {given[rank]} rows, kernels number fewer than {LIMIT}")
    return frozen(given.copy())
