"""Attention on NVIDIA GPUs in Triton: one kernel for every mask and layout, which knows positions and bounds alone.

Tensors have any strides with a dense last dim. A value that is not finite makes every row of its tile NaN, as in other
fused kernels, also rows that do not see it; rows beyond a buffer reach nothing. Runs on the CPU through Triton's
interpreter if `TRITON_INTERPRET=1` was set before Triton was imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.protocol import Ask, Facts, Grads, Operands, Sums
from seqpar.kernels.triton.config import MAX_DIM, Config, Descriptor, configure, generation, parts, pieces
from seqpar.kernels.triton.tables import key_table, query_table

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Triton:
    """See `seqpar.kernels.protocol.Kernel`. tf32: products of float32 inputs in TF32, only ever by name."""

    def __init__(self, *, tf32: bool = False, configure: Callable[[Descriptor], Config] = configure) -> None:
        self.configure = configure
        self.name = "triton_tf32" if tf32 else "triton"
        self.precision = "tf32" if tf32 else "ieee"

    def refuses(self, ask: Ask) -> str | None:
        """Why not, or None."""
        if find_spec("triton") is None:
            return f"{self.name} needs triton, which is not installed"
        if ask.device != "cuda" and not (ask.device == "cpu" and interpreted()):
            return f"{self.name} runs on CUDA devices, q is on {ask.device}"
        if ask.device == "cuda" and generation(ask.capability) == 0:
            return f"{self.name} needs a device of capability 8.0 or newer, this one has {ask.capability / 10}"
        if ask.dtype not in DTYPES:
            return f"{self.name} has no {ask.dtype}"
        if self.precision == "tf32" and ask.dtype != torch.float32:
            return f"{self.name} is for float32, got {ask.dtype}"
        if max(ask.dim, ask.v_dim) > MAX_DIM:
            return f"{self.name} has head dims up to {MAX_DIM}, got {ask.dim} and {ask.v_dim}"
        return None

    def costs(self, ask: Ask) -> str | None:
        """Nothing, but for TF32."""
        return "triton_tf32 rounds float32 inputs to 10 bits" if self.precision == "tf32" else None

    def forward(self, x: Operands, into: Sums) -> None:
        """Add the keys of one buffer; see the protocol."""
        from seqpar.kernels.triton.forward import forward

        if not x.q.shape[0]:
            return
        config = self._config("forward", x)
        table = query_table(x.facts, config)
        target = into.acc if into.out is None else into.out
        prior = target if into.first else into.acc
        assert target is not None and prior is not None
        tma = config.tma and _described(x.k, x.v)
        forward[(table.shape[0] * x.q.shape[1],)](
            x.q, *_tiles(x.k, config.bn, tma), *_tiles(x.v, config.bn, tma), *_facts(x.facts), table, _slopes(x),
            prior, target, into.lse,
            *_scalars(x), table.shape[0], x.q.shape[1] // x.k.shape[1], x.k.shape[0],
            *_strides(x.q, x.k, x.v, prior, target), into.lse.stride(0), *_widths(x), config.bm, config.bn,
            tma, into.first, into.out is None, **self._options(x), **_launch(config),
        )  # fmt: skip

    def backward(self, x: Operands, grads: Grads) -> None:
        """Add the gradients of one buffer's keys; see the protocol."""
        if x.q.shape[0] and x.k.shape[0]:
            self._dq(x, grads)
            self._dkdv(x, grads)

    def _dq(self, x: Operands, grads: Grads) -> None:
        from seqpar.kernels.triton.backward import dq

        config = self._config("dq", x)
        table = query_table(x.facts, config)
        pre, post, *rest = _scalars(x)
        tma = config.tma and _described(x.k, x.v)
        dq[(table.shape[0] * x.q.shape[1],)](
            x.q, *_tiles(x.k, config.bn, tma), *_tiles(x.v, config.bn, tma), grads.dout, grads.lse, grads.delta,
            *_facts(x.facts), table, _slopes(x), grads.dq,
            pre, post, x.score.scale, *rest, table.shape[0], x.q.shape[1] // x.k.shape[1], x.k.shape[0],
            *_strides(x.q, x.k, x.v, grads.dout), grads.lse.stride(0), grads.delta.stride(0), *_strides(grads.dq),
            *_widths(x), config.bm, config.bn, tma, **self._options(x),
            **_launch(config),
        )  # fmt: skip

    def _dkdv(self, x: Operands, grads: Grads) -> None:
        from seqpar.kernels.triton.backward import dkdv

        config = self._config("dkdv", x)
        table, tiles, uniform, exact, work = key_table(x.facts, config)
        (rows, heads), (keys, kv_heads) = x.q.shape[:2], x.k.shape[:2]
        split = parts(table.shape[0] * kv_heads, work * (heads // kv_heads), _processors(x.q.device))
        dk, dv = grads.dk[None], grads.dv[None]
        if split > 1:
            dk, dv = (g.new_empty(split, *g.shape) for g in (grads.dk, grads.dv))
        pre, post, *rest = _scalars(x)
        tma = config.tma and _described(x.q, grads.dout)
        dkdv[(table.shape[0] * kv_heads * split,)](
            *_tiles(x.q, config.bm, tma), x.k, x.v, *_tiles(grads.dout, config.bm, tma), grads.lse, grads.delta,
            *_facts(x.facts), table, tiles, _slopes(x), dk, dv,
            pre, post, x.score.scale, *rest, table.shape[0], split, heads // kv_heads, rows, keys,
            *_strides(x.q, x.k, x.v, grads.dout), grads.lse.stride(0), grads.delta.stride(0), *dk.stride()[:3],
            *dv.stride()[:3], *_widths(x), config.bm, config.bn, tma, uniform, exact, split == 1, **self._options(x),
            **_launch(config),
        )  # fmt: skip
        if split > 1:
            grads.dk.add_(dk.sum(0))
            grads.dv.add_(dv.sum(0))

    def _config(self, direction: str, x: Operands) -> Config:
        made_for = generation(_capability(x.q.device)) if x.q.is_cuda else 0
        return self.configure(Descriptor(direction, x.q.shape[2], x.v.shape[2], x.q.dtype.itemsize, made_for))

    def _options(self, x: Operands) -> dict[str, Any]:
        """Compile-time switches."""
        return {
            "SOFTCAP": x.score.softcap != 0.0, "ALIBI": x.score.slopes is not None, "DROPOUT": x.score.dropout_p != 0.0,
            "UPCAST": not x.q.is_cuda and x.q.dtype == torch.bfloat16, "PRECISION": self.precision,
        }  # fmt: skip


def _launch(config: Config) -> dict[str, Any]:
    return {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}


def interpreted() -> bool:
    """Whether Triton interprets its kernels instead of compiling them."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _described(*tensors: Tensor) -> bool:
    """Whether the hardware's tile loads take such tensors: rows and heads start at multiples of 16 bytes."""
    sizes = [n * x.itemsize for x in tensors for n in (x.storage_offset(), *x.stride()[:2])]
    return all(n % 16 == 0 for n in sizes) and all(x.numel() and x.data_ptr() % 16 == 0 for x in tensors)


def _tiles(x: Tensor, rows: int, tma: bool) -> tuple[Any, Any]:
    """What the kernels load the two pieces of a tile's rows through: descriptors, or the tensor itself."""
    if not tma:
        return x, x
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, strides = list(x.shape), list(x.stride())
    one, two = (TensorDescriptor(x, shape, strides, [rows, 1, width or 16]) for width in pieces(x.shape[2], x.itemsize))
    return one, two


def _facts(facts: Facts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return facts.pos, facts.lo, facts.hi, facts.key_pos


def _slopes(x: Operands) -> Tensor:
    return x.facts.pos if x.score.slopes is None else x.score.slopes


def _scalars(x: Operands) -> tuple[float | int, ...]:
    """pre, post, threshold, keep_scale, seed, first_head of the kernels; 64- and 32-bit words as signed integers."""
    score = x.score
    pre = score.scale / score.softcap if score.softcap else 0.0
    post = (score.softcap or score.scale) / math.log(2)
    threshold = _signed(int(score.dropout_p * 2**32), 32)
    return pre, post, threshold, 1 / (1 - score.dropout_p), _signed(score.dropout_seed, 64), score.first_head


def _signed(word: int, bits: int) -> int:
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of rows and heads. Offsets of tiles have 64 bits, those inside a tile 32."""
    for x in tensors:
        if x.shape[0] > 1 and x.stride(0) >= 1 << 24:
            raise NotImplementedError(f"triton has no tiles of rows {x.stride(0)} elements apart; call .contiguous()")
    return [stride for x in tensors for stride in x.stride()[:2]]


def _widths(x: Operands) -> tuple[int, ...]:
    dim, v_dim = x.q.shape[2], x.v.shape[2]
    return dim, *pieces(dim, x.q.itemsize), v_dim, *pieces(v_dim, x.q.itemsize)


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
