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

    def __reduce__(self) -> Any:
        """Raise, as a pickle of what is around a forward would be of no use."""
        raise unpicklable(type(self.module).__name__)


def refuse_twice(model: nn.Module) -> None:
    """Raise ValueError for a model of which a module is parallel already."""
    already = [
        type(module).__name__ for module in model.modules()
        if "_seqpar" in module.__dict__ or isinstance(module.__dict__.get("forward"), Wrapped)
    ]  # fmt: skip
    if already:
        within = "" if already[0] == type(model).__name__ else f" in {type(model).__name__}"
        raise ValueError(f"{already[0]}{within} is parallel already; call undo() of that handle first")


def unpicklable(name: str) -> NotImplementedError:
    """What to raise when a parallel model is pickled: its forward holds a comm, which is of this process."""
    return NotImplementedError(
        f"a pickle of a parallel {name}, as torch.save(model) makes it: its forward belongs to this process; save "
        "model.state_dict() or call save_pretrained(), or undo() first"
    )


class Parallelized:
    """A model some of whose modules are wrapped: ``undo()``, or the end of a block, restores them exactly.

    Raises: ValueError for a model of which a module is wrapped already.
    """

    def __init__(self, model: nn.Module, around: list[tuple[nn.Module, Callable[..., Any]]]) -> None:
        refuse_twice(model)
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
