"""The state that a trial restores: a model's buffers and attributes, compiled code, random numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from seqpar.nn.wrap import replaced

Buffers = dict[tuple[nn.Module, str], Tensor]
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")  # set up once, at a first forward


class SavedState:
    """A model's state besides its parameters: buffers, and attributes such as the length of a table.

    Objects in attributes are not copied: a list to which a model appends stays longer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._types = [type(m) for m in self._modules]
        self._buffers = [dict(m._buffers) for m in self._modules]
        self._attributes = [{} if _is_wrapper(m) else dict(m.__dict__) for m in self._modules]
        self._copies: Buffers = {
            (m, name): x.clone()
            for m, several in zip(self._modules, self._buffers) for name, x in several.items() if x is not None
        }  # fmt: skip

    def changed(self) -> Buffers:
        """Copies of the buffers whose values have changed, in their former shapes."""
        changed = {}
        for (module, name), copy in self._copies.items():
            now = module._buffers.get(name)
            if now is not None and now.shape == copy.shape and not torch.equal(now, copy):
                changed[module, name] = now.clone()
        return changed

    def restore(self, others: Buffers | None = None) -> None:
        """Restore everything. others: values for some buffers in place of the saved ones."""
        for module, kind, several, before in zip(self._modules, self._types, self._buffers, self._attributes):
            for name in module._buffers.keys() - several.keys():
                del module._buffers[name]
            for name, x in several.items():
                module._buffers[name] = x
                if x is not None:
                    value = (others or {}).get((module, name), self._copies[module, name])
                    if not torch.equal(x, value):
                        x.copy_(value)
            if before and type(module) is kind:  # a lazy module changes its class once it knows its sizes
                for name in module.__dict__.keys() - before.keys():
                    del module.__dict__[name]
                for name, attribute in before.items():
                    if name not in module.__dict__ or module.__dict__[name] is not attribute:
                        module.__dict__[name] = attribute


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_WRAPPERS)


@contextmanager
def saved(model: nn.Module) -> Iterator[SavedState]:
    """Restore the model and the random generators after the block."""
    state, random = SavedState(model), torch.get_rng_state()
    devices = {x.device for x in (*model.buffers(), *model.parameters())}
    states = [(i, torch.cuda.get_rng_state(i)) for i in devices if i.type == "cuda"]
    try:
        yield state
    finally:
        state.restore()
        if not torch.equal(random, torch.get_rng_state()):
            torch.set_rng_state(random)
        for device, of_device in states:
            torch.cuda.set_rng_state(of_device, device)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled: compiling for two runs would not pay."""
    with ExitStack() as stack:
        for module in model.modules():
            if module._compiled_call_impl is not None:
                stack.enter_context(replaced(module, {"_compiled_call_impl": None}))
            if "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.OptimizedModule):
                stack.enter_context(replaced(module, {"forward": module._orig_mod.__call__}))
        yield
