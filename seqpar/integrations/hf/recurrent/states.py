"""States of recurrent layers in a forward with a cache that is split over ranks. They are whole on every rank.

New tokens that are shared out enter as any rows of a plan do, and the rank of a sequence's last row gives its state to
the others. Few new tokens are packed, and computed on every rank::

    many   rows of a rank ──► mixer, over all ranks ──► its rows; the state after each sequence, from one rank to all
    few    [B, S]         ──► mixer, on this rank   ──► [B, S];   the state after each sequence

The state of linear attention is [H, K, V], that of a filter of W taps the last W - 1 rows that it read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from seqpar import recurrent
from seqpar.comm import Comm
from seqpar.facts.intervals import edges, expand
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.integrations.hf.forward import current
from seqpar.ops import unshard
from seqpar.ops.core.device import autocasts
from seqpar.ops.recurrent import conv as filters
from seqpar.ops.recurrent.rows import rank_runs
from seqpar.plan import Plan

FILTER, LINEAR = "filter", "linear"
SILU = ("silu", "swish")  # two names of one function, which `causal_conv1d` has inside
Stored = dict[tuple[int, str], Tensor]  # by layer and kind, [sequences, ...]


class MixerStates:
    """The states that enter the mixers of a forward, and those that leave them, in `after`.

    before: of earlier tokens. real [B, S]: which new tokens are no padding. plan: of the packed new tokens, if they are
    shared out over `comm`; None if every rank computes all of them, and `comm` has one rank.
    """

    def __init__(self, before: Mapping[tuple[int, str], Tensor], real: Any, plan: Plan | None, comm: Comm) -> None:
        self.before, self.real, self.comm, self._plan = before, real, comm, plan
        self.after: Stored = {}
        self._layer = -1

    @cached_property
    def plan(self) -> Plan:
        """The plan of the packed new tokens of sequences that have some."""
        return alone(tuple(self.lengths.tolist())) if self._plan is None else self._plan

    @cached_property
    def lengths(self) -> Ints:
        """New tokens of each sequence that has some."""
        new = self.real.sum(1)
        return new[new > 0]  # type: ignore[no-any-return]

    def mixed(self, function: Callable[..., Any], mixer: nn.Module, hidden: Tensor, plan: Tensor) -> Any:
        """What a function of `MIXERS` returns for hidden states [1, T, hidden] of a plan, or [B, S, hidden]."""
        layer: Any = mixer.layer_idx
        self._layer = layer
        if self._plan is not None:
            return function(mixer, hidden, plan)
        at = torch.from_numpy(np.flatnonzero(self.real)).to(hidden.device)
        out = function(mixer, hidden.flatten(0, 1)[at][None], plan)
        rows, *rest = [out] if isinstance(out, Tensor) else out
        rows = rows.new_zeros(self.real.size, rows.shape[-1]).index_copy(0, at, rows[0]).view(*hidden.shape[:2], -1)
        return rows if isinstance(out, Tensor) else (rows, *rest)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """`seqpar.recurrent.causal_conv1d` behind the rows of a filter's state."""
        x, weight, bias = autocasts([x, weight, bias])
        plan, rank, reach = self.plan, self.comm.rank, weight.shape[1] - 1
        own, offsets = rank_runs(plan, rank), edges(self.lengths)
        state = self._entering(FILTER)
        if state is None:
            state = x.new_zeros(self.lengths.size, reach, x.shape[1])
        before = recurrent.halo(x, plan, self.comm, reach=reach)
        at = (own.positions[own.starts[:-1]] - offsets[own.documents])[:, None] + np.arange(reach)
        run, row = np.nonzero(at < reach)  # of halos that begin before the new tokens
        before[run, row] = state[own.documents[run], at[run, row]].to(x.dtype)
        rows = filters.RowsWithHalo.of(plan, rank, reach)
        y = filters.convolved(x, weight, bias, before.flatten(0, 1), rows, activation)
        last = np.minimum(self.lengths, reach)
        read = rows_at(x, plan, self.comm, expand(offsets[1:] - last, last))
        at = self.lengths[:, None] + np.arange(-reach, 0)
        old = np.arange(last.size)[:, None] * reach + at + reach
        new = last.size * reach + (np.cumsum(last)[:, None] + np.arange(-reach, 0))
        self._leaves(FILTER, torch.cat([state.flatten(0, 1), read])[np.where(at < 0, old, new)])
        return y

    def linear(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`seqpar.recurrent.linear_attention` from the states before, on."""
        how = {"initial_state": self._entering(LINEAR), "return_state": True}
        out, states = recurrent.linear_attention(q, k, v, self.plan, self.comm, **how, **options)
        owner = self.plan.layout.owner()[np.cumsum(self.lengths) - 1]
        every = of_all(states.states.flatten(1), owner, self.comm)
        self._leaves(LINEAR, every.view(-1, *states.states.shape[1:]))
        return out  # type: ignore[no-any-return]

    def _entering(self, kind: str) -> Tensor | None:
        """The states before, of sequences that have new tokens."""
        before = self.before.get((self._layer, kind))
        return None if before is None else before[np.flatnonzero(self.real.any(1))]

    def _leaves(self, kind: str, states: Tensor) -> None:
        """Note the states after the new tokens; sequences without new tokens keep theirs."""
        key = self._layer, kind
        if key in self.after:
            raise NotImplementedError(f"layer {key[0]} has two recurrences in a forward, which a split cache refuses")
        kept = self.before.get(key)
        whole = states.new_zeros(len(self.real), *states.shape[1:]) if kept is None else kept.clone()
        whole[np.flatnonzero(self.real.any(1))] = states
        self.after[key] = whole


def states_of() -> MixerStates | None:
    """The states of the forward with a split cache that this thread is in, if any."""
    state = None if torch.compiler.is_compiling() else current()
    return None if state is None else state.states


def convolved(conv: nn.Conv1d, x: Tensor, plan: Tensor, activation: str | None = None) -> Tensor:
    """This rank's rows [T, C] through a module's causal depthwise filters, in x's dtype.

    As in transformers the product is of the filters' dtype, or of autocast's. plan: the handle of a plan and a comm.
    """
    weight = conv.weight.squeeze(1)
    inside = "silu" if activation in SILU else None
    if (states := states_of()) is not None:
        y = states.convolved(x.to(weight.dtype), weight, conv.bias, inside)
    else:
        y = recurrent.causal_conv1d(x.to(weight.dtype), weight, conv.bias, plan, activation=inside)
    return (y if inside or activation is None else ACT2FN[activation](y)).to(x.dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, **options: Any) -> Tensor:
    """`seqpar.recurrent.linear_attention`, from the states of a split cache where there is one."""
    if (states := states_of()) is not None:
        return states.linear(q, k, v, **options)
    return recurrent.linear_attention(q, k, v, plan, **options)  # type: ignore[return-value]


@lru_cache(maxsize=8)
def alone(lengths: tuple[int, ...]) -> Plan:
    """The plan of some documents on one rank."""
    return Plan(Mask(lengths), Layout.contiguous(sum(lengths), 1))


def of_all(x: Tensor, owner: Ints, comm: Comm) -> Tensor:
    """Rows [N, ...] on every rank, from those [n, ...] that each has. A collective. owner [N]: the rank of each row."""
    if comm.size == 1:
        return x
    places = Layout([np.flatnonzero(owner == rank) for rank in range(comm.size)])
    return unshard(x, Plan(Mask([owner.size]), places), comm)


def rows_at(x: Tensor, plan: Plan, comm: Comm, positions: Ints) -> Tensor:
    """The rows at ascending positions of a plan, on every rank, from this rank's rows x [T, ...]. A collective."""
    owner, own = plan.layout.owner()[positions], plan.positions(comm.rank)
    order = np.argsort(own, kind="stable")
    rows = order[np.searchsorted(own, positions[owner == comm.rank], sorter=order)]
    return of_all(x[torch.from_numpy(rows).to(x.device)], owner, comm)
