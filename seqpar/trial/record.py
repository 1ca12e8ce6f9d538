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
from seqpar.trial.rows import RunRows, Sample, random_rows

RESULT, ATTENDS = "result", "attends over"


class Event(NamedTuple):
    """Samples of the tensors that a module gets (from module ``by``), returns, or attends over."""

    kind: str
    name: str
    by: str
    samples: list[Sample]

    @property
    def decides(self) -> bool:
        """Whether rows must follow here; all other events only help to find the cause."""
        return self.kind == ATTENDS or self.by == RESULT

    @property
    def has_rows(self) -> bool:
        """Whether some of the tensors may have rows."""
        return any(sample.rows for sample in self.samples)


class RunRecord:
    """The events of one run, in order; empty if no rows are compared.

    narrow: whether some tensor has 16 bits. changed: buffers that the run changed. failure: an error while recording,
    which does not end the run, since other ranks may be in it too.
    """

    def __init__(self, model: nn.Module, rows: RunRows | None) -> None:
        self.model, self.rows, self.failure, self.narrow = model, rows, "", False
        self.changed: Buffers = {}
        self.events: list[Event] = []
        self._modules: list[str] = []  # names of modules being computed
        self._calls = 0

    def attended(self, out: tuple[int, ...], *given: Tensor) -> Tensor:
        """Random rows [T, ...] in place of attention's, the first run's for the same rows; records its inputs."""
        with torch_private.DisableTorchFunction():
            self.note(ATTENDS, self._modules[-1] if self._modules else named("", self.model), given)
            self._calls += 1
            draw = random_rows if self.rows is None else self.rows.drawn
            return draw(out, given[0], self._calls)

    def note(self, kind: str, name: str, tensors: Iterable[Any], by: str = "") -> None:
        """Record tensors, if some of them are rows."""
        if self.rows is None or self.failure:
            return
        try:
            with torch_private.DisableTorchFunction(), torch.no_grad():
                plain = [x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided]
                plain = [x for x in plain if x.numel() and x.dim()]  # a tensor without dims is a loss
                self.narrow |= any(x.is_floating_point() and x.dtype.itemsize < 4 for x in plain)
                self.events.append(Event(kind, name, by, [self.rows.sample(x) for x in plain]))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

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

    def _gets(self, name: str, _: nn.Module, args: Any, kwargs: Any = None) -> None:
        # other threads may share the model, and call a hook without kwargs while it is registered or removed
        if under_trial() is self:
            by = self._modules[-1] if self._modules else named("", self.model)
            self.note("gets", name, leaves((args, kwargs)), by)
            self._modules.append(name)

    def _returns(self, name: str, _: nn.Module, args: Any, out: Any) -> None:
        if under_trial() is self:
            self._modules.pop()
            self.note("returns", name, leaves(out))

    @property
    def undefined(self) -> bool:
        """Whether a tensor that decides has NaN."""
        return any(bool(sample.whole.isnan().any()) for event in self.judged() for sample in event.samples)

    def judged(self) -> list[Event]:
        """The events that decide whether rows follow."""
        return [event for event in self.events if event.decides]


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
