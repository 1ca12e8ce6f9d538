"""What runs a part of a model again besides torch's checkpoints, and where a backward may run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_a_thread(function: Callable[[], object]) -> None:
    """Run a function in a thread of its own, which no plan surrounds, with the backward passes that it starts."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    for error in errors:
        raise error


class Whole(torch.autograd.Function):
    """What libraries write to recompute on their own: a checkpoint that is nobody's."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            ctx.run(x).backward(dout)
        return None, x.grad


class Unknown(torch.autograd.Function):
    """A checkpoint whose stack shows no context in forward."""

    @staticmethod
    def forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.run, x = inputs
        ctx.save_for_backward(x)

    backward = Whole.backward
