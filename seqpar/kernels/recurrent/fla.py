"""The chunked kernels of flash-linear-attention.

Source: ``fla/ops/{simple_gla,gla,delta_rule,gated_delta_rule,kda}/chunk.py`` of releases 0.5.0 to 0.5.2. They take
``[1, T, H, ...]``, the edges of runs as ``cu_seqlens``, states ``[runs, H, K, V]`` in float32, and logarithms of
decays. States are multiplied from the left, so the map of a delta rule comes as further columns: values ``[v | 0]``
from the states ``[S | I]``. No GPU has run this yet.

A release may return a last state that has no gradient, or one with the gradient of out alone, and nothing would say so.
So the first call of a kind in a process is tried on two short runs: results and gradients compared with those of the
reference.

mamba_ssm's ``mamba_chunk_scan_combined`` is not used. It multiplies values by the dt that its decays come from,
so given decays and values mean ``dt = -decay`` and ``v / dt``: the gradient of a decay is then the difference of two
sums that are larger by 1 / dt, and in 16 bits little of it is left. flash-linear-attention's ``chunk_simple_gla``
computes the same recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints
from seqpar.kernels.dispatch import no_cuda
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.recurrent.protocol import Recomputed, Recurrence, RecurrentKernel, RecurrentSpec, with_identity
from seqpar.kernels.recurrent.reference import TokenByToken
from seqpar.kernels.vendor.library import LOW, outdated

MAX_DIM = 256  # of keys
COUNTS, EXPORTED = np.array([40, 24]), np.array([0])
LIMIT = 0.05  # of the relative RMS error; a few roundings to bf16 are a tenth of it
# decay and beta -> module and function
FUNCTIONS = {
    ("none", False): ("simple_gla", "chunk_simple_gla"),
    ("scalar", False): ("simple_gla", "chunk_simple_gla"),
    ("channel", False): ("gla", "chunk_gla"),
    ("none", True): ("delta_rule", "chunk_delta_rule"),
    ("scalar", True): ("gated_delta_rule", "chunk_gated_delta_rule"),
    ("channel", True): ("kda", "chunk_kda"),
}


@dataclass(frozen=True, eq=False)
class FlaTables:
    """Edges of all runs, and of the exported ones among their rows; the numbers and counts of those rows."""

    every: Tensor
    exported: Tensor
    rows: Tensor
    counts: Tensor


class FlashLinear(Recomputed):
    """See `seqpar.kernels.recurrent.protocol.RecurrentKernel`. device: where the library's kernels run."""

    name = "fla"
    casts = False

    def __init__(self, *, device: str = "cuda") -> None:
        self.device = device
        self._faults: dict[RecurrentSpec, str | None] = {}

    def missing(self) -> str | None:
        return outdated("flash-linear-attention", (0, 5)) or (no_cuda() if self.device == "cuda" else None)

    def refuses(self, spec: RecurrentSpec) -> str | None:
        if spec.device != self.device:
            return f"fla runs on {self.device}, v is on {spec.device}"
        missing = self.missing()
        if missing:
            return f"fla: {missing}"
        if spec.dtype not in LOW:
            return f"fla computes in 16 bits, got {spec.dtype}"
        if spec.dim > MAX_DIM:
            return f"fla has keys of up to {MAX_DIM} dims, got {spec.dim}"
        if spec not in self._faults:
            self._faults[spec] = fault(self, spec)
        wrong, name = self._faults[spec], FUNCTIONS[spec.decay, spec.beta][1]
        return None if wrong is None else f"{name} of the installed flash-linear-attention is not usable: {wrong}"

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> FlaTables:
        edge, own = edges(counts), counts[exported]
        rows = np.repeat(edge[exported] - edges(own)[:-1], own) + np.arange(int(own.sum()))
        return FlaTables(*(x.long() for x in upload([edge, edges(own), rows, own], device)))

    def prepare(self, x: Recurrence, tables: FlaTables) -> tuple[Recurrence, FlaTables]:
        repeats = x.v.shape[1] // x.k.shape[1]
        q, k = (y if repeats == 1 else y.repeat_interleave(repeats, 1) for y in (x.q, x.k))
        return x._replace(q=q, k=k), tables

    def leave(self, prepared: tuple[Recurrence, FlaTables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        runs, heads, _, values = entering.shape
        k, v, decay, beta = (None if y is None else y.index_select(0, tables.rows) for y in x[1:5])
        assert k is not None and v is not None
        columns = entering
        if beta is not None:
            columns, v = with_identity(entering, v)
        # what q is does not matter: out is not read
        _, left = _call(Recurrence(k.detach(), k, v, decay, beta, 1.0), columns, tables.exported)
        if beta is not None:
            return left[..., :values], left[..., values:]
        if decay is None or not runs:
            return left, entering.new_zeros(runs, heads) if decay is None else decay[:0]
        sums = torch.segment_reduce(decay.double(), "sum", lengths=tables.counts, axis=0)
        return left, sums.to(decay.dtype)

    def compute(self, prepared: tuple[Recurrence, FlaTables], entering: Tensor) -> tuple[Tensor, Tensor]:
        x, tables = prepared
        return _call(x, entering, tables.every)


def _call(x: Recurrence, entering: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, H, V] and the states that runs leave, by the library's function for the recurrence."""
    if not x.v.shape[0]:
        return x.v, entering
    decay = "none" if x.decay is None else "scalar" if x.decay.dim() == 2 else "channel"
    module, name = FUNCTIONS[decay, x.beta is not None]
    options: dict[str, Any] = {} if x.decay is None else {"g": x.decay[None]}
    if x.beta is not None:
        options["beta"] = x.beta[None]
    out, left = getattr(import_module(f"fla.ops.{module}"), name)(
        q=x.q[None], k=x.k[None], v=x.v[None], **options, scale=x.scale, initial_state=entering,
        output_final_state=True, cu_seqlens=edge,
    )  # fmt: skip
    return out[0], left


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
