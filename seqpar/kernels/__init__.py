"""How a tile is computed: the implementations, and which of them can do a call."""

from __future__ import annotations

from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.native import Native
from seqpar.kernels.protocol import Ask, Facts, Grads, Kernel, Operands, Score, Sums, acc_dtype, ask
from seqpar.kernels.rates import order
from seqpar.kernels.reference import Reference
from seqpar.kernels.softmax import merge
from seqpar.kernels.triton import Triton
from seqpar.kernels.vendor import Aten, AtenFlash, CuDNN, Flash2, Flash3, Flash4, Segmented

# this package's own, and torch's operator for the CPU
KERNELS: tuple[Kernel, ...] = (Native(), Segmented(Aten()), Triton(), Triton(tf32=True), Blockwise(), Reference())
# of other libraries, on CUDA devices
VENDORS: tuple[Kernel, ...] = tuple(Segmented(library()) for library in (AtenFlash, CuDNN, Flash2, Flash3, Flash4))


def choose(name: str, call: Ask) -> Kernel:
    """The kernel of that name, or with "auto" the best that can do the call and loses no accuracy; see `rates.order`.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do the call.
    """
    known = {kernel.name: kernel for kernel in (*KERNELS, *VENDORS)}
    if name != "auto" and name not in known:
        raise ValueError(f"kernel must be auto or one of {', '.join(known)}, got {name!r}")
    for kernel in [known[n] for n in order(call) if n in known] if name == "auto" else [known[name]]:
        if kernel.refuses(call) is None and (name != "auto" or kernel.costs(call) is None):
            return kernel.at(call) if isinstance(kernel, Segmented) else kernel
    why = "\n" + explain(call) if name == "auto" else f" {known[name].refuses(call)}"
    raise NotImplementedError(f"no kernel for {call}:{why}")


def explain(call: Ask) -> str:
    """A line for each kernel, in the order in which "auto" tries them: chosen, or why not, or what it costs by name."""
    known = {kernel.name: kernel for kernel in (*KERNELS, *VENDORS)}
    names = [n for n in order(call) if n in known]
    lines, chosen = [], False
    for name in (*names, *(n for n in known if n not in names)):
        refused, costs = known[name].refuses(call), known[name].costs(call)
        if refused or costs:
            told = f"no: {refused}" if refused else f"by name only: {costs}"
        elif name in names and not chosen:
            told, chosen = "chosen by auto", True
        else:
            told = "yes"
        lines.append(f"{name:<12}{told}")
    return "\n".join(lines)


def available() -> dict[str, str | None]:
    """Kernel name -> None if it can run on this machine, else why not."""
    return {k.name: k.missing() for k in (*KERNELS, *VENDORS)}


__all__ = [
    "KERNELS", "VENDORS", "Ask", "Facts", "Grads", "Kernel", "Operands", "Score", "Sums", "acc_dtype", "ask",
    "available", "choose", "explain", "merge", "order",
]  # fmt: skip
