"""The record of a trial run: the inputs and outputs of modules, and the inputs of attention.

Modules nest, so a module's input comes from the module that is being computed (``by``):

    Decoder gets tokens      by the model
      Layer gets x             by Decoder
        ... attends over q, k, v
      Layer returns y
    Decoder returns y        ...     the whole model's output is by `RESULT`
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.private import torch as torch_private
from seqpar.trial.nested import leaves
from seqpar.trial.protect import Buffers
from seqpar.trial.rounding import LOW
from seqpar.trial.rows import FewerRows, Ranges, Sample, ShuffledRows

RESULT = "result"


class Event(NamedTuple):
    """Samples of the tensors that a module gets (from module ``by``), returns, or attends over.

    unmoved: samples of the first run at the second run's places; equal to its own samples where nothing moved. ranges:
    over all places, of tensors that decide.
    """

    kind: str
    name: str
    by: str
    samples: list[Sample]
    unmoved: list[Sample]
    ranges: list[Ranges]


class RunRecord:
    """The events of one run, in order; empty if no rows are compared.

    like: the earlier run that this one is compared with. changed: buffers that the run changed. failure: an error while
    recording, which does not end the run, since other ranks may be in it too.
    """

    def __init__(
        self, model: nn.Module, rows: ShuffledRows | FewerRows | None, *, second: bool, like: RunRecord | None = None
    ) -> None:  # fmt: skip
        self.model, self.rows, self.second, self.failure = model, rows, second, ""
        self._like = iter(like.judged() if like is not None else ())
        self.fewer = isinstance(rows, FewerRows)
        self.changed: Buffers = {}
        self.largest: list[int] = []  # rows with the largest elements of some tensor
        self.events: list[Event] = []
        self._modules: list[str] = []  # names of modules being computed

    def note(self, kind: str, name: str, tensors: Iterable[Any], by: str = "") -> None:
        """Record tensors, if some of them are rows."""
        if self.rows is None or self.failure:
            return
        try:
            with torch_private.DisableTorchFunction(), torch.no_grad():
                self.events.append(self._event(self.rows, kind, name, tensors, by))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _event(self, rows: ShuffledRows | FewerRows, kind: str, name: str, tensors: Iterable[Any], by: str) -> Event:
        plain = [x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.numel()]
        plain = [x for x in plain if x.dim()]  # a tensor without dims is a loss
        samples = [rows.sample(x, second=self.second) for x in plain]
        unmoved = [] if self.second else [rows.sample(x, second=True) for x in plain]
        decides = kind == "attends over" or by == RESULT
        if not self.second and kind != "returns":  # another module gets it
            self.largest += [row for x in plain for row in rows.largest(x)]
        earlier = next(self._like, None) if decides else None
        ranges = list[Ranges]()
        for number, x in enumerate(plain):
            like = earlier.ranges[number] if earlier is not None and number < len(earlier.ranges) else None
            # in half precision one row may lie apart
            told = decides and x.dtype not in LOW
            ranges.append(rows.ranges(x, second=self.second, like=like) if told else {})
        return Event(kind, name, by, samples, unmoved, ranges)

    def note_attention(self, *tensors: Tensor) -> None:
        """Record queries, keys and values."""
        self.note("attends over", self._current(), tensors)

    def note_result(self, out: Any) -> None:
        """Record the model's output."""
        self.note("returns", named("", self.model), leaves(out), RESULT)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record the inputs and outputs of the model's modules."""
        with ExitStack() as hooks:
            with _registering:
                for name, module in self.model.named_modules():
                    if name and not isinstance(module, torch.jit.ScriptModule):
                        full = named(name, module)
                        gets = module.register_forward_pre_hook(partial(self._gets, full), with_kwargs=True)
                        hooks.callback(gets.remove)
                        hooks.callback(module.register_forward_hook(partial(self._returns, full)).remove)
            yield

    def _current(self) -> str:
        return self._modules[-1] if self._modules else named("", self.model)

    def _gets(self, name: str, _: nn.Module, args: Any, kwargs: Any = None) -> None:
        # other threads may share the model, and call a hook without kwargs while it is registered or removed
        if under_trial() is self:
            self.note("gets", name, leaves((args, kwargs)), self._current())
            self._modules.append(name)

    def _returns(self, name: str, _: nn.Module, args: Any, out: Any) -> None:
        if under_trial() is self:
            self._modules.pop()
            self.note("returns", name, leaves(out))

    def judged(self) -> list[Event]:
        """The events that decide whether rows follow; all others only help to locate the cause."""
        return [event for event in self.events if event.kind == "attends over" or event.by == RESULT]


_threads = threading.local()
_registering = threading.Lock()  # torch may number hooks alike that two threads register at a time


def under_trial() -> RunRecord | None:
    """The run that this thread is in, or None."""
    return getattr(_threads, "record", None)


@contextmanager
def recording(record: RunRecord) -> Iterator[None]:
    """This thread is in that run until the block ends."""
    _threads.record = record
    try:
        yield
    finally:
        _threads.record = None


def named(name: str, module: nn.Module) -> str:
    """A module's name in messages."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
