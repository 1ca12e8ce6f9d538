"""Modules with something around their forward, which can be taken off again and which copies of a model keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


class Wrapped:
    """A module's forward with something around it: ``around(module, forward, *args, **kwargs)``."""

    def __init__(self, module: nn.Module, around: Callable[..., Any]) -> None:
        self.module, self.forward, self.around = module, module.forward, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.around(self.module, self.forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        wrapped = object.__new__(Wrapped)
        wrapped.module, wrapped.around = copy.deepcopy(self.module, memo), self.around
        wrapped.forward = copy.deepcopy(self.forward, memo)
        return wrapped


class Parallelized:
    """A model some of whose modules are wrapped: ``undo()``, or the end of a block, restores them exactly.

    Raises: ValueError for a model of which a module is wrapped already.
    """

    def __init__(self, model: nn.Module, around: list[tuple[nn.Module, Callable[..., Any]]]) -> None:
        if any(isinstance(module.__dict__.get("forward"), Wrapped) for module in model.modules()):
            raise ValueError(f"this {type(model).__name__} is parallelized already; undo that first")
        self.model = model
        self.before = [module.__dict__.get("forward") for module, _ in around]
        self.wraps = [Wrapped(module, function) for module, function in around]
        for wrapped in self.wraps:
            wrapped.module.forward = wrapped  # type: ignore[method-assign, assignment]

    def undo(self) -> None:
        """Give every module its own forward back. A second time does nothing.

        Raises: RuntimeError, and leaves the model as it is, if somebody replaced a forward since.
        """
        if any(wrapped.module.__dict__.get("forward") is not wrapped for wrapped in self.wraps):
            raise RuntimeError("a forward was replaced after the model was parallelized; undo that first")
        for wrapped, before in zip(self.wraps, self.before, strict=True):
            if before is None:
                del wrapped.module.forward
            else:
                wrapped.module.forward = before  # type: ignore[method-assign]
        self.wraps, self.before = [], []

    def __enter__(self) -> Parallelized:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
