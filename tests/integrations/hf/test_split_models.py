"""Every kind of model that a split cache serves: 200 tokens, one by one, as one process generates them in fp64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.launch import run_processes, run_threads
from tests.ecosystem import architectures
from tests.ecosystem.architectures import BOTH, Architecture
from tests.ecosystem.ways import islands
from tests.integrations.hf import hybrids, models, test_latents
from tests.integrations.hf.test_split_cache import GREEDY, PLANS, prompts
from tests.ranks import in_wrapper

pytestmark = test_latents.pytestmark
UNIFORM = ("llama", "qwen3", "mistral")  # whose layers are alike
GEMMA2 = Architecture(
    "gemma2", "text", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0, "layer_types": BOTH}
)
MAIN = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "deepseek_v3", "qwen3_5"]
OTHERS = [
    "deepseek_v2", "glm4_moe_lite", "mistral4", "youtu", "axk1", "kimi_linear", "bailing_hybrid", "qwen3_next",
    "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3", "mamba2", "bamba", "granite4", "nemotron_h", "falcon_h1",
]  # fmt: skip


def empty(lengths: Any, ranks: int) -> Plan:
    """The last rank gets no row of the prompt, unless it is alone."""
    shards = np.array_split(np.arange(int(sum(lengths))), max(ranks - 1, 1))
    return Plan(Mask(lengths), Layout([*shards, *[np.zeros(0, np.int64)] * (ranks > 1)]))


def build(name: str) -> Any:
    """A small model in fp64, the same whenever it is called."""
    if name in test_latents.MLA:
        model = test_latents.build(name)
    elif name in hybrids.FAMILIES:
        model = hybrids.build(name, torch.float64)
    elif name == "gemma2":
        model = architectures.build(GEMMA2, dtype=torch.float64)
    else:
        model = models.build(name, **{"num_hidden_layers": 1} if name in UNIFORM else {}).double()
    model.set_experts_implementation("eager")  # grouped products of torch have no fp64
    return model.eval()


LENGTHS = [40, 21, 1]  # the last one leaves some ranks without a key
LAYOUTS = {**PLANS, "empty": empty}


def check(name: str, ranks: int, layout: str, new: int) -> None:
    """A model generates on ranks what one process computes of their tokens, and all ranks have the same logits."""
    model, batch = build(name), prompts(LENGTHS)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=LAYOUTS[layout]) as handle:
            how = {"max_new_tokens": new, "return_dict_in_generate": True, "output_logits": True}
            out = own.generate(**batch, **GREEDY, **how, cache=handle.cache())
        return out.sequences, torch.stack(out.logits, 1)

    found = run_threads(ranks, rank)
    for ids, logits in found:
        assert ids.equal(found[0][0])
        assert logits.equal(found[0][1])  # to the bit, so that ranks that sample agree
    for row, keep, logits in zip(found[0][0], batch["attention_mask"], found[0][1], strict=True):
        with islands(torch.float64), torch.no_grad():
            whole = model(row[len(keep) - keep.sum() :][None], use_cache=False).logits[0, -new - 1 : -1]
        assert whole.argmax(-1).equal(row[-new:])
        torch.testing.assert_close(logits, whole, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.sampled(24)
def test_200_tokens_are_those_of_one_process(name: str, ranks: int, layout: str) -> None:
    check(name, ranks, layout, 200)


@pytest.mark.parametrize("name", MAIN + OTHERS)
@pytest.mark.sampled(5)
def test_few_tokens_of_all_models(name: str) -> None:
    check(name, 2, "zigzag", 6)


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 17},
    "stop": {"eos_token_id": list(range(1, 61, 3))},
}


def generated(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """Sequences of up to 10 new tokens."""
    with islands(torch.float64):
        return model.generate(**batch, **GREEDY | {"max_new_tokens": 10} | options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "qwen3_5"])
@pytest.mark.sampled(2)
def test_ways_of_generation(name: str, way: str) -> None:
    model, batch = build(name), prompts([40, 22])

    def rank(comm: Comm) -> Tensor:
        own = copy.deepcopy(model)
        with islands(torch.float64):
            cache = seqpar.parallelize(own, comm, plan=LAYOUTS["zigzag"]).cache()
        return generated(own, batch, **WAYS[way], cache=cache)

    expected = generated(model, batch, **WAYS[way])
    assert all(found.equal(expected) for found in run_threads(2, rank))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_turns(name: str) -> None:
    model, batch = build(name), prompts([30, 2])

    def turns(own: Any, batch: dict[str, Tensor], **options: Any) -> list[Tensor]:
        found, (ids, mask) = [], batch.values()
        for more in (5, 25, 0):  # few new tokens, many, and none
            found.append(generated(own, {"input_ids": ids, "attention_mask": mask}, **options, max_new_tokens=3))
            ids = torch.cat([found[-1], torch.full((2, more), 9)], 1)
            mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.long)], 1)
        return found

    def rank(comm: Comm) -> list[Tensor]:
        own = copy.deepcopy(model)
        with islands(torch.float64):
            cache = seqpar.parallelize(own, comm, plan=LAYOUTS["ring"]).cache()
        return turns(own, batch, cache=cache)

    expected = turns(model, batch)
    for found in run_threads(2, rank):
        assert all(map(torch.equal, found, expected))


def test_samples_and_sharded_weights_of_processes() -> None:
    first, second = run_processes(2, on_process)
    assert len(first) == 5 and all(map(torch.equal, first, second))


def on_process(comm: Comm) -> list[Tensor]:
    """Samples of a rank with a seed, then greedy tokens of sharded weights, each as on this rank alone."""
    found = []
    for name in ("qwen3", "gemma2", "qwen3_5", "llama", "deepseek_v3"):
        how = "fsdp" if name in ("llama", "deepseek_v3") else ""
        model, batch, options = build(name), prompts([30, 8]), {"do_sample": not how, "max_new_tokens": 6}
        own = copy.deepcopy(model)
        torch.manual_seed(3)
        expected = generated(model, batch, **options)
        if how:
            own = in_wrapper(own, how, own.model.layers)
        with islands(torch.float64), seqpar.parallelize(own, comm) as handle:
            torch.manual_seed(3)
            found.append(generated(own, batch, **options, cache=handle.cache()))
        assert found[-1].equal(expected), name
    return found


REFUSED = {
    "jamba": "keeps no states of JambaMambaMixer", "zamba2": "keeps no states of Zamba2MambaMixer",
    "recurrent_gemma": "keeps no states of RecurrentGemmaRecurrentBlock",
    "minimax": "keeps no states of MiniMaxLightningAttention", "minicpm3": "not those of a linear layer",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(2)
def test_refused_by_name(name: str) -> None:
    own = build(name)
    with islands(torch.float64), pytest.raises(NotImplementedError, match=REFUSED[name]):
        seqpar.parallelize(own, LocalComm()).cache()


def test_latents_stay_and_a_step_sends_partial_values_alone() -> None:
    model, batch = build("deepseek_v3"), prompts([40, 21])
    heads, latent, rotated, values, layers = 4, 12, 4, 7, 2

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        handle = seqpar.parallelize(own, comm, plan=LAYOUTS["zigzag"])
        cache = handle.cache()
        with torch.no_grad():
            own(**batch, cache=cache, logits_to_keep=1)
            sent = comm.stats.bytes_sent
            mask = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            own(torch.tensor([[5], [6]]), attention_mask=mask, cache=cache)
        assert comm.stats.bytes_sent - sent == (comm.size - 1) * layers * 2 * heads * (values + 1) * 8
        rows = cache.past.counts()[comm.rank].sum()
        assert f"rank {comm.rank}: {rows} rows, {rows * layers * (latent + rotated) * 8} bytes" in cache.describe()
        vars(own.model.layers[0].self_attn)["expand_kv"].around.refusal = "the test wants keys"
        with pytest.raises(NotImplementedError, match="have latents and exchange keys"):
            handle.cache()

    run_threads(2, rank)


def test_a_failed_step_leaves_states_as_they_were() -> None:
    own, ids = build("qwen3_5"), prompts([20])["input_ids"]
    cache = seqpar.parallelize(own, LocalComm()).cache()
    with torch.no_grad():
        own(ids, cache=cache)
        before = dict(cache.states)
        failing = own.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own(ids[:, :1], cache=cache)
        failing.remove()
        assert all(cache.states[key] is before[key] for key in before) and len(before) == 2
        own(ids[:, :1], cache=cache)
    assert not any(cache.states[key].equal(before[key]) for key in before)
    assert "every rank: states of recurrent layers" in cache.describe()
