"""Whether ranks hold the same weights and buffers: samples of both, and the place where ranks differ.

Sampled are parameters that every rank should hold alike: plain ones, and DTensors with the same part on all of the
comm's ranks, as with tensor parallelism beside the comm or as replicas of HSDP. Parameters that a wrapper shards over
the comm's ranks (FSDP) are one tensor by construction, and left out. Of buffers, those are sampled that a checkpoint
has and that hold fractions, such as a router's bias or a codebook: by their places, as each step may replace them.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.ops.core.compared import gap, is_on_gpu, to_host
from seqpar.train.dtensor import alike, is_dtensor, local, version
from seqpar.train.wrappers import in_flat

PARAMETERS, VECTORS = 4, 2  # matrices and vectors of each kind, trained and frozen
PLACES = 8  # of buffers
VALUES = 64  # of each tensor, evenly spread


class Sampled(NamedTuple):
    """A parameter, or a buffer, and its place in a module; the sample is valid while it keeps that place."""

    name: str
    module: nn.Module
    key: str
    parameter: Tensor
    trained: bool = False

    def stands(self) -> bool:
        """Whether the parameter is still the module's, and still trained or frozen as before."""
        now = self.module._parameters.get(self.key)
        return now is self.parameter and now.requires_grad == self.trained


def sampled(model: nn.Module, ranks: frozenset[int]) -> list[Sampled]:
    """A model's parameters that all ranks should hold alike, each once. ranks: the comm's global ranks."""
    return list({id(each.parameter): each for each in _comparable(model, ranks)}.values())


def spread(several: Sequence[Sampled]) -> list[Sampled]:
    """A few trained and a few frozen parameters, both matrices and vectors, since optimizers may treat them apart."""
    found = []
    for trained, matrices in itertools.product((True, False), repeat=2):
        kind = [each for each in several if (each.trained, each.parameter.dim() > 1) == (trained, matrices)]
        count = min(PARAMETERS if matrices else VECTORS, len(kind))
        found += [kind[index * (len(kind) - 1) // max(1, count - 1)] for index in range(count)]
    return found


def _comparable(model: nn.Module, ranks: frozenset[int]) -> Iterator[Sampled]:
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is None or p.is_meta or key == "_flat_param" or in_flat(p):
                continue
            whole = alike(p, ranks) if is_dtensor(p) else type(p.data) is Tensor
            if whole and local(p).numel():
                yield Sampled(f"{path}.{key}" if path else key, module, key, p, p.requires_grad)


class BufferPlace(NamedTuple):
    """The place of a buffer in a module; it may hold none."""

    name: str
    module: nn.Module
    key: str


def buffer_places(model: nn.Module) -> list[BufferPlace]:
    """A few places of buffers that a checkpoint has and that ranks should hold alike."""
    found = [
        BufferPlace(f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key, x in module._buffers.items()
        if key not in module._non_persistent_buffers_set and (x is None or _holds_fractions(x))
    ]
    count = min(PLACES, len(found))
    return [found[index * (len(found) - 1) // max(1, count - 1)] for index in range(count)]


def buffers_at(places: Sequence[BufferPlace]) -> list[Sampled]:
    """The buffers that these places hold now."""
    found = [(place, place.module._buffers.get(place.key)) for place in places]
    return [Sampled(*place, x) for place, x in found if x is not None and _holds_fractions(x)]


def _holds_fractions(x: Tensor) -> bool:
    """Whether x is a plain tensor of 16 bits or more that can be sampled; counters and caches of 8 bits are not."""
    plain = type(x) is Tensor and x.layout == torch.strided and not (x.is_meta or x.is_nested)
    return plain and x.is_floating_point() and x.itemsize > 1 and x.numel() > 0


class Latest:
    """The hash of a sample as ranks compare it at each forward: the present one, if the host need not wait for it."""

    def __init__(self) -> None:
        self._fingerprint: Fingerprint | None = None
        self._seen: list[tuple[weakref.ref[Tensor], int | None]] = []  # tensors and versions when it was taken

    def digest(self, sample: Sequence[Sampled], *, agreed: bool) -> str:
        """The hash; after ranks have agreed once, on a device that of the forward before, "" if there is none."""
        before, tensors = self._fingerprint, [each.parameter for each in sample]
        latest = before if before is not None and self._as_seen(tensors) else Fingerprint(sample)
        self._fingerprint, self._seen = latest, [(weakref.ref(x), _version(x)) for x in tensors]
        if agreed and latest.late:
            return "" if before is None else before.digest
        return latest.digest

    def _as_seen(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors of the last time, unchanged. An id would not do: new tensors get it again."""
        return len(tensors) == len(self._seen) and all(
            seen() is x and at is not None and at == _version(x) for (seen, at), x in zip(self._seen, tensors)
        )


def _version(x: Tensor) -> int | None:
    """The counter that every change in place advances, such as an optimizer step; None for tensors without one."""
    return None if x.is_inference() else version(x)


def values(sample: Sequence[Sampled]) -> dict[str, Tensor]:
    """The values of a sample by name, fp64 on the CPU; a device is waited for."""
    found = {}
    for several in _kinds(sample):
        joined = torch.cat(list(several.values())).cpu().double()
        found |= dict(zip(several, joined.split([len(x) for x in several.values()])))
    return found


class Fingerprint:
    """A hash of the names and present values of a sample, and which of it are trained.

    late: whether a device has yet to copy the values; then the host asks for the hash later, and waits for no work.
    """

    @torch.no_grad()
    def __init__(self, sample: Sequence[Sampled]) -> None:
        self._names = "\n".join(f"{each.name} {each.trained}" for each in sample).encode()
        joined = [torch.cat(list(several.values())) for several in _kinds(sample)]
        self.late = any(is_on_gpu(x) for x in joined)
        self._copies = [to_host(x) if is_on_gpu(x) else (x, None) for x in joined]

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
    """Some values of each parameter by name, for every device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for each in sample:
        flat = local(each.parameter.detach()).reshape(-1)
        some = flat[:: -(-len(flat) // VALUES)]
        some = torch.view_as_real(some).reshape(-1) if some.is_complex() else some
        kinds.setdefault((some.device, some.dtype), {})[each.name] = some
    return list(kinds.values())


class Difference(NamedTuple):
    """The largest difference of two ranks' samples: the parameter, and the rank that differs from rank 0."""

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
