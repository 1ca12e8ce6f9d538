"""Attention on NVIDIA GPUs in Triton: one kernel for every mask and layout.

The kernels know positions and bounds, not masks, layouts or ranks. A query row has a position and sees the keys whose
positions lie in [lo, hi). A table lists the key tiles that each query tile visits, and which of them it sees whole:

    causal, key tiles   0  1  2  3
    query tile 0        p  .  .  .     f  full: every pair is seen, and nothing is masked
    query tile 1        f  p  .  .     p  partial: pairs are masked by position
    query tile 2        f  f  p  .     .  not visited

Where keys end before the last query, as in trees, a query tile visits several stretches of key tiles, and pairs of
partial tiles are masked by the keys' ends too. That is a variant of each kernel; the others are as without it.

Tensors may have any strides with a dense last dim. A value that is not finite makes every row of its tile NaN, even
rows that do not see it, as in other fused kernels; rows past the end of a buffer have no effect. The kernels run on the
CPU, in Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before Triton was imported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.kernels.dispatch import no_cuda, triton_installed
from seqpar.kernels.protocol import CallSpec, Grads, Kernel, Operands, Score, StepFacts, Sums
from seqpar.kernels.triton.arguments import (
    TileLoads,
    Topped,
    bounds_of,
    check_heads,
    check_rows,
    describable,
    key_sums,
    kinds_of,
    launch_shape,
    per_head,
    per_row,
    scalars,
    seed,
    with_slopes,
)
from seqpar.kernels.triton.config import CLASSES, Descriptor, LaunchConfig, configure, generation
from seqpar.kernels.triton.launch import Both, Joined, Launch, Prepared, kind_of_score
from seqpar.kernels.triton.tables import key_table, query_table
from seqpar.kernels.triton.variants import dkdv_variants, forward_variants

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Triton(Kernel):
    """The kernels as a `seqpar.kernels.protocol.Kernel`.

    tf32: multiply float32 inputs in TF32; this kernel is only used when it is asked for by name. configure: the launch
    configuration of a descriptor. variants: the first launch of a kernel also compiles the variants of it that another
    plan may need.
    """

    def __init__(
        self, *, tf32: bool = False, configure: Callable[[Descriptor], LaunchConfig] = configure, variants: bool = True
    ) -> None:
        self.name = "triton_tf32" if tf32 else "triton"
        self.precision = "tf32" if tf32 else "ieee"
        self.configure = configure
        self.variants = variants

    def missing(self) -> str | None:
        if not triton_installed():
            return "triton is not installed"
        return None if interpreted() else no_cuda()

    def refuses(self, spec: CallSpec) -> str | None:
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
        most = CLASSES[spec.dtype.itemsize][-1]
        if max(spec.dim, spec.v_dim) > most:
            return f"{self.name} has head dims up to {most} in {spec.dtype}, got {spec.dim} and {spec.v_dim}"
        return None

    def accuracy_loss(self, spec: CallSpec) -> str | None:
        return "triton_tf32 rounds float32 inputs to 10 bits" if self.precision == "tf32" else None

    def tables(self, spec: CallSpec, facts: StepFacts) -> dict[Hashable, Any]:
        made: dict[Hashable, Any] = {}
        facts = replace(facts, memo=lambda key, make: made[key] if key in made else made.setdefault(key, make()))
        device = generation(spec.capability) if spec.device == "cuda" else 0
        for direction in ("forward", "dq", "dkdv") if spec.grads else ("forward",):
            config = self.configure(Descriptor(direction, spec.dim, spec.v_dim, spec.dtype.itemsize, device))
            if len(facts.pos) and (len(facts.key_pos) or direction == "forward"):
                if direction == "dkdv":
                    group = spec.heads // spec.kv_heads
                    key_table(facts, config, spec.kv_heads, group, _processors(torch.device(spec.device)))
                else:
                    query_table(facts, config)
        return made

    def keeps_top(self, score: Score) -> bool:
        return score.scaled

    def forward(self, x: Operands, into: Sums) -> None:
        if not x.q.shape[0]:
            return
        target = into.acc if into.out is None else into.out
        prior = target if into.first else into.acc
        assert target is not None and prior is not None
        of_rows = x.q, x.k, x.v, prior, target
        tops = () if into.top is None else (into.top,)
        kinds = kinds_of(*of_rows, into.lse, *tops)
        key = "forward", self, into.first, into.out is None, kind_of_score(x.score), kinds
        ready: Prepared = x.facts.memo(key, lambda: self._prepare_forward(x, into, prior, target))
        q, k, v, before, after = map(per_row, of_rows, kinds)
        also = after if into.top is None else Topped(*after, *per_head(into.top, kinds[6]))
        ready.launch(
            q, k, *ready.loads[0].of(x.k), v, *ready.loads[1].of(x.v),
            ready.bounds, *ready.tables, before, also, *per_head(into.lse, kinds[5]),
            with_slopes(ready.scalars, x.score.slopes), seed(x), *ready.counts,
        )  # fmt: skip

    def _prepare_forward(self, x: Operands, into: Sums, prior: Tensor, target: Tensor) -> Prepared:
        from seqpar.kernels.triton.forward import forward

        check_rows(x.q, x.k, x.v, prior, target)
        check_heads(into.lse, *([] if into.top is None else [into.top]))
        config = self._config("forward", x)
        tma = config.tma and describable(x.k, x.v)
        table, tiles = query_table(x.facts, config)
        launch = self._launch(
            forward, tiles * x.q.shape[1], x, config, into.first, into.out is None, tma=tma, top=into.top is not None
        )
        if self.variants and not interpreted():
            launch.variants = forward_variants(x.q.dtype, target, into.top)
        return Prepared(
            launch, (TileLoads(x.k, config.bn, tma), TileLoads(x.v, config.bn, tma)), bounds_of(x.facts), (table,),
            (tiles, x.q.shape[1] // x.k.shape[1], x.k.shape[0]), scalars(x),
        )  # fmt: skip

    def backward(self, x: Operands, grads: Grads) -> None:
        if x.q.shape[0] and x.k.shape[0]:
            both = self._both(x, grads)
            self._dq(x, both)
            self._dkdv(x, grads, both)

    def _both(self, x: Operands, grads: Grads) -> Both:
        """What the two launches of a backward share."""
        of_rows = x.q, x.k, x.v, grads.dout, grads.dq
        kinds = kinds_of(*of_rows, grads.dk, grads.dv, grads.lse, grads.delta)
        key = "backward", self, kind_of_score(x.score), kinds
        dq, dkdv = x.facts.memo(key, lambda: (self._prepare_dq(x, grads), self._prepare_dkdv(x, grads)))
        q, k, v, dout, grad = map(per_row, of_rows, kinds)
        sums = *per_head(grads.lse, kinds[-2]), *per_head(grads.delta, kinds[-1])
        return Both(dq, dkdv, q, k, v, dout, grad, kinds[5:7], sums, (with_slopes(dq.scalars, x.score.slopes), seed(x)))

    def _dq(self, x: Operands, both: Both) -> None:
        ready, _, q, k, v, dout, grad, _, sums, scores = both
        ready.launch(
            q, k, *ready.loads[0].of(x.k), v, *ready.loads[1].of(x.v), dout, *sums,
            ready.bounds, *ready.tables, grad, *scores, *ready.counts,
        )  # fmt: skip

    def _prepare_dq(self, x: Operands, grads: Grads) -> Prepared:
        from seqpar.kernels.triton.backward import dq

        check_rows(x.q, x.k, x.v, grads.dout, grads.dq)
        check_heads(grads.lse, grads.delta)
        config = self._config("dq", x)
        tma = config.tma and describable(x.k, x.v)
        table, tiles = query_table(x.facts, config)
        return Prepared(
            self._launch(dq, tiles * x.q.shape[1], x, config, tma=tma),
            (TileLoads(x.k, config.bn, tma), TileLoads(x.v, config.bn, tma)), bounds_of(x.facts), (table,),
            (tiles, x.q.shape[1] // x.k.shape[1], x.k.shape[0]), scalars(x),
        )  # fmt: skip

    def _dkdv(self, x: Operands, grads: Grads, both: Both) -> None:
        _, ready, q, k, v, dout, _, kinds, sums, scores = both
        joined = ready.joined
        into = key_sums(grads.dk, grads.dv, kinds, joined.rows if joined else 0)
        ready.launch(
            q, *ready.loads[0].of(x.q), k, v, dout, *ready.loads[1].of(grads.dout), *sums,
            ready.bounds, *ready.tables, *into, *scores, *ready.counts,
        )  # fmt: skip
        if joined:
            joined.launch(*into, *joined.counts)

    def _prepare_dkdv(self, x: Operands, grads: Grads) -> Prepared:
        from seqpar.kernels.triton.backward import dkdv
        from seqpar.kernels.triton.parts import joins

        check_rows(x.q, x.k, x.v, grads.dout, grads.dk, grads.dv)
        check_heads(grads.lse, grads.delta)
        config = self._config("dkdv", x)
        (rows, heads), (keys, kv_heads) = x.q.shape[:2], x.k.shape[:2]
        group = heads // kv_heads
        table, query_tiles, uniform, exact, by_tile, programs, parts = key_table(
            x.facts, config, kv_heads, group, _processors(x.q.device)
        )
        # A descriptor also loads the rows after a short tile, and their values may not be finite.
        able = config.tma and describable(x.q, grads.dout)
        tma = able and uniform
        launch = self._launch(dkdv, programs * kv_heads, x, config, uniform, exact, tma=tma)
        join = joins(grads.dk, grads.dv, table.shape[0] - programs, config.bn)
        joined = Joined(join, parts * config.bn, (table[programs:], kv_heads, keys))
        if self.variants and not interpreted():
            launch.variants = dkdv_variants(x, grads, launch.constants[-1], config.bm, able=able)
            launch.others = ((join, (*key_sums(grads.dk, grads.dv, kinds_of(grads.dk, grads.dv), 0), *joined.counts)),)
        return Prepared(
            launch, (TileLoads(x.q, config.bm, tma), TileLoads(grads.dout, config.bm, tma)), bounds_of(x.facts),
            (table, query_tiles), (kv_heads if by_tile else programs, int(by_tile), group, rows, keys), scalars(x),
            joined if parts else None,
        )  # fmt: skip

    def _config(self, direction: str, x: Operands) -> LaunchConfig:
        device = generation(_capability(x.q.device)) if x.q.is_cuda else 0
        return self.configure(Descriptor(direction, x.q.shape[2], x.v.shape[2], x.q.dtype.itemsize, device))

    def _launch(
        self, kernel: Any, programs: int, x: Operands, config: LaunchConfig, *constants: bool, tma: bool,
        top: bool = False,
    ) -> Launch:  # fmt: skip
        """The launches of a kernel; its last constant is the shape."""
        upcast = x.q.dtype == torch.bfloat16 and interpreted()
        shape = launch_shape(x, config, tma=tma, top=top, upcast=upcast, precision=self.precision)
        options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
        return Launch(kernel, programs, (*constants, shape), options)


def interpreted() -> bool:
    """Whether Triton interprets its kernels instead of compiling them."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
