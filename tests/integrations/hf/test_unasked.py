"""A block in which a model loaded as "seqpar" never asks for that attention is an error; others are not."""

from __future__ import annotations

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
from transformers import PreTrainedModel

import seqpar
import seqpar.integrations.transformers
from seqpar import Comm, Layout, LocalComm, Mask, Plan
from seqpar.integrations.hf import attention as keys
from tests.integrations.hf.models import SIZES, VOCABULARY, build
from tests.ranks import errors

TOKENS = 12
PLAN = Plan(Mask([TOKENS] * 2), Layout.contiguous(2 * TOKENS, 2))
IDS, AT = torch.arange(1, TOKENS + 1)[None], torch.arange(TOKENS)[None]
ROW = {"input_ids": IDS, "position_ids": AT, "use_cache": False}
REFUSED = "nothing in this block used its plan"


def mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM._from_config(config, attn_implementation=keys.KEY)


def deberta() -> PreTrainedModel:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    config = transformers.DebertaV2Config(**sizes)
    return transformers.DebertaV2Model._from_config(config, attn_implementation=keys.KEY)


def of_a_shared_config() -> PreTrainedModel:
    """A second model changes the config of the first."""
    config = build("llama").config
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=keys.KEY)
    transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    return model


class Around(nn.Module):
    """Another model with one of transformers inside, as those of sentences and of peft."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, **given: Any) -> Tensor:
        out = self.inside(**given)
        return (out if isinstance(out, Tensor) else out[0]) * 2


WAYS: dict[str, Callable[..., Any]] = {
    "called": lambda model, **given: model(**given),
    "compiled inside another": lambda model, **given: torch.compile(Around(model), backend="eager")(**given),
    "checkpointed": lambda model, **given: checkpoint(model, use_reentrant=False, **given),
}


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    ("made", "way"), [(mamba, "called"), *((deberta, way) for way in WAYS), (of_a_shared_config, "called")]
)
def test_a_block_with_a_model_that_never_asks_is_an_error_on_every_rank(
    made: Callable[[], PreTrainedModel], way: str
) -> None:
    models = [made() for _ in range(2)]

    def rank(comm: Comm) -> None:
        with seqpar.parallel(PLAN, comm):
            WAYS[way](models[comm.rank], **{"input_ids": IDS} if made is mamba else ROW)

    assert all(REFUSED in said for said in errors(rank))


def forward(model: PreTrainedModel, comm: Comm) -> None:
    assert model(**ROW).logits.shape == (1, TOKENS, VOCABULARY)


def recomputed(model: PreTrainedModel, comm: Comm) -> None:
    """As a whole, under a policy that saves what attention returned and so does not run its op again."""

    def policy(_: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "seqpar" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(lambda: model(**ROW).logits, use_reentrant=False, context_fn=contexts).sum().backward()
    assert model.lm_head.weight.grad is not None


def shapes(model: PreTrainedModel, comm: Comm) -> None:
    """Nothing is computed but shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        forward(model, comm)


def layers_compiled(model: PreTrainedModel, comm: Comm) -> None:
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    forward(model, comm)
    forward(model, comm)


def locally(model: PreTrainedModel, comm: Comm) -> None:
    """Tokens are made by the attention of one rank."""
    with seqpar.parallelize(model, comm) as handle, handle.local():
        assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, TOKENS + 2)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("use", [forward, recomputed, shapes, layers_compiled, locally])
def test_a_block_with_another_is_not(use: Callable[[PreTrainedModel, Comm], None]) -> None:
    models = [build("llama") for _ in range(2)]
    for model in models:
        model.set_attn_implementation(keys.KEY)

    def rank(comm: Comm) -> None:
        with seqpar.parallel(PLAN, comm):
            use(models[comm.rank], comm)

    assert errors(rank) == ["nothing"] * 2


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
