"""A forward in progress: what layers of a parallel model look up in their thread, and the plans that it gives them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.data import Share
from seqpar.facts.mask import Mask
from seqpar.integrations.hf.mask import Blocks, MaskSummary, Rule, UnsupportedMask, stretches, united
from seqpar.ops.core.agreement import plan_key, remember
from seqpar.plan import Plan

BlocksOf = Callable[[Rule], tuple[Rule, Blocks | None]]
MakePlan = Callable[[Plan, Rule, Tensor | None], Plan]


def planned(plan: Plan, rule: Rule, ids: Tensor | None = None, *, stated: bool = False) -> Plan:
    """The plan with the mask of a layer, as of `Rule.under`; cached. Raises: UnsupportedMask, also for blocks."""
    if plan.kv_layout is not plan.layout:
        raise UnsupportedMask("a model has its keys where its queries are, and the plan has a kv_layout")
    key = ("rule", rule, stated)
    return plan.memo(key, lambda: plan.with_mask(rule.under(plan.mask, stated=stated)))  # type: ignore[no-any-return]


class Forward(NamedTuple):
    """State of a forward pass other than the plan.

    make: returns the plan for a layer's rule and the number of each row's block, as of `blocks_of`. note: before rows
    are shared, returns the placeholder of a mask, of its function, the padding mask and a config.
    """

    make: MakePlan = planned
    padded: bool = False  # whether padding in a two-dimensional mask has been removed already
    note: Callable[[Callable[..., Any], Tensor | None, Any], Any] | None = None
    longest: int = 0  # positions of the longest row of all ranks' batches, where rotary embeddings depend on it
    masks: Tensor | None = None  # of each row, the share of mask tokens in its row of the batch, where that scales it
    drops: bool = True  # whether attention drops pairs in training
    callers: set[nn.Module] | None = None  # collects the modules that call attention, in a trial
    attend: Callable[..., Tensor] | None = None  # computes attention to a cache that is split over ranks
    states: Any = None  # the `MixerStates` of a forward with such a cache


class MaskPlaceholder(NamedTuple):
    """In place of a mask, until rows are shared: the padding mask [B, S] that was handed over with it, or None."""

    padding: Tensor | None


def padding_of(mask: Any) -> Tensor | None:
    """The padding mask in what a model of images hands to its text model, with masks of layers or without.

    Raises: NotImplementedError for masks that `Forward.note` did not see.
    """
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    if masks and all(isinstance(each, MaskPlaceholder) for each in masks):
        return masks[0].padding
    if isinstance(mask, dict):
        raise NotImplementedError("attention_mask has masks that were made elsewhere; give a mask [B, S] of 0 and 1")
    return mask


class _Thread(threading.local):
    """The forward of a parallel model that this thread is in."""

    state: Forward | None = None


_thread = _Thread()


@contextmanager
def during(state: Forward | None) -> Iterator[None]:
    """Make this the state of the thread's mask functions until the block ends."""
    before = _thread.state
    _thread.state = state
    try:
        yield
    finally:
        _thread.state = before


def current() -> Forward | None:
    """The forward pass of a parallel model that this thread is in, if any."""
    return _thread.state


def dropped(probability: float) -> float:
    """The probability with which a layer drops pairs in the forward pass that this thread is in."""
    if not probability or torch.compiler.is_compiling():
        return probability
    state = _thread.state
    return probability if state is None or state.drops else 0.0


class LayerPlans:
    """Makes the plans of layers, and remembers the rules that all ranks have used.

    who: the model's class. stated: whether plans state documents alone, as those of the planner of models do. blocks:
    the blocks of tokens that see each other whole under a rule, as the tokens of an image do, and the rule with them;
    None if there are none. rules: those of the forward under way or of the last one. known: those of any forward.
    """

    def __init__(self, who: str, comm: Comm, blocks: BlocksOf, *, stated: bool) -> None:
        self.who, self.comm, self.stated = who, comm, stated
        self.rules: list[Rule] = []
        self.known: set[Rule] = set()
        self._blocks = blocks

    def of(self, own: Share) -> MakePlan:
        """What returns the plan of a layer's rule for a share, in a new forward; with blocks, by a collective.

        All ranks have the share's plan and had the same rules before, so they derive the same plan for the rule and
        need not compare it.
        """
        self.rules = []

        def make(plan: Plan, rule: Rule, ids: Tensor | None) -> Plan:
            if ids is not None:
                return self._gathered(own, plan, rule, ids)
            layer_plan = self._layer(own, plan, rule)
            if rule in self.known:
                remember(self.comm, plan_key(layer_plan))
            self.known.add(rule)
            self.rules.append(rule)
            return layer_plan

        return make

    def _gathered(self, own: Share, plan: Plan, rule: Rule, ids: Tensor) -> Plan:
        """The plan of a share with a rule and the blocks of all ranks' rows. A collective."""
        numbers = ids[0, : plan.layout.tokens(self.comm.rank)].cpu().numpy().astype(np.int64)
        every = np.concatenate(self.comm.gather(f"{self.who}.forward: blocks of tokens", numbers))
        at = np.concatenate([plan.layout.positions(rank) for rank in range(self.comm.size)])
        lengths = plan.mask.lengths
        told = MaskSummary({}, *stretches(every[np.argsort(at)], np.repeat(np.arange(lengths.size), lengths)))
        blocks = united([told], [lengths])[1]
        if not blocks.starts.size:
            return self._layer(own, plan, rule._replace(block=""))
        layer_plan = self._blocked(own, plan, rule, blocks)
        remember(self.comm, plan_key(layer_plan))  # all ranks made it of the same numbers
        self.rules.append(rule)
        return layer_plan

    def _layer(self, own: Share, plan: Plan, rule: Rule) -> Plan:
        """The plan of a share with a rule, including masked-out tokens between others."""
        rule, blocks = self._blocks(rule)
        if blocks is not None:
            return self._blocked(own, plan, rule, blocks)
        layer_plan = planned(plan, rule, stated=self.stated)
        if own.places is None or not rule.local:
            return layer_plan
        window = (rule.left, None if rule.causal else rule.right)
        return plan.with_mask(own.mask_for(causal=rule.causal, window=window))

    def _blocked(self, own: Share, plan: Plan, rule: Rule, blocks: Blocks) -> Plan:
        if not self.stated and plan.mask != Mask(plan.mask.lengths):
            raise rule.unlike(plan.mask)
        if rule.chunk:
            raise NotImplementedError(f"a layer of {self.who} attends in chunks, and to whole images or prefixes")
        sides = (own.mask_for(causal=causal, window=(rule.left, None)) for causal in (False, True))
        return plan.with_mask(blocks.mask(rule, *sides))
