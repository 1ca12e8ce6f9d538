"""Steps of Wan and Flux by seqpar beside diffusers' own context parallelism: time, bytes and errors, in one run.

    python -m bench.peers.diffusion                              # all cases on 2 processes
    python -m bench.peers.diffusion --rounds 5 --json bench/results/peers_diffusion.json

A step is a forward, then a backward up to the gradients of the weights, which neither side sums over ranks. Models have
few blocks, as the table says: all blocks of a model do the same, and only what is outside of them counts for more than
it would. The small cases, in which the host's time shows, take several steps a turn.

Methods take turns, in reversed order every second round; a time is that of the slowest rank, and so is its processor
time. Each first runs untimed, and its output, and the sum of all ranks' gradients, are compared with those of one
process in fp32. A method that does not run shows its error: on CPUs diffusers' ring, since it needs the logsumexp,
which diffusers has from kernels of GPUs alone. MB are what rank 0 sends in a step. Ratios, of medians over rounds with
an interval, are to seqpar's Ulysses over gloo, since diffusers' methods exchange by gloo.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel, WanTransformer3DModel
from diffusers.utils import logging
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from bench.lib import records
from bench.lib.interval import interval
from bench.peers.attention import slowest
from seqpar import native
from seqpar.testing import relative_rms, run_processes

RANKS = 2


class Case(NamedTuple):
    """A model and its inputs. size: of both, in words. steps: of a turn."""

    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    size: str
    dtype: torch.dtype = torch.float32
    steps: int = 1


def wan(heads: int, dim: int, layers: int, video: tuple[int, int, int], text: int) -> tuple[nn.Module, dict[str, Any]]:
    """Blocks of Wan on latent frames (frames, height, width), which have 4 places of a token, and rows of text."""
    width = heads * dim
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=dim, num_layers=layers, ffn_dim=width * 35 // 6
    )
    return model, {
        "hidden_states": torch.randn(1, 16, *video), "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, text, 4096),
    }  # fmt: skip


def flux(heads: int, layers: int, high: int, wide: int, text: int) -> tuple[nn.Module, dict[str, Any]]:
    """Blocks of either kind of Flux.1, with heads of 128, on (high, wide) tokens of an image and rows of text."""
    model = FluxTransformer2DModel(num_layers=layers, num_single_layers=layers, num_attention_heads=heads)
    places = torch.zeros(high, wide, 3)
    places[..., 1], places[..., 2] = torch.arange(float(high))[:, None], torch.arange(float(wide))
    return model, {
        "hidden_states": torch.randn(1, high * wide, 64), "encoder_hidden_states": torch.randn(1, text, 4096),
        "pooled_projections": torch.randn(1, 768), "timestep": torch.tensor([0.5]), "img_ids": places.flatten(0, 1),
        "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip


WAN = partial(wan, 12, 128, 1, (1, 60, 52), 512), "1 of 30 blocks, 12 heads of 128, 780 rows of video (480 x 416)"
FLUX = (
    partial(flux, 6, 1, 32, 64, 512),
    "1 of 19 and 1 of 38 blocks, 6 of 24 heads of 128, 2,048 rows of image, 512 of text",
)
CASES = {
    "Wan": Case(*WAN),
    "Wan bf16": Case(*WAN, torch.bfloat16),
    "Flux": Case(*FLUX),
    "Flux bf16": Case(*FLUX, torch.bfloat16),
    "small Wan": Case(partial(wan, 4, 32, 4, (2, 16, 16), 32), "4 blocks, 4 heads of 32, 128 rows of video", steps=10),
    "small Flux": Case(
        partial(flux, 2, 2, 16, 16, 64), "2 blocks of either kind, 2 heads of 128, 256 rows of image, 64 of text",
        steps=10,
    ),
}  # fmt: skip
PLACES = "timestep", "img_ids", "txt_ids"  # in fp32 always
PLANS: dict[str, dict[str, Any]] = {"fetch": {}, "Ulysses": {"ulysses": RANKS}}
REFERENCE = "seqpar Ulysses, gloo"
PEERS = {"diffusers Ulysses": "ulysses_degree", "diffusers ring": "ring_degree"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # relative RMS


class Turn(NamedTuple):
    """Seconds of the slowest rank. used: of the processor, of forward and backward."""

    forward: float
    both: float
    used: float


class Outcome(NamedTuple):
    """What a method did with a case, or why it did not run. sent: bytes of rank 0. error: the largest relative one."""

    turns: list[Turn]
    sent: float
    error: float
    refusal: str = ""


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in torch's functional collectives."""

    bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size, name = dist.get_world_size(), str(func)
        if "all_to_all_single" in name:
            self.bytes += args[0].nbytes * (size - 1) / size
        elif "all_gather_into_tensor" in name:
            self.bytes += args[0].nbytes * (size - 1)
        return func(*args, **(kwargs or {}))


class Method:
    """A copy of a model, with the same weights, that a library has made parallel; or one process, on rank 0."""

    def __init__(self, model: nn.Module, comm: seqpar.Comm, peer: str = "", plan: dict[str, Any] | None = None) -> None:
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.comm, self.runs, self.threads = comm, True, 1
        if peer:
            # it divides by the number of accelerators
            with mock.patch.object(torch.accelerator, "device_count", return_value=1):
                self.model.enable_parallelism(config=ContextParallelConfig(**{peer: RANKS}))
        elif plan is not None:
            self.handle = seqpar.parallelize(self.model, comm, plan=partial(seqpar.Plan, **plan))
        else:
            self.runs, self.threads = comm.rank == 0, RANKS

    def turn(self, inputs: dict[str, Any], grad: Tensor, steps: int = 1) -> tuple[Tensor | None, Turn]:
        """Steps, the last of which leaves gradients in the weights. The output, on ranks that have one."""
        self.model.zero_grad()
        torch.set_num_threads(self.threads)
        dist.barrier()
        start, used, out, forward = time.perf_counter(), time.process_time(), None, 0.0
        for _ in range(steps if self.runs else 0):
            self.model.zero_grad()
            before = time.perf_counter()
            out = self.model(**inputs, return_dict=False)[0]
            forward += time.perf_counter() - before
            out.backward(grad)
        both, used = time.perf_counter() - start, time.process_time() - used
        turn = Turn(*slowest(forward / steps, both / steps, used / steps))
        torch.set_num_threads(1)
        return None if out is None else out.detach(), turn

    @contextmanager
    def counted(self) -> Iterator[list[float]]:
        """A context that leaves what this rank has sent in the list."""
        before, sent = self.comm.stats.bytes_sent, list[float]()
        with Sent() as mode:
            yield sent
        sent.append(mode.bytes + self.comm.stats.bytes_sent - before)


def grads_of(model: nn.Module, *, every: bool) -> Tensor:
    """All gradients of the weights. every: the sum of all ranks'."""
    some = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    grads = torch.cat([x.float() for x in some])
    if every:
        dist.all_reduce(grads)
    return grads


def measure(comm: seqpar.Comm, name: str, rounds: int) -> dict[str, Outcome]:
    """All methods on one case, in turns, on this rank; every rank returns the same."""
    logging.set_verbosity_error()
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make()
    model.to(case.dtype)
    inputs = {key: x if key in PLACES else x.to(case.dtype) for key, x in inputs.items()}
    exact = copy.deepcopy(model).float()
    expected = exact(**{key: x.float() for key, x in inputs.items()}, return_dict=False)[0]
    grad = torch.randn(expected.shape)
    expected.backward(grad)
    expected, grads = expected.detach(), grads_of(exact, every=False)
    del exact
    comm = seqpar.GroupComm()  # as users create it; the one given compares every call
    comms: dict[str, seqpar.Comm] = {"gloo": comm} | ({} if native.missing() else {"shm": seqpar.ShmComm()})
    builders: dict[str, Callable[[], Method]] = {"one process": partial(Method, model, comm)}
    builders |= {title: partial(Method, model, comm, peer) for title, peer in PEERS.items()}
    builders |= {
        f"seqpar {title}, {kind}": partial(Method, model, carrier, plan=plan)
        for kind, carrier in comms.items()
        for title, plan in PLANS.items()
        if kind == "gloo" or title == "Ulysses"
    }
    running, outcomes = dict[str, Method](), dict[str, Outcome]()
    for title, build in builders.items():
        try:
            method = build()
            method.turn(inputs, grad.to(case.dtype))
            with method.counted() as sent:
                out, _ = method.turn(inputs, grad.to(case.dtype))
        except Exception as refusal:  # every rank has the same
            text = " ".join(f"{type(refusal).__name__}: {refusal}".split())
            outcomes[title] = Outcome([], 0.0, float("nan"), text[:200])
            continue
        apart = relative_rms(grads_of(method.model, every=True), grads)
        (error,) = slowest(apart if out is None else max(apart, relative_rms(out, expected)))
        running[title], outcomes[title] = method, Outcome([], sent[0], error)
    for n in range(rounds):
        for title in list(running)[:: -1 if n % 2 else 1]:
            outcomes[title].turns.append(running[title].turn(inputs, grad.to(case.dtype), case.steps)[1])
    return outcomes


def rows_of(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """The rows of a case, the fastest first; ratios as (median, low, high)."""
    ran = {title: o for title, o in outcomes.items() if o.turns}

    def medians(outcome: Outcome) -> Turn:
        return Turn(*map(statistics.median, zip(*outcome.turns)))

    def ratio(outcome: Outcome, side: int) -> tuple[float, float, float]:
        pairs = zip(outcome.turns, ran[REFERENCE].turns, strict=True)
        values = [turn[side] / other[side] for turn, other in pairs]
        return statistics.median(values), *interval(values)

    return [
        {
            "method": title, "forward_ms": 1e3 * medians(o).forward, "both_ms": 1e3 * medians(o).both,
            "used_ms": 1e3 * medians(o).used, "forward": ratio(o, 0), "both": ratio(o, 1), "used": ratio(o, 2),
            "mb": o.sent / 1e6, "error": o.error,
        }
        for title, o in sorted(ran.items(), key=lambda item: medians(item[1]).both)
    ] + [{"method": title, "refusal": o.refusal} for title, o in outcomes.items() if not o.turns]  # fmt: skip


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """The methods that ran."""
    drawn = Table(title=title, title_justify="left", box=None)
    for column in ("method", "forward ms", "x", "both ms", "x", "interval", "CPU ms", "x", "interval", "MB", "error"):
        drawn.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        if "refusal" not in row:
            (both, *some), (used, *others) = row["both"], row["used"]
            drawn.add_row(
                row["method"], f"{row['forward_ms']:.0f}", f"{row['forward'][0]:.2f}", f"{row['both_ms']:.0f}",
                f"{both:.2f}", "{:.2f} to {:.2f}".format(*some), f"{row['used_ms']:.0f}", f"{used:.2f}",
                "{:.2f} to {:.2f}".format(*others),
                f"{row['mb']:.2f}", f"{row['error']:.0e}",
            )  # fmt: skip
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console, result, wrong = Console(width=140), [], False
    for name in args.cases:
        rows = rows_of(run_processes(RANKS, measure, name, args.rounds, timeout=1800.0)[0])
        console.print(table(f"{RANKS} ranks, {name}, {CASES[name].size}", rows))
        for row in rows:
            if "refusal" in row:
                console.print(f"{row['method']} is not timed: {row['refusal']}", markup=False, style="dim")
            wrong |= row["method"].startswith("seqpar") and not row.get("error", 1.0) <= TOLERANCE[CASES[name].dtype]
        result += [{"ranks": RANKS, "case": name} | row for row in rows]
        if args.json:  # after every case, as a run takes long
            records.write(args.json, records.environment() | {"rounds": args.rounds, "rows": result})
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
