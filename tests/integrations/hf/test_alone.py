"""A forward that one rank makes alone: every rank hears so and what to do, and what to do works."""

import os
import re

import pytest
import torch

import seqpar
from seqpar.comm import PeerError
from seqpar.testing import run_processes
from tests.comm import cases
from tests.integrations.hf.models import build


def evaluates_alone(comm):
    """Rank 0 evaluates, rank 1 does not: first where rank 0 says that it is alone, then where it does not."""
    llama, ids = build("llama").eval(), torch.arange(12)[None]
    with torch.no_grad():
        expected = llama(input_ids=ids, labels=ids).loss
        handle = seqpar.parallelize(llama, comm)
        if comm.rank == 0:
            with handle.local():
                torch.testing.assert_close(llama(input_ids=ids, labels=ids).loss, expected)
        together = llama(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(together, expected)
        cases.impatient(comm, 1.0)
        if comm.rank == 1:
            cases.until(lambda: cases._is_dead(comm))
        llama(input_ids=ids, labels=ids)


def ends_first(comm):
    """The loader of rank 1 has one batch less, and its process ends then."""
    llama, ids = build("llama").eval(), torch.arange(12)[None]
    seqpar.parallelize(llama, comm)
    with torch.no_grad():
        for _ in range(2 - comm.rank):
            llama(input_ids=ids)
    if comm.rank == 1:
        os._exit(0)


def test_a_loader_that_ends_first_is_told_with_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1: its process died"):
        run_processes(2, cases.witness, tmp_path, ends_first)
    message = (tmp_path / "0").read_text()
    assert re.search(r"in LlamaForCausalLM.forward \(.*\): lost the connection to rank 1; the comm is dead", message)
    assert "; see in the log of rank 1 why it ended, or give every rank the same number of batches" in message


@pytest.mark.exhaustive
def test_an_evaluation_on_one_rank_alone_is_told_on_all_ranks_with_what_to_do(tmp_path):
    with pytest.raises(PeerError):
        run_processes(2, cases.witness, tmp_path, evaluates_alone)
    for rank in range(2):
        message = (tmp_path / str(rank)).read_text()
        assert "in LlamaForCausalLM.forward (gathering): waited 1 s for rank 1; the comm is dead" in message
        assert "; give every rank the same number of batches" in message and "`with handle.local():`" in message
