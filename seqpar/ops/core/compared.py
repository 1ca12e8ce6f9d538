"""Values that ranks compare: leaves of arguments, hashes of tensors, and sketches of gradients.

Along with a call they compare elements of CPU tensors, of large ones a hash, and a comparison later hashes of CUDA
tensors: to read one the host would wait for all work before it. So the device computes a hash of the elements, which is
copied to the host behind that work, and the ranks compare it when they next compare a call, or `LATEST` calls later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.private import torch as torch_private

UNDER_WAY = -1  # the key in `Comm.agreed` of hashes that no rank has compared yet; digests are positive
FEW = 256  # elements of a tensor up to which they are compared, and shown, one by one; of a larger one, a hash
LATEST = 64  # calls, a step or two of a model: by then the device has long computed the hash
SPREAD = 0x1E3779B97F4A7C15  # spreads numbers over all bits
CHUNK = 1 << 20  # elements that are looked at together, so that a large tensor needs little memory in addition
SUMS = 32  # of a `sketch`
# Ranks' gradients of an output may be further apart than bits: where each rank's kernels round in another order, as in
# a loss behind a decoder. All of bfloat16's last digits differ by 0.4 % of the norm, other targets by the norm itself.
SAME_GRADIENT = 0.01  # of the norm
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        elif value.numel() > FEW and (at_once or not is_on_gpu(value)):
            plain[f"a hash of {name}"] = hashed(value)
        elif at_once or not is_on_gpu(value):
            plain[f"values of {name}"] = value.detach().double().tolist()
        else:
            started.append((f"a hash of the {name} of an earlier {what}", *to_host(tensor_hash(value))))
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


def hashed(x: object) -> int:
    """A hash of 64 bits; other elements, or the same in another order, almost never have it. Waits for the device.

    0 for an empty tensor, and for a DTensor or another shard.
    """
    if not isinstance(x, Tensor) or not x.numel() or x.is_meta or type(x).__module__.startswith("torch.distributed"):
        return 0
    if torch_private.is_traceable_wrapper_subclass(x):  # as quantised weights, which consist of others
        found = 0
        for name in x.__tensor_flatten__()[0]:
            found = (found * SPREAD + hashed(getattr(x, name))) % (1 << 64)
        return found
    return int(tensor_hash(x))


def tensor_hash(x: Tensor) -> Tensor:
    """That hash of a plain tensor, int64 on its device; overflow wraps, so any order of additions will do."""
    with torch_private.DisableTorchFunctionSubclass():
        x = x.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        x = torch.view_as_real(x) if x.is_complex() else x
        # as integers, since not every dtype has kernels of sums
        bits = x.contiguous().view(_WHOLE[x.element_size()]).reshape(-1)
    factors = pseudo_random(0, min(CHUNK, len(bits)), bits.device) | 1  # odd, so that any change of one element counts
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        chunk = chunk.long()
        # numbers such as 1.0 have all their bits at the upper end, where products would lose them; zeros count too
        found = found * SPREAD + (((chunk ^ (chunk >> 32)) + 1) * factors[: len(chunk)]).sum()
    return found


def pseudo_random(first: int, count: int, device: torch.device) -> Tensor:
    """Pseudo-random integers of 64 bits for places from the first one on, the same on every device."""
    x = torch.arange(first + 1, first + 1 + count, device=device) * SPREAD
    return (x ^ (x >> 32)) * SPREAD


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


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Tensors and plain values with their paths; for anything else its type."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for n, each in enumerate(value):
            yield from leaves(each, f"{name}.{n}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, (Tensor, bool, int, float, str)):
        yield name, value
    elif value is not None:
        yield name, type(value).__qualname__


def sketch(x: Tensor) -> list[float]:
    """A tensor's sum of squares, and `SUMS` sums of its elements with random signs.

    The squared differences of these sums between two tensors add up to the squared norm of the tensors' difference, on
    average over signs, and nearly so where many elements differ. An element that stands in another place goes unnoticed
    once in `2 * SUMS` pairs of places, which have a sum and a sign in common.
    """
    x = x.detach()
    x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    sums = torch.zeros(1 + SUMS, dtype=torch.float64, device=x.device)
    for n, chunk in enumerate(x.split(CHUNK)):
        wide, random = chunk.double(), pseudo_random(n * CHUNK, len(chunk), x.device)
        sums[0] += wide.square().sum()
        sums[1:].index_add_(0, (random >> 32) % SUMS, torch.where(random < 0, -wide, wide))
    return sums.tolist()  # type: ignore[no-any-return]


def check_gradient(what: str, comm: Comm, grad: Tensor, *, of: str = "", more: str = "") -> None:
    """Raise ValueError on every rank if the gradient of a model's output differs between ranks. A collective.

    what: begins the message. of: says whose output, as " of Latte". more: what else may be done about it.
    """
    every = comm.gather(f"{what}: backward{of}", sketch(grad))
    for rank, other in enumerate(every):
        if (apart := _apart(every[0], other)) > SAME_GRADIENT:
            raise ValueError(
                f"{what}: the gradient of the output{of} differs between rank 0 and rank {rank}, by about {apart:.0%} "
                f"of its norm; compute the whole loss on every rank, from the same target{more}"
            )


def _apart(first: list[float], second: list[float]) -> float:
    """The norm of the difference of two tensors, relative to the larger norm, from their sketches."""
    squares, larger = (first[0], second[0]), max(first[0], second[0])
    if not any(map(math.isfinite, squares)):
        return 0.0  # an overflow happens on all ranks, and a gradient scaler will skip the step
    if not all(map(math.isfinite, squares)):
        return math.inf
    return math.dist(first[1:], second[1:]) / larger**0.5 if larger else 0.0
