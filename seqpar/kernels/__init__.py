"""How a tile is computed: the implementations, and which of them can do a call."""

from __future__ import annotations

from torch import Tensor

from seqpar.kernels.aten import Aten
from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.protocol import Facts, Kernel, Score, acc_dtype
from seqpar.kernels.reference import Reference
from seqpar.kernels.softmax import merge

KERNELS: tuple[Kernel, ...] = (Aten(), Blockwise(), Reference())  # in the order in which "auto" prefers them


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Kernel:
    """The kernel of that name, or with "auto" the first that can do the call.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do the call.
    """
    named = [kernel for kernel in KERNELS if name in ("auto", kernel.name)]
    if not named:
        raise ValueError(f"kernel must be auto or one of {', '.join(k.name for k in KERNELS)}, got {name!r}")
    reasons = []
    for kernel in named:
        reason = kernel.refuses(q, k, v, score)
        if reason is None:
            return kernel
        reasons.append(reason)
    raise NotImplementedError(f"no kernel for q {q.dtype} on {q.device} with {score}: {'; '.join(reasons)}")


def available() -> dict[str, str | None]:
    """Kernel name -> None if it can run on this machine, else why not."""
    return {kernel.name: None for kernel in KERNELS}


__all__ = ["KERNELS", "Facts", "Kernel", "Score", "acc_dtype", "available", "choose", "merge"]
