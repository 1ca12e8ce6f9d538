"""The parts of recurrent kernels on one device, with every gradient."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.mask import Mask
from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import Recurrence, RecurrentKernel
from seqpar.kernels.recurrent.reference import TokenByToken
from seqpar.testing import relative_rms
from tests.ops.recurrent.cases import Family

COUNTS, EXPORTED = np.array([70, 1, 130, 64, 15]), np.array([0, 2, 3])  # rows of runs, and whose states are exported


def parts(
    kernel: RecurrentKernel, family: Family, dtype: torch.dtype = torch.float64, *, held: torch.dtype | None = None,
    counts: np.ndarray = COUNTS, exported: np.ndarray = EXPORTED,
) -> list[Tensor]:  # fmt: skip
    """States and maps of the exported runs, out and the states that are left, then the gradients of all inputs.

    dtype: of q, k and v, whose values ``held`` can hold.
    """
    g, wide = torch.Generator().manual_seed(0), acc_dtype(dtype)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    inputs = family.inputs(Mask(counts), 0, held or dtype)[:5]
    rows = [None if x is None else x.to(t).requires_grad_() for x, t in zip(inputs, [dtype] * 3 + [wide] * 2)]
    entering = draw(len(counts), family.heads, family.dim, family.values).to(wide).requires_grad_()
    q, k, v, decay, beta = (None if x is None else x.to(wide) if kernel.casts else x for x in rows)
    tables = kernel.tables(counts, exported, torch.device("cpu"))
    prepared = kernel.prepare(Recurrence(q, k, v, decay, beta, family.dim**-0.5), tables)
    results = [*kernel.leave(prepared, entering[exported]), *kernel.compute(prepared, entering)]
    results[2] = results[2].to(dtype)
    sum((x * draw(*x.shape).to(x.dtype)).sum() for x in results).backward()
    grads = [x.grad for x in (*rows, entering) if x is not None]
    return [x.detach().double() for x in (*results, *grads)]


def errors(kernel: RecurrentKernel, family: Family, dtype: torch.dtype, **runs: np.ndarray) -> list[float]:
    """The relative RMS errors of results beside the token-by-token reference in float64."""
    exact = parts(TokenByToken(), family, held=dtype, **runs)
    found = parts(kernel, family, dtype, **runs)
    return [relative_rms(x, y) if y.any() else float(x.abs().max()) for x, y in zip(found, exact, strict=True)]
