"""One suite for every communicator: the exchange, its agreement and its errors."""

import pytest

from seqpar import native
from seqpar.comm import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from tests.comm import cases
from tests.comm.suite import Exchanges


class TestThreads(Exchanges):
    size = 6
    crowd_size, crowd_tensors = 40, 5

    def run(self, size, fn, *args, timeout=120.0):
        return run_threads(size, fn, *args, timeout=timeout)

    def test_is_a_comm(self):
        assert isinstance(LocalComm(), Comm)


class TestProcesses(Exchanges):
    size = 3
    crowd_size, crowd_tensors = 2, 240

    def run(self, size, fn, *args, timeout=120.0):
        return run_processes(size, fn, *args, timeout=timeout)

    def test_is_a_comm(self):
        assert self.run(2, isinstance, Comm) == [True, True]


@pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
class TestSharedMemory(Exchanges):
    size = 3
    crowd_size, crowd_tensors = 2, 240

    def run(self, size, fn, *args, timeout=120.0):
        return run_processes(size, fn, *args, comm="shm", timeout=timeout)

    def test_is_a_comm(self):
        assert self.run(2, isinstance, Comm) == [True, True]


class TestBatched:
    """What CUDA tensors take, batched point-to-point on the group itself, carried by gloo."""

    @pytest.mark.parametrize(("size", "most"), [(3, 3), (2, 240)])
    def test_exchanges_equal_the_specification(self, size, most):
        for wrong, counted, predicted, _ in run_processes(size, cases.batched, cases.sparse, 2, 4, 1.0, most):
            assert wrong == []
            assert counted == predicted

    def test_subs(self):
        for rank, result in enumerate(run_processes(3, cases.batched, cases.subs)):
            assert result[0] == rank
            assert result[2] == []

    def test_any_dtype_although_nccl_has_only_some(self):
        assert run_processes(3, cases.batched, cases.of_all_types) == [[]] * 3

    def test_what_is_refused_stays_so(self):
        for found, _ in run_processes(2, cases.batched, cases.refused):
            assert "expected a contiguous one" in found[2]
