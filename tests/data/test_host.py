"""A batch that lies on a device is read by the host once, in one copy; and not at all if the host has seen it before.

No GPU is needed: the tensors of the stand-in lie on the CPU, say that they do not, and count what the host reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.data import host
from seqpar.data.batch import Packed, Reading, read
from seqpar.data.union import announce
from seqpar.integrations.hf import model as transformers_model
from seqpar.testing import run_threads
from tests.data.cases import KINDS, make
from tests.integrations.hf.models import build

READS = {
    "cpu", "numpy", "tolist", "item", "nonzero", "equal", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "__contains__",
}  # fmt: skip


class OnDevice(Tensor):
    """A tensor of a device, as far as the host can tell."""

    reads: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cpu.__get__:
            return False
        if func.__name__ in READS or (func.__name__ == "to" and args[1:] == ("cpu",)):
            cls.reads.append(func.__name__)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*(x.as_subclass(Tensor) for x in args), **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def reads() -> list[str]:
    OnDevice.reads.clear()
    return OnDevice.reads


def on_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_device(each) for name, each in value.items()}
    if isinstance(value, list):
        return [on_device(each) for each in value]
    return value.clone().as_subclass(OnDevice) if isinstance(value, Tensor) else value


def plain(x: Tensor) -> Tensor:
    return x.detach().as_subclass(Tensor)


def same(one: Packed, other: Packed) -> None:
    assert one.lengths.tolist() == other.lengths.tolist() and one.valid.tolist() == other.valid.tolist()
    assert list(one.tensors) == list(other.tensors)
    for name, x in one.tensors.items():
        assert torch.equal(plain(x), plain(other.tensors[name])), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", ["row", "document"])
def test_a_batch_of_a_device_is_read_in_one_copy_and_once(kind: str, shift: str, reads: list[str]) -> None:
    batch, how = make(kind, 3, shift).batch, Reading(shift)
    expected, there = read(batch, how), on_device(batch)
    same(read(there, how), expected)
    assert reads in ([], ["cpu"])  # nothing is read of a batch of input_ids alone
    first = len(reads)
    same(read(there, how), expected)
    assert len(reads) == first, "the host has read it before"


def test_a_tensor_changed_in_place_is_read_again(reads: list[str]) -> None:
    ids = torch.arange(1, 9).reshape(2, 4)
    there = on_device({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    assert read(there, Reading()).valid.tolist() == [[3], [3]]
    there["labels"][0] = -100
    assert read(there, Reading()).valid.tolist() == [[0], [3]]
    assert reads == ["cpu", "cpu"]


def test_columns_of_every_dtype_go_in_one_copy(reads: list[str]) -> None:
    several = [
        torch.tensor([True, False, True]), torch.tensor([1.5, -2.0], dtype=torch.float64), torch.tensor(7),
        torch.arange(6, dtype=torch.int32).reshape(2, 3).t(), torch.zeros(0, 2), torch.tensor([3], dtype=torch.int8),
    ]  # fmt: skip
    there = on_device(several)
    for x, y in zip(host.on_host(there), several, strict=True):
        assert type(x) is Tensor and torch.equal(x, y) and x.dtype == y.dtype
    assert reads == ["cpu"]


def test_a_replicated_batch_is_read_in_one_copy(reads: list[str]) -> None:
    ids = torch.arange(1, 9).reshape(2, 4)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask}

    def lengths(comm: Comm) -> list[int]:
        known = announce(batch if comm.rank else on_device(batch), comm, "replicated", Reading())
        assert known is not None
        return known.lengths.tolist()

    assert run_threads(2, lengths) == [[3, 4]] * 2  # and equal hashes, of whatever device
    assert reads == ["cpu"]


ROPE = {"rope_theta": 10000.0, "factor": 2.0}
Feed = Callable[[Any, list[dict[str, Any]]], Iterator[dict[str, Any]]]


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(3):
        ids = torch.randint(1, 60, (2, 9 + 5 * step), generator=generator)
        kept = torch.arange(ids.shape[1]) < torch.tensor([[7], [5 + step]])
        labels = ids.masked_fill(~kept, -100)
        items = (labels[:, 1:] != -100).sum()
        found.append({"input_ids": ids, "attention_mask": kept.long(), "labels": labels, "num_items_in_batch": items})
    return found


def moved_by_the_user(handle: Any, loader: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from map(on_device, loader)


def prefetched_on_the_device(handle: Any, loader: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from handle.prefetch(list(map(on_device, loader)))


def moved_by_prefetch(handle: Any, loader: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from handle.prefetch(loader, device="meta")


@pytest.mark.parametrize(
    ("feed", "copies"),
    [(moved_by_the_user, 1), (prefetched_on_the_device, 0), (moved_by_prefetch, 0)],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("counted", [False, True], ids=["", "num_items_in_batch"])
@pytest.mark.parametrize("rope", ["default", "dynamic"])  # the latter's model reads rows
@pytest.mark.sampled(3)
def test_a_forward_of_a_transformers_model_reads_its_batch_at_most_once(
    feed: Feed, copies: int, counted: bool, rope: str, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = transformers_model.take

    def own_rows(*given: Any, **named: Any) -> Any:
        shares = take(*given, **named)
        for share in shares:  # the model's own work begins here
            share.tensors.update({name: plain(x) for name, x in share.tensors.items()})
            object.__setattr__(share, "positions", plain(share.positions))
        return shares

    def trained(feed: Feed | None) -> tuple[list[float], list[int]]:
        losses, counts = [], []
        model = copy.deepcopy(build("llama", rope_parameters=ROPE | {"rope_type": rope}))
        with seqpar.parallelize(model, seqpar.LocalComm()) as handle:
            for batch in batches() if feed is None else feed(handle, batches()):
                if not counted:
                    del batch["num_items_in_batch"]
                reads.clear()
                losses.append(model(**batch).loss)
                counts.append(len(reads))
        return [float(plain(loss)) for loss in losses], counts

    monkeypatch.setattr(host, "_sent", lambda x, device: on_device(x))
    monkeypatch.setattr(transformers_model, "take", own_rows)
    expected, _ = trained(None)
    losses, counts = trained(feed)
    assert losses == expected
    if counted and feed is prefetched_on_the_device:
        copies = 1  # the loader's batch was read ahead, of what the loss is divided by nobody knew
    assert counts == [copies] * 3
