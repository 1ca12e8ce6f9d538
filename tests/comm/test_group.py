"""What only `GroupComm` promises: deaths, the root cause in the store, devices and backends, NCCL's monitor."""

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from seqpar.comm import GroupComm, PeerError, failure
from seqpar.comm.failure import Monitor, RootCause
from seqpar.testing import run_processes
from tests.comm import cases


class Fake:
    """A work that completes when it is told to."""

    def __init__(self, completed=False, error=None):
        self.completed, self.error = completed, error

    def is_completed(self):
        if self.error is not None:
            raise self.error
        return self.completed


def test_few_bytes_are_one_message_each_way():
    for rank, (counts, arrived) in enumerate(run_processes(2, cases.messages_of_small_calls)):
        assert counts == [2, 2, 2, 4]
        assert arrived == [[1.5 - rank] * 8, [0, 0]]


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", -9)])
def test_a_rank_that_dies_ends_all_others_with_the_root_cause(tmp_path, how, code):
    with pytest.raises(RuntimeError, match=f"rank 1: its process died with exit code {code}"):
        run_processes(4, cases.witness, tmp_path, "dies", how, timeout=120.0)
    texts = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert sorted(texts) == [0, 2, 3]
    for rank, text in texts.items():
        assert "waited 120 s" not in text, f"rank {rank} took as long as the timeout"
        assert "PeerError" in text
        assert "rank 1" in text
    for rank in (0, 3):
        assert "root cause: rank 2: in call 9" in texts[rank]
    assert "lost the connection to rank 1" in texts[2]


def test_the_pool_is_rebuilt_after_a_death(tmp_path):
    assert len(run_processes(2, cases.bits, 0, 1)) == 2
    with pytest.raises(RuntimeError, match="exit code 7"):
        run_processes(2, cases.witness, tmp_path, "leaves", 7)
    pids = run_processes(2, cases.pid)
    assert run_processes(2, cases.pid) == pids, "processes are reused"
    assert os.getpid() not in pids


def test_the_exception_of_a_process_carries_its_traceback(tmp_path):
    with pytest.raises(KeyError, match="no such layer") as raised:
        run_processes(3, cases.aborts)
    assert "in aborts" in str(raised.value.__cause__)
    assert "on rank 2" in str(raised.value.__cause__)


ENDING = """
    import sys, torch, torch.distributed as dist
    from seqpar.comm import GroupComm, PeerError, Tag

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
    comm, peer, x = GroupComm(timeout=60.0), 1 - rank, torch.ones(100_000)
    work = comm.exchange({peer: [x]}, {peer: [x.clone()]}, tag=Tag(1, 0, 0, 0, "a call"))
    if rank == 0:
        raise KeyError("between an exchange and its wait")
    work.wait()
    try:
        comm.agree("afterwards", {})
    except PeerError as error:
        print(error)
"""


def test_a_process_ends_with_a_work_that_nobody_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ENDING))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=os.getcwd(),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        (_, failed), (heard, _) = [process.communicate(timeout=600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 0]
    assert failed.strip().endswith("KeyError: 'between an exchange and its wait'")
    assert "lost the connection to rank 0" in heard


def test_the_first_root_cause_stands():
    store = dist.HashStore()
    first, second = RootCause(store, "why", 0), RootCause(store, "why", 3)
    assert second.read() is None
    assert second.write("a peer died") == (3, "a peer died")
    assert first.write("something else") == (3, "a peer died")
    assert first.read() == (3, "a peer died")


def test_a_rank_that_lost_a_connection_gives_the_writer_a_moment():
    store = dist.HashStore()
    writer = threading.Timer(0.2, lambda: RootCause(store, "why", 1).write("gave up"))
    writer.start()
    assert RootCause(store, "why", 0, patience=60.0).read(grace=60.0) == (1, "gave up")
    writer.join()


class BrokenStore:
    def compare_set(self, key, expected, desired):
        raise RuntimeError("the store is gone")

    def check(self, keys):
        raise RuntimeError("the store is gone")


class HangingStore:
    def compare_set(self, key, expected, desired):
        threading.Event().wait()

    def check(self, keys):
        threading.Event().wait()


@pytest.mark.parametrize("store", [BrokenStore(), HangingStore()], ids=["broken", "hanging"])
def test_a_dead_store_neither_hangs_nor_hides_the_error(store):
    cause = RootCause(store, "why", 2, patience=0.05)
    assert cause.write("mine") == (2, "mine")
    assert cause.read(grace=0.02) is None


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_the_monitor_names_what_a_stuck_work_waits_for():
    reasons = []
    monitor = Monitor(0.2, reasons.append, lambda: False, poll=0.01)
    done, stuck = Fake(completed=True), Fake()
    monitor.watch([done], "in call 1 for ranks [1]")
    monitor.watch([done, stuck], "in call 2 for ranks [3]")
    assert wait_until(lambda: reasons)
    assert reasons == ["waited 0.2 s in call 2 for ranks [3]"]


def test_the_monitor_gives_each_work_its_own_time(monkeypatch):
    clock, reasons = [0.0], []
    monkeypatch.setattr(failure, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    monitor = Monitor(2.0, reasons.append, lambda: False, poll=0.01)
    works = [Fake() for _ in range(6)]
    for i, work in enumerate(works):
        monitor.watch([work], f"in call {i}")
    for left, work in zip(reversed(range(6)), works):
        clock[0] += 0.9  # 5.4 s in all, more than one work may take
        time.sleep(0.03)
        work.completed = True
        assert wait_until(lambda left=left: len(monitor._outstanding) <= left)
    assert reasons == []


def test_the_monitor_reports_a_work_that_failed_and_stops_when_the_group_is_dead():
    reasons = []
    Monitor(5.0, reasons.append, lambda: False, poll=0.01).watch([Fake(error=RuntimeError("NCCL"))], "in call 3")
    assert wait_until(lambda: reasons == ["failed in call 3: NCCL"])
    dead = Monitor(60.0, reasons.append, lambda: True, poll=0.01)
    dead.watch([Fake()], "in call 4")
    assert wait_until(lambda: not dead._outstanding)
    assert len(reasons) == 1


def test_a_stuck_stream_ends_every_rank():
    messages = run_processes(3, cases.stuck_stream, 60.0)
    for message in messages:
        assert "waited 1 s in call 6 phase 2 stage 1 with plan 5eed for ranks [1]" in message
    assert "root cause: rank 0" in messages[1] and "root cause: rank 0" in messages[2]


def test_devices_need_their_backend():
    for other, mixed, none in run_processes(2, cases.on_devices):
        assert "device meta in a group whose backend for it is none" in other
        assert "devices ['cpu', 'meta']" in mixed
        assert "device cpu in a group whose backend for it is none" in none


def test_rocm_is_refused(alone, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    GroupComm()  # gloo alone needs no device
    monkeypatch.setattr("seqpar.comm.group_channel._backends", lambda group: {"cpu": "gloo", "cuda": "nccl"})
    with pytest.raises(NotImplementedError, match="ROCm"):
        GroupComm()


def test_comms_of_one_group_do_not_share_a_death():
    assert run_processes(3, cases.two_comms) == [(True, 3.0)] * 3


def test_a_peer_error_survives_pickling():
    error = pickle.loads(pickle.dumps(PeerError.quoting(1, "in call 3", 2, "died")))
    assert str(error) == "rank 1 in call 3; root cause: rank 2: died; the comm is dead"
