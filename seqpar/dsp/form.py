"""How the axes of a tensor are made of named dimensions: ``"(b t) s c"``, in the notation of einops.

einops parses the forms, takes grouped axes apart and puts them together again. What is said here is what it does not
know: which sizes a rank's tensor must have, where one of the dimensions is sharded.
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
    """The axes of a tensor, each the product of its names from slow to fast; an axis without names has one element.

    open: more axes of any size may follow, written "...". names: all of them, in order. grouped: those that share an
    axis. apart: the form with an axis for every name, ``"b t s c"`` of ``"(b t) s c"``.
    """

    text: str
    axes: tuple[tuple[str, ...], ...]
    open: bool
    names: tuple[str, ...]
    grouped: tuple[str, ...]
    apart: str

    def index(self, name: str) -> int:
        """The axis of a name when every axis is taken apart. Raises ValueError for a name that is not in the form."""
        if name not in self.names:
            raise ValueError(f'dimension "{name}" is not in "{self.text}"')
        return self.apart.split().index(name)

    def check(self, shape: Sequence[int], dims: Mapping[str, int], what: Callable[[], str]) -> None:
        """Return if a tensor of this shape is of the form.

        dims: sizes that are known; an axis of one name that is not among them may have any size. what: names the
        tensor in an error, and is called for nothing else, as compiled graphs could not.

        Raises: ValueError naming the axis that does not fit.
        """
        count = len(self.axes)
        if len(shape) < count or (len(shape) > count and not self.open):
            raise ValueError(f'{what()} has shape {list(shape)}, which is not of the form "{self.text}"')
        for n, (axis, size) in enumerate(zip(self.axes, shape)):
            unknown = [name for name in axis if name not in dims]
            if unknown and len(axis) > 1:
                raise ValueError(
                    f'"{self.text}" has {unknown} beside other dimensions; give their sizes among the dims'
                )
            expected = size if unknown else prod([dims[name] for name in axis])
            if size != expected:
                factors = " x ".join(f"{name}={dims[name]}" for name in axis) or "1"
                raise ValueError(
                    f'{what()} has shape {list(shape)}; axis {n} of "{self.text}" must have {expected} elements here '
                    f"({factors}), not {size}"
                )

    def unfold(self, x: Tensor, dims: Mapping[str, int]) -> Tensor:
        """A tensor of the form with an axis for every name. dims: the sizes of those that share an axis."""
        if not self.grouped:
            return x
        return rearrange(x, f"{self.text} -> {self.apart}", **{name: dims[name] for name in self.grouped})

    def fold(self, x: Tensor) -> Tensor:
        """The inverse of `unfold`."""
        return rearrange(x, f"{self.apart} -> {self.text}") if self.grouped else x


@lru_cache(maxsize=1024)
def form_of(text: str) -> Form:
    """The form that a text says.

    Raises: ValueError for what is not one, a name twice, a number, or "..." elsewhere than at the end.
    """
    try:
        parsed = ParsedExpression(text)
    except EinopsError as error:
        raise ValueError(f'"{text}" is no form: {error}; {REMEDY}') from None
    open = (
        parsed.has_ellipsis and not parsed.has_ellipsis_parenthesized and not isinstance(parsed.composition[-1], list)
    )
    axes = parsed.composition[:-1] if open else parsed.composition
    if not axes or open != parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
        raise ValueError(f'"{text}" is no form; {REMEDY}')
    named = tuple(tuple(axis) for axis in axes)
    names = tuple(name for axis in named for name in axis)
    grouped = tuple(name for axis in named for name in axis if len(axis) > 1)
    apart = [name for axis in named for name in (axis or ("1",))]
    return Form(text, named, open, names, grouped, " ".join([*apart, "..."] if open else apart))
