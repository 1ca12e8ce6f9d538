"""Other libraries' kernels on a step's segments: torch's own, cuDNN, and FlashAttention 2, 3 and 4."""

from __future__ import annotations

from seqpar.kernels.vendor.aten import Aten
from seqpar.kernels.vendor.aten_flash import AtenFlash
from seqpar.kernels.vendor.cudnn import CuDNN
from seqpar.kernels.vendor.flash2 import Flash2
from seqpar.kernels.vendor.flash3 import Flash3
from seqpar.kernels.vendor.flash4 import Flash4
from seqpar.kernels.vendor.library import Library, Results
from seqpar.kernels.vendor.segmented import Segmented

__all__ = ["Aten", "AtenFlash", "CuDNN", "Flash2", "Flash3", "Flash4", "Library", "Results", "Segmented"]
