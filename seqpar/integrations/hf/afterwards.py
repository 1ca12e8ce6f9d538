"""Changes of a parallel model that its trial did not see, and how each forward notices them.

the forward of its class, of its instance   refused: the new one would not run, or run on rows of its own
its loss_function                           refused with labels
the name of its attention                   refused
modules with attention, or around it        refused if a forward then calls it less often than the trial did
numbers that its logits may depend on       some rows of logits are compared with the head's
hooks, classes and forwards of a user       warned of: the trial has not seen them
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.foreign.hooks import own_code
from seqpar.foreign.kinds import name_of
from seqpar.foreign.wrap import closed_over

DEEP = 8  # wrappers around a forward


class Waypoint(NamedTuple):
    """A module on the way to attention, and what was there in the trial."""

    parent: nn.Module
    name: str
    module: nn.Module
    forward: Any  # of the instance
    written: Any  # of its class

    def changed(self) -> bool:
        """Whether another module, or one with another forward, is there now."""
        now = self.parent._modules.get(self.name)
        own = self.module.__dict__.get("forward")
        return now is not self.module or own is not self.forward or type(now).forward is not self.written


class Afterwards:
    """What a parallel model was like in its trial.

    model: the whole model. attention: the name in its configs. calls: of attention and recurrences, in a forward of the
    trial.
    """

    def __init__(self, model: PreTrainedModel, attention: str, calls: int) -> None:
        self.model, self.attention, self.calls = model, attention, calls
        self.loss_function = model.loss_function if hasattr(model, "loss_function") else None
        self._written: dict[nn.Module, Any] = {}  # the forwards of classes
        self._forward: Callable[..., Any] | None = None  # the model's parallel one
        self._reaching: Any = None  # what stood in its place when it last ran
        self._numbers = numbers_of(model)
        self._waypoints: list[Waypoint] = []
        self._tried = set[tuple[int, object]]()  # a user's code in the trial, as keys of `_user_code`

    def note_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """A module has a parallel forward from now on."""
        self._written[module] = type(module).forward
        if module is self.model:
            self._forward = forward

    def note_waypoints(self, callers: Collection[str]) -> None:
        """All forwards are in place. callers: the classes of the modules that call attention and recurrences."""
        self._waypoints = waypoints(self.model, callers)
        self._tried |= self._user_code().keys()

    def note_passed(self) -> None:
        """The model's parallel forward runs: what stands in its place calls it."""
        self._reaching = self.model.__dict__.get("forward")

    def check(self, module: nn.Module, *, passed: bool) -> None:
        """Raise NotImplementedError if a call of this module would not compute what the trial saw.

        passed: whether the call came by the model's parallel forward.
        """
        who = type(module).__name__
        of_class = any(type(each).forward is not written for each, written in self._written.items())
        of_instance = not passed and not self._reaches_forward()
        now_there = map(unwrap, (self.model.forward, type(self.model).forward))
        if (of_class or of_instance) and any(str(f.__module__).startswith("liger_kernel.") for f in now_there):
            raise NotImplementedError(
                f"{type(self.model).__name__} was given Liger's forward after parallelize, as use_liger_kernel=True of "
                "Trainer does in train(): its loss would be of one rank's tokens; give TrainingArguments "
                "liger_kernel_config={'fused_linear_cross_entropy': False} too, as the loss is computed without logits "
                "here"
            )
        if of_class:
            raise NotImplementedError(
                f"{who}, whose class has another forward than when the model was made parallel: it would not run; call "
                "undo() of the handle and parallelize the model again"
            )
        if of_instance:
            raise NotImplementedError(
                f"{type(self.model).__name__} was given another forward after parallelize, which calls its {who} "
                "without the parallel one: a loss in it would be of one rank's tokens; call undo() of the handle, "
                "replace the forward and parallelize the model again"
            )
        if (now := self.model.config.get_text_config()._attn_implementation) != self.attention:
            raise NotImplementedError(
                f"{who} was given the attention {now!r} after parallelize, which sees one rank's rows; call undo() "
                "first and parallelize again"
            )

    def warn_of_own_code(self) -> None:
        """Warn of code of a user that came since the model was made parallel; the first of several is named."""
        found = self._user_code()
        new = next((key for key in found if key not in self._tried), None)
        if new is not None:
            self._tried |= found.keys()
            number, what = new[0], found[new]
            path = next((path for path, module in self.model.named_modules() if id(module) == number), "")
            warnings.warn(
                f"{path or 'the model'} of a parallel {name_of(self.model)} was given {what}, which sees a rank's "
                "tokens alone, and nothing has tried whether it mixes, counts or numbers them; put it there before "
                "seqpar.parallelize, which tries it",
                stacklevel=2,
            )

    def _user_code(self) -> dict[tuple[int, object], str]:
        """What a user has put on modules, by their ids and `own_code`'s key; other forwards of the model are errors."""
        return {
            (id(module), key): what
            for module in self.model.modules()
            for key, what in own_code(module, forwards=module not in self._written).items()
        }

    def check_calls(self, made: int) -> None:
        """Raise NotImplementedError after a forward with fewer calls than the trial, if modules were replaced since."""
        if made < self.calls and any(waypoint.changed() for waypoint in self._waypoints):
            raise NotImplementedError(
                f"{type(self.model).__name__} made {made} calls of seqpar's attention and recurrences in this forward, "
                f"and {self.calls} when it was made parallel: layers that were replaced since may see one rank's "
                "rows; replace them before seqpar.parallelize"
            )

    @property
    def loss_replaced(self) -> bool:
        """Whether the model has another loss_function; one that each access creates is not compared."""
        now, before = self.model.loss_function, self.loss_function
        return now != before and self.model.loss_function == now

    @property
    def scaled(self) -> bool:
        """Whether numbers have changed that logits may depend on."""
        return numbers_of(self.model) != self._numbers

    def check_logits(self, own: Tensor, expected: Tensor) -> None:
        """Raise NotImplementedError unless the model's own logits of some rows [n, V] are as expected of its head.

        Waits for the device.
        """
        eps = max(torch.finfo(x.dtype).eps for x in (own, expected))
        size = float(expected.double().norm())
        bound = (1e-2 if eps > 1e-6 else 100 * eps) * size
        if not float((own.double() - expected.double()).norm()) <= bound:
            changed = sorted({key[0] for key, x in numbers_of(self.model).items() if self._numbers.get(key) != x})
            raise NotImplementedError(
                f"{type(self.model).__name__} makes other logits of its hidden states than when it was made parallel, "
                f"since {', '.join(changed)} changed; change it before seqpar.parallelize"
            )
        if size:  # rows of zeros do not tell
            self._numbers = numbers_of(self.model)

    def _reaches_forward(self) -> bool:
        """Whether the model's parallel forward is in place, perhaps inside wrappers."""
        own = self.model.__dict__
        now = own.get("forward")
        held = any(x is self._forward for x in own.values()) or (now is not None and now is self._reaching)
        return held or _reaches(now, self._forward, DEEP)


def numbers_of(model: PreTrainedModel) -> dict[tuple[str, int], Any]:
    """Numbers and flags among the attributes of a model, of its base and of its configs, by name and owner."""
    text = model.config.get_text_config()
    configs = (model.config,) if text is model.config else (model.config, text)
    modules = (model,) if model.base_model is model else (model, model.base_model)
    found: dict[tuple[str, int], Any] = {}
    for n, owner in enumerate((*configs, *modules)):
        for name, x in vars(owner).items():
            if isinstance(x, (int, float)) and name[0] != "_" and name != "training":
                found[name, n] = x
            elif isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point():
                found[name, n] = id(x), x._version
    for n, module in enumerate(modules):
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None and x.numel() == 1 and x.is_floating_point():
                found[name, len(configs) + len(modules) + n] = id(x), x._version
    return found


def waypoints(model: PreTrainedModel, callers: Collection[str]) -> list[Waypoint]:
    """The modules of these classes in a model, and all modules around them."""
    found: dict[str, Waypoint] = {}
    for path, module in model.named_modules():
        if name_of(module) not in callers:
            continue
        words = path.split(".") if path else []
        for n in range(1, len(words) + 1):
            at = ".".join(words[:n])
            parent, inner = model.get_submodule(".".join(words[: n - 1])), model.get_submodule(at)
            found[at] = Waypoint(parent, words[n - 1], inner, inner.__dict__.get("forward"), type(inner).forward)
    return list(found.values())


def _reaches(wrapper: Any, wrapped: object, depth: int) -> bool:
    """Whether a callable holds another: as a method, a partial, a decorated function, a default or in its closure."""
    if wrapper is wrapped:
        return True
    if depth == 0 or not callable(wrapper) or isinstance(wrapper, type):
        return False
    held = [getattr(wrapper, name, None) for name in ("__wrapped__", "__func__", "func")]
    held += getattr(wrapper, "args", None) or ()
    for name in ("keywords", "__kwdefaults__", "__dict__"):
        held += (getattr(wrapper, name, None) or {}).values()
    if not isinstance(owner := getattr(wrapper, "__self__", None), nn.Module):
        held += getattr(owner, "__dict__", {}).values()
    held += getattr(wrapper, "__defaults__", None) or ()
    held += closed_over(wrapper)
    return any(_reaches(each, wrapped, depth - 1) for each in held if not isinstance(each, (type, nn.Module)))
