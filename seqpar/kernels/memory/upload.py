"""Integers from the host to a device, without a wait of the host."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 4  # elements: every tensor starts at a multiple of 16 bytes, as Triton assumes of its arguments


class UploadBuffer:
    """Integers on the host in memory from which one transfer brings them to a device; may be packed in any thread."""

    def __init__(self, arrays: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype = torch.int32) -> None:
        self.shapes, self.starts, total = [array.shape for array in arrays], list[int](), 0
        for array in arrays:
            self.starts.append(total)
            total += -(-array.size // _ALIGNMENT) * _ALIGNMENT
        self.host = torch.empty(total, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        flat = self.host.numpy()
        for start, array in zip(self.starts, arrays, strict=True):
            flat[start : start + array.size] = array.reshape(-1)

    def sent(self, device: torch.device) -> list[Tensor]:
        """The tensors on the device, by one transfer; see `upload`."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a plan's facts are uploaded at its first call on a stream, which a CUDA graph is being captured from; "
                "make one call with the plan on that stream, forward and backward, before the capture"
            )
        there = self.host.to(device, non_blocking=True)
        places = zip(self.starts, self.shapes, strict=True)
        return [there[start : start + prod(shape)].view(shape) for start, shape in places]


def upload(arrays: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype = torch.int32) -> list[Tensor]:
    """Every array as a tensor of its shape on the device, all of them in one transfer.

    On CUDA the transfer is ordered by the current stream, which must also use the tensors. Values must fit the dtype.
    The tensors share one storage, which lives as long as any of them.

    The host buffer may be dropped at once: ``copy_`` with ``non_blocking=True`` tells PyTorch's pinned allocator the
    stream that reads the buffer, and a freed block is not handed out again before an event of that stream has passed.
    A CUDA graph would read it again at every replay.

    Raises: RuntimeError while a CUDA graph is captured.
    """
    return UploadBuffer(arrays, device, dtype).sent(device)
