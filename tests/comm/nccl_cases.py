"""What a rank does in tests of NCCL's part, over gloo: GPUs are numbers, and their tensors the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from seqpar.comm import Comm, GroupComm, group
from seqpar.comm.protocol import Sides
from tests.comm.cases import tag


@contextmanager
def with_gpus() -> Iterator[None]:
    """A machine of GPUs, in a group that has NCCL. Every process starts on GPU 0."""
    current = [0]
    with (
        mock.patch.object(group, "_backends", lambda given: {"cpu": "gloo", "cuda": "nccl"}),
        mock.patch.object(group, "gpu_of", lambda given: torch.device("cpu")),
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            set_device=lambda number: current.__setitem__(0, number),
            get_device_properties=lambda device: SimpleNamespace(uuid=f"GPU-{current[0]}"),
        ),
    ):
        yield


def on_one_gpu(comm: Comm) -> str:
    """The error of a comm whose first two ranks use one GPU; the last one has its own."""
    with with_gpus():
        torch.cuda.set_device(max(0, comm.rank - 1))
        try:
            GroupComm(timeout=60.0)
        except ValueError as error:
            return str(error)
    return "nothing was noticed"


def under_capture(comm: Comm) -> tuple[str, bool]:
    """The error of an exchange over NCCL while a CUDA graph is captured, and whether the comm lives."""
    x, other = torch.zeros(2), 1 - comm.rank
    said = "nothing was noticed"
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        with mock.patch.object(group, "checked_sides", lambda *sides: Sides({other: [x]}, {}, {torch.device("cuda")})):
            comm._channel.carries = {"cuda"}
            try:
                comm.exchange({other: [x]}, {}, tag=tag(0))
            except NotImplementedError as error:
                said = str(error)
        comm._channel.carries = {"cpu"}
        comm.exchange({other: [x + comm.rank]}, {other: [x]}, tag=tag(1)).wait()
    return said, bool((x == other).all())
