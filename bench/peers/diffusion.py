"""Steps of Wan and Flux by seqpar beside diffusers' own context parallelism: time, bytes and errors, in one run.

    python -m bench.peers.diffusion                              # all cases on 2 processes
    python -m bench.peers.diffusion --cases Wan --rounds 3 --json bench/results/peers_diffusion.json

A step is a forward, then a backward up to the gradients of the weights, which neither side sums over ranks. Methods
take turns, in reversed order every second round; a time is that of the slowest rank, and so is its processor time. Each
first runs untimed, and its output, and the sum of all ranks' gradients, are compared with those of one process in
fp32. A method that does not run shows its error: on CPUs diffusers' ring, since it needs the logsumexp, which diffusers
has from kernels of GPUs alone. MB are what rank 0 sends in a step. Ratios are as in `bench.peers.attention`: to the
fastest of seqpar's rows over gloo, which is what diffusers' methods exchange by.
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
    """A model and its inputs. tokens: of its streams."""

    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    tokens: str
    dtype: torch.dtype = torch.float32


def wan() -> tuple[nn.Module, dict[str, Any]]:
    """A block of Wan 1.3B with half of its 12 heads and features, on 2 latent frames of 480p and 512 rows of text."""
    model = WanTransformer3DModel(num_attention_heads=6, num_layers=1, ffn_dim=4480)
    video, text = torch.randn(1, 16, 2, 60, 104), torch.randn(1, 512, 4096)
    return model, {"hidden_states": video, "timestep": torch.tensor([500.0]), "encoder_hidden_states": text}


def flux() -> tuple[nn.Module, dict[str, Any]]:
    """A block of either kind of Flux.1 with 6 of its 24 heads, on 1,024 x 512 pixels and 512 rows of text."""
    model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=6)
    places = torch.zeros(32, 64, 3)
    places[..., 1], places[..., 2] = torch.arange(32.0)[:, None], torch.arange(64.0)
    return model, {
        "hidden_states": torch.randn(1, 2048, 64), "encoder_hidden_states": torch.randn(1, 512, 4096),
        "pooled_projections": torch.randn(1, 768), "timestep": torch.tensor([0.5]), "img_ids": places.flatten(0, 1),
        "txt_ids": torch.zeros(512, 3),
    }  # fmt: skip


CASES = {
    "Wan": Case(wan, "3,120 of video"),
    "Wan bf16": Case(wan, "3,120 of video", torch.bfloat16),
    "Flux": Case(flux, "2,048 of image, 512 of text"),
    "Flux bf16": Case(flux, "2,048 of image, 512 of text", torch.bfloat16),
}
PLANS: dict[str, dict[str, Any]] = {"fetch": {}, "ring": {"transport": "ring"}, "Ulysses": {"ulysses": RANKS}}
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

    def turn(self, inputs: dict[str, Any], grad: Tensor) -> tuple[Tensor | None, Turn]:
        """A step, which leaves gradients in the weights. The output, on ranks that have one."""
        self.model.zero_grad()
        torch.set_num_threads(self.threads)
        dist.barrier()
        start, used, out = time.perf_counter(), time.process_time(), None
        middle = start
        if self.runs:
            out = self.model(**inputs, return_dict=False)[0]
            middle = time.perf_counter()
            out.backward(grad)
        turn = Turn(*slowest(middle - start, time.perf_counter() - start, time.process_time() - used))
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
    inputs = {key: x.to(case.dtype) if x.dim() > 2 else x for key, x in inputs.items()}
    exact = copy.deepcopy(model).float()
    expected = exact(**{key: x.float() for key, x in inputs.items()}, return_dict=False)[0]
    grad = torch.randn(expected.shape)
    expected.backward(grad)
    expected, grads = expected.detach(), grads_of(exact, every=False)
    del exact
    comms = {"gloo": comm} | ({} if native.missing() else {"shm": seqpar.ShmComm()})
    builders: dict[str, Callable[[], Method]] = {"one process": partial(Method, model, comm)}
    builders |= {title: partial(Method, model, comm, peer) for title, peer in PEERS.items()}
    builders |= {
        f"seqpar {title}, {kind}": partial(Method, model, carrier, plan=plan)
        for kind, carrier in comms.items()
        for title, plan in PLANS.items()
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
            outcomes[title].turns.append(running[title].turn(inputs, grad.to(case.dtype))[1])
    return outcomes


def rows_of(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """The rows of a case, the fastest first; ratios as (median, low, high)."""
    ran = {title: o for title, o in outcomes.items() if o.turns}
    ours = [o for title, o in ran.items() if title.startswith("seqpar") and title.endswith("gloo")]

    def medians(outcome: Outcome) -> Turn:
        return Turn(*map(statistics.median, zip(*outcome.turns)))

    def ratio(outcome: Outcome, side: int) -> tuple[float, float, float]:
        best = min(ours, key=lambda o: medians(o)[side])
        values = [turn[side] / other[side] for turn, other in zip(outcome.turns, best.turns, strict=True)]
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
    for column in ("method", "forward ms", "x", "both ms", "x", "interval", "CPU x", "interval", "MB", "error"):
        drawn.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        if "refusal" not in row:
            (both, *some), (used, *others) = row["both"], row["used"]
            drawn.add_row(
                row["method"], f"{row['forward_ms']:.0f}", f"{row['forward'][0]:.2f}", f"{row['both_ms']:.0f}",
                f"{both:.2f}", "{:.2f} to {:.2f}".format(*some), f"{used:.2f}", "{:.2f} to {:.2f}".format(*others),
                f"{row['mb']:.2f}", f"{row['error']:.0e}",
            )  # fmt: skip
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console, result, wrong = Console(width=140), [], False
    for name in args.cases:
        rows = rows_of(run_processes(RANKS, measure, name, args.rounds, timeout=1800.0)[0])
        console.print(table(f"{RANKS} ranks, {name}, {CASES[name].tokens}", rows))
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
