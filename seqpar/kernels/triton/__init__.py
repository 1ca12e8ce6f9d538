"""Attention on NVIDIA GPUs in Triton: one kernel for every mask and layout.

The kernels know positions and bounds, not masks, layouts or ranks. A query row has a position and sees the keys whose
positions lie in [lo, hi). A table lists the key tiles that each query tile visits, and which of them it sees whole:

    causal, key tiles   0  1  2  3
    query tile 0        p  .  .  .     f  full: every pair is seen, and nothing is masked
    query tile 1        f  p  .  .     p  partial: pairs are masked by position
    query tile 2        f  f  p  .     .  not visited

Tensors may have any strides with a dense last dim. A value that is not finite makes every row of its tile NaN, even
rows that do not see it, as in other fused kernels; rows past the end of a buffer have no effect. The kernels run on the
CPU, in Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before Triton was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from seqpar.kernels.dispatch import no_cuda, triton_installed
from seqpar.kernels.protocol import CallSpec, Grads, Operands, Sums
from seqpar.kernels.triton.arguments import (
    Bounds,
    describable,
    descriptors,
    launch_shape,
    per_head,
    per_row,
    scalars,
    seed,
)
from seqpar.kernels.triton.config import MAX_DIM, Descriptor, LaunchConfig, configure, generation, parts
from seqpar.kernels.triton.tables import key_table, query_table

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Triton:
    """The kernels as a `seqpar.kernels.protocol.Kernel`.

    tf32: multiply float32 inputs in TF32; this kernel is only used when it is asked for by name. configure: the launch
    configuration of a descriptor.
    """

    def __init__(self, *, tf32: bool = False, configure: Callable[[Descriptor], LaunchConfig] = configure) -> None:
        self.name = "triton_tf32" if tf32 else "triton"
        self.precision = "tf32" if tf32 else "ieee"
        self.configure = configure

    def missing(self) -> str | None:
        """Why the kernels cannot run here, or None: they need triton, and a CUDA device unless interpreted."""
        if not triton_installed():
            return "triton is not installed"
        return None if interpreted() else no_cuda()

    def refuses(self, spec: CallSpec) -> str | None:
        """Why the kernels cannot compute such a call, or None."""
        if not triton_installed():
            return f"{self.name} needs triton, which is not installed"
        if spec.device != "cuda" and not (spec.device == "cpu" and interpreted()):
            return f"{self.name} runs on CUDA devices, q is on {spec.device}"
        if spec.device == "cuda" and generation(spec.capability) == 0:
            return f"{self.name} needs a device of capability 8.0 or newer, this one has {spec.capability / 10}"
        if spec.dtype not in DTYPES:
            return f"{self.name} has no {spec.dtype}"
        if self.precision == "tf32" and spec.dtype != torch.float32:
            return f"{self.name} is for float32, got {spec.dtype}"
        if max(spec.dim, spec.v_dim) > MAX_DIM:
            return f"{self.name} has head dims up to {MAX_DIM}, got {spec.dim} and {spec.v_dim}"
        return None

    def accuracy_loss(self, spec: CallSpec) -> str | None:
        """Why results are less accurate than those of other kernels, or None: TF32 rounds the inputs."""
        return "triton_tf32 rounds float32 inputs to 10 bits" if self.precision == "tf32" else None

    def forward(self, x: Operands, into: Sums) -> None:
        """Add the attention over one buffer of keys to the sums; see the protocol."""
        from seqpar.kernels.triton.forward import forward

        if not x.q.shape[0]:
            return
        config = self._config("forward", x)
        tma = config.tma and describable(x.k, x.v)
        table = query_table(x.facts, config)
        target = into.acc if into.out is None else into.out
        prior = target if into.first else into.acc
        assert target is not None and prior is not None
        with torch.cuda.device_of(x.q):
            forward[(table.shape[0] * x.q.shape[1],)](
                per_row(x.q), per_row(x.k), *descriptors(x.k, config.bn, tma), per_row(x.v),
                *descriptors(x.v, config.bn, tma), _bounds(x), table,
                per_row(prior), per_row(target), per_head(into.lse), scalars(x), seed(x),
                table.shape[0], x.q.shape[1] // x.k.shape[1], x.k.shape[0],
                FIRST=into.first, IN_PLACE=into.out is None, **self._compiled(x, config, tma),
            )  # fmt: skip

    def backward(self, x: Operands, grads: Grads) -> None:
        """Add the gradients from one buffer of keys; see the protocol."""
        if x.q.shape[0] and x.k.shape[0]:
            with torch.cuda.device_of(x.q):
                self._dq(x, grads)
                self._dkdv(x, grads)

    def _dq(self, x: Operands, grads: Grads) -> None:
        from seqpar.kernels.triton.backward import dq

        config = self._config("dq", x)
        tma = config.tma and describable(x.k, x.v)
        table = query_table(x.facts, config)
        dq[(table.shape[0] * x.q.shape[1],)](
            per_row(x.q), per_row(x.k), *descriptors(x.k, config.bn, tma), per_row(x.v),
            *descriptors(x.v, config.bn, tma), per_row(grads.dout),
            per_head(grads.lse), per_head(grads.delta), _bounds(x), table, per_row(grads.dq), scalars(x), seed(x),
            table.shape[0], x.q.shape[1] // x.k.shape[1], x.k.shape[0], **self._compiled(x, config, tma),
        )  # fmt: skip

    def _dkdv(self, x: Operands, grads: Grads) -> None:
        from seqpar.kernels.triton.backward import dkdv

        config = self._config("dkdv", x)
        table, query_tiles, uniform, exact, work = key_table(x.facts, config)
        # A descriptor also loads the rows after a short tile, and their values may not be finite.
        tma = config.tma and uniform and describable(x.q, grads.dout)
        (rows, heads), (keys, kv_heads) = x.q.shape[:2], x.k.shape[:2]
        split = parts(table.shape[0] * kv_heads, work * (heads // kv_heads), _processors(x.q.device))
        dk, dv = grads.dk[None], grads.dv[None]
        if split > 1:
            dk, dv = (g.new_empty(split, *g.shape) for g in (grads.dk, grads.dv))
        dkdv[(table.shape[0] * kv_heads * split,)](
            per_row(x.q), *descriptors(x.q, config.bm, tma), per_row(x.k), per_row(x.v),
            per_row(grads.dout), *descriptors(grads.dout, config.bm, tma),
            per_head(grads.lse), per_head(grads.delta), _bounds(x), table, query_tiles, per_row(dk[0]), per_row(dv[0]),
            dk.stride(0), dv.stride(0), scalars(x), seed(x), table.shape[0], split, heads // kv_heads, rows, keys,
            UNIFORM=uniform, EXACT=exact, ADD=split == 1, **self._compiled(x, config, tma),
        )  # fmt: skip
        if split > 1:
            grads.dk.add_(dk.sum(0))
            grads.dv.add_(dv.sum(0))

    def _config(self, direction: str, x: Operands) -> LaunchConfig:
        device = generation(_capability(x.q.device)) if x.q.is_cuda else 0
        return self.configure(Descriptor(direction, x.q.shape[2], x.v.shape[2], x.q.dtype.itemsize, device))

    def _compiled(self, x: Operands, config: LaunchConfig, tma: bool) -> dict[str, Any]:
        """The compile-time arguments of a launch, and Triton's options."""
        upcast = x.q.dtype == torch.bfloat16 and interpreted()
        shape = launch_shape(x, config, tma=tma, upcast=upcast, precision=self.precision)
        return {"S": shape, "num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}


def interpreted() -> bool:
    """Whether Triton interprets its kernels instead of compiling them."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _bounds(x: Operands) -> Bounds:
    return Bounds(x.facts.pos, x.facts.lo, x.facts.hi, x.facts.key_pos)


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
