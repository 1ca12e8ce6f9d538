"""Which keys a query sees: an interval of keys per query, or several, stored as spans on which both ends are linear.

Queries and keys of a packed batch are numbered globally, document after document. Query ``i`` sees key ``j`` iff
``lo[i] <= j < hi[i]``. Causal, windowed, packed and cross-length masks all have bounds that are constant or rise by
one from row to row, so a mask costs O(documents) memory however long the documents are. Documents of 5 and 3 tokens,
causal, with at most 2 keys to the left::

    query   keys 0 1 2 3 4 5 6 7      lo  hi
      0          #                     0   1     a span: lo stays, hi rises
      1          # #                   0   2
      2          # # #                 0   3     a span: both rise
      3            # # #               1   4
      4              # # #             2   5
      5                    #           5   6     the next document
      6                    # #         5   7
      7                    # # #       5   8

Trees end keys before the last query (`seqpar.facts.bands`); a union has several bands (`seqpar.facts.unions`).

Sources: the window and the end alignment of unequal lengths are FlashAttention's (Dao 2023, FlashAttention-2); sink
tokens are StreamingLLM's (Xiao et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.bands import Band, Until, area_of, filled
from seqpar.facts.bounds import band_of_bounds, batch_lengths, checked_window, windowed
from seqpar.facts.documents import band_of_documents, document_spans, stays_inside
from seqpar.facts.intervals import distinct, edges
from seqpar.facts.picture import MaskPicture, plot
from seqpar.facts.slices import block_strips, slice_strips
from seqpar.facts.trees import Paths, nodes_of_groups, paths_of, reach_along_paths, runs_of_nodes
from seqpar.facts.unions import Strips, bands_of, sink_strips, united
from seqpar.facts.value import MOST, Fact, Ints, digest_of, frozen, integer, is_integer, lengths_of, positions_of


class Mask(Fact):
    """Packed documents; each attends to itself.

    lengths: tokens of each document; one of 0 holds no row, and documents are numbered without it, here as everywhere.
    causal: query ``i`` of a document sees its keys up to its own. window: (left, right), the keys seen on each side of
    the query's own; None for no limit; ``right`` must be None or 0 if causal. sink_tokens: the first keys of each
    document, which all its queries see in addition to the window, up to their own key if causal. kv_lengths: keys of
    each document, where they differ from its queries in number. The last query is then aligned with the last key, as in
    FlashAttention: with 2 queries on 5 keys, causal query 0 sees keys 0 to 3. If causal, queries before the first key
    see nothing. Documents of queries or keys alone are numbered.

    Raises: ValueError for lengths without a token, negative ones or those of cu_seqlens, lists of unequal length, a
    negative window, or a window to the right of a causal mask.
    """

    lengths: Ints
    kv_lengths: Ints
    offsets: Ints
    kv_offsets: Ints
    within_documents: bool
    bands: tuple[Band, ...]
    _name: str
    _paths: Paths | None

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] = (None, None),
        sink_tokens: int = 0,
        kv_lengths: ArrayLike | None = None,
    ) -> None:
        if not isinstance(causal, (bool, np.bool_)):
            raise ValueError(f"causal must be True or False, got {causal!r:.200}")
        queries = lengths_of("lengths", lengths, empty=kv_lengths is not None)
        keys = queries if kv_lengths is None else lengths_of("kv_lengths", kv_lengths, empty=True)
        if len(queries) != len(keys):
            raise ValueError(
                f"lengths has {len(queries)} documents and kv_lengths {len(keys)}; pass one length per document in both"
            )
        if not (held := (queries > 0) | (keys > 0)).all():
            queries, keys = frozen(queries[held]), frozen(keys[held])
        if keys is not queries and np.array_equal(queries, keys):
            keys = queries  # kv_lengths equal to lengths make the same mask as None
        left, right = checked_window(window, causal)
        sinks = integer("sink_tokens", sink_tokens, 0, MOST)
        spans = document_spans(queries, keys, left, right)
        bands: tuple[Band, ...] = (Band(spans),)
        name = ("causal" if causal else "full") + (f", window={window}" if window != (None, None) else "")
        if sinks and window != (None, None):
            offsets, kv_offsets = edges(queries), edges(keys)
            strips = [Strips.of(spans, int(offsets[-1])), sink_strips(queries, keys, sinks, causal)]
            bands = bands_of(Strips.together(strips), offsets, kv_offsets)
            name += f", sink_tokens={sinks}"
        self._set(queries, keys, bands, within=True, name=name)

    @classmethod
    def from_bounds(
        cls,
        lo: ArrayLike,
        hi: ArrayLike,
        *,
        until: ArrayLike | None = None,
        kv_tokens: int | None = None,
        lengths: ArrayLike | None = None,
    ) -> Mask:
        """Any mask of one band: query ``i`` sees key ``j`` iff ``lo[i] <= j < hi[i]`` and ``i < until[j]``.

        lo, hi: integers [tokens], ``0 <= lo <= hi <= kv_tokens``. until: integers [kv_tokens] from 0 to kv_tokens, in
        key coordinates; by default no key ends before the last query. kv_tokens: number of keys, by default that of
        queries. lengths: documents, used by layouts per document and for positions inside documents; only with as many
        keys as queries; by default the batch is one document. Where documents are trees, causal from their first key on
        and with ranges ``[j, until[j])`` that nest, the mask is that of `tree`, and positions are depths.

        Raises: ValueError for bounds out of range, naming the first such query.
        """
        documents, kv_lengths, band = band_of_bounds(lo, hi, until, kv_tokens, lengths)
        return cls.__new__(cls)._set(documents, kv_lengths, (band,), within=False, name="bounds")

    @classmethod
    def from_slices(
        cls,
        q_ranges: ArrayLike,
        k_ranges: ArrayLike,
        kinds: Sequence[str],
        *,
        tokens: int | None = None,
        kv_tokens: int | None = None,
        lengths: ArrayLike | None = None,
    ) -> Mask:
        """The union of slices, each of a range of queries and a range of keys; a pair in several slices counts once.

        q_ranges, k_ranges: integers [slices, 2], ``[start, end)``. kinds: of each slice, with MagiAttention's meaning:
        "full" (all pairs), "causal" (up to a diagonal that ends bottom right), "inv_causal" (from a diagonal on that
        begins top left), "bi_causal" (between these two). tokens: number of queries, by default up to the end of the
        last range. kv_tokens: number of keys, by default that of queries. lengths: documents, as in `from_bounds`.

        Raises: ValueError for ranges outside the batch and for unknown kinds. NotImplementedError if some query sees
        more than 32 intervals of keys.
        """
        return cls._of_strips(*slice_strips(q_ranges, k_ranges, kinds, tokens, kv_tokens), lengths, "slices")

    @classmethod
    def blocks(
        cls,
        table: ArrayLike,
        block: int | tuple[int, int],
        *,
        tokens: int | None = None,
        kv_tokens: int | None = None,
        lengths: ArrayLike | None = None,
    ) -> Mask:
        """Blocks of queries that see blocks of keys in full.

        table: booleans [query blocks, key blocks]. block: tokens of a block, or (queries, keys). tokens, kv_tokens: the
        numbers of queries and keys, by default those of whole blocks; the last block may have fewer. lengths:
        documents, as in `from_bounds`.

        Raises: ValueError for a table of other dims or dtype, or without a block for each query and key.
        NotImplementedError if some query sees more than 32 intervals of keys.
        """
        return cls._of_strips(*block_strips(table, block, tokens, kv_tokens), lengths, "blocks")

    @classmethod
    def _of_strips(cls, strips: Strips, tokens: int, keys: int, lengths: ArrayLike | None, name: str) -> Mask:
        documents, kv_lengths = batch_lengths(tokens, keys, lengths)
        bands = bands_of(strips, edges(documents), edges(kv_lengths))
        return cls.__new__(cls)._set(documents, kv_lengths, bands, within=False, name=name)

    def __or__(self, other: Mask) -> Mask:
        """The pairs of either mask, each once; one of the two masks itself if it has all pairs of the other.

        Of two masks with the same pairs and different bounds it is the one with the smaller digest: ``a | b == b | a``.

        Positions are those of the tree, if a part is one.

        Raises: ValueError for masks of other documents. NotImplementedError for trees of other paths, for parts that
        share keys which end at other queries in each, and if some query sees more than 32 intervals of keys.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        if not all(map(np.array_equal, (self.lengths, self.kv_lengths), (other.lengths, other.kv_lengths))):
            raise ValueError(
                f"a union needs masks of the same lengths and kv_lengths, got {self._sizes()} | {other._sizes()}; make "
                "both for the same batch"
            )
        if self.paths and other.paths and not self.same_paths(other):
            raise NotImplementedError(f"{self!r} | {other!r} has two paths to a token; give both parts the same tree")
        paths = self.paths or other.paths
        mask = type(self).__new__(type(self))._set(
            self.lengths, self.kv_lengths, united([*self.bands, *other.bands], self.offsets, self.kv_offsets),
            within=self.within_documents and other.within_documents, name="union",
            paths=paths and paths._replace(left=None, alone=False),
        )  # fmt: skip
        area = mask.area()
        parts = [x for x in (self, other) if x.area() == area and (x.paths is None) == (paths is None)]
        return min(parts, key=Mask.digest, default=mask)

    def _sizes(self) -> str:
        kv_lengths = "" if self.kv_lengths is self.lengths else f", kv_lengths={self.kv_lengths.tolist()!r:.100}"
        return f"lengths={self.lengths.tolist()!r:.100}{kv_lengths}"

    @classmethod
    def tree(
        cls, lengths: ArrayLike, parents: ArrayLike, *, window: tuple[int | None, int | None] = (None, None)
    ) -> Mask:
        """Trees of tokens: a query sees the tokens of its node up to its own, and those of all nodes above it.

        lengths: tokens of each node, in depth-first order; 0 is allowed. parents: the node above each, -1 for a root. A
        root with all nodes below it is a document, if one of them has a token. Positions are depths along the path, see
        `depths`. window: (left, right) as of `Mask`, counted along the path. A chain of nodes is the causal mask of its
        documents.

        Raises: ValueError for nodes in another order, printing a valid one, for parents that do not lead to a root, and
        for nodes without a token. NotImplementedError for a window to the right.
        """
        reach = reach_along_paths(checked_window(window, False))
        documents, until = runs_of_nodes(lengths, parents)
        return cls._of_tree(documents, until, reach)

    @classmethod
    def shared_prefix(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> Mask:
        """Answers that share a prompt: a tree for each group, (prompt length, [answers' lengths]).

        The prompt is followed by its answers. An answer sees the prompt and itself; its positions continue those.
        """
        return cls.tree(*nodes_of_groups(groups))

    @classmethod
    def _of_tree(cls, documents: Ints, until: Until, left: int | None) -> Mask:
        """until: the end of the subtree of each token."""
        tokens = int(documents.sum())
        band = Band(document_spans(documents, documents, None, 0), until).canonical(tokens, tokens)
        if band.until is None:
            return cls(documents, window=(left, None))
        mask = cls.__new__(cls)._set(documents, documents, (band,), within=True, name="tree")
        return mask.windowed((left, None))

    def _set(
        self, queries: Ints, keys: Ints, bands: tuple[Band, ...], *, within: bool, name: str, paths: Paths | None = None
    ) -> Mask:
        """This mask, which is new, with its fields.

        within: True if queries are known to see only keys of their own documents. paths: where bands hide them.
        """
        offsets, kv_offsets = edges(queries), edges(keys)
        self._fill(
            lengths=queries, kv_lengths=keys, offsets=offsets, kv_offsets=kv_offsets,
            within_documents=within or all(stays_inside(band, offsets, kv_offsets) for band in bands),
            bands=tuple(band.frozen() for band in bands), _name=name,
            _paths=None if paths is None else paths.frozen(),
        )  # fmt: skip
        return self

    def _made_digest(self) -> str:
        spans = [x for band in self.bands for x in band.spans.canonical(self.tokens)]
        ends = [] if self.plain else ["bands", *(x for band in self.bands for x in band.until or ("open",))]
        paths = [] if self._paths is None else ["paths", *self._paths]
        return digest_of("mask", self.lengths, self.kv_lengths, *spans, *ends, *paths)

    @property
    def tokens(self) -> int:
        """Number of queries."""
        return int(self.offsets[-1])

    @property
    def kv_tokens(self) -> int:
        """Number of keys."""
        return int(self.kv_offsets[-1])

    @property
    def plain(self) -> bool:
        """Whether each query sees one interval of keys: one band, in which no key ends before the last query."""
        return len(self.bands) == 1 and self.bands[0].until is None

    @property
    def has_until(self) -> bool:
        """Whether some keys end before the last query, in any band."""
        return any(band.until is not None for band in self.bands)

    @property
    def paths(self) -> Paths | None:
        """The paths of tokens, if the mask is a tree that branches; cached."""
        if self._paths is not None or len(self.bands) > 1 or self.kv_lengths is not self.lengths:
            return self._paths
        return self.memo("paths", lambda: paths_of(self.bands[0], self.offsets))

    def same_paths(self, other: Mask) -> bool:
        """Whether the tokens before each token on its path are those of another mask, whatever a window hides."""
        paths, others = self.paths, other.paths
        if paths is None or others is None:
            return paths is others and np.array_equal(self.lengths, other.lengths)
        return all(np.array_equal(a, b) for a, b in ((paths.start, others.start), (paths.end, others.end)))

    @property
    def spans_are_documents(self) -> bool:
        """Whether each document is one span of one interval per query, as in causal and full masks."""
        starts = self.offsets[:-1]
        return self.plain and self.memo(
            "spans are documents", lambda: np.array_equal(self.bands[0].spans.start, starts)
        )

    @property
    def breaks(self) -> Ints:
        """The starts of documents and of all bands' spans, ascending: no bound bends between two of them; cached."""
        starts = [self.offsets[:-1], *(band.spans.start for band in self.bands)]
        return self.memo("breaks", lambda: frozen(distinct(np.concatenate(starts))))

    def bounds(self, positions: ArrayLike, *, band: int = 0) -> tuple[Ints, Ints]:
        """``lo, hi`` int64 of the queries at these global positions; a pad row, position -1, gets an empty interval.

        Raises: ValueError for a position outside the batch, or a band that the mask does not have.
        """
        return self._band(band).bounds(positions_of(positions, self.tokens))

    def until(self, *, band: int = 0) -> Ints:
        """The end, int64 [kv_tokens], of the queries that may see each key, in key coordinates.

        Raises: ValueError for a band that the mask does not have.
        """
        until = self._band(band).until
        keys = np.arange(self.kv_tokens)
        return np.full_like(keys, self.kv_tokens) if until is None else until.of(keys)

    def _band(self, band: int) -> Band:
        if not is_integer(band) or not 0 <= band < len(self.bands):
            raise ValueError(f"band must be from 0 to {len(self.bands) - 1}, as the mask has bands, got {band!r:.200}")
        return self.bands[band]

    def documents(self, positions: ArrayLike) -> Ints:
        """The document of each query position; -1 for a pad row."""
        return np.searchsorted(self.offsets, positions_of(positions, self.tokens), side="right") - 1

    def depths(self, positions: ArrayLike) -> Ints:
        """How many tokens come before each query: in its document, or on its path in a tree; -1 for a pad row."""
        at = positions_of(positions, self.tokens)
        if self.paths is not None:
            return self.paths.depths(at)
        return np.where(at < 0, -1, at - self.offsets[np.maximum(self.documents(at), 0)])

    def key_positions(self, positions: ArrayLike) -> Ints:
        """Query positions in key coordinates (documents aligned at their ends), for ALiBi and dropout; -1 for pads."""
        at = positions_of(positions, self.tokens)
        if self.kv_lengths is self.lengths:
            return at
        shift = self.kv_offsets[1:] - self.offsets[1:]
        return np.where(at < 0, -1, at + shift[np.maximum(self.documents(at), 0)])

    def pick(self, documents: ArrayLike) -> Mask:
        """The mask of the given documents, integers [documents], packed in the given order.

        Raises: ValueError for documents that the mask does not have, and for bounds that cross documents.
        """
        chosen = np.asarray(documents)
        count = len(self.lengths)
        if chosen.ndim != 1 or chosen.size == 0 or chosen.dtype.kind not in "iu":
            raise ValueError(f"documents must be a non-empty sequence of integers, got {documents!r:.200}")
        if chosen.min() < 0 or chosen.max() >= count:
            raise ValueError(
                f"documents run from {chosen.min()} to {chosen.max()}, the mask has {count}; give 0 to {count - 1}"
            )
        if not self.within_documents:
            raise ValueError(
                f"some queries of {self!r} see keys of other documents, so that none can be taken out of the batch; "
                "keep the batch whole, or give bounds inside documents"
            )
        queries = frozen(self.lengths[chosen])
        if self.paths is not None and self.paths.alone:
            paths = self.paths.pick(chosen, self.offsets)
            return self._of_tree(queries, Until(paths.start, paths.end), paths.left)
        keys = queries if self.kv_lengths is self.lengths else frozen(self.kv_lengths[chosen])
        bands = tuple(band_of_documents(band, chosen, self.offsets, self.kv_offsets) for band in self.bands)
        among = None if self._paths is None else self._paths.pick(chosen, self.offsets)
        if among is not None and among.start.size == chosen.size:
            among = None  # no document branches
        made = type(self).__new__(type(self))
        return made._set(queries, keys, filled(bands), within=True, name=self._name, paths=among)

    def windowed(self, window: tuple[int | None, int | None]) -> Mask:
        """This mask, limited to keys within a window of the query, (left, right), None for no limit; cached.

        Distances are between key positions, see `key_positions`; in a tree they are along the path.

        Raises: NotImplementedError for a window to the right in a tree, and for other masks whose keys end early.
        """
        checked = checked_window(window, False)
        paths = self.paths
        if paths is not None and paths.alone:
            left = reach_along_paths(checked)
            if left is None or paths.within(left):
                return self
            return self.memo(("window", checked), lambda: self._windowed_tree(paths, left))
        if self.has_until or paths is not None:
            raise NotImplementedError(
                f"{self!r} takes no window: its keys end early and it is not a tree; put the window into its bounds"
            )
        return self.memo(("window", checked), lambda: self._windowed(*checked))

    def _windowed_tree(self, paths: Paths, left: int) -> Mask:
        tokens = self.tokens
        band = Band(paths.spans(left, self.offsets), Until(paths.start, paths.end)).canonical(tokens, tokens)
        return type(self).__new__(type(self))._set(
            self.lengths, self.kv_lengths, (band,), within=True, name=f"tree, window={(left, None)}",
            paths=paths._replace(left=left),
        )  # fmt: skip

    def _windowed(self, left: int | None, right: int | None) -> Mask:
        bands = tuple(windowed(band, left, right, self.offsets, self.key_positions) for band in self.bands)
        if len(bands) > 1:
            bands = united(bands, self.offsets, self.kv_offsets)
        made, name = type(self).__new__(type(self)), f"{self._name}, window={(left, right)}"
        return made._set(self.lengths, self.kv_lengths, bands, within=self.within_documents, name=name)

    def area(self) -> int:
        """Number of attended pairs of a query and a key."""
        return sum(self._areas())

    def _areas(self) -> list[int]:
        return [area_of(band, self.kv_tokens, self.tokens, self.key_positions) for band in self.bands]

    def plot(self, path: str | Path) -> None:
        """Write a picture: keys that queries see, by band, and for trees the nodes on the path of each query.

        path: its suffix decides the format. Of more than 2,048 queries or keys, 2,048 of each are sampled.

        Raises: ImportError without matplotlib, OSError and ValueError for a file that cannot be written.
        """
        plot(self.shown(), path)

    def shown(self) -> MaskPicture:
        """What pictures show of the mask, here and next to a plan."""
        return MaskPicture(repr(self), self.bands, self._areas(), self.offsets, self.kv_offsets, self.paths)

    def __repr__(self) -> str:
        keys = "" if self.kv_tokens == self.tokens else f" on {self.kv_tokens} keys"
        nodes = "" if self.paths is None else f", {self.paths.start.size} nodes"
        bands = "" if len(self.bands) == 1 else f", {len(self.bands)} bands"
        return f"Mask({self._name}, {len(self.lengths)} documents{nodes}{bands}, {self.tokens} tokens{keys})"
