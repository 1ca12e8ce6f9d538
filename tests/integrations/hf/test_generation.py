"""A parallel model generates as under data parallelism: each rank its own prompts, token by token as one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.integrations.hf.models import batches, build, largest, one_process, padded

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 3}


def prompts(rank: int) -> dict[str, Tensor]:
    """Of other lengths on every rank, and other numbers of them, padded on the left."""
    batch = padded(torch.Generator().manual_seed(rank), [4 + 3 * rank, 9, 2][: 3 - rank], left=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def made(model: PreTrainedModel, rank: int, **more: Any) -> Tensor:
    """What a model makes of a rank's prompts, up to another number of tokens on every rank."""
    return model.generate(**prompts(rank), **GREEDY | {"max_new_tokens": 3 + 2 * rank} | more)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])  # gpt-oss has windows and sinks, whose caches differ
@pytest.mark.sampled(2)
def test_every_rank_makes_its_own_tokens_and_trains_on(name: str, ranks: int) -> None:
    model, every = build(name), batches("right", ranks)
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"num_beams": 2}]
    expected = [[made(model, rank, **way) for way in ways] for rank in range(ranks)]
    whole = one_process(model, every, True)

    def rank(comm: Comm) -> list[Any]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm) as handle:
            found = [made(own, comm.rank, **way) for way in ways]
            with handle.local():
                found.append(made(own, comm.rank))
            loss = own(**every[comm.rank]).loss
            loss.backward()
            grads = {n: p.grad for n, p in own.named_parameters()}
            own.eval()
            found.append(made(own, comm.rank))
            for _ in range(comm.rank):  # as often as a rank likes: no other one waits for it
                made(own, comm.rank)
            with torch.no_grad():
                own(**every[comm.rank])
        return [*found, made(own, comm.rank), loss.detach(), grads]

    found = run_threads(ranks, rank)
    for tokens, (greedy, *others) in zip(found, expected, strict=True):
        for ids, same in zip(tokens[:-2], [greedy, *others, greedy, greedy, greedy], strict=True):
            assert torch.equal(ids, same)
    assert len({tokens[0].shape for tokens in found}) == ranks
    for *_, loss, grads in found:
        assert abs(float(loss) - float(whole.loss)) <= 1e-6 * float(whole.loss)
        assert grads.keys() == whole.grads.keys()
    for key, grad in whole.grads.items():
        total = sum(grads[key] for *_, grads in found)
        assert float((total - grad).abs().max()) <= 1e-5 * max(float(grad.abs().max()), 1e-6 * largest(whole.grads))


def test_continuous_batches_are_each_ranks_own_too() -> None:
    model = build("llama").eval()
    model.set_attn_implementation("sdpa")
    lists = [[[5, 6, 7, 8], [9, 10]], [[11, 12, 13]]]
    options = GenerationConfig(max_new_tokens=4, **GREEDY)
    expected = [[_one(model, ids, options) for ids in several] for several in lists]

    def rank(comm: Comm) -> list[list[int]]:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            # a cache of its own choice would take all memory
            cache = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
            found = own.generate_batch(lists[comm.rank], generation_config=options, continuous_batching_config=cache)
            assert own(**batches("right", 2)[comm.rank]).loss.isfinite()
        return [each.generated_tokens for each in found.values()]

    assert run_threads(2, rank) == expected


def _one(model: PreTrainedModel, ids: list[int], options: GenerationConfig) -> list[int]:
    made = model.generate(torch.tensor([ids]), generation_config=options)[0, len(ids) :].tolist()
    return made[: made.index(3) + 1] if 3 in made else made  # type: ignore[no-any-return]
