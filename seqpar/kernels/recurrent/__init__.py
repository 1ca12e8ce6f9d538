"""Kernels of recurrences: linear attention, delta rules and state spaces over runs of rows."""

from seqpar.kernels.recurrent.chunked import Chunked
from seqpar.kernels.recurrent.native import NativeChunks
from seqpar.kernels.recurrent.protocol import Recurrence, RecurrentKernel, RecurrentSpec
from seqpar.kernels.recurrent.reference import TokenByToken
from seqpar.kernels.recurrent.triton import TritonChunks
from seqpar.kernels.recurrent.vendor import FlashLinear

KERNELS: dict[str, RecurrentKernel] = {
    kernel.name: kernel for kernel in (NativeChunks(), Chunked(), TokenByToken(), TritonChunks(), FlashLinear())
}


def choose(name: str, spec: RecurrentSpec) -> RecurrentKernel:
    """The kernel of that name; with "auto", the first of `KERNELS` that can compute calls of this kind.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do it.
    """
    if name not in ("auto", *KERNELS):
        raise ValueError(f"linear_attention: kernel must be one of auto, {', '.join(KERNELS)}, got {name!r:.200}")
    kernel = next(x for x in KERNELS.values() if name == x.name or (name == "auto" and x.refuses(spec) is None))
    why = kernel.refuses(spec)
    if why is not None:
        raise NotImplementedError(f"linear_attention: kernel {name} cannot compute this call: {why}")
    return kernel


__all__ = ["KERNELS", "Recurrence", "RecurrentKernel", "RecurrentSpec", "choose"]
