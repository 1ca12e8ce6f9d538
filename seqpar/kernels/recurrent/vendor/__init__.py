"""Other libraries' kernels of recurrences.

mamba_ssm's ``mamba_chunk_scan_combined`` is not among them. It multiplies values by the dt that its decays come from,
so given decays and values mean ``dt = -decay`` and ``v / dt``: the gradient of a decay is then the difference of two
sums that are larger by 1 / dt, and in 16 bits little of it is left. flash-linear-attention's ``chunk_simple_gla``
computes the same recurrence.
"""

from __future__ import annotations

from seqpar.kernels.recurrent.vendor.fla import FlashLinear

__all__ = ["FlashLinear"]
