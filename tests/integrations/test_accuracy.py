"""`accuracy` reaches attention through every kind of layer and model, when recomputed and compiled too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import seqpar
from seqpar import Layout, LocalComm, Mask, Plan
from seqpar.kernels import CallSpec, Kernel, choose
from seqpar.ops.attention import call
from tests.integrations.diffusers_models import loss_of
from tests.integrations.diffusers_models import made as diffuser
from tests.integrations.hf.models import build, packed
from tests.integrations.sdpa.test_sdpa import TOKENS, E, inputs, made

PLAN = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call whose kernel is chosen, whether it is fast."""
    seen: list[bool] = []

    def record(name: str, spec: CallSpec) -> Kernel:
        seen.append(spec.fast)
        return choose(name, spec)

    monkeypatch.setattr(call, "choose", record)
    return seen


def layer(accuracy: str) -> None:
    attention = seqpar.nn.Attention(accuracy=accuracy)
    assert ("accuracy=fast" in repr(attention)) == (accuracy == "fast")
    x = torch.randn(TOKENS, 2, 8)
    with seqpar.parallel(fresh(), LocalComm()):
        attention(x, x, x)


def fresh() -> Plan:
    """A plan for which no kernel is chosen yet."""
    return Plan(PLAN.mask, PLAN.layout)


def block(accuracy: str) -> None:
    x, target = (y.view(TOKENS, E) for y in inputs())
    with seqpar.sdpa(fresh(), LocalComm(), accuracy=accuracy):
        y = made(reentrant=False)(x[None].requires_grad_())
    (y[0] * target).sum().backward()


def plain_model(accuracy: str) -> None:
    model = made(reentrant=False)
    with seqpar.parallelize(model, LocalComm(), sdpa=True, plan=fresh(), accuracy=accuracy):
        model(inputs()[0][None]).sum().backward()


def transformer(accuracy: str) -> None:
    model = build("llama")
    with seqpar.parallelize(model, LocalComm(), accuracy=accuracy):
        model(**batch()).loss.backward()
    assert "_seqpar_accuracy" not in {name for module in model.modules() for name in module.__dict__}


def batch() -> dict[str, Tensor]:
    return packed(torch.Generator().manual_seed(0), [13, 21, 6])


def compiled_layers(accuracy: str) -> None:
    model, counter = build("llama"), CompileCounterWithBackend("eager")
    for decoder in model.model.layers:
        decoder.compile(fullgraph=True, backend=counter)
    with seqpar.parallelize(model, LocalComm(), accuracy=accuracy):
        model(**batch()).loss.backward()
    assert counter.frame_count


def video(accuracy: str) -> None:
    model, inputs_of_model = diffuser("wan", torch.float32)
    with seqpar.parallelize(model, LocalComm(), accuracy=accuracy):
        loss_of(model, inputs_of_model)[1].backward()


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("run", [layer, block, plain_model, transformer, compiled_layers, video])
@pytest.mark.sampled(3)
def test_accuracy_reaches_every_call(run: Callable[[str], None], asked: list[bool]) -> None:
    for accuracy in ("exact", "fast"):
        asked.clear()
        run(accuracy)
        assert asked and set(asked) == {accuracy == "fast"}


@pytest.mark.parametrize("sdpa", [False, True], ids=["transformers", "sdpa"])
def test_another_word_is_refused_by_name(sdpa: bool) -> None:
    with pytest.raises(ValueError, match="accuracy must be 'exact' or 'fast', got 'bf16'"):
        seqpar.parallelize(build("llama"), LocalComm(), accuracy="bf16", **({"sdpa": True} if sdpa else {}))
