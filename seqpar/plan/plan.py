"""The choice of how a batch is computed, as a value that is equal on every rank.

Three files make up a plan: this one has its facts and their checks, `derive` has everything that ranks derive from
them, `report` and `plot` show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, digest_of, frozen, int64_of, integer, is_integer
from seqpar.plan.derive import Derived, Prediction
from seqpar.plan.plot import plot
from seqpar.plan.report import describe
from seqpar.plan.residence import Residence

TRANSPORTS = ("fetch", "ring", "double_ring", "gather")
LIMIT = 1 << 31  # rows and tokens must be fewer


class Plan(Derived):
    """Which rank computes which queries, with which keys, for one batch.

    layout: where query rows are held. kv_layout: where keys are held, if not with the queries; required if their
    numbers differ. ulysses: how many consecutive ranks exchange tokens for heads; it divides the ranks. One number, or
    one per document; in a list, documents on a single rank keep width 1 and move nothing. transport: how keys reach
    other groups. node: consecutive ranks per node. Ulysses groups must then lie inside a node; with "fetch" a key is
    sent to a node once; "double_ring" takes it as its inner ring (by default the largest divisor of the ranks up to
    their square root). stage_bytes: the most that one fetched stage of keys and values may take. rows: rows of each
    rank's query shard (and of its key shard, unless laid out apart), at least its tokens; rows after the tokens are
    pads.

    Raises: ValueError for facts that contradict each other, equally on every rank, since none depends on a rank.
    NotImplementedError for a width per document with bounds that cross documents.
    """

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
        stage_bytes = integer("stage_bytes", stage_bytes, 1)
        node = None if node is None else integer("node", node, 1)
        if node is not None and layout.ranks % node:
            raise ValueError(f"node must divide the {layout.ranks} ranks, got {node}")
        per_document = np.ndim(ulysses) == 1
        width = _whole_widths(ulysses if per_document else [ulysses])
        residence = Residence(mask, layout, keys)
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
            widths=_checked_widths(residence, width, per_document, node),
        )
        self.memo("residence", lambda: residence)  # computed by the checks above

    def _made_digest(self) -> str:
        layouts = (self.mask.digest(), self.layout.digest(), self.kv_layout.digest())
        return digest_of("plan", *layouts, self.widths, self._rows, self.transport, self.node, self.stage_bytes)

    def with_mask(self, mask: Mask) -> Plan:
        """The same layout, transport and widths under another mask, for example a window in some layers; cached."""
        if mask == self.mask:
            return self
        return self.memo(("mask", mask), lambda: self._like(mask, self._rows))

    def padded(self) -> Plan:
        """This plan with a pad row on every rank without tokens, for models that take no empty tensors.

        Raises: NotImplementedError for keys in a layout of their own, which cannot have pads.
        """
        if self._rows.all():
            return self
        if self.kv_layout is not self.layout:
            raise NotImplementedError("keys in a layout of their own have no pad rows; give every rank a query")
        return self.memo("padded", self._padded)

    def _padded(self) -> Plan:
        plan = self._like(self.mask, np.maximum(self._rows, 1))
        return plan if self.forecast is None else plan.with_forecast(self.forecast)

    def _like(self, mask: Mask, rows: Ints) -> Plan:
        apart = None if self.kv_layout is self.layout else self.kv_layout
        return Plan(
            mask, self.layout, kv_layout=apart, ulysses=self.ulysses, transport=self.transport, node=self.node,
            stage_bytes=self.stage_bytes, rows=rows.tolist(),
        )  # fmt: skip

    def with_forecast(self, forecast: Prediction) -> Plan:
        """A copy that carries a prediction of its step, which is not part of the plan's identity."""
        plan: Plan = type(self).__new__(type(self))
        plan._fill(**{**self.__getstate__(), "forecast": forecast})
        plan.memo("residence", lambda: self.residence)
        return plan

    def describe(self) -> str:
        """The plan as text: its facts, how evenly rows, area and keys are shared, and the forecast if there is one.

        Up to 64 ranks have a line each, unless the plan has too many rows for that.
        """
        return describe(self)

    def plot(
        self, path: str | Path, *, call: dict[str, Any] | None = None, panel: str | None = None, dark: bool = False
    ) -> None:
        """Write a picture: ranks of each document, degrees, rows and area by rank, bytes between ranks, forecast.

        For a tree or several bands it also shows which keys a query sees. path: its suffix decides the format. call:
        heads, kv_heads, dim and dtype as in `bytes`; by default the forecast's. panel: draw "documents", "degrees",
        "mask", "load", "time" or "bytes" alone. dark: light text on a dark background.

        Raises: ImportError without matplotlib, OSError for a path that cannot be written, ValueError for a suffix that
        is no picture format, or a panel that this plan does not have.
        """
        plot(self, path, call=call, panel=panel, dark=dark)

    def __repr__(self) -> str:
        return f"Plan({self.mask!r}, {self.layout!r}, ulysses={self.ulysses}, transport={self.transport!r})"


def check_positions(tokens: int) -> None:
    """Raise NotImplementedError for more tokens than kernels can number."""
    if tokens >= LIMIT:
        raise NotImplementedError(f"positions of kernels are int32, the mask has {tokens} tokens; split the batch")


def _checked_layouts(mask: Mask, layout: Layout, kv_layout: Layout | None) -> Layout:
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {mask!r:.200}")
    for name, value in (("layout", layout), ("kv_layout", kv_layout)):
        if not isinstance(value, Layout) and (name == "layout" or value is not None):
            raise ValueError(f"{name} must be a Layout, got {value!r:.200}; Layout(shards) makes one from lists")
    if layout.total != mask.tokens:
        raise ValueError(
            f"the layout holds {layout.total} tokens, the mask {mask.tokens}; give a layout of the mask's tokens"
        )
    if kv_layout is None and mask.kv_tokens != mask.tokens:
        raise ValueError(f"the mask has {mask.tokens} queries and {mask.kv_tokens} keys; give a kv_layout for the keys")
    check_positions(max(mask.tokens, mask.kv_tokens))
    # A kv_layout equal to the layout means the same as None: equal plans must give every rank the same rows.
    keys = layout if kv_layout is None or kv_layout == layout else kv_layout
    if keys.total != mask.kv_tokens:
        raise ValueError(f"kv_layout holds {keys.total} tokens, the mask has {mask.kv_tokens} keys")
    if keys.ranks != layout.ranks:
        raise ValueError(f"kv_layout has {keys.ranks} ranks, the layout {layout.ranks}; give both the same ranks")
    return keys


def _whole_widths(widths: Any) -> tuple[int, ...]:
    """Widths as integers of at least 1; checked in one go if all are Python integers."""
    values = widths.tolist() if isinstance(widths, np.ndarray) else widths
    if set(map(type, values)) <= {int} and min(values, default=1) >= 1:
        return tuple(values)
    return tuple(integer("the Ulysses width", u, 1) for u in values)


def _checked_widths(residence: Residence, width: tuple[int, ...], per_document: bool, node: int | None) -> Ints:
    """The width of each document: the single width for all, or one each, set to 1 for documents on one rank."""
    documents, ranks = len(residence.mask.lengths), residence.layout.ranks
    if per_document and len(width) != documents:
        raise ValueError(
            f"ulysses has {len(width)} widths for {documents} documents; give one width, or one per document"
        )
    for u in set(width):
        if ranks % u:
            raise ValueError(f"the Ulysses width must divide the {ranks} ranks, got {u}")
        if node is not None and node % u:
            raise ValueError(f"the Ulysses width must divide node={node}, got {u}")
    if not per_document or set(width) == {1}:
        return frozen(np.full(documents, width[0], np.int64))
    if not residence.mask.within_documents:
        raise NotImplementedError("a Ulysses width per document needs bounds inside documents; give one width")
    return frozen(np.where(residence.alone, 1, np.asarray(width, np.int64)))


def _checked_rows(layout: Layout, rows: int | Sequence[int] | None) -> ArrayLike:
    tokens = layout.sizes()
    if rows is None:
        return tokens
    counts = np.asarray(rows)
    if counts.dtype.kind not in "iu" or (isinstance(rows, (list, tuple)) and not all(map(is_integer, rows))):
        raise ValueError(f"rows must be integers, got {rows!r:.200}")
    counts = int64_of("rows", counts)
    counts = np.broadcast_to(counts, tokens.shape) if counts.ndim == 0 else counts
    if counts.shape != tokens.shape:
        raise ValueError(f"rows has {counts.size} entries for {layout.ranks} ranks; give one number, or one per rank")
    if (counts < tokens).any():
        rank = int(np.flatnonzero(counts < tokens)[0])
        raise ValueError(f"rows gives rank {rank} {counts[rank]} rows, it holds {tokens[rank]} tokens")
    if (counts >= LIMIT).any():
        rank = int(np.flatnonzero(counts >= LIMIT)[0])
        raise ValueError(f"rows gives rank {rank} {counts[rank]} rows, kernels number fewer than {LIMIT}")
    return frozen(counts.copy())
