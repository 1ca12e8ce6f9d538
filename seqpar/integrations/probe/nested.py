"""Tensors in what a model gets and returns: in lists and dicts, and in the batches and outputs of people's own."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

DEPTH = 4  # of objects in objects that are opened


def leaves(value: Any, depth: int = DEPTH) -> list[Any]:
    """What a value holds, in order: also of data classes, namespaces and dicts of a class of its own."""
    flat = []
    for leaf in tree_leaves(value):
        names = _attributes(leaf) if depth else ()
        flat += leaves([getattr(leaf, name) for name in names], depth - 1) if names else [leaf]
    return flat


def substituted(value: Any, others: Mapping[int, Tensor], depth: int = DEPTH) -> Any:
    """The value with other tensors in place of some, by their ids; objects that hold one are copied."""

    def other(leaf: Any) -> Any:
        if id(leaf) in others:
            return others[id(leaf)]
        names = _attributes(leaf) if depth else ()
        if not names or not any(id(x) in others for x in leaves(leaf, depth)):
            return leaf
        duplicate = copy.copy(leaf)
        for name in names:
            object.__setattr__(duplicate, name, substituted(getattr(leaf, name), others, depth - 1))
        return duplicate

    return tree_map(other, value)


def _attributes(leaf: Any) -> tuple[str, ...]:
    """The attributes with the contents of an object; none of an object that is not opened."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return tuple(field.name for field in fields(leaf) if hasattr(leaf, field.name))
    if isinstance(leaf, SimpleNamespace):
        return tuple(vars(leaf))
    return ("data",) if isinstance(leaf, UserDict) else ()
