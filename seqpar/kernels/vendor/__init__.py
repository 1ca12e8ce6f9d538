"""Other libraries' kernels on a step's segments: torch's own, cuDNN, and FlashAttention 2, 3 and 4."""

from __future__ import annotations

from seqpar.kernels.vendor.aten import Aten, AtenFlash, CuDNN
from seqpar.kernels.vendor.flash import Flash2, Flash3, Flash4
from seqpar.kernels.vendor.library import Library, Results
from seqpar.kernels.vendor.segmented import Segmented

__all__ = ["Aten", "AtenFlash", "CuDNN", "Flash2", "Flash3", "Flash4", "Library", "Results", "Segmented"]
