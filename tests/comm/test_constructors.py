"""What constructors of comms between processes promise: every rank comes, or every rank hears who did not and why."""

import inspect
import re
import threading

import pytest
import torch
import torch.distributed as dist

from bench.lib.counting import CountedStore
from seqpar import native
from seqpar.comm import GroupComm, LocalComm, PeerComm, PeerError, ShmComm
from seqpar.comm.rendezvous import Rendezvous
from seqpar.testing import run_processes
from tests.comm import cases, constructor_cases

needs_native = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
KINDS = ["gloo", pytest.param("shm", marks=needs_native)]

# how a constructor fails on rank 1, on which comms, with what there and elsewhere
FAILURES = [
    ("another machine", "shm", "ValueError", r"ranks \[1\] run on \['elsewhere'\]"),
    ("no extension", "shm", "NotImplementedError", "seqpar._C was not built"),
    ("no memory", "shm", "RuntimeError", "pool_bytes=4611686018427387904"),
    ("no pool", "shm", "ValueError", "pool_bytes=0, expected an integer from 1"),
    ("no such pool", "shm", "ValueError", r"pool_bytes=1180591620717411303424, expected an integer from 1 to 2\*\*62"),
    ("no timeout", "shm gloo", "ValueError", "timeout=0, expected seconds > 0"),
    ("a text", "shm gloo", "ValueError", "timeout='5', expected seconds > 0"),
    ("no check", "shm gloo", "ValueError", "check='never'"),
    (
        "another check",
        "shm gloo",
        "ValueError",
        "ranks differ in check: 'batch' on ranks 0, 2; 'call' on rank 1; give all",
    ),
    ("no channels", "gloo", "ValueError", "min_ctas=0 with private=True, expected None or an integer of at least 1"),
    ("channels of another", "gloo", "ValueError", "min_ctas=8 with private=False, .* only the comm's own"),
    ("another number of channels", "gloo", "ValueError", "ranks differ in min_ctas: None on ranks 0, 2; 8 on rank 1"),
    ("no descriptors", "shm gloo", "RuntimeError", "this process can open \\d+ more files.*raise `ulimit -n`"),
]


@pytest.mark.parametrize(
    ("kind", "how", "error", "text"),
    [
        pytest.param(kind, how, error, text, marks=needs_native if kind == "shm" else (), id=f"{kind}-{how}")
        for how, kinds, error, text in FAILURES
        for kind in kinds.split()
    ],
)
@pytest.mark.sampled(3)
def test_a_rank_that_cannot_take_part_says_so_everywhere(kind, how, error, text):
    for rank, ((found, message), alive) in enumerate(run_processes(3, constructor_cases.made, how, comm=kind)):
        quoted = "" if rank == 1 or how.startswith("another") else "rank 1 could not take part: .*"
        assert re.search(quoted + text, message), message
        assert found == (error if rank == 1 or error == "ValueError" else "RuntimeError")
        assert len(alive) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_named(kind):
    expected = r"Comm: rank 0 waited 1 s for ranks \[1\] to call its constructor.*; make it on every rank"
    with pytest.raises(PeerError, match=expected):
        run_processes(2, constructor_cases.comes_not, comm=kind)


@pytest.mark.parametrize(("kind", "absent"), [("gloo", 0), pytest.param("shm", 2, marks=needs_native)])
@pytest.mark.sampled(2)
def test_a_constructor_that_a_rank_missed_does_not_spoil_the_next(kind, absent):
    for rank, (found, bits) in enumerate(run_processes(3, constructor_cases.missed, absent, comm=kind)):
        assert len(bits) == 16
        if rank != absent:
            assert f"rank {rank} waited 4 s for ranks [{absent}] to call its constructor" in found


def test_a_rank_that_is_held_up_as_it_connects_is_waited_for():
    assert all(len(bits) == 16 for bits in run_processes(2, constructor_cases.connects_late, 60.0))
    error, _ = run_processes(2, constructor_cases.connects_late, 0.2)
    assert "rank 0 waited 0.2 s for ranks [1] to call its constructor" in error


def test_a_rank_that_dies_in_a_constructor_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1: its process died with exit code 5"):
        run_processes(3, cases.witness, tmp_path, constructor_cases.dies)
    texts = [(tmp_path / name).read_text() for name in ("0", "2")]
    for text in texts:
        assert re.search(r"PeerError: GroupComm: rank . waited 2 s for ranks \[1\] to call", text), text


class LostStore(dist.HashStore):
    """A store whose holder ends after the first ranks have written."""

    def check(self, keys):
        raise dist.DistNetworkError("Failed to send: Broken pipe\nException raised from ...")


def test_a_store_that_goes_with_its_holder_is_named():
    with pytest.raises(
        PeerError, match=r"GroupComm: rank 1 lost the store of the group .* rank 0 .*\(Failed to send: Bro"
    ):
        Rendezvous("GroupComm", LostStore(), 1, 3, 5.0)


makes = pytest.mark.parametrize("make", [GroupComm, pytest.param(ShmComm, marks=needs_native)])


@makes
def test_what_a_comm_is_made_from(make, alone):
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    for group in (None, dist.group.WORLD, mesh["cp"]):
        cases.by_itself(make(group, timeout=60.0))
    assert make(check="call").check_every == "call"
    with pytest.raises(ValueError, match=r"2 dimensions \('dp', 'cp'\)"):
        make(mesh)
    for group in ("cp", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError, match=f"{make.__name__}: got .*, expected a group that this process is in"):
            make(group)


@makes
def test_without_a_default_group(make):
    with pytest.raises(ValueError, match=f"{make.__name__}: .*no default group.*call init_process_group first"):
        make()


@makes
def test_arguments_that_say_nothing_are_refused_by_name(make, alone):
    for timeout in (float("inf"), float("nan"), 1e300, -1, 0, True, "5", None, torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match=f"^{make.__name__}: timeout=.*, expected seconds > 0, at most 1e"):
            make(timeout=timeout)
    for check in ("never", None, 1, ["batch"]):
        with pytest.raises(ValueError, match=f'^{make.__name__}: check=.*, expected "batch" or "call"'):
            make(check=check)


@pytest.mark.parametrize("make", [GroupComm, PeerComm, ShmComm])
def test_by_default_a_comm_waits_longer_than_nccl_does(make):
    # a rank that writes a checkpoint for ten minutes must not end the others
    assert inspect.signature(make).parameters["timeout"].default >= 3 * 600


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 0, True, "5", None])
def test_a_timeout_of_threads_that_says_nothing_is_refused_by_name(timeout):
    with pytest.raises(ValueError, match="^LocalComm.world: timeout=.*, expected seconds > 0, at most 1e"):
        LocalComm.world(2, timeout=timeout)


@pytest.mark.parametrize("size", [1, 2, 9, 10, 100])
def test_ranks_meet_with_few_messages_each(size):
    """However many they are; what a rank asks in vain, while it waits for others, is not counted."""
    found = {}

    def rank(number):
        store = CountedStore(shared)
        rendezvous = Rendezvous("GroupComm", store, number, size, 60.0)
        values = rendezvous.hear(lambda: number * number)
        found[number] = rendezvous.number, values, store.messages

    shared = dist.HashStore()
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(size)) and len({number for number, _, _ in found.values()}) == 1
    assert all(values == [n * n for n in range(size)] for _, values, _ in found.values())
    assert max(messages for _, _, messages in found.values()) <= 7 + 4 + 2 * 8
