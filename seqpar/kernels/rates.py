"""How fast kernels are said to be, and the order in which "auto" tries them.

The figures are others', published for the H100; none was measured by this project. They stand in until rows measured by
``bench/gpu.py`` replace them, and say nothing of capabilities that they do not name. Those of Triton are of its
tutorial's kernel, which is not this package's; a backward that nobody published counts as fast as the forward.
FlashAttention-2 inside torch is taken to be as fast as the package.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from seqpar.kernels.protocol import Ask

FA3 = "Shah et al. 2024, FlashAttention-3, figures 5 and 6: H100 SXM, 16k tokens"
TRITONBENCH = "tritonbench#1254: H100, batch 4, 48 heads, 8k tokens"


class Rate(NamedTuple):
    """TFLOP/s of bf16 or fp16, counting attended pairs alone; a backward counts 2.5 forwards."""

    kernel: str
    capability: int
    dim: int  # up to this head dim
    causal: bool
    forward: float
    backward: float | None
    source: str


RATES = (
    Rate("flash3", 90, 64, False, 497, None, FA3),
    Rate("cudnn", 90, 64, False, 413, None, FA3),
    Rate("triton", 90, 64, False, 403, None, FA3),
    Rate("flash2", 90, 64, False, 324, None, FA3),
    Rate("aten_flash", 90, 64, False, 324, None, FA3),
    Rate("flash3", 90, 128, False, 648, 561, FA3),
    Rate("flash3", 90, 128, False, 639, 561, TRITONBENCH),
    Rate("flash3", 90, 128, True, 616, None, FA3),
    Rate("cudnn", 90, 128, False, 595, 516, FA3),
    Rate("cudnn", 90, 128, True, 539, None, FA3),
    Rate("triton", 90, 128, False, 395, None, FA3),
    Rate("triton", 90, 128, True, 378, None, FA3),
    Rate("flash2", 90, 128, False, 370, 322, FA3),
    Rate("flash2", 90, 128, True, 335, None, FA3),
    Rate("aten_flash", 90, 128, False, 370, 322, FA3),
    Rate("aten_flash", 90, 128, True, 335, None, FA3),
)

ON_CPU = ("native", "aten", "blockwise", "reference")  # Triton runs there too, through its interpreter: by name
UNTIMED = ("triton", "flash4", "flash3", "cudnn", "flash2", "aten_flash")


@lru_cache(256)
def order(ask: Ask) -> tuple[str, ...]:
    """Names of all kernels for a call's device, best first, whatever they refuse.

    Kernels with rates for the device's capability and the head dim come by them; the others after them, Triton first:
    a kernel of another library comes before it only where rows say so. Kernels in plain torch come last.
    """
    if ask.device != "cuda":
        return ON_CPU
    cost = {name: seconds for name in UNTIMED if (seconds := _seconds(name, ask)) is not None}
    timed = sorted(cost, key=lambda name: cost[name])
    first = () if "triton" in cost else ("triton",)
    rest = (name for name in UNTIMED if name not in cost and name not in first)
    return (*first, *timed, *rest, "blockwise", "reference")


def _seconds(name: str, ask: Ask) -> float | None:
    """Time of a forward, and of a backward if one follows, by 10^12 operations of the forward; None without rows."""
    dims = sorted({r.dim for r in RATES if r.capability == ask.capability})
    bucket = next((d for d in dims if d >= max(ask.dim, ask.v_dim)), None)
    rows = [r for r in RATES if (r.kernel, r.capability, r.dim) == (name, ask.capability, bucket)]
    if not rows:
        return None
    times = [1 / r.forward + (2.5 / (r.backward or r.forward) if ask.grads else 0.0) for r in rows]
    return sum(times) / len(times)
