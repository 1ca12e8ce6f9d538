"""Forms: the axes of a tensor as products of named dimensions, ``"(b t) s c"``, in einops' notation.

einops parses forms and splits and merges grouped axes. This file adds the sizes that a rank's tensor must have when one
of the dimensions is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from einops import EinopsError, rearrange
from einops.parsing import ParsedExpression
from torch import Tensor

REMEDY = 'write names, groups in parentheses, 1, and ... at the end, as in "(b t) s c ..."'


@dataclass(frozen=True)
class Form:
    """The axes of a tensor, each a product of names from slow to fast; an axis without names has one element.

    open: further axes of any size may follow, written "...". names: all names, in order. grouped: names that share an
    axis. apart: the form with one axis per name, ``"b t s c"`` for ``"(b t) s c"``.
    """

    text: str
    axes: tuple[tuple[str, ...], ...]
    open: bool
    names: tuple[str, ...]
    grouped: tuple[str, ...]
    apart: str

    def index(self, name: str) -> int:
        """The axis of a name after `unfold`. Raises ValueError for a name that is not in the form."""
        if name not in self.names:
            raise ValueError(f'dimension "{name}" is not in "{self.text}"; give one of {list(self.names)}')
        return self.apart.split().index(name)

    def check(self, shape: Sequence[int], dims: Mapping[str, int], what: Callable[[], str]) -> None:
        """Check that a tensor of this shape fits the form.

        dims: the known sizes; an axis with a single unknown name may have any size. what: returns the tensor's name for
        an error; called only then, since compiled graphs could not call it.

        Raises: ValueError naming the axis that does not fit.
        """
        count = len(self.axes)
        if len(shape) < count or (len(shape) > count and not self.open):
            raise ValueError(f'{what()} has shape {list(shape)}, which does not fit the form "{self.text}"')
        for n, (axis, size) in enumerate(zip(self.axes, shape)):
            unknown = [name for name in axis if name not in dims]
            if unknown and len(axis) > 1:
                raise ValueError(
                    f'"{self.text}" groups {unknown} of unknown size with other dimensions; give their sizes in dims'
                )
            expected = size if unknown else prod([dims[name] for name in axis])
            if size != expected:
                factors = " x ".join(f"{name}={dims[name]}" for name in axis) or "1"
                raise ValueError(
                    f'{what()} has shape {list(shape)}; axis {n} of "{self.text}" must have {expected} elements here '
                    f"({factors}), not {size}"
                )

    def unfold(self, x: Tensor, dims: Mapping[str, int]) -> Tensor:
        """A tensor of this form with one axis per name. dims: the sizes of names that share an axis."""
        if not self.grouped:
            return x
        return rearrange(x, f"{self.text} -> {self.apart}", **{name: dims[name] for name in self.grouped})

    def fold(self, x: Tensor) -> Tensor:
        """The inverse of `unfold`."""
        return rearrange(x, f"{self.apart} -> {self.text}") if self.grouped else x


@lru_cache(maxsize=1024)
def form_of(text: str) -> Form:
    """The form written as text.

    Raises: ValueError for text that does not parse, a repeated name, a number, or "..." before the end.
    """
    try:
        parsed = ParsedExpression(text)
    except EinopsError as error:
        raise ValueError(f'"{text}" is not a form: {error}; {REMEDY}') from None
    open = (
        parsed.has_ellipsis and not parsed.has_ellipsis_parenthesized and not isinstance(parsed.composition[-1], list)
    )
    axes = parsed.composition[:-1] if open else parsed.composition
    if not axes or open != parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
        raise ValueError(f'"{text}" is not a form; {REMEDY}')
    named = tuple(tuple(axis) for axis in axes)
    names = tuple(name for axis in named for name in axis)
    grouped = tuple(name for axis in named for name in axis if len(axis) > 1)
    apart = [name for axis in named for name in (axis or ("1",))]
    return Form(text, named, open, names, grouped, " ".join([*apart, "..."] if open else apart))
