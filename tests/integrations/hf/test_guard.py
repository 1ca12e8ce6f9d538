"""Changes of a parallel model after its trial: they take effect as on one process, or are errors by name."""

from __future__ import annotations

import copy
import threading
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
from seqpar.comm import PeerError
from seqpar.testing import run_threads
from tests.integrations.hf import hybrids
from tests.integrations.hf.models import SIZES, batches, build, one_process, packed
from tests.trial.test_rows import Hashed

EVERY = batches("right", 2)


def refused(model: nn.Module, change: Callable[[Any], object], match: str, every: Any = EVERY, **options: Any) -> None:
    """What is changed after `parallelize` is an error on both ranks."""

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, **options):
            change(own)
            with pytest.raises((NotImplementedError, PeerError), match=match):
                own(**every[comm.rank])

    run_threads(2, rank)


def loss_after(model: nn.Module, change: Callable[[Any], object], every: Any = EVERY, **options: Any) -> float:
    """The loss of two ranks with what is changed after `parallelize`."""

    def rank(comm: Comm) -> float:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm, **options):
            own(**every[comm.rank]).loss.backward()
            change(own)
            return float(own(**every[comm.rank]).loss.detach())

    one, other = run_threads(2, rank)
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


REPLACED = {"its class's": _of_its_class, "a method": _as_a_method, "none": _taken_away}


@pytest.mark.parametrize("how", REPLACED)
def test_another_forward_of_the_model_is_refused(how: str) -> None:
    """Its loss would be the mean over a rank's tokens."""
    refused(build("llama"), REPLACED[how], "LlamaForCausalLM was given another forward after parallelize")


def test_another_forward_that_is_called_by_its_name_is_refused() -> None:
    model = build("llama")
    with seqpar.parallelize(model, LocalComm()):
        _of_its_class(model)
        with pytest.raises(NotImplementedError, match="another forward after parallelize, so that its LlamaModel"):
            model.forward(**EVERY[0])


def test_another_forward_of_a_model_whose_head_pools_is_refused() -> None:
    config = transformers.LlamaConfig(**SIZES, num_labels=3)
    model = transformers.LlamaForSequenceClassification(config)
    every = [{"input_ids": b["input_ids"], "attention_mask": b["attention_mask"], "labels": torch.tensor([0, 1, 2])}
             for b in EVERY]  # fmt: skip
    refused(model, _of_its_class, "LlamaForSequenceClassification was given another forward", every)


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


def _with_default(forward: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, _forward: Callable[..., Any] = forward, **named: Any) -> Any:
        return _forward(*args, **named)

    return called


WRAPPED: dict[str, Callable[[Any], object]] = {
    "decorated": _decorated,
    "held by the model": _held_by_the_model,
    "partial": lambda model: setattr(model, "forward", partial(model.forward, use_cache=False)),
    "a partial's argument": lambda model: setattr(
        model, "forward", partial(lambda before, **named: before(**named), model.forward)
    ),
    "a callable": lambda model: setattr(model, "forward", _Caller(model.forward)),
    "compiled": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "a default": lambda model: setattr(model, "forward", _with_default(model.forward)),
    "a partial's keyword": lambda model: setattr(
        model, "forward", partial(lambda before, **named: before(**named), before=model.forward)
    ),
    "a method of another": lambda model: setattr(model, "forward", _Caller(model.forward).__call__),
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


class Own(nn.Module):
    """Attention over the rows at hand."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.v_proj, self.o_proj = before.v_proj, before.o_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        v = self.v_proj(hidden_states).cumsum(1)
        return self.o_proj(v.repeat(1, 1, self.o_proj.in_features // v.shape[-1])), None


def _another_module(model: Any) -> None:
    layer = model.model.layers[1]
    layer.self_attn = Own(layer.self_attn)


def _another_forward(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.forward = Own(attention).forward


def _another_layer(model: Any) -> None:
    model.model.layers[0].forward = lambda hidden_states, **_: hidden_states.cumsum(1)


ATTENDING = {"module": _another_module, "forward": _another_forward, "layer": _another_layer}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ATTENDING)
def test_attention_of_ones_own_put_in_later_is_refused(how: str, training: bool) -> None:
    what = "a module of the class Own" if how == "module" else "another forward"
    refused(build("llama").train(training), ATTENDING[how], f"model.layers.* was given {what} after parallelize")


def test_a_mixer_of_ones_own_put_in_later_is_refused() -> None:
    model, batch = hybrids.build("mamba2"), packed(torch.Generator().manual_seed(0), [13, 21, 6])

    def change(own: Any) -> None:
        own.backbone.layers[0].mixer.forward = lambda hidden_states, **_: hidden_states.cumsum(1)

    refused(model, change, "mixer of a parallel .* was given another forward", [batch] * 2, source="replicated")


def test_fewer_layers_by_the_config_are_not_refused() -> None:
    whole = build("llama")
    whole.config.num_hidden_layers = 1
    expected = float(one_process(whole, EVERY, causal=True).loss)
    found = loss_after(build("llama"), lambda model: setattr(model.config, "num_hidden_layers", 1))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["compiled", "checkpointed", "both"])
def test_layers_that_are_compiled_or_computed_again_make_their_calls(how: str) -> None:
    model = build("llama")
    expected = float(one_process(copy.deepcopy(model), EVERY, causal=True).loss)

    def change(own: Any) -> None:
        if how != "compiled":
            own.gradient_checkpointing_enable({"use_reentrant": False})
        if how != "checkpointed":
            for layer in own.model.layers:
                layer.compile(backend="aot_eager")

    assert loss_after(model, change) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma3", {"final_logit_softcapping": 1.0}),
        ("gemma3", {"sliding_window": 2}),
        ("mistral", {"sliding_window": 3}),
    ],
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


def test_configs_that_hold_arrays_and_copies_that_outlive_undo() -> None:
    model = build("llama")
    config = model.config
    config.tables, config.gone = {"a": torch.ones(2), "b": [torch.zeros(3)]}, 1
    handle = seqpar.parallelize(model, LocalComm())
    loss = float(model(**EVERY[0]).loss.detach())
    config.tables["a"] = torch.full((2,), 5.0)
    assert float(model(**EVERY[0]).loss.detach()) == loss and float(model.config.tables["a"][0]) == 5
    own, other = model.config, copy.deepcopy(config)
    del own.gone
    handle.undo()
    assert not hasattr(config, "gone") and own._attn_implementation == config._attn_implementation == "eager"
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


def test_the_copy_keeps_what_was_changed_in_it_and_takes_what_was_taken_away() -> None:
    model = build("llama")
    config = model.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    config.note = [1]
    with seqpar.parallelize(model, LocalComm()):
        model.config.use_cache = False
        model(**EVERY[0])
        config.note.append(2)  # in place
        del config.pad_token_id
        model(**EVERY[0])
        assert model.config.note == [1, 2] and model.config.note is not config.note
        assert "pad_token_id" not in model.config.__dict__ and model.config.use_cache is False
        config.note = "last"
    assert model.config is config and config.note == "last" and config.use_cache is False


def of(kind: str, **more: Any) -> Any:
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, **more))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, 0.0, 0.2)
    return model.train()


SCALED: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "granite": (lambda: of("Granite", logits_scaling=1.0), lambda m: m.config.update({"logits_scaling": 1.01}),
                "logits_scaling"),
    "cohere": (lambda: of("Cohere", logit_scale=1.0), lambda m: setattr(m, "logit_scale", 0.99), "logit_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_another_scale_of_logits_is_in_a_loss_of_logits(name: str) -> None:
    make, change, _ = SCALED[name]
    changed = make()
    change(changed)
    expected = float(one_process(changed, EVERY, causal=True).loss)
    assert loss_after(make(), change, logits=True) == pytest.approx(expected, rel=1e-5)


def meeting(inner: Any) -> Any:
    """A function around another one, by which tokens meet; it looks like the inner one."""

    @wraps(inner)
    def forward(*args: Any, **named: Any) -> Any:
        y = inner(*args, **named)
        return y + y.mean(1, keepdim=True)

    return forward


LATER: dict[str, Callable[[Any], Any]] = {
    "a forward that looks alike": lambda m: setattr(m.layers[0].mlp, "forward", meeting(m.layers[0].mlp.forward)),
    "a module": lambda m: setattr(m.layers[1], "mlp", Hashed()),
}


@pytest.mark.parametrize("name", LATER)
def test_code_of_ones_own_put_in_later_is_refused_by_the_name_of_the_module(name: str) -> None:
    refused(
        build("llama"), lambda m: LATER[name](m.model), r"model.layers.\d.mlp of a parallel LlamaForCausalLM was given"
    )


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
    own = build("llama")
    kind = type(own.model.layers[0].mlp)
    barrier = threading.Barrier(2)

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(own)
        with seqpar.parallelize(mine, comm):
            barrier.wait()
            if comm.rank == 0:
                monkeypatch.setattr(kind, "forward", meeting(kind.forward))
            barrier.wait()
            with pytest.raises(
                NotImplementedError, match="model.layers.0.mlp of a parallel .* was given another forward"
            ):
                mine(**EVERY[comm.rank])

    run_threads(2, rank)
