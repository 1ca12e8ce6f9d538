"""Choose a call's kernel: by name, or the first of an order that can compute it and loses no accuracy.

A call that is `CallSpec.fast` takes the first that can compute it, whatever it rounds.
"""

from __future__ import annotations

from collections.abc import Collection

from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.first_use import FirstUse
from seqpar.kernels.native import Native
from seqpar.kernels.protocol import CallSpec, Kernel
from seqpar.kernels.reference import Reference
from seqpar.kernels.triton import Triton
from seqpar.kernels.vendor import Aten, AtenFlash, CuDNN, Flash2, Flash3, Flash4, Segmented

# seqpar's own kernels, and torch's operator for the CPU
KERNELS: tuple[Kernel, ...] = (Native(), Segmented(Aten()), Triton(), Triton(tf32=True), Blockwise(), Reference())
# kernels of other libraries, on CUDA devices
VENDORS: tuple[Kernel, ...] = tuple(Segmented(library()) for library in (AtenFlash, CuDNN, Flash2, Flash3, Flash4))

# Best first, in TFLOP/s of bf16, causal, head dim 128, forward. Hopper: cudnn, triton and aten_flash have 623, 518 and
# 324 on an H200 (`bench/results/gpu.jsonl`: 16k tokens, torch 2.11, Triton 3.6; backward 505, 393 and 287). flash3 is
# published with 648 on an H100 (Shah et al. 2024, FlashAttention-3, figure 5), flash4 is reported equal to it there
# (pytorch/torchtitan#4413), and flash2 is the algorithm of aten_flash. Blackwell: flash4 is published with 1613, 1.3
# times cudnn's rate and 2.7 times that of kernels in Triton (Zadouri et al. 2026, FlashAttention-4, abstract). For
# other devices and larger heads nothing comparable is published or measured: Triton is first.
#
# Triton's order of sums is fixed, that of cudnn and aten_flash is not, so Triton computes backward for them where bits
# must not vary. A place that rests on a figure of others is a kernel's own once it is right on this machine, see
# `first_use`; until then the kernel comes after those that this project has measured there.
ON_HOPPER = ("flash3", "flash4", "cudnn", "triton", "aten_flash", "flash2")
ON_BLACKWELL = ("flash4", "cudnn", "triton", "flash2", "aten_flash")
ON_CUDA = ("triton", "flash4", "flash3", "cudnn", "flash2", "aten_flash")
ON_CPU = ("native", "aten")  # Triton runs on the CPU too, through its interpreter, if asked for by name
PLAIN_TORCH = ("blockwise", "reference")
PLACES = {90: ON_HOPPER, 100: ON_BLACKWELL, 103: ON_BLACKWELL}  # by the capability of the device
UNMEASURED = {90: ("flash3", "flash4", "flash2")}  # by this project, where it has measured others
LARGEST_DIM = 128  # of a head, among these figures
FIRST_USE = FirstUse()


def order(call: CallSpec) -> tuple[str, ...]:
    """The names of the kernels for a call's device, best first, including those that refuse it.

    Those in the place of a published figure come after measured ones until they have passed their first check here.
    """
    unmeasured = UNMEASURED.get(call.capability, ())
    late = {name for name in unmeasured if FIRST_USE.known(name, call) is not None}
    return tuple(sorted(_best_first(call), key=late.__contains__)) + PLAIN_TORCH


def _best_first(call: CallSpec) -> tuple[str, ...]:
    """The order if all kernels have passed their first check, without those of plain torch.

    cudnn is only among them where shapes are few: it builds a plan of 0.1 to 1 s for every new one.
    """
    if call.device != "cuda":
        return ON_CPU
    places = PLACES.get(call.capability, ON_CUDA) if max(call.dim, call.v_dim) <= LARGEST_DIM else ON_CUDA
    return tuple(name for name in places if call.few_shapes or name != "cudnn")


def choose(name: str, call: CallSpec, passed_over: Collection[str] = ()) -> Kernel:
    """The kernel of that name; with "auto", the best one that can compute the call and loses no more than it allows.

    On CUDA "auto" checks a kernel at its first use on this machine, and passes over one that is wrong. passed_over: the
    names of others that it must not take.

    Raises: ValueError for an unknown name; NotImplementedError with the reason if the kernel cannot do the call.
    """
    known = _known()
    if name != "auto":
        if name not in known:
            raise ValueError(f"kernel must be auto or one of {', '.join(known)}, got {name!r}")
        if why := known[name].refuses(call):
            raise NotImplementedError(f"no kernel for {call}: {why}")
        return _specialised(known[name], call)
    for each in (*_best_first(call), *PLAIN_TORCH):
        kernel = known.get(each)
        if kernel is None or kernel.refuses(call) or not (call.fast or kernel.accuracy_loss(call) is None):
            continue
        parts = _parts(kernel := _specialised(kernel, call))
        if not any(part.name in passed_over or FIRST_USE.fault(part, call) for part in parts):
            return kernel
    raise NotImplementedError(f"no kernel for {call}:\n{explain(call)}")


def faulty(call: CallSpec) -> dict[str, str]:
    """Kernel name -> what it computes wrong in such calls, by the checks of this process."""
    found = {name: FIRST_USE.known(name, call) for name in _known()} if call.device == "cuda" else {}
    return {name: fault for name, fault in found.items() if fault not in (None, "not checked")}


def _known() -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in (*KERNELS, *VENDORS)}


def _specialised(kernel: Kernel, call: CallSpec) -> Kernel:
    return kernel.specialised_for(call) if isinstance(kernel, Segmented) else kernel


def _parts(kernel: Kernel) -> tuple[Kernel, ...]:
    """The kernel, and the one to which it leaves what its library does not compute."""
    return (kernel, kernel.rest) if isinstance(kernel, Segmented) else (kernel,)


def explain(call: CallSpec) -> str:
    """A line for each kernel in the order of "auto": chosen, why not, and the accuracy that it loses."""
    known, wrong = _known(), faulty(call)
    names = [n for n in (*_best_first(call), *PLAIN_TORCH) if n in known]
    lines, chosen = [], False
    for name in (*names, *(n for n in known if n not in names)):
        kernel = known[name]
        refused, loss = kernel.refuses(call), kernel.accuracy_loss(call)
        if refused:
            told = f"no: {refused}"
        elif failed := [wrong[part.name] for part in _parts(_specialised(kernel, call)) if part.name in wrong]:
            told = f"by name; its first check on this machine failed: {failed[0]}"
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
