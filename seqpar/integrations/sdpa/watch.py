"""What a parallel model's code attends to outside its own forward: a rank's rows alone, so it raises.

The forward of the model reroutes attention. Its methods, its parts and a forward that somebody sets later do not, and
inside a block of `seqpar.parallel` they look as if they did.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.foreign.wrap import ParallelModel
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.parallel import BESIDE

Local = Callable[[Tensor, Tensor], bool]

REROUTED = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
Watched = weakref.WeakKeyDictionary[ParallelModel, "Local | None"]  # models, with the calls that stay on their rank

_watched: weakref.WeakKeyDictionary[Comm, Watched] = weakref.WeakKeyDictionary()


def watch(handle: ParallelModel, local: Local | None) -> None:
    """Have blocks of the handle's comm watch its model, until it is restored. One rank has all rows."""
    if handle.comm.size > 1:
        _watched.setdefault(handle.comm, weakref.WeakKeyDictionary())[handle] = local
        BESIDE[handle.comm] = Watch
        handle.on_undo(partial(_forget, handle))


def _forget(handle: ParallelModel) -> None:
    models = _watched[handle.comm]
    models.pop(handle, None)
    if not models:
        BESIDE.pop(handle.comm, None)


class Watch(TorchFunctionMode):
    """The mode of a block of `seqpar.parallel` whose comm has models of plain PyTorch.

    It lies below the mode of `Rerouting`, which takes it off meanwhile: calls of torch are slower under each.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self._parts: dict[int, ParallelModel] | None = None  # the modules of models, by their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REROUTED:
            self._check(func, *args[:2], **kwargs)
        return func(*args, **kwargs)

    @uncompiled
    def _check(self, func: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        """Raise RuntimeError if a part of a model calls this outside the model's forward."""
        if (found := self._calling(sys._getframe(1))) is None:
            return
        module, handle = found
        local = _watched[self.comm].get(handle)
        if handle.asleep or (local is not None and local(query, key)):
            return
        whole, part = (type(x).__name__ for x in (handle.model, module))
        with errors_on_all_ranks("sdpa", self.comm):
            raise RuntimeError(
                f"sdpa: {part} of a parallel {whole} calls {func.__name__} (query {list(query.shape)}) outside the "
                f"forward that parallelize found in {whole}, and would attend to this rank's rows alone; call the "
                "model itself, enter seqpar.sdpa(plan, comm) around the call, or handle.local() if this rank has whole "
                "sequences there"
            )

    def _calling(self, frame: FrameType | None) -> tuple[nn.Module, ParallelModel] | None:
        """The innermost module of a model whose method or function this thread is in."""
        if self._parts is None:
            self._parts = {id(part): each for each in _watched[self.comm] for part in each.model.modules()}
        while frame is not None:
            code = frame.f_code
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(first, nn.Module) and (handle := self._parts.get(id(first))) is not None:
                return first, handle
            frame = frame.f_back
        return None


def take_off() -> list[TorchFunctionMode]:
    """Take the watches off the top of this thread's modes, innermost first."""
    watches = list[TorchFunctionMode]()
    while type(_get_current_function_mode()) is Watch:
        watches.append(_pop_mode())
    return watches


def put_back(watches: list[TorchFunctionMode]) -> None:
    """Put back what `take_off` took."""
    while watches:
        _push_mode(watches.pop())
