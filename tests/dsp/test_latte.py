"""LatteTransformer3DModel of diffusers, unchanged: forward and all gradients equal one process."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.dsp import parallelize
from seqpar.dsp.plan import plan_stages
from seqpar.foreign.hooks import CACHING, HARMLESS, SKIPPING
from seqpar.planner.hardware import Link
from seqpar.testing import run_processes, run_threads
from tests.dsp.cases import clip, latte
from tests.dsp.models import FREE, SHARDED, compare_with_one, compared, gradients
from tests.dsp.planners import Planner, by_heads
from tests.ranks import errors

diffusers = pytest.importorskip("diffusers")

from diffusers.hooks import smoothed_energy_guidance_utils  # noqa: E402


def on_a_rank(comm: Comm, size: int, frames: int, count: int, how: str) -> tuple[dict[str, Tensor], str, int]:
    model = latte(size, frames)
    if how == "checkpoint":
        model.enable_gradient_checkpointing()
    handle = parallelize(model, comm, plan=SHARDED)
    found = gradients(model, clip(size, frames, count))
    plan = next(iter(handle.plans.values()))
    return found, str([c.sharding for c in plan.choices]), plan.exchanges


@pytest.mark.parametrize("how", ["plain", "checkpoint"])
@pytest.mark.parametrize(
    "size, frames, count, ranks",
    [(6, 5, 2, 2), (6, 5, 2, 3), (6, 5, 1, 4), (6, 5, 2, 6), (6, 3, 1, 8), (6, 1, 1, 3), (6, 1, 2, 4), (2, 3, 1, 2),
     (10, 7, 1, 4)],
)  # fmt: skip
@pytest.mark.sampled(7)
def test_every_rank_has_the_output_and_gradients_sum(size, frames, count, ranks, how) -> None:
    want = gradients(latte(size, frames), clip(size, frames, count))
    found = run_threads(ranks, on_a_rank, size, frames, count, how)
    compared([rank for rank, *_ in found], want)


def oblong(comm: Comm) -> dict[str, Tensor]:
    model, given = latte(6, 3), clip(6, 3)
    given["hidden_states"] = torch.cat([given["hidden_states"], given["hidden_states"][..., :4] * 2], -1)
    if comm.size > 1:
        parallelize(model, comm, plan=SHARDED)
    return gradients(model, given)


def test_frames_of_other_heights_than_widths() -> None:
    compare_with_one(4, oblong)


def denoised(comm: Comm, cached: bool = True, plan: Planner = SHARDED, frames: int = 8) -> list[Tensor]:
    """Outputs of four steps. cached: whether diffusers' cache takes the attention of every second one from before."""
    model, given, now = latte(8, frames).eval(), clip(8, frames, 1), [0]
    names = ("spatial_attention", "temporal_attention", "cross_attention")
    config = diffusers.PyramidAttentionBroadcastConfig(
        **{f"{name}_block_skip_range": 2 for name in names},
        **{f"{name}_timestep_skip_range": (0, 1000) for name in names},
        current_timestep_callback=lambda: now[0],
        spatial_attention_block_identifiers=("transformer_blocks",),
        temporal_attention_block_identifiers=("temporal_transformer_blocks",),
    )
    if cached:
        model.enable_cache(config)
    if comm.size > 1:
        parallelize(model, comm, plan=plan)
    found = []
    with torch.no_grad():
        for step in range(4):
            now[0] = 900 - 50 * step
            given |= {"hidden_states": given["hidden_states"] * 0.9, "timestep": torch.tensor(now)}
            found.append(model(**given).sample)
    return found


def test_a_trial_leaves_the_caches_of_diffusers_as_they_were() -> None:
    """They are kept in objects of its hooks."""
    (want,), (plain,) = run_threads(1, denoised), run_threads(1, denoised, False)
    assert not torch.allclose(want[1], plain[1]), "the cache is used"
    for found in run_threads(2, denoised):
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


SLOW = partial(plan_stages, hardware=replace(FREE, inside=Link(0.0, 1e7), across=Link(0.0, 1e7), hidden=1.0))


@pytest.mark.parametrize("frames", [8, 1])
def test_stages_with_a_cache_share_no_heads(frames: int) -> None:
    """Those of one frame would share heads."""
    (want,) = run_threads(1, denoised, True, SLOW, frames)
    for found in run_threads(2, denoised, True, SLOW, frames):
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_a_planner_that_shares_the_heads_of_a_cache_is_refused() -> None:
    for said in errors(denoised, True, by_heads):
        assert re.match("NotImplementedError: transformer_blocks.0 has a cache of diffusers.* call the model's", said)


def under_faster_cache(comm: Comm, when: str) -> str:
    model, given = latte(6, 5).eval(), clip(6, 5)
    config = diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 681),
        unconditional_batch_skip_range=5,
        unconditional_batch_timestep_skip_range=(-1, 641),
        current_timestep_callback=lambda: 500,
        attention_weight_callback=lambda _: 0.3,
        tensor_format="BFCHW",
    )
    with torch.no_grad():
        want = model(**given).sample
        if when == "before":
            model.enable_cache(config)
            with pytest.raises(NotImplementedError, match="FasterCache.* by the model's disable_cache()"):
                parallelize(model, comm, plan=SHARDED)
            model.disable_cache()
        parallelize(model, comm, plan=SHARDED)
        if when == "after":
            model(**given)
            model.enable_cache(config)
            with pytest.raises(NotImplementedError, match="FasterCache.* by the model's disable_cache()"):
                model(**given)
            model.disable_cache()
        torch.testing.assert_close(model(**given).sample, want, rtol=1e-10, atol=1e-12)
    return "done"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_that_goes_by_sizes_is_disabled(when: str) -> None:
    assert run_threads(2, under_faster_cache, when) == ["done"] * 2


def test_hooks_that_may_stay_are_named_as_diffusers_names_them() -> None:
    modules = ("group_offloading", "layerwise_casting", "layer_skip", "pyramid_attention_broadcast")
    names = {name for module in modules for name in dir(importlib.import_module(f"diffusers.hooks.{module}"))}
    assert names >= {*HARMLESS, *SKIPPING, *CACHING}


def test_a_blur_over_a_share_of_the_queries_is_refused() -> None:
    def blurred(comm: Comm) -> None:
        model = latte(8, 4).eval()
        parallelize(model, comm, plan=by_heads)
        config = diffusers.SmoothedEnergyGuidanceConfig(indices=[0], fqn="transformer_blocks")
        smoothed_energy_guidance_utils._apply_smoothed_energy_guidance_hook(model, config, 1.0)
        model(**clip(8, 4))

    for said in errors(blurred):
        assert re.match("Not.*has the hook SmoothedEnergyGuidanceHook .* on transformer_blocks.0", said), said


@pytest.mark.exhaustive
def test_it_is_so_on_processes() -> None:
    want = gradients(latte(), clip())
    compared([rank for rank, *_ in run_processes(3, on_a_rank, 6, 5, 2, "checkpoint")], want)


def wrong(comm: Comm, how: str) -> None:
    model = latte(dropout=0.1 if how == "dropout" else 0.0).train()
    parallelize(model, comm, plan=SHARDED)
    given: dict[str, object] = dict(clip())
    if how == "frames":  # each rank brings its own, as if they had been sharded before
        given["hidden_states"] = given["hidden_states"].tensor_split(comm.size, 2)[comm.rank]
    elif how == "noise" and comm.rank:
        given["hidden_states"] = given["hidden_states"] + 1e-9
    elif how == "weights" and comm.rank:
        with torch.no_grad():
            model.proj_out.bias += 1
    elif how == "mask":
        given["encoder_attention_mask"] = torch.ones(2, 4, dtype=torch.float64)
    elif how == "spatial only":
        given["enable_temporal_attentions"] = False
    model(**given)


@pytest.mark.parametrize(
    "how, words",
    [
        ("dropout", "NotImplementedError: transformer_blocks.0.attn1.to_out.1 is dropout with p=0.1"),
        ("frames", "ValueError: a forward of LatteTransformer3DModel: ranks differ in hidden_states"),
        ("noise", "ValueError: a forward of LatteTransformer3DModel: ranks differ in hidden_states"),
        ("weights", "ValueError: a forward of LatteTransformer3DModel: weights differ between rank 0 and rank 1, "),
        ("mask", "encoder_attention_mask of transformer_blocks.0"),
        ("spatial only", "NotImplementedError: stage transformer_blocks.1 is called where temporal"),
        ("right", "nothing"),
    ],
)
def test_what_would_be_another_answer_is_refused(how, words) -> None:
    assert words in errors(wrong, how)[0]


def unsummed(comm: Comm) -> None:
    model = latte().train()
    parallelize(model, comm, plan=SHARDED)
    for _ in range(2):
        model(**clip()).sample.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_step_with_shares_of_gradients_is_refused() -> None:
    for said in errors(unsummed):
        assert re.match("ValueError: .*weights differ between rank 0 and rank 1, .* an optimizer stepped", said), said


def freezing(comm: Comm) -> None:
    """Rank 0 freezes a parameter after a step: it may, where no gradient is computed."""
    model = latte().train()
    parallelize(model, comm, plan=SHARDED)
    model(**clip()).sample.square().mean().backward()
    model.proj_out.bias.requires_grad_(bool(comm.rank))
    with torch.no_grad():
        model(**clip())
    model(**clip())


def test_a_parameter_that_one_rank_freezes_is_named() -> None:
    assert all("proj_out.bias is frozen on rank 0 and not on rank 1" in said for said in errors(freezing))


def masked(comm: Comm) -> Tensor:
    model = latte().eval()
    if comm.size > 1:
        parallelize(model, comm, plan=SHARDED)
    mask = torch.zeros(10, 1, 4, dtype=torch.float64)
    mask[3:, :, 2] = -1e4
    with torch.no_grad():
        return model(**clip(), encoder_attention_mask=mask).sample


def test_a_mask_by_rows_is_sliced_with_them() -> None:
    (want,) = run_threads(1, masked)
    for got in run_threads(3, masked):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def sharing_heads(comm: Comm, frames: int, how: str) -> dict[str, Tensor]:
    model = latte(6, frames)
    if how == "checkpoint":
        model.enable_gradient_checkpointing()
    parallelize(model, comm, plan=by_heads)
    return gradients(model, clip(6, frames))


@pytest.mark.parametrize("ranks, frames, how", [(2, 1, "plain"), (3, 2, "checkpoint"), (5, 1, "checkpoint")])
def test_spatial_attention_is_shared_by_heads(ranks, frames, how) -> None:
    """Two heads; with more ranks some have none."""
    want = gradients(latte(6, frames), clip(6, frames))
    compared(run_threads(ranks, sharing_heads, frames, how), want)


def test_a_single_image_is_not_computed_by_every_rank() -> None:
    _, layouts, exchanges = run_threads(2, on_a_rank, 6, 1, 1, "plain")[0]
    assert "None" not in layouts and exchanges == 0


def other_attention(comm: Comm) -> None:
    model = latte(6, 1)
    for block in model.transformer_blocks:
        block.attn1.set_processor(diffusers.models.attention_processor.AttnProcessor())
    parallelize(model, comm, plan=by_heads)
    model(**clip(6, 1))


def test_attention_of_another_kind_is_named() -> None:
    words = "NotImplementedError: attn1 of transformer_blocks.0 called F.scaled_dot_product_attention 0 times"
    assert all(found.startswith(words) for found in errors(other_attention))
