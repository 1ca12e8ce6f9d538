"""Choose a call's kernel: by name, or the first of an order that can compute it and loses no accuracy.

A call that is `CallSpec.fast` takes the first that can compute it, whatever it rounds.
"""

from __future__ import annotations

from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.native import Native
from seqpar.kernels.protocol import CallSpec, Kernel
from seqpar.kernels.reference import Reference
from seqpar.kernels.triton import Triton
from seqpar.kernels.vendor import Aten, AtenFlash, CuDNN, Flash2, Flash3, Flash4, Segmented

# seqpar's own kernels, and torch's operator for the CPU
KERNELS: tuple[Kernel, ...] = (Native(), Segmented(Aten()), Triton(), Triton(tf32=True), Blockwise(), Reference())
# kernels of other libraries, on CUDA devices
VENDORS: tuple[Kernel, ...] = tuple(Segmented(library()) for library in (AtenFlash, CuDNN, Flash2, Flash3, Flash4))

# Best first. The order on Hopper is that of an H200 (`bench/results/gpu.jsonl`: bf16, 16k tokens, causal, head dims 64
# and 128, torch 2.11, Triton 3.6), in TFLOP/s: 464 and 623 forward, 408 and 505 backward (cudnn); 441 and 518, 296 and
# 393 (triton); 295 and 324, 263 and 287 (aten_flash, which is FlashAttention-2). Triton's order of sums is fixed, that
# of the two others is not, so Triton computes backward for them where bits must not vary. flash3 was not installed; it
# is published with 497 and 648 forward on an H100 (Shah et al. 2024, FlashAttention-3, figure 5). For other devices
# nothing comparable is published or measured: Triton is first.
ON_HOPPER = ("flash3", "cudnn", "triton", "flash2", "aten_flash", "flash4")
ON_CUDA = ("triton", "flash4", "flash3", "cudnn", "flash2", "aten_flash")
ON_CPU = ("native", "aten")  # Triton runs on the CPU too, through its interpreter, if asked for by name
PLAIN_TORCH = ("blockwise", "reference")
HOPPER, HOPPER_DIM = 90, 128  # the capability, and the largest head dim that was measured


def order(call: CallSpec) -> tuple[str, ...]:
    """The names of the kernels for a call's device, best first, including those that refuse it.

    cudnn is only among them where shapes are few: it builds a plan of 0.1 to 1 s for every new one.
    """
    if call.device != "cuda":
        return ON_CPU + PLAIN_TORCH
    measured = call.capability == HOPPER and max(call.dim, call.v_dim) <= HOPPER_DIM
    names = ON_HOPPER if measured else ON_CUDA
    return tuple(name for name in names if call.few_shapes or name != "cudnn") + PLAIN_TORCH


def choose(name: str, call: CallSpec) -> Kernel:
    """The kernel of that name; with "auto", the best one that can compute the call and loses no more than it allows.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do the call.
    """
    known = {kernel.name: kernel for kernel in (*KERNELS, *VENDORS)}
    if name != "auto" and name not in known:
        raise ValueError(f"kernel must be auto or one of {', '.join(known)}, got {name!r}")
    for kernel in [known[n] for n in order(call) if n in known] if name == "auto" else [known[name]]:
        if kernel.refuses(call) is None and (name != "auto" or call.fast or kernel.accuracy_loss(call) is None):
            return kernel.specialised_for(call) if isinstance(kernel, Segmented) else kernel
    why = "\n" + explain(call) if name == "auto" else f" {known[name].refuses(call)}"
    raise NotImplementedError(f"no kernel for {call}:{why}")


def explain(call: CallSpec) -> str:
    """A line for each kernel in the order of "auto": chosen, why not, and the accuracy that it loses."""
    known = {kernel.name: kernel for kernel in (*KERNELS, *VENDORS)}
    names = [n for n in order(call) if n in known]
    lines, chosen = [], False
    for name in (*names, *(n for n in known if n not in names)):
        kernel = known[name]
        refused, loss = kernel.refuses(call), kernel.accuracy_loss(call)
        if refused:
            told = f"no: {refused}"
        elif loss and not call.fast:
            told = f'by name, or with accuracy="fast": {loss}'
        else:
            first = name in names and not chosen
            chosen = chosen or first
            told = ("chosen by auto" if first else "yes") + (f": {loss}" if loss else "")
            if isinstance(kernel, Segmented) and (varies := kernel.varies(call)):
                told += f"; gradients are triton's, as {varies}"
        lines.append(f"{name:<12}{told}")
    return "\n".join(lines)


def available() -> dict[str, str | None]:
    """Kernel name -> None if it can run on this machine, else why not."""
    return {k.name: k.missing() for k in (*KERNELS, *VENDORS)}
