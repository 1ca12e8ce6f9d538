"""Changes of a parallel model after its trial: they take effect as on one process, or are errors by name."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_threads
from tests.integrations.hf import hybrids
from tests.integrations.hf.models import SIZES, batches, build, one_process, packed
from tests.ranks import errors_on_copies, on_copies
from tests.trial.test_rows import Hashed

EVERY = batches("right", 2)


def loss_after(model: nn.Module, change: Callable[[Any], object], every: Any = EVERY, **options: Any) -> float:
    """The loss of two ranks with what is changed after `parallelize`."""

    def step(own: Any, comm: Comm) -> float:
        own(**every[comm.rank]).loss.backward()
        change(own)
        return float(own(**every[comm.rank]).loss.detach())

    one, other = on_copies(model, step, **options)
    assert one == other
    return one


def _of_its_class(model: nn.Module) -> None:
    model.forward = lambda *args, **named: type(model).forward(model, *args, **named)


def _as_a_method(model: nn.Module) -> None:
    def forward(self: Any, labels: Tensor, **named: Any) -> Any:
        hidden = self.model(**named).last_hidden_state[:, :-1]
        loss = F.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)

    model.forward = types.MethodType(forward, model)


def _taken_away(model: nn.Module) -> None:
    del model.forward


class Own(nn.Module):
    """Attention over the rows at hand."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.v_proj, self.o_proj = before.v_proj, before.o_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        v = self.v_proj(hidden_states).cumsum(1)
        return self.o_proj(v.repeat(1, 1, self.o_proj.in_features // v.shape[-1])), None


def _another_attention(model: Any) -> None:
    layer = model.model.layers[1]
    layer.self_attn = Own(layer.self_attn)


def _another_layer(model: Any) -> None:
    model.model.layers[0].forward = lambda hidden_states, **_: hidden_states.cumsum(1)


def meeting(inner: Any) -> Any:
    """A function around another one, by which tokens meet; it looks like the inner one."""

    @wraps(inner)
    def forward(*args: Any, **named: Any) -> Any:
        y = inner(*args, **named)
        return y + y.mean(1, keepdim=True)

    return forward


def _a_forward_that_looks_alike(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = meeting(mlp.forward)


def _another_module(model: Any) -> None:
    model.model.layers[1].mlp = Hashed()


def _another_mixer(model: Any) -> None:
    model.backbone.layers[0].mixer.forward = lambda hidden_states, **_: hidden_states.cumsum(1)


def classifier() -> Any:
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=3))


LABELLED = [batch | {"labels": torch.tensor([0, 1, 2])} for batch in EVERY]
PACKED = [packed(torch.Generator().manual_seed(rank), [13, 21, 6]) for rank in range(2)]
LLAMA, ITS = partial(build, "llama"), "LlamaForCausalLM was given another forward after parallelize"
CHANGES: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], None], str]] = {
    "the forward of its class": (LLAMA, EVERY, _of_its_class, ITS),
    "a method": (LLAMA, EVERY, _as_a_method, ITS),  # its loss would be the mean over a rank's tokens
    "no forward": (LLAMA, EVERY, _taken_away, ITS),
    "that of a head that pools": (classifier, LABELLED, _of_its_class, "LlamaForSequenceClassification was given anot"),
    "attention": (LLAMA, EVERY, _another_attention, r"layers\.1\.self_attn .* given a module of the class Own"),
    "a layer": (LLAMA, EVERY, _another_layer, r"model\.layers\.0 .* was given another forward after parallelize"),
    "a forward that looks alike": (LLAMA, EVERY, _a_forward_that_looks_alike, r"layers\.0\.mlp .* another forward"),
    "a module": (LLAMA, EVERY, _another_module, r"layers\.1\.mlp of a parallel LlamaForCausalLM was given a module of"),
    "a mixer": (partial(hybrids.build, "mamba2"), PACKED, _another_mixer, "mixer of a parallel .* another forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_code_of_ones_own_put_in_later_is_refused_by_the_name_of_the_module(name: str) -> None:
    make, every, change, says = CHANGES[name]

    def step(own: Any, comm: Comm) -> None:
        change(own)
        own(**every[comm.rank])

    for said in errors_on_copies(make(), step):
        assert re.search(says, said), said


def test_another_forward_that_is_called_by_its_name_is_refused() -> None:
    model = build("llama")
    with seqpar.parallelize(model, LocalComm()):
        _of_its_class(model)
        with pytest.raises(NotImplementedError, match="another forward after parallelize, so that its LlamaModel"):
            model.forward(**EVERY[0])


def _decorated(model: nn.Module) -> None:
    before = model.forward
    model.forward = wraps(before)(lambda *args, **named: before(*args, **named))


def _held_by_the_model(model: nn.Module) -> None:
    model.former = model.forward
    model.forward = types.MethodType(lambda self, **named: self.former(**named), model)


class _Caller:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.forward(*args, **named)


WRAPPED: dict[str, Callable[[Any], object]] = {
    "decorated": _decorated,
    "held by the model": _held_by_the_model,
    "a partial's argument": lambda model: setattr(
        model, "forward", partial(lambda before, **named: before(**named), model.forward)
    ),
    "a callable": lambda model: setattr(model, "forward", _Caller(model.forward)),
    "compiled": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_wrappers_of_the_parallel_forward_may_come_and_its_base_model_be_called(how: str) -> None:
    model, batch = build("llama").eval(), {"input_ids": EVERY[0]["input_ids"]}
    with torch.no_grad():
        loss, hidden = model(**batch, labels=batch["input_ids"]).loss, model.model(**batch).last_hidden_state
    with seqpar.parallelize(model, LocalComm()), torch.no_grad():
        WRAPPED[how](model)
        assert float(model(**batch, labels=batch["input_ids"]).loss) == pytest.approx(float(loss), rel=1e-5)
        torch.testing.assert_close(model.model(**batch).last_hidden_state, hidden, rtol=1e-4, atol=1e-4)


def test_fewer_layers_by_the_config_are_not_refused() -> None:
    whole = build("llama")
    whole.config.num_hidden_layers = 1
    expected = float(one_process(whole, EVERY, causal=True).loss)
    found = loss_after(build("llama"), lambda model: setattr(model.config, "num_hidden_layers", 1))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("compiles", [False, True])
def test_layers_that_are_computed_again_and_compiled_make_their_calls(compiles: bool) -> None:
    model = build("llama")
    expected = float(one_process(copy.deepcopy(model), EVERY, causal=True).loss)

    def change(own: Any) -> None:
        own.gradient_checkpointing_enable({"use_reentrant": False})
        if compiles:
            own.model.layers[0].compile(backend="aot_eager")

    assert loss_after(model, change) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [("gemma3", {"final_logit_softcapping": 1.0, "sliding_window": 2}), ("mistral", {"sliding_window": 3})],
)
def test_a_config_that_the_model_was_made_from_still_speaks_for_it(name: str, change: dict[str, Any]) -> None:
    model = build(name)
    plain = float(one_process(copy.deepcopy(model), EVERY, causal=True).loss)
    model.config.update(change)
    expected = float(one_process(copy.deepcopy(model), EVERY, causal=True).loss)
    assert abs(expected - plain) > 1e-3 * plain

    def rank(comm: Comm) -> tuple[float, float]:
        own = build(name)
        config = own.config
        with seqpar.parallelize(own, comm):
            first = float(own(**EVERY[comm.rank]).loss.detach())
            config.update(change)
            second = float(own(**EVERY[comm.rank]).loss.detach())
            assert own.config is not config and own.config._attn_implementation == "seqpar"
        assert own.config is config and config._attn_implementation == "eager"
        return first, second

    for first, second in run_threads(2, rank):
        assert first == pytest.approx(plain, rel=1e-5) and second == pytest.approx(expected, rel=1e-5)


def test_the_config_and_its_copy_keep_what_is_changed_in_either() -> None:
    model = build("llama")
    config = model.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    config.tables, config.gone, config.note = {"a": torch.ones(2)}, 1, [1]
    handle = seqpar.parallelize(model, LocalComm())
    own, other = model.config, copy.deepcopy(config)
    loss = float(model(**EVERY[0]).loss.detach())
    config.tables["a"] = torch.full((2,), 5.0)
    config.note.append(2)  # in place
    del config.pad_token_id, own.gone
    own.use_cache = False
    assert float(model(**EVERY[0]).loss.detach()) == loss and float(own.tables["a"][0]) == 5
    assert own.note == [1, 2] and own.note is not config.note and "pad_token_id" not in own.__dict__
    handle.undo()
    assert model.config is config and config.use_cache is False and not hasattr(config, "gone")
    assert own._attn_implementation == config._attn_implementation == "eager"
    type(model)(own)(**EVERY[0])
    with seqpar.parallelize(model, LocalComm()):
        model.config = other
    assert model.config is other


def test_a_loss_function_that_is_a_method_is_not_taken_for_another() -> None:
    class Own(transformers.LlamaForSequenceClassification):
        def loss_function(self, labels: Tensor, pooled_logits: Tensor, **_: Any) -> Tensor:
            return F.cross_entropy(pooled_logits, labels)

    model = Own(transformers.LlamaConfig(**SIZES, num_labels=3))
    batch = {"input_ids": EVERY[0]["input_ids"], "attention_mask": EVERY[0]["attention_mask"]}
    expected = float(model(**batch, labels=torch.tensor([0, 1, 2])).loss.detach())
    with seqpar.parallelize(model, LocalComm()):
        found = float(model(**batch, labels=torch.tensor([0, 1, 2])).loss.detach())
    assert found == pytest.approx(expected, rel=1e-5)


def test_hooks_and_modules_that_were_there_in_the_trial_are_no_change() -> None:
    model = build("llama")
    expected = float(one_process(copy.deepcopy(model), EVERY, causal=True).loss)
    model.metric = Hashed()
    model.model.layers[0].mlp.forward = types.MethodType(
        type(model.model.layers[0].mlp).forward, model.model.layers[0].mlp
    )

    def change(own: Any) -> None:
        own.model.layers[1].mlp.register_forward_hook(lambda module, args, y: None)
        own.metric.steps += 1
        own.requires_grad_(False).model.layers[0].requires_grad_(True)

    assert loss_after(model, change) == pytest.approx(expected, rel=1e-5)


def test_a_forward_of_ones_own_in_the_class_of_a_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    kind = type(model.model.layers[0].mlp)
    changed = meeting(kind.forward)

    def step(own: Any, comm: Comm) -> None:
        comm.agree("both are parallel", {})
        monkeypatch.setattr(kind, "forward", changed)
        own(**EVERY[comm.rank])

    for said in errors_on_copies(model, step):
        assert re.search("model.layers.0.mlp of a parallel .* was given another forward", said), said
