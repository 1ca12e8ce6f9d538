"""Calls of attention on one device: inputs, operations, the kernels that can compute them, and checks of results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import seqpar.kernels
from bench.gpu import rivals
from bench.gpu.machine import Machine, unable
from bench.gpu.rows import Row
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.kernels import CallSpec, Grads, Kernel, Operands, Score, StepFacts, Sums, acc_dtype, softmax
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.reference import Reference
from seqpar.kernels.triton import Triton
from seqpar.kernels.vendor import Segmented
from seqpar.ops.attention.signature import lengths_repeat
from seqpar.plan.steps import BandBounds, StepBand
from seqpar.testing import relative_rms

# relative root mean square error that any kernel may show against float64, by the rounding unit of its inputs
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
PLAIN = {"blockwise", "reference"}  # in plain torch: timed up to so many pairs of a query, a key and a head
PLAIN_PAIRS = 1 << 28
FORWARD, BACKWARD, DETERMINISTIC = "forward", "backward", "backward, deterministic"
Tensors = dict[str, Tensor]


def flops(area: int, heads: int, dim: int, v_dim: int, *, backward: bool = False) -> float:
    """Operations of the products over attended pairs: two products forward, and five backward, 2.5 times as many."""
    return 2.0 * area * heads * (dim + v_dim) * (2.5 if backward else 1.0)


def short(dtype: torch.dtype) -> str:
    """The short name of a dtype: bf16, fp16, fp32."""
    return {torch.bfloat16: "bf16"}.get(dtype, f"fp{8 * dtype.itemsize}")


@dataclass(frozen=True)
class Setup:
    """A call without its tensors.

    name: of the mask. lengths: of documents; of a prompt and its answers, if ``tree``. window: keys to the left, None
    for all. sinks: first keys that all queries see beside the window.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    tree: bool = False

    def mask(self) -> Mask:
        """The mask of the call."""
        if self.tree:
            return Mask.shared_prefix([(self.lengths[0], self.lengths[1:])])
        return Mask(self.lengths, causal=self.causal, window=(self.window, None), sink_tokens=self.sinks)

    @property
    def plain(self) -> bool:
        """Whether lengths and the window say which keys a query sees."""
        return not (self.sinks or self.tree)

    @property
    def tokens(self) -> int:
        """The tokens of all documents."""
        return sum(self.lengths)

    def small(self, tokens: int) -> Setup:
        """A small call for the same kernels that the oracle can compute: uneven documents, a window that cuts."""
        lengths = (tokens,) if len(self.lengths) == 1 else (tokens, 3, tokens // 2, tokens - 1)
        return replace(self, lengths=lengths, window=None if self.window is None else tokens // 5)

    def __str__(self) -> str:
        heads = self.heads if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dim = self.dim if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        return f"{self.name} {self.tokens}, {heads} heads of {dim}, {short(self.dtype)}"


def facts_of(mask: Mask, keys: Ints, device: torch.device) -> list[StepFacts]:
    """The facts of all queries of a mask over a buffer of keys at ascending positions, band by band."""
    at = np.arange(mask.tokens)
    pos, bounds = mask.key_positions(at), [mask.bounds(at, band=n) for n in range(len(mask.bands))]
    found = [BandBounds(*each, band.until) for each, band in zip(bounds, mask.bands)]
    return [facts_of_band(StepBand.of(pos, each, keys), device) for each in found]


def facts_of_band(band: StepBand, device: torch.device) -> StepFacts:
    """The facts of one band of a step, as the schedule passes them to a kernel."""
    arrays = [band.at, band.lo, band.hi, band.pos] + ([] if band.until is None else [band.until])
    pos, lo, hi, keys, *until = upload(arrays, device)

    def memo(key: Hashable, make: Any) -> Any:
        return band.memo((device, key), make)

    return StepFacts(pos, lo, hi, keys, until[0] if until else None, band.tiles, lambda: band.segments, memo)


class Problem:
    """A call with its tensors: q, k, v, dout [rows, heads, width] of normal numbers on the device."""

    def __init__(self, setup: Setup, device: torch.device, *, seed: int = 0) -> None:
        self.setup, self.device, self.made = setup, device, setup.mask()
        self.score = Score(setup.dim**-0.5)
        draw = torch.Generator(device).manual_seed(seed)
        shapes = ((setup.heads, setup.dim), (setup.kv_heads, setup.dim), (setup.kv_heads, setup.v_dim),
                  (setup.heads, setup.v_dim))  # fmt: skip
        self.q, self.k, self.v, self.dout = (
            torch.randn(setup.tokens, *shape, dtype=setup.dtype, device=device, generator=draw) for shape in shapes
        )

    @cached_property
    def facts(self) -> list[StepFacts]:
        """The facts of the call as one step, band by band."""
        return facts_of(self.made, np.arange(self.made.kv_tokens), self.device)

    def cover(self, bm: int, bn: int) -> float:
        """The attended fraction of the pairs of all tiles that are visited; see `seqpar.facts.Tiles.cover`."""
        return self.made.area() / (sum(facts.tiles(bm, bn).visits for facts in self.facts) * bm * bn)

    def flops(self, *, backward: bool = False) -> float:
        """The operations of the call; see `flops`."""
        s = self.setup
        return flops(self.made.area(), s.heads, s.dim, s.v_dim, backward=backward)

    def wide(self) -> Problem:
        """The same problem in float64."""
        other = Problem.__new__(Problem)
        other.__dict__.update(self.__dict__)
        for name in ("q", "k", "v", "dout"):
            setattr(other, name, getattr(self, name).double())
        return other


class Contestant(Protocol):
    """A way to compute the attention of a problem."""

    def forward(self) -> object:
        """Run the forward."""
        ...

    def backward(self) -> object:
        """Run the backward, after a forward that is not timed."""
        ...

    def results(self, backward: bool) -> Tensors:
        """out; with backward also dq, dk and dv."""
        ...


class OfKernel:
    """A kernel of the package, called by its protocol as one step, band after band.

    Its backward pays for what the package's own backward does besides: delta, zeroed sums, and casts to the inputs'
    dtype. Peers pay for the same inside autograd.
    """

    def __init__(self, kernel: Kernel, problem: Problem) -> None:
        self.kernel, self.problem = kernel, problem
        q = problem.q
        self.bands = [Operands(q, problem.k, problem.v, facts, problem.score) for facts in problem.facts]
        self.acc = acc_dtype(q.dtype)
        self.out = q.new_empty(*q.shape[:2], problem.v.shape[2])
        self.lse = q.new_empty(q.shape[1], q.shape[0], dtype=self.acc)
        wide, last = q.dtype == self.acc, len(self.bands) - 1
        acc = self.out if wide else torch.empty_like(self.out, dtype=self.acc) if last else None
        self.sums = [
            Sums(acc, self.lse, self.out if n == last and not wide else None, first=n == 0) for n in range(last + 1)
        ]
        self._ran = False

    def forward(self) -> None:
        """Launch the kernel, once for each band."""
        for x, sums in zip(self.bands, self.sums):
            self.kernel.forward(x, sums)
        self._ran = True

    @cached_property
    def grads(self) -> Grads:
        """Sums to which `launches` adds."""
        return self._grads()

    def _grads(self) -> Grads:
        """The arguments of backward, after a forward, which runs now if it has not."""
        if not self._ran:
            self.forward()
        p = self.problem
        delta = softmax.delta(p.dout, self.out, p.facts[0]).contiguous()
        dq = torch.zeros_like(p.q, dtype=self.acc)
        home = p.k.new_zeros(*p.k.shape[:2], p.k.shape[2] + p.v.shape[2], dtype=self.acc)
        dk, dv = home.split([p.k.shape[2], p.v.shape[2]], -1)
        return Grads(p.dout, self.lse, delta, self.out, dq, dk, dv)

    def backward(self) -> tuple[Tensor, ...]:
        """Compute dq, dk and dv in the inputs' dtype."""
        grads = self._grads()
        self._add(grads)
        return tuple(x.to(self.problem.q.dtype) for x in (grads.dq, grads.dk, grads.dv))

    def launches(self) -> None:
        """Launch the kernels of a backward and nothing else; gradients add up."""
        self._add(self.grads)

    def _add(self, grads: Grads) -> None:
        for x in self.bands:
            self.kernel.backward(x, grads)

    def step(self) -> None:
        """Run forward and backward."""
        self.forward()
        self.backward()

    def results(self, backward: bool) -> Tensors:
        """The results, written to memory that holds NaN before. Gradients are the sums, not rounded."""
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.forward()
        got = {"out": self.out.clone(), "lse": self.lse.clone()}
        if backward:
            grads = self._grads()
            self._add(grads)
            got |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        return got


def errors(got: Tensors, expected: Tensors) -> dict[str, float]:
    """The relative root mean square error of each tensor. Rows that see no key must only be empty in both."""
    result = {}
    for name, x in got.items():
        want = expected[name]
        if name == "lse":
            unseen = want == -torch.inf
            if not torch.equal(x == -torch.inf, unseen):
                result["lse"] = torch.inf
                continue
            x, want = x.masked_fill(unseen, 0.0), want.masked_fill(unseen, 0.0)
        result[name] = relative_rms(x, want)
    return result


def verdict(found: dict[str, float], limit: float) -> str | None:
    """The first result whose error is too large or NaN, or None."""
    off = {name: error for name, error in found.items() if not error <= limit}
    return (
        ", ".join(f"{name} off by {error:.1e}" for name, error in off.items()) + f", limit {limit:.1e}" if off else None
    )


class Label(NamedTuple):
    """The name and options of a contestant, as its rows have them."""

    kernel: str
    mode: str


class Nobody:
    """Replaces the position kernel behind a library, so that a time under the library's name is its own."""

    name = "nobody"

    def forward(self, x: Operands, into: Sums) -> None:
        """Raise: the library alone cannot compute this call."""
        raise NotImplementedError("all or some of this call falls to the position kernel")

    def backward(self, x: Operands, grads: Grads) -> None:
        """Raise: the library alone cannot compute this call."""
        raise NotImplementedError("all or some of this call falls to the position kernel")


def kernels() -> dict[str, Kernel]:
    """The package's kernels by name, including those that are used only when asked for by name.

    Triton's compile what they launch, without the variants that another batch of a training would need.
    """
    own: dict[str, Kernel] = {
        kernel.name: kernel for kernel in (Triton(variants=False), Triton(tf32=True, variants=False))
    }
    others = (*seqpar.kernels.KERNELS, *seqpar.kernels.VENDORS)
    return own | {kernel.name: kernel for kernel in others if kernel.name not in own}


def asked(setup: Setup, machine: Machine, *, grads: bool, deterministic: bool, merges: bool = False) -> CallSpec:
    """The spec by which kernels decide whether they can compute a call."""
    major, minor = (0, 0) if machine.rehearsal else torch.cuda.get_device_capability()
    mask = setup.mask()
    return CallSpec(
        machine.device.type, 10 * major + minor, setup.dtype, setup.heads, setup.kv_heads, setup.dim, setup.v_dim,
        grads=grads, deterministic=deterministic, merges=merges or len(mask.bands) > 1,
        few_shapes=lengths_repeat(mask.lengths), until=mask.has_until,
    )  # fmt: skip


def absent(kernel: Kernel, machine: Machine) -> str | None:
    """The reason why a kernel cannot run on this machine, or None."""
    for dtype in (torch.bfloat16, torch.float32):
        call = asked(Setup("causal", (64,), 1, 1, 64, 64, dtype), machine, grads=False, deterministic=True)
        reason = kernel.refuses(call)
        if reason is None:
            return None
    return reason


Make = Callable[[Problem, bool], Contestant]  # of a problem; alone: a library without the position kernel behind it


def field(machine: Machine, setup: Setup, *, backward: bool) -> tuple[dict[Label, Make], list[Row]]:
    """The contestants of a setup, and rows for kernels of this machine that cannot compute it.

    Kernels that can be deterministic are asked to be; other libraries are taken both ways.
    """
    found: dict[Label, Make] = {}
    rows: list[Row] = []
    pairs = setup.mask().area() * setup.heads
    for name, kernel in kernels().items():
        if (name in PLAIN and pairs > PLAIN_PAIRS) or name == "triton_tf32" or absent(kernel, machine):
            continue
        library = isinstance(kernel, Segmented)
        refused = {}
        for deterministic in (True, False) if backward else (True,):
            call = asked(setup, machine, grads=backward, deterministic=deterministic)
            label = Label(name, FORWARD if not backward else DETERMINISTIC if deterministic else BACKWARD)
            reason = kernel.refuses(call) or (kernel.varies(call) if isinstance(kernel, Segmented) else None)
            if reason:
                refused[label] = reason
            elif deterministic or library:
                found[label] = functools.partial(_of_kernel, kernel, call)
        if not any(label.kernel == name for label in found):
            rows += [{**label._asdict(), "skipped": reason} for label, reason in refused.items()]
    for peer in rivals.PEERS:
        if peer.name in machine.without or peer.missing(machine.device):
            continue
        reason = peer.refuses(setup, backward)
        label = Label(peer.name, peer.mode if backward else FORWARD)
        if reason:
            rows += [] if peer.rare else [{**label._asdict(), "skipped": reason}]
        elif backward or peer.mode == BACKWARD:
            found[label] = lambda problem, alone, peer=peer: peer.make(problem)
    return found, rows


def _of_kernel(kernel: Kernel, call: CallSpec, problem: Problem, alone: bool) -> OfKernel:
    if alone and isinstance(kernel, Segmented):
        options = {"deterministic": call.deterministic, "merges": call.merges or call.until}
        return OfKernel(Segmented(kernel.library, rest=Nobody(), **options), problem)
    return OfKernel(fitted(kernel, call), problem)


def fitted(kernel: Kernel, call: CallSpec) -> Kernel:
    """The kernel in the form in which the package would use it for a call."""
    return kernel.specialised_for(call) if isinstance(kernel, Segmented) else kernel


def plainly(kernel: Kernel) -> Make:
    """A kernel as it is."""
    return lambda problem, alone: OfKernel(kernel, problem)


def oracle(problem: Problem, backward: bool) -> Tensors:
    """The results in float64 on the problem's device, with the whole matrix of scores."""
    return OfKernel(Reference(), problem.wide()).results(backward)


def refused(machine: Machine, label: Label, setup: Setup, make: Make, *, backward: bool) -> Row | None:
    """A row that says why a contestant is not timed, or None if it is right on a small call of the same kind."""
    known = machine.doubt(label.kernel, short(setup.dtype), setup.dim, setup.v_dim)
    if known:
        return {**label._asdict(), "ok": False, "refused": known}
    small = setup.small(24 if machine.rehearsal else 1300)
    key = (label, small, backward)
    if key not in machine.known:
        try:
            machine.known[key] = _judged(machine, small, make, backward)
        except Exception as error:
            machine.known[key] = unable(error)
            machine.wait()
    return {**label._asdict(), **machine.known[key]} if machine.known[key] else None


def _judged(machine: Machine, small: Setup, make: Make, backward: bool) -> Row | None:
    key = ("oracle", small, backward)
    if key not in machine.known:
        problem = Problem(small, machine.device, seed=1)
        machine.known[key] = problem, oracle(problem, backward)
    problem, expected = machine.known[key]
    found = errors(make(problem, False).results(backward), expected)
    off = verdict(found, TOLERANCE[small.dtype])
    return {"ok": False, "refused": off, "errors": found} if off else None
