"""Verbs in compiled models: one graph for all plans and never a stale one, and tickets that live as long as a graph."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import _inductor as inductor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.scheduler import Scheduler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import seqpar
from seqpar import recurrent
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.ops.core import collective_op
from seqpar.ops.core.handles import bind, carried
from seqpar.plan import Plan
from seqpar.testing import run_processes
from seqpar.train import all_sum
from tests.cases import Case

OPS = torch.ops.seqpar
# scale, softcap, dropout_p, seed, deterministic, kernel, accuracy, return_lse, return_max_logit
PLAIN = (None, 0.0, 0.0, None, True, "auto", "exact", False, False)

pytestmark = pytest.mark.usefixtures("no_graphs")


def plans(ranks: int, count: int) -> list[Plan]:
    """Plans that differ in all that they can, numbers of rows included."""
    made = []
    for n in range(count):
        mask = ("packed", "window", "full", "bounds")[n % 4]
        layout = ("zigzag", "striped", "contiguous", "blocks", "arbitrary")[n % 5 if ranks == 1 else n % 4]
        transport = ("fetch", "ring", "gather")[n % 3]
        lengths = (9 + n, 9, 16 + 2 * n)
        made.append(Case(mask, layout, transport, ranks, (1, ranks)[n // 2 % 2], lengths, n, mixed=n % 3 == 1).plan())
    return made


class Layer(nn.Module):
    """Attention with sinks and slopes between two projections, knowing nothing of ranks."""

    def __init__(self, dim: int = 8, heads: int = 4, kv_heads: int = 2, head_dim: int = 4) -> None:
        super().__init__()
        self.heads, self.head_dim = (heads, kv_heads, kv_heads), head_dim
        self.qkv, self.out = nn.Linear(dim, sum(self.heads) * head_dim), nn.Linear(heads * head_dim, dim)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, heads))

    def forward(self, x: Tensor, *plan: object) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        slopes = self.sinks.detach().exp()  # memory that a graph may write over
        out, lse = seqpar.attention(q, k, v, *plan, sinks=self.sinks, alibi_slopes=slopes, return_lse=True)
        return x + self.out(out.flatten(1)) + lse.tanh().sum(-1, keepdim=True).to(x.dtype)


def model(layers: int = 2) -> nn.Module:
    """A small decoder, the same on every rank."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: Tensor, *plan: object) -> Tensor:
            for layer in self.layers:
                x = layer(nn.functional.layer_norm(x, x.shape[1:]), *plan)
            return x

    torch.manual_seed(0)
    return Model().double()


def trained(net: nn.Module, rows: int, *plan: object, dynamic: bool = False) -> list[Tensor]:
    """Output and all gradients."""
    x = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    net.zero_grad()
    out = net(x, *plan)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by", ["objects", "handle"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.sampled(4)
def test_one_graph_serves_all_plans(by, dynamic) -> None:
    comm, net, counter = LocalComm(), model(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for plan in plans(1, 20):
        handle = bind(plan, comm)
        given = (handle,) if by == "handle" else (plan, comm)
        got = trained(compiled, plan.rows(0), *given, dynamic=dynamic)
        assert_equal(got, trained(net, plan.rows(0), plan, comm))
    assert counter.frame_count == (1 if dynamic else 2)


def ops_of(function: Callable[..., Tensor], *given: Tensor) -> list[torch.fx.Node]:
    """The calls of this package's ops in the graphs of a function and its backward."""
    nodes: list[torch.fx.Node] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        nodes.extend(n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "seqpar")
        return make_boxed_func(graph.forward)

    torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(
        *given
    ).sum().backward()
    return nodes


def test_inductor_captures_no_plan_in_a_cuda_graph() -> None:
    plan, comm = pair(causal=True)
    rows, handle = plan.layout, bind(plan, comm)
    kept = bind(rows, rows, comm)

    def every(x: Tensor) -> Tensor:
        x = seqpar.relayout(seqpar.attention(x, x, x, handle), comm, src=rows, dst=rows, rows=14)
        return seqpar.switch(x, comm, split_dim=1, concat_dim=0, sizes=([2], [14])).sin()

    x = torch.randn(14, 2, 4, dtype=torch.float64, requires_grad=True)
    nodes = ops_of(every, x)
    assert {n.target._opname for n in nodes} == {"attention", "attention_backward", "switch", "relayout"}, kept
    for node in nodes:
        kernel = object.__new__(inductor.ir.FallbackKernel)
        kernel.op_overload, kernel.fx_node, kernel.unbacked_bindings = node.target, node, {}
        with inductor.config.patch("triton.cudagraphs", True):
            why = Scheduler.should_partition(SimpleNamespace(), SimpleNamespace(node=kernel, is_gpu=lambda: True))
        assert why == "CUDAGraph-unsafe custom ops", node.target


def test_a_compiled_function_is_not_captured_as_a_whole(monkeypatch) -> None:
    plan, comm = pair()
    x, run = torch.randn(14, 2, 4, requires_grad=True), compiled(attend)
    out = run(x, bind(plan, comm)).sum()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    for call in (lambda: run(x, bind(plan, comm)), out.backward):
        with pytest.raises(NotImplementedError, match="would compute this plan for every batch; leave capturing to"):
            call()


def on_a_rank(comm: Comm, count: int) -> tuple[int, list[int]]:
    """Graphs compiled, and bytes sent in compiled and in eager steps that gave equal results."""
    net, counter = model(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    sent = [0, 0]
    for plan in plans(comm.size, count):
        rows, handle = plan.rows(comm.rank), bind(plan, comm)
        results = []
        for kind, (run, given) in enumerate(((compiled, (handle,)), (net, (plan, comm)))):
            comm.stats.reset()
            results.append(trained(run, rows, *given))
            sent[kind] += comm.stats.bytes_sent
        assert_equal(*results)
    return counter.frame_count, sent


@pytest.mark.exhaustive
def test_one_graph_serves_all_plans_on_processes() -> None:
    for graphs, (compiled, eager) in run_processes(2, on_a_rank, 8):
        assert graphs <= 2
        assert compiled == eager > 0


def attend(q: Tensor, *plan: object, **options: object) -> Tensor:
    """Attention of queries to themselves."""
    return seqpar.attention(q, q, q, *plan, **options)


def compiled(function: Callable[..., Tensor], backend: object = "aot_eager") -> Callable[..., Tensor]:
    return torch.compile(function, backend=backend, fullgraph=True)


def pair(**mask: object) -> tuple[Plan, LocalComm]:
    return Plan(Mask([5, 9], **mask), Layout.contiguous(14, 1)), LocalComm()


@pytest.mark.parametrize("by", ["handle", "objects", "attributes", "static handle"])
def test_a_plan_is_never_stale(by) -> None:
    """Same rows, other masks: nothing that guards check differs."""

    class Holder(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, self.plan, self.comm)

    counter = CompileCounterWithBackend("aot_eager")
    holder = Holder()
    run = compiled(holder if by == "attributes" else attend, counter)
    q, static, kept = torch.randn(14, 2, 4), bind(*pair()), []
    for causal, window in ((True, None), (False, None), (True, 1), (True, 2), (True, None)):
        plan, comm = pair(causal=causal, window=(window, None))
        handle = bind(plan, comm)
        kept.append(handle)
        if by == "attributes":
            holder.plan, holder.comm = plan, comm
            out = run(q)
        elif by == "static handle":
            out = run(q, static.copy_(handle))  # its storage still carries the plan that it was made for
        else:
            out = run(q, *((handle,) if by == "handle" else (plan, comm)))
        assert torch.equal(out, attend(q, plan, comm))
    assert counter.frame_count == 1


def test_another_seed_is_another_dropout() -> None:
    handle, counter = bind(*pair()), CompileCounterWithBackend("aot_eager")
    q, run = torch.randn(14, 2, 4), compiled(attend, counter)
    found = [run(q, handle, dropout_p=0.5, dropout_seed=seed) for seed in range(5, 9)]
    for seed, out in enumerate(found, 5):
        assert torch.equal(out, attend(q, handle, dropout_p=0.5, dropout_seed=seed))
    assert counter.frame_count <= 2


def test_equal_values_have_equal_handles_that_copies_share() -> None:
    (plan, comm), q = pair(), torch.randn(14, 2, 4)
    handle = bind(plan, comm)
    assert (handle.dim(), handle.dtype, handle.device.type) == (0, torch.int64, "cpu")
    again = bind(Plan(plan.mask, plan.layout), comm)
    assert torch.equal(handle, again)
    assert not torch.equal(handle, bind(plan, LocalComm()))
    assert not torch.equal(handle, bind(Plan(Mask([14]), plan.layout), comm))
    for other in (again, handle.clone(), pickle.loads(pickle.dumps(handle)), torch.stack([handle, handle])[1]):
        assert torch.equal(attend(q, other), attend(q, plan, comm))


def test_a_handle_keeps_its_plan_and_nothing_else_does() -> None:
    (plan, comm), q = pair(), torch.randn(14, 2, 4, requires_grad=True)
    alive = weakref.ref(plan)
    handle = bind(plan, comm)
    number = handle.clone()
    run = compiled(attend)
    run(q, plan, comm).sum().backward()
    del plan
    run(q, handle).sum().backward()
    assert alive() is not None
    del handle
    assert alive() is None
    for call in (attend, run):
        with pytest.raises(ValueError, match=rf"handle {int(number)} refers to nothing: its plan or comm was dropped"):
            call(q, number)


def test_what_is_no_handle_says_so() -> None:
    (plan, comm), q = pair(), torch.randn(14, 2, 4)
    with pytest.raises(ValueError, match=r"expected the handle of seqpar.bind\(plan, comm\)"):
        attend(q, bind(comm))
    for wrong in (torch.tensor(3), torch.tensor(3.0), torch.tensor([3]), None):
        with pytest.raises(ValueError, match="handle"):
            attend(q, wrong)
    with pytest.raises(ValueError, match="a plan and a comm, or their handle alone"):
        attend(q, bind(plan, comm), comm)
    with pytest.raises(Exception, match="leave the comm out"):
        compiled(attend)(q, bind(plan, comm), comm)


def test_a_plan_without_a_handle_names_bind() -> None:
    (plan, comm), q = pair(), torch.randn(14, 2, 4)
    handle, other, run = bind(plan, comm), pickle.loads(pickle.dumps(plan)), compiled(attend)
    with pytest.raises(Exception, match=r"without a handle; call seqpar\.bind"):
        run(q, other, comm)
    bind(other, comm)
    assert torch.equal(run(q, other, comm), attend(q, handle))


@pytest.mark.exhaustive
def test_between_two_graphs_a_verb_runs_as_ever() -> None:
    """A model that is compiled in pieces needs no handles, and what verbs call is not compiled."""
    (plan, comm), q, counter = pair(), torch.randn(14, 2, 4), CompileCounterWithBackend("aot_eager")
    other = Layout([list(range(13, -1, -1))])

    def pieces(q: Tensor) -> Tensor:
        out = attend(q.sin(), plan, comm).cos()
        return seqpar.unshard(seqpar.relayout(out, comm, src=plan.layout, dst=other), plan, comm).exp()

    assert torch.equal(torch.compile(pieces, backend=counter)(q), pieces(q))
    assert counter.op_count <= 10


def test_fake_tensors_have_shapes_and_gradients() -> None:
    plan, comm = pair()
    with FakeTensorMode():
        q = torch.randn(14, 2, 4, requires_grad=True)
        out = attend(q, plan, comm)
        out.sum().backward()
        assert out.shape == q.grad.shape == (14, 2, 4)


def test_a_mode_that_looks_on_sees_what_a_call_does() -> None:
    (plan, comm), q = pair(), torch.randn(14, 2, 4)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Names():
        attend(q, plan, comm)
    assert seen and not any(name.startswith("seqpar.") for name in seen), "what computes, not the verb around it"


def test_autocast_around_a_graph_does_not_round_what_is_accumulated() -> None:
    handle, q = bind(*pair()), torch.randn(14, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(attend)(q, handle), attend(q, handle))


def test_a_compiled_call_checks_what_it_gets() -> None:
    run, handle = compiled(attend), bind(*pair())
    with pytest.raises(ValueError, match="q on rank 0 must have 14 rows.*got 13"):
        run(torch.randn(13, 2, 4), handle)
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.5"):
        run(torch.randn(14, 2, 4), handle, dropout_p=1.5)


LAYOUTS = {"trivial": Layout.contiguous(14, 1), "traded": Layout([list(range(13, -1, -1))])}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.sampled(5)
def test_attention_is_a_proper_op(layout, grads, options) -> None:
    comm, plan = LocalComm(), Plan(Mask([5, 9]), LAYOUTS[layout])
    handle = bind(plan, comm)
    q, k, v = (torch.randn(14, h, 4, dtype=torch.float64, requires_grad=grads) for h in (4, 2, 2))
    sinks, slopes = (torch.rand(4, dtype=torch.float64) if options else None for _ in range(2))
    chosen = (0.5, 2.0, 0.25, 7, True, "auto", "fast", True, True) if options else PLAIN
    opcheck(OPS.attention, (q, k, v, sinks, slopes, [handle], *chosen, [grads, grads, grads, False, False]))
    given = *(x.detach() for x in (q, k, v)), sinks, slopes
    out, lse, top, ticket = OPS.attention(*given, [handle], *chosen, [True] * 4 + [False])
    named = bind(*carried(ticket))  # opcheck hands on copies
    incoming = torch.randn_like(out), torch.randn_like(lse) if options else None, None
    opcheck(OPS.attention_backward, (*incoming, *given, out, lse, top, named, [True, grads, True, options, False]))


def test_switch_is_a_proper_op() -> None:
    comm = LocalComm()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    handle = bind(comm)
    opcheck(OPS.switch, ([x], [handle], [0], [1], [4], [6], 0, [True]))


def test_relayout_is_a_proper_op() -> None:
    comm, src, dst = LocalComm(), Layout.contiguous(14, 1), LAYOUTS["traded"]
    plan = Plan(Mask([5, 9]), dst)
    x = torch.randn(14, 3, dtype=torch.float64, requires_grad=True)
    there, whole = bind(src, dst, comm), bind(plan, comm)
    opcheck(OPS.relayout, ([x], [there], 14, [True]))
    opcheck(OPS.unshard, ([x], [whole], "q", 0, 14, [True]))


def moved(x: Tensor, comm: Comm, src: Layout, dst: Layout, rows: list[int]) -> Tensor:
    y = seqpar.relayout(x.sin(), comm, src=src, dst=dst, rows=rows[comm.rank])
    return seqpar.switch(y.exp(), comm, split_dim=1, concat_dim=0, sizes=([1, 3], rows)).sin()


def moved_on_a_rank(comm: Comm) -> int:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(moved, backend=counter, fullgraph=True)
    kept = []
    for n in range(5):
        src, dst = Layout.contiguous(10 + 2 * n, comm.size), Layout.striped(10 + 2 * n, comm.size, block=2)
        kept.append(bind(src, dst, comm))
        results = []
        for function in (run, moved):
            x = torch.randn(5 + n, 4, generator=torch.Generator().manual_seed(n)).requires_grad_()
            y = function(x, comm, src, dst, [dst.tokens(r) for r in range(comm.size)])
            y.square().sum().backward()
            results.append([y.detach(), x.grad])
        assert_equal(*results)
    return counter.frame_count


@pytest.mark.exhaustive
def test_switch_and_relayout_compile_on_processes() -> None:
    assert max(run_processes(2, moved_on_a_rank)) <= 3  # numbers of rows that are equal once are first taken for one


def test_the_other_verbs_say_what_a_graph_needs() -> None:
    (plan, comm), x = pair(), torch.randn(14, 2)
    with pytest.raises(Exception, match=r"without a handle; call seqpar\.bind"):
        compiled(lambda x: seqpar.switch(x, comm, split_dim=0, concat_dim=1))(x)
    bind(plan.layout, comm)
    with pytest.raises(Exception, match=r"needs rows=dst\.tokens\(rank\)"):
        compiled(lambda x: seqpar.relayout(x, comm, src=plan.layout, dst=plan.layout))(x)
    unbound = Layout.striped(14, 1)
    with pytest.raises(Exception, match=r"without a handle; call seqpar\.bind"):
        compiled(lambda x: seqpar.relayout(x, comm, src=plan.layout, dst=unbound, rows=14))(x)
    with pytest.raises(ValueError, match="rows=13, but rank 0 gets 14"):
        compiled(lambda x: seqpar.relayout(x, comm, src=plan.layout, dst=plan.layout, rows=13))(x)
    with pytest.raises(Exception, match="unshard: not supported in a compiled model"):
        compiled(lambda x: seqpar.unshard(x, plan, comm))(x)


@pytest.fixture
def tickets(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[collective_op.Ticket]:
    """What of the tickets that were made is alive."""
    alive: weakref.WeakSet[collective_op.Ticket] = weakref.WeakSet()
    made = collective_op.carry

    def noting(ticket: collective_op.Ticket) -> Tensor:
        alive.add(ticket)
        return made(ticket)

    monkeypatch.setattr(collective_op, "carry", noting)
    return alive


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(14, h, 4, dtype=torch.float64, generator=g).requires_grad_() for h in (4, 2, 2)]


def by_op(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> Tensor:
    """Attention through its op in eager mode."""
    return OPS.attention(q, k, v, None, None, [handle], *PLAIN, [True, True, True, False, False])[0]


def recomputed(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> Tensor:
    return checkpoint(lambda *x: seqpar.attention(*x, handle).sin(), q * 1.0, k, v, use_reentrant=False) * 1.0


def gradients(function: Callable[..., Tensor], handle: Tensor, passes: int = 1) -> list[Tensor]:
    leaves = tensors()
    loss = function(*leaves, handle).square().sum()
    for left in reversed(range(passes)):
        loss.backward(retain_graph=left > 0)
    return [x.grad / passes for x in leaves]


ROUTES: dict[str, Callable[..., Tensor]] = {
    "op": by_op,
    "reentrant": lambda *x: checkpoint(by_op, *x, use_reentrant=True),
    "not reentrant": lambda *x: checkpoint(by_op, *x, use_reentrant=False),
    "eager reentrant": lambda *x: checkpoint(seqpar.attention, *x, use_reentrant=True),
    "eager not reentrant": lambda *x: checkpoint(seqpar.attention, *x, use_reentrant=False),
    "aot": lambda *x: compiled(seqpar.attention)(*x),
    "inductor": lambda *x: compiled(seqpar.attention, "inductor")(*x),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(7)
def test_backward_finds_its_ticket_and_frees_it(route, layout, tickets) -> None:
    plan, comm = Plan(Mask([5, 9]), LAYOUTS[layout]), LocalComm()
    handle = bind(plan, comm)
    expected = gradients(seqpar.attention, handle)
    assert_equal(gradients(ROUTES[route], handle), expected)
    if "reentrant" not in route:
        with torch._functorch.config.patch(donated_buffer=False):  # which a graph that is retained cannot have
            assert_equal(gradients(ROUTES[route], handle, passes=3), expected)
    loss = ROUTES[route](*tensors(), handle).sum()  # no backward of this one
    assert len(tickets) == (0 if "reentrant" in route else 1)
    del loss
    gc.collect()
    assert not tickets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recomputed_region_compiles(layout, tickets) -> None:
    plan, comm = Plan(Mask([5, 9]), LAYOUTS[layout]), LocalComm()
    handle = bind(plan, comm)
    expected = gradients(recomputed, handle)
    start = comm.next_call()
    assert_equal(gradients(compiled(recomputed), handle), expected)
    assert comm.next_call() - start == 3  # forward, and again in backward
    assert not tickets


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("policy", "calls"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)])
def test_selective_recomputation_sees_the_op(layout, policy, calls, tickets) -> None:
    plan, comm = Plan(Mask([5, 9]), LAYOUTS[layout]), LocalComm()
    handle = bind(plan, comm)
    expected = gradients(seqpar.attention, handle)

    def choose(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if op is OPS.attention.default else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(*x: Tensor) -> Tensor:
        def contexts() -> object:
            return create_selective_checkpoint_contexts(choose)

        return checkpoint(seqpar.attention, *x, use_reentrant=False, context_fn=contexts)

    start = comm.next_call()
    assert_equal(gradients(selective, handle), expected)
    assert comm.next_call() - start == 1 + calls
    assert not tickets


@pytest.mark.parametrize("function", [by_op, seqpar.attention])
def test_a_hook_that_copies_saved_tensors(function) -> None:
    handle = bind(*pair())
    expected = gradients(seqpar.attention, handle)
    leaves = tensors()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = function(*leaves, handle)
    if function is by_op:
        with pytest.raises(RuntimeError, match="a backward got a copy of its ticket"):
            out.sum().backward()
    else:  # offloading
        out.square().sum().backward()
        assert_equal([x.grad for x in leaves], expected)


def evaluated(comm: Comm, verb: str) -> float:
    """A compiled model on a batch of one token, of which one rank has nothing."""
    plan = Plan(Mask([1]), Layout.contiguous(1, comm.size))
    verbs = {
        "attention": lambda x, at: seqpar.attention(x, x, x, at),
        "linear_attention": lambda x, at: recurrent.linear_attention(x, x, x, at),
        "shift": lambda x, at: recurrent.shift(x, at),
    }
    x = seqpar.shard(torch.ones(1, 2, 4), plan, comm.rank)
    run = torch.compile(lambda x, at: verbs[verb](x, at).sin() * 2, backend="inductor")
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        return float(all_sum(run(x, bind(plan, comm)).sum(), comm))


@pytest.mark.parametrize("verb", ["attention", "linear_attention", "shift"])
@pytest.mark.sampled(2)
def test_a_rank_without_rows_takes_part_in_what_inductor_compiles(verb: str) -> None:
    found = run_processes(2, evaluated, verb)
    assert found[0] == found[1] == pytest.approx(evaluated(LocalComm(), verb))
