"""Models in plain PyTorch that know nothing of ranks, and their specs: a pair stack, an axial block, a 3-D DiT."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from seqpar.dsp import Block, Core, Exit, Spec, plan_stages
from seqpar.parallel import surrounding
from seqpar.planner import Hardware
from seqpar.planner.hardware import AttentionCost, Link
from seqpar.testing import run_threads

# A machine on which sending costs next to nothing, so that tiny models are sharded too.
FREE = Hardware(
    name="free", source="a test", attention=AttentionCost(1e9, 1e9, 0.0, 0.0, 0.0, 0.0), linear_rate=1e9,
    inside=Link(0.0, 1e15), across=Link(0.0, 1e15), memory=1 << 40,
)  # fmt: skip
SHARDED = partial(plan_stages, hardware=FREE)

_making, _made = threading.Lock(), {}  # ranks that are threads share the random generator


def made(make: Callable[..., nn.Module], *arguments: object) -> nn.Module:
    """The same weights at every call."""
    with _making:
        key = make, arguments
        if key not in _made:
            torch.manual_seed(0)
            _made[key] = make(*arguments).double()
        return copy.deepcopy(_made[key])


def gradients(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and all gradients of a loss that looks at every element in its own way."""
    given = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in given.items()}
    out = model(**given)
    out = out if isinstance(out, Tensor) else out[0]
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    model.zero_grad()
    (out * g + out.square()).sum().backward()
    grads = {n: x.grad for n, x in [*given.items(), *model.named_parameters()] if x.is_floating_point()}
    return {"out": out.detach()} | {f"d {n}": g for n, g in grads.items() if g is not None}


def walks(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[nn.Module]:
    """The modules over whose parts a call walks, once for each walk."""
    found, named_modules = [], nn.Module.named_modules

    def noted(module: nn.Module, *memo: Any, **options: Any) -> Any:
        found.extend([] if memo else [module])  # a walk goes on into parts with what it has seen
        return named_modules(module, *memo, **options)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "named_modules", noted)
        call()
    return found


def compared(found: list[dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    """Every rank has the whole output, and the gradients of all ranks sum to those of one process."""
    for rank in found:
        torch.testing.assert_close(rank["out"], want["out"], rtol=0, atol=1e-10)
        assert set(rank) == set(want)
    for name in want.keys() - {"out"}:
        torch.testing.assert_close(
            sum(rank[name] for rank in found), want[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare_with_one(ranks: int, call: Callable[..., dict[str, Tensor]], *given: Any, **options: Any) -> None:
    """Compare what ``call(comm, *given)`` returns on some ranks with what it does on one. options: of `run_threads`."""
    (want,) = run_threads(1, call, *given)
    compared(run_threads(ranks, call, *given, **options), want)


class Multiply(nn.Module):
    """Triangle multiplication, channel by channel."""

    def __init__(self, outgoing: bool) -> None:
        super().__init__()
        self.form = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum(self.form, left, right)


class TriangleMultiplication(nn.Module):
    def __init__(self, dim: int, outgoing: bool) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.left, self.right, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.core = Multiply(outgoing)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(z)
        y = self.core(self.left(y) * mask, right=self.right(y) * mask)
        return z + self.gate(z).sigmoid() * self.out(self.out_norm(y))


class TriangleAttention(nn.Module):
    """Attention along rows (or columns) of pairs, with a bias from the third side of the triangle."""

    def __init__(self, dim: int, heads: int, starting: bool) -> None:
        super().__init__()
        self.heads, self.starting = heads, starting
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Linear(dim, heads)

    def forward(self, z: Tensor) -> Tensor:
        y, pair, key = self.norm(z), "i j" if self.starting else "j i", "j k" if self.starting else "k j"
        bias = rearrange(self.bias(y), f"b {key} h -> b 1 h j k")
        q, k, v = rearrange(self.qkv(y), f"b {pair} (qkv h d) -> qkv b i h j d", qkv=3, h=self.heads)
        s = torch.einsum("bihjd,bihkd->bihjk", q, k) / q.shape[-1] ** 0.5 + bias
        return z + self.out(rearrange(s.softmax(-1) @ v, f"b i h j d -> b {pair} (h d)"))


class Transition(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.net(z)


class PairStack(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(5, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "outgoing": TriangleMultiplication(dim, True), "incoming": TriangleMultiplication(dim, False),
                    "starting": TriangleAttention(dim, heads, True), "ending": TriangleAttention(dim, heads, False),
                    "transition": Transition(dim),
                }
            )
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.enter(z)
        for layer in self.layers:
            z = layer["outgoing"](z, mask)
            z = layer["incoming"](z, mask=mask)
            z = layer["starting"](z)
            z = layer["ending"](z)
            z = layer["transition"](z)
        return z


PAIR = {"z": "b i j c"}
MIX = Core("core", {"left": "b i j c", "right": "b i j c"}, "b i j c", "c", 8)
PAIRS = Spec(
    "PairStack",
    lambda model, given: dict(zip("bij", given["z"].shape)),
    (
        Block("layers.{i}.outgoing", PAIR, ("i", "j"), rows={"mask": "b i j 1"}, core=MIX),
        Block("layers.{i}.incoming", PAIR, ("i", "j"), rows={"mask": "b i j 1"}, core=MIX),
        Block("layers.{i}.starting", PAIR, ("j",), gathers={"bias": ("b i j h", ("i", "j"))}),
        Block("layers.{i}.ending", PAIR, ("i",), gathers={"bias": ("b i j h", ("i", "j"))}),
        Block("layers.{i}.transition", PAIR),
    ),
    outside=("enter",),
)


class Axial(nn.Module):
    """Attention along one axis of a grid, with a learned position on that axis and on the other."""

    def __init__(self, dim: int, heads: int, axis: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.axis, self.heads = axis, heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.lat = nn.Parameter(torch.randn(grid[0], 1, dim))
        self.register_buffer("lon", torch.randn(1, grid[1], dim))

    def forward(self, x: Tensor) -> Tensor:
        rows = "b mixed other" if self.axis == 1 else "b other mixed"
        y = self.qkv(self.norm(x + self.lat + self.lon))
        q, k, v = rearrange(y, f"{rows} (qkv h d) -> qkv b other h mixed d", qkv=3, h=self.heads)
        return x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), f"b other h mixed d -> {rows} (h d)"))


class Weather(nn.Module):
    def __init__(self, grid: tuple[int, int] = (5, 7), dim: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, dim), nn.Linear(dim, 3)
        self.north = nn.ModuleList(Axial(dim, 2, 1, grid) for _ in range(layers))
        self.east = nn.ModuleList(Axial(dim, 2, 2, grid) for _ in range(layers))
        self.mix = nn.ModuleList(Transition(dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for north, east, mix in zip(self.north, self.east, self.mix):
            x = mix(east(north(x)) * 0.9)  # row by row
        return self.head(x)


GRID, TABLES = {"x": "b h w c"}, {"lat": "h 1 c", "lon": "1 w c"}
ANY = ("b", "h", "w", None)
WEATHER = Spec(
    "Weather",
    lambda model, given: dict(zip("bhw", given["x"].shape)),
    (
        Block("north.{i}", GRID, ("h",), buffers=TABLES, rest=ANY),
        Block("east.{i}", GRID, ("w",), buffers=TABLES, rest=ANY),
        Block("mix.{i}", {"z": "b h w c"}, rest=ANY),
    ),
    exit=Exit("head", "b h w c", ANY),
    outside=("embed",),
)


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (rearrange(x, "b rows h d -> b h rows d") for x in (q, k, v))
        return rearrange(F.scaled_dot_product_attention(q, k, v), "b h rows d -> b rows h d")


class Shared(nn.Module):
    """The same, written with the verb."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here = surrounding()
        return seqpar.attention(*(x.flatten(0, 1) for x in (q, k, v)), here.plan, here.comm).view_as(q)


class Full(nn.Module):
    """A block of a 3-D DiT: modulated by a timestep, which all rows of a sample share."""

    def __init__(self, dim: int, heads: int, shared: bool) -> None:
        super().__init__()
        self.heads, self.core = heads, Shared() if shared else Attend()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.modulate, self.mlp = nn.Linear(dim, 2 * dim), Transition(dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale = self.modulate(t)[:, None].chunk(2, -1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = rearrange(self.qkv(y), "b rows (qkv h d) -> qkv b rows h d", qkv=3, h=self.heads)
        return self.mlp(x + self.out(rearrange(self.core(q, k, v), "b rows h d -> b rows (h d)")))


class DiT(nn.Module):
    def __init__(self, shared: bool = False, dim: int = 12, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.time, self.head = nn.Linear(3, dim), nn.Linear(1, dim), nn.Linear(dim, 3)
        self.blocks = nn.ModuleList(Full(dim, heads, shared) for _ in range(layers))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shape = x.shape
        x, t = self.embed(x).flatten(1, 2), self.time(t)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x).view(shape)


def dit(shared: bool) -> Spec:
    core = Core("core", dict.fromkeys("qkv", "b (t s) h d"), "b (t s) h d", "h", 3)
    how = {"attention": True, "heads": 3, "kv_heads": 3} if shared else {"core": core}
    return Spec(
        "DiT",
        lambda model, given: dict(zip("bts", given["x"].shape)),
        (Block("blocks.{i}", {"x": "b (t s) c"}, ("t", "s"), rows={"t": "b c"}, **how),),
        exit=Exit("head", "b (t s) c", ("t", "s", "b", None)),
        outside=("embed", "time"),
    )


class Streams(nn.Module):
    """Two kinds of rows that go through every stage together, such as latents and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Both() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for n, stage in enumerate(self.stages):
            x, y = (
                stage(x, y) if n % 2 == 0 else (u.transpose(1, 0) for u in stage(x.transpose(1, 0), y.transpose(1, 0)))
            )
        return x, y


class Both(nn.Module):
    """Mixes dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.left(x).cumsum(1), y * self.right(x).tanh().mean(1, keepdim=True)


FREELY = ("a", "b", None)
STREAMS = Spec(
    "Streams",
    lambda model, given: {"a": 5, "b": 7},
    tuple(
        Block(f"stages.{n}", {name: form for name in "xy"}, (form[2],), rest=FREELY)
        for n, form in enumerate(["a b c", "b a c"] * 2)
    ),
)
