"""Cases of recurrent kernels on one device, run through a kernel, with every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from seqpar.kernels import acc_dtype
from seqpar.kernels.recurrent import KERNELS, Recurrence, RecurrentKernel
from seqpar.testing import relative_rms

REFERENCE = KERNELS["reference"]


@dataclass(frozen=True)
class Case:
    """Runs of so many rows, of which every second one is exported."""

    runs: tuple[int, ...] = (70, 5, 9)
    decay: str = "scalar"
    beta: bool = True
    dim: int = 16
    values: int = 16
    groups: int = 1
    heads: int = 2
    strength: float = 0.3
    dtype: torch.dtype = torch.float32

    @property
    def exported(self) -> np.ndarray:
        return np.arange(len(self.runs))[::2]

    def inputs(self, seed: int = 0) -> list[Tensor | None]:
        """q, k, v, decay, beta and entering states, with values that the dtypes hold."""
        g = torch.Generator().manual_seed(seed)
        n, h, low, wide = sum(self.runs), self.heads, self.dtype, acc_dtype(self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=g)

        decays = {"none": None, "scalar": (n, h), "channel": (n, h, self.dim)}[self.decay]
        uniform = [torch.rand(*s, dtype=torch.float64, generator=g) for s in ((n, h), decays or (1,))]
        return [
            normal(n, self.groups, self.dim).to(low),
            normalize(normal(n, self.groups, self.dim), dim=-1).to(low),
            normal(n, h, self.values).to(low),
            (-self.strength * uniform[1]).to(wide) if decays else None,
            uniform[0].to(wide) if self.beta else None,
            normal(len(self.runs), h, self.dim, self.values).to(wide),
        ]

    def weights(self) -> list[Tensor]:
        """Gradients of left states, their maps, out, and all left states."""
        g = torch.Generator().manual_seed(7)
        e, r, h, k, v = len(self.exported), len(self.runs), self.heads, self.dim, self.values
        maps = [e, h, k, k] if self.beta else [e, h, k] if self.decay == "channel" else [e, h]
        shapes = [e, h, k, v], maps, [sum(self.runs), h, v], [r, h, k, v]
        made = [torch.randn(*shape, dtype=torch.float64, generator=g) for shape in shapes]
        return [*made[:2], made[2].to(self.dtype), made[3]]


def results(kernel: RecurrentKernel, case: Case, inputs: list[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Left states, maps, out, all left states, and the gradients of the inputs that there are. dtype: of q, k and v."""
    wide, counts = acc_dtype(dtype), np.array(case.runs)
    kinds = [dtype] * 3 + [wide] * 3
    leaves = [None if x is None else x.to(t).requires_grad_() for x, t in zip(inputs, kinds, strict=True)]
    given = [x.to(wide) if x is not None and kernel.casts else x for x in leaves]
    prepared = kernel.prepare(
        Recurrence(*given[:5], 0.3),  # type: ignore[arg-type]
        kernel.tables(counts, case.exported, torch.device("cpu")),
    )
    entering = given[5]
    assert entering is not None
    made = [*kernel.leave(prepared, entering[torch.from_numpy(case.exported)]), *kernel.compute(prepared, entering)]
    made[2] = made[2].to(dtype)
    weights = [w.to(x.dtype) for w, x in zip(case.weights(), made, strict=True)]
    # what no gradient reaches is not differentiable: maps without decays
    pairs = [(x, w) for x, w in zip(made, weights, strict=True) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for x, _ in pairs], [x for x in leaves if x is not None], [w for _, w in pairs], allow_unused=True
    )
    return [x.detach() for x in (*made, *grads)]


def errors(kernel: RecurrentKernel, case: Case, seed: int = 0) -> list[float]:
    """The relative RMS errors of results beside the token-by-token reference in float64."""
    inputs = case.inputs(seed)
    exact = results(REFERENCE, case, inputs, torch.float64)
    found = results(kernel, case, inputs, case.dtype)
    return [relative_rms(x.double(), y) if y.any() else float(x.abs().max()) for x, y in zip(found, exact, strict=True)]
