"""The runs of a trial, each of which starts from the model's own buffers and attributes.

    first        the given arguments, with random rows in place of attention's
    halves       half of the rows, in another order; then the other half: attention returns the first run's rows
    afterwards   the first run again, twice, with the buffers that either run has left: for running means and the like

The last only if no other rank meets this one in the model's forward. If ranks meet there, or the model fails with fewer
rows, each half has as many rows as there are, some of them several times. If sizes of arguments agree by accident, so
that the dim of rows is ambiguous, the runs are repeated for other readings until the rows follow in one of them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.comm import PeerError
from seqpar.trial.compare import Verdict, compare, unlike
from seqpar.trial.nested import leaves, substituted
from seqpar.trial.protect import Buffers, SavedState, eager, saved
from seqpar.trial.randomness import Deterministic
from seqpar.trial.record import RunRecord, recording
from seqpar.trial.rows import ArgumentRows, Positions, RunRows, has_rows, is_mask, readings_of
from seqpar.trial.weights import coarse, drawn, quantised, widened

READINGS = 12
_turns: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()


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

    positions: of this rank's rows, first those in documents. replacing: a context in which attention is
    `RunRecord.attended` of `under_trial`. gather: the values of all ranks that run the model together with this one.
    readings: the most readings of the arguments to try. alone: no other rank meets this one in the model's forward, so
    it may have other weights, and further runs are allowed.

    A rank with too few rows runs the unchanged arguments as often as the ranks that it runs with. The model is
    restored: buffers, attributes, random generators, compiled code; so are the arguments.

    Raises: RuntimeError, on all ranks that run together, if the first run fails on only some of them.
    """
    arguments = leaves((args, kwargs))
    parameters = list(model.parameters())
    if any(x.is_meta for x in arguments if has_rows(x)) or (parameters and all(p.is_meta for p in parameters)):
        return Verdict(saw=False)  # no values to compare, and attention refuses them
    # ranks that are threads may share the model
    turn = _turns.setdefault(model, threading.Lock()) if alone else nullcontext()
    with turn, torch.no_grad(), eager(model), saved(model, [args, kwargs]) as state:
        trial = _Trial(model, run, args, kwargs, positions, replacing, state, gather, alone, random_weights=alone)
        verdict = trial.best(readings)
        if alone and verdict.error:  # it may not take other weights, or other dtypes
            verdict = trial._replace(random_weights=False).best(readings)
        return verdict


class _Trial(NamedTuple):
    """A model with its arguments and initial state, as in `try_model`."""

    model: nn.Module
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    positions: list[Positions]
    replacing: Callable[[], AbstractContextManager[Any]]
    state: SavedState
    gather: Callable[[Any], list[Any]]
    alone: bool
    random_weights: bool

    def best(self, readings: int) -> Verdict:
        """The verdict on the first reading of the arguments in which the rows follow, else on the likeliest one."""
        count = len(self.positions[0].own)
        tensors = {i: x for i, x in enumerate(self._arguments()) if has_rows(x) and not is_mask(x, count)}
        waiting = itertools.islice(readings_of(tensors, count) if count > 1 else iter(()), readings)
        reading, best = next(waiting, None), None
        while True:
            verdict = self._verdict(reading)
            if best is None or (reading is not None and not verdict.reason and not verdict.error):
                best = verdict if reading or verdict.error else Verdict(saw=False, blind=count > 1)
            reading = next(waiting, None) if best.reason and not verdict.error else None
            # ranks that run together continue until none of them has another reading to try
            if readings == 1 or not any(self.gather(reading is not None)):
                return best

    def _arguments(self) -> list[Any]:
        return leaves((self.args, self.kwargs))

    def _verdict(self, reading: ArgumentRows | None) -> Verdict:
        """The verdict on a reading; without one, all runs are the first one."""
        first, error = self._run(reading, reading and reading.every())
        errors = self.gather(_text(error))
        if any(errors):
            if not all(errors):
                rank = next(rank for rank, text in enumerate(errors) if text)
                who = type(self.model).__name__
                raise RuntimeError(f"{who} failed on rank {rank} when it was tried: {errors[rank]}")
            return Verdict(error=_text(error))
        if self.random_weights and first.undefined:
            return Verdict(error="with random weights it gives NaN")
        verdict, changed = Verdict(), first.changed
        for number in range(2):
            found, second = self._compared(first, reading, number)
            if not verdict.reason and not verdict.error:
                verdict, changed = found, second.changed
            if self.alone and (verdict.reason or verdict.error):
                return verdict  # other ranks would run on
        if reading and self.alone and unlike(first.changed, changed):
            return Verdict(self._afterwards(reading, first.changed, changed))
        return verdict

    def _compared(self, first: RunRecord, reading: ArgumentRows | None, half: int) -> tuple[Verdict, RunRecord]:
        """The verdict on a second run with this half of the rows, and its record."""
        own = self.positions[0].own
        few, many = (reading.halves(own, as_many=n)[half] if reading else None for n in (False, True))
        # a run that fails in the middle would let other ranks wait
        second, error = self._run(reading, few if self.alone else many)
        if error is not None and self.alone:
            second, error = self._run(reading, many)
        if isinstance(error, torch.OutOfMemoryError) or (error is not None and reading is None):
            return Verdict(error=_text(error)), second
        if failure := first.failure or second.failure:
            return Verdict(error=failure), second
        if reading is None:
            return Verdict(saw=False), second
        how, fault = "with some of its rows in another order", "depends on the other rows"
        return Verdict(compare(first, second, error=error, coarse=self._rounds(), how=how, fault=fault)), second

    def _afterwards(self, reading: ArgumentRows, one: Buffers, other: Buffers) -> str:
        """Why the buffers that either run has left matter, or ""."""
        runs = [self._run(reading, reading.every(), buffers) for buffers in (one, other)]
        records = [record for record, error in runs if error is None and not record.failure]
        if len(records) < 2:
            return ""
        apart, modules = unlike(one, other), self.model.named_modules()
        names = [f"{path}.{key}".lstrip(".") for path, m in modules for key in m._buffers if (m, key) in apart]
        how = f"after other rows, which changed {', '.join(names)}"
        return compare(*records, coarse=self._rounds(), how=how, fault="differs")

    def _rounds(self) -> bool:
        """Whether products round to few bits."""
        return coarse(self.model, random=self.random_weights)

    def _others(self, reading: ArgumentRows | None, rows: RunRows | None) -> dict[int, Tensor]:
        """Replacements of arguments, by id: these rows of them, in 32 bits if weights are."""
        count, others = len(self.positions[0].own), dict[int, Tensor]()
        for number, x in enumerate(self._arguments()):
            if not has_rows(x):
                continue
            other = x
            if rows is not None and is_mask(x, count):
                for dim in (-2, -1) if x.shape[-1] == count else (-2,):
                    other = rows.taken(other, x.dim() + dim)
            elif rows is not None and reading is not None and number in reading.dims:
                other = rows.taken(x, reading.dims[number], self.positions)
            others[id(x)] = widened(other) if self.random_weights and not quantised(self.model) else other
        return others

    def _run(
        self, reading: ArgumentRows | None, rows: RunRows | None, buffers: Buffers | None = None
    ) -> tuple[RunRecord, Exception | None]:
        """The record and the error of a run. buffers: initial values of some buffers."""
        record = RunRecord(self.model, rows)
        if buffers is not None:
            self.state.restore(buffers)
        try:
            args, kwargs = substituted((self.args, self.kwargs), self._others(reading, rows))
            with ExitStack() as stack:
                stack.enter_context(recording(record))
                if self.random_weights:
                    stack.enter_context(drawn(self.model))
                with Deterministic(), self.replacing(), record.hooked():
                    out = self.run(*args, **kwargs)
                record.note_result(out)
        except PeerError:
            raise
        except Exception as error:
            return record, error
        finally:
            record.changed = self.state.changed()
            self.state.restore()
        return record, None


def _text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
