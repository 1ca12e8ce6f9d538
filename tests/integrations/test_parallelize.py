"""The one entry for all kinds of models: what it takes, in which order, and which shapes are read of configs."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from diffusers import LTXVideoTransformer3DModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import seqpar
from seqpar import LocalComm
from seqpar.integrations.hf.shape import shape_of
from tests.integrations.hf.models import SIZES, batches, build


@pytest.mark.parametrize("around", [DistributedDataParallel, FullyShardedDataParallel, nn.DataParallel, torch.compile])
def test_what_goes_around_a_model_comes_later(around: object) -> None:
    if isinstance(around, type):  # their constructors want a group
        model = around.__new__(around)
        nn.Module.__init__(model)
    else:
        model = torch.compile(build("llama"))
    name = type(model).__name__
    with pytest.raises(ValueError, match=f"before {name} goes around it; call parallelize.* then {name}"):
        seqpar.parallelize(model, LocalComm())


def test_what_is_no_model_and_no_comm_is_said() -> None:
    with pytest.raises(
        TypeError, match=r"LlamaForCausalLM, None\): expected a comm of the ranks; give seqpar.GroupComm"
    ):
        seqpar.parallelize(build("llama"), None)
    with pytest.raises(TypeError, match="takes a model, an nn.Module, got str"):
        seqpar.parallelize("meta-llama/Llama-3.1-8B", LocalComm())


def small_video() -> nn.Module:
    return LTXVideoTransformer3DModel(num_layers=1, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16)


@pytest.mark.parametrize("kind", ["transformers", "diffusers", "sdpa", "both"])
def test_a_model_is_parallel_once(kind: str) -> None:
    model = small_video() if kind == "diffusers" else build("llama")
    options = {"sdpa": True} if kind == "sdpa" else {}
    handle = seqpar.parallelize(model, LocalComm(), **options)
    with pytest.raises(ValueError, match="is parallel already; call undo"):
        seqpar.parallelize(model, LocalComm(), **{"sdpa": True} if kind == "both" else options)
    handle.undo()
    seqpar.parallelize(model, LocalComm(), **options).undo()


@pytest.mark.parametrize("kind", ["diffusers", "sdpa"])
def test_a_pickle_says_what_to_save_instead(kind: str, tmp_path: object) -> None:
    model = small_video() if kind == "diffusers" else build("llama")
    options = {"sdpa": True} if kind == "sdpa" else {}
    with (
        seqpar.parallelize(model, LocalComm(), **options),
        pytest.raises(NotImplementedError, match="save model.state_dict"),
    ):
        torch.save(model, f"{tmp_path}/model.pt")


def test_every_config_has_a_shape() -> None:
    """Layers of different sizes among them, and configs that do not say the same of all layers."""
    kinds = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            try:
                config = CONFIG_MAPPING[name]().get_text_config()
            except Exception:  # defaults that its own class refuses, or several texts
                continue
            shape = shape_of(config)
            assert shape.heads % shape.kv_heads == 0
            kinds.add(name)
    assert len(kinds) > 100 and {"gemma3n_text", "gemma4_text", "openelm"} & kinds


def test_a_model_whose_layers_differ_is_planned() -> None:
    sizes = SIZES | {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "laurel_rank": 4, "altup_num_inputs": 2,
        "intermediate_size": [48, 40], "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0],
    }  # fmt: skip
    model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes)).train()
    assert shape_of(model.config).ffn == 44
    batch = batches("right", 1)[0]
    expected = float(model(**batch).loss)
    with seqpar.parallelize(model, LocalComm()):
        assert float(model(**batch).loss) == pytest.approx(expected, rel=1e-5)
