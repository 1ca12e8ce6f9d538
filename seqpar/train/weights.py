"""Whether ranks hold the same weights: a sample of parameters and buffers, and the place where ranks differ.

Sampled are parameters that every rank should hold alike: plain ones, and DTensors with the same part on all of the
comm's ranks, as with tensor parallelism beside the comm or as replicas of HSDP. Parameters that a wrapper shards over
the comm's ranks (FSDP) are one tensor by construction, and left out. Of buffers, those that a checkpoint has and that
hold fractions are sampled, such as a router's bias or a codebook; counters and caches are not.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.ops.core.compared import gap, on_device, to_host
from seqpar.train.dtensor import alike, is_dtensor, local, version

PARAMETERS, VECTORS, BUFFERS = 4, 2, 4  # matrices and vectors of each kind, trained and frozen; buffers
VALUES = 64  # of each tensor, evenly spread


class Sampled(NamedTuple):
    """A parameter or a buffer, and its place in a module; the sample is valid while it keeps that place."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor
    trained: bool
    buffer: bool = False

    def stands(self) -> bool:
        """Whether the tensor is still the module's, and a parameter still trained or frozen as before."""
        if self.buffer:
            return self.module._buffers.get(self.key) is self.tensor
        now = self.module._parameters.get(self.key)
        return now is self.tensor and now.requires_grad == self.trained


def sampled(model: nn.Module, ranks: frozenset[int]) -> list[Sampled]:
    """A model's parameters and buffers that all ranks should hold alike, each once. ranks: the comm's global ranks."""
    several = itertools.chain(_comparable(model, ranks), _comparable_buffers(model))
    return list({id(each.tensor): each for each in several}.values())


def spread(several: Sequence[Sampled]) -> list[Sampled]:
    """A few trained and a few frozen parameters, both matrices and vectors, since optimizers may treat them apart.

    And a few buffers.
    """
    parameters = [each for each in several if not each.buffer]
    found = _spread([each for each in several if each.buffer], BUFFERS)
    for trained, matrices in itertools.product((True, False), repeat=2):
        kind = [each for each in parameters if (each.trained, each.tensor.dim() > 1) == (trained, matrices)]
        found += _spread(kind, PARAMETERS if matrices else VECTORS)
    return found


def _spread(kind: list[Sampled], most: int) -> list[Sampled]:
    """A few of a kind, from the first to the last."""
    count = min(most, len(kind))
    return [kind[index * (len(kind) - 1) // max(1, count - 1)] for index in range(count)]


def _comparable(model: nn.Module, ranks: frozenset[int]) -> Iterator[Sampled]:
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is None or p.is_meta or key == "_flat_param" or getattr(p, "_fsdp_flattened", False):
                continue
            whole = alike(p, ranks) if is_dtensor(p) else type(p.data) is Tensor
            if whole and local(p).numel():
                yield Sampled(f"{path}.{key}" if path else key, module, key, p, p.requires_grad)


def _comparable_buffers(model: nn.Module) -> Iterator[Sampled]:
    for path, module in model.named_modules():
        for key, x in module._buffers.items():
            if x is None or key in module._non_persistent_buffers_set or type(x) is not Tensor:
                continue
            if not x.is_floating_point() or x.itemsize == 1 or x.layout != torch.strided:
                continue
            if x.numel() and not (x.is_meta or x.is_inference()):  # a tensor of inference mode has no version
                yield Sampled(f"{path}.{key}" if path else key, module, key, x, trained=False, buffer=True)


def versions(sample: Sequence[Sampled]) -> list[int]:
    """The counters that every change in place advances, such as an optimizer step."""
    return [version(each.tensor) for each in sample]


def values(sample: Sequence[Sampled]) -> dict[str, Tensor]:
    """The values of a sample by name, fp64 on the CPU; a device is waited for."""
    found = {}
    for several in _kinds(sample):
        joined = torch.cat(list(several.values())).cpu().double()
        found |= dict(zip(several, joined.split([len(x) for x in several.values()])))
    return found


class Fingerprint:
    """A hash of the names and present values of a sample.

    late: whether a device has yet to copy the values; then the host asks for the hash later, and waits for no work.
    """

    @torch.no_grad()
    def __init__(self, sample: Sequence[Sampled]) -> None:
        self._names = "\n".join(each.name for each in sample).encode()
        joined = [torch.cat(list(several.values())) for several in _kinds(sample)]
        self.late = any(on_device(x) for x in joined)
        self._copies = [to_host(x) if on_device(x) else (x, None) for x in joined]

    @cached_property
    def digest(self) -> str:
        """The hash; the host waits for the copies."""
        for _, copied in self._copies:
            if copied is not None:
                copied.synchronize()
        several = b"".join(x.view(torch.uint8).numpy().tobytes() for x, _ in self._copies)
        return hashlib.blake2b(self._names + several, digest_size=8).hexdigest()


@torch.no_grad()
def _kinds(sample: Sequence[Sampled]) -> list[dict[str, Tensor]]:
    """Some values of each tensor by name, for every device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for each in sample:
        flat = local(each.tensor.detach()).reshape(-1)
        some = flat[:: -(-len(flat) // VALUES)]
        some = torch.view_as_real(some).reshape(-1) if some.is_complex() else some
        kinds.setdefault((some.device, some.dtype), {})[each.name] = some
    return list(kinds.values())


class Difference(NamedTuple):
    """The largest difference of two ranks' samples: the tensor's name, and the rank that differs from rank 0."""

    name: str
    rank: int
    largest: float


def difference(found: Sequence[dict[str, Tensor]]) -> Difference | None:
    """The largest difference of the ranks' samples; None if they are equal."""
    worst: Difference | None = None
    for rank, other in enumerate(found):
        for name in found[0] | other:
            largest = _largest_gap(found[0].get(name), other.get(name))
            if largest > (worst.largest if worst else 0.0):
                worst = Difference(name, rank, largest)
    return worst


def _largest_gap(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference; infinite for a value that is missing, of another size or not finite on one rank only."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    return float(gap(a, b).max())
