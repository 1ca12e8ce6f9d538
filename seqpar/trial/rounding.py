"""How far two runs of a model may lie apart, and how far they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

LOW = {torch.bfloat16, torch.float16}
COARSE, TF32 = 2.0**-7, 2.0**-10  # the distance of 1 from the next number, in bfloat16, and in GPUs' products of fp32


def coarseness(model: nn.Module, tensors: Iterable[Tensor]) -> float:
    """How coarsely products round, from 1 to the next number, if more so than single precision, else 0.

    All 16-bit dtypes count as bfloat16: models in float16 often have linear layers of 8 bits.
    """
    tensors = [*model.parameters(), *tensors]
    kinds, precision = {x.device.type for x in tensors} - {"meta"}, torch.get_float32_matmul_precision()
    if (
        any(torch.is_autocast_enabled(kind) for kind in kinds)
        or any(x.dtype in LOW for x in tensors)
        or precision == "medium"
    ):
        return COARSE
    # CPUs compute "high" as "highest"
    return TF32 if precision == "high" and kinds != {"cpu"} else 0.0


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """The dtypes to which autocast casts on CPU and GPU, None where it is off."""
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))


@contextmanager
def under_autocast(dtypes: Sequence[torch.dtype | None]) -> Iterator[None]:
    """A block with autocast as `autocast_dtypes` found it."""
    with ExitStack() as stack:
        for device, now, dtype in zip(("cpu", "cuda"), autocast_dtypes(), dtypes):
            if now != dtype:
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        yield
