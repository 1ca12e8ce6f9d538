"""The rows of a model that is tried: which row lies in whose place, and samples of what is made of them.

    first run      0 1 2 3 4 5 6 7    rows as they are
    second run     2 0 2 1 0 1 2 0    rows of the half with the smaller positions, in no order, some several times
    of fewer rows  0 1 2 4 6          those that lie in the second run, and some more

A sample is what `PLACES` of the places of the second run hold, `ELEMENTS` of each, from a tensor of any run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.facts.value import Ints

PLACES, ELEMENTS = 64, 128

Sample = dict[int, Tensor]  # by the dim of the rows: elements [places, ...]; under -1, of a tensor without rows


class Positions(NamedTuple):
    """What an argument may say of the rows of a rank, in the document or in the batch, and the longest of all ranks."""

    own: Ints
    longest: int


class ShuffledRows:
    """A rank's rows, in samples of ``unit`` each, and which of them lie in whose place in the second run.

    One place, which is not looked at, gets the longest position of all ranks where an argument is of positions.
    """

    # By the size of a dim of rows, one sample's or all: the rows of the second run by their numbers in the first, and
    # the places that are looked at.
    sources: dict[int, Ints]
    places: dict[int, Ints]

    def __init__(self, positions: list[Positions], unit: int) -> None:
        self.positions, self.unit, count = positions, unit, len(positions[0].own)
        random, samples = np.random.default_rng(0), count // unit
        smaller = np.argsort(positions[0].own[:unit], kind="stable")[: (unit + 1) // 2]
        few = random.permutation(smaller)[:PLACES]  # so few that the largest of all rows is hardly among them
        source = few[random.integers(len(few), size=unit)]
        self.sources = {unit: source}
        if samples > 1:
            self.sources[count] = (np.arange(samples)[:, None] * unit + source).ravel()
        self.places = {size: _places(size, unit, random) for size in self.sources}

    def dims(self, x: Tensor) -> list[int]:
        """The dims of a tensor that may be these rows."""
        return [dim for dim, size in enumerate(x.shape) if size in self.sources]

    def shuffled(self, x: Tensor, dim: int) -> Tensor:
        """The argument of the second run in place of x."""
        second = x.index_select(dim, torch.from_numpy(self.sources[x.shape[dim]]).to(x.device))
        size = x.shape[dim]
        rows = x.movedim(dim, 0).reshape(size, -1)
        for own, longest in self.positions:
            # numbers up to 1 may be anything else
            if own[:size].max() > 1 and bool((rows == torch.from_numpy(own[:size]).to(x.device)[:, None]).all()):
                second.select(dim, self.unit // 2).fill_(longest)
        return second

    def sample(self, x: Tensor, *, second: bool) -> Sample:
        """Elements of the rows that lie at some places of the second run, taken from a tensor of either run."""
        x, sample = x.detach(), {}
        for dim in self.dims(x):
            at = self.places[x.shape[dim]]
            if not second:
                at = self.sources[x.shape[dim]][at]
            sample[dim] = _picked(x, dim, at)
        return sample or {-1: _thinned(real(x).reshape(1, -1))}


class FewerRows:
    """The rows of a first run without some that are in no sample.

    size: how many of a unit are left; 0 if no number will do. avoid: sizes of other dims, for which it must not be
    taken.
    """

    def __init__(self, rows: ShuffledRows, avoid: set[int]) -> None:
        needed, half = np.unique(rows.sources[rows.unit]), rows.unit // 2
        sizes = range(max(2, len(needed), half), min(rows.unit, half + 64))
        self.size = next((n for n in sizes if n not in avoid), 0)
        more = np.setdiff1d(np.arange(rows.unit), needed)[: self.size - len(needed)]
        left = np.sort(np.concatenate([needed, more]))
        self._left: dict[int, Ints] = {}  # by the size before
        self._places: dict[int, Ints] = {}  # by the size now: where the rows of a sample are
        for size, source in rows.sources.items() if self.size else ():
            of_all_samples = (np.arange(size // rows.unit)[:, None] * rows.unit + left).ravel()
            self._left[size] = of_all_samples
            self._places[len(of_all_samples)] = np.searchsorted(of_all_samples, source[rows.places[size]])

    def shortened(self, x: Tensor, dim: int) -> Tensor:
        """The argument of fewer rows in place of x."""
        return x.index_select(dim, torch.from_numpy(self._left[x.shape[dim]]).to(x.device))

    def sample(self, x: Tensor, *, second: bool) -> Sample:
        """What `ShuffledRows.sample` takes of the first run, from a tensor of this one; nothing without rows."""
        dims = {dim: self._places[size] for dim, size in enumerate(x.shape) if size in self._places}
        return {dim: _picked(x.detach(), dim, at) for dim, at in dims.items()}


class ArgumentRows(NamedTuple):
    """One reading of a model's arguments. dims: by the number of an argument, the dim that is its rows."""

    rows: ShuffledRows
    dims: dict[int, int]


def readings_of(tensors: Mapping[int, Tensor], positions: list[Positions]) -> Iterator[ArgumentRows]:
    """Which dims of arguments are rows; first the likely reading, then others, where sizes are equal by accident."""
    count = len(positions[0].own)
    pairs = [pair for x in tensors.values() for pair in zip(x.shape, x.shape[1:])]
    units = dict.fromkeys([count, *(b for a, b in pairs if a * b == count and 1 < b < count)])
    likely, others = [], []
    for rows in (ShuffledRows(positions, unit) for unit in units):
        possible = {i: several for i, x in tensors.items() if (several := rows.dims(x))}
        dims = {i: several[0] for i, several in possible.items()}
        if dims:
            likely.append(ArgumentRows(rows, dims))
        for i, several in possible.items():
            others += [ArgumentRows(rows, dims | {i: dim}) for dim in several[1:]]
            if len(dims) > 1:
                others.append(ArgumentRows(rows, {j: dim for j, dim in dims.items() if j != i}))
    yield from likely + others


def has_rows(x: Any) -> bool:
    """Whether a value is a tensor whose rows can be picked: not one of shards, of sparse rows or of eight bits."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_nested:
        return False
    return x.dtype.itemsize > 1 or not x.is_floating_point()


def is_mask(x: Tensor, rows: int) -> bool:
    """Whether a tensor is of pairs, which are for attention alone."""
    if x.dim() < 2 or x.shape[-2] != rows or x.shape[-1] < rows or not (x.is_floating_point() or x.dtype == torch.bool):
        return False
    return x.dtype == torch.bool or bool(((x == 0) | (x <= torch.finfo(x.dtype).min)).all())


def real(x: Tensor) -> Tensor:
    """x in real numbers."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _picked(x: Tensor, dim: int, at: Ints) -> Tensor:
    """Elements [places, ...] of rows, which are along a dim."""
    rows = x.index_select(dim, torch.from_numpy(at).to(x.device)).movedim(dim, 0)
    return _thinned(real(rows).reshape(len(at), -1))


def _thinned(x: Tensor) -> Tensor:
    """Some columns of a matrix."""
    columns = x.shape[1]
    if columns <= ELEMENTS:
        return x.clone()
    return x[:, torch.linspace(0, columns - 1, ELEMENTS, device=x.device).long()]


def _places(size: int, unit: int, random: np.random.Generator) -> Ints:
    """Some places of so many, the first and the last ones among them."""
    at = np.arange(size)
    if size > PLACES:
        at = np.concatenate([at[:8], at[-8:], random.choice(size, PLACES - 16, replace=False)])
    return np.unique(at[at % unit != unit // 2])
