"""The rows of a trial's runs, and samples of their results.

    first run     0 1 2 3 4 5 6 7    rows as given
    lower half    2 0 3 1 (2)        rows of the smaller positions, in another order, and one again that has the longest
                                     position of all ranks, which is not compared
    upper half    7 4 5 6            the other rows
    as many       5 7 4 6 6 4 5 7    the same, where their number must stay

A sample has up to `ELEMENTS` elements of each of up to `PLACES` rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.facts.value import Ints

PLACES, ELEMENTS = 512, 128
FIRST = 8  # rows at either end that are in every sample


class Positions(NamedTuple):
    """Positions that an argument may give the rows, in the document or in the batch, and the longest of all ranks."""

    own: Ints
    longest: int


class Sample(NamedTuple):
    """Elements of a tensor of any run.

    whole: of all of it [1, elements]. rows: for each dim that may index rows, and how many samples are in it, the
    numbers of rows among those that are compared, and their elements. first: of the first rows.
    """

    shape: torch.Size
    whole: Tensor
    rows: dict[tuple[int, int], tuple[Tensor, Tensor]]
    first: dict[tuple[int, int], Tensor]


class RunRows:
    """Rows of each of a rank's samples, in the order in which a run has them.

    unit: all rows of a sample. at: the numbers of these. again: how many of them, at the end, are not compared. all:
    whether these are all rows, in their order.
    """

    def __init__(self, unit: int, samples: int, at: Ints, again: int = 0) -> None:
        self.all, self.again = np.array_equal(at, np.arange(unit)), again
        self.source = dict[int, Ints]()  # by the size of a dim of all rows: the numbers of these
        self._places = dict[int, tuple[int, Ints, Ints]]()  # by the size of a dim of these: those that are compared
        for several in {1, samples}:
            source = (np.arange(several)[:, None] * unit + at).ravel()
            compared = _some(several * unit)
            kept = np.isin(source, compared) & (np.arange(len(source)) % len(at) < len(at) - again)
            self.source[several * unit] = source
            self._places[len(source)] = several, np.flatnonzero(kept), np.searchsorted(compared, source[kept])

    def taken(self, x: Tensor, dim: int, positions: Sequence[Positions] = ()) -> Tensor:
        """These rows of an argument that has all; if it has positions, the last row gets the longest of all ranks."""
        size = x.shape[dim]
        taken, rows = x.index_select(dim, torch.from_numpy(self.source[size]).to(x.device)), x.movedim(dim, 0)
        for own, longest in positions if self.again else ():
            # numbers up to 1 need not be positions
            here = torch.from_numpy(own[:size]).to(x.device)[:, None]
            if own[:size].max() > 1 and bool((rows.reshape(size, -1) == here).all()):
                taken.select(dim, -1).fill_(longest)
        return taken

    def drawn(self, shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
        """Random rows of a shape, the same in every run for the same rows."""
        numbers = {len(source): (size, source) for size, source in self.source.items()}
        if shape[0] not in numbers:
            return random_rows(shape, like, seed)
        size, source = numbers[shape[0]]
        return random_rows((size, *shape[1:]), like, seed)[torch.from_numpy(source).to(like.device)]

    def sample(self, x: Tensor) -> Sample:
        """Elements of a tensor of the run with these rows."""
        x = real(x.detach())
        rows, first = {}, {}
        for dim, (several, places, which) in ((d, self._places[n]) for d, n in enumerate(x.shape) if n in self._places):
            rows[dim, several] = torch.from_numpy(which).to(x.device), _picked(x, dim, places)
            first[dim, several] = _picked(x, dim, np.arange(min(FIRST, x.shape[dim])))
        return Sample(x.shape, _thinned(x.reshape(1, -1)), rows, first)


class ArgumentRows(NamedTuple):
    """One reading of a model's arguments. unit: rows of a sample. dims: argument number -> the dim of its rows."""

    unit: int
    samples: int
    dims: dict[int, int]

    def every(self) -> RunRows:
        """All rows."""
        return RunRows(self.unit, self.samples, np.arange(self.unit))

    def halves(self, own: Ints, *, as_many: bool) -> list[RunRows]:
        """The rows of smaller positions, and the others, both in another order.

        as_many: as many of them as there are rows, so that some come several times.
        """
        random, half = np.random.default_rng(0), self.unit // 2
        order = np.argsort(own[: self.unit], kind="stable")
        lower, upper = random.permutation(order[:half]), random.permutation(order[half:])
        again = 1 if as_many or half + 1 < self.unit else 2  # another number than all
        if as_many:
            lower, upper = (random.permutation(np.resize(part, self.unit)) for part in (lower, upper))
        else:
            lower = np.concatenate([lower, lower[[0] * again]])
        return [RunRows(self.unit, self.samples, lower, again), RunRows(self.unit, self.samples, upper)]


def readings_of(tensors: Mapping[int, Tensor], count: int) -> Iterator[ArgumentRows]:
    """Possible dims of rows in the arguments: the likely reading first, then others if sizes agree by accident."""
    pairs = [pair for x in tensors.values() for pair in zip(x.shape, x.shape[1:])]
    units = dict.fromkeys([count, *(b for a, b in pairs if a * b == count and 1 < b < count)])
    likely, others = [], []
    for unit in units:
        sizes = {unit, count}
        possible = {i: [dim for dim, size in enumerate(x.shape) if size in sizes] for i, x in tensors.items()}
        possible = {i: several for i, several in possible.items() if several}
        dims = {i: several[0] for i, several in possible.items()}
        if dims:
            likely.append(ArgumentRows(unit, count // unit, dims))
        for i, several in possible.items():
            others += [ArgumentRows(unit, count // unit, dims | {i: dim}) for dim in several[1:]]
            if len(dims) > 1:
                others.append(ArgumentRows(unit, count // unit, {j: dim for j, dim in dims.items() if j != i}))
    yield from likely + others


def random_rows(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Random numbers of a tensor's dtype and device."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


def has_rows(x: Any) -> bool:
    """Whether rows of this value can be picked: a tensor that is not sharded, sparse or 8-bit."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_nested:
        return False
    return x.dtype.itemsize > 1 or not x.is_floating_point()


def is_mask(x: Tensor, rows: int) -> bool:
    """Whether a tensor has an entry per pair of tokens, which only attention uses."""
    if x.dim() < 2 or x.shape[-2] != rows or x.shape[-1] < rows or not (x.is_floating_point() or x.dtype == torch.bool):
        return False
    return x.dtype == torch.bool or bool(((x == 0) | (x <= torch.finfo(x.dtype).min)).all())


def real(x: Tensor) -> Tensor:
    """x as real numbers."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _some(size: int) -> Ints:
    """The numbers of rows that are compared, including the first and the last."""
    if size <= PLACES:
        return np.arange(size)
    others = np.random.default_rng(0).choice(size, PLACES - 2 * FIRST, replace=False)
    return np.unique(np.concatenate([np.arange(FIRST), np.arange(size - FIRST, size), others]))


def _picked(x: Tensor, dim: int, at: Ints) -> Tensor:
    """Elements [places, ...] of the rows along a dim."""
    return _thinned(x.index_select(dim, torch.from_numpy(at).to(x.device)).movedim(dim, 0).reshape(len(at), -1))


def _thinned(x: Tensor) -> Tensor:
    """Some columns of a matrix."""
    columns = x.shape[1]
    if columns <= ELEMENTS:
        return x.clone()
    return x[:, torch.linspace(0, columns - 1, ELEMENTS, device=x.device).long()]
