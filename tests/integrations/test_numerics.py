"""`accuracy` and `deterministic` reach attention through every layer and model, when recomputed and compiled too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from tests.ranks import errors

PLAN = Plan(Mask([TOKENS]), Layout.contiguous(TOKENS, 1))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each call whose kernel is chosen, whether it is fast, and deterministic."""
    seen: list[tuple[bool, bool]] = []

    def record(name: str, spec: CallSpec, *passed_over: Any) -> Kernel:
        seen.append((spec.fast, spec.deterministic))
        return choose(name, spec, *passed_over)

    monkeypatch.setattr(call, "choose", record)
    return seen


def layer(**numerics: Any) -> None:
    attention = seqpar.nn.Attention(**numerics)
    assert ("accuracy=fast" in repr(attention)) == (numerics.get("accuracy") == "fast")
    x = torch.randn(TOKENS, 2, 8)
    with seqpar.parallel(fresh(), LocalComm()):
        attention(x, x, x)


def fresh() -> Plan:
    """A plan for which no kernel is chosen yet."""
    return Plan(PLAN.mask, PLAN.layout)


def block(**numerics: Any) -> None:
    x, target = (y.view(TOKENS, E) for y in inputs())
    with seqpar.sdpa(fresh(), LocalComm(), **numerics):
        y = made(reentrant=False)(x[None].requires_grad_())
    (y[0] * target).sum().backward()


def plain_model(**numerics: Any) -> None:
    model = made(reentrant=False)
    with seqpar.parallelize(model, LocalComm(), sdpa=True, plan=fresh(), **numerics):
        model(inputs()[0][None]).sum().backward()


def transformer(**numerics: Any) -> None:
    model = build("llama")
    with seqpar.parallelize(model, LocalComm(), **numerics):
        model(**batch()).loss.backward()
    assert "_seqpar_numerics" not in {name for module in model.modules() for name in module.__dict__}


def batch() -> dict[str, Tensor]:
    return packed(torch.Generator().manual_seed(0), [13, 21, 6])


def compiled_layers(**numerics: Any) -> None:
    model, counter = build("llama"), CompileCounterWithBackend("eager")
    for decoder in model.model.layers:
        decoder.compile(fullgraph=True, backend=counter)
    with seqpar.parallelize(model, LocalComm(), **numerics):
        model(**batch()).loss.backward()
    assert counter.frame_count


def video(**numerics: Any) -> None:
    model, inputs_of_model = diffuser("wan", torch.float32)
    with seqpar.parallelize(model, LocalComm(), **numerics):
        loss_of(model, inputs_of_model)[1].backward()


ASKED: list[tuple[dict[str, Any], tuple[bool, bool]]] = [
    ({}, (False, True)),
    ({"accuracy": "fast"}, (True, True)),
    ({"deterministic": False}, (False, False)),
    ({"accuracy": "fast", "deterministic": False}, (True, False)),
]


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("run", [layer, block, plain_model, transformer, compiled_layers, video])
@pytest.mark.sampled(3)
def test_numerics_reach_every_call(run: Callable[..., None], asked: list[tuple[bool, bool]]) -> None:
    for numerics, expected in ASKED:
        asked.clear()
        run(**numerics)
        assert asked and set(asked) == {expected}


def test_ranks_compare_numerics() -> None:
    told = "ranks differ in deterministic: True on rank 0; False on rank 1"
    for said in errors(lambda comm: seqpar.parallelize(build("llama"), comm, deterministic=comm.rank == 0)):
        assert told in said


@pytest.mark.parametrize("sdpa", [False, True], ids=["transformers", "sdpa"])
def test_another_word_is_refused_by_name(sdpa: bool) -> None:
    with pytest.raises(ValueError, match="accuracy must be 'exact' or 'fast', got 'bf16'"):
        seqpar.parallelize(build("llama"), LocalComm(), accuracy="bf16", **({"sdpa": True} if sdpa else {}))
    with pytest.raises(ValueError, match="deterministic must be True or False, got 'no'"):
        seqpar.parallelize(build("llama"), LocalComm(), deterministic="no", **({"sdpa": True} if sdpa else {}))
