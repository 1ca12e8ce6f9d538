"""Every kind of model that a split cache serves: 200 tokens, one by one, as one process generates them in fp64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.launch import run_threads
from tests.ecosystem.ways import islands
from tests.integrations.hf import models, test_latents
from tests.integrations.hf.test_split_cache import GREEDY, PLANS, prompts

pytestmark = test_latents.pytestmark
UNIFORM = ("llama", "qwen3", "mistral")  # whose layers are alike
LATENTS = [kind for kind in test_latents.MLA if kind not in ("kimi_linear", "minicpm3", "longcat_flash")]


def empty(lengths: Any, ranks: int) -> Plan:
    """The last rank gets no row of the prompt, unless it is alone."""
    shards = np.array_split(np.arange(int(sum(lengths))), max(ranks - 1, 1))
    return Plan(Mask(lengths), Layout([*shards, *[np.zeros(0, np.int64)] * (ranks > 1)]))


def build(name: str) -> Any:
    """A small model in fp64, the same whenever it is called."""
    if name in test_latents.MLA:
        model = test_latents.build(name)
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
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gpt-oss", "deepseek_v3"])
@pytest.mark.sampled(12)
def test_200_tokens_are_those_of_one_process(name: str, ranks: int, layout: str) -> None:
    check(name, ranks, layout, 200)


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.sampled(2)
def test_other_models_of_latents(name: str) -> None:
    check(name, 2, "zigzag", 6)


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
