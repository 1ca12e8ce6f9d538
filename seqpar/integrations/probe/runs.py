"""Whether what a model computes for a row is of that row alone but for its attention: two runs, without gradients.

In both runs a function of each row alone takes the place of attention. The first gets the arguments as they are. In the
second, other rows of the same arguments lie in their places: of the half with the smaller positions, in no order, some
several times. What is computed for a row must then be what the first run computed for the row that lies there. It is
not where positions are counted from the rows that a rank holds, where tokens meet in a convolution, a recurrence or a
sum, or where something depends on the longest position.

    run     rows       a model of rows      x + arange(rows)      x - mean(x)
    first   a b c d    f(a) f(b) f(c) f(d)  a+0  b+1  c+2  d+3    a-m   b-m  c-m  d-m
    second  b a b b    f(b) f(a) f(b) f(b)  b+0  a+1  b+2  b+3    b-m'  ...

Looked at are the queries, keys and values of every attention and what the model returns, at some places; what its
modules get and return on the way tells which of them is the first that does not follow.

Each run begins with the buffers and attributes that the model had. Two things show in further runs: with fewer rows
what depends on their number, as ``x * log(len(x))``, and after other rows, where these have left something in a buffer,
what a next forward makes of it, as of a running mean.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import PeerError
from seqpar.facts.value import Ints
from seqpar.integrations.probe.nested import leaves, replaced
from seqpar.integrations.probe.saved_state import Buffers, State, eager, state_of

PLACES, ELEMENTS = 64, 128  # of a tensor that are compared: rows, and elements of each
READINGS = 12
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}
ROUGH = 0.05
_LOW = {torch.bfloat16, torch.float16}

RESULT = "result"  # what the whole model returns, which nothing else gets
Sample = dict[int, Tensor]  # by the dim that has the rows: elements [places, ...]; under -1, of what has no rows


class Positions(NamedTuple):
    """What an argument may say of the rows of a rank, in the document or in the batch, and the longest of all ranks."""

    own: Ints
    longest: int


class Rows:
    """A rank's rows, in samples of ``unit`` each, and which of them lie in whose place in the second run.

    One place, which is not looked at, gets the longest position of all ranks where an argument is of positions.
    """

    def __init__(self, positions: list[Positions], unit: int) -> None:
        self.positions, self.unit, count = positions, unit, len(positions[0].own)
        random, samples = np.random.default_rng(0), count // unit
        low = np.argsort(positions[0].own[:unit], kind="stable")[: (unit + 1) // 2]
        few = random.permutation(low)[:PLACES]  # so few that the largest of all rows is hardly among them
        taken = few[random.integers(len(few), size=unit)]
        self.taken = {unit: taken}
        if samples > 1:
            self.taken[count] = (np.arange(samples)[:, None] * unit + taken).ravel()
        self.places = {size: _places(size, unit, random) for size in self.taken}

    def dims(self, x: Tensor) -> list[int]:
        """The dims of a tensor that may be these rows."""
        return [dim for dim, size in enumerate(x.shape) if size in self.taken]

    def replaced(self, x: Tensor, dim: int) -> Tensor:
        """The tensor of the second run."""
        found = x.index_select(dim, torch.from_numpy(self.taken[x.shape[dim]]).to(x.device))
        size = x.shape[dim]
        rows = x.movedim(dim, 0).reshape(size, -1)
        for own, longest in self.positions:
            # fewer of them may be anything
            if own[:size].max() > 1 and bool((rows == torch.from_numpy(own[:size]).to(x.device)[:, None]).all()):
                found.select(dim, self.unit // 2).fill_(longest)
        return found

    def sample(self, x: Tensor, *, second: bool) -> Sample:
        """Elements of the rows that lie at some places of the second run, taken from a tensor of either run."""
        x, found = x.detach(), {}
        for dim in self.dims(x):
            at = self.places[x.shape[dim]]
            if not second:
                at = self.taken[x.shape[dim]][at]
            found[dim] = _picked(x, dim, at)
        return found or {-1: _thin(_real(x).reshape(1, -1))}


class Fewer:
    """The rows of a first run without some of which it holds no sample.

    avoid: sizes of which their number is to be none, so that no other dim is taken for theirs.
    """

    def __init__(self, rows: Rows, avoid: set[int]) -> None:
        needed, half = np.unique(rows.taken[rows.unit]), rows.unit // 2
        sizes = range(max(2, len(needed), half), min(rows.unit, half + 64))
        self.size = next((n for n in sizes if n not in avoid), 0)
        more = np.setdiff1d(np.arange(rows.unit), needed)[: self.size - len(needed)]
        left = np.sort(np.concatenate([needed, more]))
        self._left, self._places = {}, {}
        for size, taken in rows.taken.items() if self.size else ():
            several = (np.arange(size // rows.unit)[:, None] * rows.unit + left).ravel()
            self._left[size] = several
            self._places[len(several)] = np.searchsorted(several, taken[rows.places[size]])

    def replaced(self, x: Tensor, dim: int) -> Tensor:
        """The tensor of fewer rows."""
        return x.index_select(dim, torch.from_numpy(self._left[x.shape[dim]]).to(x.device))

    def sample(self, x: Tensor, *, second: bool) -> Sample:
        """What `Rows.sample` takes from a tensor of the first run, from one of this run; nothing without rows."""
        dims = {dim: self._places[size] for dim, size in enumerate(x.shape) if size in self._places}
        return {dim: _picked(x.detach(), dim, at) for dim, at in dims.items()}


class Event(NamedTuple):
    """What a module gets, and from which one (``by``), or returns, or what it attends over."""

    kind: str
    name: str
    by: str
    samples: list[Sample]
    there: list[Sample]  # in the first run, what lay at the places themselves


class Verdict(NamedTuple):
    """What two runs showed.

    reason: why the model is refused, or "". error: why that is not known, or "". saw: whether rows were other ones.
    """

    reason: str = ""
    error: str = ""
    saw: bool = True


class Record:
    """One run: what was seen on the way, in order; nothing where no rows are compared.

    What goes wrong in looking on is a failure to tell of, and ends no run: other ranks may be in the same one.
    """

    def __init__(self, model: nn.Module, rows: Rows | Fewer | None, *, second: bool) -> None:
        self.model, self.rows, self.second, self.failure = model, rows, second, ""
        self.fewer = isinstance(rows, Fewer)
        self.left: Buffers = {}  # buffers that the run has changed
        self.events: list[Event] = []
        self.inside: list[str] = []

    def here(self) -> str:
        """The module that is being computed."""
        return self.inside[-1] if self.inside else _named("", self.model)

    def note(self, kind: str, name: str, tensors: Iterable[Any], by: str = "") -> None:
        """Note tensors, of which some are rows."""
        if self.rows is None or self.failure:
            return
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self.events.append(self._event(self.rows, kind, name, tensors, by))
        except Exception as error:
            self.failure = _text(error)

    def _event(self, rows: Rows | Fewer, kind: str, name: str, tensors: Iterable[Any], by: str) -> Event:
        plain = [x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.numel()]
        samples = [rows.sample(x, second=self.second) for x in plain]
        there = [] if self.second else [rows.sample(x, second=True) for x in plain]
        return Event(kind, name, by, samples, there)

    def attends(self, *tensors: Tensor) -> None:
        """Note queries, keys and values."""
        self.note("attends over", self.here(), tensors)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Note what the modules of the model get and return."""
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name and not isinstance(module, torch.jit.ScriptModule):
                    said = _named(name, module)
                    gets = module.register_forward_pre_hook(partial(self._gets, said), with_kwargs=True)
                    hooks.callback(gets.remove)
                    hooks.callback(module.register_forward_hook(partial(self._returns, said)).remove)
            yield

    def _gets(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if under_trial() is self:  # other threads may share the model
            self.note("gets", name, leaves((args, kwargs)), self.here())
            self.inside.append(name)

    def _returns(self, name: str, _: nn.Module, args: Any, out: Any) -> None:
        if under_trial() is self:
            self.inside.pop()
            self.note("returns", name, leaves(out))


_threads = threading.local()


def under_trial() -> Record | None:
    """The run that this thread is in, if it is in one."""
    return getattr(_threads, "record", None)


Reading = tuple[Rows, dict[int, int]]  # rows, and by the number of an argument the dim that is these rows


def tried(
    model: nn.Module,
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    positions: list[Positions],
    stand_in: Callable[[], AbstractContextManager[Any]],
    *,
    told: Callable[[Any], list[Any]] = lambda value: [value],
    readings: int = READINGS,
    alone: bool = True,
) -> Verdict:
    """What two runs of ``run(*args, **kwargs)``, the forward of a model, show.

    positions: of this rank's rows, in their documents first. stand_in: the context in which attention notes what it
    gets in `under_trial` and returns a function of each row alone. told: a value of each rank that runs the model
    together with this one. readings: how many readings of the arguments are tried at most. alone: whether no other
    rank meets this one in the model's forward, so that there may be further runs.

    A rank with too few rows runs the model as well, twice as it is, and as often as the ranks that it runs with.
    The model is left as it was: buffers, attributes, the state of random numbers, what is compiled.

    Raises: RuntimeError, on all ranks that run together, if the first run fails on some of them alone.
    """
    count, given = len(positions[0].own), leaves((args, kwargs))
    tensors = {i: x for i, x in enumerate(given) if _is_plain(x) and not _is_mask(x, count)}
    if any(x.is_meta for x in tensors.values()):
        return Verdict(saw=False)
    with torch.no_grad(), eager(model), state_of(model) as state:
        trial = _Trial(model, run, args, kwargs, stand_in, state, tensors, told, alone)
        waiting = itertools.islice(_readings(tensors, positions) if count > 1 else iter(()), readings)
        reading, found = next(waiting, None), None
        while True:
            verdict = trial.of(reading)
            if found is None or (reading is not None and not verdict.reason and not verdict.error):
                found = verdict if reading or verdict.error else Verdict(saw=count > 1)
            reading = next(waiting, None) if found.reason and not verdict.error else None
            if readings == 1 or not any(told(reading is not None)):
                return found


class _Trial(NamedTuple):
    """Runs of a model, each of which begins with the state that it had. The fields: as in `tried`."""

    model: nn.Module
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    stand_in: Callable[[], AbstractContextManager[Any]]
    state: State
    tensors: dict[int, Tensor]
    told: Callable[[Any], list[Any]]
    alone: bool

    def of(self, reading: Reading | None) -> Verdict:
        """The verdict on a reading; without a reading, or where rows are equal, runs are of what is there."""
        rows, dims = reading or (None, {})
        tensors = {i: self.tensors[i] for i in dims}
        others = {id(x): rows.replaced(x, dims[i]) for i, x in tensors.items()}  # type: ignore[union-attr]
        saw = any(not torch.equal(others[id(x)], x) for x in tensors.values())
        first, second = (Record(self.model, rows if saw else None, second=again) for again in (False, True))
        error = self._run(first, {})
        errors = self.told(_text(error))
        if any(errors):
            if not all(errors):
                rank = next(rank for rank, text in enumerate(errors) if text)
                who = type(self.model).__name__
                raise RuntimeError(f"{who} failed on rank {rank} when it was tried: {errors[rank]}")
            return Verdict(error=_text(error))
        error = self._run(second, others)
        if isinstance(error, torch.OutOfMemoryError) or (error is not None and not saw):
            return Verdict(error=_text(error))
        if failure := first.failure or second.failure:
            return Verdict(error=failure)
        if not saw or rows is None:
            return Verdict(saw=False)
        verdict = _compared(
            first, second, error, self._rough(), "with its rows in another order", "does not follow them"
        )
        if self.alone and not verdict.reason:
            verdict = self._with_fewer(first, rows, dims)
        if self.alone and not verdict.reason and _unlike(first.left, second.left):
            verdict = self._afterwards(rows, first.left, second.left)
        return verdict

    def _with_fewer(self, first: Record, rows: Rows, dims: dict[int, int]) -> Verdict:
        """The verdict on fewer rows, which is none where the model does not take them."""
        sizes = {n for x in (*self.tensors.values(), *self.model.parameters()) for n in x.shape}
        fewer = Fewer(rows, sizes)
        record = Record(self.model, fewer, second=True)
        others = {id(self.tensors[i]): fewer.replaced(self.tensors[i], dim) for i, dim in dims.items() if fewer.size}
        if not others or self._run(record, others) is not None or record.failure:
            return Verdict()
        if [e[:3] for e in _judged(record)] != [e[:3] for e in _judged(first)]:
            return Verdict()
        return _compared(first, record, None, self._rough(), "with fewer rows", "is another for the same ones")

    def _afterwards(self, rows: Rows, one: Buffers, other: Buffers) -> Verdict:
        """The verdict on what is made of that which either run has left in buffers."""
        records = []
        for buffers in (one, other):
            records.append(Record(self.model, rows, second=False))
            if self._run(records[-1], {}, buffers) is not None or records[-1].failure:
                return Verdict()
        unlike, modules = _unlike(one, other), self.model.named_modules()
        names = [f"{path}.{key}".lstrip(".") for path, m in modules for key in m._buffers if (m, key) in unlike]
        tried = f"after other rows, which have changed {', '.join(names)}"
        return _compared(*records, None, self._rough(), tried, "is another")

    def _rough(self) -> bool:
        return _rough(self.model, self.tensors.values())

    def _run(self, record: Record, others: dict[int, Tensor], buffers: Buffers | None = None) -> Exception | None:
        """The error of a run. others: tensors in place of arguments. buffers: what some of them hold before."""
        args, kwargs = replaced((self.args, self.kwargs), others) if others else (self.args, self.kwargs)
        if buffers is not None:
            self.state.restore(buffers)
        _threads.record = record
        try:
            with self.stand_in(), record.hooked():
                out = self.run(*args, **kwargs)
            record.note("returns", _named("", self.model), leaves(out), RESULT)
        except PeerError:
            raise
        except Exception as error:
            return error
        finally:
            _threads.record = None
            record.left = self.state.changed()
            self.state.restore()
        return None


def _text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _readings(tensors: dict[int, Tensor], positions: list[Positions]) -> Iterator[Reading]:
    """Which dims of arguments are rows; first the likely reading, then others, where sizes are equal by accident."""
    count = len(positions[0].own)
    pairs = [pair for x in tensors.values() for pair in zip(x.shape, x.shape[1:])]
    units = dict.fromkeys([count, *(b for a, b in pairs if a * b == count and 1 < b < count)])
    likely, others = [], []
    for rows in (Rows(positions, unit) for unit in units):
        possible = {i: found for i, x in tensors.items() if (found := rows.dims(x))}
        dims = {i: found[0] for i, found in possible.items()}
        if dims:
            likely.append((rows, dims))
        for i, found in possible.items():
            others += [(rows, dims | {i: dim}) for dim in found[1:]]
            if len(dims) > 1:
                others.append((rows, {j: dim for j, dim in dims.items() if j != i}))
    yield from likely + others


def _judged(run: Record) -> list[Event]:
    """What decides."""
    return [e for e in run.events if e.kind == "attends over" or e.by == RESULT]


def _compared(first: Record, second: Record, error: Exception | None, rough: bool, tried: str, found: str) -> Verdict:
    """The verdict on two runs. error: of the second. tried, found: what it was like, and what is said of the model."""
    # what is cast back to single precision is rough too
    rough = rough or any(x.dtype in _LOW for event in first.events for sample in event.samples for x in sample.values())
    last, fewer, judged = first.events[-1], second.fewer, list(zip(_judged(first), _judged(second)))
    as_often = error is None and len(_judged(first)) == len(_judged(second))
    if as_often and all(_follows(a, b, rough, fewer=fewer) for a, b in judged):
        return Verdict()
    for a, b in _pairs(first.events, second.events):
        if not _follows(a, b, rough, way=None if a is last else first.events, fewer=fewer):
            break
    else:
        why = f"it fails: {type(error).__name__}: {error}" if error else "it calls attention another time"
        return Verdict(f"tried {tried}, {why}")
    stays = a.kind == "gets" and bool(a.there) and all(_all_close(x, y, rough) for x, y in zip(a.there, b.samples))
    remedy = "; let it take positions as an argument, plan.rope_positions(rank)" if stays else ""
    what = f"what {a.by} gives to {a.name}" if a.kind == "gets" else f"what {a.name} {a.kind}"
    return Verdict(f"tried {tried}, {what} {found}{remedy}")


def _unlike(one: Buffers, other: Buffers) -> set[tuple[nn.Module, str]]:
    """The buffers in which two runs have left something else."""
    both = one.keys() & other.keys()
    apart = {at for at in both if not _close(_flat(one[at]), _flat(other[at]), rough=False)}
    return (one.keys() ^ other.keys()) | apart


def _pairs(first: list[Event], second: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Events of both runs, call by call; experts, for example, that get no rows are not called."""
    waiting: dict[tuple[str, str], list[Event]] = {}
    for event in reversed(second):
        waiting.setdefault(event[:2], []).append(event)
    for event in first:
        if waiting.get(event[:2]):
            yield event, waiting[event[:2]].pop()


def _follows(a: Event, b: Event, rough: bool, *, way: list[Event] | None = None, fewer: bool = False) -> bool:
    """Whether the tensors of an event are those of the rows that lie in their places.

    way: the events of the run, for one that does not decide; tensors without rows then matter only where a module that
    got rows returns none. fewer: whether what has rows in one run alone is none, as sizes are equal by accident.
    """
    if len(a.samples) != len(b.samples):
        return False
    pairs = list(zip(a.samples, b.samples))
    if way is not None and (a.kind != "returns" or _has_rows(a) or not _got_rows(a, way)):
        pairs = [(x, y) for x, y in pairs if -1 not in x]
    if fewer:
        pairs = [(x, y) for x, y in pairs if x.keys() & y.keys()]
    return all(
        any(_close(x[dim], y[dim], rough) for dim in x.keys() & y.keys()) or (-1 in x and x[-1].numel() == 1)
        for x, y in pairs
    )


def _has_rows(event: Event) -> bool:
    return any(-1 not in x for x in event.samples)


def _got_rows(event: Event, way: list[Event]) -> bool:
    """Whether the module of what is returned got rows in its last call before."""
    before = [e for e in way[: next(i for i, e in enumerate(way) if e is event)] if e[:2] == ("gets", event.name)]
    return bool(before) and _has_rows(before[-1])


def _all_close(x: Sample, y: Sample, rough: bool) -> bool:
    return x.keys() == y.keys() and all(_close(x[dim], y[dim], rough) for dim in x)


def _close(a: Tensor, b: Tensor, rough: bool) -> bool:
    """Equal up to rounding, row by row; where products are rough, which may send a row to other experts, most rows."""
    if a.shape != b.shape:
        return False
    bound = ROUGH if rough else CLOSE.get(a.dtype, ROUGH if a.is_floating_point() else 0.0)
    a, b = a.double(), b.double()
    apart = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(torch.inf, posinf=torch.inf)
    scale = a.masked_fill(~a.isfinite(), 0.0).abs().max().clamp(min=1e-30)
    worst = apart.amax(1) / scale
    return bool((worst.median() if bound == ROUGH else worst.max()) <= bound)


def _rough(model: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Whether equal rows may be computed apart by more than single precision rounds."""
    kinds = {x.device.type for x in tensors} | {p.device.type for p in model.parameters()}
    return (
        any(torch.is_autocast_enabled(kind) for kind in kinds)
        or any(x.dtype in _LOW for x in (*model.parameters(), *tensors))
        or torch.get_float32_matmul_precision() != "highest"
    )


def _is_plain(x: Any) -> bool:
    """Whether a value is a tensor whose rows can be picked: not one of shards, of sparse rows or of eight bits."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_nested:
        return False
    return x.dtype.itemsize > 1 or not x.is_floating_point()


def _flat(x: Tensor) -> Tensor:
    return _real(x).reshape(1, -1)


def _picked(x: Tensor, dim: int, at: Ints) -> Tensor:
    """Elements [places, ...] of rows, which are along a dim."""
    rows = x.index_select(dim, torch.from_numpy(at).to(x.device)).movedim(dim, 0)
    return _thin(_real(rows).reshape(len(at), -1))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _is_mask(x: Tensor, rows: int) -> bool:
    """Whether a tensor is of pairs, which are for attention alone."""
    if x.dim() < 2 or x.shape[-2] != rows or x.shape[-1] < rows or not (x.is_floating_point() or x.dtype == torch.bool):
        return False
    return x.dtype == torch.bool or bool(((x == 0) | (x <= torch.finfo(x.dtype).min)).all())


def _places(size: int, unit: int, random: np.random.Generator) -> Ints:
    """Some places of so many, the first and the last ones among them."""
    at = np.arange(size)
    if size > PLACES:
        at = np.concatenate([at[:8], at[-8:], random.choice(size, PLACES - 16, replace=False)])
    return np.unique(at[at % unit != unit // 2])


def _thin(x: Tensor) -> Tensor:
    """Some columns of a matrix."""
    columns = x.shape[1]
    if columns <= ELEMENTS:
        return x.clone()
    return x[:, torch.linspace(0, columns - 1, ELEMENTS, device=x.device).long()]


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
