"""Ranks that die, never call, or fail inside a call: every other one ends in time and names the root cause."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import seqpar
from seqpar.comm import Comm, PeerError, shm
from seqpar.data import prefetch
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import KERNELS
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes, run_threads
from tests.comm.cases import impatient, until
from tests.ops.cases import inputs

TIMEOUT = 10.0  # for the rank that never calls, not for those that call a moment later
LOCAL = threading.local()


def plan_for(ranks: int, transport: str = "ring", ulysses: int = 1) -> Plan:
    return Plan(Mask([8 * ranks], causal=False), Layout.striped(8 * ranks, ranks), transport=transport, ulysses=ulysses)


class Fragile:
    """A comm that does something instead of its n-th exchange of a phase range."""

    def __init__(self, comm: Comm, at: int, instead, *, backward: bool) -> None:
        self.comm, self.at, self.instead, self.backward = comm, at, instead, backward

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def exchange(self, sends, recvs, *, tag):
        if (tag.phase > 2) == self.backward:
            self.at -= 1
            if self.at < 0:
                self.instead()
        return self.comm.exchange(sends, recvs, tag=tag)


def call(comm: Comm, plan: Plan) -> None:
    """One attention step, forward and backward."""
    q, k, v, dout, _ = inputs(plan, (4, 2), (4, 4), 0)
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in (q, k, v)]
    seqpar.attention(*mine, plan, comm).backward(seqpar.shard(dout, plan, comm.rank))


def witness(comm: Comm, folder: Path, plan: Plan, backward: bool, how: str) -> None:
    """A good step, then one in which the last rank fails; each other rank notes what it got, and got after that."""
    call(comm, plan)
    culprit = comm.rank == comm.size - 1
    try:
        if culprit and how == "dies":
            call(Fragile(comm, 1, lambda: os._exit(5), backward=backward), plan)
        elif culprit:
            until(lambda: all((folder / str(other)).exists() for other in range(comm.size - 1)))
        else:
            if how == "is away":
                comm.sub([0, 1]).agree("before", {})
                impatient(comm, TIMEOUT)
            call(comm, plan)
        text = "nothing"
    except Exception as error:
        text = f"{type(error).__name__} {error}"
    again = ""
    if not culprit:
        try:
            call(comm, plan)
        except PeerError as error:
            again = str(error)
    (folder / str(comm.rank)).write_text(f"{text}\n{again}")
    if how != "dies":
        raise PeerError("over")  # the pool is not fit for another test


def notes(folder: Path) -> dict[int, tuple[str, str]]:
    found = {}
    for path in folder.iterdir():
        text, again = path.read_text().split("\n", 1)
        found[int(path.name)] = text, again
    return found


@pytest.mark.parametrize(
    ("transport", "ulysses", "backward"),
    [
        ("ring", 1, False),
        ("fetch", 3, True),
    ],
)
@pytest.mark.sampled(2)
def test_a_rank_that_dies_inside_a_call_ends_the_others(tmp_path, transport, ulysses, backward) -> None:
    with pytest.raises(RuntimeError, match="rank 2: its process died with exit code 5"):
        run_processes(3, witness, tmp_path, plan_for(3, transport, ulysses), backward, "dies", timeout=120.0)
    found = notes(tmp_path)
    assert sorted(found) == [0, 1]
    for text, again in found.values():
        assert text.startswith("PeerError") and "rank 2" in text and "call 1" in text
        assert "lost the connection to rank 2" in text and "waited" not in text
        assert "the comm is dead" in again


def test_a_rank_that_never_calls_ends_the_others(tmp_path) -> None:
    with pytest.raises(PeerError, match="over"):
        run_processes(3, witness, tmp_path, plan_for(3), False, "is away")
    found = notes(tmp_path)
    for rank in (0, 1):
        text, again = found[rank]
        assert text.startswith("PeerError") and "rank 2" in text and f"waited {TIMEOUT:g} s" in text
        assert "the comm is dead" in again


def broken(self, *arguments: object, **options: object) -> None:
    raise FloatingPointError("the kernel broke")


def outcomes(comm: Comm, plan: Plan) -> list[str]:
    said = []
    for _ in range(2):
        try:
            call(comm, plan)
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def assert_named(results: list[tuple[str, str, str]]) -> None:
    for rank, (first, second, _) in enumerate(results):
        if rank == 1:
            assert first == "FloatingPointError: the kernel broke"
        else:
            assert first.startswith("PeerError") and "root cause: rank 1" in first
            assert "attention, call 1: FloatingPointError: the kernel broke" in first
        assert second.startswith("PeerError") and "FloatingPointError: the kernel broke" in second


def kernel_fails(comm: Comm, plan: Plan, method: str) -> tuple[str, str, str]:
    """The same with a kernel that raises in rank 1: while keys are on their way, which must not hide the cause."""
    call(comm, plan)
    kept = {type(kernel): getattr(kernel, method).__func__ for kernel in KERNELS}
    if comm.rank == 1:
        for kernel in kept:
            setattr(kernel, method, broken)
    try:
        return (*outcomes(comm, plan), method)
    finally:
        for kernel, function in kept.items():
            setattr(kernel, method, function)


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_kernel_that_raises_in_a_process_is_the_root_cause(method) -> None:
    assert_named(run_processes(3, kernel_fails, plan_for(3), method))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_kernel_that_raises_in_a_thread_is_the_root_cause(monkeypatch, transport, method) -> None:
    for kernel in {type(kernel) for kernel in KERNELS}:
        monkeypatch.setattr(kernel, method, sometimes(getattr(kernel, method)))
    assert_named(run_threads(4, thread_fails, plan_for(4, transport), method))


def sometimes(works):
    """A method that raises in the thread of rank 1 once its local says so."""

    def method(*arguments: object, **options: object) -> None:
        if getattr(LOCAL, "broken", False):
            raise FloatingPointError("the kernel broke")
        works(*arguments, **options)

    return method


def thread_fails(comm: Comm, plan: Plan, method: str) -> tuple[str, str, str]:
    call(comm, plan)
    LOCAL.broken = comm.rank == 1
    return (*outcomes(comm, plan), method)


def test_a_kernel_that_raises_on_one_device_raises_as_it_is(monkeypatch) -> None:
    for kernel in KERNELS:
        monkeypatch.setattr(type(kernel), "forward", broken)
    with pytest.raises(FloatingPointError, match="the kernel broke"):
        run_threads(1, call, plan_for(1))


def gathers_alone(comm: Comm, how: str) -> str:
    """What a rank hears if rank 1 gathers where the others agree, through what users call."""
    plan = plan_for(comm.size)
    q, k, v = (x.transpose(0, 1) for x in (torch.zeros(plan.rows(comm.rank), 2, 4) for _ in range(3)))
    batches = prefetch([{"input_ids": torch.ones(1, 6, dtype=torch.int64)}] * 2, comm)
    with pytest.raises(PeerError) as error:
        if how == "a mask":
            mask = torch.ones(q.shape[1], plan.mask.tokens, dtype=torch.bool) if comm.rank == 1 else None
            with seqpar.sdpa(plan, comm):
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif comm.rank == 1:
            next(batches)
        else:
            comm.agree("a forward", {})
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "call"), [("a mask", "gathering of sdpa: attn_mask"), ("a step of prefetch more", "gathering of share")]
)
def test_a_rank_that_gathers_where_others_agree_is_named_with_both_calls(how, call) -> None:
    for text in run_threads(3, gathers_alone, how):
        assert re.search(rf"make different calls: .*rank 1 (is )?in the {call}", text), text
        assert "agreement on" in text


def differ_once(comm: Comm) -> None:
    """Ranks are refused in different calls, of which one alone is a verb; the next call is right on all."""
    plan = plan_for(comm.size)
    with pytest.raises(ValueError, match="ranks differ in the call"):
        comm.agree("a forward", {}) if comm.rank == 1 else call(comm, plan)
    with pytest.raises(ValueError, match="fetch: "):
        comm.agree("a forward", {}) if comm.rank == 1 else seqpar.fetch(torch.zeros(1), plan, comm)
    call(comm, plan)


def test_calls_meet_after_ranks_were_refused_in_different_ones() -> None:
    run_threads(3, differ_once)


def leaves_early(comm: Comm, verb: str) -> str:
    """A rank that fails between two verbs; the others are in the second."""
    plan = plan_for(comm.size)
    call(comm, plan)
    if comm.rank == 1:
        comm.abort("KeyError: the data loader broke")
        return "left"
    with pytest.raises(PeerError, match="root cause: rank 1: KeyError: the data loader broke") as raised:
        if verb == "unshard":
            seqpar.unshard(torch.zeros(8), plan, comm)
        elif verb == "switch":
            seqpar.switch(torch.zeros(2, comm.size), comm, split_dim=1, concat_dim=0)
        else:
            seqpar.relayout(torch.zeros(8), comm, src=plan.layout, dst=Layout.contiguous(8 * comm.size, comm.size))
    return str(raised.value)


@pytest.mark.parametrize("verb", ["unshard", "switch", "relayout"])
def test_a_rank_that_leaves_between_verbs_is_named_by_those_that_wait(verb) -> None:
    assert run_threads(3, leaves_early, verb)[1] == "left"


def refused_later(comm: Comm, culprit: int, check: str) -> list[str]:
    """What a rank's three calls come to; in the second one, of a kind that ranks have compared, one rank goes wrong."""
    own, found = type(comm)(timeout=20.0, check=check), []
    plan, x = Plan(Mask([8]), Layout.contiguous(8, comm.size)), torch.ones(8 // comm.size, 2, 4)
    for number in range(3):
        k = x.half() if (number, comm.rank) == (1, culprit) else x
        try:
            out = seqpar.attention(x, k, x, plan, own)
            found.append("right" if torch.equal(out, x) else "wrong")
        except (ValueError, PeerError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_wrong_argument_of_a_known_call_is_named_before_and_after_it_is_compared(kind: str, culprit: int) -> None:
    if kind == "shm" and shm.missing():
        pytest.skip(shm.missing())
    for rank, said in enumerate(run_processes(2, refused_later, culprit, "batch", comm=kind)):
        assert said[0] == "right" and "q, k, v must have one dtype, got torch.float32, torch.float16" in said[1]
        assert said[1].startswith("ValueError: q, k" if rank == culprit else "PeerError: ")
        assert f"rank {culprit} refused its arguments" in said[2]
        assert said[2].endswith('give what it expects, or use a comm with check="call", which remains usable')
    for said in run_processes(2, refused_later, culprit, "call", comm=kind):
        assert said[0] == said[2] == "right" and "q, k, v must have one dtype" in said[1], "it lives on"
