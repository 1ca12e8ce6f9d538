"""Many strided copies at once: a rank packs for its peers, unpacks, or moves tensors straight to their destination.

One launch for all pairs if ``seqpar._C`` was built for their device, else one of torch's per pair. Bits are kept:
dtypes are equal, and a lazily conjugated or negated source is resolved when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar import native


class Pair(NamedTuple):
    """``dst[dst_rows] = src[src_rows]``, of equal dtypes and, with the rows chosen, equal shapes; any strides.

    dst_rows, src_rows: int64 or int32 numbers [n] of rows on the device, None for all rows in order. Numbers must be in
    range, and those of dst_rows distinct: neither is checked.
    """

    dst: Tensor
    src: Tensor
    dst_rows: Tensor | None = None
    src_rows: Tensor | None = None


def copy(pairs: Sequence[Pair]) -> None:
    """Make all copies. No destination may overlap another or a source, which is not checked.

    Raises: RuntimeError naming the pair whose shapes, dtypes or devices differ, before anything is written.
    """
    pairs = [pair for pair in pairs if pair.dst.numel() and (pair.dst_rows is None or pair.dst_rows.numel())]
    if not pairs:
        return
    if _compiled(pairs):
        native.ops().copy_(*map(list, zip(*pairs, strict=True)))
        return
    for n, pair in enumerate(pairs):
        takes, gives = _selected(pair.dst, pair.dst_rows), _selected(pair.src, pair.src_rows)
        if takes != gives:
            raise RuntimeError(f"copy_: pair {n}: dst takes {takes}, src gives {gives}")
    for pair in pairs:
        _copy(pair)


def _compiled(pairs: Sequence[Pair]) -> bool:
    """Whether one launch can make all copies."""
    missing = {"cpu": native.missing, "cuda": native.without_cuda}.get(pairs[0].dst.device.type)
    if missing is None or missing() is not None or any(pair.src.device != pair.dst.device for pair in pairs):
        return False
    return all(pair.dst.dim() <= native.DIMS for pair in pairs) and _known_to_fake_tensors()


@cache
def _known_to_fake_tensors() -> bool:
    """Always true: registers, once, that the operator returns no tensor."""
    torch.library.register_fake("seqpar_native::copy_", lambda dst, src, dst_rows, src_rows: None)
    return True


def _selected(x: Tensor, rows: Tensor | None) -> tuple[list[int], torch.dtype, torch.device]:
    """Shape with the rows selected, dtype and device."""
    shape = list(x.shape) if rows is None else [*rows.shape, *x.shape[1:]]
    return shape, x.dtype, x.device


def _copy(pair: Pair) -> None:
    values = pair.src if pair.src_rows is None else pair.src.index_select(0, pair.src_rows)
    if pair.dst_rows is None:
        pair.dst.copy_(values)
    else:
        pair.dst[pair.dst_rows] = values
