"""Tensors inside arguments and outputs: in lists and dicts, and in objects of users' own classes."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from seqpar.private.torch import tree_leaves, tree_map

DEPTH = 4  # levels of nested objects that are opened


def leaves(value: Any, depth: int = DEPTH) -> list[Any]:
    """The contents of a value in order, with those of data classes, namespaces and custom dicts."""
    flat = []
    for leaf in tree_leaves(value):
        names = _attributes(leaf) if depth else ()
        flat += leaves([getattr(leaf, name) for name in names], depth - 1) if names else [leaf]
    return flat


def substituted(value: Any, others: Mapping[int, Tensor], depth: int = DEPTH) -> Any:
    """The value with some tensors replaced, by id; objects that hold one are copied."""

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
    """The attributes that hold an object's contents; empty for an object that is not opened."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return tuple(field.name for field in fields(leaf) if hasattr(leaf, field.name))
    if isinstance(leaf, SimpleNamespace):
        return tuple(vars(leaf))
    return ("data",) if isinstance(leaf, UserDict) else ()
