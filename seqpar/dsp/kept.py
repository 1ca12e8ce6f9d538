"""What stages keep from forward to forward, such as running statistics: each rank must change it once, and alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def noting_changes(module: nn.Module, name: str, found: dict[str, Tensor]) -> Iterator[None]:
    """A block after which `found` has the module's buffers that were written to in it, by their names in the model."""
    buffers = {path: x for path, x in module.named_buffers() if not x.is_inference()}  # those count no versions
    before = {path: x._version for path, x in buffers.items()}
    yield
    found |= {f"{name}.{path}": x for path, x in buffers.items() if x._version != before[path]}
