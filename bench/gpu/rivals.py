"""Attention of other libraries, called as users call it: torch's fused operators, flex, FlashAttention 3 and 4.

Adapters of the package call some of the same kernels, so only the time on the host differs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from bench.gpu.calls import Problem, Setup


class Call:
    """Attention of a problem by a peer, through autograd."""

    def __init__(self, peer: Peer, problem: Problem) -> None:
        self.peer, self.problem = peer, problem
        self.leaves = [x.detach() for x in (problem.q, problem.k, problem.v)]
        self.out: Tensor | None = None
        self.blocks: Any = None  # flex attention's mask

    def forward(self) -> Tensor:
        """Run the forward without a graph."""
        with torch.no_grad():
            return self.peer.attend(self, *self.leaves)

    def backward(self) -> tuple[Tensor, ...]:
        """Run the backward of a graph that is kept."""
        if self.out is None:
            self.leaves = [x.requires_grad_() for x in self.leaves]
            self.out = self.peer.attend(self, *self.leaves)
        with self.peer.during_backward():
            return torch.autograd.grad(self.out, self.leaves, self.problem.dout, retain_graph=True)

    def results(self, backward: bool) -> dict[str, Tensor]:
        """See `bench.gpu.calls.Contestant`."""
        return {"out": self.forward()} | (dict(zip(("dq", "dk", "dv"), self.backward())) if backward else {})


class Peer:
    """A library. mode: deterministic or not. rare: timed in few cases, and checked in these instead of small ones."""

    name: str
    mode = "backward"
    rare = False

    def missing(self, device: torch.device) -> str | None:
        """The reason why it cannot run on this machine, or None."""
        return "for CUDA" if device.type != "cuda" else None

    def refuses(self, setup: Setup, backward: bool) -> str | None:
        """The reason why it cannot compute a call, or None."""
        return None

    def make(self, problem: Problem) -> Call:
        """The contestant of a problem."""
        return Call(self, problem)

    def attend(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output [rows, heads, v_dim]."""
        raise NotImplementedError

    def during_backward(self) -> Any:
        """A block around the backward."""
        return torch.enable_grad()


class Sdpa(Peer):
    """`scaled_dot_product_attention` with one backend."""

    def __init__(self, name: str, backend: str, *, deterministic: bool = False) -> None:
        self.name, self.backend, self.deterministic = name, backend, deterministic
        self.mode = "backward, deterministic" if deterministic else "backward"

    def missing(self, device: torch.device) -> str | None:
        """The plain backend runs on the CPU only, the others on CUDA only."""
        if self.backend == "MATH":
            return None if device.type == "cpu" else "for the CPU"
        return super().missing(device)

    def refuses(self, setup: Setup, backward: bool) -> str | None:
        """The operator has neither windows nor documents."""
        one = len(setup.lengths) == 1 and setup.window is None
        return None if one else f"{self.name} has no mask {setup.name}"

    def attend(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Peer`."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            out = F.scaled_dot_product_attention(*_first(q, k, v), is_causal=call.problem.setup.causal, **grouped)
        return out[0].transpose(0, 1)

    def during_backward(self) -> Any:
        """A block in which all of torch is deterministic, as a single call cannot be."""
        return _Deterministic() if self.deterministic else super().during_backward()


class _Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


class Flex(Peer):
    """`flex_attention`, compiled, with a block mask as its documentation creates them."""

    name = "flex"
    rare = True  # it compiles again for every length

    def refuses(self, setup: Setup, backward: bool) -> str | None:
        """Compilation takes long, so it runs two masks at one size, and trees."""
        taken = (setup.name, setup.tokens, setup.dim) in (("causal", 16384, 128), ("magi", 32768, 128))
        taken |= setup.tree
        return None if taken else "flex is compiled for few of the cases"

    def make(self, problem: Problem) -> Call:
        """The contestant of a problem, whose block mask is created beforehand."""
        from torch.nn.attention.flex_attention import create_block_mask

        call = Call(self, problem)
        seen, n = _seen(problem), problem.setup.tokens
        call.blocks = None if seen is None else create_block_mask(seen, None, None, n, n, device=problem.device)
        return call

    def attend(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Peer`."""
        grouped = q.shape[1] != k.shape[1]
        out = _compiled_flex()(*_first(q, k, v), block_mask=call.blocks, enable_gqa=grouped)
        return out[0].transpose(0, 1)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _seen(problem: Problem) -> Any:
    """The mask as a function of indices, or None if all pairs are seen."""
    setup = problem.setup
    if setup.tree:
        until = torch.from_numpy(problem.made.until()).to(problem.device)
        return lambda b, h, i, j: (i >= j) & (i < until[j])
    if len(setup.lengths) > 1:
        lengths = torch.tensor(setup.lengths, device=problem.device)
        document = torch.repeat_interleave(torch.arange(len(setup.lengths), device=problem.device), lengths)
        return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    if setup.window is not None:
        width = setup.window
        return lambda b, h, i, j: (i >= j) & (i - j <= width)
    return (lambda b, h, i, j: i >= j) if setup.causal else None


class Flash(Peer):
    """`flash_attn_func` of a module by FlashAttention's authors, or by those who package it."""

    def __init__(self, name: str, module: str, *, backward: bool = True) -> None:
        self.name, self.module, self.has_backward = name, module, backward

    def missing(self, device: torch.device) -> str | None:
        """The reason why the module cannot be imported, or None."""
        return super().missing(device) or _import_error(self.module)

    def refuses(self, setup: Setup, backward: bool) -> str | None:
        """Packed documents are left to the package's adapters."""
        if backward and not self.has_backward:
            return f"{self.name} has no backward"
        return None if len(setup.lengths) == 1 and setup.plain else f"{self.name} has no mask {setup.name} here"

    def attend(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Peer`."""
        setup = call.problem.setup
        window = {} if setup.window is None else {"window_size": (setup.window, 0)}
        got = import_module(self.module).flash_attn_func(q[None], k[None], v[None], causal=setup.causal, **window)
        return (got[0] if isinstance(got, tuple) else got)[0]


@cache
def _import_error(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first(*tensors: Tensor) -> list[Tensor]:
    """Views of [rows, heads, width] as [1, heads, rows, width]."""
    return [x.transpose(0, 1)[None] for x in tensors]


PEERS: tuple[Peer, ...] = (
    Sdpa("sdpa_flash", "FLASH_ATTENTION"),
    Sdpa("sdpa_flash", "FLASH_ATTENTION", deterministic=True),
    Sdpa("sdpa_cudnn", "CUDNN_ATTENTION"),
    Sdpa("sdpa_math", "MATH"),
    Flex(),
    Flash("fa3", "flash_attn_interface"),
    Flash("fa3_fwd", "fa3_fwd_interface", backward=False),
    Flash("fa4", "flash_attn.cute"),
)
