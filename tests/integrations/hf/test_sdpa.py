"""transformers models by PyTorch's attention alone: exact, or refused by name where tokens meet outside of it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.probe.record import under_trial
from seqpar.testing import run_threads
from tests.ecosystem.architectures import TABLE
from tests.ecosystem.ways import verdict
from tests.integrations.hf.models import VOCABULARY
from tests.integrations.hf.sdpa_models import LINEAR, MAMBA, ROPE, SIZES, TOKENS, Own, build, logits

MIXING: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-next": ("Qwen3Next", LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "'conv'"),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}, "carries a state"),
    "nemotron-h": (
        "NemotronH",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
         "n_groups": 1, "chunk_size": 8},
        "carries a state",
    ),
    "recurrent-gemma": (
        "RecurrentGemma", {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 64},
        "carries a state",
    ),
    "phi3 longrope": (
        "Phi3",
        {"original_max_position_embeddings": 32, "sliding_window": None, "rope_parameters": ROPE | {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 2.0,
            "original_max_position_embeddings": 32}},
        "longest position",
    ),
    "llama dynamic": (
        "Llama",
        {"max_position_embeddings": 32, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
        "longest position",
    ),
}  # fmt: skip
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.sampled(3)
def test_what_mixes_tokens_is_refused_by_what_it_says_and_by_what_it_does(name: str) -> None:
    kind, more, said = MIXING[name]
    model = build(kind, more)

    def rank(comm: Comm, way: str) -> str:
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            logits(comm, model, way)
        return str(raised.value)

    for message in run_threads(2, rank, "parallelize"):
        assert "cannot be computed on several ranks" in message and said in message
    for message in run_threads(2, rank, "block"):
        assert "does not follow" in message, message


@pytest.mark.parametrize("way", ["block", "parallelize"])
@pytest.mark.parametrize("name", ALONE)
def test_what_computes_every_token_alone_is_exact(name: str, way: str) -> None:
    model = build(*ALONE[name])
    with torch.no_grad():
        expected = model(torch.arange(TOKENS)[None] * 7 % VOCABULARY, use_cache=False).logits
    found = torch.cat(run_threads(2, logits, model, way), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("way", ["block", "parallelize"])
def test_a_window_whose_mask_is_not_made_for_a_ranks_rows_is_refused(way: str) -> None:
    rows = TOKENS // 2
    for kind, window in (("Mistral", rows + 4), ("Mistral", TOKENS), ("Qwen2", rows + 4)):
        model = build(kind, {"sliding_window": window})  # which Qwen2 ignores without use_sliding_window
        with torch.no_grad():
            expected = model(torch.arange(TOKENS)[None] * 7 % VOCABULARY, use_cache=False).logits
        mask = None
        if (kind, window) == ("Mistral", rows + 4):

            def refused(comm: Comm, model: Any = model) -> bool:
                with pytest.raises(NotImplementedError, match=f"in windows or chunks of {rows + 4} tokens"):
                    logits(comm, model, way)
                return True

            assert all(run_threads(2, refused))
            mask = torch.ones(TOKENS, TOKENS).tril().triu(1 - window).bool()
        found = torch.cat(run_threads(2, logits, model, way, None, mask), 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_generate_runs_where_the_model_is_as_before() -> None:
    model = build(*ALONE["llama"]).eval()
    prompts = [torch.arange(2, 9)[None], torch.arange(4, 8)[None]]
    expected = [model.generate(prompt, max_new_tokens=4, do_sample=False) for prompt in prompts]

    def rank(comm: Comm) -> bool:
        own = copy.deepcopy(model)
        handle = seqpar.parallelize(own, comm, sdpa=True)
        with handle.local():
            found = own.generate(prompts[comm.rank], max_new_tokens=4, do_sample=False)
        return torch.equal(found, expected[comm.rank])

    assert all(run_threads(2, rank))


def test_sdpa_is_recommended_nowhere_else() -> None:
    counted = Own(transformers.LlamaConfig(**SIZES))
    counted.places.register_forward_pre_hook(lambda _, given: (torch.arange(given[0].shape[1])[None],))
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
    inline = transformers.MPNetForMaskedLM(
        transformers.MPNetConfig(**sizes, num_attention_heads=4, intermediate_size=40)
    )
    rwkv = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))
    for other in (counted, inline, rwkv):
        with pytest.raises(NotImplementedError) as raised:
            seqpar.parallelize(other, LocalComm())
        assert "sdpa" not in str(raised.value)


class Watching(Own):
    """Notes the filters of warnings that it is computed under; perhaps fails in a trial of sdpa."""

    seen: list[bool]
    fails = False

    def forward(self, *args: Any, **named: Any) -> Any:
        self.seen.append(("error", None, Warning, None, 0) in warnings.filters)
        if self.fails and under_trial() is not None:
            raise RuntimeError("not twice")
        return super().forward(*args, **named)


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_by_sdpa_leaves_warnings_alone_and_says_nothing_of_what_it_does_not_know(fails: bool) -> None:
    model, before = Watching(transformers.LlamaConfig(**SIZES)), list(warnings.filters)
    model.seen, model.fails = [], fails

    def rank(comm: Comm) -> str:
        with pytest.raises(NotImplementedError) as raised:
            seqpar.parallelize(copy.deepcopy(model), comm)
        return str(raised.value)

    remedy = "train it with data parallelism" if fails else "give sdpa=True and this rank's rows"
    assert all(f"; {remedy}" in message for message in run_threads(3, rank))
    assert warnings.filters == before
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(NotImplementedError):
            seqpar.parallelize(model, LocalComm())
    assert model.seen and not any(model.seen) and not any("not known" in str(each.message) for each in warned)


class Batched(nn.Module):
    """A model around one of transformers, called with a batch; and pixels, which are no mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
        return self.model(**batch, use_cache=False).logits + 0 * pixels.mean()


def test_a_window_inside_another_model_is_refused_on_all_ranks() -> None:
    rows = TOKENS // 2
    model = Batched(build("Mistral", {"sliding_window": rows + 4}))
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 2))

    def rank(comm: Comm) -> bool:
        own, at = copy.deepcopy(model), torch.from_numpy(plan.positions(comm.rank))[None]
        batch = {"input_ids": at * 7 % VOCABULARY, "position_ids": at}
        if comm.rank == 0:  # a mask of all keys on one rank alone
            batch["attention_mask"] = torch.ones(1, 1, rows, TOKENS).tril().bool()
        with (
            seqpar.parallelize(own, comm, sdpa=True, plan=plan),
            pytest.raises(NotImplementedError, match=f"in windows or chunks of {rows + 4} tokens"),
        ):
            own(batch, torch.ones(1, 3, 4, 4))
        return True

    assert all(run_threads(2, rank))


def test_a_config_of_parts_has_no_layers_of_its_own() -> None:
    """transformers 5.24 offers a config for each of them all the same."""
    assert verdict(TABLE["llava"], "sdpa") == "exact"
