"""The rows of a trial: which row takes which place in the second run, and samples of the results.

    first run      0 1 2 3 4 5 6 7    rows as given
    second run     2 0 2 1 0 1 2 0    rows of the half with the smaller positions, shuffled, some repeated
    fewer rows     0 1 4 6            most rows of the second run, and some more

A sample has `ELEMENTS` elements of each of `PLACES` places of the second run, taken from a tensor of any run. A range
has the smallest and the largest weighted sum of a row's elements over all its places, so that one place is not missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.facts.value import Ints
from seqpar.trial.sizes import of_columns

PLACES, ELEMENTS = 64, 128
CHUNK = 1 << 20  # elements that are summed at a time
MOST = 100.0  # sizes of its column that an element counts at most in a sum, so that numbers which mask hide no others

Sample = dict[int, Tensor]  # dim of the rows -> elements [places, ...]; under -1 those of a tensor without rows


class SumRange(NamedTuple):
    """The least and the largest sum [rows, 2] of each row, of elements in units of the sizes [columns]."""

    sizes: Tensor
    sums: Tensor


Ranges = dict[int, SumRange]  # by the dim of the rows


class Positions(NamedTuple):
    """Positions that an argument may give the rows, in the document or in the batch, and the longest of all ranks."""

    own: Ints
    longest: int


class ShuffledRows:
    """A rank's rows, in samples of ``unit`` rows each, and the row in each place of the second run.

    One place, which is not compared, gets the longest position of all ranks if an argument holds positions.
    """

    # By the size of a dim of rows (one sample or all of them): the first-run row of every place of the second run, and
    # the places in samples.
    sources: dict[int, Ints]
    places: dict[int, Ints]

    def __init__(self, positions: list[Positions], unit: int) -> None:
        self.positions, self.unit, count = positions, unit, len(positions[0].own)
        random, samples = np.random.default_rng(0), count // unit
        smaller = np.argsort(positions[0].own[:unit], kind="stable")[: (unit + 1) // 2]
        few = random.permutation(smaller)[:PLACES]  # few, so that the largest row is hardly ever among them
        source = _moved(few, positions[0].own[:unit], random) if unit > 2 else np.array([1, 0])
        self.sources = {unit: source}
        if samples > 1:
            self.sources[count] = (np.arange(samples)[:, None] * unit + source).ravel()
        self.places = {size: _places(size, unit, random) for size in self.sources}
        self._distinct = {size: np.unique(source) for size, source in self.sources.items()}
        self._lengthened = False  # whether that place got the longest position

    def dims(self, x: Tensor) -> list[int]:
        """The dims of a tensor that may index these rows."""
        return [dim for dim, size in enumerate(x.shape) if size in self.sources]

    def shuffled(self, x: Tensor, dim: int) -> Tensor:
        """The second run's argument in place of x."""
        second = x.index_select(dim, torch.from_numpy(self.sources[x.shape[dim]]).to(x.device))
        size = x.shape[dim]
        rows = x.movedim(dim, 0).reshape(size, -1)
        for own, longest in self.positions:
            # numbers up to 1 need not be positions
            if own[:size].max() > 1 and bool((rows == torch.from_numpy(own[:size]).to(x.device)[:, None]).all()):
                second.select(dim, self.unit // 2).fill_(longest)
                self._lengthened = True
        return second

    def sample(self, x: Tensor, *, second: bool) -> Sample:
        """Elements of the rows at some places of the second run, from a tensor of either run."""
        x, sample = x.detach(), {}
        for dim in self.dims(x):
            at = self.places[x.shape[dim]]
            if not second:
                at = self.sources[x.shape[dim]][at]
            sample[dim] = _picked(x, dim, at)
        return sample or {-1: _thinned(real(x).reshape(1, -1))}

    def largest(self, x: Tensor) -> list[int]:
        """The row with the largest element, of those in the second run and from a tensor of the first; for each dim."""
        found: list[int] = []
        if not x.is_floating_point() or x.dtype.itemsize == 1:
            return found
        for size, dim in {x.shape[dim]: dim for dim in self.dims(x)}.items():
            distinct = self._distinct[size]
            rows = x.detach().index_select(dim, torch.from_numpy(distinct).to(x.device)).movedim(dim, 0)
            found.append(int(distinct[int(rows.reshape(len(rows), -1).abs().amax(1).argmax())]) % self.unit)
        return found

    def ranges(self, x: Tensor, *, second: bool, like: Ranges | None = None) -> Ranges:
        """The ranges of each row of the second run over all places, from either run.

        like: those of an earlier run, whose sizes of columns count.
        """
        x, ranges = x.detach(), {}
        for dim in self.dims(x):
            source = self.sources[x.shape[dim]]
            at = np.arange(len(source))
            at = at[at % self.unit != self.unit // 2] if self._lengthened else at
            distinct, number = np.unique(source[at], return_inverse=True)
            known = (like or {}).get(dim)
            sizes = _column_sizes(x, dim, distinct if not second else at) if known is None else known.sizes
            if real(x).numel() != sizes.numel() * x.shape[dim]:
                continue  # of another shape, which samples show
            if not second:
                ranges[dim] = SumRange(sizes, _sums(x, dim, distinct, sizes)[:, None].expand(-1, 2))
                continue
            sums, number = _sums(x, dim, at, sizes), torch.from_numpy(number).to(x.device)
            both = [sums.new_zeros(len(distinct)).scatter_reduce(0, number, sums, how, include_self=False)
                    for how in ("amin", "amax")]  # fmt: skip
            ranges[dim] = SumRange(sizes, torch.stack(both, 1))
        return ranges


class FewerRows:
    """A first run's rows without some, mostly those that are in no sample.

    largest: rows with largest elements; some of them are left out too, as a scale may follow from one alone. size:
    remaining rows of a unit; 0 if no number will do. avoid: sizes of other dims, which it must not equal.
    """

    def __init__(self, rows: ShuffledRows, avoid: set[int], largest: list[int]) -> None:
        needed, half = np.unique(rows.sources[rows.unit]), rows.unit // 2
        out = np.array(list(dict.fromkeys(largest))[: len(needed) // 2], np.int64)
        needed = np.setdiff1d(needed, out)
        sizes = range(max(2, len(needed), half), min(rows.unit - max(1, len(out)) + 1, half + 64))
        self.size = next((n for n in sizes if n not in avoid), 0)
        more = np.setdiff1d(np.arange(rows.unit), [*needed, *out])[: self.size - len(needed)]
        left = np.sort(np.concatenate([needed, more]))
        self._left: dict[int, Ints] = {}  # by the size before
        self._places: dict[int, Ints] = {}  # by the size after: the places of a sample's rows, -1 where they are out
        for size, source in rows.sources.items() if self.size else ():
            of_all_samples = (np.arange(size // rows.unit)[:, None] * rows.unit + left).ravel()
            self._left[size] = of_all_samples
            sampled = source[rows.places[size]]
            at = np.searchsorted(of_all_samples, sampled)
            self._places[len(of_all_samples)] = np.where(np.isin(sampled, of_all_samples), at, -1)

    def shortened(self, x: Tensor, dim: int) -> Tensor:
        """The argument with fewer rows in place of x."""
        return x.index_select(dim, torch.from_numpy(self._left[x.shape[dim]]).to(x.device))

    def sample(self, x: Tensor, *, second: bool) -> Sample:
        """The elements that `ShuffledRows.sample` takes of the first run, from a tensor of this one, if it has rows.

        Rows that are out are NaN.
        """
        sample = {}
        for dim, at in ((dim, self._places[size]) for dim, size in enumerate(x.shape) if size in self._places):
            sample[dim] = _picked(x.detach(), dim, np.maximum(at, 0)).double()
            sample[dim][torch.from_numpy(at < 0).to(x.device)] = torch.nan
        return sample

    def ranges(self, x: Tensor, *, second: bool, like: Ranges | None = None) -> Ranges:
        """None: samples show enough of this run."""
        return {}


class ArgumentRows(NamedTuple):
    """One reading of a model's arguments. dims: argument number -> the dim of its rows."""

    rows: ShuffledRows
    dims: dict[int, int]


def readings_of(tensors: Mapping[int, Tensor], positions: list[Positions]) -> Iterator[ArgumentRows]:
    """Possible dims of rows in the arguments: the likely reading first, then others if sizes agree by accident."""
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


def _picked(x: Tensor, dim: int, at: Ints) -> Tensor:
    """Elements [places, ...] of the rows along a dim."""
    rows = x.index_select(dim, torch.from_numpy(at).to(x.device)).movedim(dim, 0)
    return _thinned(real(rows).reshape(len(at), -1))


def _thinned(x: Tensor) -> Tensor:
    """Some columns of a matrix."""
    columns = x.shape[1]
    if columns <= ELEMENTS:
        return x.clone()
    return x[:, torch.linspace(0, columns - 1, ELEMENTS, device=x.device).long()]


def _column_sizes(x: Tensor, dim: int, at: Ints) -> Tensor:
    """The sizes of columns [columns], by some of these rows."""
    some = torch.from_numpy(at[:: -(-len(at) // 8)]).to(x.device)
    rows = real(x.index_select(dim, some).movedim(dim, 0)).reshape(len(some), -1)
    return of_columns(rows.to(_summed(x)))


def _sums(x: Tensor, dim: int, at: Ints, sizes: Tensor) -> Tensor:
    """A weighted sum of the elements of each row [places], each in units of its column's size, up to `MOST` of them."""
    rows = x.movedim(dim, 0)
    weights, most = _weights(len(sizes), sizes.dtype).to(x.device) / sizes, MOST * sizes
    index = torch.from_numpy(at).to(x.device)
    sums = [real(rows[i]).reshape(len(i), -1).to(sizes.dtype).nan_to_num(0.0).clamp(-most, most) @ weights
            for i in index.split(max(1, CHUNK // len(weights)))]  # fmt: skip
    return torch.cat(sums) if sums else weights.new_zeros(0)


def _summed(x: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float32 if real(x).is_floating_point() and real(x).dtype.itemsize <= 4 else torch.float64


@lru_cache(16)
def _weights(size: int, dtype: torch.dtype) -> Tensor:
    """Fixed random weights."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    return (drawn / size**0.5).to(dtype)


def _places(size: int, unit: int, random: np.random.Generator) -> Ints:
    """Some of the places, including the first and the last."""
    at = np.arange(size)
    if size > PLACES:
        at = np.concatenate([at[:8], at[-8:], random.choice(size, PLACES - 16, replace=False)])
    return np.unique(at[at % unit != unit // 2])


def _moved(few: Ints, own: Ints, random: np.random.Generator) -> Ints:
    """One of few rows for each place, at random, and as far as possible of another position than that place's own."""
    at = random.integers(len(few), size=len(own))
    for same in (lambda source, places: own[source] == own[places], lambda source, places: source == places):
        again = np.flatnonzero(same(few[at], np.arange(len(own))))
        for _ in range(len(few)):
            at[again] = (at[again] + 1) % len(few)
            again = again[same(few[at[again]], again)]
    return few[at]
