"""What ranks make of parallel copies of one model, what their errors say, and wrappers around models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads


def on_copies(model: nn.Module, call: Callable[[Any, Comm], Any], *, ranks: int = 2, **options: Any) -> list[Any]:
    """What ``call(own, comm)`` returns on each rank, whose model is a parallel copy. options: of `parallelize`."""

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, **options):
            return call(own, comm)

    return run_threads(ranks, rank)


def error_of(call: Callable[..., object], *given: Any, **named: Any) -> str:
    """The kind and message of what a call raises, or "nothing"."""
    try:
        call(*given, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors(call: Callable[..., object], *given: Any, ranks: int = 2, timeout: float = 200.0) -> list[str]:
    """What ``call(comm, *given)`` raises on each rank."""
    return run_threads(ranks, lambda comm: error_of(call, comm, *given), timeout=timeout)


def errors_on_copies(
    model: nn.Module, call: Callable[[Any, Comm], object], *, ranks: int = 2, **options: Any
) -> list[str]:
    """What ``call(own, comm)`` raises on each rank, whose model is a parallel copy."""
    return on_copies(model, lambda own, comm: error_of(call, own, comm), ranks=ranks, **options)


def in_wrapper(model: nn.Module, how: str, parts: Iterable[nn.Module] = ()) -> nn.Module:
    """A model in DDP, or, as "fsdp", its parts and itself under `fully_shard`."""
    if how == "ddp":
        return DistributedDataParallel(model)
    for part in (*parts, model):
        fully_shard(part)
    return model


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients that there are, by name, put together from their shards."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}
