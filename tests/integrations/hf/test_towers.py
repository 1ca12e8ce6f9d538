"""Models of images and sound: what towers return beside tokens, layers that they lack, and a rank that fails late."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.integrations.hf.model import ParallelTransformer
from seqpar.integrations.hf.vision import ParallelVision
from seqpar.testing import run_threads
from tests.ecosystem.architectures import IMAGES, MORE_IMAGES, SEEN, Architecture, build, config_of
from tests.ecosystem.images import brought, one_process, padded, pooled_of
from tests.ecosystem.ways import Outcome, cut, islands, outcome
from tests.integrations.hf.models import drawn
from tests.integrations.hf.test_vision import compare
from tests.ranks import errors_on_copies

TEXT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def lfm3_vl() -> tuple[transformers.PreTrainedModel, list[dict[str, Tensor]]]:
    """A model, and a batch for each of two ranks: images on the second one."""
    config = transformers.Lfm3VlConfig(
        text_config=TEXT | {"model_type": "lfm3", "head_dim": 8, "layer_types": ["conv", "full_attention"]},
        vision_config={"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "patch_size": 4, "layer_types": ["full_attention"]},
        projector_hidden_size=32, image_token_id=SEEN["image"], video_token_id=SEEN["video"],
        vision_start_token_id=SEEN["start"], vision_end_token_id=SEEN["end"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Lfm3VlForConditionalGeneration._from_config(config, attn_implementation="eager").double()
    ids = torch.randint(1, 50, (2, 2, 16))
    ids[1, :, 3:7] = SEEN["image"]
    every = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.masked_fill(x > 50, -100)} for x in ids]
    every[1] |= {"pixel_values": torch.randn(32, 96).double(), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    return model, every


def test_pooled_images_come_home_as_they_are() -> None:
    model, every = lfm3_vl()

    def rank(comm: Comm) -> tuple[Outcome, Tensor | None]:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=cut):
            out = own(**every[comm.rank])
            return outcome(own, out.loss), pooled_of(out)

    found = run_threads(2, rank)
    whole = {name: torch.cat([batch[name] for batch in every if name in batch]) for name in every[1]}
    with islands(torch.float64):
        expected = model(**whole, use_cache=False)
        compare([each for each, _ in found], outcome(model, expected.loss), torch.float64)
    assert found[0][1] is None and torch.allclose(found[1][1], pooled_of(expected))


def test_features_of_sound_come_home_as_they_are() -> None:
    """As the base model of VibeVoice returns them."""
    tower = {"channels": 1, "hidden_size": 8, "kernel_size": 3, "num_filters": 4, "downsampling_ratios": [2, 2],
             "depths": [1, 1, 1]}  # fmt: skip
    config = transformers.VibeVoiceConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        audio_config=tower | {"model_type": "vibevoice_acoustic_tokenizer"},
        semantic_model_config=tower | {"model_type": "vibevoice_acoustic_tokenizer_encoder"},
        diffusion_head_config={"intermediate_size": 40, "num_head_layers": 1},
        audio_token_id=50, audio_bos_token_id=51, audio_eos_token_id=52, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.VibeVoiceModel._from_config(config, attn_implementation="eager").double().eval()
    ids = torch.randint(1, 50, (4, 20))
    ids[:, 2:12] = 50
    whole = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "input_values": torch.randn(4, 1, 40).double(),
        "padding_mask": torch.ones(4, 40).bool(),
    }  # fmt: skip

    def rank(comm: Comm) -> Any:
        own, half = copy.deepcopy(model), slice(2 * comm.rank, 2 * comm.rank + 2)
        with islands(torch.float64), torch.no_grad(), seqpar.parallelize(own, comm, plan=cut):
            return own(**{name: x[half] for name, x in whole.items()}, sample=False)

    with islands(torch.float64), torch.no_grad():
        expected = model(**whole, sample=False, use_cache=False)
    found = run_threads(2, rank)
    assert torch.allclose(torch.cat([out.audio_features for out in found]), expected.audio_features)
    assert torch.allclose(torch.cat([out.last_hidden_state for out in found]), expected.last_hidden_state)


def test_images_before_layers_that_share_keys() -> None:
    """Gemma 4 would cut the inputs of those layers to the rows whose logits are asked for."""
    config = transformers.Gemma4Config(
        text_config=TEXT | {
            "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8, "use_bidirectional_attention": "vision",
        },
        vision_config={"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
                       "position_embedding_size": 64},
        audio_config=None, image_token_id=SEEN["image"], video_token_id=52, audio_token_id=55, boi_token_id=53,
        eoi_token_id=54, boa_token_id=56, eoa_token_index=57,
    )  # fmt: skip
    model = drawn(transformers.Gemma4ForConditionalGeneration, config).double()
    ids = torch.randint(1, 50, (2, 1, 12))
    ids[1, :, 3:7] = SEEN["image"]
    patches = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
    stepped(model, ids, pixel_values=torch.rand(1, 16, 48).double(), image_position_ids=patches)


def test_a_model_that_trains_only_with_token_types() -> None:
    config = transformers.Molmo2Config(
        text_config=TEXT | {"head_dim": 8, "additional_vocab_size": 8},
        vision_config={"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "num_key_value_heads": 4, "head_dim": 8, "image_size": [28, 28], "patch_size": 14,
                       "num_position_embeddings": 4},
        adapter_config={"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4,
                        "head_dim": 8, "text_hidden_size": 32, "vision_feature_layer": [1, 0]},
        image_patch_id=SEEN["image"], image_start_token_id=53, image_end_token_id=54, frame_start_token_id=56,
        frame_end_token_id=57, low_res_image_start_token_id=55,
    )  # fmt: skip
    model = drawn(transformers.Molmo2ForConditionalGeneration, config).double()
    ids = torch.randint(1, 50, (2, 1, 12))
    stepped(model, ids)
    ids[1, :, 3:7] = SEEN["image"]
    stepped(
        model, ids, pixel_values=torch.randn(1, 4, 14 * 14 * 3).double(), image_token_pooling=torch.arange(4)[:, None],
        image_grids=torch.tensor([[0, 0, 2, 2]]), image_num_crops=torch.tensor([1]),
    )  # fmt: skip


def stepped(model: transformers.PreTrainedModel, ids: Tensor, **media: Tensor) -> None:
    """A step on two ranks, beside one process. ids [2, B, S]: of each rank; media: of the second."""
    images = ids == SEEN["image"]
    every = [
        {"input_ids": own, "labels": own.masked_fill(image, -100), "mm_token_type_ids": image.long()}
        for own, image in zip(ids, images)
    ]
    whole = {name: torch.cat([batch[name] for batch in every]) for name in every[0]} | media
    every[1] |= media

    def rank(comm: Comm) -> Outcome:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=cut):
            return outcome(own, own(**every[comm.rank]).loss)

    found = run_threads(2, rank)
    with islands(torch.float64):
        compare(found, outcome(model, model(**whole, use_cache=False).loss), torch.float64)


def trained(
    row: Architecture, kind: str, *, images: bool = True, types: bool = True, listed: str = "", **more: Any
) -> None:
    """A step of a family's model with other sizes on two ranks, beside one process.

    listed: an argument that is given as a list of tuples. more: arguments of each call.
    """
    documents = brought(kind, 2, torch.float64)
    if not images:
        documents[1] = documents[0]
    every = [padded(kind, own) for own in documents]
    if not types:
        for batch in every:
            del batch["token_type_ids"]
    for batch in every:
        if listed in batch:
            batch[listed] = [tuple(size) for size in batch[listed].tolist()]
    with islands(torch.float64):
        model = build(row)

    def rank(comm: Comm) -> Outcome:
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=cut):
            return outcome(own, own(**every[comm.rank], **more).loss)

    found = run_threads(2, rank)
    with islands(torch.float64):
        compare(found, outcome(model, one_process(kind, model, sum(documents, []))), torch.float64)


def changed(row: Architecture, part: str, **sizes: Any) -> Architecture:
    """A family with other sizes in a part of its config."""
    return row._replace(config=row.config | {part: getattr(config_of(row), part).to_dict() | sizes})


def test_towers_without_deepstack_layers() -> None:
    trained(changed(IMAGES["qwen3_vl"], "vision_config", deepstack_visual_indexes=[]), "qwen3_vl")


def test_sizes_in_a_list_reach_a_rank_without_images() -> None:
    """As a processor returns them that was not asked for tensors."""
    trained(IMAGES["mistral3"], "mistral3", listed="image_sizes")


@pytest.mark.parametrize("images", [True, False])
def test_a_model_all_of_whose_layers_are_sliding(images: bool) -> None:
    """Gemma 3 makes no mask then for the layers that it has not, and its model of tokens makes one."""
    row = changed(IMAGES["gemma3"], "text_config", layer_types=["sliding_attention"] * 2, sliding_window=4)
    trained(row, "gemma3", images=images, types=images)


def test_router_logits_that_no_call_asks_for() -> None:
    trained(MORE_IMAGES["qwen3_vl_moe"], "qwen3_vl_moe", output_router_logits=False)
    trained(IMAGES["llava"], "llava", output_router_logits=False)
    row = changed(MORE_IMAGES["qwen3_vl_moe"], "text_config", output_router_logits=True)
    trained(row, "qwen3_vl_moe", output_router_logits=False)


@pytest.mark.parametrize("kind", ["llava", "llama"])
def test_any_error_after_the_models_own_forward_is_told_to_all_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = ParallelTransformer._loss

    def failing(self: ParallelTransformer, *args: Any) -> Tensor:
        if self.comm.rank:
            raise MemoryError("nothing left")
        return loss(self, *args)

    monkeypatch.setattr(ParallelTransformer, "_loss", failing)
    model = build(IMAGES.get(kind) or Architecture(kind, "dense"), dtype=torch.float32)
    ids = torch.arange(1, 13)[None]
    begin = time.monotonic()
    one, other = errors_on_copies(model, lambda own, comm: own(input_ids=ids, labels=ids))
    assert time.monotonic() - begin < 100.0, "half of the time that ranks wait for each other"
    assert other == "MemoryError: nothing left" and "PeerError" in one and other in one


def test_an_output_that_nobody_knows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelVision, "returned", ("hidden_states",))
    model, every = lfm3_vl()

    def rank(comm: Comm) -> Any:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            return own(**every[comm.rank])

    for out in run_threads(2, rank):
        assert out.loss.isfinite() and pooled_of(out) is None


def test_a_prefix_that_sees_itself_whole() -> None:
    """Of HRM-Text, a model of tokens alone: token_type_ids are 1 in the prefix."""
    config = transformers.HrmTextConfig(
        **TEXT | {"num_key_value_heads": 4, "num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 2, "head_dim": 8}
    )
    model = drawn(transformers.HrmTextForCausalLM, config).double()
    ids, mask = torch.randint(1, 60, (4, 14)), torch.ones(4, 14, dtype=torch.int64)
    mask[1, 10:] = mask[0, 2] = mask[3, 6:8] = 0
    whole = {
        "input_ids": ids * mask, "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100),
        "token_type_ids": (torch.arange(14) < torch.tensor([[5], [0], [9], [3]])).long(),
    }  # fmt: skip
    causal = whole | {"token_type_ids": torch.zeros_like(ids)}

    def rank(comm: Comm) -> list[Outcome]:
        half, found = slice(2 * comm.rank, 2 * comm.rank + 2), []
        own = copy.deepcopy(model)
        with islands(torch.float64), seqpar.parallelize(own, comm, plan=cut):
            for batch in (whole, causal, whole):
                own.zero_grad()
                found.append(outcome(own, own(**{name: x[half] for name, x in batch.items()}).loss))
        return found

    with islands(torch.float64):
        for found, batch in zip(zip(*run_threads(2, rank)), (whole, causal, whole), strict=True):
            model.zero_grad()
            compare([*found], outcome(model, model(**batch, use_cache=False).loss), torch.float64)
    losses = [float(model(**batch, use_cache=False).loss) for batch in (whole, causal)]
    assert abs(losses[0] - losses[1]) > 1e-3
