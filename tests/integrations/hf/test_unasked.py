"""A model that was loaded as "seqpar" and never asks for that attention is refused by name, and nobody else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf import attention as keys
from seqpar.testing import run_threads
from tests.integrations.hf.models import SIZES, VOCABULARY, build

TOKENS = 12
PLAN = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1))
IDS, AT = torch.arange(1, TOKENS + 1)[None], torch.arange(TOKENS)[None]
ROW = {"input_ids": IDS, "position_ids": AT, "use_cache": False}
REFUSED = "loaded with attn_implementation='seqpar', never called it inside seqpar.parallel"


def mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM._from_config(config, attn_implementation=keys.KEY)


def deberta() -> PreTrainedModel:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    config = transformers.DebertaV2Config(**sizes)
    return transformers.DebertaV2Model._from_config(config, attn_implementation=keys.KEY)


def llama() -> PreTrainedModel:
    model = build("llama")
    model.set_attn_implementation(keys.KEY)
    return model


class Own(PreTrainedModel):
    """A model by hand, which asks for a mask and adds it to scores of its own."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.embed(input_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=position_ids
        )
        return torch.softmax(x @ x.mT + mask, -1) @ x


def own() -> PreTrainedModel:
    return Own._from_config(PreTrainedConfig(), attn_implementation=keys.KEY)


class Around(nn.Module):
    """Another model with one of transformers inside, as those of sentences and of peft."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, **given: Any) -> Tensor:
        out = self.inside(**given)
        return (out if isinstance(out, Tensor) else out[0]) * 2


def in_graphs(module: nn.Module, **given: Any) -> Any:
    return torch.compile(module, backend="eager")(**given)


WAYS: dict[str, Callable[..., Any]] = {
    "called": lambda model, **given: model(**given),
    "inside another": lambda model, **given: Around(model)(**given),
    "compiled": in_graphs,
    "compiled inside another": lambda model, **given: in_graphs(Around(model), **given),
    "checkpointed": lambda model, **given: checkpoint(model, use_reentrant=False, **given),
}


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    ("made", "why", "way"),
    [
        (mamba, "it carries a state from token to token", "called"),
        *((deberta, "its attention does not go through transformers' AttentionInterface", way) for way in WAYS),
        (own, "its attention does not go through", "called"),
    ],
)
@pytest.mark.sampled(3)
def test_a_model_that_never_asks_is_refused(made: Callable[[], PreTrainedModel], why: str, way: str) -> None:
    model = made()
    given = {"input_ids": IDS} if made is mamba else {"input_ids": IDS, "position_ids": AT}
    with seqpar.parallel(PLAN, LocalComm()):
        with pytest.raises(NotImplementedError, match=f"^{type(model).__name__}, {REFUSED}.*: {why}"):
            WAYS[way](model, **given)
        with pytest.raises(NotImplementedError, match=REFUSED):  # a second time too
            WAYS[way](model, **given)


def test_every_rank_is_told_the_same() -> None:
    model = mamba()
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 2))

    def rank(comm: Comm) -> str:
        with pytest.raises(NotImplementedError) as raised, seqpar.parallel(plan, comm):
            copy.deepcopy(model)(input_ids=IDS[:, :6])
        return str(raised.value)

    first, second = run_threads(2, rank)
    assert first == second and REFUSED in first


def forward(model: PreTrainedModel) -> None:
    assert model(**ROW).logits.shape == (1, TOKENS, VOCABULARY)


def pieces(model: PreTrainedModel) -> None:
    """Called one by one, of which some attend to nothing."""
    x = model.model.embed_tokens(IDS)
    model.lm_head(model.model.norm(model.model.layers[0].mlp(x)))


def recomputed(model: PreTrainedModel) -> None:
    """As a whole, under a policy that saves what attention returned and so does not run its op again."""

    def policy(_: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "seqpar" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(lambda: model(**ROW).logits, use_reentrant=False, context_fn=contexts).sum().backward()
    assert model.lm_head.weight.grad is not None


def shapes(model: PreTrainedModel) -> None:
    """Nothing is computed but shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        forward(model)


def layers_compiled(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    forward(model)
    forward(model)


def backward_alone(model: PreTrainedModel) -> None:
    with seqpar.parallel(PLAN, LocalComm()):
        loss = model(**ROW).logits.sum()
    loss.backward()
    assert model.lm_head.weight.grad is not None


def some_layers_without(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn = Nothing()
    forward(model)


class Nothing(nn.Module):
    """A layer that attends to nothing."""

    def forward(self, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def locally(model: PreTrainedModel) -> None:
    """Tokens are made by the attention of one rank."""
    with seqpar.parallelize(model, LocalComm()) as handle, handle.local():
        assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, TOKENS + 2)


def pictures(model: PreTrainedModel) -> None:
    """A tower without attention, whose pictures are the rank's own."""
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    tower = transformers.ResNetModel._from_config(config, attn_implementation=keys.KEY)
    assert tower(pixel_values=torch.randn(2, 3, 8, 8)).pooler_output.shape == (2, 4, 1, 1)


def another_name(model: PreTrainedModel) -> None:
    other = mamba()
    other.config._attn_implementation = "eager"
    assert other(input_ids=IDS).logits.shape == (1, TOKENS, VOCABULARY)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    "use",
    [forward, pieces, recomputed, shapes, layers_compiled, backward_alone, some_layers_without, locally, pictures,
     another_name],
)  # fmt: skip
@pytest.mark.sampled(2)
def test_nobody_else_is(use: Callable[[PreTrainedModel], None]) -> None:
    with seqpar.parallel(PLAN, LocalComm()):
        use(llama())


def test_outside_of_a_block_a_model_that_never_asks_is_as_ever() -> None:
    assert mamba()(input_ids=IDS).logits.shape == (1, TOKENS, VOCABULARY)


def test_an_encoder_and_a_head_of_ones_own_are_right() -> None:
    model = build("bert")
    expected = model.eval()(input_ids=IDS).logits
    model.set_attn_implementation(keys.KEY)
    plan = Plan(Mask([TOKENS], causal=False), Layout.contiguous(TOKENS, 1))
    with seqpar.parallel(plan, LocalComm()):
        assert torch.allclose(Around(model)(input_ids=IDS, position_ids=AT), expected * 2, atol=1e-4)


@pytest.mark.usefixtures("no_graphs")
def test_models_of_other_names_are_one_graph_as_ever() -> None:
    counter = CompileCounterWithBackend("eager")
    model = Around(build("llama", num_hidden_layers=1))
    torch.compile(model, backend=counter, fullgraph=True)(**ROW)
    assert counter.frame_count == 1


def test_a_second_model_that_changes_a_shared_config_is_named_by_the_first() -> None:
    config = copy.deepcopy(build("llama").config)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=keys.KEY)
    reference = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    expected = reference(**ROW).logits
    with seqpar.parallel(PLAN, LocalComm()):
        with pytest.raises(ValueError, match="LlamaForCausalLM was made with .* now says 'eager'"):
            model(**ROW)
        with pytest.raises(ValueError, match="LlamaModel was made with"):
            model.model(**ROW)
        assert torch.equal(reference(**ROW).logits, expected)
    model(**ROW)  # without a plan these rows are the whole input


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_model_that_is_told_to_use_another_attention_may(name: str) -> None:
    model = llama()
    model.set_attn_implementation(name)
    expected = model(**ROW).logits
    with seqpar.parallel(PLAN, LocalComm()):
        assert torch.equal(model(**ROW).logits, expected)
    model.set_attn_implementation(keys.KEY)
    model.config._attn_implementation = name
    with seqpar.parallel(PLAN, LocalComm()), pytest.raises(ValueError, match=f"its config now says '{name}'"):
        model(**ROW)
