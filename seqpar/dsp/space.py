"""The dimensions of one forward, and the part of a sharded dimension that each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp.form import Form, form_of

Sharding = str | None  # the sharded dimension; None: every rank has the whole


def shares(size: int, ranks: int) -> list[int]:
    """How many of `size` elements each rank holds: consecutive ones, counts differ by at most one, and may be 0.

    The shares of `Layout.contiguous`.
    """
    edges = [rank * size // ranks for rank in range(ranks + 1)]
    return [stop - start for start, stop in zip(edges, edges[1:])]


class Space:
    """Global sizes of named dimensions, and the comm over which one of them is sharded. A value, made per forward.

    dims: name -> global size, at least 1, equal on all ranks. Other names in forms, such as channels, have any size and
    are never sharded. key: dims, ranks and this rank, as a value.

    Raises: ValueError if a size is not an integer of at least 1, or a name is not an identifier.
    """

    def __init__(self, dims: Mapping[str, int], comm: Comm) -> None:
        for name, size in dims.items():
            if not isinstance(name, str) or not name.isidentifier() or type(size) is not int or size < 1:
                raise ValueError(f"dims must be names with sizes of at least 1, got {name!r}: {size!r}")
        self.dims, self.comm = dict(dims), comm
        self.key = tuple(self.dims.items()), comm.size, comm.rank

    def __repr__(self) -> str:
        return f"Space({self.dims}, {self.comm.size} ranks)"

    def shares(self, dim: str) -> list[int]:
        """How many elements of a dimension each rank holds if it is sharded.

        Raises: ValueError for an unknown dimension.
        """
        if dim not in self.dims:
            raise ValueError(f'"{dim}" is not a dimension of {self}; give one of these')
        return shares(self.dims[dim], self.comm.size)

    def local(self, sharded: Sharding) -> dict[str, int]:
        """The sizes on this rank. sharded: the sharded dimension, or None."""
        return self.dims if sharded is None else self.dims | {sharded: self.shares(sharded)[self.comm.rank]}

    def start(self, dim: str) -> int:
        """The first element of this rank's share."""
        return sum(self.shares(dim)[: self.comm.rank])

    def check(self, x: Tensor, form: str, sharded: Sharding, what: str = "x") -> Form:
        """The form as a `Form`, after checking that a tensor on this rank fits it under this sharding.

        Only the shape is checked: dimensions of equal local size differ by nothing but the order of stages.

        Raises: ValueError naming the axis, its expected size on this rank, and its size.
        """
        return fitting_form(form, shape_of(x, what), *self.key, sharded, what)

    def unfold(self, x: Tensor, form: str, sharded: Sharding, what: str = "x") -> Tensor:
        """The tensor with one axis per named dimension. Raises: as `check`."""
        return self.check(x, form, sharded, what).unfold(x, self.local(sharded))


def shape_of(x: object, what: str) -> tuple[int, ...]:
    """The shape of a tensor. Raises: ValueError for anything else."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{what} must be a tensor, got {x!r:.200}")
    return tuple(x.shape)


@lru_cache(maxsize=4096)
def fitting_form(
    text: str,
    shape: Sequence[int],
    dims: Sequence[tuple[str, int]],
    ranks: int,
    rank: int,
    sharded: Sharding,
    what: str,
) -> Form:  # fmt: skip
    """`Space.check` for a shape, in the space whose key is these dims, ranks and rank."""
    form, sizes = form_of(text), dict(dims)
    if sharded is not None:
        if sharded not in sizes:
            raise ValueError(f'"{sharded}" is not a dimension of {sizes}; give one of these, or None')
        sizes[sharded] = shares(sizes[sharded], ranks)[rank]

    def described() -> str:
        where = "whole" if sharded is None else f'"{sharded}" sharded over {ranks} ranks'
        return f"{what}, with {where} of {dict(dims)},"

    form.check(shape, sizes, described)
    return form
