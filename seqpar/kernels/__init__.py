"""How a tile is computed: the implementations, and which of them can do a call."""

from __future__ import annotations

from seqpar.kernels.aten import Aten
from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.protocol import Ask, Facts, Grads, Kernel, Operands, Score, Sums, acc_dtype, ask
from seqpar.kernels.reference import Reference
from seqpar.kernels.softmax import merge

KERNELS: tuple[Kernel, ...] = (Aten(), Blockwise(), Reference())  # in the order in which "auto" prefers them


def choose(name: str, call: Ask) -> Kernel:
    """The kernel of that name, or with "auto" the first that can do the call and loses no accuracy.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do the call.
    """
    named = [kernel for kernel in KERNELS if name in ("auto", kernel.name)]
    if not named:
        raise ValueError(f"kernel must be auto or one of {', '.join(k.name for k in KERNELS)}, got {name!r}")
    reasons = []
    for kernel in named:
        reason = kernel.refuses(call) or (kernel.costs(call) if name == "auto" else None)
        if reason is None:
            return kernel
        reasons.append(reason)
    raise NotImplementedError(f"no kernel for {call}: {'; '.join(reasons)}")


def available() -> dict[str, str | None]:
    """Kernel name -> None if it can run on this machine, else why not."""
    return {kernel.name: None for kernel in KERNELS}


__all__ = [
    "KERNELS", "Ask", "Facts", "Grads", "Kernel", "Operands", "Score", "Sums", "acc_dtype", "ask", "available",
    "choose", "merge",
]  # fmt: skip
