"""Which arguments of a block have rows: guesses by sizes, and arguments of a few rows for the runs of a trial."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.trial.rows import has_rows, random_rows, real
from seqpar.trial.segments import RowPlace, RowSegment, RowSegments, is_cut, total
from seqpar.trial.weights import widened

FEW = 512  # rows of all streams and samples in a run
LEAST = 16  # rows of a stream, unless it has fewer
PICKS = 32  # of dims, for a set of streams


class Mismatch(BaseException):
    """What does not follow in one reading of the arguments. No code of a model catches it."""


class GivenRows(NamedTuple):
    """An argument that is rows already: of the whole tensor the shape, and its place."""

    shape: torch.Size
    place: RowPlace
    dtype: torch.dtype
    device: torch.device


class BlockReading(NamedTuple):
    """A guess: the places of arguments, and the arguments that count rows."""

    places: tuple[RowPlace | None, ...]
    counts: tuple[tuple[int, RowSegments], ...]


class BlockArguments:
    """A block's arguments, and what they may mean.

    least: rows of a stream that is cut. few: counts of rows -> those of a run. sample: the arguments of a run. dims: of
    each, those that have fewer rows there.
    """

    def __init__(self, given: list[Any], ranks: int) -> None:
        self.given, self.least = given, max(2, ranks)
        self.few, self.dims, self.sample = dict[int, int](), list[list[int]](), list[Any]()

    def kinds(self) -> set[int]:
        """The numbers of rows that arguments may have."""
        given = {each.count for x in self.given if isinstance(x, GivenRows) for each in x.place.segments}
        tensors = [x for x in self.given if isinstance(x, Tensor) and x.is_floating_point()]
        deep = {max(x.shape[:2]) if x.shape[0] > FEW else x.shape[1] for x in tensors if x.dim() == 3}
        return given | deep or {x.shape[0] for x in tensors if x.dim() == 2}

    def divided(self, kinds: set[int]) -> Iterator[set[int]]:
        """The kinds, one of them in two where an integer argument may say so; as they are; and without one of them.

        That may be no number of rows, but of shifts and scales, or of channels of a head.
        """
        counts = [x for x in self.given if type(x) is int]
        for count, whole in itertools.product(counts, sorted(kinds)):
            if LEAST <= count < whole - self.least and self._fewer(kinds):
                yield kinds - {whole} | {count, whole - count}
        yield kinds
        if self._fewer(kinds):
            yield from (kinds - {count} for count in sorted(kinds)[:-1] if count <= FEW)

    def of(self, kinds: set[int], streams: set[int]) -> set[int]:
        """Those of the kinds that make up streams."""
        return {n for some in _subsets(kinds) if sum(some) in streams for n in some}

    def take_few(self, kinds: set[int], features: bool, as_given: bool) -> None:
        """Make a sample of a few rows of each kind.

        features: whether the last dim of a matrix may have rows. as_given: with the values of masks, numbers of rows,
        and switches, which else are others.
        """
        self.few = self._fewer(kinds)
        sizes = {sum(some): sum(self.few.get(n, n) for n in some) for some in _subsets(self.few)}
        self.dims = [[d for d in _dims(x, sizes) if features or not _is_feature(x, d)] for x in self.given]
        of_rows = set() if as_given else {sum(some) for some in _subsets(kinds)}
        self.sample = [_sampled(x, dims, sizes, of_rows, n) for n, (x, dims) in enumerate(zip(self.given, self.dims))]
        for number, x in enumerate(self.given):
            if type(x) is int and self.few:  # it may count rows: let it do so among the few
                more = [few for n, few in self.few.items() if few <= x < n]
                self.sample[number] = sizes.get(x, min(more) // 2 if more else x)

    def _fewer(self, kinds: set[int]) -> dict[int, int]:
        """Fewer rows of each kind, so that no sums of them are equal; none if there are few."""
        shapes = [x.shape for x in self.given if isinstance(x, (Tensor, GivenRows))]
        samples = max([shape[0] for shape in shapes if len(shape) > 2 and shape[0] not in kinds], default=1)
        most = max(FEW // samples, 2 * LEAST)
        if sum(kinds) <= most:
            return {}
        fewer, taken = dict[int, int](), {n for shape in shapes for n in shape}
        for count in sorted(kinds):
            sums = {sum(some) for some in _subsets(fewer.values())} | {0}
            likely = range(max(LEAST, most // (2 * len(kinds))), count)
            free = (n for n in likely if not any(n + other in taken | sums for other in sums))
            fewer[count] = next(free, count)
        return fewer

    def streams(self, outputs: list[Any]) -> list[list[tuple[int, RowPlace]]]:
        """Sets of arguments that may be streams, each with its place; likely sets first.

        Of a set that the block returns, those with fewer rows than there are ranks stay whole.
        """
        shapes = [x.shape[1:] for x in outputs if isinstance(x, Tensor)]  # one sample may become that of all

        def all_of(
            dims: int, dim: int, *, returned: bool = True, most: int | None = None
        ) -> list[tuple[int, RowPlace]]:
            some = list[tuple[int, RowPlace]]()
            for number, x in enumerate(self.given):
                if isinstance(x, GivenRows):
                    some.append((number, x.place))
                elif isinstance(x, Tensor) and x.dim() == dims and x.is_floating_point():
                    long = x.shape[dim] >= self.least
                    if self.sample[number].shape[1:] in shapes if returned else long:
                        some.append((number, RowPlace(dim, (RowSegment(x.shape[dim], long),))))
            return some[:most] if any(is_cut(place.segments) for _, place in some) else []

        sets = [
            all_of(3, 1), all_of(2, 0), all_of(3, 1, returned=False, most=1), all_of(3, 0),
            all_of(3, 1, returned=False),
        ]  # fmt: skip
        return [some for n, some in enumerate(sets) if some and some not in sets[:n]]

    def are_short(self, outputs: list[Any]) -> bool:
        """Whether the streams have fewer rows than there are ranks."""
        shapes = [x.shape for x in outputs if isinstance(x, Tensor) and x.dim() == 3]
        return any(x.shape in shapes and x.shape[1] < self.least for x in self.given if isinstance(x, Tensor))

    def readings(self, outputs: list[Any]) -> Iterator[BlockReading]:
        """Guesses of what has rows, by sizes, each once."""
        seen = set[BlockReading]()
        for streams in self.streams(outputs):
            for given, order in self._orders(dict(streams)):
                for reading in self._readings_of(given, order):
                    if reading not in seen:
                        seen.add(reading)
                        yield reading

    def _orders(self, streams: dict[int, RowPlace]) -> Iterator[tuple[dict[int, RowPlace], tuple[RowSegments, ...]]]:
        """The streams, with their segments in each order in which others may have the rows of several.

        At last a packed stream in two, where an integer argument says how many rows are of one kind.
        """
        segments = [place.segments for place in streams.values()]
        some = [x for x in dict.fromkeys(segments) for _ in range(min(segments.count(x), 2))]
        for order in dict.fromkeys(itertools.permutations(some)):
            yield streams, order
        if len(streams) > 1 or len(segments[0]) > 1:
            return
        ((number, (dim, (whole,))),) = streams.items()
        for count in {x for x in self.given if type(x) is int and self.least <= x <= whole.count - self.least}:
            first, second = RowSegment(whole.count - count, True), RowSegment(count, True)
            for both in ((first, second), (second, first)):
                yield {number: RowPlace(dim, both)}, (both,)

    def _readings_of(
        self, given: dict[int, RowPlace], order: tuple[RowSegments, ...]
    ) -> Iterator[BlockReading]:  # fmt: skip
        sizes = {n: x for n, x in _sizes(order).items() if is_cut(x)}
        options: dict[tuple[int, ...], list[int | None]] = {}
        for number, x in enumerate(self.given):
            if isinstance(x, Tensor) and number not in given:
                dims = [d for d in _dims(x, sizes) if not self.few or d in self.dims[number]]
                last = [d for d in dims if not _is_feature(x, d)]
                if dims:
                    options[tuple(x.shape)] = [*last, None, *(d for d in dims if d not in last)]
        picks = itertools.islice(itertools.product(*options.values()), PICKS)
        for pick, masks, counts in itertools.product(picks, (False, True), (False, True)):
            at = dict(zip(options, pick))
            places, counted = list[RowPlace | None](), list[tuple[int, RowSegments]]()
            for number, x in enumerate(self.given):
                place = x.place if isinstance(x, GivenRows) else given.get(number)
                if place is None and isinstance(x, Tensor) and (masks or not _is_mask(x, sizes)):
                    dim = at.get(tuple(x.shape))
                    place = None if dim is None else RowPlace(dim, sizes[x.shape[dim]])
                if counts and type(x) is int and x in sizes:
                    counted.append((number, sizes[x]))
                places.append(place)
            yield BlockReading(tuple(places), tuple(counted))


def _subsets(values: Iterable[int]) -> Iterator[tuple[int, ...]]:
    values = list(values)
    return (some for n in range(1, min(len(values), 3) + 1) for some in itertools.combinations(values, n))


def _sizes(streams: Sequence[RowSegments]) -> dict[int, RowSegments]:
    """Numbers of rows -> what may be meant: streams in their order, or segments of one."""
    found: dict[int, RowSegments] = {}
    for count in range(1, len(streams) + 1):
        for some in itertools.combinations(streams, count):
            segments: RowSegments = sum(some, ())
            found.setdefault(total(segments), segments)
    for segments in streams:
        for start, stop in itertools.combinations(range(len(segments) + 1), 2):
            found.setdefault(total(segments[start:stop]), segments[start:stop])
    return found


def _dims(x: Any, sizes: Iterable[int]) -> list[int]:
    """The dims of an argument that may have rows, by their sizes."""
    if not isinstance(x, (Tensor, GivenRows)):
        return []
    if isinstance(x, GivenRows):
        return [x.place.dim]
    features = x.dim() == 3 and x.is_floating_point()
    return [d for d, n in enumerate(x.shape) if n in sizes and not (features and d == 2)]


def _is_feature(x: Any, dim: int) -> bool:
    """Whether a dim is more likely one of features: the last one of a matrix of numbers."""
    return isinstance(x, Tensor) and x.dim() == 2 and dim == 1 and x.is_floating_point()


def _is_mask(x: Tensor, sizes: Iterable[int]) -> bool:
    """Whether a tensor may be a mask of keys, which attention takes whole."""
    return not x.is_floating_point() or (x.dim() == 4 and x.shape[1] == 1 and x.shape[-1] in sizes)


def _sampled(x: Any, dims: list[int], sizes: dict[int, int], counts: set[int], seed: int) -> Any:
    """An argument of the run: fewer rows, and other numbers, since equal ones would hide what depends on them.

    counts: how many numbers may be those of rows; none: numbers other than of floats of rows stay.
    """
    if isinstance(x, GivenRows):
        shape = [sizes.get(n, n) if d in dims else n for d, n in enumerate(x.shape)]
        shape[x.place.dim] = sum(sizes.get(n, n) for n, _ in x.place.segments)
        return widened(random_rows(shape, torch.empty((), dtype=x.dtype, device=x.device), seed))
    if not isinstance(x, Tensor):
        return x
    of_rows = x.dim() > 0 and x.shape[-1] in counts
    for dim in dims:
        count = x.shape[dim]
        x = picked(x, dim, [row * count // sizes[count] for row in range(sizes[count])])
    x, numbers = widened(x), x.is_floating_point() or x.is_complex()
    single = not of_rows and x.numel() <= (x.shape[0] if x.dim() else 1)  # a number for each sample may be a switch
    if not has_rows(x) or not x.numel() or (single and not numbers) or not (counts or (numbers and not single)):
        return x
    noise = random_rows(real(x).shape, torch.empty(0, device=x.device), seed)
    if x.dtype == torch.bool:
        return noise > 0
    if of_rows and not x.is_complex() and len(x.unique()) == x.shape[-1]:  # they may say which rows are alike
        generator = torch.Generator().manual_seed(seed)
        return x.flatten()[torch.randint(x.numel(), x.shape, generator=generator, device="cpu").to(x.device)]
    if not numbers:
        first, odd = x.flatten()[0], (noise > 0).to(x.dtype)
        return x if (x != first).any() else x - odd if first > 0 else x + odd
    if single:
        return x + noise.abs()
    finite = real(x)[real(x).isfinite()]
    least, most = finite.min(), finite.max()
    if least == most and len(finite) == real(x).numel():
        changed = noise
    elif ((finite == least) | (finite == most)).all():  # a mask
        return x
    else:
        changed = real(x) + noise * 0.1 * finite.std()
    changed = changed.to(real(x).dtype)
    return torch.view_as_complex(changed) if x.is_complex() else changed


def index(at: Sequence[int], x: Tensor) -> Tensor:
    """Numbers of rows on a tensor's device."""
    return torch.tensor(at, dtype=torch.long, device=x.device)


def picked(x: Tensor, dim: int, at: Sequence[int]) -> Tensor:
    """Some rows of a tensor. Raises: Mismatch if it has fewer."""
    if x.shape[dim] <= max(at, default=-1):
        raise Mismatch("its arguments have fewer rows")
    return x.index_select(dim, index(at, x))
