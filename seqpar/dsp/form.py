"""How the axes of a tensor are made of named dimensions: ``"(b t) s c"``, in the notation of einops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

TOKEN = re.compile(r"\(([^()]*)\)|(\.\.\.)|([A-Za-z_]\w*)|(1)(?!\w)|(\S)")


@dataclass(frozen=True)
class Form:
    """The axes of a tensor, each the product of its names from slow to fast; () is an axis of one element.

    open: more axes of any size may follow, written "...".
    """

    text: str
    axes: tuple[tuple[str, ...], ...]
    open: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(name for axis in self.axes for name in axis)

    def index(self, name: str) -> int:
        """Where a name lies when every axis is taken apart. Raises ValueError for a name that is not there."""
        flat = [name for axis in self.axes for name in (axis or ("1",))]
        if name not in flat:
            raise ValueError(f'dimension "{name}" is not in "{self.text}"')
        return flat.index(name)

    def sizes(self, shape: Sequence[int], dims: Mapping[str, int], what: str) -> list[int]:
        """The size of every name when the axes of a tensor of this shape are taken apart.

        dims: sizes that are known; an axis of one name that is not among them may have any size.

        Raises: ValueError naming the axis that does not fit.
        """
        count = len(self.axes)
        if len(shape) < count or (len(shape) > count and not self.open):
            raise ValueError(f'{what} has shape {list(shape)}, which is not of the form "{self.text}"')
        found: list[int] = []
        for n, axis in enumerate(self.axes):
            if len(axis) == 1 and axis[0] not in dims:
                found.append(shape[n])
                continue
            unknown = [name for name in axis if name not in dims]
            if unknown:
                raise ValueError(
                    f'"{self.text}" has {unknown} beside other dimensions; give their sizes among the dims'
                )
            parts = [dims[name] for name in axis] or [1]
            expected = 1
            for size in parts:
                expected *= size
            if shape[n] != expected:
                made = " x ".join(f"{name}={dims[name]}" for name in axis) or "1"
                raise ValueError(
                    f'{what} has shape {list(shape)}; axis {n} of "{self.text}" must have {expected} elements here '
                    f"({made}), not {shape[n]}"
                )
            found += parts
        return found + list(shape[count:])

    def folded(self, sizes: Sequence[int]) -> list[int]:
        """The shape whose axes taken apart have these sizes."""
        shape, at = [], 0
        for axis in self.axes:
            size = 1
            for _ in axis or ("1",):
                size *= sizes[at]
                at += 1
            shape.append(size)
        return shape + list(sizes[at:])


@lru_cache(maxsize=1024)
def form_of(text: str) -> Form:
    """The form that a text says.

    Raises: ValueError for what is not one, a name twice, or "..." elsewhere than at the end.
    """
    axes: list[tuple[str, ...]] = []
    for group, dots, name, one, other in TOKEN.findall(text):
        if other or (axes and axes[-1] == ("...",)):
            raise ValueError(f'"{text}" is no form; write names, groups in parentheses, 1, and ... at the end')
        if group and not all(part.isidentifier() for part in group.split()):
            raise ValueError(f'"{text}" is no form: "({group})" must hold names')
        axes.append(("...",) if dots else (name,) if name else () if one else tuple(group.split()))
    dotted = bool(axes) and axes[-1] == ("...",)
    form = Form(text, tuple(axes[:-1] if dotted else axes), dotted)
    if len(set(form.names)) < len(form.names) or not axes:
        raise ValueError(f'"{text}" is no form: it is empty or has a name twice')
    return form
