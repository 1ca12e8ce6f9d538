"""What is put on transformers of diffusers: controlnets, IP adapters and caches, equal to one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FluxControlNetModel, MagCacheConfig
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.integrations.diffusers_classes import FLUX, IMAGE
from tests.integrations.diffusers_models import SAMPLES, made, random
from tests.integrations.diffusers_verdicts import Setting, verdict

TOKENS, WIDTH = IMAGE[0] * IMAGE[1], 24


def residuals(samples: int) -> Any:
    """Flux with what a controlnet adds after its blocks."""
    model, inputs = made("flux")
    double, single = ([random(SAMPLES, TOKENS, WIDTH, seed=n)] for n in (8, 9))
    return model, inputs | {"controlnet_block_samples": double, "controlnet_single_block_samples": single}


def controlnet(samples: int) -> Any:
    """A controlnet of Flux."""
    torch.manual_seed(0)
    model = FluxControlNetModel(**FLUX, pooled_projection_dim=8, guidance_embeds=True).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model, made("flux")[1] | {"controlnet_cond": random(SAMPLES, TOKENS, 4, seed=8)}


def ip_adapter(samples: int) -> Any:
    """Flux with attention to tokens of an image in its processors."""
    model, inputs = made("flux")
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(WIDTH, 8, num_tokens=(4,), scale=[0.5]).double())
    return model, inputs | {"joint_attention_kwargs": {"ip_hidden_states": [random(SAMPLES, 4, 8, seed=8)]}}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [residuals, controlnet, ip_adapter])
def test_what_is_added_to_flux_is_exact(make: Callable[[int], Any], ranks: int) -> None:
    assert verdict(make, Setting(ranks, SAMPLES, False)) == "exact"


CACHES: dict[str, Callable[[], Any]] = {
    "First Block Cache": partial(FirstBlockCacheConfig, threshold=0.2),
    "MagCache": partial(
        MagCacheConfig, num_inference_steps=6, threshold=0.5, max_skip_steps=2, mag_ratios=torch.full((6,), 0.97)
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.parametrize("kind", CACHES)
def test_caches_skip_the_same_blocks_on_all_ranks(kind: str, name: str, first: bool) -> None:
    model, inputs = made(name)

    def outputs(comm: Comm | None) -> list[Tensor]:
        own = copy.deepcopy(model)
        if first or comm is None:
            own.enable_cache(CACHES[kind]())
        handle = comm and seqpar.parallelize(own, comm)  # noqa: F841
        if not first and comm:
            own.enable_cache(CACHES[kind]())
        found = []
        for scale in (1.0, 1.001, 1.002, 1.5, 1.501, 3.0):
            scaled = inputs | {"hidden_states": inputs["hidden_states"] * scale}
            with torch.no_grad(), own.cache_context("cond"):
                found.append(own(**scaled, return_dict=False)[0])
        return found

    expected = outputs(None)
    for got in run_threads(2, outputs):
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
