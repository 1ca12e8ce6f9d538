"""Kernels of recurrences: linear attention, delta rules and state spaces over runs of rows."""

from seqpar.kernels.recurrent.chunked import Chunked
from seqpar.kernels.recurrent.protocol import Recurrence, RecurrentKernel
from seqpar.kernels.recurrent.reference import TokenByToken

KERNELS: dict[str, RecurrentKernel] = {"chunked": Chunked(), "reference": TokenByToken()}

__all__ = ["KERNELS", "Recurrence", "RecurrentKernel"]
