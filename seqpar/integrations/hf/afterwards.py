"""Changes of a parallel model that its trial did not see, and how each forward notices them.

the forward of its class, of its instance   refused: the new one would not run, or run on rows of its own
its loss_function                           refused with labels
the name of its attention                   refused
modules with attention                      refused if a forward makes fewer collective calls than the trial did
numbers that its logits may depend on       a row of logits is compared with the head's where they are not made
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

DEEP = 8  # wrappers around a forward


class Afterwards:
    """What a parallel model was like in its trial.

    model: the whole model. attention: the name in its configs. calls: the collective calls of a forward in the trial.
    """

    def __init__(self, model: PreTrainedModel, attention: str, calls: int) -> None:
        self.model, self.attention, self.calls = model, attention, calls
        self.loss_function = getattr(model, "loss_function", None)
        self._written: dict[nn.Module, Any] = {}  # the forwards of classes
        self._forward: Callable[..., Any] | None = None  # the model's parallel one
        self._numbers = numbers_of(model)

    def note_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """A module has a parallel forward from now on."""
        self._written[module] = type(module).forward
        if module is self.model:
            self._forward = forward

    def check(self, module: nn.Module, *, passed: bool) -> None:
        """Raise NotImplementedError if a call of this module would not compute what the trial saw.

        passed: whether the call came by the model's parallel forward.
        """
        who = type(module).__name__
        if any(type(each).forward is not written for each, written in self._written.items()):
            raise NotImplementedError(
                f"{who}, whose class has another forward than when the model was made parallel: it would not run; call "
                "undo() of the handle and parallelize the model again"
            )
        if not passed and not self._reaches_forward():
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

    def check_calls(self, made: int) -> None:
        """Raise NotImplementedError after a forward that made fewer collective calls than the trial."""
        if made < self.calls:
            raise NotImplementedError(
                f"{type(self.model).__name__} made {made} calls of seqpar's attention and recurrences in this forward, "
                f"and {self.calls} when it was made parallel: layers that were replaced since see one rank's rows; "
                "replace them before seqpar.parallelize"
            )

    @property
    def loss_replaced(self) -> bool:
        """Whether the model has another loss_function."""
        return self.model.loss_function is not self.loss_function

    @property
    def scaled(self) -> bool:
        """Whether numbers have changed that logits may depend on."""
        return numbers_of(self.model) != self._numbers

    def check_logits(self, own: Tensor, expected: Tensor) -> None:
        """Raise NotImplementedError unless the model's own logits of some rows [n, V] are as expected of its head.

        Waits for the device.
        """
        rough = any(torch.finfo(x.dtype).eps > 1e-6 for x in (own, expected))
        bound = (1e-2 if rough else 1e-4) * float(expected.double().norm())
        if not float((own.double() - expected.double()).norm()) <= bound:
            changed = sorted(n for n, x in numbers_of(self.model).items() if self._numbers.get(n) != x)
            raise NotImplementedError(
                f"{type(self.model).__name__} makes other logits of its hidden states than when it was made parallel, "
                f"since {', '.join(changed)} changed; change it before seqpar.parallelize"
            )
        self._numbers = numbers_of(self.model)

    def _reaches_forward(self) -> bool:
        """Whether the model's parallel forward is in place, perhaps inside wrappers."""
        own = self.model.__dict__
        held = any(x is self._forward for x in own.values())
        return held or _reaches(own.get("forward"), self._forward, DEEP)


def numbers_of(model: PreTrainedModel) -> dict[str, Any]:
    """Numbers and flags among the attributes of a model and of its configs, by name."""
    found: dict[str, Any] = {}
    text = model.config.get_text_config()
    for owner in (model.config, model) if text is model.config else (text, model.config, model):
        found |= {n: x for n, x in vars(owner).items() if isinstance(x, (int, float)) and n[0] != "_"}
    found.pop("training", None)
    return found


def _reaches(wrapper: Any, wrapped: object, depth: int) -> bool:
    """Whether a callable holds another: as a method, a partial, a decorated function or in its closure."""
    if wrapper is wrapped:
        return True
    if depth == 0 or not callable(wrapper):
        return False
    held = [getattr(wrapper, name, None) for name in ("__wrapped__", "__func__", "func", "forward")]
    held += getattr(wrapper, "args", None) or ()
    for cell in getattr(wrapper, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return any(_reaches(each, wrapped, depth - 1) for each in held if not isinstance(each, (type, nn.Module)))
