"""What only `ShmComm` promises: its protocol between real processes, and deaths at every point of it."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from seqpar import native
from seqpar.comm import ShmComm
from seqpar.testing import run_processes
from tests.comm import cases, shm_cases

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")

CSRC = Path(__file__).parents[2] / "csrc"


def run(size, fn, *args, timeout=120.0):
    return run_processes(size, fn, *args, comm="shm", timeout=timeout)


@pytest.mark.parametrize(("size", "steps", "delayed"), [(2, 2500, False), (3, 800, True), (4, 400, True)])
@pytest.mark.sampled(3)
def test_random_schedules_equal_the_model(size, steps, delayed):
    results = run(size, shm_cases.model, size, steps, delayed)
    for wrong, taken, staged, epoch in results:
        assert wrong == []
        assert taken > steps // 2
        assert staged == 0
        assert 100 < epoch < 2**20, "the epochs have not crossed the wrap"


def test_elements_of_any_strides_arrive_where_they_belong():
    assert run(2, shm_cases.strided, 3) == [[], []]


def test_bytes_are_staged_only_for_memory_that_peers_cannot_write():
    assert run(2, shm_cases.staged) == [[0, 64]] * 2


def test_a_full_pool_gives_ordinary_memory_and_all_ranks_hear_when_that_cannot_be_received():
    for inside, worked, staged, message in run(2, shm_cases.full_pool):
        assert inside == [True, False]
        assert worked == [True] * 3
        assert staged == 40_000
        assert message.startswith("rank 0") or "root cause: rank 0: " in message
        assert "70000 bytes to receive" in message and "pool_bytes than 65536" in message


def test_memory_outlives_its_comm_and_nothing_leaks():
    results = run(2, shm_cases.outlive)
    for rank, (values, before, kept, after) in enumerate(results):
        assert values == [[10 * n + rank] * 3 for n in range(12)]
        assert kept == 12, "one pool for each tensor, and nothing else"
        assert after[0] <= before[0], "open files; those of a case before may still be closed meanwhile"
        assert after[1] == before[1], "mappings"


def test_tensors_that_cannot_travel_are_refused():
    for messages in run(2, shm_cases.refused):
        assert len(messages) == 3
        assert "a tensor on meta; ShmComm moves CPU tensors" in messages[0]
        assert "strides (0,); expected memory of its own" in messages[1]
        assert "call .resolve_conj()" in messages[2]


def test_threads_wait_beside_each_other_and_do_not_hold_the_interpreter():
    (alive, turned, got), _ = run(2, shm_cases.threads)
    assert alive == [True, True, True]
    assert turned > 0
    assert got == [[1.0, 1.0]] * 2


def test_a_fork_is_no_rank_and_does_not_end_one():
    for rank, (text, value, left) in enumerate(run(2, shm_cases.forked)):
        assert re.match(f"the comm of rank {rank} belongs to process [0-9]+, not to a fork of it", text)
        assert (value, left) == (1.0, False)


def errors(folder, fn, *args, size=3, match):
    """{rank: message} of a case that fails, for none of them by the timeout."""
    with pytest.raises(RuntimeError, match=match):
        run(size, cases.witness, folder, fn, *args)
    found = {int(path.name): path.read_text() for path in folder.iterdir()}
    assert not any("waited 120 s" in message for message in found.values())
    return found


KILLED = "rank 1: its process died with exit code -9"


# once before and once after every step of a rank
@pytest.mark.parametrize(
    ("name", "times"),
    [
        *((name, times) for name in ("shm_credit", "shm_push") for times in (1, 2, 151, 152)),
        *((name, times) for name in ("shm_bell", "shm_arrived", "shm_wait") for times in (61, 62)),
    ],
)
@pytest.mark.sampled(3)
def test_a_rank_killed_at_any_step_ends_the_others(tmp_path, name, times):
    messages = errors(tmp_path, shm_cases.killed, name, times, match=KILLED)
    assert sorted(messages) == [0, 2]
    for message in messages.values():
        assert "PeerError" in message and "lost rank 1, whose process has ended" in message


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_killed_while_bytes_move_ends_the_others(tmp_path, seed):
    messages = errors(tmp_path, shm_cases.killed_while_moving, seed, match=KILLED)
    assert all("lost rank 1, whose process has ended" in message for message in messages.values())


def test_a_rank_killed_while_it_fails_is_the_cause(tmp_path):
    messages = errors(tmp_path, shm_cases.killed_while_failing, match=KILLED)
    assert all("rank 1: for a reason" in message for message in messages.values())


def test_a_long_reason_is_cut_between_characters():
    for message in run(3, shm_cases.aborts_at_length):
        # 1024 bytes end inside a character
        assert re.search("rank 1.*: x" + "é" * 511 + "; the comm is dead", message)


def test_a_rank_that_dies_is_named_by_all(tmp_path):
    messages = errors(tmp_path, cases.dies, "exit", size=4, match="exit code 3")
    assert sorted(messages) == [0, 2, 3]
    for message in messages.values():
        assert re.search("rank 2.* in call 9 .*: lost rank 1, whose process has ended", message)


def test_a_comm_that_is_closed_is_missed_at_once(tmp_path):
    with pytest.raises(RuntimeError, match="lost rank 1, which closed its comm"):
        run(3, shm_cases.closes)


def test_a_wait_that_ends_says_the_rank_and_what_to_do(tmp_path):
    with pytest.raises(RuntimeError) as raised:
        run(2, shm_cases.waits_for_credit)
    assert re.search(
        r"in call \d+ .*: waited 1 s for rank 1 to receive; the comm is dead; make every rank take part",
        str(raised.value),
    )


def test_memory_that_a_peer_may_still_write_is_not_used_again():
    assert run(2, shm_cases.corrupts_nothing)[0]


def test_one_rank_shares_nothing(alone):
    comm = ShmComm()
    x = comm.empty((4,), torch.float32, torch.device("cpu"))
    assert comm.direct and comm._channel.ops.shm_used(comm._channel.end) == 0 and x.shape == (4,)
    with pytest.raises(ValueError, match="ShmComm moves CPU tensors"):
        comm.empty((4,), torch.float32, torch.device("meta"))


def test_a_pool_has_a_byte_at_least(alone):
    for pool_bytes in (0, "5", 1.5, True, (1 << 62) + 1):
        with pytest.raises(ValueError, match=r"ShmComm: pool_bytes=.*, expected an integer from 1 to 2"):
            ShmComm(pool_bytes=pool_bytes)


@pytest.mark.exhaustive
def test_a_process_ends_while_its_comm_lives(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from seqpar.comm import ShmComm, Tag
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
        comm = ShmComm()
        x = comm.empty((1000,), torch.float32, torch.device("cpu"))
        comm.exchange({1 - rank: [torch.ones(1000)]}, {1 - rank: [x]}, tag=Tag(1, 0, 0, 0)).wait()
        print(float(x.sum()))
        """)
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=CSRC.parent,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        out, err = process.communicate(timeout=600)
        assert (process.returncode, out.strip()) == (0, "1000.0"), err


def test_shapes_that_no_memory_has_are_refused():
    for messages in run_processes(2, shm_cases.impossible, comm="shm"):
        assert [m.split("empty: ")[1].split("\n")[0] for m in messages] == [
            "more elements than 64 bits count", "more bytes than 64 bits count", "dim 1 has -1 elements",
        ]  # fmt: skip


def test_a_fork_takes_no_memory_of_its_parent_s_and_ends_nothing():
    assert run_processes(2, shm_cases.forks, comm="shm") == [([7.0] * 4, True)] * 2


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_protocol_holds_between_threads(tmp_path):
    """tests/test_sanitizers.py runs the same under sanitizers."""
    sources = [
        *CSRC.glob("test/shm*.cpp"),
        *CSRC.glob("shm/*.cpp"),
        *(CSRC / f"{name}.cpp" for name in ["copy/copy", "base/isa"]),
    ]
    binary = tmp_path / "test"
    command = ["c++", "-O1", "-std=c++17", "-pthread", "-DSP_TEST_MAIN", f"-I{CSRC}", *sources, "-o", binary]
    subprocess.run(command, check=True, timeout=600)
    done = subprocess.run([binary], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
