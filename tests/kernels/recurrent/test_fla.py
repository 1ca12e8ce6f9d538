"""The adapter to flash-linear-attention, beside a stand-in with its functions' names, arguments and demands.

The stand-in computes in float64 and rounds its results; a GPU and the library are needed for more.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import recurrent
from seqpar.comm import LocalComm
from seqpar.facts.mask import Mask
from seqpar.kernels.recurrent import KERNELS, Recurrence, RecurrentSpec, choose, fla
from seqpar.kernels.recurrent.fla import FlashLinear
from seqpar.kernels.recurrent.reference import TokenByToken
from seqpar.kernels.vendor import library
from seqpar.plan import Plan
from seqpar.testing import dense_linear_attention, relative_rms
from tests.kernels.recurrent.cases import errors
from tests.ops.recurrent.cases import FAMILIES, Family


def computed(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, *, low=True
) -> tuple[Tensor, Tensor]:
    """What the functions demand of their arguments, and the recurrence."""
    assert q.shape == k.shape and v.shape[:3] == k.shape[:3], "as many heads of q and k as of v"
    assert q.shape[0] == 1 and q.dtype == k.dtype == v.dtype and (not low or q.dtype != torch.float32)
    assert cu_seqlens.dtype == torch.int64 and int(cu_seqlens[-1]) == q.shape[1] and output_final_state
    assert initial_state.dtype == torch.float32 and len(initial_state) == len(cu_seqlens) - 1
    assert initial_state.shape[1:] == (*k.shape[2:], v.shape[3]) and q.shape[3] <= 256
    rows = [None if x is None else x[0].double() for x in (q, k, v, g, beta)]
    counts, kernel = np.diff(cu_seqlens.numpy()), TokenByToken()
    prepared = kernel.prepare(Recurrence(*rows, scale), kernel.tables(counts, counts[:0], q.device))
    out, left = kernel.compute(prepared, initial_state.double())
    return out.to(q.dtype)[None], left.float()


# the arguments of release 0.5.2
def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert g is None or g.shape == v.shape[:3]
    return computed(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, low=False)


def chunk_gla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None,
):  # fmt: skip
    assert q.shape == k.shape == g.shape
    return computed(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, low=False)


def chunk_delta_rule(
    q, k, v, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert beta.shape == v.shape[:3]
    return computed(q, k, v, None, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert g.shape == beta.shape == v.shape[:3]
    return computed(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert g.shape == (*v.shape[:3], k.shape[3]) and beta.shape == v.shape[:3]
    return computed(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


STAND_INS = {f.__name__: f for f in (chunk_simple_gla, chunk_gla, chunk_delta_rule, chunk_gated_delta_rule, chunk_kda)}


@pytest.fixture
def adapter(monkeypatch) -> FlashLinear:
    """The adapter on the CPU, beside an installed stand-in."""
    for module, name in set(fla.FUNCTIONS.values()):
        made = ModuleType(f"fla.ops.{module}")
        setattr(made, name, STAND_INS[name])
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(library, "installed", {"flash-linear-attention": (0, 5, 2)}.get)
    return FlashLinear(device="cpu")


BASE = Family("scalar", beta=True, dim=8, values=6, groups=1, heads=2, unit=True)
RUNS = {"counts": np.array([20, 5, 9]), "exported": np.array([0, 2])}
SPEC = RecurrentSpec("cpu", torch.bfloat16, 8, 6, "scalar", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
@pytest.mark.sampled(3)
def test_results_and_every_gradient(decay, beta, dtype, adapter) -> None:
    """The stand-in rounds what a call returns, the chunks of PyTorch only the sums."""
    case = replace(BASE, decay=decay, beta=beta)
    both = (errors(kernel, case, dtype, **RUNS) for kernel in (adapter, KERNELS["chunked"]))
    for ours, theirs in zip(*both, strict=True):
        assert ours <= 2 * theirs + 1e-6


@pytest.mark.parametrize(("decay", "beta"), FAMILIES)
@pytest.mark.sampled(3)
def test_a_library_that_is_right_is_used(decay, beta, adapter, monkeypatch) -> None:
    monkeypatch.setitem(KERNELS, "fla", adapter)
    assert choose("fla", SPEC._replace(decay=decay, beta=beta)) is adapter


def test_modes_of_the_caller_do_not_matter(adapter) -> None:
    """The operator of a compiled model runs below autograd."""
    with torch.inference_mode():
        assert adapter.refuses(SPEC) is None
    with torch._C._AutoDispatchBelowAutograd():
        assert adapter.refuses(SPEC._replace(dim=16)) is None


def without_gradient_of_states(*arguments, **options):
    out, left = chunk_gated_delta_rule(*arguments, **options)
    return out, left.detach()


def without_gradient_of_initial_states(*arguments, initial_state, **options):
    return chunk_gated_delta_rule(*arguments, initial_state=initial_state.detach(), **options)


def transposed(*arguments, **options):
    out, left = chunk_gated_delta_rule(*arguments, **options)
    return out, left.mT.contiguous().view(left.shape)


def older(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (without_gradient_of_states, "the gradient of the state of a run by k is missing"),
        (without_gradient_of_initial_states, "the gradient of the state of a run by the entering state is missing"),
        (transposed, "the state of a run is off by"),
        (older, "it fails: TypeError: .* unexpected keyword argument 'cu_seqlens'"),
    ],
)
def test_a_library_is_asked_before_its_first_use(function, why, adapter, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", function)
    monkeypatch.setitem(KERNELS, "fla", adapter)
    with pytest.raises(NotImplementedError, match=f"chunk_gated_delta_rule of the installed .* not usable: {why}"):
        choose("fla", SPEC)


def test_it_is_asked_once_for_calls_of_a_kind(adapter, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(fla, "fault", lambda *arguments: calls.append(arguments))
    for spec in (SPEC, SPEC, SPEC._replace(dim=16)):
        assert adapter.refuses(spec) is None
    assert len(calls) == 2


def test_refusals(adapter, monkeypatch) -> None:
    for change, why in (
        ({"device": "cuda"}, "fla runs on cpu, v is on cuda"),
        ({"dtype": torch.float32}, "fla computes in 16 bits, got torch.float32"),
        ({"dim": 257}, "fla has keys of up to 256 dims, got 257"),
    ):
        assert adapter.refuses(SPEC._replace(**change)) == why
    monkeypatch.setattr(library, "installed", lambda package: None)
    assert adapter.refuses(SPEC) == "fla: flash-linear-attention is not installed"
    assert choose("auto", SPEC._replace(device="cuda")) is KERNELS["chunked"]


@pytest.mark.parametrize("fault", [None, "the state of a run is off by 0.5 of its size"])
def test_on_cuda_auto_takes_a_library_that_is_right_and_passes_over_another(fault, adapter, monkeypatch) -> None:
    adapter.device = "cuda"
    monkeypatch.setattr(fla, "no_cuda", lambda: None)
    monkeypatch.setattr(fla, "fault", lambda kernel, spec: fault)
    monkeypatch.setitem(KERNELS, "fla", adapter)
    on_cuda = SPEC._replace(device="cuda")
    assert choose("auto", on_cuda) is (KERNELS["chunked"] if fault else adapter)
    assert choose("auto", on_cuda._replace(dtype=torch.float32)) is KERNELS["chunked"]


def test_no_rows_and_no_exported_runs(adapter) -> None:
    for counts in (np.zeros(0, np.int64), np.array([3])):
        low = BASE.inputs(Mask([3]), 0, torch.bfloat16)[:5]
        rows = [x[: counts.sum()].to(torch.float32 if n > 2 else x.dtype).requires_grad_() for n, x in enumerate(low)]
        entering = torch.zeros(len(counts), 2, 8, 6, requires_grad=True)
        tables = adapter.tables(counts, counts[:0], torch.device("cpu"))
        prepared = adapter.prepare(Recurrence(*rows, 1.0), tables)
        states, maps = adapter.leave(prepared, entering[:0])
        assert states.shape == (0, 2, 8, 6) and maps.shape == (0, 2, 8, 8)
        out, left = adapter.compute(prepared, entering)
        assert out.shape == rows[2].shape and left.shape == entering.shape


def test_linear_attention_by_it(adapter, monkeypatch) -> None:
    """A trial inside a call, whose own forward keeps no graph."""
    monkeypatch.setitem(KERNELS, "fla", adapter)
    plan = Plan(Mask([20, 5, 9]), seqpar.Layout.contiguous(34, 1))
    leaves = [x.requires_grad_() for x in BASE.inputs(plan.mask, 0, torch.bfloat16)[:5]]
    dout = torch.randn(34, 2, 6, generator=torch.Generator().manual_seed(7)).bfloat16()
    q, k, v, decay, beta = leaves
    out = recurrent.linear_attention(q, k, v, plan, LocalComm(), decay=decay, beta=beta, kernel="fla")
    out.backward(dout)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected, _ = dense_linear_attention(*wide[:3], plan.mask, decay=wide[3], beta=wide[4])
    expected.backward(dout.double())
    pairs = [(out.detach(), expected.detach()), *((x.grad, y.grad) for x, y in zip(leaves, wide, strict=True))]
    for x, y in pairs:
        assert relative_rms(x.double(), y) < 4e-3
