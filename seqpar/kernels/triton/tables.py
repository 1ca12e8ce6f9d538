"""The tile tables of a step as the kernels read them, uploaded once for each tile size.

A device starts programs about in the order of the table. Tiles with most work come first, and short ones fill the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.kernels.memory.upload import upload
from seqpar.kernels.protocol import StepFacts
from seqpar.kernels.triton.config import LaunchConfig


def query_table(facts: StepFacts, config: LaunchConfig) -> Tensor:
    """The table [query tiles, 8] of forward and dq; tiles with most work come first."""

    def make() -> Tensor:
        t = facts.tiles(config.bm, config.bn)
        # A last key tile with fewer than bn rows is loaded with a mask, so it does not count as full.
        full_end = np.minimum(t.full_end, facts.key_pos.shape[0] // config.bn)
        columns = [t.rows[:-1], t.rows[1:], t.begin, np.minimum(t.full_begin, full_end), full_end, t.end]
        return _padded(columns, t.order, 8, facts.pos.device)

    return facts.memo(("query tiles", config.bm, config.bn), make)


def key_table(facts: StepFacts, config: LaunchConfig) -> tuple[Tensor, Tensor, bool, bool, int]:
    """The arguments of dkdv: table, query_tiles, UNIFORM, EXACT, and the most query tiles that visit one key tile."""

    def make() -> tuple[Tensor, Tensor, bool, bool, int]:
        t = facts.tiles(config.bm, config.bn)
        full_end = np.minimum(t.q_full_end, facts.pos.shape[0] // config.bm) if t.uniform else t.q_full_end
        columns = [np.arange(len(t.q_begin)), t.q_begin, np.minimum(t.q_full_begin, full_end), full_end, t.q_end]
        device = facts.pos.device
        table = _padded(columns, t.q_order, 8, device)
        tiles = _padded([t.rows[:-1], t.rows[1:], t.begin, t.end], slice(None), 4, device)
        return table, tiles, t.uniform, t.q_exact, int((t.q_end - t.q_begin).max(initial=0))

    return facts.memo(("key tiles", config.bm, config.bn), make)


def _padded(columns: list[Any], order: Any, width: int, device: torch.device) -> Tensor:
    rows = np.zeros((len(columns[0]), width), np.int64)
    for n, column in enumerate(columns):
        rows[:, n] = column[order]
    (table,) = upload([rows], device)
    return table
