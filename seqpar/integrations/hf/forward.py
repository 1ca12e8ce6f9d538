"""A forward in progress: what mask functions and layers of a parallel model look up in their thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.integrations.hf.mask import Rule, UnsupportedMask
from seqpar.plan import Plan


def planned(plan: Plan, rule: Rule, *, stated: bool = False) -> Plan:
    """The plan with the mask of a layer, as of `Rule.under`; cached. Raises: UnsupportedMask."""
    if plan.kv_layout is not plan.layout:
        raise UnsupportedMask("a model has its keys where its queries are, and the plan has a kv_layout")
    key = ("rule", rule, stated)
    return plan.memo(key, lambda: plan.with_mask(rule.under(plan.mask, stated=stated)))  # type: ignore[no-any-return]


class Forward(NamedTuple):
    """State of a forward pass other than the plan. make: returns the plan for a layer's rule.

    blocked: the same for a rule with blocks and the number of each row's block; None where blocks are not served.
    note: before rows are shared, returns the placeholder of a mask, of its function, the padding mask and a config.
    """

    make: Callable[[Plan, Rule], Plan] = planned
    blocked: Callable[[Plan, Rule, Tensor], Plan] | None = None
    padded: bool = False  # whether padding in a two-dimensional mask has been removed already
    note: Callable[[Callable[..., Any], Tensor | None, Any], Any] | None = None
    longest: int = 0  # positions of the longest row of all ranks' batches, where rotary embeddings depend on it
    masks: Tensor | None = None  # of each row, the share of mask tokens in its row of the batch, where that scales it
    drops: bool = True  # whether attention drops pairs in training


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
    """The forward of a parallel model that this thread is in; the modules that call attention, while that is asked."""

    state: Forward | None = None
    callers: set[nn.Module] | None = None


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


@contextmanager
def called_by(modules: set[nn.Module]) -> Iterator[None]:
    """A block that adds the modules that call attention in this thread."""
    before, _thread.callers = _thread.callers, modules
    try:
        yield
    finally:
        _thread.callers = before


def note_caller(module: nn.Module) -> None:
    """A module calls attention: tell the `called_by` block that this thread is in, if any."""
    if _thread.callers is not None:
        _thread.callers.add(module)


def current() -> Forward | None:
    """The forward pass of a parallel model that this thread is in, if any."""
    return _thread.state


def inside() -> bool:
    """Whether this thread is in a forward pass of a parallel model."""
    return _thread.state is not None


def longest() -> int | None:
    """The longest position + 1 of the forward pass that this thread is in; None outside of all."""
    state = _thread.state
    return None if state is None else state.longest


def dropped(probability: float) -> float:
    """The probability with which a layer drops pairs in the forward pass that this thread is in."""
    if not probability or torch.compiler.is_compiling():
        return probability
    state = _thread.state
    return probability if state is None or state.drops else 0.0


def making() -> Callable[[Plan, Rule], Plan]:
    """What returns the plan of a layer's rule: of the forward pass that this thread is in, if any."""
    state = _thread.state
    return planned if state is None else state.make  # type: ignore[no-any-return]
