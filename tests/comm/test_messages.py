"""What ranks say that do not meet, that wait in vain or that are interrupted: the call, the rank, what to do."""

import pytest
import torch

import seqpar
from seqpar import native
from seqpar.comm import PeerError
from seqpar.testing import run_processes
from tests.comm import cases

needs_native = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
KINDS = ["gloo", pytest.param("shm", marks=needs_native)]


@pytest.mark.parametrize("kind", KINDS)
def test_agree_beside_gather_names_both_calls_and_the_comm_lives(kind):
    for messages in run_processes(3, cases.agrees_or_gathers, comm=kind):
        first, second = (message.partition("ranks differ in the call: ")[2] for message in messages)
        assert first.startswith("a forward (comparing arguments) on ranks 0, 2; a loss (gathering) on rank 1;")
        assert second.startswith("a step (comparing arguments) on ranks 0, 2; a step (gathering) on rank 1;")


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_ends_a_wait_at_once_and_the_others_hear(kind):
    found = run_processes(2, cases.interrupted, comm=kind, timeout=400.0)  # longer than a rank waits to hear
    assert [first for first, _ in found] == ["KeyboardInterrupt", "PeerError"]
    for _, message in found:
        assert "rank 0: in call 4" in message and ("interrupted by Ctrl-C" in message or "KeyboardInterrupt" in message)


def ahead(comm):
    """Rank 1 is in the backward of a call that rank 0 has not made."""
    plan = seqpar.Plan(seqpar.Mask([16]), seqpar.Layout.contiguous(16, 2))
    q, k, v = (torch.ones(8, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = seqpar.attention(q, k, v, plan, comm)
    out.sum().backward()
    out = seqpar.attention(q, k, v, plan, comm)
    if comm.rank == 0:
        comm.agree("LlamaForCausalLM.forward", {})
    out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_in_another_call_is_told_in_words(tmp_path, kind):
    with pytest.raises(PeerError):
        run_processes(2, cases.witness, tmp_path, ahead, comm=kind)
    messages = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    # the first to see it knows of the other one's agreement only that it is one
    assert any("LlamaForCausalLM.forward (comparing arguments)" in message for message in messages), messages
    for message in messages:
        assert "attention (backward, " in message, message
        assert "phase" not in message and "slot" not in message
        assert "the comm is dead; make the same calls in the same order on all ranks, with equal plans" in message, (
            message
        )


def swapped(comm):
    """Both ranks know two plans, and take one each."""
    comm.check_every = "batch"
    plans = [seqpar.Plan(seqpar.Mask(lengths), seqpar.Layout.contiguous(16, 2)) for lengths in ([16], [4, 12])]
    q = torch.ones(8, 1, 4)
    for plan in plans:
        seqpar.attention(q, q, q, plan, comm)
    seqpar.attention(q, q, q, plans[comm.rank], comm)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_that_differ_later_are_told(tmp_path, kind):
    with pytest.raises(PeerError):
        run_processes(2, cases.witness, tmp_path, swapped, comm=kind)
    for message in ((tmp_path / str(rank)).read_text() for rank in range(2)):
        assert "(the same call, with another plan, dtype, number of heads or option)" in message, message
        assert message.endswith('which a comm with check="call" compares and names'), message


def alone(comm):
    """Rank 0 calls what rank 1 does not."""
    if comm.rank == 0:
        cases.impatient(comm, 1.0)
        comm.agree("LlamaForCausalLM.forward", {})
    else:
        cases.until(lambda: cases._is_dead(comm))
        comm.gather("evaluate", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_on_one_rank_alone_is_named_on_all(tmp_path, kind):
    with pytest.raises(PeerError):
        run_processes(2, cases.witness, tmp_path, alone, comm=kind)
    for rank in range(2):
        message = (tmp_path / str(rank)).read_text()
        assert "in LlamaForCausalLM.forward (comparing arguments): waited 1 s for rank 1" in message
        assert "; the comm is dead; make every rank take part in this call, as often as the others, or give" in message
