"""Keys that are posted two steps ahead, as on CUDA: the order, the memory, and the bits of one step ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.comm import Comm, local
from seqpar.ops.attention import keys, schedule
from seqpar.plan import Plan
from seqpar.testing import run_threads
from tests.cases import Case
from tests.comm.test_streams import Device
from tests.ops.cases import inputs, poisoned

ROW = 2 * (8 + 4) * 4  # bytes of a token's keys and values
STAGE = 3 * ROW
CASES = [
    # keys that arrive in place, and keys whose rows are put in order after they arrived
    Case("causal", "contiguous", "fetch", 4, 1, (40,), stage_bytes=STAGE),
    Case("packed", "striped", "fetch", 4, 1, (9, 2, 12), stage_bytes=STAGE, pads=True),
    Case("full", "zigzag", "fetch", 4, 2, (32,), stage_bytes=STAGE),
    Case("packed", "striped", "fetch", 4, 2, (9, 2, 12), stage_bytes=STAGE, mixed=True),
]
points = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mask}-{case.layout}-{case.ulysses}")


def gradients(comm: Comm, plan: Plan) -> list[Tensor]:
    """The output of a rank, and the gradients of its rows."""
    tensors = [x.float() for x in inputs(plan, (6, 2), (8, 4), 0)[:4]]
    mine = [poisoned(x, plan, comm.rank, side) for x, side in zip(tensors, ("q", "kv", "kv", "q"), strict=True)]
    *leaves, dout = (x.detach() for x in mine)
    leaves = [x.requires_grad_() for x in leaves]
    out = seqpar.attention(*leaves, plan, comm, kernel="blockwise")
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.fixture
def two_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "steps_ahead", lambda call: 2)


@points
@pytest.mark.parametrize("delay", [0.0, 0.003])
@pytest.mark.sampled(2)
def test_the_bits_are_those_of_one_step_ahead(case: Case, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = case.plan()
    assert max(len(plan.steps(rank, row_bytes=plan.row_bytes(6, 2, 8, 4, 4))) for rank in range(4)) > 3
    expected = run_threads(4, gradients, plan)
    monkeypatch.setattr(keys, "steps_ahead", lambda call: 2)
    for one, other in zip(run_threads(4, gradients, plan, delay=delay), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(("ahead", "slots"), [(1, 2), (2, 3)])
@points
def test_an_exchange_is_posted_when_the_reader_of_its_slot_has_been_issued(
    case: Case, ahead: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps that all ranks have: K of step n + ahead after C of n - 1 and before C of n."""
    plan, events, made = case.plan(), {rank: [] for rank in range(4)}, {rank: 0 for rank in range(4)}
    monkeypatch.setattr(keys, "steps_ahead", lambda call: ahead)

    class Noted(keys.KeyExchange):
        def __init__(self, call: Any, *more: Any) -> None:
            super().__init__(call, *more)
            self.rank, make = call.comm.rank, self.slots.make
            events[self.rank].append([])
            made[self.rank] = 0

            def counted() -> Tensor:
                made[self.rank] += 1
                assert made[self.rank] <= slots
                return make()

            self.slots.make = counted

        def post(self, n: int, k: Tensor, v: Tensor) -> None:
            events[self.rank][-1].append(("post", n))
            super().post(n, k, v)

    walk = schedule.walk

    def noted(exchange: Any, inside: Any) -> Iterator[Any]:
        for n, step in enumerate(walk(exchange, inside)):
            events[exchange.rank][-1].append(("compute", n))
            yield step

    monkeypatch.setattr(schedule, "KeyExchange", Noted)
    monkeypatch.setattr(schedule, "walk", noted)
    run_threads(4, gradients, plan)
    for rank, calls in events.items():
        assert len(calls) == 2, "forward and backward"
        count = len(plan.steps(rank, row_bytes=plan.row_bytes(6, 2, 8, 4, 4)))
        expected = [("post", n) for n in range(ahead)]
        for n in range(count):
            expected += [("post", n + ahead)] * (n + ahead < count) + [("compute", n)]
        assert calls == [expected] * 2
    assert max(made.values()) == slots


class Uses(TorchDispatchMode):
    """Tells the device which operator reads or writes memory for keys."""

    def __init__(self, device: Device, memory: dict[int, Tensor]) -> None:
        super().__init__()
        self.device, self.memory = device, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            several = [(x, info) for x, info in zip(args, func._schema.arguments) if isinstance(x, (Tensor, list))]
            for x, info in several:
                for each in x if isinstance(x, list) else [x]:
                    whole = self.memory.get(each.untyped_storage().data_ptr()) if isinstance(each, Tensor) else None
                    if whole is not None:
                        self.device.use(whole, write=bool(info.alias_info and info.alias_info.is_write))
        return func(*args, **(kwargs or {}))


@contextmanager
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, dict[int, Tensor]]]:
    """Each rank on a stream of a simulated device, and the memory for keys that is watched."""
    device, memory = Device({}, itertools.count()), {}
    monkeypatch.setattr(local, "_stream", lambda tensors: device.current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device_of: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    init = keys.KeySlots.__init__

    def watched(self: keys.KeySlots, make: Any, dims: Any) -> None:
        def kept() -> Tensor:
            slot = make()
            memory[slot.untyped_storage().data_ptr()] = slot  # alive, so that an address is one slot
            return slot

        init(self, kept, dims)

    monkeypatch.setattr(keys.KeySlots, "__init__", watched)
    yield device, memory


@pytest.mark.usefixtures("two_ahead")
@points
def test_no_slot_is_written_before_its_reader_on_a_device_of_streams(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = case.plan()
    with streams(monkeypatch) as (device, memory):

        def rank_main(comm: Comm) -> list[Tensor]:
            with Uses(device, memory):
                return gradients(comm, plan)

        run_threads(4, rank_main, delay=0.001)
    assert sum(any(write for _, write in uses) for uses in device.uses.values()) == len(memory) > 0


def test_only_fetch_on_cuda_and_without_nodes_is_two_steps_ahead() -> None:
    class Call:
        def __init__(self, plan: Plan, device: str) -> None:
            self.plan, self.signature = plan, self
            self.device = torch.device(device)

    mask, layout = seqpar.Mask([32]), seqpar.Layout.zigzag([32], 4)
    plans = [Plan(mask, layout), Plan(mask, layout, node=2), Plan(mask, layout, transport="ring")]
    found = {device: [keys.steps_ahead(Call(plan, device)) for plan in plans] for device in ("cuda", "cpu")}
    assert found == {"cuda": [2, 1, 1], "cpu": [1, 1, 1]}
