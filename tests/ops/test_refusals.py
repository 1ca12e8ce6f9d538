"""Every option is honoured or refused by name; bad input raises on every rank before a byte moves and loses nothing."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import seqpar
from seqpar import dsp, recurrent
from seqpar.comm import Comm, LocalComm, PeerError
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import KERNELS
from seqpar.nn import Attention
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import run_processes, run_threads
from seqpar.train import Mean, all_sum, linear_cross_entropy, sync_gradients, token_log_probs, token_mean
from tests.advice.advised import default_group
from tests.cases import LAYOUTS, Case
from tests.ops.cases import EACH, OUT, Options, check, inputs
from tests.ops.recorded import assert_same_bits, step


@dataclass(frozen=True)
class Scaled(Options):
    """With a scale of its own."""

    scale: float = 0.37

    def arguments(self, heads: int) -> dict[str, object]:
        return super().arguments(heads) | {"scale": self.scale}


OPTIONS = (
    Options(softcap=1.5),
    Options(sinks=True),
    Options(alibi=True),
    Options(dropout=0.4),
    Scaled(),
    Options(softcap=3.0, sinks=True, alibi=True, dropout=0.2),
)


WAYS = [pytest.param(*way) for way in itertools.product(LAYOUTS, TRANSPORTS, (1, 2, 4))]


@pytest.mark.parametrize(("layout", "transport", "ulysses"), WAYS)
@pytest.mark.sampled(16)
def test_every_option_under_every_layout_transport_and_width(layout, transport, ulysses) -> None:
    """An option that a layout, transport or width ignored would give another answer than one device."""
    for n, options in enumerate(OPTIONS):
        mask = ("packed", "window", "cross")[n % 3]
        case = Case(mask, layout, transport, 4, ulysses, (3, 8), n, stage_bytes=4096, pads=bool(n % 2))
        check(case.plan(), (3, 1), (4, 4), options, uses=(EACH, OUT)[n % 2])


@pytest.mark.parametrize("kernel", ["auto", *(k.name for k in KERNELS)])
@pytest.mark.parametrize("options", [*OPTIONS, Scaled(scale=0.0), Scaled(scale=-0.37)], ids=str)
@pytest.mark.parametrize("dims", [(4, 4), (4, 2)])
@pytest.mark.sampled(5)
def test_every_kernel_honours_an_option_or_refuses_it_by_name(kernel, options, dims) -> None:
    plan = Case("packed", "zigzag", "fetch", 2, 1, (40, 9)).plan()
    try:
        check(plan, (4, 2), dims, replace(options, kernel=kernel))
    except NotImplementedError as error:
        reasons = {"aten": "softcap|ALiBi|dropout|wide"} | dict.fromkeys(("native", "triton", "triton_tf32"), "float64")
        assert re.search(reasons[kernel], str(error))
        assert kernel in str(error)


def test_options_that_change_no_number() -> None:
    plan = Case("packed", "striped", "ring", 2, 1, (9, 4)).plan()
    arguments = (plan, (4, 2), (4, 4), 0, torch.float64)
    first = run_threads(2, step, *arguments)
    assert_same_bits(first, run_threads(2, relaxed, *arguments))


def relaxed(comm: Comm, *arguments: object) -> list[Tensor]:
    return step(comm, *arguments, deterministic=False)


PLAN = Plan(Mask([4]), Layout.contiguous(4, 2))
SHARDS = (
    (lambda: PLAN.with_mask(Mask([5])), "layout holds 4 tokens, the mask 5"),
    (lambda: PLAN.bytes(0, heads=3, kv_heads=2, dim=4), "multiple of key heads, got 3 and 2"),
    (lambda: seqpar.shard(torch.zeros(3), PLAN, 0), r"shard along dim 0 of \[3\], expected 4 tokens$"),
    (lambda: seqpar.shard(torch.zeros(1, 4), PLAN, 0), r"dim 0 of \[1, 4\], expected 4 tokens; give dim=1"),
    (lambda: seqpar.shard(torch.zeros(4), PLAN, -1), "rank -1 is not one of"),
    (lambda: seqpar.shard(torch.zeros(4), PLAN, 0, side="keys"), "side must be"),
)


@pytest.mark.parametrize(("make", "message"), SHARDS, ids=[m[:40] for _, m in SHARDS])
def test_bad_shards_are_named(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def arguments_of(comm: Comm) -> dict[str, object]:
    """A good call of attention, [q, k, v] with gradients, on any number of ranks."""
    plan = Plan(Mask([9, 5]), Layout.striped(14, comm.size))
    q, k, v, *_ = inputs(plan, (4, 2), (4, 4), 0)
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in (q, k, v)]
    return dict(zip("qkv", mine, strict=True)) | {"plan": plan}


def sparse_last(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


def each(names: str, change: Callable[[Tensor], object]) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda a: a | {name: change(a[name]) for name in names}


def given(**options: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda a: a | options


Bad = tuple[Callable[[dict], dict], type[Exception], str]
BAD: dict[str, Bad] = {
    "rows": (each("q", lambda q: q[:-1]), ValueError, r"q on rank \d must have \d+ rows.*got \d"),
    "heads first": (each("qkv", lambda x: x.transpose(0, 1)), ValueError, r"them at dim 1; give \[rows, heads, dim\]"),
    "key rows": (each("kv", lambda x: torch.cat([x, x])), ValueError, r"k and v on rank \d must have"),
    "k without v": (each("k", lambda k: k[:-1]), ValueError, r"expected .* got q \["),
    "mixed dtypes": (each("v", Tensor.float), ValueError, "one dtype, got torch.float64, torch.float64, torch.float32"),
    "integers": (each("qkv", lambda x: x.detach().long()), NotImplementedError, "torch.int64"),
    "eight bits": (each("qkv", lambda x: x.detach().to(torch.float8_e5m2)), NotImplementedError, "float8"),
    "complex": (each("qkv", lambda x: x.detach().to(torch.complex64)), NotImplementedError, "complex64"),
    "devices": (each("k", lambda k: k.to("meta")), ValueError, "one device, got cpu, meta, cpu"),
    "no values": (each("qkv", lambda x: x.to("meta")), NotImplementedError, "meta device"),
    "not packed": (each("q", lambda q: q[None]), ValueError, r"packed \[rows, heads, dim\], got q \[1, "),
    "heads": (each("kv", lambda x: x.repeat(1, 3, 1)[:, :3]), ValueError, "multiple of key heads, got 4 and 3"),
    "no heads": (each("q", lambda q: q[:, :0]), ValueError, "expected q"),
    "no dims": (each("qk", lambda x: x[..., :0]), ValueError, "expected q"),
    "head dims": (each("q", lambda q: q[..., :3].contiguous()), ValueError, r"expected .*got q \[\d+, 4, 3\]"),
    "strides": (each("k", sparse_last), ValueError, r"stride 1.*contiguous\(\)"),
    "no tensor": (given(q=None), TypeError, "q must be a tensor, got NoneType None"),
    "numpy": (each("v", lambda v: v.detach().numpy()), TypeError, "v must be a tensor, got ndarray"),
    "list of sinks": (given(sinks=[0.0] * 4), TypeError, r"sinks must be a tensor, got list \[0.0"),
    "list of slopes": (given(alibi_slopes=[0.5] * 4), TypeError, "alibi_slopes must be a tensor, got list"),
    "text": (given(softcap="1e"), TypeError, "softcap must be a number, got '1e'"),
    "ranks": (given(plan=Plan(Mask([9, 5]), Layout.contiguous(14, 7))), ValueError, r"is for 7 ranks, the comm has \d"),
    "no plan": (given(plan=None), ValueError, "expected a plan and a comm, .*got None with a comm"),
    "softcap": (given(softcap=-1.0), ValueError, "softcap must be .*got -1.0"),
    "softcap nan": (given(softcap=math.nan), ValueError, "softcap must be .*got nan"),
    "scale": (given(scale=math.inf), ValueError, "scale must be finite in the precision of scores, got inf"),
    "no seed": (given(dropout_p=0.1), ValueError, "dropout_p=0.1 needs a dropout_seed"),
    "p": (given(dropout_p=1.0, dropout_seed=0), ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    "p nan": (given(dropout_p=math.nan, dropout_seed=0), ValueError, "dropout_p must be"),
    "seed": (given(dropout_p=0.1, dropout_seed=0.5), ValueError, "dropout_seed must be an integer, got 0.5"),
    "sinks": (given(sinks=torch.zeros(3)), ValueError, r"sinks must be floating point \[4\].*got torch.float32\[3\]"),
    "integer sinks": (given(sinks=torch.zeros(4).long()), ValueError, "sinks must be floating point"),
    "sinks' device": (given(sinks=torch.zeros(4, device="meta")), ValueError, "must be .* on cpu, got .* on meta"),
    "slopes": (given(alibi_slopes=torch.zeros(4, 1)), ValueError, "alibi_slopes must be"),
    "slopes' gradient": (given(alibi_slopes=torch.zeros(4).requires_grad_()), NotImplementedError, "have no gradient"),
    "kernel": (given(kernel="cutlass"), ValueError, "kernel must be auto or one of .*, got 'cutlass'"),
    "accuracy": (given(accuracy="bf16"), ValueError, "accuracy must be 'exact' or 'fast', got 'bf16'"),
    "accuracy of a kernel": (given(accuracy="fast", kernel="blockwise"), ValueError, "leave out one of them"),
}  # fmt: skip


Attempt = tuple[str, str, int, bool]  # kind and text of an error, bytes moved, and whether the next call works


def attempt(comm: Comm, table: str, name: str, culprits: list[int]) -> Attempt:
    """What a rank gets if some ranks make another call, bytes moved by it, and whether the next call works."""
    good = arguments_of(comm)
    change = {"bad": BAD, "differ": DIFFER}[table][name][0]
    made = change(dict(good)) if comm.rank in culprits else dict(good)
    tensors = [made.pop(n) for n in ("q", "k", "v", "plan")]
    try:
        seqpar.attention(*tensors, comm, **made)
        kind, text = "none", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    moved = comm.stats.bytes_sent + comm.stats.bytes_received
    out = seqpar.attention(*(good[n] for n in ("q", "k", "v", "plan")), comm)
    out.sum().backward()
    return kind, text, moved, bool(torch.isfinite(good["k"].grad).all())


def assert_refused(results: list[Attempt], name: str, culprits: list[int]) -> None:
    _, expected, message = BAD[name]
    for rank, (kind, text, moved, works) in enumerate(results):
        assert moved == 0 and works
        assert re.search(message, text), text
        if rank in culprits:
            assert kind == expected.__name__, (kind, text)
        else:
            assert kind == "ValueError", (kind, text)
            assert f"attention: rank {culprits[0]} refused its arguments" in text


@pytest.mark.parametrize("option, value", [("softcap", 1e-50), ("softcap", 1e39), ("scale", -1e39)])
def test_numbers_beyond_the_precision_of_scores(option: str, value: float) -> None:
    """A kernel would take a softcap that rounds to 0 for none."""
    x, plan = torch.randn(6, 2, 4), Plan(Mask([6]), Layout.contiguous(6, 1))
    with pytest.raises(ValueError, match=f"{option} must be finite .*got {re.escape(str(value))} for torch.float32"):
        seqpar.attention(x, x, x, plan, LocalComm(), **{option: value})
    assert seqpar.attention(x.double(), x.double(), x.double(), plan, LocalComm(), **{option: value}).shape == x.shape


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_on_all_ranks_or_one(name) -> None:
    for ranks, culprits in ((1, [0]), (2, [0, 1]), (4, [2])):
        assert_refused(run_threads(ranks, attempt, "bad", name, culprits), name, culprits)


@pytest.mark.parametrize("name", ["rows", "devices", "no tensor", "integers", "slopes' gradient"])
def test_bad_arguments_on_one_process(name) -> None:
    assert_refused(run_processes(2, attempt, "bad", name, [1]), name, [1])


def test_what_is_no_comm_or_no_plan_is_named() -> None:
    a = arguments_of(LocalComm())
    q, k, v, plan = (a[n] for n in ("q", "k", "v", "plan"))
    square = torch.zeros(2, 2)
    for comm in ("x", None):
        calls = {
            "switch": lambda comm=comm: seqpar.switch(square, comm, split_dim=0, concat_dim=1),
            "relayout": lambda comm=comm: seqpar.relayout(q, comm, src=plan.layout, dst=plan.layout),
            "unshard": lambda comm=comm: seqpar.unshard(q, plan, comm),
        }
        for name, call in calls.items():
            with pytest.raises(TypeError, match=f"{name} got {comm!r} for its comm; give it"):
                call()
    with pytest.raises(TypeError, match="attention got 'x' for its comm"):
        seqpar.attention(q, k, v, plan, "x")
    with pytest.raises(ValueError, match="attention: expected a plan and a comm, .* got Plan.* alone"):
        seqpar.attention(q, k, v, plan)
    with pytest.raises(ValueError, match="attention: expected a plan and a comm, .* got None alone"):
        seqpar.attention(q, k, v, None)
    with pytest.raises(TypeError, match="shard takes a tensor, got ndarray"):
        seqpar.shard(np.zeros((14, 2)), plan, 0)
    with pytest.raises(TypeError, match="expected a plan, got None"):
        seqpar.shard(torch.zeros(14, 2), None, 0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_changed_in_place_after_forward_is_named_by_autograd(name, ranks) -> None:
    def rank(comm: Comm) -> None:
        plan = Plan(Mask([9, 5]), Layout.contiguous(14, comm.size))
        mine = {
            n: seqpar.shard(x, plan, comm.rank).requires_grad_() for n, x in zip("qkv", inputs(plan, (4, 2), (4, 4), 0))
        }
        out = seqpar.attention(*mine.values(), plan, comm)
        with torch.no_grad():
            mine[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    run_threads(ranks, rank)


def test_double_backward_is_refused() -> None:
    def twice(comm: Comm) -> str:
        a = arguments_of(comm)
        out = seqpar.attention(a["q"], a["k"], a["v"], a["plan"], comm)
        with pytest.raises(NotImplementedError, match="no double backward.*create_graph"):
            torch.autograd.grad(out.sum(), a["q"], create_graph=True)
        return "refused"

    assert run_threads(1, twice) == ["refused"]
    assert run_threads(3, twice) == ["refused"] * 3


def several_gradients(comm: Comm) -> list[str]:
    said = []
    for name, verb in verbs_of(comm).items():
        x = torch.ones(6, 2, 4, requires_grad=True)
        y = verb(x)
        y = y[0] if isinstance(y, tuple) else y
        with pytest.raises(NotImplementedError) as error:
            torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
        said.append(f"{name}: {error.value}")
    return said


def test_several_gradients_at_once_are_refused() -> None:
    for each in run_processes(2, several_gradients):
        assert len(each) == len(verbs_of(LocalComm()))
        assert all("has no backward with is_grads_batched=True" in text for text in each), each


def test_learned_numbers_are_refused_before_their_gradient_is_lost() -> None:
    p, comm = torch.ones((), requires_grad=True), LocalComm()
    plan = Plan(Mask([6]), Layout.contiguous(6, 1))
    q, w = torch.ones(6, 2, 4), torch.ones(3, 4)
    with pytest.raises(NotImplementedError, match="scale has no gradient; multiply q by it, and give scale=1.0"):
        seqpar.attention(q, q, q, plan, comm, scale=p)
    with pytest.raises(NotImplementedError, match="softcap has no gradient; detach it"):
        seqpar.attention(q, q, q, plan, comm, softcap=p)
    seqpar.attention(q, q, q, plan, comm, scale=p.detach(), softcap=p.detach())
    x, labels = torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)
    for name in ("valid", "label_smoothing", "z_loss", "softcap"):
        with pytest.raises(NotImplementedError, match=f"linear_cross_entropy: {name} has no gradient; detach it"):
            linear_cross_entropy(x, w, labels, **{"valid": 6, name: p})
    for name in ("temperature", "softcap"):
        with pytest.raises(NotImplementedError, match=f"token_log_probs: {name} has no gradient; detach it"):
            token_log_probs(x, w, labels, **{name: p})


def test_a_learned_scale_by_way_of_the_queries() -> None:
    def on_a_rank(comm: Comm) -> Tensor:
        a, p = arguments_of(comm), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        out = seqpar.attention(a["q"] * p, a["k"], a["v"], a["plan"], comm, scale=1.0)
        out.square().sum().backward()
        return p.grad

    torch.testing.assert_close(sum(run_threads(3, on_a_rank)), run_threads(1, on_a_rank)[0])


def log_probs(x: Tensor, w: Tensor, comm: Comm) -> Tensor:
    return token_log_probs(x, w, torch.zeros(len(x), dtype=torch.int64)).sum()


def linear_loss(x: Tensor, w: Tensor, comm: Comm) -> Tensor:
    return linear_cross_entropy(x, w, torch.zeros(len(x), dtype=torch.int64), valid=len(x))


def begun_ahead(x: Tensor, w: Tensor, comm: Comm) -> Tensor:
    space = dsp.Space({"t": 2, "s": 4}, comm)
    (y,) = dsp.begin_switch([(x @ w.t()).tanh()], space, ["t s"], "t", "s").wait()
    return y.square().sum()


def ended(x: Tensor, w: Tensor, comm: Comm) -> Tensor:
    space = dsp.Space({"t": 2}, comm)
    x = dsp.split(x, space, "t c", "t", grad="replicated")
    return dsp.gather((x @ w.t()).tanh(), space, "t c", "t", grad="replicated").square().sum()


@pytest.mark.parametrize("verb", [log_probs, linear_loss, begun_ahead, ended])
def test_a_second_derivative_that_also_flows_another_way_is_refused(verb: Any) -> None:
    """PyTorch would leave out the part through the verb, without a word."""

    def on_a_rank(comm: Comm) -> str:
        x, w = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        w = torch.cat([w, w]).detach().requires_grad_()
        loss = verb(x[: 1 if verb is begun_ahead else 2], w, comm)
        with pytest.raises(NotImplementedError, match="no double backward; call backward without create_graph=True"):
            torch.autograd.grad(loss + (w * x.sum()).sum(), x, create_graph=True)
        return "refused"

    assert run_threads(2, on_a_rank) == ["refused"] * 2


def test_strides_that_cost_nothing_are_taken() -> None:
    plan = Case("packed", "contiguous", "fetch", 1, 1, (9, 4)).plan()
    q, k, v, *_ = inputs(plan, (4, 2), (4, 4), 0)
    whole = torch.cat([k, v], dim=1)  # as a fused projection gives them
    wide = q.transpose(0, 1).contiguous().transpose(0, 1)
    expected = seqpar.attention(q, k, v, plan, LocalComm())
    assert torch.equal(seqpar.attention(wide, whole[:, :2], whole[:, 2:], plan, LocalComm()), expected)
    one = torch.zeros(13, 2, 2)[:, :, ::2]  # a dim of 1 has no stride
    assert seqpar.attention(one, one, one, plan, LocalComm()).shape == (13, 2, 1)


DIFFER: dict[str, tuple[Callable[[dict], dict], str, str]] = {
    "plan": (lambda a: a | {"plan": Plan(a["plan"].mask, a["plan"].layout, transport="ring")}, "plan", ""),
    "dtype": (each("qkv", lambda x: x.detach().float().requires_grad_()), "dtype", "torch.float32 on rank 1"),
    "heads": (each("q", lambda q: q.repeat(1, 2, 1)), "heads", "8 on rank 1"),
    "key heads": (each("kv", lambda x: x[:, :1]), "kv_heads", "1 on rank 1"),
    "dim": (each("qk", lambda x: x[..., :3].contiguous()), "dim", "3 on rank 1"),
    "v_dim": (each("v", lambda v: v[..., :2].contiguous()), "v_dim", "2 on rank 1"),
    "scale": (given(scale=0.25), "scale", "0.25 on rank 1"),
    "softcap": (given(softcap=2.0), "softcap", "2.0 on rank 1"),
    "dropout": (given(dropout_p=0.5, dropout_seed=7), "dropout_p", "0.5 on rank 1"),
    "kernel": (given(kernel="reference"), "kernel", "'reference' on rank 1"),
    "accuracy": (given(accuracy="fast"), "accuracy", "'fast' on rank 1"),
    "return_lse": (given(return_lse=True), "return_lse", "True on rank 1"),
    "deterministic": (given(deterministic=False), "deterministic", "False on rank 1"),
    "sinks": (given(sinks=torch.zeros(4)), "sinks", "True on rank 1"),
    "slopes": (given(alibi_slopes=torch.zeros(4)), "alibi_slopes", "True on rank 1"),
    "q's gradient": (each("q", Tensor.detach), "q requires grad", "False on rank 1"),
    "keys' gradient": (each("kv", Tensor.detach), "k or v requires grad", "False on rank 1"),
}


def assert_disagreed(results: list[Attempt], name: str) -> None:
    _, fact, shown = DIFFER[name]
    others = "on rank 0" if len(results) == 2 else "on ranks 0, 2"
    for kind, text, moved, works in results:
        assert (kind, moved, works) == ("ValueError", 0, True), text
        assert f"ranks differ in {fact}: " in text
        assert shown in text and "on rank 1" in text and others in text
        assert text == results[0][1]


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_differ_fail_alike(name) -> None:
    assert_disagreed(run_threads(3, attempt, "differ", name, [1]), name)


@pytest.mark.parametrize("name", ["plan", "heads", "keys' gradient"])
def test_processes_that_differ_fail_alike(name) -> None:
    assert_disagreed(run_processes(2, attempt, "differ", name, [1]), name)


def seeds(comm: Comm, p: float) -> str:
    a = arguments_of(comm)
    with pytest.raises(ValueError, match="differ in dropout_seed: 5 on ranks 0, 2; 6 on rank 1") as raised:
        seqpar.attention(a["q"], a["k"], a["v"], a["plan"], comm, dropout_p=p, dropout_seed=5 + comm.rank % 2)
    assert comm.stats.bytes_sent == 0
    return str(raised.value)


def test_ranks_that_differ_in_the_seed_fail_alike() -> None:
    assert len(set(run_threads(3, seeds, 0.5))) == 1


def spelt(comm: Comm) -> Tensor:
    a = arguments_of(comm)
    numpy = dict(
        dropout_p=np.float64(0.5), dropout_seed=np.int64(2**40), scale=np.float32(0.5), softcap=2, return_lse=0
    )
    plain = dict(dropout_p=0.5, dropout_seed=2**40, scale=0.5, softcap=2.0, return_lse=False)
    return seqpar.attention(a["q"], a["k"], a["v"], a["plan"], comm, **(numpy if comm.rank == 1 else plain))


def test_equal_values_of_other_types_do_not_differ() -> None:
    assert all(torch.isfinite(x).all() for x in run_threads(2, spelt))


def sinks_gradient(comm: Comm) -> None:
    a = arguments_of(comm)
    tensors = [a[n].detach() for n in "qkv"]
    with pytest.raises(ValueError, match="differ in sinks require grad: False on rank 0; True on rank 1"):
        seqpar.attention(*tensors, a["plan"], comm, sinks=torch.zeros(4, requires_grad=comm.rank == 1))
    with torch.no_grad():  # where none is made it is not asked for
        seqpar.attention(*tensors, a["plan"], comm, sinks=torch.zeros(4, requires_grad=comm.rank == 1))


def test_ranks_that_differ_in_the_gradient_of_sinks_fail_alike() -> None:
    run_threads(2, sinks_gradient)


def remembered(comm: Comm) -> tuple[str, str]:
    """A rank whose arguments are bad after the comm has stopped comparing them call by call."""
    comm.check_every = "batch"
    a = arguments_of(comm)
    for _ in range(2):
        seqpar.attention(a["q"], a["k"], a["v"], a["plan"], comm)
    q = a["q"][:-1] if comm.rank == 1 else a["q"]
    try:
        seqpar.attention(q, a["k"], a["v"], a["plan"], comm)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_a_bad_call_after_the_comparison_ends_all_ranks() -> None:
    (kind, text), (own, why) = run_processes(2, remembered)
    assert own == "ValueError" and "q on rank 1 must have" in why
    assert kind == "PeerError" and "rank 1" in text


X, SQUARE, SHARES = torch.ones(6, 2), torch.ones(6, 6), [2, 2, 2]
SIX, OTHER = Plan(Mask([6]), Layout.contiguous(6, 3)), Layout.striped(6, 3)
MOVES: dict[str, Callable[..., Tensor]] = {
    "relayout": lambda comm, x=X, dst=OTHER: seqpar.relayout(x[:2], comm, src=SIX.layout, dst=dst),
    "unshard": lambda comm, x=X, plan=SIX, **options: seqpar.unshard(x[:2], plan, comm, **options),
    "fetch": lambda comm, x=X, plan=SIX, **options: seqpar.fetch(x[:2], plan, comm, **options),
    "fetch_all": lambda comm, xs=(X,): seqpar.fetch_all([x[:2] for x in xs] if type(xs) is tuple else xs, SIX, comm)[0],
    "switch": lambda comm, x=SQUARE, **options: seqpar.switch(x, comm, **{"split_dim": 0, "concat_dim": 1} | options),
}
WRONG = (
    ("relayout", {"x": X[:1]}), ("relayout", {"x": X[:, :1]}), ("relayout", {"x": X.double()}),
    ("relayout", {"x": X.numpy()}), ("relayout", {"dst": Layout.contiguous(8, 3)}),
    ("relayout", {"dst": Layout.contiguous(6, 2)}), ("relayout", {"dst": SIX.layout}), ("relayout", {"dst": None}),
    ("unshard", {"x": X[:1]}), ("unshard", {"dim": 2}), ("unshard", {"side": "keys"}), ("unshard", {"x": X[:, :1]}),
    ("unshard", {"x": X.clone().requires_grad_()}), ("unshard", {"plan": Plan(Mask([6]), Layout.contiguous(6, 2))}),
    ("unshard", {"plan": None}), ("unshard", {"x": X.numpy()}),
    ("fetch", {"x": X[:1]}), ("fetch", {"x": X[:, :1]}), ("fetch", {"x": X.double()}), ("fetch", {"x": X.numpy()}),
    ("fetch", {"x": X.clone().requires_grad_()}), ("fetch", {"plan": Plan(Mask([6], causal=False), SIX.layout)}),
    ("fetch", {"plan": Plan(Mask([6]), Layout.contiguous(6, 2))}), ("fetch", {"plan": None}), ("fetch", {"rows": 99}),
    ("fetch_all", {"xs": (X, X)}), ("fetch_all", {"xs": X[:2]}), ("fetch_all", {"xs": ()}),
    ("switch", {"concat_dim": -2}), ("switch", {"concat_dim": 2}), ("switch", {"split_dim": "0"}),
    ("switch", {"x": SQUARE[:5]}), ("switch", {"x": SQUARE.int()}), ("switch", {"x": None}),
    ("switch", {"sizes": ([2, 2, 1], SHARES)}), ("switch", {"sizes": ([8, -2, 0], SHARES)}),
    ("switch", {"sizes": ([3, 3], SHARES)}), ("switch", {"sizes": (SHARES, [2, 3, 2])}),
    ("switch", {"sizes": ([1, 3, 2], SHARES)}), ("switch", {"sizes": (2, 2)}),
    ("switch", {"sizes": ([2.5, 2.2, 1.9], SHARES)}),
)  # fmt: skip


def bad_move(comm: Comm, verb: str, change: dict[str, object] | str) -> tuple[str, str, int]:
    """What rank 0..2 get when rank 1 calls a verb wrongly, or another one; then the right call must work."""
    try:
        if comm.rank != 1:
            MOVES[verb](comm)
        elif isinstance(change, str):
            MOVES[change](comm)
        else:
            MOVES[verb](comm, **change)
        kind, text = "none", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    moved, reach = comm.stats.bytes_sent + comm.stats.bytes_received, 2 * (comm.rank + 1)
    assert [move(comm).shape for move in MOVES.values()] == [(2, 2), (6, 2), (reach, 2), (reach, 2), (2, 18)]
    return kind, text, moved


@pytest.mark.parametrize(("verb", "change"), [*WRONG, ("relayout", "unshard"), ("fetch", "unshard")])
def test_bad_calls_of_other_verbs_raise_on_all_ranks(verb, change) -> None:
    for rank, (kind, text, moved) in enumerate(run_threads(3, bad_move, verb, change)):
        assert kind == "ValueError" or (rank == 1 and kind == "TypeError"), (kind, text)
        assert moved == 0
        assert "rank 1" in text or rank == 1


def test_verbs_take_a_ranks_part_of_a_dtensor() -> None:
    with default_group():
        x = DTensor.from_local(torch.ones(4, 2, 4), DeviceMesh("cpu", [0]), [Replicate()])
        plan, alone = Plan(Mask([4]), Layout.contiguous(4, 1)), LocalComm()
        verbs: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: seqpar.attention(x, x, x, plan, alone),
            lambda x: seqpar.switch(x, alone, split_dim=1, concat_dim=0),
            lambda x: seqpar.unshard(x, plan, alone),
            lambda x: all_sum(x, alone),
        )
        for verb in verbs:
            with pytest.raises(NotImplementedError, match=r"got a DTensor .* give x.to_local\(\), and a comm of ranks"):
                verb(x)
            assert torch.equal(verb(x.to_local()), torch.ones(4, 2, 4))


def verbs_of(comm: Comm) -> dict[str, Callable[[Tensor], object]]:
    """Every verb of one tensor [6, 2, 4] on a rank of two, with a plan that fits it."""
    plan = Plan(Mask([7, 5]), Layout.contiguous(12, 2))
    other = Layout.striped(12, 2)
    return {
        "attention": lambda x: seqpar.attention(x, x, x, plan, comm),
        "switch": lambda x: seqpar.switch(x, comm, split_dim=1, concat_dim=0),
        "relayout": lambda x: seqpar.relayout(x, comm, src=plan.layout, dst=other),
        "unshard": lambda x: seqpar.unshard(x, plan, comm),
        "fetch": lambda x: seqpar.fetch(x, plan, comm),
        "all_sum": lambda x: all_sum(x, comm),
        "token_mean": lambda x: token_mean(x, comm),
        "shift": lambda x: recurrent.shift(x, plan, comm),
        "linear_attention": lambda x: recurrent.linear_attention(x, x, x, plan, comm),
    }


def summed(y: Tensor | tuple[Tensor, ...]) -> Tensor:
    return sum(part.sum() for part in y) if isinstance(y, tuple) else y.sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], object], Tensor], object]] = {
    "grad": lambda verb, x: torch.func.grad(lambda x: summed(verb(x)))(x),
    "vmap": lambda verb, x: torch.func.vmap(verb)(x[None]),
    "jvp": lambda verb, x: torch.func.jvp(verb, (x,), (x,)),
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested tensor": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "sparse_coo": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "uint4": lambda x: x.byte().view(torch.uint4),
}


def unusual(comm: Comm) -> dict[str, str]:
    """The errors of every verb for unusual tensors and in transforms; afterwards the right call must work."""
    x, found = torch.ones(6, 2, 4), {}
    for name, verb in verbs_of(comm).items():
        ways = {what: partial(transform, verb) for what, transform in TRANSFORMS.items()}
        ways |= {what: lambda x, verb=verb, make=make: verb(make(x)) for what, make in KINDS.items()}
        for what, way in ways.items():
            try:
                way(x)
                found[f"{name} {what}"] = "nothing was refused"
            except Exception as error:
                found[f"{name} {what}"] = f"{type(error).__name__}: {error}"
        verb(x)
    return found


def test_tensors_without_rows_of_memory_are_refused_by_every_verb() -> None:
    for found in run_processes(2, unusual):  # threads share the levels of forward-mode derivatives
        for way, text in found.items():
            transform = way.split()[1] in TRANSFORMS
            expected = "inside a transform of torch.func" if transform else "expected dense tensors"
            assert text.startswith("NotImplementedError: ") and expected in text, (way, text)


def in_a_transform(comm: Comm) -> dict[str, str]:
    """The errors, in a transform, of calls that are no verbs of one tensor; the comm lives afterwards."""
    plan, found = Plan(Mask([7, 5]), Layout.contiguous(12, 2)), {}

    def summed_gradients() -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        sync_gradients([weight], comm)

    def block(inside: Callable[[], object]) -> None:
        with seqpar.parallel(plan, comm):
            inside()

    labels, weight = torch.zeros(6, dtype=torch.long), torch.ones(9, 8)
    calls: dict[str, Callable[[Tensor], object]] = {
        "agree": lambda x: comm.agree("agree", {"heads": 1}),
        "gather": lambda x: comm.gather("gather", 1),
        "sync_gradients": lambda x: summed_gradients(),
        "share": lambda x: seqpar.data.share({"input_ids": [torch.arange(5)]}, comm),
        "Mean.result": lambda x: Mean().result(comm),
        "halo": lambda x: recurrent.halo(x, plan, comm, reach=1),
        "token_log_probs": lambda x: token_log_probs(x, weight, labels),
        "linear_cross_entropy": lambda x: linear_cross_entropy(x, weight, labels, valid=12),
        "attention": lambda x: block(lambda: Attention()(*3 * [x.view(6, 2, 4)])),
        "parallel": lambda x: block(lambda: None),  # an agreement, as the block before ended with an error
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=r"inside a transform of torch\.func") as raised:
            torch.func.grad(lambda x, call=call: (call(x), x.sum())[1])(torch.ones(6, 8))
        found[name] = str(raised.value)
    with seqpar.parallel(plan, comm):
        assert Attention()(*3 * [torch.ones(6, 2, 4)]).sum() == 48
    return found


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_sends_nothing_works_in_a_transform(name: str) -> None:
    comm = LocalComm()
    plan = Plan(Mask([7, 5]), Layout.contiguous(12, 1))

    def rows(x: Tensor) -> Tensor:
        seqpar.bind(plan, comm)
        with seqpar.parallel(plan, comm):
            return seqpar.shard(x, plan, 0) ** 2

    x = torch.arange(24.0).view(12, 2)
    expected = {"grad": 2 * x, "vmap": x[None] ** 2, "jvp": (x**2, 2 * x**2)}[name]
    torch.testing.assert_close(TRANSFORMS[name](rows, x), expected)
    torch.testing.assert_close(seqpar.shard(x, plan, 0), x)


def test_calls_in_a_transform_are_named_and_the_comm_lives() -> None:
    for found in run_processes(2, in_a_transform):
        assert all(name in text.split(" inside")[0] for name, text in found.items())


def test_an_unusual_tensor_of_one_rank_is_refused_on_both() -> None:
    def on_a_rank(comm: Comm) -> dict[str, str]:
        found, x = {}, torch.ones(6, 2, 4)
        for name, verb in verbs_of(comm).items():
            for kind, make in KINDS.items():
                try:
                    verb(x if comm.rank else make(x))
                except Exception as error:
                    found[f"{name} {kind}"] = str(error)
            verb(x)
        return found

    first, second = run_threads(2, on_a_rank)
    assert len(first) == len(verbs_of(LocalComm())) * len(KINDS)
    for way, text in first.items():
        assert (
            "expected dense tensors" in text
            and f"rank 0 refused its arguments: NotImplementedError: {text}" in second[way]
        )


def dead(comm: Comm) -> bool:
    if comm.rank == 0:
        comm.abort("a test")
    a = arguments_of(comm)
    with pytest.raises(PeerError, match="a test.*the comm is dead"):
        while True:
            seqpar.attention(a["q"], a["k"], a["v"], a["plan"], comm)
    for call in (
        lambda: seqpar.switch(torch.ones(2, 2), comm, split_dim=0, concat_dim=1),
        lambda: seqpar.unshard(a["q"], a["plan"], comm),
        lambda: seqpar.fetch(a["q"], a["plan"], comm),
        lambda: seqpar.relayout(a["q"], comm, src=a["plan"].layout, dst=a["plan"].layout),
    ):
        with pytest.raises(PeerError, match="a test"):
            call()
    return True


def test_every_verb_of_a_dead_comm_says_so() -> None:
    assert run_threads(2, dead) == [True, True]
    assert np.all(run_processes(2, dead))
