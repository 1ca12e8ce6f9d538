"""Tiles and recomputed blocks: the same losses and gradients, in less memory, or an error that names the reason."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_processes, run_threads
from seqpar.train import activations, recompute, sync_gradients, tile
from tests.integrations import diffusers_models
from tests.integrations.hf.models import PLANS, SIZES, batches, beyond, build, drawn
from tests.ranks import error_of, errors, in_wrapper, whole_gradients
from tests.trial.models import MASK, Block, Model

EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def made(name: str) -> Any:
    """A small model in fp64."""
    if name == "llama":
        return build("llama").double()
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)
    model = drawn(transformers.Qwen3MoeForCausalLM, config).double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def tiled(model: nn.Module, rows: int) -> list[Any]:
    """Tile the MLPs and norms of a transformers model, but not its experts."""
    kinds = ("MLP", "RMSNorm")
    return [tile(m, rows) for m in model.modules() if type(m).__name__.endswith(kinds)]


def recomputed(model: Any, **options: bool) -> list[Any]:
    return [recompute(layer, **options) for layer in model.model.layers]


RUNGS: dict[str, Callable[[Any, int], list[Any]]] = {
    "plain": lambda model, rows: [],
    "tiled": tiled,
    "recomputed": lambda model, rows: recomputed(model),
    "all but attention": lambda model, rows: recomputed(model, save_attention=True),
    "all": lambda model, rows: tiled(model, rows) + recomputed(model, offload=True),
    "all, attention kept": lambda model, rows: recomputed(model, save_attention=True) + tiled(model, rows),
}  # fmt: skip


def counted(model: nn.Module) -> dict[str, int]:
    """How often each parameter has accumulated a gradient, from now on."""
    counts = dict.fromkeys((name for name, _ in model.named_parameters()), 0)

    def count(name: str) -> None:
        counts[name] += 1

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: count(name))
    return counts


def step_of(comm: Comm, model: Any, rung: str, after: bool, plan: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A rank's loss and gradients, with tiles of another size on each rank. after: `parallelize`, not before."""
    own = copy.deepcopy(model)
    handles = [] if after else RUNGS[rung](own, comm.rank + 2)
    with seqpar.parallelize(own, comm, plan=PLANS[plan]):
        handles += RUNGS[rung](own, comm.rank + 2) if after else []
        counts = counted(own)
        loss = own(**batches("right", comm.size)[comm.rank]).loss
        loss.backward()
    assert max(counts.values()) == 1, counts
    for handle in handles:
        handle.undo()
    assert not any("forward" in m.__dict__ for m in own.modules())
    return loss.detach(), {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in own.named_parameters()}


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for (loss, grads), (whole, wanted) in zip(found, expected, strict=True):
        assert abs(float(loss) - float(whole)) <= 1e-9 * float(whole)
        error, name = beyond(grads, wanted)
        assert error <= 1e-9, f"{name}: {error}"


@pytest.mark.parametrize(
    ("name", "plan", "rungs"),
    [
        ("llama", "empty", ["tiled", "all but attention", "all"]),
        ("qwen3_moe", "planner", ["recomputed", "all, attention kept"]),
        *(pytest.param(name, "ulysses", RUNGS, marks=pytest.mark.exhaustive) for name in ("llama", "qwen3_moe")),
    ],
)
def test_losses_and_gradients_are_the_same_on_every_rung(name: str, plan: str, rungs: list[str]) -> None:
    model = made(name)
    expected = run_threads(4, step_of, model, "plain", False, plan)
    for n, rung in enumerate(rungs):
        assert_same(run_threads(4, step_of, model, rung, n % 2 == 0, plan), expected)


def wrapped_step(comm: Comm, how: str, rung: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and averaged gradients of a model in a wrapper, of the second step."""
    model = made("llama")
    seqpar.parallelize(model, comm, average_over=comm.size, plan=PLANS["empty"])
    RUNGS[rung](model, comm.rank + 2)
    whole = in_wrapper(model, how, model.model.layers)
    for _ in range(2):
        model.zero_grad()
        loss = whole(**batches("right", comm.size)[comm.rank]).loss
        loss.backward()
    return loss.detach(), whole_gradients(model)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_wrappers_see_the_same_gradients(how: str, ranks: int) -> None:
    expected = run_processes(ranks, wrapped_step, how, "plain")
    for rung in ("all", "all, attention kept") if ranks == 4 else ("all, attention kept",):
        assert_same(run_processes(ranks, wrapped_step, how, rung), expected)


def units(comm: Comm) -> list[str]:
    """What is said of tiles around units of FSDP; a tile in a unit, or of a module that becomes one, is right."""
    torch.manual_seed(0)
    model, plain = MLP(8, 16).double(), nn.Sequential(MLP(8, 16).double())
    plain[0].load_state_dict(model.state_dict())
    x = torch.randn(5 + 3 * comm.rank, 8, dtype=torch.float64)
    handle = tile(model, 2)
    fully_shard(model)
    for each in (model, plain):
        each(x).square().sum().backward()
    sync_gradients(plain.parameters(), comm)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor() * comm.size, q.grad)
    late = nn.Sequential(MLP(8, 16))
    tile(late, 2)
    fully_shard(late[0])
    handle.undo()
    return [error_of(tile, model, 4), error_of(tile, nn.Sequential(model), 4), error_of(late, x.float())]


def test_a_tile_around_a_unit_of_fsdp_is_refused() -> None:
    for mine, inside, late in run_processes(2, units):
        assert "tile(MLP, rows=4): it is a unit of FSDP" in mine
        assert "tile(Sequential, rows=4): 0 (FSDPMLP) is a unit of FSDP" in inside
        assert "it is a unit of FSDP, which would gather its weights once a tile" in late


@pytest.mark.parametrize("after", [False, True])
def test_a_model_of_plain_pytorch(after: bool) -> None:
    """Attention of PyTorch, rerouted to ranks, is kept too."""

    def step(comm: Comm, rungs: bool) -> Any:
        torch.manual_seed(0)
        own = model.double()
        own, put = copy.deepcopy(own), []
        plan = seqpar.Plan(MASK, seqpar.Layout.contiguous(MASK.tokens, comm.size))

        def apply() -> None:
            for block in own.blocks if rungs else ():
                put.extend([tile(block.mlp, 2), tile(block.norm, 3), recompute(block, save_attention=True)])

        if not after:
            apply()
        with seqpar.parallelize(own, comm, sdpa=True, plan=plan):
            if after:
                apply()
            ids, at = (seqpar.shard(x, plan, comm.rank) for x in (torch.arange(22) * 7 % 61, torch.arange(22)))
            loss = own(ids[None], at).sin().sum() / 22
            loss.backward()
        return loss.detach().abs(), {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    model = Model(lambda model, x, at: model.blocks[1](model.blocks[0](x)))
    assert_same(run_threads(2, step, True), run_threads(2, step, False))


def test_a_model_of_diffusers() -> None:
    """Its forwards refuse random numbers, which the trial of a tiled module draws."""
    model, inputs = diffusers_models.made("wan")

    def step(comm: Comm, rungs: bool) -> Any:
        own = copy.deepcopy(model)
        for block in own.blocks if rungs else ():
            tile(block.ffn, 2)
            recompute(block, save_attention=True)
        seqpar.parallelize(own, comm)
        _, loss = diffusers_models.loss_of(own, inputs)
        loss.backward()
        return loss.detach().abs(), {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    assert_same(run_threads(2, step, True), run_threads(2, step, False))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Live(TorchDispatchMode):
    """The most bytes of storages that are alive at once, from those given."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.now = self.most = 0
        self.held = set[int]()
        self.hold(given)

    def hold(self, values: Any) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and id(storage := x.untyped_storage()) not in self.held:
                self.held.add(id(storage))
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, id(storage), storage.nbytes()).atexit = False

    def free(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(out)
        return out


def cost(rows: int, *, again: bool, tokens: int = 4096, width: int = 128, hidden: int = 512) -> tuple[int, int]:
    """The bytes that 3 layers add to their weights, gradients and input, and their operations. rows: of tiles, or 0."""
    with FakeTensorMode():
        layers = nn.ModuleList(Layer(width, hidden) for _ in range(3))
        for layer in layers:
            if rows:
                tile(layer.mlp, rows)
            if again:
                recompute(layer)
        x = torch.empty(1, tokens, width, requires_grad=True)
        weights = list(layers.parameters())
        live = Live(weights, x)
        before = live.now + sum(p.nbytes for p in weights) + x.nbytes
        for mode in (live, FlopCounterMode(display=False)):
            with mode:
                y = x
                for layer in layers:
                    y = layer(y)
                y.sum().backward()
        return live.most - before, mode.get_total_flops()


def test_tiles_of_a_recomputed_layer_take_little_memory_and_time() -> None:
    (untiled, work), (in_tiles, more) = (cost(rows, again=True) for rows in (0, 4096 // 16))
    assert in_tiles <= 0.3 * untiled
    forward = 3 * 3 * 2 * 4096 * 128 * 512  # of 3 layers' MLPs
    assert more <= work + 0.05 * forward  # nothing follows the MLP, so the block ends before its tiles
    (kept, work), (in_tiles, more) = (cost(rows, again=False) for rows in (0, 4096 // 16))
    assert in_tiles <= 0.3 * kept
    assert 0.6 * forward < more - work <= 0.8 * forward


def packed_by(run: Callable[[], Any]) -> list[list[int]]:
    """The shapes of what autograd saves, where a checkpoint does not."""
    shapes = list[list[int]]()

    def pack(x: Tensor) -> Tensor:
        shapes.extend([list(x.shape)] if x.numel() else [])  # torch before 2.13 saves an empty tensor too
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    return shapes


def test_a_block_keeps_one_tensor() -> None:
    class Turned(nn.Module):
        def forward(self, at: Tensor, x: Tensor, cos: Tensor, *, scale: float) -> Tensor:
            return (x * cos).sin() * scale + at

    block, x, cos, at = Turned(), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), torch.arange(4)
    handle = recompute(block, offload=True)
    for call in (lambda: block(at, x, cos, scale=2.0), lambda: block(at, cos=cos, x=x, scale=2.0)):
        assert packed_by(call) == [[3, 4]]
    layers = made("llama")
    recomputed(layers, offload=True)
    hidden = layers.model.embed_tokens(torch.arange(7)[None]).detach().requires_grad_()
    angles = layers.model.rotary_emb(hidden, torch.arange(7)[None])
    for layer in layers.model.layers:
        assert packed_by(lambda layer=layer: layer(hidden, position_embeddings=angles)) == [[1, 7, 32]]
    handle.undo()
    assert len(packed_by(lambda: block(at, x, cos, scale=2.0))) > 1


class Called(TorchDispatchMode):
    """How often operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.times = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [False, True])
def test_attention_is_repeated_unless_it_is_kept(kept: bool) -> None:
    x, called = torch.randn(1, 9, 16, requires_grad=True), Called()
    block = Block()
    expected = torch.autograd.grad(block(x).sin().sum(), x)
    tile(block.mlp, 4)
    recompute(block, save_attention=kept)
    block(x)
    with called:
        found = torch.autograd.grad(block(x).sin().sum(), x)
    torch.testing.assert_close(found, expected)
    assert called.times["aten._scaled_dot_product_flash_attention_for_cpu"] == (1 if kept else 2)
    assert called.times["aten._scaled_dot_product_flash_attention_for_cpu_backward"] == 1


def test_inputs_on_the_host_are_fetched_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of copies; streams of a GPU are stood in for, as every copy here is done when it is asked for."""
    log = list[str]()

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    streams = {name: Stream(name) for name in ("computing", "copying")}
    monkeypatch.setattr(activations, "_copying", lambda device: streams["copying"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["computing"])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: None)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: x.new_zeros(x.shape))
    host, start = activations._HostInput, activations._HostInput.start
    monkeypatch.setattr(host, "start", lambda self: (log.append(f"start {int(self.host[0, 0])}"), start(self))[1])

    class Next(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 0 + x + 1

    x = y = torch.zeros(2, 3, requires_grad=True)
    for _ in range(3):
        with saved_tensors_hooks(host.packed, host.unpacked):
            y = checkpoint(Next(), y, use_reentrant=False)
    assert log == ["copying waits for computing"] * 3
    log.clear()
    y.sum().backward()
    waits = "computing waits for copying"
    assert log == ["start 2", waits, "start 1", "start 1", waits, "start 0", "start 0", waits]
    assert torch.equal(x.grad, torch.ones(2, 3))


def test_handles_restore_a_module_in_any_order() -> None:
    layer = Layer(4, 8)
    for order in permutations(range(3)):
        handles = [tile(layer.mlp, 2), recompute(layer.mlp), recompute(layer)]
        for n in order:
            handles[n].undo()
            handles[n].undo()
            assert layer(torch.randn(5, 4)).shape == (5, 4)
        assert not any("forward" in m.__dict__ for m in layer.modules())
    layer.mlp.forward = own = lambda x: 2 * x
    handle = tile(layer.mlp, 2)
    wrapper, layer.mlp.forward = layer.mlp.forward, lambda x: wrapper(x)  # another library's around it
    handle.undo()
    x = torch.randn(5, 4)
    assert torch.equal(layer.mlp(x), 2 * x)
    layer.mlp.forward = wrapper
    handle.undo()
    assert layer.mlp.forward is own


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies_have_tiles_around_their_own_weights(how: str) -> None:
    layer = Layer(4, 8)
    handles = [tile(layer.mlp, 2), recompute(layer)]
    twin = copy.deepcopy(layer) if how == "copied" else pickle.loads(pickle.dumps(layer))
    for handle in handles:
        handle.undo()
    with torch.no_grad():
        twin.mlp.down.weight.zero_()
        twin.mlp.down.bias.zero_()
    x = torch.randn(5, 4, requires_grad=True)
    out = twin(x)
    assert torch.equal(out, x)
    assert packed_by(lambda: twin(x)) == [[5, 4]]
    assert "tiled already" in error_of(tile, twin.mlp, 2)
    out.sum().backward()
    assert twin.norm.weight.grad is not None
    assert layer.norm.weight.grad is None


def test_a_compiled_tiled_layer() -> None:
    layer, x = Layer(4, 8), torch.randn(7, 4, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
    tile(layer.mlp, 3)
    recompute(layer)
    compiled = torch.compile(layer, backend="aot_eager")
    for run in (compiled, layer, compiled):
        torch.testing.assert_close(torch.autograd.grad(run(x).sin().sum(), [x, *layer.parameters()]), expected)
    mixing = nn.Sequential(nn.Softmax(-2))
    tile(mixing, 3)
    assert "depends on the other rows" in error_of(torch.compile(mixing, backend="aot_eager"), x)


def test_dropout_drops_the_same_numbers_again() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4, bias=False))
    tile(module, 2)
    x = torch.ones(7, 4, requires_grad=True)
    out = module(x)
    out.sum().backward()
    torch.testing.assert_close((x.grad * x.detach()).sum(), out.sum())  # linear in what is kept


class Left(nn.Module):
    """A module that keeps something of each call."""

    def __init__(self, how: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.how, self.calls, self.logits, self.at = how, 0, list[Tensor](), torch.zeros(2)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.how(self, x)
        return x


class Told(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _counts(module: Any, x: Tensor) -> None:
    module.calls += 1


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean": (lambda: Told(lambda x: x - x.mean(-2, keepdim=True)), "the output of Told depends on the other rows"),
    "inside": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(-2)), r"output of 1 \(Softmax\) depends on the other"),
    "positions": (lambda: Told(lambda x: x + torch.arange(x.shape[-2])[:, None]), "depends on the other rows"),
    "number": (lambda: Told(lambda x: x / x.shape[-2]), "depends on the other rows"),
    "reversed": (lambda: Told(lambda x: x.flip(-2)), "depends on the other rows"),
    "two": (lambda: Told(lambda x: (x, x)), "it returns a tuple for a tensor"),
    "pooled": (lambda: Told(lambda x: x.mean(-2)), r"it returns a tensor \[6\] for a tensor \[13, 6\]"),
    "counts": (lambda: Left(_counts), "a call changes the attribute calls of Left"),
    "records": (lambda: Left(lambda m, x: m.logits.append(x)), "a call changes the attribute logits of Left"),
    "buffer": (lambda: Left(lambda m, x: m.tokens.add_(1)), "a call changes the buffer tokens of Left"),
    "tensor": (lambda: Left(lambda m, x: m.at.add_(1)), "a call changes the attribute at of Left"),
    "written": (lambda: Told(lambda x: x.mul_(2)), "it writes to its argument"),
    "batch norm": (lambda: nn.BatchNorm1d(9), "it fails for 13 random rows"),
    "paths": (lambda: StochasticDepth(), "drops whole paths"),
    "fails": (lambda: nn.Linear(5, 5), "it fails for 13 random rows: RuntimeError"),
    "router": (lambda: made("qwen3_moe").model.layers[0].mlp, r"records router logits of gate \(Qwen3MoeTopKRouter\)"),
    "a layer": (lambda: made("llama").model.layers[0], "it fails for 13 random rows"),
}


class StochasticDepth(nn.Module):
    p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_do_not_work_on_each_row_alone(name: str) -> None:
    make, message = REFUSED[name]

    def run() -> None:
        module = make()
        tile(module, 4)
        module(torch.randn(9, 6))

    with pytest.raises(NotImplementedError, match=rf"^tile\(\w+, rows=4\) cannot be .*{message}"):
        run()


def test_calls_that_are_refused() -> None:
    module, x = Layer(4, 8), torch.randn(5, 4)
    for given in (nn.ReLU, 3):
        assert "expected a module, an nn.Module" in error_of(tile, given, 4)
        assert "expected a module, an nn.Module" in error_of(recompute, given)
    for rows in (0, -1, 2.0, True, None):
        assert f"ValueError: tile(Layer, rows={rows}): rows must be a positive integer" in error_of(tile, module, rows)
    recompute(module)
    tile(module.mlp, 2)
    assert "ValueError: recompute(Layer): it is recomputed already" in error_of(recompute, module)
    assert "ValueError: tile(MLP, rows=3): it is tiled already" in error_of(tile, module.mlp, 3)
    assert "with tensors [[5, 4], [5, 4]], expected one" in error_of(module.mlp, x, x)
    assert "with tensors [], expected one" in error_of(module.mlp, 3)
    assert "with tensors [[4]], expected one" in error_of(module.mlp, x[0])
    assert "without a tensor of floating point" in error_of(module, torch.arange(3))
    gathering = nn.Linear(2, 2)
    gathering.weight.ds_id = 0
    assert "0 (Linear) is sharded by DeepSpeed's ZeRO 3" in error_of(tile, nn.Sequential(gathering), 4)
    model = made("llama")
    model.model.layers[0].gradient_checkpointing = True
    assert "it is a checkpoint already" in error_of(recompute, model.model.layers[0])
    model.model.layers[0].gradient_checkpointing = False
    recompute(model.model.layers[0])
    assert "use_cache=False" in error_of(model, input_ids=torch.arange(7)[None], use_cache=True)
    model(input_ids=torch.arange(7)[None], use_cache=False)
    with torch.no_grad():
        model(input_ids=torch.arange(7)[None])


def test_gpt2_flattens_rows_and_passes_its_cache_by_place() -> None:
    config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(9)[None].expand(2, -1)
    expected = model(input_ids=ids).logits
    tile(model.transformer.h[0].mlp, 4)
    recompute(model.transformer.h[0])
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
    assert "was called with a DynamicCache" in error_of(model, input_ids=ids)


def test_ranks_that_differ_in_what_they_recompute() -> None:
    model = build("llama")

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        seqpar.parallelize(own, comm)
        if comm.rank:
            recompute(own.model.layers[0])
        own(**batches("right", 2)[comm.rank])

    assert all("gradient checkpointing" in error for error in errors(rank))


def test_a_backward_after_undo_is_refused() -> None:
    """It would exchange rows with ranks that do not run it."""
    model = build("llama")
    recompute(model.model.layers[0])
    handle = seqpar.parallelize(model, LocalComm())
    loss = model(**batches("right", 1)[0]).loss
    handle.undo()
    assert "after its undo()" in error_of(loss.backward)
