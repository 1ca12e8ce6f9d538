"""A block in which a model loaded as "seqpar" never asks for that attention is an error; others are not."""

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
REFUSED = "nothing in this block used its plan.* for one of transformers without sdpa=True"


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
@pytest.mark.parametrize(("made", "way"), [(mamba, "called"), *((deberta, way) for way in WAYS), (own, "called")])
@pytest.mark.sampled(3)
def test_a_block_with_a_model_that_never_asks_is_an_error_on_every_rank(
    made: Callable[[], PreTrainedModel], way: str
) -> None:
    model = made()
    plan = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 2))
    given = {"input_ids": IDS[:, :6]} if made is mamba else {"input_ids": IDS[:, :6], "position_ids": AT[:, :6]}

    def rank(comm: Comm) -> bool:
        other = copy.deepcopy(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED), seqpar.parallel(plan, comm):
                WAYS[way](other, **given)
        return True

    assert run_threads(2, rank) == [True, True]


def forward(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    assert model(**ROW).logits.shape == (1, TOKENS, VOCABULARY)


def recomputed(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    """As a whole, under a policy that saves what attention returned and so does not run its op again."""

    def policy(_: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "seqpar" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(lambda: model(**ROW).logits, use_reentrant=False, context_fn=contexts).sum().backward()
    assert model.lm_head.weight.grad is not None


def shapes(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    """Nothing is computed but shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        forward(model, plan, comm)


def layers_compiled(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    forward(model, plan, comm)
    forward(model, plan, comm)


def backward_alone(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    with seqpar.parallel(plan, comm):
        loss = model(**ROW).logits.sum()
    loss.backward()
    assert model.lm_head.weight.grad is not None


def some_layers_without(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    model.model.layers[0].self_attn = Nothing()
    forward(model, plan, comm)


class Nothing(nn.Module):
    """A layer that attends to nothing."""

    def forward(self, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def locally(model: PreTrainedModel, plan: Plan, comm: Comm) -> None:
    """Tokens are made by the attention of one rank."""
    with seqpar.parallelize(model, comm) as handle, handle.local():
        assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, TOKENS + 2)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    "use",
    [forward, recomputed, shapes, layers_compiled, backward_alone, some_layers_without, locally],
)
@pytest.mark.sampled(2)
def test_a_block_with_another_is_not(use: Callable[[PreTrainedModel, Plan, Comm], None]) -> None:
    model, plan = llama(), Plan(Mask([TOKENS] * 2), Layout.contiguous(2 * TOKENS, 2))

    def rank(comm: Comm) -> bool:
        own = copy.deepcopy(model)
        with seqpar.parallel(plan, comm):
            use(own, plan, comm)
        return True

    assert run_threads(2, rank) == [True, True]


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


def test_a_second_model_that_changes_a_shared_config_is_noticed_by_the_block_of_the_first() -> None:
    config = copy.deepcopy(build("llama").config)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=keys.KEY)
    transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    plan = Plan(Mask([TOKENS] * 2), Layout.contiguous(2 * TOKENS, 2))

    def rank(comm: Comm) -> bool:
        with pytest.raises(RuntimeError, match=REFUSED), seqpar.parallel(plan, comm):
            model(**ROW)
        return True

    assert run_threads(2, rank) == [True, True]
