"""What ends generation with a split cache: a process's memory, and ranks that die, stop or take another token."""

from __future__ import annotations

import copy
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.launch import run_processes
from seqpar.testing import run_threads
from tests.comm import cases
from tests.integrations.hf.models import SIZES, build, drawn

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
PROMPT, LIMIT = 16_384, 720 << 20


def answer(comm: Comm, limited: bool) -> Tensor | None:
    """New tokens after a prompt, whose keys take 512 MiB; None if the limit of this process's memory ends it."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    config = transformers.MistralConfig(**SIZES | sizes | {"max_position_embeddings": PROMPT + 8}, sliding_window=64)
    model = drawn(transformers.MistralForCausalLM, config).eval()
    ids = torch.randint(1, 61, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    handle = seqpar.parallelize(model, comm)
    model.generate(ids[:, :64], **GREEDY, max_new_tokens=2, cache=handle.cache())  # what is loaded does not count
    before = resource.getrlimit(resource.RLIMIT_AS)
    if limited:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + LIMIT, before[1]))
    cache = handle.cache()
    try:
        out = model.generate(ids, **GREEDY, max_new_tokens=4, cache=cache)
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
        assert cache.past is None and cache.columns == 0
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert cache.past.counts().max() <= (PROMPT + 3) // comm.size + 1
    return out[0, PROMPT:]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_a_prompt_beyond_the_memory_of_one_process() -> None:
    (whole,), (limited,) = (run_processes(1, answer, limit) for limit in (False, True))
    assert whole is not None and limited is None
    for found in run_processes(2, answer, True):
        assert found is not None and found.equal(whole)


def dies(comm: Comm) -> None:
    """Rank 1 is killed in a layer of the third new token."""
    model, ids = build("llama").eval(), torch.arange(1, 21)[None]
    cache = seqpar.parallelize(model, comm).cache()
    steps = []

    def hook(*_: object) -> None:
        steps.append(0)
        if comm.rank and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[1].register_forward_pre_hook(hook)
    try:
        model.generate(ids, **GREEDY, max_new_tokens=8, cache=cache)
    finally:
        assert cache.columns == 21 and cache.past.lengths().tolist() == [21]


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_rank_that_dies_ends_all(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RuntimeError, match="rank 1: its process died"):
        run_processes(2, cases.witness, tmp_path, dies, comm=kind, timeout=20.0)
    message = (tmp_path / "0").read_text()
    assert "PeerError" in message and "rank 1" in message
    assert float(message.split()[0]) < 20


def samples(comm: Comm) -> None:
    """Each rank has a seed of its own."""
    model, ids = build("qwen3").eval(), torch.arange(1, 21)[None]
    cache = seqpar.parallelize(model, comm).cache()
    torch.manual_seed(comm.rank)
    try:
        model.generate(ids, do_sample=True, pad_token_id=0, max_new_tokens=30, cache=cache)
    finally:
        assert cache.columns == cache.past.lengths()[0] == 20  # the keys of the token that differs are not kept


def test_ranks_that_sample_with_other_seeds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks differ in tokens: .*; give all ranks .* the same seed"):
        run_processes(2, cases.witness, tmp_path, samples)
    assert all("on rank 0" in (tmp_path / str(rank)).read_text() for rank in range(2))


def test_a_rank_without_the_cache_is_waited_for_no_longer_than_the_timeout() -> None:
    model, ids = build("llama").eval(), torch.arange(1, 21)[None]

    def rank(comm: Comm) -> str:
        own = copy.deepcopy(model)
        cache = seqpar.parallelize(own, comm).cache()
        cases.impatient(comm, 1.0)
        given = {"cache": cache} if comm.rank else {}
        try:
            own.generate(ids, **GREEDY, max_new_tokens=2, **given)
        except seqpar.PeerError as error:
            return str(error)
        return ""

    alone, waited = run_threads(2, rank)
    assert not alone and "waited 1 s for ranks [0] to agree on LlamaForCausalLM.generate" in waited
    assert "call generate on every rank with its cache=handle.cache()" in waited


def test_a_release_whose_generate_takes_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = seqpar.parallelize(build("llama").eval(), seqpar.LocalComm())
    monkeypatch.setattr("seqpar.integrations.hf.cache.transformers.__version__", "5.23.0")
    monkeypatch.setattr(transformers.GenerationMixin, "prepare_inputs_for_generation", lambda self, input_ids: None)
    with pytest.raises(NotImplementedError, match=r"transformers 5\.23\.0 takes no cache by that name, 5\.24 does"):
        handle.cache()
