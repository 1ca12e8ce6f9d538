"""Results that every rank has whole and uses alike, as in a loss, so that each rank has the whole of their gradients.

A parallel model returns such results, and gives its inputs shares of their gradients. So an input that follows from the
result of another parallel model would give that one a share: backward refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.ops.core.collective_op import refuse_batches
from seqpar.ops.core.compared import check_gradient
from seqpar.private.torch import tree_map_only


def follows_alike(x: Tensor) -> bool:
    """Whether x depends on a result that all ranks use identically: of a function with ``ctx.seqpar_alike``."""
    return any(getattr(node, "seqpar_alike", False) for node in nodes_behind([x.grad_fn]))


def nodes_behind(some: Iterable[Any], ends: Collection[Any] = ()) -> Iterator[Any]:
    """All nodes of autograd's on which some depend, and these; neither `ends` nor what only they depend on."""
    waiting, seen = [*some], {None, *ends}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def refusing_shares(arguments: Any, comm: Comm, what: str, model: str, remedy: str) -> Any:
    """Arguments of a parallel model; NotImplementedError in backward for one that follows from results used alike.

    what: begins the message. remedy: ends it.
    """

    def refuse(_: Tensor) -> None:
        raise NotImplementedError(
            f"{what}: each rank has a share of the gradient of the input of {model}, and the model that computed that "
            f"input needs the whole gradient, {remedy}"
        )

    def refusing(x: Tensor) -> Tensor:
        if follows_alike(x):
            x = x.view_as(x)
            x.register_hook(refuse)
        return x

    alone = comm.size == 1 or not torch.is_grad_enabled()
    return arguments if alone else tree_map_only(Tensor, refusing, arguments)


def whole_output(
    x: Tensor, comm: Comm, what: str, model: str, *, factor: float, compared: bool = True, more: str = ""
) -> Tensor:  # fmt: skip
    """An output that every rank has whole. Its gradient is compared, and multiplied by a factor for the model before.

    what, more: begin and end the message of an error. model: whose output.
    """
    return _WholeOutput.apply(x, comm, (what, model, more) if compared else None, factor)  # type: ignore[no-any-return]


class _WholeOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, told: tuple[str, str, str] | None, factor: float) -> Tensor:
        ctx.comm, ctx.told, ctx.factor, ctx.seqpar_alike = comm, told, factor, comm.size > 1
        return x.detach()  # no view, so that it may be changed in place and its gradients still enter here

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.told is not None:
            what, model, more = ctx.told
            refuse_batches(f"the output of a parallel {model}", [dy])
            check_gradient(what, ctx.comm, dy, of=f" of {model}", more=more)
        return dy * ctx.factor if ctx.factor != 1 else dy, None, None, None
