"""The host waits for no device inside a layer, forward and backward, and uploads nothing after a batch's first layer.

The same holds for `relayout`, `unshard`, `fetch` and `switch`, and on a device for `shard`.

Three tests, since most machines have no GPU:

- On fake tensors of a CUDA device, which have shapes and no values. An operator that reads a value finds none, one that
  mixes devices fails, and one that moves a tensor between them is seen. Each rank runs alone, since what arrives does
  not matter. Autograd refuses such tensors, so it is the schedule's two functions that run, without `attention`, and of
  the other verbs what their operators do when the ranks have agreed.
- On CPU tensors through `attention`, ranks being threads. Operators that synchronise on CUDA raise, and so does what
  makes tensors of values on the host, outside of `upload`. The kernel takes its branches for CUDA.
- On a CUDA device, if there is one. PyTorch's debug mode raises where its operators synchronise.

The kernel is the tiles in PyTorch, which runs everywhere; only the last test takes others. None sees the waits of a
`Comm`, those that CUDA makes itself when memory is first asked for, or what a kernel does on the host without an
operator; and only the last one would see a copy from memory that is not pinned.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar.comm import Comm
from seqpar.comm.entry import ThreadEntry
from seqpar.comm.protocol import Stats, Tag
from seqpar.facts.layout import Layout
from seqpar.kernels import dropout, softmax
from seqpar.kernels.blockwise import Blockwise
from seqpar.kernels.memory import copy as copies
from seqpar.kernels.memory.upload import upload
from seqpar.ops.attention import call as calls
from seqpar.ops.attention import schedule
from seqpar.ops.attention.signature import Signature
from seqpar.ops.core import compared
from seqpar.ops.core.agreement import agreement
from seqpar.plan import Plan
from seqpar.testing import run_threads
from tests.cases import Case
from tests.ops.cases import inputs, poisoned

# the names of these modules in their package are the verbs
relayouts, switches, fetches = (sys.modules[f"seqpar.ops.move.{name}"] for name in ("relayout", "switch", "fetch"))

# operators whose result, or its shape, the host must read
READ = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "repeat_interleave", "lift_fresh",
}  # fmt: skip
# functions that read values, or make tensors of values on the host, without an operator that a mode sees
HOST = {"tolist", "numpy", "__array__", "cpu", "tensor", "as_tensor", "from_numpy", "frombuffer", "asarray"}


class Operators(TorchDispatchMode):
    """Fails on operators for which the host would wait for a CUDA device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READ and not (name == "repeat_interleave" and not isinstance(args[0], Tensor)):
            raise AssertionError(f"{func} reads values on the host")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            kinds = {x.dtype for x in args[1] if x is not None}
            assert not kinds & {torch.bool, torch.uint8}, f"{func} by a mask reads how many elements it has"
        result = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy", "copy_", "_copy_from"):
            several = [x for x in args if isinstance(x, list)]  # of seqpar_native
            devices = {x.device.type for x in (*args, result, *sum(several, [])) if isinstance(x, Tensor)}
            assert len(devices) == 1, f"{func} between {sorted(devices)}"
        return result


class Functions(TorchFunctionMode):
    """Fails on what takes values from, or to, the host without an operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        assert name not in HOST, f"{name} takes values from the host or to it"
        if name in INSTEAD and isinstance(args[0], FakeTensor):
            return INSTEAD[name](*args)
        return func(*args, **(kwargs or {}))


def getitem(x: Tensor, key: object) -> Tensor:
    """``x[key]`` by operators; torch's own asks CUDA for the device of x, which for fake tensors need not exist."""
    dim, numbers = 0, []
    keys = key if isinstance(key, tuple) else (key,)
    for n, each in enumerate(keys):
        if each is Ellipsis:
            dim = x.dim() - sum(later is not None for later in keys[n + 1 :])
            numbers += [None] * (dim - len(numbers))
            continue
        if each is None:
            x = x.unsqueeze(dim)
        elif isinstance(each, int):
            x = x.select(dim, each)
            continue
        elif isinstance(each, slice):
            x = torch.ops.aten.slice.Tensor(x, dim, each.start, each.stop)
        numbers.append(each if isinstance(each, Tensor) else None)
        dim += 1
    return torch.ops.aten.index.Tensor(x, numbers) if any(n is not None for n in numbers) else x


def setitem(x: Tensor, key: object, value: Tensor | float) -> None:
    if isinstance(key, Tensor):
        torch.ops.aten.index_put_(x, [key], value)
    elif isinstance(value, Tensor):
        torch.ops.aten.copy(getitem(x, key), value)
    else:
        getitem(x, key).fill_(value)


INSTEAD = {
    "__getitem__": getitem, "__setitem__": setitem, "__invert__": torch.ops.aten.bitwise_not,
    "copy_": torch.ops.aten.copy, "contiguous": torch.ops.aten.contiguous,
}  # fmt: skip


@contextmanager
def watched() -> Iterator[None]:
    """Fails where the host would wait for a CUDA device."""
    with Functions(), Operators():
        yield


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: float(x[0]), lambda x: x.tolist(),
        lambda x: x.numpy(), lambda x: x.nonzero(), lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0), lambda x: torch.where(x > 0),
        lambda x: torch.unique(x), lambda x: torch.equal(x, x), lambda x: torch.tensor([1, 2]),
        lambda x: x.index_put_((x > 0,), x[0]), lambda x: torch.ones(3).repeat_interleave(torch.tensor([1, 2, 0])),
        lambda x: torch.as_tensor([1]), lambda x: x.__setitem__(x > 0, x.sum()), lambda x: [0, 1][x.long()[0]],
    ],
)  # fmt: skip
def test_what_synchronises_is_noticed(act: Callable[[Tensor], object]) -> None:
    x = torch.linspace(-1, 1, 3)
    act(x.clone())
    with pytest.raises(AssertionError), watched():
        act(x)


class Silent:
    """A comm by which nothing arrives, which fake tensors do not mind."""

    def __init__(self, rank: int, size: int, direct: bool = False) -> None:
        self.rank, self.size, self.stats, self.entry = rank, size, Stats(), ThreadEntry()
        self.posted, self.direct = 0, direct

    def exchange(self, sends, recvs, *, tag):
        self.posted += 1
        assert self.direct or all(
            x.is_contiguous() for side in (sends, recvs) for several in side.values() for x in several
        )
        return self

    def wait(self) -> None:
        return None

    def empty(self, shape, dtype, device, *, kept=False):
        return torch.empty(shape, dtype=dtype, device=device)


CASES = tuple(
    Case(mask, layout, transport, 4, ulysses, (9, 2, 12), stage_bytes=4 * 4096, mixed=mixed, pads=True)
    for transport, mask, layout, ulysses, mixed in [
        ("fetch", "packed", "striped", 1, False),
        ("fetch", "bounds", "arbitrary", 2, False),
        ("ring", "full", "zigzag", 1, False),
        ("ring", "packed", "striped", 2, True),
        ("double_ring", "packed", "arbitrary", 1, False),
        ("gather", "window", "striped", 1, False),
        ("gather", "packed", "arbitrary", 2, True),
        ("fetch", "causal", "zigzag", 4, False),
    ]
)
OPTIONS = ({}, {"softcap": 1.5, "dropout_p": 0.3}, {"alibi": True}, {"sinks": True, "dropout_p": 0.1})


# every case with two of the options
POINTS = [
    pytest.param(case, options, id=f"{case.transport}-{case.mask}-U{case.ulysses}-{'-'.join(options) or 'plain'}")
    for n, case in enumerate(CASES)
    for options in (OPTIONS[n % 4], OPTIONS[(n + 2 - n // 4) % 4])
]
points = pytest.mark.parametrize(("case", "options"), POINTS)


def unread(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=torch.int32, device=device) for x in arrays]


@points
@pytest.mark.sampled(16)
def test_no_value_of_a_cuda_tensor_is_read(case, options, monkeypatch) -> None:
    plan, fake, cuda = case.plan(), FakeTensorMode(), torch.device("cuda", 0)
    monkeypatch.setattr(calls, "stream_of", lambda device: device)
    monkeypatch.setattr(calls, "upload", unread)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(calls, "choose", lambda name, spec, *_: Blockwise())
    for module in (copies, softmax):
        monkeypatch.setattr(module, "on_triton", lambda x: False, raising=False)
    heads, kv_heads, dim, v_dim, posted = 6, 2, 8, 4, 0
    for rank in range(plan.ranks):
        with fake, torch.no_grad():
            comm = Silent(rank, plan.ranks, direct=bool(options))

            def made(*shape: int, dtype=torch.bfloat16) -> Tensor:
                return torch.empty(shape, dtype=dtype, device=cuda)

            slopes = made(heads, dtype=torch.float32) if options.get("alibi") else None
            sinks = made(heads, dtype=torch.float32) if options.get("sinks") else None
            signature = Signature(
                cuda, torch.bfloat16, heads, kv_heads, dim, v_dim, 1.0, options.get("softcap", 0.0),
                options.get("dropout_p", 0.0), slopes is not None, sinks is not None, return_lse=True,
                deterministic=True, kernel="blockwise", accuracy="exact", q_grads=True, kv_grads=True,
                sink_grads=False,
            )  # fmt: skip
            call = calls.Call(comm, Tag(0, 0, 0, 0), plan, signature, calls.recipe_of(plan, rank, signature), 7)
            n, m = plan.rows(rank), plan.rows(rank, "kv")
            q, k, v = made(n, heads, dim), made(m, kv_heads, dim), made(m, kv_heads, v_dim)
            with watched():
                out, lse, insides = schedule.forward(call, call.recipe.kernel, q, k, v, sinks, slopes)
                incoming = made(*out.shape), made(*lse.shape, dtype=lse.dtype)
                grads = schedule.backward(call, call.recipe.kernel, insides, sinks, *incoming)
            assert all(x is None or x.device == cuda for x in (out, lse, *grads))
            posted += comm.posted
    assert posted


def other_layout(plan: Plan) -> Layout:
    """The same tokens on other ranks, in another order."""
    return Layout([np.arange(plan.mask.tokens)[::-1][rank :: plan.ranks] for rank in range(plan.ranks)])


@pytest.mark.parametrize("case", CASES[:2])
def test_no_row_of_a_cuda_tensor_is_read(case, monkeypatch) -> None:
    plan, cuda, tag = case.plan(), torch.device("cuda", 0), Tag(0, 0, 0, 0)
    monkeypatch.setattr(relayouts, "stream_of", lambda device: device)
    monkeypatch.setattr(relayouts, "upload", unread)
    monkeypatch.setattr(copies, "on_triton", lambda x: False)
    for rank in range(plan.ranks):
        comm = Silent(rank, plan.ranks, direct=rank % 2 == 0)
        there = relayouts.moves_between(plan.layout, other_layout(plan), rank)
        whole, needed = relayouts._copies(plan, "q", comm), fetches._moves(plan, rank)
        with FakeTensorMode(), torch.no_grad(), watched():
            for moves in (there, there.transposed(), whole, whole.transposed(), needed, needed.transposed()):
                x = torch.empty(moves.rows_in, 6, 8, dtype=torch.bfloat16, device=cuda)
                (y,), *_ = relayouts.moved([x], comm, moves, tag)
                assert y.shape == (moves.rows_out, 6, 8) and y.device == cuda
            x = torch.empty(5, 2 * plan.ranks, dtype=torch.bfloat16, device=cuda)
            shares = [2] * plan.ranks, [5] * plan.ranks
            assert switches._all_to_all([x], comm, ([1], [0], *shares), tag)[0].shape == (5 * plan.ranks, 2)
        moved = [moves for moves in (there, needed) if (moves.sends.keys() | moves.recvs.keys()) - {rank}]
        assert comm.posted == 3 + 2 * len(moved)


class Order:
    """A comm that notes when exchanges are posted."""

    def __init__(self, comm: Comm, events: list[str]) -> None:
        self.comm, self.events = comm, events

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def exchange(self, sends, recvs, *, tag):
        self.events.append("exchange")
        return self.comm.exchange(sends, recvs, tag=tag)


def layer(comm: Comm, plan: Plan, tensors: list[Tensor], options: dict[str, object], kernel: str) -> None:
    """One layer, forward and backward, from tensors that are on their device already."""
    *leaves, dout, dlse = (x.detach() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = seqpar.attention(*leaves, plan, comm, return_lse=True, kernel=kernel, **options)
    torch.autograd.backward([out, lse], [dout, dlse])


def made(plan: Plan, rank: int, options: dict[str, object], device: str) -> tuple[list[Tensor], dict[str, object]]:
    """A rank's q, k, v and incoming gradients, and the arguments that options stand for."""
    tensors = [x.float() for x in inputs(plan, (6, 2), (8, 4), 0)]
    sides = ("q", "kv", "kv", "q", "q")
    mine = [poisoned(x, plan, rank, side).to(device) for x, side in zip(tensors, sides, strict=True)]
    arguments: dict[str, object] = {"softcap": options.get("softcap", 0.0), "dropout_p": options.get("dropout_p", 0.0)}
    if "dropout_p" in options:
        arguments["dropout_seed"] = 7
    for name, argument in (("alibi", "alibi_slopes"), ("sinks", "sinks")):
        if options.get(name):
            arguments[argument] = torch.linspace(-1, 1, 6, device=device)
    return mine, arguments


def two_layers(comm: Comm, plan: Plan, options: dict[str, object], uploads: dict[int, list[str]]) -> list[str]:
    tensors, arguments = made(plan, comm.rank, options, "cpu")
    events = uploads[threading.get_ident()] = []
    comm.check_every = "batch"
    ordered = Order(comm, events)
    with watched():
        layer(ordered, plan, tensors, arguments, "blockwise")
        events.append("second layer")
        layer(ordered, plan, tensors, arguments, "blockwise")
    return events


@points
@pytest.mark.sampled(4)
def test_layers_do_not_synchronise_and_upload_once(case, options, monkeypatch) -> None:
    events: dict[int, list[str]] = {}

    def counted(arrays, device):
        events[threading.get_ident()].append("upload")
        with torch._C.DisableTorchFunction():
            return upload(arrays, device)

    monkeypatch.setattr(calls, "upload", counted)
    monkeypatch.setattr(compared, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(compared, "to_host", lambda number: (number, SimpleNamespace(synchronize=lambda: None)))
    monkeypatch.setattr(softmax, "_known_finite", lambda values: False)  # as on CUDA
    monkeypatch.setattr(dropout, "_on_host", lambda x: False)
    for found in run_threads(case.ranks, two_layers, case.plan(), options, events):
        first, second = found[: found.index("second layer")], found[found.index("second layer") + 1 :]
        assert first == ["upload", *["exchange"] * len(second)]
        assert second == ["exchange"] * len(second)


def test_values_on_a_device_are_compared_by_the_next_call_and_wait_for_no_later_work(monkeypatch) -> None:
    """Sinks of one rank differ in one element: that call goes on, and the next one that ranks compare names them."""
    waits: dict[int, list[str]] = {}

    def to_host(number: Tensor) -> tuple[Tensor, SimpleNamespace]:
        mine = waits.setdefault(threading.get_ident(), [])
        return number, SimpleNamespace(synchronize=lambda: mine.append("copy"))

    def rank_main(comm: Comm) -> tuple[list[str], str]:
        mine, comm.check_every = waits.setdefault(threading.get_ident(), []), "batch"
        sinks = torch.tensor([0.0, 1.0 + comm.rank // 2])
        with agreement("attention", comm) as call:
            call.facts, call.values = {"plan": "a"}, {"sinks": sinks, "dropout_seed": None}
        mine.append("later work")
        with agreement("attention", comm) as call:
            call.facts, call.values = {"plan": "a"}, {"sinks": sinks}
        with pytest.raises(ValueError) as caught, agreement("relayout", comm) as call:
            call.facts = {"plan": "b"}
        comm.agree("afterwards", {})
        return mine, str(caught.value)

    monkeypatch.setattr(compared, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(compared, "to_host", to_host)
    for mine, text in run_threads(3, rank_main):
        assert mine == ["later work", "copy"]
        assert text.startswith("relayout: ranks differ in a hash of the sinks of an earlier attention: ")
        assert text.endswith(" on rank 2; give all ranks the same")


def test_values_on_a_device_are_compared_even_if_no_other_call_is_new(monkeypatch) -> None:
    def rank_main(comm: Comm) -> tuple[int, str]:
        comm.check_every, calls_made = "batch", 0
        sinks = torch.tensor([0.0, 1.0 + comm.rank // 2])
        with pytest.raises(ValueError) as caught:
            for calls_made in range(2 * compared.LATEST):  # noqa: B007
                with agreement("attention", comm) as call:
                    call.facts, call.values = {"plan": "a"}, {"sinks": sinks}
        return calls_made, str(caught.value)

    monkeypatch.setattr(compared, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(compared, "to_host", lambda number: (number, SimpleNamespace(synchronize=lambda: None)))
    for count, text in run_threads(3, rank_main):
        assert count == compared.LATEST
        assert text.startswith("attention: ranks differ in a hash of the sinks of an earlier attention: ")


def test_a_hash_of_values_tells_elements_and_order_apart() -> None:
    several = [torch.tensor(x) for x in ([0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [0.0, 1.0, 0.0], [0.0, 1.0 + 1e-7])]
    assert len({compared.hashed(x) for x in several}) == len(several)


def verbs(comm: Comm, plan: Plan, dst: Layout, device: str = "cpu") -> None:
    """Every verb that moves rows, forward and backward, from tensors that are on their device already."""
    x = torch.ones(plan.rows(comm.rank), 2 * comm.size, device=device, requires_grad=True)
    seqpar.fetch(x, plan, comm).sum().backward()
    whole = seqpar.unshard(x, plan, comm)
    seqpar.shard(whole, plan, comm.rank).sum().backward()
    held = torch.ones(plan.layout.tokens(comm.rank), 2 * comm.size, device=device, requires_grad=True)
    moved = seqpar.relayout(held, comm, src=plan.layout, dst=dst)
    back = seqpar.relayout(moved, comm, src=dst, dst=plan.layout)
    rows = [plan.layout.tokens(rank) for rank in range(comm.size)]
    seqpar.switch(back, comm, split_dim=1, concat_dim=0, sizes=([2] * comm.size, rows)).sum().backward()


def verbs_twice(comm: Comm, plan: Plan, dst: Layout, uploads: dict[int, list[str]]) -> list[str]:
    events = uploads[threading.get_ident()] = []
    for _ in range(2):
        verbs(comm, plan, dst)
        events.append("again")
    return events


@pytest.mark.parametrize("case", CASES[:2])
def test_verbs_do_not_synchronise_and_upload_once(case, monkeypatch) -> None:
    """Handles are made and read on the host, so what is watched is what happens between them."""
    events: dict[int, list[str]] = {}

    def counted(arrays, device):
        events[threading.get_ident()].append("upload")
        with torch._C.DisableTorchFunction():
            return upload(arrays, device)

    def noted(function):
        def call(*arguments):
            events[threading.get_ident()].append("move")
            with watched():
                return function(*arguments)

        return call

    monkeypatch.setattr(relayouts, "upload", counted)
    for module, name in (
        (relayouts, "moved"),
        (fetches, "moved"),
        (switches, "_all_to_all"),
        (seqpar, "shard"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    plan = case.plan()
    for found in run_threads(case.ranks, verbs_twice, plan, other_layout(plan), events):
        moves = ["move"] * 11  # six verbs, and the ways back of all but `shard`
        # the numbers of fetch, of unshard, of shard, and of relayout there and back
        assert [e for e in found if e == "upload"] == ["upload"] * 5
        assert found[-len(moves) - 2 :] == ["again", *moves, "again"]


def test_what_was_uploaded_goes_with_the_plan() -> None:
    plan = CASES[0].plan()
    found = [weakref.ref(each) for each in calls.uploaded(plan, plan.steps(0), torch.device("cpu")).numbers.values()]
    gc.disable()
    try:
        del plan
        assert all(each() is None for each in found)
    finally:
        gc.enable()


def test_what_was_uploaded_goes_with_two_layouts_that_rows_went_between() -> None:
    plan, found = CASES[0].plan(), []

    def there_and_back(comm: Comm, src: Layout, dst: Layout) -> None:
        x = torch.ones(src.tokens(comm.rank), 2)
        seqpar.relayout(seqpar.relayout(x, comm, src=src, dst=dst), comm, src=dst, dst=src)

    src, dst = (Layout([layout.positions(r) for r in range(4)]) for layout in (plan.layout, other_layout(plan)))
    run_threads(4, there_and_back, src, dst)
    for layout in (src, dst):
        for each in (x for x in layout._memo.values() if isinstance(x, relayouts.Moves)):
            found += map(weakref.ref, each.on(torch.device("cpu")).numbers.values())
    gc.disable()
    try:
        del src, dst, layout, each
        assert found and all(each() is None for each in found)
    finally:
        gc.enable()


def on_device(comm: Comm, plan: Plan, options: dict[str, object], kernel: str, warm: threading.Barrier) -> None:
    tensors, arguments = made(plan, comm.rank, options, "cuda")
    comm.check_every = "batch"  # else ranks compare slopes and sinks at once, and wait to read them
    layer(comm, plan, tensors, arguments, kernel)  # compiles, and fills the allocator
    torch.cuda.synchronize()
    if warm.wait() == 0:
        torch.cuda.set_sync_debug_mode("error")
    warm.wait()
    layer(comm, plan, tensors, arguments, kernel)
    # another batch of the same shapes: its facts are uploaded, and nobody waits for them
    layer(comm, Plan(plan.mask, plan.layout, kv_layout=plan.kv_layout, ulysses=plan.ulysses, transport=plan.transport,
                     stage_bytes=plan.stage_bytes, rows=[plan.rows(r) for r in range(plan.ranks)]),
          tensors, arguments, kernel)  # fmt: skip


def verbs_on_device(comm: Comm, plan: Plan, dst: Layout, warm: threading.Barrier) -> None:
    verbs(comm, plan, dst, "cuda")
    torch.cuda.synchronize()
    if warm.wait() == 0:
        torch.cuda.set_sync_debug_mode("error")
    warm.wait()
    verbs(comm, plan, dst, "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES[:2])
def test_cuda_says_that_no_verb_synchronises(case) -> None:
    plan = case.plan()
    try:
        run_threads(case.ranks, verbs_on_device, plan, other_layout(plan), threading.Barrier(case.ranks, timeout=60))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["auto", "blockwise"])
@points
@pytest.mark.sampled(2)
def test_cuda_says_that_nothing_synchronises(case, options, kernel) -> None:
    try:
        run_threads(case.ranks, on_device, case.plan(), options, kernel, threading.Barrier(case.ranks, timeout=60))
    finally:
        torch.cuda.set_sync_debug_mode("default")
