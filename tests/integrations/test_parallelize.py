"""The one entry for all kinds of models: what it takes, in which order, and which shapes are read of configs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.comm import PeerError
from seqpar.dsp import plan_stages
from seqpar.integrations.hf.planning import shape_of
from seqpar.testing import run_threads
from tests.dsp import models as dsp_models
from tests.dsp.cases import clip, latte
from tests.integrations.diffusers_models import made as diffuser
from tests.integrations.hf.models import batches, build
from tests.integrations.plain import Attending


@pytest.mark.parametrize("around", [DistributedDataParallel, FullyShardedDataParallel, nn.DataParallel, torch.compile])
@pytest.mark.parametrize("sdpa", [False, True])
@pytest.mark.sampled(2)
def test_what_goes_around_a_model_comes_later(around: object, sdpa: bool) -> None:
    if isinstance(around, type):  # their constructors want a group
        model = around.__new__(around)
        nn.Module.__init__(model)
    else:
        model = torch.compile(build("llama"))
    name = type(model).__name__
    then = name if isinstance(around, type) else "torch.compile"  # which Lightning replaces when it is imported
    with pytest.raises(ValueError, match=rf"before {name} wraps it; call parallelize.* then {then}\(model\)"):
        seqpar.parallelize(model, LocalComm(), sdpa=sdpa)


def test_what_is_no_model_and_no_comm_is_said() -> None:
    with pytest.raises(
        TypeError, match=r"LlamaForCausalLM, None\): expected a comm of the ranks; give seqpar.GroupComm"
    ):
        seqpar.parallelize(build("llama"), None)
    with pytest.raises(TypeError, match="expected a model, an nn.Module, got str"):
        seqpar.parallelize("meta-llama/Llama-3.1-8B", LocalComm())


def small_video(**sizes: int) -> nn.Module:
    return LTXVideoTransformer3DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, **sizes
    )


def of_kind(kind: str, planned: list[str]) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
    """A model, a batch of it, and options with a plan, or a function that notes when it plans."""

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: planned.append(kind) or make(*args, **how)

    ids = torch.arange(12)[None]
    if kind == "transformers":
        by_lengths = noting(lambda lengths, ranks: Plan(Mask(lengths), Layout.zigzag(lengths, ranks)))
        return build("llama"), {"input_ids": ids}, {"plan": by_lengths}
    if kind == "tokens":
        video = {"hidden_states": torch.randn(1, 6, 128), "num_frames": 1, "height": 2, "width": 3}
        text = {"encoder_hidden_states": torch.randn(1, 3, 16), "encoder_attention_mask": torch.ones(1, 3)}
        model = small_video(caption_channels=16)
        return model, video | text | {"timestep": torch.ones(1), "return_dict": False}, {"plan": noting(Plan)}
    if kind == "spec":
        return dsp_models.made(dsp_models.Weather), {"x": torch.randn(2, 5, 7, 3).double()}, {
            "spec": dsp_models.WEATHER, "plan": noting(plan_stages)
        }  # fmt: skip
    if kind == "stages":
        return latte(4, 2, 1), clip(4, 2, 1), {"plan": noting(plan_stages)}
    plan = Plan(Mask([12], causal=False), Layout.contiguous(12, 1))
    return nn.TransformerEncoderLayer(16, 2, 24), {"src": torch.randn(12, 1, 16)}, {"sdpa": True, "plan": plan}


@pytest.mark.parametrize("kind", ["transformers", "tokens", "stages", "spec", "sdpa"])
def test_every_kind_of_model_takes_a_plan_and_has_the_same_handle(kind: str) -> None:
    planned: list[str] = []
    model, batch, options = of_kind(kind, planned)
    model.eval()

    def run() -> Tensor:
        out = model(**batch)
        return out if isinstance(out, Tensor) else out[0]

    with torch.no_grad():
        expected = run()
        with seqpar.parallelize(model, comm := LocalComm(), **options) as handle:
            assert (handle.model, handle.comm) == (model, comm)
            with handle.local():
                assert torch.equal(run(), expected) and not planned
            assert torch.allclose(run(), expected, atol=1e-4)
            assert planned[:1] == [kind][: kind != "sdpa"]
        planned.clear()
        handle.undo()
        assert torch.equal(run(), expected) and not planned


@pytest.mark.parametrize("kind", ["diffusers", "sdpa"])
def test_a_pickle_says_what_to_save_instead(kind: str, tmp_path: object) -> None:
    model = small_video() if kind == "diffusers" else Attending()
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


def in_transform(kind: str) -> None:
    """A model's call inside a transform of torch.func."""
    if kind == "transformers":
        model, inputs = build("llama"), {"input_ids": torch.arange(6)[None]}
        handle = seqpar.parallelize(model, LocalComm())
    elif kind == "sdpa":
        plan = Plan(Mask([6]), Layout.contiguous(6, 1))
        model, inputs = Attending(), {"x": torch.randn(1, 6, 8)}
        handle = seqpar.parallelize(model, LocalComm(), sdpa=True, plan=plan)
    else:
        model, inputs = diffuser("flux")
        handle = seqpar.parallelize(model, LocalComm())
    with handle:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.grad(lambda given: torch.func.functional_call(model, given, kwargs=inputs)[0].sum())(weights)


@pytest.mark.parametrize("kind", ["transformers", "sdpa", "diffusers"])
def test_models_inside_transforms_are_refused(kind: str) -> None:
    with pytest.raises(NotImplementedError, match=r"parallelize\(\w+\) inside a transform of torch.func"):
        in_transform(kind)


class ByHand(Attending):
    """The same by a softmax of products."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)
        return (q @ q.mT).masked_fill(torch.ones(q.shape[1], q.shape[1]).triu(1) > 0, -torch.inf).softmax(-1) @ q


ROWS = Plan(Mask([8]), Layout.contiguous(8, 2))


def evaluated(kind: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A model, its options, and the arguments of a forward on every rank."""
    if kind == "sdpa":
        return Attending(), {"sdpa": True, "plan": ROWS}, {"x": torch.ones(1, 4, 8)}
    if kind == "stages":
        return latte(), {}, clip()
    if kind == "diffusers":
        model, arguments = diffuser("flux")
        return model, {}, arguments
    return build("llama"), {"source": "replicated"}, batches("right", 1)[0]


@pytest.mark.parametrize("kind", ["transformers", "diffusers", "sdpa", "stages"])
@pytest.mark.parametrize("begun", [0, 1, 3])
@pytest.mark.sampled(4)
def test_evaluation_on_one_rank_alone_is_told_of_local(kind: str, begun: int) -> None:
    model, options, arguments = evaluated(kind)

    def rank(comm: Comm) -> str:
        own = copy.deepcopy(model)
        handle = seqpar.parallelize(own, comm, **options)
        own.train()
        for _ in range(begun):
            own(**arguments)
        with pytest.raises(ValueError) as error:
            if comm.rank == 0:
                with torch.no_grad():
                    own.eval()(**arguments)
            else:
                own(**arguments)
        with handle.local(), torch.no_grad():
            if comm.rank == 0:
                own.eval()(**arguments)
        return str(error.value)

    for told in run_threads(2, rank, timeout=20):
        assert "evaluate on one rank inside `with handle.local():`" in told, told


def test_a_model_that_one_rank_alone_makes_parallel_is_named() -> None:
    def rank(comm: Comm) -> str:
        if comm.rank:
            return ""
        with pytest.raises(PeerError) as error:
            seqpar.parallelize(build("llama"), comm)
        return str(error.value)

    told = run_threads(2, rank, timeout=1)[0]
    assert "parallelize(LlamaForCausalLM)" in told and "seed" not in told


@pytest.mark.parametrize("around", [False, True], ids=["plan given", "plan around"])
def test_softmax_by_hand_is_told_of_before_anything_else(around: bool) -> None:
    model = ByHand()

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        seqpar.parallelize(own, comm, sdpa=True, **({} if around else {"plan": ROWS}))
        block = seqpar.parallel(ROWS, comm) if around else nullcontext()
        match = "no attention was rerouted .* call F.scaled_dot_product_attention from Python"
        with pytest.raises(RuntimeError, match=match), block:
            own(torch.ones(1, 4, 8))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_threads(2, rank, timeout=20)
