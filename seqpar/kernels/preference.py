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

# Best first. The order on Hopper follows published figures for the H100 at head dims 64 and 128, in TFLOP/s of a
# forward over 16k tokens: 497 and 648 (flash3), 413 and 595 (cudnn), 403 and 395 (triton's tutorial), 324 and 370
# (flash2, which torch contains). Source: Shah et al. 2024, FlashAttention-3, figures 5 and 6; causal ones rank alike.
# For other devices nothing comparable is published, so Triton comes first. None of this was measured with seqpar's
# kernels.
ON_HOPPER = ("flash3", "cudnn", "triton", "flash2", "aten_flash", "flash4")
# A backward takes 5 products for each tile of scores. seqpar's in Triton takes 7, because dq makes the scores and their
# gradients once more. If a product takes as long as in the forward, that is 395 * 5 / 7 = 282 TFLOP/s at head dim 128:
# derived from the number of products, not measured. flash2 has 322 there (figure 6), without a fixed order of sums. So
# forward and backward together take 9 / 395 of Triton and 2 / 370 + 5 / 322 of flash2, which is 8 % less.
TRAINING_ON_HOPPER = ("flash3", "cudnn", "flash2", "aten_flash", "triton", "flash4")
ON_CUDA = ("triton", "flash4", "flash3", "cudnn", "flash2", "aten_flash")
ON_CPU = ("native", "aten")  # Triton runs on the CPU too, through its interpreter, if asked for by name
PLAIN_TORCH = ("blockwise", "reference")
HOPPER, HOPPER_DIM = 90, 128  # the capability, and the largest head dim with published figures


def order(call: CallSpec) -> tuple[str, ...]:
    """The names of the kernels for a call's device, best first, including those that refuse it.

    cudnn is only among them where documents have one length: it builds a plan of 0.1 to 1 s for every new shape.
    """
    if call.device != "cuda":
        return ON_CPU + PLAIN_TORCH
    names = ON_CUDA
    if call.capability == HOPPER and max(call.dim, call.v_dim) <= HOPPER_DIM:
        training = call.grads and not call.deterministic and call.dim == call.v_dim == HOPPER_DIM
        names = TRAINING_ON_HOPPER if training else ON_HOPPER
    return tuple(name for name in names if call.one_length or name != "cudnn") + PLAIN_TORCH


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
        refused, loss = known[name].refuses(call), known[name].accuracy_loss(call)
        if refused:
            told = f"no: {refused}"
        elif loss and not call.fast:
            told = f'by name, or with accuracy="fast": {loss}'
        else:
            first = name in names and not chosen
            chosen = chosen or first
            told = ("chosen by auto" if first else "yes") + (f": {loss}" if loss else "")
        lines.append(f"{name:<12}{told}")
    return "\n".join(lines)


def available() -> dict[str, str | None]:
    """Kernel name -> None if it can run on this machine, else why not."""
    return {k.name: k.missing() for k in (*KERNELS, *VENDORS)}
