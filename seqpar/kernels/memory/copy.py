"""Many strided copies at once, with which ranks pack and unpack messages; casts and sums of messages that arrived.

All copies are one launch if ``seqpar._C`` was built for their device. Otherwise rows by number are Triton's on a CUDA
device, and all else is torch's: one call for pairs that lie at equal distances, such as the heads of one tensor for all
peers, which a permutation of dims describes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar import native
from seqpar.kernels.dispatch import on_triton
from seqpar.private import torch as torch_private

_TRITON_DTYPES = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
# dtypes to which torch writes no rows by number on the CPU, and those of the same bits
_INDEXED_AS = {
    torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.float8_e8m0fnu: torch.uint8, torch.float4_e2m1fn_x2: torch.uint8,
}  # fmt: skip
_registering = threading.Lock()  # torch refuses what two ranks' threads register at a time
_registered = False


class Pair(NamedTuple):
    """Source and destination of rows: ``dst[dst_rows]`` and ``src[src_rows]``, of equal shapes; any strides.

    dst_rows, src_rows: int64 or int32 numbers [n] of rows on the device, None for all rows in order. Numbers must be in
    range, and those of dst_rows distinct: neither is checked.
    """

    dst: Tensor
    src: Tensor
    dst_rows: Tensor | None = None
    src_rows: Tensor | None = None


def copy(pairs: Sequence[Pair]) -> None:
    """``dst[dst_rows] = src[src_rows]`` for all pairs, of equal dtypes.

    Bits are kept, and a lazily conjugated or negated source is resolved when it is read. No destination may overlap
    another or a source, which is not checked.

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
    numbered = [pair for pair in pairs if _on_triton(pair)]
    if numbered:
        from seqpar.kernels.triton import rows

        rows.write(numbered)
        pairs = [pair for pair in pairs if not _on_triton(pair)]
    for pair in _joined(pairs):
        cast(pair)


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """The same copies in fewer pairs: those of equal shapes at equal distances are one pair with a dim more."""
    alike: dict[object, list[Pair]] = {}
    rest: list[Pair] = []
    for pair in pairs:
        dst, src, dst_rows, src_rows = pair
        if dst_rows is not None or src_rows is not None or src.is_conj() or src.is_neg():
            rest.append(pair)
            continue
        memory = torch_private.cdata(dst.untyped_storage()), torch_private.cdata(src.untyped_storage())
        alike.setdefault((memory, dst.dtype, dst.shape, dst.stride(), src.stride()), []).append(pair)
    for several in alike.values():
        several.sort(key=lambda pair: pair.src.storage_offset())
        while several:
            count, steps = _evenly(several)
            rest.append(_as_one(several[0], count, steps) if count > 1 else several[0])
            del several[:count]
    return rest


def _evenly(pairs: Sequence[Pair]) -> tuple[int, tuple[int, int]]:
    """How many of the first pairs lie at equal distances, and the distances of their sides in elements."""
    places = [(int(pair.dst.storage_offset()), int(pair.src.storage_offset())) for pair in pairs]
    between = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
    if not between or between[0][0] <= 0:  # torch has no negative strides
        return 1, (0, 0)
    return 1 + len(list(takewhile(lambda step: step == between[0], between))), between[0]


def _as_one(first: Pair, count: int, steps: tuple[int, int]) -> Pair:
    dst, src = (
        x.as_strided((count, *x.shape), (step, *x.stride()), x.storage_offset())
        for x, step in zip((first.dst, first.src), steps, strict=True)
    )
    return Pair(dst, src)


def picked(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Some rows of a tensor along a dim, of any dtype."""
    bits = _INDEXED_AS.get(x.dtype)
    return x.index_select(dim, index) if bits is None else x.view(bits).index_select(dim, index).view(x.dtype)


def cast(pair: Pair) -> None:
    """``dst[dst_rows] = src[src_rows]``, in the dtype of dst."""
    if _on_triton(pair):
        from seqpar.kernels.triton import rows

        rows.write([pair])
    elif pair.dst_rows is None:
        pair.dst.copy_(_values(pair))
    else:
        bits = _INDEXED_AS.get(pair.dst.dtype)
        if bits is not None and pair.src.dtype == pair.dst.dtype:
            pair = Pair(pair.dst.view(bits), pair.src.view(bits), pair.dst_rows, pair.src_rows)
        pair.dst[pair.dst_rows] = _values(pair).to(pair.dst.dtype)


def add(pair: Pair) -> None:
    """``dst[dst_rows] += src[src_rows]``, in the wider dtype of both. Its bits do not vary: rows are distinct."""
    if _on_triton(pair):
        from seqpar.kernels.triton import rows

        rows.add(pair)
    elif pair.dst_rows is None:
        pair.dst.add_(_values(pair))
    else:
        pair.dst[pair.dst_rows] = (pair.dst.index_select(0, pair.dst_rows) + _values(pair)).to(pair.dst.dtype)


def _on_triton(pair: Pair) -> bool:
    """Whether Triton moves a pair: rows by number, which torch would write twice, of a dtype and strides it takes."""
    dst, src, dst_rows, src_rows = pair
    if (dst_rows is None and src_rows is None) or not on_triton(dst) or not (dst.numel() and src.numel()):
        return False
    dense = dst.dim() <= 3 or (dst[0].is_contiguous() and src[0].is_contiguous())
    return dense and not src.is_neg() and {dst.dtype, src.dtype} <= _TRITON_DTYPES


def _compiled(pairs: Sequence[Pair]) -> bool:
    """Whether one launch can make all copies."""
    missing = {"cpu": native.missing, "cuda": native.without_cuda}.get(pairs[0].dst.device.type)
    if missing is None or missing() is not None or any(pair.src.device != pair.dst.device for pair in pairs):
        return False
    return all(pair.dst.dim() <= native.DIMS for pair in pairs) and _known_to_fake_tensors()


def _known_to_fake_tensors() -> bool:
    """Always true: registers, once in all threads, that the operator returns no tensor."""
    global _registered
    if not _registered:
        with _registering:
            if not _registered:
                torch.library.register_fake("seqpar_native::copy_", lambda dst, src, dst_rows, src_rows: None)
                _registered = True
    return True


def _selected(x: Tensor, rows: Tensor | None) -> tuple[list[int], torch.dtype, torch.device]:
    """Shape with the rows selected, dtype and device."""
    shape = list(x.shape) if rows is None else [*rows.shape, *x.shape[1:]]
    return shape, x.dtype, x.device


def _values(pair: Pair) -> Tensor:
    """The rows of the source: a copy if they have numbers."""
    return pair.src if pair.src_rows is None else pair.src.index_select(0, pair.src_rows)
