"""The variants of the attention kernels that calls of one model need: which one it is follows from the plan.

Each is a mapping of those arguments, by name, in which it differs from a launch at hand. Of tensors only dtypes and
strides are asked when a kernel is compiled, so that empty ones stand for those that the launch does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.protocol import Grads, Operands
from seqpar.kernels.triton.arguments import LaunchShape, PerRow, TileLoads, Topped


def forward_variants(dtype: torch.dtype, target: Tensor, top: Tensor | None) -> Iterator[dict[str, Any]]:
    """First, later, last and only steps.

    dtype: of the inputs; sums of 16-bit inputs are in float32. top: of the launch.
    """
    for first, in_place in product((True, False), (True, False) if dtype != torch.float32 else (True,)):
        to = torch.float32 if in_place else dtype
        before = to if first else torch.float32
        prior, written = (PerRow(target.new_empty(0, dtype=kind), *target.stride()[:2]) for kind in (before, to))
        also = written if top is None else Topped(*written, top, top.stride(0))
        yield {"FIRST": first, "IN_PLACE": in_place, "prior": prior, "target": also}


def dkdv_variants(x: Operands, grads: Grads, shape: LaunchShape, rows: int, *, able: bool) -> Iterator[dict[str, Any]]:
    """Even and uneven query tiles, with and without gaps.

    rows: of a query tile. able: the hardware can load tiles of q and dout.
    """
    for uniform, exact in product((True, False), repeat=2):
        tma = able and uniform
        q1, q2 = TileLoads(x.q, rows, tma).of(x.q)
        g1, g2 = TileLoads(grads.dout, rows, tma).of(grads.dout)
        yield {
            "UNIFORM": uniform, "EXACT": exact, "S": shape._replace(TMA=tma), "q1": q1, "q2": q2, "g1": g1, "g2": g2,
        }  # fmt: skip
