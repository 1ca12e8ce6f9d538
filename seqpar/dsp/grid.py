"""Ranks in two dimensions: groups hold shares of one dimension throughout, and switch the others among themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import prod

import numpy as np
from einops import rearrange
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp.form import form_of
from seqpar.dsp.moves import count_once, gather, move, share_of, split
from seqpar.dsp.space import Sharding, Space
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import Plan

GridPosition = tuple[Sharding, Sharding]  # the sharding over outer, and over inner


def grid(comm: Comm, *, core: int) -> tuple[Comm, Comm]:
    """(outer, inner) comms of this rank: `core` consecutive ranks share attention; ranks at the same place switch.

        core=2 of 6 ranks   inner  0 1 | 2 3 | 4 5      outer  0 2 4 | 1 3 5

    Shard a dimension over inner first; for outer, its global size is then this rank's share, and outer shards and
    switches as if it were alone. No process group is created and nothing is sent.

    Raises: ValueError unless core divides the ranks.
    """
    if type(core) is not int or core < 1 or comm.size % core:
        raise ValueError(f"grid: core={core!r} does not divide {comm.size} ranks")
    place = comm.rank % core
    first = comm.rank - place
    return comm.sub(range(place, comm.size, core)), comm.sub(range(first, first + core))


class Grid:
    """The spaces of one forward: `inner` for groups, which hold shares of `held`; `outer` for the ranks across groups.

    With held None there are no groups, and outer is the space of all ranks.
    """

    def __init__(self, space: Space, core: int = 1, held: Sharding = None) -> None:
        self.whole, self.held, self.outer = space, held, space
        self.inner: Space | None = None
        if held is not None:
            outer, inner = grid(space.comm, core=core)
            self.inner = Space(space.dims, inner)
            self.outer = Space(self.inner.local(held), outer)

    def move(self, xs: Sequence[Tensor], forms: Sequence[str], src: GridPosition, dst: GridPosition) -> list[Tensor]:
        """Move tensors from one position to another. Groups split before all other moves and gather after them.

        Raises: ValueError for a tensor that does not fit its form in src.
        """
        if self.inner is not None and self.held is not None and src[1] is None:
            xs = [split(x, self.inner, form, self.held) for x, form in zip(xs, forms, strict=True)]
        xs = move(xs, self.outer, forms, src[0], dst[0])
        if self.inner is not None and self.held is not None and dst[1] is None:
            xs = [gather(x, self.inner, form, self.held) for x, form in zip(xs, forms, strict=True)]
        return xs

    def end(self, xs: Sequence[Tensor], forms: Sequence[str], src: GridPosition, grad: str) -> list[Tensor]:
        """The whole tensors at the end. grad: how their gradients count."""
        xs = list(xs)
        if src[1] != self.held:
            return [count_once(x, self.whole.comm) for x in xs] if grad == "replicated" else xs
        for space, sharded in ((self.outer, src[0]), (self.inner, src[1])):
            if space is not None and sharded is None and grad == "replicated":
                xs = [count_once(x, space.comm) for x in xs]
            elif space is not None:
                xs = move(xs, space, forms, sharded, None, grad=grad)
        return xs

    def share_of(self, x: Tensor, form: str, inside: Sharding, what: str) -> Tensor:
        """This rank's share of a tensor that every rank has whole. Raises: ValueError if it does not fit the form."""
        if self.inner is not None:
            x = share_of(x, self.inner, form, self.held, what)
        return share_of(x, self.outer, form, inside, what)

    def check(self, x: Tensor, form: str, place: GridPosition, what: str) -> None:
        """Check that a tensor fits its form at a position. Raises: ValueError naming the axis."""
        (self.outer if place[1] == self.held else self.whole).check(x, form, place[0], what)

    def gather(self, x: Tensor, form: str, inside: Sharding, dims: Collection[str]) -> Tensor:
        """The tensor, gathered along those of the dims that are sharded."""
        if inside in dims:
            assert inside is not None
            x, inside = gather(x, self.outer, form, inside), None
        if self.held in dims:
            assert self.held is not None
            x = gather(x, self.group_space(inside), form, self.held)
        return x

    def sharing(self, whole: Collection[str], inside: Sharding) -> tuple[Space, Sharding]:
        """The space of the ranks that share the mixing of these dims, and the dimension that they shard."""
        return (self.group_space(inside), self.held) if self.held in whole else (self.outer, inside)

    def group_space(self, inside: Sharding) -> Space:
        """The dimensions that a group holds together while `inside` is sharded across groups."""
        assert self.inner is not None
        part = {} if inside in (None, self.held) else {inside: self.outer.local(inside)[inside]}
        return Space(self.inner.dims | part, self.inner.comm)

    def absent(self, inside: Sharding) -> bool:
        """Whether this rank has no rows. Then its group has none, unless ranks across groups shard the held dim."""
        return inside is not None and not self.outer.local(inside)[inside]

    def sparse(self, inside: Sharding) -> bool:
        """Whether any rank has no rows."""
        if inside is None:
            return False
        shared = self.inner if inside == self.held else None
        sizes = [self.outer.dims[inside]] if shared is None else shared.shares(inside)
        return min(sizes) < self.outer.comm.size


def attention_plan(
    space: Space, form: str, whole: Collection[str], sharded: Sharding, *, ulysses: bool = False
) -> Plan:
    """The plan of full attention over the dimensions in `whole`, for rows of a form in their order.

    A document is one element of all other dimensions. sharded: the dimension that the ranks shard; None
    plans for one rank. ulysses: all ranks exchange tokens for heads; otherwise keys are fetched.
    """
    sizes = tuple((name, space.dims[name]) for name in form_of(form).names if name in space.dims)
    names = [name for name, _ in sizes]
    if isinstance(whole, str) or not {*whole} <= {*names}:
        raise ValueError(f"attention_plan: whole={whole!r}, expected some of the dimensions {names} of rows {form!r}")
    if sharded is not None and sharded not in names:
        raise ValueError(
            f"attention_plan: sharded={sharded!r}, expected None or one of the dimensions {names} of {form!r}"
        )
    return _plan(sizes, frozenset(whole), sharded, 1 if sharded is None else space.comm.size, ulysses)


@lru_cache(maxsize=256)
def _plan(
    sizes: tuple[tuple[str, int], ...], whole: frozenset[str], sharded: Sharding, ranks: int, ulysses: bool
) -> Plan:
    names = [name for name, _ in sizes]
    documents = [name for name in names if name not in whole]
    tokens = [name for name in names if name in whole]
    # positions count document by document; here they are put in the order of the rows
    pattern = f"({' '.join(documents + tokens)}) -> {' '.join(names)}"
    positions = rearrange(np.arange(prod(size for _, size in sizes)), pattern, **dict(sizes))
    shards = [positions]
    if sharded is not None:
        at = names.index(sharded)
        holders = Layout.contiguous(dict(sizes)[sharded], ranks)
        shards = [positions.take(holders.positions(rank), axis=at) for rank in range(ranks)]
    length = prod(size for name, size in sizes if name in whole)
    mask = Mask([length] * (positions.size // length), causal=False)
    return Plan(mask, Layout([shard.reshape(-1) for shard in shards]), ulysses=ranks if ulysses else 1)
