"""What the trial of a transformers model is valid for, checked at each forward.

It is valid for the classes of the modules, their forwards, `loss_function` and the name of the attention. Where one of
them is another, the call is an error that names the module. Wrappers of known libraries may come (`identity`).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from seqpar.foreign import name_of
from seqpar.foreign.wrap import reaches
from seqpar.private.transformers import attention_of
from seqpar.trial.identity import own_code

AGAIN = "call undo() of the handle, and parallelize the model again after the change"


class ModelGuard:
    """What a parallel model was like in its trial. attention: the name in its configs."""

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        self.model, self.attention = model, attention
        self.loss_function = model.loss_function if hasattr(model, "loss_function") else None
        self._parallel: list[tuple[nn.Module, Any]] = []  # modules with a parallel forward, and their class's forward
        self._forward: Callable[..., Any] | None = None  # the model's parallel one
        self._reaching: Any = None  # what stood in its place when it last ran
        # by id, as a module may have a hash of its own
        self._code = {id(module): own_code(module) for module in model.modules()}
        self._checked: dict[int, tuple[Any, ...]] = {}  # by id, the class and forwards when it last was in order

    def note_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """A module has a parallel forward from now on."""
        self._parallel.append((module, type(module).forward))
        if module is self.model:
            self._forward = forward

    def note_passed(self) -> None:
        """The model's parallel forward runs: what stands in its place calls it."""
        self._reaching = self.model.__dict__.get("forward")

    def check(self, module: nn.Module, *, passed: bool) -> None:
        """Raise NotImplementedError if a call of this module would not compute what the trial saw.

        passed: whether the call came by the model's parallel forward.
        """
        who, model = type(module).__name__, type(self.model).__name__
        of_class = any(type(each).forward is not written for each, written in self._parallel)
        of_instance = not passed and not self._reaches_forward()
        now_there = map(unwrap, (self.model.forward, type(self.model).forward))
        if (of_class or of_instance) and any(str(f.__module__).startswith("liger_kernel.") for f in now_there):
            raise NotImplementedError(
                f"{model} was given Liger's forward after parallelize, as use_liger_kernel=True of Trainer does in "
                "train(): its loss would be of one rank's tokens; give TrainingArguments "
                "liger_kernel_config={'fused_linear_cross_entropy': False} too, as the loss is computed without logits "
                "here"
            )
        if of_class or of_instance:
            raise NotImplementedError(
                f"{who if of_class else model} was given another forward after parallelize, so that its {who} would "
                f"compute without the parallel one; {AGAIN}"
            )
        if (now := attention_of(self.model.config.get_text_config())) != self.attention:
            raise NotImplementedError(
                f"{who} was given the attention {now!r} after parallelize, which sees one rank's rows; {AGAIN}"
            )

    def check_modules(self) -> None:
        """Raise NotImplementedError for a module with a class or a forward of a user that the trial has not seen."""
        parallel = [id(module) for module, _ in self._parallel]
        for module in self.model.modules():
            forwards = type(module), type(module).forward, module.__dict__.get("forward")
            if self._checked.get(id(module)) == forwards:
                continue
            now, before = own_code(module), self._code.get(id(module), (None, None, None))
            if now == before or id(module) in parallel:
                self._checked[id(module)] = forwards
                continue
            path = next(path for path, each in self.model.named_modules() if each is module)
            what = "another forward" if now[0] is before[0] else f"a module of the class {name_of(module)}"
            raise NotImplementedError(
                f"{path or 'the model'} of a parallel {name_of(self.model)} was given {what} after parallelize, which "
                f"has not been tried on a rank's rows; {AGAIN}"
            )

    @property
    def loss_replaced(self) -> bool:
        """Whether the model has another loss_function; one that each access creates is not compared."""
        now, before = self.model.loss_function, self.loss_function
        return now != before and self.model.loss_function == now

    def _reaches_forward(self) -> bool:
        """Whether the model's parallel forward is in place, perhaps inside wrappers."""
        own = self.model.__dict__
        now = own.get("forward")
        held = any(x is self._forward for x in own.values()) or (now is not None and now is self._reaching)
        return held or reaches([now], lambda each: each is self._forward)
