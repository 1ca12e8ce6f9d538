"""A trial of a library's kernel on two short runs: results and gradients beside those of the reference.

A library may return a last state that has no gradient, or one with the gradient of out alone, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from seqpar.kernels.recurrent.protocol import Recurrence, RecurrentKernel, RecurrentSpec
from seqpar.kernels.recurrent.reference import TokenByToken

COUNTS, EXPORTED = np.array([40, 24]), np.array([0])
LIMIT = 0.05  # of the relative RMS error; a few roundings to bf16 are a tenth of it


def fault(kernel: RecurrentKernel, spec: RecurrentSpec) -> str | None:
    """What a kernel computes wrong in calls of this kind, or None. Reads values, so the host waits for the device.

    In a thread of its own: an operator of a compiled model, or a caller's inference mode, would keep no graph.
    """
    here = torch.empty(0, device=spec.device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_fault, kernel, spec, here).result()


def _fault(kernel: RecurrentKernel, spec: RecurrentSpec, here: Tensor) -> str | None:
    with torch.cuda.device_of(here):  # type: ignore[no-untyped-call]
        try:
            found = _computed(kernel, spec, spec.dtype)
        except Exception as raised:  # whatever a library raises is why it is not used
            return f"it fails: {type(raised).__name__}: {raised}"[:300]
        for name, expected in _computed(TokenByToken(), spec, torch.float64).items():
            x = found[name]
            if expected is None:
                continue
            if x is None:
                return f"{name} is missing"
            error = float((x.double() - expected).norm() / expected.norm())
            if not error <= LIMIT:
                return f"{name} is off by {error:.2g} of its size"
    return None


def _computed(kernel: RecurrentKernel, spec: RecurrentSpec, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """States, maps and out by name, and the gradients of each; None for zeros and for missing gradients."""
    g, rows, wide = torch.Generator().manual_seed(0), int(COUNTS.sum()), torch.promote_types(dtype, torch.float32)

    def made(*shape: int, factor: float = 1.0, of: torch.dtype = wide) -> Tensor:
        """Values of one sign that the call's dtype holds: sums do not cancel, so that an omission shows."""
        x = (torch.rand(*shape, generator=g, device="cpu") + 0.1) * factor
        return x.to(spec.dtype).to(spec.device, of).requires_grad_()

    inputs = {
        "q": made(rows, 1, spec.dim, of=dtype),
        "k": made(rows, 1, spec.dim, of=dtype, factor=spec.dim**-0.5),
        "v": made(rows, 2, spec.values, of=dtype),
        "decay": made(rows, 2, *[spec.dim] * (spec.decay == "channel"), factor=-0.1),
        "beta": made(rows, 2, factor=0.5),
        "the entering state": made(2, 2, spec.dim, spec.values),
    }
    q, k, v, decay, beta, entering = inputs.values()
    if kernel.casts:
        q, k, v = (x.to(wide) for x in (q, k, v))
    x = Recurrence(q, k, v, decay if spec.decay != "none" else None, beta if spec.beta else None, spec.dim**-0.5)
    prepared = kernel.prepare(x, kernel.tables(COUNTS, EXPORTED, q.device))
    state, mapped = kernel.leave(prepared, entering[:1])
    out, last = kernel.compute(prepared, entering)
    found: dict[str, Tensor | None] = {}
    for name, y in {"the state of a run": state, "its map": mapped, "out": out, "the last state": last}.items():
        found[name] = y.detach() if y.any() else None
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if y.requires_grad:
            grads = torch.autograd.grad(y.sum(), [*inputs.values()], allow_unused=True, retain_graph=True)
        for of, grad in zip(inputs, grads, strict=True):
            found[f"the gradient of {name} by {of}"] = grad if grad is not None and grad.any() else None
    return found
