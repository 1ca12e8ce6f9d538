"""Forwards of modules with others around them; a copy of the whole model has them too, but not of a part of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from seqpar.ops.core.handles import uncompiled

Around = Callable[[nn.Module, str, Callable[..., Any], dict[str, Any]], Any]


class Replaced:
    """A module's forward: ``around(module, name, its own forward, arguments by name)``.

    Compilers leave it and what it calls alone. A copy of the module has its own forward; if again is given, which is
    called with the copy before its first forward, that puts others around it.
    """

    def __init__(
        self, module: nn.Module, name: str, around: Around, again: Callable[[nn.Module], object] | None = None
    ) -> None:
        self.module, self.own, self.again = module, module.__dict__.get("forward"), again
        inner = module.forward
        parameters = inspect.signature(inner).parameters.values()
        order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        what = name or type(module).__name__

        @uncompiled
        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if len(args) > len(order):
                raise ValueError(f"{what} got {len(args)} arguments by position, its forward names {order}")
            return around(module, name, inner, dict(zip(order, args)) | kwargs)

        self._call = call
        module.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self._call(args, kwargs)

    def undo(self) -> None:
        """Give the module its own forward back."""
        if self.own is None:
            del self.module.forward
        else:
            self.module.forward = self.own  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(self.module, self.own, self.again, memo)

    def __reduce__(self) -> NoReturn:
        _refuse()


class Later:
    """The forward of a copy until it is called: then ``again(module)`` comes first."""

    def __init__(self, module: nn.Module, own: Any, again: Callable[[nn.Module], object]) -> None:
        self.module, self.own, self.again = module, own, again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if self.module.__dict__.get("forward") is self:
            self.module.forward = self.own
            self.again(self.module)
        return self.module.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(self.module, self.own, self.again, memo)

    def __reduce__(self) -> NoReturn:
        _refuse()


def _copied(module: nn.Module, own: Any, again: Callable[[nn.Module], object] | None, memo: dict[int, Any]) -> Any:
    """The forward of a copy that is being made."""
    module = copy.deepcopy(module, memo)
    own = MethodType(type(module).forward, module) if own is None else copy.deepcopy(own, memo)
    return own if again is None else Later(module, own, again)


def _refuse() -> NoReturn:
    raise TypeError(
        "a model under dsp.parallelize cannot be pickled, as its comm cannot; save its state_dict, or undo first"
    )


class Hook:
    """A hook that does nothing in a copy of its module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        """Run it."""
        self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> NoReturn:
        _refuse()


def _nothing(*_: Any) -> None:
    return None
