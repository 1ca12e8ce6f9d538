"""The recurrence token by token, as `seqpar.kernels.recurrent.protocol` defines it: exact, and slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.facts.intervals import edges
from seqpar.facts.value import Ints
from seqpar.kernels.recurrent.protocol import Recomputed, Recurrence


class TokenByToken(Recomputed):
    """All runs one after another, with matrices as maps of the delta rule."""

    name = "reference"
    casts = True

    def tables(self, counts: Ints, exported: Ints, device: torch.device) -> tuple[list[int], list[int]]:
        """The first row of each run, and the exported runs."""
        return edges(counts).tolist(), exported.tolist()

    def prepare(self, x: Recurrence, tables: Any) -> tuple[Recurrence, Any]:
        heads, groups = x.v.shape[1], x.k.shape[1]
        q, k = (y.repeat_interleave(heads // groups, 1) for y in (x.q, x.k))
        return x._replace(q=q, k=k), tables

    def leave(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor]:
        x, (edge, exported) = prepared
        heads, dim = x.k.shape[1:]
        states, maps = [], []
        for n, run in enumerate(exported):
            rows = slice(edge[run], edge[run + 1])
            states.append(_states(x, rows, entering[n])[-1])
            if x.beta is not None:
                eye = torch.eye(dim, dtype=x.k.dtype, device=x.k.device).expand(heads, dim, dim)
                silent = x._replace(v=x.v.new_zeros(x.v.shape[0], heads, dim))
                maps.append(_states(silent, rows, eye)[-1])
            elif x.decay is None:
                maps.append(x.k.new_zeros(heads))
            else:
                maps.append(_scaled(x.decay[rows].sum(0), x.rates))
        if not states:
            shape = [0, heads] if x.beta is None else [0, heads, dim, dim]
            if x.beta is None and x.decay is not None:
                shape = [0, *(x.decay.shape[1:] if x.rates is None else x.rates.shape)]
            return entering[:0], x.k.new_zeros(shape)
        return torch.stack(states), torch.stack(maps)

    def compute(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor]:
        x, (edge, _) = prepared
        out, left = [x.v[:0]], [entering[:0]]
        for run, (start, stop) in enumerate(zip(edge, edge[1:])):
            states = torch.stack(_states(x, slice(start, stop), entering[run]))
            out.append(x.scale * torch.einsum("thk,thkv->thv", x.q[start:stop], states))
            left.append(states[-1:])
        return torch.cat(out), torch.cat(left)


def _states(x: Recurrence, rows: slice, state: Tensor) -> list[Tensor]:
    """The state after each of the rows."""
    states = []
    for t in range(rows.start, rows.stop):
        if x.decay is not None:
            factor = _scaled(x.decay[t], x.rates).exp()
            state = factor[(..., *[None] * (3 - factor.dim()))] * state
        value = x.v[t]
        if x.beta is not None:
            value = x.beta[t][:, None] * (value - torch.einsum("hk,hkv->hv", x.k[t], state))
        state = state + x.k[t][:, :, None] * value[:, None]
        states.append(state)
    return states


def _scaled(decay: Tensor, rates: Tensor | None) -> Tensor:
    """Log decays of heads, or with rates of each row of their states."""
    return decay if rates is None else decay[:, None] * rates
