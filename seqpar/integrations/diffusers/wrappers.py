"""Wrappers of the modules of a model that see tokens: each shares out, attends to or gathers rows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.dsp.moves import unshard_alike
from seqpar.integrations.diffusers.forward import current
from seqpar.integrations.diffusers.tokens import Streams
from seqpar.ops.core.compared import check_gradient


def attending(
    queries: Streams, keys: Streams, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Attention from some streams to some, over the tokens of all ranks."""
    run = current()
    before = run.calls
    with run.attending(queries, keys):
        out = forward(*args, **kwargs)
    expected = 0 if kwargs.get("all_perturbed") else 1  # guidance of LTX-2 takes values as they are
    if run.calls != before + expected:
        raise NotImplementedError(
            f"diffusers: {type(module.processor).__name__} made {run.calls - before} calls of "  # type: ignore[union-attr]
            f"F.scaled_dot_product_attention, expected {expected}; give it a processor of diffusers as it is"
        )
    return out


def attending_whole(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention over tensors that every rank has whole."""
    with current().staying():
        return forward(*args, **kwargs)


def gathering_rows(
    stream: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Tensor:  # fmt: skip
    """The whole output, gathered from this rank's rows of the module's output."""
    run = current()
    plan = run.sharing.gathered(run.sizes, stream)
    rows = forward(*args, **kwargs).narrow(1, 0, plan.rows(run.comm.rank))
    part = run.sharing.part(plan.layout.total, run.comm.rank)
    out = unshard_alike(rows, plan, run.comm, dim=1, start=part.start)
    if out.requires_grad:
        out.register_hook(partial(_gradient_of_output, run.comm, run.sharing.average_over))
    return out


def _gradient_of_output(comm: Comm, times: int, grad: Tensor) -> Tensor | None:
    """The gradient of the whole output as the model takes it, multiplied for a wrapper. A collective.

    Raises: ValueError on every rank if it differs between ranks.
    """
    check_gradient("diffusers", comm, grad)
    return grad * times if times > 1 else None


def sharing_tuple(
    dim: int, module: nn.Module, forward: Callable[..., Any], *args: Any, stream: str = "image", **kwargs: Any
) -> Any:
    """This rank's rows of each tensor of a tuple."""
    run = current()
    return tuple(run.rows(x, dim, stream) for x in forward(*args, **kwargs))


def sharing_rows(
    stream: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Tensor:  # fmt: skip
    """This rank's rows of a tensor."""
    return current().rows(forward(*args, **kwargs), 1, stream)


def sharing_text_and_patches(module: nn.Module, forward: Callable[..., Any], text: Tensor, x: Tensor) -> Tensor:
    """This rank's rows of text and of patches, which the module joins; it numbers both, so it gets the whole text."""
    run = current()
    return run.rows(forward(run.whole["encoder_hidden_states"], x), 1, "text", "image")


def sharing_patches(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Tensor:
    """This rank's rows of the patches of x, in the last dim."""
    return current().rows(forward(x).flatten(2), 2, "image")


def sharing_text_angles(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """This rank's angles of the image and of the text."""
    run = current()
    # the model has only seen this rank's text
    image, text = forward(*args, **kwargs | {"max_txt_seq_len": run.sizes.text})
    return run.rows(image, 0, "image"), run.rows(text, 0, "text")


def sharing_packed(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, time: Tensor, at: Tensor, *args: Any
) -> Tensor:  # fmt: skip
    """A block of MiniMax H3 on this rank's rows of one packed sequence. at [T]: the whole sequence's modulation."""
    run = current()
    # the first block gets the whole sequence
    own = run.rows(x, 1, "image") if x.shape[1] == run.sizes.image else x
    return forward(own, time, run.rows(at, 0, "image"), *args)  # type: ignore[no-any-return]


def sharing_packed_norm(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, time: Tensor, at: Tensor
) -> Tensor:  # fmt: skip
    """The last norm of MiniMax H3 on this rank's rows."""
    return forward(x, time, current().rows(at, 0, "image"))  # type: ignore[no-any-return]


def sharing_history(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, text: Tensor, time: Tensor, angles: Tensor, _: int
) -> Tensor:  # fmt: skip
    """A block of Helios on this rank's rows of the history and of the video after it."""
    run = current()
    # the first block gets the whole sequence
    own = run.rows(x, 1, "history", "image") if x.shape[1] == run.sizes.history + run.sizes.image else x
    whole = (run.rows(y, 1, "history", "image") for y in (time, angles))
    return forward(own, text, *whole, run.held("image"))  # type: ignore[no-any-return]


def sharing_history_norm(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, time: Tensor, _: int
) -> Tensor:  # fmt: skip
    """The last norm of Helios, of this rank's rows of the video."""
    run = current()
    return forward(x, run.rows(time, 1, "history", "image"), run.held("image"))  # type: ignore[no-any-return]
