"""Generation with a cache that is split over ranks: token by token what one process generates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.comm import PeerError
from seqpar.launch import run_threads
from tests.integrations.hf.models import SIZES, build, drawn, padded

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
PLANS: dict[str, Callable[..., Plan] | None] = {
    "planned": None,
    "zigzag": lambda lengths, ranks: Plan(Mask(lengths), Layout.zigzag(lengths, ranks)),
    # the last of the prompts lies on one rank, and ring passes keys on
    "ring": lambda lengths, ranks: Plan(Mask(lengths), Layout.contiguous(int(lengths.sum()), ranks), transport="ring"),
}


def prompts(lengths: list[int]) -> dict[str, Tensor]:
    batch = padded(torch.Generator().manual_seed(5), lengths, left=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def alone(model: PreTrainedModel, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """The new tokens of each prompt, generated on one process without padding."""
    rows = [ids[keep.bool()][None] for ids, keep in zip(*batch.values())]
    return torch.cat([model.generate(row, **options)[:, row.shape[1] :] for row in rows])


def together(comm: Comm, model: PreTrainedModel, batch: dict[str, Tensor], plan: Any, options: dict[str, Any]) -> Any:
    """The new tokens with a split cache, and the logits of each."""
    own, options = copy.deepcopy(model), {"max_new_tokens": 12} | options
    with seqpar.parallelize(own, comm, plan=plan) as handle:
        cache = handle.cache()
        how = {"return_dict_in_generate": True, "output_logits": True}
        out = own.generate(**batch, **options, **how, cache=cache)
        new = out.sequences[:, batch["input_ids"].shape[1] :]
        return new, torch.stack(out.logits)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "max_new_tokens": 6},
        {"prefill_chunk_size": 17},
    ],
    ids=["beams", "chunks"],
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.sampled(2)
def test_ways_of_generation(name: str, options: dict[str, Any]) -> None:
    model, batch = build(name).double().eval(), prompts([40, 22])
    expected = alone(model, batch, **GREEDY | {"max_new_tokens": 12} | options)
    for new, _ in run_threads(2, together, model, batch, PLANS["zigzag"], GREEDY | options):
        assert new.equal(expected)


def test_rows_stay_and_a_step_sends_partial_results_alone() -> None:
    model, batch = build("llama").double().eval(), prompts([40, 21])

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        handle = seqpar.parallelize(own, comm, plan=PLANS["ring"])
        cache = handle.cache(capacity=80)
        with torch.no_grad():
            own(**batch, cache=cache, logits_to_keep=1)
            assert cache.past.counts().tolist() == [[30, 0], [10, 21]]
            before, sent = cache.past.counts(), comm.stats.bytes_sent
            mask = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            own(torch.tensor([[5], [6]]), attention_mask=mask, cache=cache)
        heads, dim, layers = 4, 8, 2
        assert comm.stats.bytes_sent - sent == (comm.size - 1) * layers * 2 * heads * (dim + 1) * 8
        more = cache.past.counts() - before
        assert more.sum(0).tolist() == [1, 1]
        assert all(before[more[:, n].argmax(), n] == before[:, n].min() for n in range(2))
        rows = before[comm.rank] + more[comm.rank]
        assert f"rank {comm.rank}: {rows.sum()} rows, {rows.sum() * layers * 2 * 2 * dim * 8} bytes" in cache.describe()

    run_threads(2, rank)


def test_the_next_turn_continues_the_cache() -> None:
    model = build("mistral").double().eval()
    first = prompts([30])["input_ids"]

    def rank(comm: Comm) -> list[Tensor]:
        own = copy.deepcopy(model)
        cache, ids, turns = seqpar.parallelize(own, comm).cache(), first, []
        for more in (5, 25, 1):  # few new tokens, many, and one
            ids = own.generate(ids, **GREEDY, max_new_tokens=4, cache=cache)
            turns.append(ids)
            ids = torch.cat([ids, torch.full((1, more), 9)], 1)
        cache.reset()
        return [*turns, own.generate(first[:, :5], **GREEDY, max_new_tokens=4, cache=cache)]

    ids, expected = first, []
    for more in (5, 25, 1):
        ids = model.generate(ids, **GREEDY, max_new_tokens=4)
        expected.append(ids)
        ids = torch.cat([ids, torch.full((1, more), 9)], 1)
    expected.append(model.generate(first[:, :5], **GREEDY, max_new_tokens=4))
    for found in run_threads(2, rank):
        assert all(map(torch.equal, found, expected))


def test_a_rank_with_another_token_is_named_and_the_cache_stays() -> None:
    model, batch = build("llama").double().eval(), prompts([20])

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        cache = seqpar.parallelize(own, comm).cache()
        with torch.no_grad():
            own(batch["input_ids"], cache=cache)
            past, columns = cache.past, cache.columns
            with pytest.raises(ValueError, match=r"ranks differ in tokens: .*on rank 0; .*on rank 1; .*the same seed"):
                own(torch.tensor([[5 + comm.rank]]), cache=cache)
            assert cache.past == past and cache.columns == columns
            again = own(torch.tensor([[7]]), cache=cache).logits
            expected = model(torch.cat([batch["input_ids"], torch.tensor([[7]])], 1)).logits[:, -1:]
        torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-6)

    run_threads(2, rank)


def test_a_rank_that_fails_in_a_layer_ends_all() -> None:
    model, batch = build("llama").double().eval(), prompts([20])

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        cache = seqpar.parallelize(own, comm).cache()
        with torch.no_grad():
            own(batch["input_ids"], cache=cache)
            past = cache.past
            if comm.rank:
                own.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError if comm.rank else PeerError):
                own(torch.tensor([[5]]), cache=cache)
        assert cache.past is past and cache.columns == 20

    run_threads(2, rank)


REFUSED = [
    ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens=2"),
    ({"assistant_model": object()}, "assistant_model="),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"output_attentions": True}, "output_attentions=True"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    model, ids = build("llama").eval(), prompts([20])["input_ids"]

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        cache = seqpar.parallelize(own, comm).cache()
        with pytest.raises(NotImplementedError, match=message):
            own.generate(ids, **GREEDY, **options, cache=cache)

    run_threads(2, rank)


def test_refused_calls() -> None:
    model, batch = build("llama").eval(), prompts([20, 4])

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        handle = seqpar.parallelize(own, comm)
        cache = handle.cache()
        with pytest.raises(NotImplementedError, match="generate_batch"):
            own.generate_batch([[1]], cache=cache)
        with pytest.raises(NotImplementedError, match="labels"):
            own(**batch, labels=batch["input_ids"], cache=cache)
        with pytest.raises(ValueError, match="attention_mask"):
            own(batch["input_ids"], attention_mask=batch["attention_mask"][:, 1:], cache=cache)
        own(**batch, cache=cache)
        with pytest.raises(ValueError, match=r"earlier tokens"):
            own(batch["input_ids"][:, :1], attention_mask=torch.ones(2, 21), cache=cache)
        with pytest.raises(ValueError, match="1 sequences, and the cache 2"):
            own(batch["input_ids"][:1], cache=cache)
        own.train()
        with pytest.raises(NotImplementedError, match=r"eval\(\)"):
            own(batch["input_ids"][:, :1], cache=cache)
        own.eval()
        with handle.local(), pytest.raises(RuntimeError, match=r"outside local"):
            own(batch["input_ids"][:, :1], cache=cache)
        with pytest.raises(ValueError, match="capacity must be an integer of at least 1, got 0"):
            handle.cache(capacity=0)

    run_threads(2, rank)


OTHERS = {
    "Mamba": ({"state_size": 4}, "keeps no states of MambaMixer"),
    "Llama": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary embeddings depend"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_refused_models(name: str) -> None:
    more, message = OTHERS[name]
    model = drawn(getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")(**SIZES | more))

    def rank(comm: Comm) -> None:
        handle = seqpar.parallelize(copy.deepcopy(model), comm)
        with pytest.raises(NotImplementedError, match=message):
            handle.cache()

    run_threads(1, rank)
