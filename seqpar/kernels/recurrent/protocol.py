"""The protocol of recurrent kernels. Rows come in *runs*, one after another; each run has a state that enters it.

Token by token, for each head, with a state S [K, V]::

    S <- exp(decay) S                        decay: one factor, or one for each row of S
    S <- S + k v^T                           without beta
    S <- S + k (beta (v - k^T S))^T          with beta, the delta rule
    out = scale q^T S

With *rates* [H, K] a token's one decay of a head is multiplied by the rate of each row of S (Mamba-1).

All of them are affine in the state that enters: a run leaves ``M S_in + S``. The work has three parts, so that
states can be exchanged between the second and the third::

    prepare   what does not depend on states
    leave     S and M of the runs whose states others need
    compute   out, and the state that each run leaves, from the states that enter

They are differentiable functions of PyTorch. Sums are in float32, or float64 for float64. Sources: Katharopoulos et al.
2020 (linear attention), Gu and Dao 2023 (Mamba), Dao and Gu 2024 (state spaces as attention), Yang et al. 2024 (gated
delta rule), Kimi Team 2025 (one factor for each row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.facts.value import Ints


class Recurrence(NamedTuple):
    """A call's rows, in the order of the runs, in the accumulation dtype; q, k and v as `RecurrentKernel.casts` says.

    q, k [T, G, K]; v [T, H, V]; H is a multiple of G, and head h reads group ``h // (H // G)``. decay, logarithms at or
    below 0: [T, H], [T, H, K] or None. beta [T, H] or None. rates [H, K] or None, with decays [T, H]: the logarithms
    are their products.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    scale: float
    rates: Tensor | None = None


class RecurrentSpec(NamedTuple):
    """What says whether a kernel can compute a call. dtype: of v. decay: "none", "scalar", "channel" or "rates"."""

    device: str
    dtype: torch.dtype
    dim: int
    values: int
    decay: str
    beta: bool


class RecurrentKernel(Protocol):
    """See the module.

    casts: q, k and v are cast to the accumulation dtype for it; else out has their own dtype too. keeps: how many
    tensors `keep` returns for `replay`.
    """

    name: str
    casts: bool
    keeps: int

    def refuses(self, spec: RecurrentSpec) -> str | None:
        """Why calls of this kind are refused, or None."""

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> Any:
        """The runs as a kernel wants them, made once for a plan.

        counts: rows of each run; they sum to T. exported: runs that later runs of their documents need, ascending.
        """

    def prepare(self, x: Recurrence, tables: Any) -> Any:
        """What does not depend on states."""

    def leave(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor]:
        """What exported runs leave from the states that enter them [exported, H, K, V], and their maps.

        Maps are logarithms of factors, [exported, H] or [exported, H, K], or with beta matrices [exported, H, K, K].
        """

    def compute(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor]:
        """out [T, H, V], and the states that all runs leave, [runs, H, K, V], from those that enter them."""

    def keep(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """What `compute` returns, and what `replay` takes."""

    def replay(self, prepared: Any, entering: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Results of `compute` for their gradients alone: they may hold any values. kept: may be empty."""


def with_identity(entering: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """States [S | I] from those that enter [runs, H, K, V], and values [v | 0], of which a run leaves [S | M]."""
    runs, heads, dim = entering.shape[:3]
    eye = torch.eye(dim, dtype=entering.dtype, device=entering.device).expand(runs, heads, dim, dim)
    return torch.cat([entering, eye], -1), torch.cat([values, values.new_zeros(*values.shape[:-1], dim)], -1)


class Recomputed(RecurrentKernel):
    """A kernel that computes all calls, and whose backward computes everything again."""

    keeps = 0

    def refuses(self, spec: RecurrentSpec) -> str | None:
        return None

    def keep(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        return *self.compute(prepared, entering), ()

    def replay(self, prepared: Any, entering: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.compute(prepared, entering)
