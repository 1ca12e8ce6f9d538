"""Values of a batch on the host: one copy for all columns of a device, and none for a batch that the host has read.

To read a value of a device, the host waits for all work that was given to the device before. So values are remembered,
for as long as the tensor lives and is not changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.facts.value import Ints
from seqpar.kernels.memory.upload import upload

_read: Any = WeakTensorKeyDictionary()  # a device's tensor -> its version, and its copy on the host


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, without gradients; those of a device that were not read before come in one copy."""
    unread: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        if not x.is_cpu and _copy_of(x) is None:
            unread.setdefault(x.device, []).append(x)
    fresh = {id(x): copy for several in unread.values() for x, copy in zip(several, _copied(several), strict=True)}
    return [x.detach() if x.is_cpu else fresh[id(x)] if id(x) in fresh else _copy_of(x) for x in tensors]


def remember(x: Tensor, copy: Tensor) -> None:
    """Remember the copy on the host of a device's tensor."""
    if not x.is_cpu and not x.is_inference():  # changes of inference tensors cannot be detected
        _read[x] = x._version, copy


def _copy_of(x: Tensor) -> Tensor | None:
    version, copy = _read.get(x, (None, None))
    return copy if copy is not None and version == x._version else None


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of the tensors of one device, end to end in one transfer; those of most bytes first, to be aligned."""
    ordered = sorted({id(x): x for x in tensors}.values(), key=lambda x: -x.element_size())
    flat = [x.detach().reshape(-1).contiguous().view(torch.uint8) for x in ordered]
    parts = torch.cat(flat).cpu().split([len(x) for x in flat])
    copies = {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(ordered, parts, strict=True)}
    for x in ordered:
        remember(x, copies[id(x)])
    return [copies[id(x)] for x in tensors]


def read_entries(batch: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The batch, with the tensors of some entries on the host, of lists too; nothing is copied that lies there."""
    several = {name: _tensors(batch[name]) for name in names if name in batch}
    remote = {name: found for name, found in several.items() if not all(x.is_cpu for x in found)}
    if not remote:
        return batch
    copies = iter(on_host([x for found in remote.values() for x in found]))
    entries = dict(batch)
    for name, found in remote.items():
        values = [next(copies) for _ in found]
        entries[name] = values[0] if isinstance(batch[name], Tensor) else values
    return entries


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]


def placed(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Integers as int64 tensors on a device, in one transfer for which the host does not wait."""
    if device.type == "cpu":
        return [torch.from_numpy(x) for x in arrays]
    return upload(arrays, device, torch.int64)


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, by a transfer for which the host does not wait; its values stay known to the host."""
    device = torch.device(device)
    if not x.is_cpu or device.type == "cpu" or x.requires_grad:
        return x.to(device)
    sent = _sent(x, device)
    remember(sent, x)
    return sent


def _sent(x: Tensor, device: torch.device) -> Tensor:
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
