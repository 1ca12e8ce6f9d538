"""The runs of a trial; each starts from the model's own buffers and attributes.

    first        the given arguments
    second       other rows of the same arguments in their places
    with fewer   the first run without some rows: for effects of their number, as in ``x * log(len(x))``
    afterwards   the first run again, twice, with the buffers that either run has left: for running means and the like

The last two only if no other rank meets this one in the model's forward. If sizes of arguments agree by accident, so
that the dim of rows is ambiguous, the runs are repeated for other readings until the rows follow in one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.comm import PeerError
from seqpar.trial.compare import Verdict, compare, unlike
from seqpar.trial.nested import leaves, substituted
from seqpar.trial.protect import Buffers, SavedState, eager, saved
from seqpar.trial.record import RunRecord, recording
from seqpar.trial.rounding import coarseness
from seqpar.trial.rows import ArgumentRows, FewerRows, Positions, has_rows, is_mask, readings_of

READINGS = 12


def try_model(
    model: nn.Module,
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    positions: list[Positions],
    replacing: Callable[[], AbstractContextManager[Any]],
    *,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    readings: int = READINGS,
    alone: bool = True,
) -> Verdict:
    """The verdict of several runs of ``run(*args, **kwargs)``, the forward of a model.

    positions: of this rank's rows, first those in documents. replacing: a context in which attention records its inputs
    in `under_trial` and returns a function of each row alone. gather: the values of all ranks that run the model
    together with this one. readings: the most readings of the arguments to try. alone: no other rank meets this one in
    the model's forward, so further runs are allowed.

    A rank with too few rows runs the unchanged arguments twice, and then as often as the ranks that it runs with. The
    model is restored: buffers, attributes, random generators, compiled code; so are the arguments.

    Raises: RuntimeError, on all ranks that run together, if the first run fails on only some of them.
    """
    count, arguments = len(positions[0].own), leaves((args, kwargs))
    parameters = list(model.parameters())
    if any(x.is_meta for x in arguments if has_rows(x)) or (parameters and all(p.is_meta for p in parameters)):
        return Verdict(saw=False)  # no values to compare, and attention refuses them
    tensors = {i: x for i, x in enumerate(arguments) if has_rows(x) and not is_mask(x, count)}
    with torch.no_grad(), eager(model), saved(model, [args, kwargs]) as state:
        trial = _Trial(model, run, args, kwargs, replacing, state, tensors, gather, alone)
        waiting = itertools.islice(readings_of(tensors, positions) if count > 1 else iter(()), readings)
        reading, best = next(waiting, None), None
        while True:
            verdict = trial.verdict(reading)
            if best is None or (reading is not None and not verdict.reason and not verdict.error):
                best = verdict if reading or verdict.error else Verdict(saw=False, blind=count > 1)
            reading = next(waiting, None) if best.reason and not verdict.error else None
            # ranks that run together continue until none of them has another reading to try
            if readings == 1 or not any(gather(reading is not None)):
                return best


class _Trial(NamedTuple):
    """A model with its arguments and initial state, as in `try_model`. tensors: of the arguments, by number."""

    model: nn.Module
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    replacing: Callable[[], AbstractContextManager[Any]]
    state: SavedState
    tensors: dict[int, Tensor]
    gather: Callable[[Any], list[Any]]
    alone: bool

    def verdict(self, reading: ArgumentRows | None) -> Verdict:
        """The verdict on a reading. Without a reading, or if all rows are equal, the second run is unpermuted."""
        rows, dims = reading or (None, {})
        tensors = {i: self.tensors[i] for i in dims}
        others = {id(x): rows.shuffled(x, dims[i]) for i, x in tensors.items()}  # type: ignore[union-attr]
        saw = any(not torch.equal(others[id(x)], x) for x in tensors.values())
        first = RunRecord(self.model, rows if saw else None, second=False)
        error = self._run(first, {})
        errors = self.gather(_text(error))
        if any(errors):
            if not all(errors):
                rank = next(rank for rank, text in enumerate(errors) if text)
                who = type(self.model).__name__
                raise RuntimeError(f"{who} failed on rank {rank} when it was tried: {errors[rank]}")
            return Verdict(error=_text(error))
        second = RunRecord(self.model, rows if saw else None, second=True, like=first)
        error = self._run(second, others)
        if isinstance(error, torch.OutOfMemoryError) or (error is not None and not saw):
            return Verdict(error=_text(error))
        if failure := first.failure or second.failure:
            return Verdict(error=failure)
        if not saw or reading is None:
            return Verdict(saw=False)
        how, fault = "with its rows in another order", "depends on the order of rows"
        verdict = compare(first, second, error=error, rough=self._rough(), how=how, fault=fault)
        if self.alone and not verdict.reason:
            verdict = self._with_fewer(first, reading)
        if self.alone and not verdict.reason and unlike(first.changed, second.changed):
            verdict = self._afterwards(reading, first.changed, second.changed)
        return verdict

    def _with_fewer(self, first: RunRecord, reading: ArgumentRows) -> Verdict:
        """The verdict on fewer rows; empty if the model does not accept them."""
        sizes = {n for x in (*self.tensors.values(), *self.model.parameters()) for n in x.shape}
        given = [row for i in reading.dims for row in reading.rows.largest(self.tensors[i])]
        fewer = FewerRows(reading.rows, sizes, given + first.largest)
        record = RunRecord(self.model, fewer, second=True)
        dims = reading.dims if fewer.size else {}
        others = {id(self.tensors[i]): fewer.shortened(self.tensors[i], dim) for i, dim in dims.items()}
        if not others or self._run(record, others) is not None or record.failure:
            return Verdict()
        if [event[:3] for event in record.judged()] != [event[:3] for event in first.judged()]:
            return Verdict()
        fault = "differs for the same rows"
        return compare(first, record, rough=self._rough(), how="with fewer rows", fault=fault)

    def _afterwards(self, reading: ArgumentRows, one: Buffers, other: Buffers) -> Verdict:
        """The verdict on the effect of buffers that either run has left."""
        records = list[RunRecord]()
        for buffers in (one, other):
            records.append(RunRecord(self.model, reading.rows, second=False, like=records[0] if records else None))
            if self._run(records[-1], {}, buffers) is not None or records[-1].failure:
                return Verdict()
        apart, modules = unlike(one, other), self.model.named_modules()
        names = [f"{path}.{key}".lstrip(".") for path, m in modules for key in m._buffers if (m, key) in apart]
        how = f"after other rows, which changed {', '.join(names)}"
        return compare(*records, rough=self._rough(), how=how, fault="differs")

    def _rough(self) -> float:
        return coarseness(self.model, self.tensors.values())

    def _run(self, record: RunRecord, others: dict[int, Tensor], buffers: Buffers | None = None) -> Exception | None:
        """The error of a run, or None. others: replacements of arguments. buffers: initial values of some buffers."""
        args, kwargs = substituted((self.args, self.kwargs), others) if others else (self.args, self.kwargs)
        if buffers is not None:
            self.state.restore(buffers)
        try:
            with recording(record):
                with self.replacing(), record.hooked():
                    out = self.run(*args, **kwargs)
                record.note_result(out)
        except PeerError:
            raise
        except Exception as error:
            return error
        finally:
            record.changed = self.state.changed()
            self.state.restore()
        return None


def _text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
