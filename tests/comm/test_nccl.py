"""NCCL's part of `GroupComm`, on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from seqpar.comm.nccl import Nccl, gpu_of, own_backend
from seqpar.launch import missing_gpus
from seqpar.testing import run_processes
from tests.cases import OVER_RANKS, Case
from tests.comm import cases, nccl_cases
from tests.comm.over_gloo import OverGloo
from tests.comm.peer_cases import over_nccl
from tests.comm.suite import Exchanges

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
STARTS = re.compile(r"init_process_group\((?!.*store=)")


def test_ranks_that_share_a_gpu_are_named_on_every_rank() -> None:
    for text in run_processes(3, nccl_cases.on_one_gpu):
        assert text.startswith("GroupComm: ranks 0, 1 all use GPU GPU-0, expected a GPU for each rank; call torch.cuda")


def test_a_group_that_is_bound_to_a_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert gpu_of(SimpleNamespace(bound_device_id=None)) == torch.device("cuda", 1)
    assert gpu_of(SimpleNamespace(bound_device_id=torch.device("cuda", 3))) == torch.device("cuda", 3)


def test_a_communicator_of_its_own_has_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch's watchdog, which ends the process, waits longer than the comm, which raises."""
    made: list[tuple[Any, ...]] = []

    class Backend:
        def Options() -> SimpleNamespace:  # noqa: N802
            return SimpleNamespace(config=SimpleNamespace())

        def __init__(self, *given: Any) -> None:
            made.append(given)

    monkeypatch.setattr(torch.distributed.distributed_c10d, "ProcessGroupNCCL", Backend, raising=False)
    own_backend("store", 1, 4, 30.0)
    ((store, rank, size, options),) = made
    assert (store, rank, size) == ("store", 1, 4) and not hasattr(options.config, "min_ctas")
    own_backend("store", 1, 4, 30.0, 16)
    assert made[1][-1].config.min_ctas == 16
    assert options.is_high_priority_stream is True and options._timeout.total_seconds() > 30.0


def test_an_exchange_in_a_graph_under_capture_is_refused() -> None:
    for text, right in run_processes(2, nccl_cases.under_capture):
        assert text.startswith("exchange: call 0 phase 0 stage 0 with plan 5eed in a CUDA graph under capture")
        assert right, "CPU tensors have nothing to do with it"


def test_only_the_ranks_of_a_comm_make_its_communicator(tmp_path: Path) -> None:
    first, one, second, three = run_processes(4, nccl_cases.of_a_mesh, tmp_path)
    assert first == second == "elsewhere"
    for rank, (got, opened, known, calls, known_afterwards, error) in enumerate((one, three)):
        assert got == [1.0 - rank] * 2
        assert opened == [1 - rank], "the constructor has opened the way to the other rank"
        assert known and calls == ["shutdown"] and not known_afterwards
        assert "the comm is closed" in error


def test_the_communicator_of_a_group_is_shared_on_demand_and_never_ended() -> None:
    assert run_processes(2, nccl_cases.shares, False) == [([1.0 - rank] * 2, False, True, []) for rank in range(2)]


def test_ranks_that_differ_in_sharing_hear_of_it() -> None:
    text = "GroupComm: ranks differ in private: True on rank 0; False on rank 1; give all ranks the same"
    assert run_processes(2, nccl_cases.shares, True) == [text] * 2


def test_a_hung_rank_is_named_and_the_host_returns() -> None:
    for rank, (ended, lines, error) in enumerate(run_processes(2, nccl_cases.hangs)):
        assert ended and "waited 1 s in call 6 phase 0 stage 0 with plan 5eed for ranks [1]" in error
        assert "root cause: rank 0" in error or rank == 0
        assert any("for ranks [1]" in line for line in lines), "on every rank, at a level that is shown"


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 257.5), (torch.bfloat16, 258.0)])
def test_gradients_are_summed_by_collectives_in_32_bits(dtype: torch.dtype, total: float) -> None:
    """In bf16 256 + 0.75 is 256, and so is what one more adds to it."""
    for grads, sent in run_processes(3, nccl_cases.summed, dtype):
        assert grads[1:] == [[total]] * 2 and grads[0] == [256.75 if dtype == torch.float32 else 256.0]
        assert sent == (2 * 17 * (4 + 4) if dtype == torch.float32 else 2 * 16 * (4 + 2))


def test_a_batch_ends_although_a_message_is_refused() -> None:
    backend = OverGloo(mock.Mock())
    refusing = Nccl(backend, owned=False)
    with (
        pytest.raises(TypeError, match="not a tensor"),
        mock.patch.object(backend, "send", side_effect=TypeError("not a tensor")),
    ):
        refusing.post({1: [torch.zeros(1)]}, {})
    backend.stuck = True
    assert not refusing.post({}, {1: [torch.zeros(1)]}).is_completed()


@pytest.mark.skipif(missing_gpus(2) is not None, reason=missing_gpus(2) or "")
class TestGpus(Exchanges):
    """The common suite over NCCL itself, with a GPU for each rank."""

    size = min(4, torch.cuda.device_count())
    crowd_size, crowd_tensors = 2, 240

    def run(self, size: int, fn: Any, *args: Any, timeout: float = 120.0) -> list[Any]:
        if missing_gpus(size):
            pytest.skip(missing_gpus(size))
        return run_processes(size, over_nccl, fn, *args, comm="nccl", timeout=timeout)

    @pytest.mark.parametrize("case", OVER_RANKS, ids=str)
    def test_attention_is_that_of_one_device(self, case: Case) -> None:
        if missing_gpus(case.ranks):
            pytest.skip(missing_gpus(case.ranks))
        assert run_processes(case.ranks, nccl_cases.attention, case, comm="nccl") == [[]] * case.ranks


@pytest.mark.parametrize("case", OVER_RANKS[:1] + OVER_RANKS[3:4], ids=str)
def test_attention_over_nccl_is_rehearsed_over_gloo(case: Case) -> None:
    """What `TestGpus` runs on GPUs, with gloo in the place of NCCL and the CPU in the place of GPUs."""
    assert run_processes(case.ranks, cases.batched, nccl_cases.attention, case) == [[]] * case.ranks


def test_ranks_without_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotImplementedError, match='comm="nccl": 2 ranks take a GPU each, and this machine has 1'):
        run_processes(2, cases.bits, 0, 1, comm="nccl")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(NotImplementedError, match="this build of PyTorch has no NCCL"):
        run_processes(2, cases.bits, 0, 1, comm="nccl")


@pytest.mark.parametrize(
    "path", [p for p in PAGES if STARTS.search(p.read_text())], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_whoever_starts_a_group_hears_of_the_device(path: Path) -> None:
    blocks = re.findall(r"^```\w+.*?^```", path.read_text(), re.MULTILINE | re.DOTALL) or [path.read_text()]
    for block in blocks:
        assert not STARTS.search(block) or "torch.cuda.set_device(" in block
