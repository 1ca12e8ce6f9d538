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


FACTS = (
    (lambda: Mask([]), "lengths must be a non-empty sequence"),
    (lambda: Mask([0, 3, 5]), "lengths ascend from 0 like cu_seqlens"),
    (lambda: Mask([3, -2]), "lengths must be at least 0, got -2 for document 1"),
    (lambda: Mask([3.5]), "lengths must be .* integers"),
    (lambda: Mask(torch.tensor([5.0, 3.0]).bfloat16()), "lengths must be .* integers"),
    (lambda: Mask([3, 2], kv_lengths=[3]), "2 documents and kv_lengths 1"),
    (lambda: Mask([3], kv_lengths=[0]), "kv_lengths must hold at least one token"),
    (lambda: Mask([3], window=(-1, None)), r"window must be .*got \(-1, None\)"),
    (lambda: Mask([3], window=(1, 1)), "causal mask sees no key to the right"),
    (lambda: Mask.from_bounds([0, 2], [1, 1]), r"query 1 has bounds \[2, 1\)"),
    (lambda: Mask.from_bounds([0, 0], [1, 3]), r"query 1 has bounds \[0, 3\), expected 0 <= lo <= hi <= 2"),
    (lambda: Mask.from_bounds([0.0], [1.0]), "integer arrays"),
    (lambda: Layout([]), "at least one rank"),
    (lambda: Layout([[], []]), "at least one token"),
    (lambda: Layout([[0, 1], [1, 2]]), "token 1 is held by rank 0 and by rank 1"),
    (lambda: Layout([[0, 0]]), "token 0 is held by rank 0 and by rank 0"),
    (lambda: Layout([[0, 1], [3]]), "no rank holds token 2"),
    (lambda: Layout([[0], [-1]]), "rank 1 holds position -1"),
    (lambda: Layout([[0.0, 1.0]]), "integer positions"),
    (lambda: Layout.contiguous(0, 2), "tokens must be .*got 0"),
    (lambda: Layout.contiguous(4, -2), "ranks must be .*got -2"),
    (lambda: Layout.zigzag([4, -1], 2), "lengths must be at least 0"),
    (lambda: Layout.striped(4, 2, block=0), "block must be .*got 0"),
    (lambda: Layout.contiguous(4, 2).positions(2), "rank 2 is not one of the layout's 2 ranks"),
    (lambda: Plan(Mask([4]), Layout.contiguous(5, 2)), "layout holds 5 tokens, the mask 4"),
    (lambda: Plan(Mask([4], kv_lengths=[6]), Layout.contiguous(4, 2)), "4 queries and 6 keys; give a kv_layout"),
    (
        lambda: Plan(Mask([4], kv_lengths=[6]), Layout.contiguous(4, 2), kv_layout=Layout.contiguous(4, 2)),
        "kv_layout holds 4 tokens, the mask has 6",
    ),
    (
        lambda: Plan(Mask([4]), Layout.contiguous(4, 2), kv_layout=Layout.contiguous(4, 3)),
        "kv_layout has 3 ranks, the layout 2",
    ),
    (
        lambda: Plan(Mask([4]), Layout.contiguous(4, 2), transport="carrier pigeon"),
        "fetch, ring, double_ring, gather, got 'carrier pigeon'",
    ),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), ulysses=3), "divide the 4 ranks, got 3"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), ulysses=0), "Ulysses width must .*got 0"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), ulysses=-2), "Ulysses width must .*got -2"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), ulysses=1.5), "Ulysses width must .*got 1.5"),
    (lambda: Plan(Mask([2, 2]), Layout.contiguous(4, 4), ulysses=[1.5, 2.5]), "Ulysses width must .*got 1.5"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), ulysses=[1, 2]), "2 widths for 1 documents"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), node=3), "node must divide the 4 ranks, got 3"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 4), transport="ring", node=2, ulysses=4), "divide node=2, got 4"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 2), stage_bytes=0), "stage_bytes must be .*got 0"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 2), rows=[2]), "1 entries for 2 ranks"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 2), rows=[2, 1]), "gives rank 1 1 rows, it holds 2"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 2), rows=[2.0, 2.9]), "rows .*2.9"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 2)).with_mask(Mask([5])), "layout holds 4 tokens, the mask 5"),
    (lambda: Plan(Mask([4]), Layout.contiguous(4, 2)).rows(0, "k"), """side must be "q" or "kv", got 'k'"""),
    (
        lambda: Plan(Mask([4]), Layout.contiguous(4, 2)).bytes(0, heads=2, kv_heads=2, dim=4, dtype="int8"),
        "dtype must be one of float64, .*got 'int8'",
    ),
    (
        lambda: Plan(Mask([4]), Layout.contiguous(4, 2)).bytes(0, heads=3, kv_heads=2, dim=4),
        "multiple of key heads, got 3 and 2",
    ),
    (
        lambda: seqpar.shard(torch.zeros(3), Plan(Mask([4]), Layout.contiguous(4, 2)), 0),
        r"shard along dim 0 of \[3\], expected 4 tokens$",
    ),
    (
        lambda: seqpar.shard(torch.zeros(1, 4), Plan(Mask([4]), Layout.contiguous(4, 2)), 0),
        r"shard along dim 0 of \[1, 4\], expected 4 tokens; give dim=1, which has them$",
    ),
    (lambda: seqpar.shard(torch.zeros(4), Plan(Mask([4]), Layout.contiguous(4, 2)), 2), "rank 2 is not one of"),
    (lambda: seqpar.shard(torch.zeros(4), Plan(Mask([4]), Layout.contiguous(4, 2)), -1), "rank -1 is not one of"),
    (lambda: seqpar.shard(torch.zeros(4), Plan(Mask([4]), Layout.contiguous(4, 2)), 0, side="keys"), "side must be"),
)


@pytest.mark.parametrize(("make", "message"), FACTS, ids=[m[:40] for _, m in FACTS])
def test_bad_facts_are_named(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_not_built_says_so() -> None:
    with pytest.raises(NotImplementedError, match="give one width"):
        Plan(Mask.from_bounds([0, 0], [2, 2], lengths=[1, 1]), Layout.contiguous(2, 2), ulysses=[1, 2])


def arguments_of(comm: Comm) -> dict[str, object]:
    """A good call of attention, [q, k, v] with gradients, on any number of ranks."""
    plan = Plan(Mask([9, 5]), Layout.striped(14, comm.size))
    q, k, v, *_ = inputs(plan, (4, 2), (4, 4), 0)
    mine = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in (q, k, v)]
    return dict(zip("qkv", mine, strict=True)) | {"plan": plan}


def changed(name: str, change: Callable[[Tensor], object]) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda a: a | {name: change(a[name])}


def sparse_last(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


BAD: dict[str, tuple[Callable[[dict], dict], type[Exception], str]] = {
    "rows": (changed("q", lambda q: q[:-1]), ValueError, r"q on rank \d must have \d+ rows.*got \d"),
    "heads first": (
        lambda a: a | {n: a[n].transpose(0, 1) for n in "qkv"},
        ValueError,
        r"q on rank \d must have \d+ rows.*, with them at dim 1; give \[rows, heads, dim\]",
    ),
    "key rows": (lambda a: a | {n: torch.cat([a[n], a[n]]) for n in "kv"}, ValueError, r"k and v on rank \d must have"),
    "k without v": (changed("k", lambda k: k[:-1]), ValueError, r"expected .* got q \["),
    "mixed dtypes": (
        changed("v", lambda v: v.float()),
        ValueError,
        "one dtype, got torch.float64, torch.float64, torch.float32",
    ),
    "integers": (lambda a: a | {n: a[n].detach().long() for n in "qkv"}, NotImplementedError, "torch.int64"),
    "eight bits": (
        lambda a: a | {n: a[n].detach().to(torch.float8_e5m2) for n in "qkv"},
        NotImplementedError,
        "float8",
    ),
    "complex numbers": (
        lambda a: a | {n: a[n].detach().to(torch.complex64) for n in "qkv"},
        NotImplementedError,
        "complex64",
    ),
    "booleans": (lambda a: a | {n: a[n].detach().bool() for n in "qkv"}, NotImplementedError, "torch.bool"),
    "devices": (changed("k", lambda k: k.to("meta")), ValueError, "one device, got cpu, meta, cpu"),
    "no values": (lambda a: a | {n: a[n].to("meta") for n in "qkv"}, NotImplementedError, "meta device"),
    "not packed": (changed("q", lambda q: q[None]), ValueError, r"packed \[rows, heads, dim\], got q \[1, "),
    "heads": (
        lambda a: a | {n: a[n].repeat(1, 3, 1)[:, :3] for n in "kv"},
        ValueError,
        "multiple of key heads, got 4 and 3",
    ),
    "no heads": (changed("q", lambda q: q[:, :0]), ValueError, "expected q"),
    "no dims": (lambda a: a | {n: a[n][..., :0] for n in "qk"}, ValueError, "expected q"),
    "head dims": (changed("q", lambda q: q[..., :3].contiguous()), ValueError, r"expected .*got q \[\d+, 4, 3\]"),
    "strides": (changed("k", sparse_last), ValueError, r"stride 1.*contiguous\(\)"),
    "no tensor": (lambda a: a | {"q": None}, TypeError, "q must be a tensor, got NoneType None"),
    "numpy": (lambda a: a | {"v": a["v"].detach().numpy()}, TypeError, "v must be a tensor, got ndarray"),
    "list of sinks": (lambda a: a | {"sinks": [0.0] * 4}, TypeError, r"sinks must be a tensor, got list \[0.0"),
    "list of slopes": (lambda a: a | {"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes must be a tensor, got list"),
    "text for a number": (lambda a: a | {"softcap": "1e"}, TypeError, "softcap must be a number, got '1e'"),
    "another plan": (
        lambda a: a | {"plan": Plan(Mask([9, 5]), Layout.contiguous(14, 7))},
        ValueError,
        r"plan is for 7 ranks, the comm has \d",
    ),
    "no plan": (lambda a: a | {"plan": None}, ValueError, "expected a plan and a comm, .*got None with a comm"),
    "softcap": (lambda a: a | {"softcap": -1.0}, ValueError, "softcap must be .*got -1.0"),
    "softcap nan": (lambda a: a | {"softcap": math.nan}, ValueError, "softcap must be .*got nan"),
    "softcap inf": (lambda a: a | {"softcap": math.inf}, ValueError, "softcap must be .*got inf"),
    "scale": (
        lambda a: a | {"scale": math.inf},
        ValueError,
        "scale must be finite in the precision of scores, got inf",
    ),
    "no seed": (lambda a: a | {"dropout_p": 0.1}, ValueError, "dropout_p=0.1 needs a dropout_seed"),
    "p": (lambda a: a | {"dropout_p": 1.0, "dropout_seed": 0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    "negative p": (lambda a: a | {"dropout_p": -0.1, "dropout_seed": 0}, ValueError, "dropout_p must be"),
    "p nan": (lambda a: a | {"dropout_p": math.nan, "dropout_seed": 0}, ValueError, "dropout_p must be"),
    "seed": (
        lambda a: a | {"dropout_p": 0.1, "dropout_seed": 0.5},
        ValueError,
        "dropout_seed must be an integer, got 0.5",
    ),
    "sinks": (
        lambda a: a | {"sinks": torch.zeros(3)},
        ValueError,
        r"sinks must be floating point \[4\].*got torch.float32\[3\]",
    ),
    "integer sinks": (
        lambda a: a | {"sinks": torch.zeros(4, dtype=torch.long)},
        ValueError,
        "sinks must be floating point",
    ),
    "sinks' device": (
        lambda a: a | {"sinks": torch.zeros(4, device="meta")},
        ValueError,
        "sinks must be .* on cpu, got .* on meta",
    ),
    "slopes": (lambda a: a | {"alibi_slopes": torch.zeros(4, 1)}, ValueError, "alibi_slopes must be"),
    "slopes' gradient": (
        lambda a: a | {"alibi_slopes": torch.zeros(4).requires_grad_()},
        NotImplementedError,
        "alibi_slopes have no gradient",
    ),
    "kernel": (lambda a: a | {"kernel": "cutlass"}, ValueError, "kernel must be auto or one of .*, got 'cutlass'"),
    "accuracy": (lambda a: a | {"accuracy": "bf16"}, ValueError, "accuracy must be 'exact' or 'fast', got 'bf16'"),
    "accuracy of a kernel": (
        lambda a: a | {"accuracy": "fast", "kernel": "blockwise"},
        ValueError,
        "accuracy='fast' lets kernel='auto' .* kernel='blockwise' is chosen by name already; leave out one of them",
    ),
}


def attempt(comm: Comm, name: str, culprits: list[int]) -> tuple[str, str, int, bool]:
    """What a rank gets if some ranks make a bad call, bytes moved by it, and whether the next call works."""
    made = arguments_of(comm)
    good = {n: made.pop(n) for n in ("q", "k", "v", "plan")}
    change, *_ = BAD[name]
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


def assert_refused(results: list[tuple[str, str, int, bool]], name: str, culprits: list[int]) -> None:
    _, expected, message = BAD[name]
    kinds = [e.__name__ for e in (expected if isinstance(expected, tuple) else (expected,))]
    for rank, (kind, text, moved, works) in enumerate(results):
        assert moved == 0 and works
        assert re.search(message, text), text
        if rank in culprits:
            assert kind in kinds, (kind, text)
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
        assert_refused(run_threads(ranks, attempt, name, culprits), name, culprits)


@pytest.mark.parametrize("name", ["rows", "devices", "no tensor", "integers", "slopes' gradient"])
def test_bad_arguments_on_one_process(name) -> None:
    assert_refused(run_processes(2, attempt, name, [1]), name, [1])


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
    "plan": (lambda a: a | {"plan": replace_transport(a["plan"])}, "plan", ""),
    "dtype": (
        lambda a: a | {n: a[n].detach().float().requires_grad_() for n in "qkv"},
        "dtype",
        "torch.float32 on rank 1",
    ),
    "heads": (lambda a: a | {"q": a["q"].repeat(1, 2, 1)}, "heads", "8 on rank 1"),
    "key heads": (lambda a: a | {n: a[n][:, :1] for n in "kv"}, "kv_heads", "1 on rank 1"),
    "dim": (lambda a: a | {n: a[n][..., :3].contiguous() for n in "qk"}, "dim", "3 on rank 1"),
    "v_dim": (lambda a: a | {"v": a["v"][..., :2].contiguous()}, "v_dim", "2 on rank 1"),
    "scale": (lambda a: a | {"scale": 0.25}, "scale", "0.25 on rank 1"),
    "softcap": (lambda a: a | {"softcap": 2.0}, "softcap", "2.0 on rank 1"),
    "dropout": (lambda a: a | {"dropout_p": 0.5, "dropout_seed": 7}, "dropout_p", "0.5 on rank 1"),
    "kernel": (lambda a: a | {"kernel": "reference"}, "kernel", "'reference' on rank 1"),
    "accuracy": (lambda a: a | {"accuracy": "fast"}, "accuracy", "'fast' on rank 1"),
    "return_lse": (lambda a: a | {"return_lse": True}, "return_lse", "True on rank 1"),
    "deterministic": (lambda a: a | {"deterministic": False}, "deterministic", "False on rank 1"),
    "sinks": (lambda a: a | {"sinks": torch.zeros(4)}, "sinks", "True on rank 1"),
    "slopes": (lambda a: a | {"alibi_slopes": torch.zeros(4)}, "alibi_slopes", "True on rank 1"),
    "q's gradient": (lambda a: a | {"q": a["q"].detach()}, "q requires grad", "False on rank 1"),
    "keys' gradient": (lambda a: a | {n: a[n].detach() for n in "kv"}, "k or v requires grad", "False on rank 1"),
}


def replace_transport(plan: Plan) -> Plan:
    return Plan(plan.mask, plan.layout, transport="ring")


def disagree(comm: Comm, name: str) -> tuple[str, str, int, bool]:
    good = arguments_of(comm)
    made = DIFFER[name][0](dict(good)) if comm.rank == 1 else dict(good)
    try:
        seqpar.attention(*(made.pop(n) for n in ("q", "k", "v", "plan")), comm, **made)
        kind, text = "none", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    moved = comm.stats.bytes_sent + comm.stats.bytes_received
    out = seqpar.attention(good["q"], good["k"], good["v"], good["plan"], comm)
    out.sum().backward()
    return kind, text, moved, bool(torch.isfinite(good["q"].grad).all())


def assert_disagreed(results: list[tuple[str, str, int, bool]], name: str) -> None:
    _, fact, shown = DIFFER[name]
    others = "on rank 0" if len(results) == 2 else "on ranks 0, 2"
    for kind, text, moved, works in results:
        assert (kind, moved, works) == ("ValueError", 0, True), text
        assert f"ranks differ in {fact}: " in text
        assert shown in text and "on rank 1" in text and others in text
        assert text == results[0][1]


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_differ_fail_alike(name) -> None:
    assert_disagreed(run_threads(3, disagree, name), name)


@pytest.mark.parametrize("name", ["plan", "heads", "keys' gradient"])
def test_processes_that_differ_fail_alike(name) -> None:
    assert_disagreed(run_processes(2, disagree, name), name)


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


def bad_verb(comm: Comm, name: str) -> tuple[str, str, int]:
    """What rank 0..2 get when rank 1 calls a verb wrongly; then the right call must work."""
    wrong = comm.rank == 1
    plan = Plan(Mask([7]), Layout.contiguous(7, comm.size))
    other = Layout.striped(7, comm.size)
    x = torch.ones(plan.rows(comm.rank), 2)
    square = torch.ones(6, 2)
    calls: dict[str, Callable[[], Tensor]] = {
        "relayout rows": lambda: seqpar.relayout(x[1:] if wrong else x, comm, src=plan.layout, dst=other),
        "relayout total": lambda: seqpar.relayout(
            x, comm, src=plan.layout, dst=Layout.contiguous(8 if wrong else 7, comm.size)
        ),
        "relayout ranks": lambda: seqpar.relayout(
            x, comm, src=plan.layout, dst=Layout.contiguous(7, 4 if wrong else 3)
        ),
        "relayout layouts": lambda: seqpar.relayout(x, comm, src=plan.layout, dst=plan.layout if wrong else other),
        "relayout none": lambda: seqpar.relayout(x, comm, src=plan.layout, dst=None if wrong else other),
        "relayout dims": lambda: seqpar.relayout(x[:, :1] if wrong else x, comm, src=plan.layout, dst=other),
        "relayout dtype": lambda: seqpar.relayout(x.double() if wrong else x, comm, src=plan.layout, dst=other),
        "relayout scalar": lambda: seqpar.relayout(x.sum() if wrong else x, comm, src=plan.layout, dst=other),
        "unshard rows": lambda: seqpar.unshard(x[1:] if wrong else x, plan, comm),
        "unshard dim": lambda: seqpar.unshard(x, plan, comm, dim=2 if wrong else 0),
        "unshard side": lambda: seqpar.unshard(x, plan, comm, side="keys" if wrong else "q"),
        "unshard dims": lambda: seqpar.unshard(x[:, :1] if wrong else x, plan, comm),
        "unshard grad": lambda: seqpar.unshard(x.clone().requires_grad_(wrong), plan, comm),
        "unshard ranks": lambda: seqpar.unshard(x, Plan(Mask([7]), Layout.contiguous(7, 4)) if wrong else plan, comm),
        "unshard no plan": lambda: seqpar.unshard(x, None if wrong else plan, comm),
        "switch same dims": lambda: seqpar.switch(square, comm, split_dim=0, concat_dim=-2 if wrong else 1),
        "switch dim": lambda: seqpar.switch(square, comm, split_dim=0, concat_dim=2 if wrong else 1),
        "switch share": lambda: seqpar.switch(square[:5] if wrong else square, comm, split_dim=0, concat_dim=1),
        "switch sizes": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=([2, 2, 1] if wrong else [2, 2, 2], [2, 2, 2])
        ),
        "switch negative": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=([8, -2, 0] if wrong else [2, 2, 2], [2, 2, 2])
        ),
        "switch ranks": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=([3, 3] if wrong else [2, 2, 2], [2, 2, 2])
        ),
        "switch concat": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=([2, 2, 2], [2, 3, 2] if wrong else [2, 2, 2])
        ),
        "switch other shares": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=([1, 3, 2] if wrong else [2, 2, 2], [2, 2, 2])
        ),
        "switch dtype": lambda: seqpar.switch(square.int() if wrong else square, comm, split_dim=0, concat_dim=1),
        "relayout numpy": lambda: seqpar.relayout(x.numpy() if wrong else x, comm, src=plan.layout, dst=other),
        "unshard numpy": lambda: seqpar.unshard(x.numpy() if wrong else x, plan, comm),
        "switch text": lambda: seqpar.switch(square, comm, split_dim="0" if wrong else 0, concat_dim=1),
        "switch one size": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=(2, 2) if wrong else ([2, 2, 2], [2, 2, 2])
        ),
        "switch halves": lambda: seqpar.switch(
            square, comm, split_dim=0, concat_dim=1, sizes=([2.5, 2.2, 1.9] if wrong else [2, 2, 2], [2, 2, 2])
        ),
        "switch no tensor": lambda: seqpar.switch(None if wrong else square, comm, split_dim=0, concat_dim=1),
        "another verb": lambda: (
            seqpar.unshard(x, plan, comm) if wrong else seqpar.relayout(x, comm, src=plan.layout, dst=other)
        ),
    }
    try:
        calls[name]()
        kind, text = "none", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    moved = comm.stats.bytes_sent + comm.stats.bytes_received
    seqpar.relayout(x, comm, src=plan.layout, dst=other)
    assert seqpar.unshard(x, plan, comm).shape == (7, 2)
    assert seqpar.switch(square, comm, split_dim=0, concat_dim=1).shape == (2, 6)
    return kind, text, moved


VERBS = (
    "relayout rows",
    "relayout total",
    "relayout ranks",
    "relayout layouts",
    "relayout none",
    "relayout dims",
    "relayout dtype",
    "relayout scalar",
    "unshard rows",
    "unshard dim",
    "unshard side",
    "unshard dims",
    "unshard grad",
    "unshard ranks",
    "unshard no plan",
    "switch same dims",
    "switch dim",
    "switch share",
    "switch sizes",
    "switch negative",
    "switch ranks",
    "switch concat",
    "switch other shares",
    "switch dtype",
    "relayout numpy",
    "unshard numpy",
    "switch text",
    "switch one size",
    "switch halves",
    "switch no tensor",
    "another verb",
)


@pytest.mark.parametrize("name", VERBS)
def test_bad_calls_of_other_verbs_raise_on_all_ranks(name) -> None:
    for rank, (kind, text, moved) in enumerate(run_threads(3, bad_verb, name)):
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
