"""Blocks that a trial must refuse, as their rows do not follow from a rank's, and blocks that it must accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import LocalComm
from seqpar.integrations.diffusers import parallelize
from tests.integrations.diffusers_verdicts import Setting, verdict

FRAMES, HEIGHT, WIDTH, D, TEXT = 3, 2, 4, 12, 7
ROWS = FRAMES * HEIGHT * WIDTH

Rule = Callable[..., Any]  # of a block, its rows and further arguments -> its rows


class Block(nn.Module):
    """A block that does what its rule says, with layers for all of them."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule, self.calls, self.gate = rule, 0, nn.Parameter(torch.full((D,), 0.5))
        self.qkv, self.proj, self.mlp, self.router = (nn.Linear(D, n) for n in (3 * D, D, D, 4))
        self.conv, self.spatial = nn.Conv1d(D, D, 3, padding=1), nn.Conv2d(D, D, 3, padding=1)
        self.rnn, self.mixer, self.group = nn.GRU(D, D, batch_first=True), nn.Linear(ROWS, ROWS), nn.GroupNorm(2, D)
        self.batch = nn.BatchNorm1d(D, track_running_stats=False)
        self.register_buffer("mean", torch.zeros(D))

    def heads(self, h: Tensor) -> list[Tensor]:
        """Queries, keys and values, [B, 2, T, D / 2] each."""
        return [x.unflatten(-1, (2, -1)).transpose(-2, -3) for x in self.qkv(h).chunk(3, -1)]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, mask, **options)
        return self.proj(out.transpose(-2, -3).flatten(-2))

    def to_itself(self, h: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        return h + self.attended(*self.heads(h), mask, **options)

    def forward(self, *arguments: Any) -> Any:
        return self.rule(self, *arguments)


class Model(nn.Module):
    """Two blocks between layers that every rank computes whole. rounds: further arguments of the blocks in each.

    between: what happens to the rows after a block.
    """

    def __init__(self, rule: Rule, between: Callable[[Any], Any] = lambda some: some) -> None:
        super().__init__()
        self.between = between
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList([Block(rule) for _ in range(2)])

    def forward(self, streams: Sequence[Tensor], rounds: Sequence[tuple[Any, ...]]) -> Tensor:
        some: Any = tuple(map(self.embed, streams))
        for more in rounds:
            for layer in self.layers:
                some = layer(*some, *more)
                some = self.between(some if isinstance(some, tuple) else (some,))
        return torch.cat([self.head(h).flatten() for h in some])


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def made(
    rule: Rule, given: Callable[[int], Any], gate: float | None, samples: int, **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and its streams and rounds for so many samples."""
    torch.manual_seed(0)
    model = Model(rule, **options).double()
    if gate is not None:
        for layer in model.layers:
            nn.init.constant_(layer.gate, gate)
    streams, *rounds = given(samples)
    return model, {"streams": streams, "rounds": rounds}


def alone(b: int) -> Any:
    """One stream, two rounds, nothing further."""
    return [x(b, ROWS, D)], (), ()


def over_channels(h: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """A layer that takes [B, D, T]."""
    return layer(h.transpose(1, 2)).transpose(1, 2)


def in_parts(self: Block, h: Tensor, parts: int, *, across: bool = False) -> Tensor:
    """Attention inside of each of some parts of the rows, or across them."""
    several = h.unflatten(1, (parts, -1))
    several = several.transpose(1, 2) if across else several
    out = self.to_itself(several.flatten(0, 1)).unflatten(0, several.shape[:2])
    return (out.transpose(1, 2) if across else out).flatten(1, 2)


def linear_attention(self: Block, h: Tensor) -> Tensor:
    q, k, v = self.heads(h)
    return self.proj((F.relu(q) @ (F.relu(k).transpose(-1, -2) @ v)).transpose(1, 2).flatten(2))


def chosen_tokens(self: Block, h: Tensor) -> Tensor:
    """Each expert computes a quarter of the tokens: those that it prefers."""
    best = self.router(h).topk(h.shape[1] // 4, dim=1).indices
    out = torch.zeros_like(h)
    for expert in range(4):
        at = best[..., expert, None].expand(-1, -1, D)
        out = out.scatter_add(1, at, (expert + 1) * self.mlp(h.gather(1, at)))
    return out


def within_capacity(self: Block, h: Tensor) -> Tensor:
    """Each expert computes the first four tokens that prefer it."""
    expert = self.router(h).argmax(-1, keepdim=True)
    place = F.one_hot(expert[..., 0], 4).cumsum(1).gather(-1, expert)
    return self.mlp(h) * (place <= 4)


def turned(y: Tensor, angles: Tensor) -> Tensor:
    """y [B, H, T, D] turned by angles [T, D / 2]."""
    a, b = y.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def counted(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1], device=h.device)


def rotary(self: Block, h: Tensor, angles: Tensor) -> Tensor:
    q, k, v = self.heads(h)
    return h + self.attended(turned(q, angles), turned(k, angles), v)


def other_keys(self: Block, h: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = self.heads(h)
    return h + self.attended(q, change(k), change(v))


def third_call(self: Block, h: Tensor) -> Tensor:
    self.calls += 1
    return h.mean(1, keepdim=True) * (self.calls > 1)


def running_mean(self: Block, h: Tensor) -> Tensor:
    self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
    return h - self.mean


def by_step(self: Block, h: Tensor, step: Any) -> Tensor:
    h = self.to_itself(h)
    return h + h.mean(1, keepdim=True) if step > 0.5 else h


def if_alike(self: Block, h: Tensor, times: Tensor) -> Tensor:
    return self.to_itself(h * times) * (2 if torch.equal(times, times[:, :1].expand_as(times)) else 1)


class Centred(torch.autograd.Function):
    """Nothing forward; backward subtracts the mean over rows."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        return dh - dh.mean(1, keepdim=True)


def with_divided_gradients(self: Block, h: Tensor) -> Tensor:
    out = self.to_itself(h)
    if out.requires_grad:
        out.register_hook(lambda dy: dy / dy.norm())
    return out


def plus_mean(self: Block, h: Tensor, gate: Any) -> Tensor:
    return (out := self.to_itself(h)) + gate * out.mean(1, keepdim=True)


def sums_of_groups(self: Block, h: Tensor, group: Tensor) -> Tensor:
    """Plus the sum of all rows that have the same number [T] or [B, T]."""
    out = self.to_itself(h)
    if group.dim() == 1:
        return out + torch.zeros(h.shape[0], ROWS, D, dtype=h.dtype).index_add(1, group, out)[:, group]
    return out + (group[:, :, None] == group[:, None]).to(h.dtype) @ out


def groups(b: int, *, of_samples: bool = False) -> Any:
    """Numbers of which no two are equal, then of groups of three rows."""
    every = torch.arange(ROWS).expand(b, -1) if of_samples else torch.arange(ROWS)
    return [x(b, ROWS, D)], (every,), (every // 3,)


def means_of_windows(self: Block, h: Tensor, rows: int) -> Tensor:
    out = self.to_itself(h)
    return out + torch.cat([y.mean(1, keepdim=True).expand_as(y) for y in out.split(rows, 1)], 1)


def keeps_mean(self: Block, h: Tensor, kept: Any) -> Tensor:
    """Leave the mean of the rows in an argument: a list, dict, object or tensor."""
    out, mean = self.to_itself(h), h.detach().mean(1)
    if isinstance(kept, Tensor):
        kept.copy_(1000 * mean)
    elif isinstance(kept, list):
        kept.append(mean)
    else:
        (kept if isinstance(kept, dict) else vars(kept))["mean"] = mean
    return out


def in_its_argument(self: Block, h: Tensor) -> Tensor:
    return self.to_itself(h.add_(1.0).clone())


def mean_above(self: Block, h: Tensor, step: Tensor, read: Callable[[Tensor], float]) -> Tensor:
    out = self.to_itself(h)
    return out + out.mean(1, keepdim=True) if read(step.detach()) > 5 else out


def counted_experts(self: Block, h: Tensor) -> Tensor:
    """Experts that tokens choose, each called for as many as did."""
    flat = (g := self.to_itself(h)).flatten(0, 1)
    chosen = self.router(flat).argmax(-1)
    at, counts = chosen.argsort(stable=True), chosen.bincount(minlength=4).numpy()
    parts = [(n + 1) * self.mlp(flat[some]) for n, some in enumerate(at.split(counts.tolist()))]
    return g + torch.zeros_like(flat).index_copy(0, at, torch.cat(parts)).view_as(g)


def with_valid_text(self: Block, h: Tensor, text: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with those tokens of text that are valid, in each sample others."""
    of_image, of_text, out = self.heads(h), self.heads(text), list[Tensor]()
    for n, flags in enumerate(valid):
        at = flags.nonzero().flatten()
        both = [torch.cat([x[n], y[n].index_select(1, at)], 1) for x, y in zip(of_image, of_text)]
        some = F.scaled_dot_product_attention(*(y[None] for y in both))
        out.append(F.pad(some, (0, 0, 0, text.shape[1] - len(at))))
    joined = self.proj(torch.cat(out).transpose(1, 2).flatten(2))
    return h + joined[:, : h.shape[1]], text + joined[:, h.shape[1] :]


def joint(self: Block, h: Tensor, text: Tensor, *order: int) -> tuple[Tensor, Tensor]:
    q, k, v = (torch.cat(each, 2) for each in zip(self.heads(text), self.heads(h)))
    out = self.attended(q, k, v)
    return h + out[:, text.shape[1] :], text + out[:, : text.shape[1]]


# what a block adds to its rows after attention, by a gate
ADDED: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "the mean of the rows": lambda s, h: h.mean(1, keepdim=True),
    "their greatest": lambda s, h: h.amax(1, keepdim=True),
    "the first of them": lambda s, h: h[:, :1],
    "their sum so far": lambda s, h: h.cumsum(1),
    "their neighbours": lambda s, h: h.roll(1, 1),
    "them in reverse": lambda s, h: h.flip(1),
    "them in order of size": lambda s, h: h.sort(1).values,
    "means of pairs of them": lambda s, h: h.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1),
    "them by their norm": lambda s, h: h / h.norm(),
    "them by their number": lambda s, h: h / h.shape[1],
    "their counted positions": lambda s, h: counted(h)[:, None] / 10.0,
    "a convolution": lambda s, h: over_channels(h, s.conv),
    "a spatial convolution": lambda s, h: over_channels(h, lambda y: s.spatial(y.unflatten(2, (-1, WIDTH))).flatten(2)),
    "a recurrence": lambda s, h: s.rnn(h)[0],
    "a layer over tokens": lambda s, h: over_channels(h, s.mixer),
    "a Fourier transform": lambda s, h: torch.fft.fft(h, dim=1).real,
    "a batch norm": lambda s, h: over_channels(h, s.batch),
    "a group norm": lambda s, h: over_channels(h, s.group),
    "attention by hand": lambda s, h: (h @ h.mT).softmax(-1) @ h,
    "linear attention": linear_attention,
    "attention of channels": lambda s, h: h @ (h.mT @ h).softmax(-1),
    "experts that choose tokens": chosen_tokens,
    "experts of limited capacity": within_capacity,
    "random numbers": lambda s, h: torch.rand_like(h),
    "dropout": lambda s, h: F.dropout(h),
    "what counts its calls": third_call,
    "what a buffer has kept": running_mean,
}  # fmt: skip

# other rules of attention, and what further arguments blocks get
REPLACED: dict[str, tuple[Rule, Callable[[int], Any]]] = {
    "windows": (partial(in_parts, parts=6), alone),
    "frame by frame": (partial(in_parts, parts=FRAMES), alone),
    "along time": (partial(in_parts, parts=FRAMES, across=True), alone),
    "a causal mask of counted rows": (
        lambda s, h: s.to_itself(h, counted(h)[:, None] >= counted(h)), alone),
    "a band of counted rows": (
        lambda s, h: s.to_itself(h, (counted(h)[:, None] - counted(h)).abs() < 4), alone),
    "counted rotary positions": (lambda s, h: rotary(s, h, counted(h)[:, None] / torch.arange(1.0, 4.0)), alone),
    "pooled keys": (partial(other_keys, change=lambda k: k.unflatten(2, (-1, 2)).mean(3)), alone),
    "every second key": (partial(other_keys, change=lambda k: k[:, :, ::2]), alone),
    "padded keys": (partial(other_keys, change=lambda k: F.pad(k, (0, 0, 0, -k.shape[2] % 16))), alone),
    "values of neighbours": (lambda s, h: h + s.attended(*s.heads(h)[:2], s.heads(h)[2].roll(1, 2)), alone),
    "a scale by the number of rows": (lambda s, h: s.to_itself(h, scale=1 / h.shape[1]), alone),
    "queries by their greatest": (
        lambda s, h: h + s.attended(s.heads(h)[0] / s.heads(h)[0].amax(), *s.heads(h)[1:]), alone),
    "branches by step": (by_step, lambda b: ([x(b, ROWS, D)], (0.2,), (0.8,))),
    "branches by a tensor of a step": (
        by_step, lambda b: ([x(b, ROWS, D)], (torch.tensor(0.2),), (torch.tensor(0.8),))),
    "branches by the number of rows": (lambda s, h: by_step(s, h, h.shape[1] > 20), alone),
    "branches by whether rows are alike": (
        if_alike, lambda b: ([x(b, ROWS, D)], (x(b, ROWS, 1),), (x(b, 2, 1).repeat_interleave(ROWS // 2, 1),))),
    "branches by whether rows are seen": (
        lambda s, h, seen: by_step(s, h, not seen.all()),
        lambda b: ([x(b, ROWS, D)], (torch.ones(b, ROWS, dtype=torch.bool),), (torch.arange(ROWS).expand(b, -1) > 2,))),
    "branches by an array": (
        partial(mean_above, read=lambda step: step.numpy().max()),
        lambda b: ([x(b, ROWS, D)], (torch.zeros(1),), (torch.full((1,), 9.0),))),
    "branches by a text": (
        partial(mean_above, read=lambda step: float(f"{step:.1f}")),
        lambda b: ([x(b, ROWS, D)], (torch.tensor(0.0),), (torch.tensor(9.0),))),
    "branches by whether a graph is made": (lambda s, h: by_step(s, h, float(h.requires_grad)), alone),
    "a gate that an argument opens": (
        plus_mean, lambda b: ([x(b, ROWS, D)], (torch.tensor(0.0),), (torch.tensor(1.0),))),
    "gradients minus their mean": (lambda s, h: s.to_itself(Centred.apply(h)), alone),
    "such gradients in a checkpoint": (
        lambda s, h: checkpoint(lambda h: s.to_itself(Centred.apply(h)), h, use_reentrant=False), alone),
    "gradients by their norm": (with_divided_gradients, alone),
    "groups of rows": (sums_of_groups, groups),
    "groups of rows of each sample": (sums_of_groups, partial(groups, of_samples=True)),
    "windows of the trial's own half": (partial(means_of_windows, rows=11), alone),
    "a mean in a list": (keeps_mean, lambda b: ([x(b, ROWS, D)], ([],))),
    "a mean in a dict": (keeps_mean, lambda b: ([x(b, ROWS, D)], ({},))),
    "a mean in an object": (keeps_mean, lambda b: ([x(b, ROWS, D)], (SimpleNamespace(),))),
    "a mean in a tensor": (keeps_mean, lambda b: ([x(b, ROWS, D)], (torch.zeros(b, D, dtype=torch.int),))),
    "rows written into its argument": (in_its_argument, alone),
}  # fmt: skip
# what a block returns besides, and what the model makes of it
RETURNED: dict[str, tuple[Rule, Callable[[Any], Any]]] = {
    "the number of rows": (lambda s, h: (s.to_itself(h), h.shape[1]), lambda some: (some[0] / some[1],)),
    "an object": (lambda s, h: SimpleNamespace(h=s.to_itself(h)), lambda some: (some[0].h,)),
}

BAD: dict[str, Callable[[int], Any]] = {
    name: partial(made, lambda s, h, change=change: (g := s.to_itself(h)) + s.gate * change(s, g), alone, None)
    for name, change in ADDED.items()
}
BAD["the mean of the rows by a gate of zero"] = partial(
    made, lambda s, h: (g := s.to_itself(h)) + s.gate * g.mean(1, keepdim=True), alone, 0.0
)
BAD |= {name: partial(made, rule, given, None) for name, (rule, given) in REPLACED.items()}
BAD |= {name: partial(made, rule, alone, None, between=change) for name, (rule, change) in RETURNED.items()}
BAD["the mean of the rows by a buffer of zeros"] = partial(
    made, lambda s, h: (g := s.to_itself(h)) + s.mean * g.mean(1, keepdim=True), alone, None
)

GOOD: dict[str, tuple[Rule, Callable[[int], Any]]] = {
    "attention and a layer": (lambda s, h: (g := s.to_itself(h)) + s.mlp(F.layer_norm(g, (D,))).relu(), alone),
    "causal attention": (lambda s, h: s.to_itself(h, is_causal=True), alone),
    "one head of keys": (
        lambda s, h: h + s.attended(s.heads(h)[0], *(y[:, :1] for y in s.heads(h)[1:]), enable_gqa=True), alone),
    "attention to text": (
        lambda s, h, text: s.to_itself(h) + s.attended(s.heads(h)[0], *s.heads(text)[1:]),
        lambda b: ([x(b, ROWS, D)], *[(x(b, TEXT, D),)] * 2)),
    "attention with text": (joint, lambda b: ([x(b, ROWS, D), x(b, TEXT, D)], (), ())),
    "given angles": (rotary, lambda b: ([x(b, ROWS, D)], *[(x(ROWS, D // 4),)] * 2)),
    "keys that are seen": (
        lambda s, h, seen: s.to_itself(h, seen[:, None, None]),
        lambda b: ([x(b, ROWS, D)], *[(torch.arange(ROWS).expand(b, -1) > 2,)] * 2)),
    "a bias for each pair": (
        lambda s, h, bias: s.to_itself(h, bias), lambda b: ([x(b, ROWS, D)], *[(x(1, 2, ROWS, ROWS),)] * 2)),
    "times of tokens": (
        lambda s, h, time: s.to_itself(h * time) * time, lambda b: ([x(b, ROWS, D)], *[(x(b, ROWS, D),)] * 2)),
    "a step that changes nothing": (lambda s, h, step: s.to_itself(h), lambda b: ([x(b, ROWS, D)], (1,), (2,))),
    "experts that tokens choose": (
        lambda s, h: (g := s.to_itself(h)) + s.mlp(g) * (s.router(g).argmax(-1, keepdim=True) + 1), alone),
    "experts that count their tokens": (counted_experts, alone),
    "attention with valid text": (
        with_valid_text,
        lambda b: ([x(b, ROWS, D), x(b, TEXT, D)], *[(torch.arange(TEXT) < 5 - torch.arange(b)[:, None],)] * 2)),
    "tokens before samples": (
        lambda s, h: h + s.attended(*s.heads(h.transpose(0, 1))).transpose(0, 1),
        lambda b: ([x(ROWS, b, D)], (), ())),
    "packed tokens": (lambda s, h: s.to_itself(h), lambda b: ([x(ROWS, D)], (), ())),
    "a checkpoint of attention and a layer": (
        lambda s, h: checkpoint(lambda h: s.mlp(s.to_itself(h).relu()), h, use_reentrant=False), alone),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_block_whose_rows_do_not_follow_is_refused_by_name(name: str) -> None:
    found = verdict(BAD[name], Setting(2, 1, False), parallelize)
    assert found.startswith("refused") and "layers." in found, found


@pytest.mark.parametrize("setting", [Setting(2, 2, False), Setting(3, 1, False)], ids=str)
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.sampled(2)
def test_a_block_whose_rows_follow_is_accepted(name: str, setting: Setting) -> None:
    assert verdict(partial(made, *GOOD[name], None), setting, parallelize) == "exact"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("alike", [False, True])
def test_a_mask_made_of_given_labels_is_right_or_refused(ranks: int, alike: bool) -> None:
    """Its rows and keys are a rank's, so that no rank has the mask of its rows to the keys of others."""

    def rule(self: Block, h: Tensor, labels: Tensor) -> Tensor:
        return self.to_itself(h, labels[:, None, :, None] == labels[:, None, None])

    def given(b: int) -> Any:
        labels = torch.arange(ROWS).expand(b, -1) // 12
        return [x(b, ROWS, D)], (0 * labels if alike else labels,), (labels,)

    found = verdict(partial(made, rule, given, None), Setting(ranks, 2, False), parallelize)
    assert found.startswith(("exact", "refused")), found


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"blocks": ("block",)}, r"blocks=\('block',\)\): no list is called block; the lists of modules are layers$"),
        (
            {"whole": ("adapter", "layers")},
            r"whole=\('adapter', 'layers'\)\): no list is called adapter; the lists of modules are layers$",
        ),
        ({"blocks": "layers"}, r"blocks='layers'\): give a tuple of names; the lists of modules are layers$"),
    ],
)
def test_names_of_no_list_are_refused_with_those_there_are(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parallelize(Model(lambda self, h: h), LocalComm(), **options)


def test_whole_alone_makes_any_module_parallel_by_its_blocks() -> None:
    rule, given = GOOD["attention and a layer"]
    model, _ = made(rule, given, None, 1)
    model.adapter = nn.ModuleList([nn.Identity()])
    seqpar.parallelize(model, LocalComm(), whole=("adapter",)).undo()
    with pytest.raises(NotImplementedError, match="Model has no list of blocks .* whose tokens could be shared"):
        seqpar.parallelize(model, LocalComm(), whole=("layers", "adapter"))
