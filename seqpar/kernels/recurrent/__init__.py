"""Kernels of recurrences: linear attention, delta rules and state spaces over runs of rows."""

from seqpar.kernels.recurrent.chunked import Chunked
from seqpar.kernels.recurrent.fla import FlashLinear
from seqpar.kernels.recurrent.native import NativeChunks
from seqpar.kernels.recurrent.protocol import Recurrence, RecurrentKernel, RecurrentSpec
from seqpar.kernels.recurrent.reference import TokenByToken
from seqpar.kernels.recurrent.steps import Steps

KERNELS: dict[str, RecurrentKernel] = {
    kernel.name: kernel for kernel in (NativeChunks(), FlashLinear(), Chunked(), TokenByToken())
}
CHANNEL_KERNELS: dict[str, RecurrentKernel] = {kernel.name: kernel for kernel in (Steps(), TokenByToken())}


def choose(name: str, spec: RecurrentSpec, call: str = "linear_attention") -> RecurrentKernel:
    """The kernel of that name; with "auto", the first that can compute calls of this kind.

    call: "linear_attention", whose kernels are `KERNELS`, or "channel_scan", whose kernels are `CHANNEL_KERNELS`.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do it.
    """
    kernels = CHANNEL_KERNELS if call == "channel_scan" else KERNELS
    if name not in ("auto", *kernels):
        raise ValueError(f"{call}: kernel must be one of auto, {', '.join(kernels)}, got {name!r:.200}")
    kernel = next(x for x in kernels.values() if name == x.name or (name == "auto" and x.refuses(spec) is None))
    why = kernel.refuses(spec)
    if why is not None:
        raise NotImplementedError(f"{call}: kernel {name} cannot compute this call: {why}")
    return kernel


__all__ = ["CHANNEL_KERNELS", "KERNELS", "Recurrence", "RecurrentKernel", "RecurrentSpec", "choose"]
