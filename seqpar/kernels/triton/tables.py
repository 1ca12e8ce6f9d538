"""The tile tables of a step as the kernels read them, uploaded once for each tile size.

A device starts programs about in the order of the table. Tiles with most work come first, and short ones fill the end;
`seqpar.kernels.triton.shares` has the order of key tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from seqpar.facts.stretches import Stretches
from seqpar.facts.value import Ints
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.protocol import StepFacts
from seqpar.kernels.triton.config import LaunchConfig
from seqpar.kernels.triton.shares import shares


def query_table(facts: StepFacts, config: LaunchConfig) -> tuple[Tensor, int]:
    """The table of forward and dq, and its number of query tiles.

    A row for each query tile, 8 wide: first row, row past the last, begin, full_begin, full_end, end. Where keys end
    early, a tile's visits are counted from 0, full ones first, and stand for begin to end; a seventh column says where
    its stretches begin, in elements of the table. They come after the tiles: the visit at which each stops, and what to
    add to a visit to get its key tile.
    """

    def make() -> tuple[Tensor, int]:
        t = facts.tiles(config.bm, config.bn)
        # A last key tile with fewer than bn rows is loaded with a mask, so it does not count as full.
        whole = facts.key_pos.shape[0] // config.bn
        if t.stretches is None:
            full_end, walks = np.minimum(t.full_end, whole), np.zeros((0, 8), np.int64)
            visits = [t.begin, np.minimum(t.full_begin, full_end), full_end, t.end]
        else:
            visits, walks = _walks(t.stretches, whole)
        tiles = _columns([t.rows[:-1], t.rows[1:], *visits], t.order, 8)
        (table,) = upload([np.concatenate([tiles, walks])], facts.pos.device)
        return table, len(tiles)

    return facts.memo(("query tiles", config.bm, config.bn), make)


def _walks(s: Stretches, whole: int) -> tuple[list[Ints], Ints]:
    """The columns of a query table from begin on, and the rows after its tiles. whole: key tiles that lack no row."""
    tiles = len(s.edge) - 1
    tile = np.repeat(np.arange(tiles), np.diff(s.edge))
    cut = s.full & (s.end > whole)
    begin, end = np.append(s.begin, np.full(cut.sum(), whole)), np.append(np.where(cut, whole, s.end), s.end[cut])
    tile, full = np.append(tile, tile[cut]), np.append(s.full, np.zeros(cut.sum(), bool))
    order = np.lexsort((~full, tile))
    order = order[(begin < end)[order]]
    begin, end, tile, full = (x[order] for x in (begin, end, tile, full))
    edge = np.searchsorted(tile, np.arange(tiles + 1))
    before, full_before = (np.append(0, np.cumsum(x)) for x in (end - begin, np.where(full, end - begin, 0)))
    stop = before[1:] - before[edge[tile]]
    walks = np.stack([stop, end - stop], 1).ravel()
    zero = np.zeros(tiles, np.int64)
    columns = [zero, zero, np.diff(full_before[edge]), np.diff(before[edge]), 8 * tiles + 2 * edge[:-1]]
    return columns, np.append(walks, np.zeros(8 - len(walks) % 8, np.int64)).reshape(-1, 8)  # one more is loaded


def key_table(
    facts: StepFacts, config: LaunchConfig, kv_heads: int, group: int, processors: int
) -> tuple[Tensor, Tensor, bool, bool, bool, int, int]:
    """The arguments of dkdv: table, query_tiles, UNIFORM, EXACT, by_tile, rows of the table, parts of cut tiles.

    The table, 8 wide: for each row key tile, q_begin, q_full_begin, q_full_end, q_end, which part of so many, and its
    place among the parts of all cut tiles. A row for each cut tile follows: key tile, place of its first part, parts.
    """

    def make() -> tuple[Tensor, Tensor, bool, bool, bool, int, int]:
        t = facts.tiles(config.bm, config.bn)
        parts, tile, part, by_tile = shares(t, kv_heads, group, processors, max(1, 8 // config.warps))
        full_end = np.minimum(t.q_full_end, facts.pos.shape[0] // config.bm) if t.uniform else t.q_full_end
        visits = [np.arange(len(t.q_begin)), t.q_begin, np.minimum(t.q_full_begin, full_end), full_end, t.q_end]
        cut = np.flatnonzero(parts > 1)
        place = np.cumsum(np.where(parts > 1, parts, 0)) - parts
        rows = _columns([*(x[tile] for x in visits), part, parts[tile], place[tile] + part], slice(None), 8)
        cuts = _columns([cut, place[cut], parts[cut]], slice(None), 8)
        of_queries = _columns([t.rows[:-1], t.rows[1:], t.begin, t.end], slice(None), 4)
        table, query_tiles = upload([np.concatenate([rows, cuts]), of_queries], facts.pos.device)
        return table, query_tiles, t.uniform, t.q_exact, by_tile, len(rows), int(parts[cut].sum())

    return facts.memo(("key tiles", config.bm, config.bn, kv_heads, group, processors), make)


def _columns(columns: list[Ints], order: Any, width: int) -> Ints:
    """Columns as the first ones of rows of a width, in an order."""
    rows = np.zeros((len(columns[0]), width), np.int64)
    for n, column in enumerate(columns):
        rows[:, n] = column[order]
    return rows
