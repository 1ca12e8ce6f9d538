"""Values that ranks compare along with a call: elements of CPU tensors, and a comparison later hashes of CUDA tensors.

To read a CUDA tensor the host would wait for all work before it. So the device computes a hash of the elements, which
is copied to the host behind that work, and the ranks compare it when they next compare a call, or `LATEST` calls later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm

UNDER_WAY = -1  # the key in `Comm.agreed` of hashes that no rank has compared yet; digests are positive
LATEST = 64  # calls, a step or two of a model: by then the device has long computed the hash
ODD = -7046029254386353131  # 2^64 over the golden ratio, as a signed number


@dataclass
class Started:
    """Hashes under way: their names, the memory that they are copied to, and the events after the copies.

    left: calls until they are compared at the latest.
    """

    hashes: list[tuple[str, Tensor, Any]]
    left: int = LATEST


def overdue(comm: Comm) -> bool:
    """Count a call that ranks would not compare. Whether hashes under way have waited long enough, as on all ranks."""
    started: Any = comm.agreed[UNDER_WAY]
    started.left -= 1
    return bool(started.left <= 0)


def comparable(what: str, values: Mapping[str, object], comm: Comm, *, at_once: bool) -> dict[str, object]:
    """Values as plain data that prints equally on all ranks if equal, with those of earlier calls that are due.

    what: the call. at_once: whether the host waits for the device.
    """
    plain, started = due(comm), []
    for name, value in values.items():
        if not isinstance(value, Tensor):
            plain |= {} if value is None else {name: value}
        elif at_once or not is_on_gpu(value):
            plain[f"values of {name}"] = value.detach().double().tolist()
        else:
            started.append((f"a hash of the {name} of an earlier {what}", *to_host(element_hash(value))))
    if started:
        comm.agreed[UNDER_WAY] = Started(started)
    return plain


def due(comm: Comm) -> dict[str, object]:
    """The hashes that earlier calls have started; the host waits for the calls before them."""
    plain: dict[str, object] = {}
    earlier: Any = comm.agreed.pop(UNDER_WAY, None)
    for name, number, copied in earlier.hashes if earlier else ():
        copied.synchronize()
        plain[name] = int(number.numpy())
    return plain


def element_hash(x: Tensor) -> Tensor:
    """A hash of the elements in their order, int64 on x's device; overflow wraps, so any order of additions will do."""
    bits = x.detach().double().reshape(-1).view(torch.int64)
    mixed = ((bits ^ (bits >> 32)) + 1) * ODD
    return (mixed * torch.arange(1, 2 * len(bits) + 1, 2, device=x.device)).sum()


def is_on_gpu(x: Tensor) -> bool:
    """Whether the host would wait to read a tensor."""
    return x.device.type == "cuda"


def to_host(x: Tensor) -> tuple[Tensor, Any]:
    """Memory of the host to which a CUDA tensor is copied behind the work before it, and the event after the copy."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host, torch.cuda.current_stream(x.device).record_event()


def version_of(x: Tensor) -> int | None:
    """The number of writes to a tensor so far; None for one of inference mode, which does not count them."""
    return None if x.is_inference() else x._version


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|: 0 where both are equal or NaN, infinite where one alone is not finite."""
    return (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(torch.inf, posinf=torch.inf)
