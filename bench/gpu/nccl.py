"""Several GPUs over NCCL, and over `PeerComm` where they are in one machine: transfers, layers, agreements.

    torchrun --nproc-per-node 8 -m bench.gpu.nccl --json /kept/nccl.jsonl       # a GPU for each rank
    torchrun --nproc-per-node 8 -m bench.gpu.nccl --minutes 8 --slice hops      # stops in time; the next call goes on
    torchrun --nproc-per-node 2 -m bench.gpu.nccl --rehearse                    # tiny, over gloo on the CPU

Run it in the root of this repository, with PYTHONPATH=. where the package is not installed; `python -m
torch.distributed.run` is torchrun too.

Slices: `open` (what the first comm costs), `hops`, `all-to-alls` and `sums` (GB/s), `agree` (ms, with an idle device
and with a busy one), `layers` (attention under ring, fetch and Ulysses beside one GPU with the whole batch, with the
exposed time of a trace) and `magi` (the workload of `bench/gpu/magi.py`). Rows are those of `bench/gpu/run.py`,
written by rank 0. A time is that of the slowest rank, from the moment at which all ranks and their devices are ready.

Variables that start with NCCL_ and TORCH_NCCL_, CUDA_DEVICE_MAX_CONNECTIONS, ``--shared``, ``--min-ctas`` and
``--symmetric`` are part of a row's origin, so runs with others go into the same file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqpar
from bench.cpu.timeline import ON_GPU, Event, Timed, profiled, summary
from bench.gpu import magi
from bench.gpu.calls import FORWARD, TOLERANCE, Problem, Setup
from bench.gpu.machine import Machine, Sample, Timing
from bench.gpu.rows import Case, Results, Row
from bench.gpu.run import RESERVE, said
from bench.gpu.speed import rate
from bench.gpu.step import Lone
from bench.gpu.symmetric import peer_comm
from bench.gpu.verb import STEP, Verb
from bench.lib.watched import Watched
from seqpar.comm import Comm, GroupComm, PeerComm, ShmComm, Tag
from seqpar.testing import relative_rms
from seqpar.train import all_sum

RESULTS = Path(__file__).resolve().parents[1] / "results" / "nccl.jsonl"
MEGABYTES = (8, 33, 67, 268)  # keys of 2K and 8K rows, gradients of 8K, keys of 64K: 8 heads of 128, bf16
ROWS = (8192, 2048, 4096, 16384, 32768)  # a rank's
LONGEST = 1 << 18  # tokens that one GPU computes by itself
HOPS = 5  # in one time
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class World:
    """This rank among all. comms: by the name of what carries them. absent: why a comm is not among them."""

    def __init__(self, comm: Comm, machine: Machine, opened: Row | None = None, *, symmetric: bool = False) -> None:
        self.comm, self.machine, self.opened = comm, machine, opened
        self.comms: dict[str, Comm] = {"gloo" if machine.rehearsal else "NCCL": comm}
        self.absent: dict[str, str] = {}
        try:
            if machine.rehearsal:
                self.comms["ShmComm"] = ShmComm()  # in the place of PeerComm
            else:
                self.comms["PeerComm"] = peer_comm(1 << 31) if symmetric else PeerComm(pool_bytes=1 << 31)
        except (NotImplementedError, ValueError) as error:
            self.absent["PeerComm"] = f"{type(error).__name__}: {error}"[:300]

    def times(self, run: Callable[[], object], *, most: int = 10) -> Timing:
        """The times of the slowest rank: at most so many, and a few of what takes long."""
        run()
        rough = max(self.comm.gather("rough", self._once(run).ms))
        turns = 2 if self.machine.rehearsal else max(3, min(most, int(2000 / max(rough, 1e-3))))
        ranks = self.comm.gather("times", [tuple(self._once(run)) for _ in range(turns)])
        slowest = [max(Sample(*sample).ms for sample in each) for each in zip(*ranks)]
        host = statistics.median(max(Sample(*sample).host for sample in each) for each in zip(*ranks))
        return Timing(statistics.median(slowest), min(slowest), max(slowest), turns, host)

    def _once(self, run: Callable[[], object]) -> Sample:
        self.machine.wait()
        self.comm.agree("start", {})
        return self.machine.once(run)

    def skipped(self) -> Iterator[Row]:
        """Rows of the comms that are not here."""
        yield from ({"kernel": name, "mode": "", "skipped": why} for name, why in self.absent.items())


def hop(world: World, comm: Comm, after: int | None, before: int | None, size: int) -> tuple[Callable[[], None], bool]:
    """Some hops of so many bytes, and whether a first one brought what it should. None: nothing is sent or received."""
    device = world.machine.device
    x = torch.full((size,), comm.rank, dtype=torch.uint8, device=device)
    y = comm.empty((size,), torch.uint8, device)

    def run(hops: int = HOPS) -> None:
        call = comm.next_call()
        for number in range(hops):
            sends = {} if after is None else {after: [x]}
            recvs = {} if before is None else {before: [y]}
            comm.exchange(sends, recvs, tag=Tag(0, call, 0, number)).wait()

    run(1)
    return run, before is None or bool((y == before).all())


def hops(world: World, size: int) -> Iterator[Row]:
    """GB/s that a rank receives: between the first two ranks alone, and from neighbour to neighbour around a ring."""
    for name, comm in world.comms.items():
        me, other = comm.rank, 1 - comm.rank if comm.rank < 2 else None
        ways = {"one pair": (other, other), "all": ((me + 1) % comm.size, (me - 1) % comm.size)}
        for mode, (after, before) in ways.items():
            run, right = hop(world, comm, after, before, size)
            yield _transfer(world, name, mode, run, right, size)
    yield from world.skipped()


def all_to_alls(world: World, size: int) -> Iterator[Row]:
    """GB/s that a rank receives when every rank sends every other one its share of so many bytes."""
    for name, comm in world.comms.items():
        device, share = world.machine.device, size // comm.size
        x = torch.full((comm.size, share), comm.rank, dtype=torch.uint8, device=device)
        y = comm.empty((comm.size, share), torch.uint8, device)
        peers = [peer for peer in range(comm.size) if peer != comm.rank]

        def run(hops: int = HOPS, comm: Comm = comm, x: Tensor = x, y: Tensor = y, peers: list[int] = peers) -> None:
            call = comm.next_call()
            for number in range(hops):
                sends, recvs = ({p: [side[p]] for p in peers} for side in (x, y))
                comm.exchange(sends, recvs, tag=Tag(0, call, 1, number)).wait()

        run(1)
        right = all(bool((y[p] == p).all()) for p in peers)
        yield _transfer(world, name, "all", run, right, share * len(peers))
    yield from world.skipped()


def _transfer(world: World, name: str, mode: str, run: Callable[[], None], right: bool, received: int) -> Row:
    row: Row = {"kernel": name, "mode": mode}
    if not all(world.comm.gather("right", right)):
        return row | {"ok": False, "refused": "other bytes arrived than were sent"}
    return row | rate(world.times(run), bytes=HOPS * received) | {"baseline": None, "ratio": None, "hops": HOPS}


def sums(world: World, size: int) -> Iterator[Row]:
    """GB/s of `seqpar.train.all_sum` of so many bytes in fp32, beside `all_reduce` of the default group."""
    x = torch.ones(size // 4, device=world.machine.device)
    base = world.times(lambda: dist.all_reduce(x.clone()))
    for name, comm in world.comms.items():
        row: Row = {"kernel": name, "mode": "all_sum"}
        right = bool((all_sum(x, comm) == comm.size).all())
        if not all(world.comm.gather("right", right)):
            yield row | {"ok": False, "refused": "a sum of ones is not the number of ranks"}
            continue
        timing = world.times(lambda comm=comm: all_sum(x, comm))
        yield row | rate(timing, bytes=size) | {"baseline": "all_reduce", "ratio": base.ms / timing.ms}
    yield from world.skipped()


def agree(world: World) -> Iterator[Row]:
    """Host time of an agreement on equal facts: with an idle device, and behind work that takes it half a second."""
    comm, calls = world.comm, 3 if world.machine.rehearsal else 100
    for mode in ("device idle", "device busy"):
        row: Row = {"kernel": "agree", "mode": mode}
        if mode == "device busy" and world.machine.rehearsal:
            yield row | {"skipped": "the CPU has no queue"}
            continue
        world.machine.wait()
        comm.agree("start", {})
        if mode == "device busy":
            torch.cuda._sleep(1_000_000_000)
        taken = []
        for _ in range(calls):
            began = time.perf_counter()
            comm.agree("attention", {"heads": 32})
            taken.append((time.perf_counter() - began) * 1e3)
        ms = [max(each) for each in zip(*comm.gather("times", taken))]
        timing = Timing(statistics.median(ms), min(ms), max(ms), calls, statistics.median(ms))
        yield row | rate(timing, bytes=0.0) | {"gbps": None, "baseline": None, "ratio": None}


def opened(world: World) -> Iterator[Row]:
    """What the constructor of the first comm took: milliseconds, and memory of the device."""
    row: Row = {"kernel": next(iter(world.comms)), "mode": "constructor"}
    yield row | ({"skipped": "the comm was there before"} if world.opened is None else world.opened)


SCHEDULES: dict[str, Callable[[int], dict[str, Any]]] = {
    "ring": lambda ranks: {"transport": "ring"},
    "fetch": lambda ranks: {"transport": "fetch"},
    "Ulysses": lambda ranks: {"ulysses": ranks},
}


class Layer:
    """One rank's call of attention. accuracy: as of `seqpar.attention`."""

    def __init__(self, comm: Comm, plan: seqpar.Plan, tensors: list[Tensor], accuracy: str = "exact") -> None:
        self.comm, self.plan, self.accuracy, self.tensors = comm, plan, accuracy, tensors

    def forward(self) -> Tensor:
        """Run the forward without gradients."""
        with torch.no_grad():
            return seqpar.attention(*self.tensors[:3], self.plan, self.comm, accuracy=self.accuracy)

    def step(self) -> None:
        """Run forward and backward."""
        leaves = [x.detach().requires_grad_() for x in self.tensors[:3]]
        out = seqpar.attention(*leaves, self.plan, self.comm, accuracy=self.accuracy)
        out.backward(self.tensors[3])

    def over(self, comm: Comm) -> Layer:
        """The same call over another comm."""
        return Layer(comm, self.plan, self.tensors, self.accuracy)


def layers(world: World, setup: Setup) -> Iterator[Row]:
    """Every schedule on every comm, beside one GPU that computes the whole batch by itself."""
    problem, ranks = Problem(setup, world.machine.device), world.comm.size
    one = Verb(problem)
    with torch.no_grad():
        expected = seqpar.attention(problem.q, problem.k, problem.v, one.plan, one.comm)
    base = {mode: world.times(one.step if mode == STEP else one.forward) for mode in (FORWARD, STEP)}
    for schedule, options in SCHEDULES.items():
        plan = seqpar.Plan(problem.made, seqpar.Layout.zigzag(setup.lengths, ranks), **options(ranks))
        for name, comm in world.comms.items():
            tensors = (problem.q, problem.k, problem.v, problem.dout)
            layer = Layer(comm, plan, [seqpar.shard(x, plan, comm.rank) for x in tensors])
            error = relative_rms(layer.forward(), seqpar.shard(expected, plan, comm.rank))
            errors = world.comm.gather("errors", error)
            if not all(each <= 2 * TOLERANCE[setup.dtype] for each in errors):
                off = f"not as one GPU: off by {', '.join(f'{each:.1e}' for each in errors)}"
                yield {"kernel": name, "mode": schedule, "ok": False, "refused": off}
                continue
            for mode in (FORWARD, STEP):
                row = _of_layer(world, layer, mode, problem.flops())
                row |= {"baseline": "one GPU", "ratio": base[mode].ms / (ranks * row["ms"])}
                yield {"kernel": name, "mode": f"{schedule}, {mode}", **row, "one_gpu_ms": base[mode].ms}
    yield from world.skipped()


def _of_layer(world: World, layer: Layer, mode: str, forward_flops: float) -> Row:
    """The fields of a layer: its rate for each GPU, and what a trace of one call shows of its exchanges."""
    run = layer.step if mode == STEP else layer.forward
    timing = world.times(run)
    work = forward_flops * (3.5 if mode == STEP else 1.0) / world.comm.size
    return rate(timing, flops=work) | _exposed(world, layer, mode)


def _exposed(world: World, layer: Layer, mode: str) -> Row:
    """Milliseconds of one call, of the slowest rank: exchanging, computing, and exchanging while nothing computes.

    For a step also computing without exchanges, which take multiprocessors and bandwidth from it.
    """
    timed = Timed()
    traced = layer.over(Watched(layer.comm, timed)) if world.machine.rehearsal else layer
    run = traced.step if mode == STEP else traced.forward
    world.machine.wait()
    world.comm.agree("start", {})
    events = [marked(event) for event in profiled(world.machine.device, run)] + timed.found
    times = summary(events)
    own = {
        "exchanging_ms": times["exchanging"],
        "computing_ms": times["computing"],
        "exposed_ms": times["exchanging"] - times["hidden"],
    }
    if mode == STEP:
        own["computing_alone_ms"] = _alone(world, layer)
    ranks = world.comm.gather("trace", own)
    return {name: max(each[name] for each in ranks) for name in own}


def _alone(world: World, layer: Layer) -> float:
    """Milliseconds in which the same step computes on this rank while nothing is sent."""
    tape = Lone(world.comm.rank, world.comm.size)
    step = layer.over(tape).step
    tape.start()
    step()  # prepares what the tape receives
    tape.start()
    events = profiled(world.machine.device, step)
    return summary(events)["computing"]


def marked(event: Event) -> Event:
    """An event of the device's trace, of its own kind if it is an exchange: NCCL's kernels, copies between devices."""
    name = event.get("name", "").lower()
    if event.get("cat") in ON_GPU and ("nccl" in name or "ptop" in name):
        return event | {"cat": "exchange"}
    return event


def workload(world: World, case: magi.Workload) -> Iterator[Row]:
    """A published workload under the package's plans, beside the figures that were published for it.

    The time of backward is that of both less that of a forward.
    """
    tokens, ranks = case.tokens * world.comm.size, world.comm.size
    mask, setup = case.mask(tokens), case.setup
    draw = torch.Generator(world.machine.device).manual_seed(world.comm.rank)
    forward = 4.0 * mask.area() * setup.heads * setup.dim
    for schedule, plan in case.plans(mask, ranks).items():
        rows = plan.rows(world.comm.rank)
        shapes = ((setup.heads, setup.dim), (setup.kv_heads, setup.dim), (setup.kv_heads, setup.dim),
                  (setup.heads, setup.dim))  # fmt: skip
        tensors = [
            torch.randn(rows, *shape, generator=draw, device=world.machine.device, dtype=setup.dtype)
            for shape in shapes
        ]
        ways = ["exact"] if schedule == "Ulysses" else ["exact", "fast"]  # it has no parts to round
        for name, accuracy in itertools.product(world.comms, ways):
            layer = Layer(world.comms[name], plan, tensors, accuracy)
            yield from _of_workload(
                world, layer, name, schedule if accuracy == "exact" else f"{schedule} fast", forward
            )
    for method, (fwd, bwd) in case.published(ranks).items():
        yield {"kernel": method, "mode": "published", "what": magi.SOURCE, "skipped": f"{fwd} and {bwd} TFLOP/s/GPU, "
               "forward and backward, as published"}  # fmt: skip
    yield from world.skipped()


def _of_workload(world: World, layer: Layer, name: str, schedule: str, forward: float) -> Iterator[Row]:
    """The rows of one plan on one comm. forward: operations of all ranks."""
    once, both = (_of_layer(world, layer, mode, forward) for mode in (FORWARD, STEP))
    for mode, row in (FORWARD, once), (STEP, both):
        yield {"kernel": name, "mode": f"{schedule}, {mode}", **row, "baseline": None, "ratio": None}
    ms = both["ms"] - once["ms"]
    tflops = 2.5 * forward / world.comm.size / ms / 1e9 if ms > 0 else None
    yield {"kernel": name, "mode": f"{schedule}, backward", "ms": ms, "tflops": tflops, "baseline": None, "ratio": None,
           "ms_fastest": ms, "ms_slowest": ms}  # fmt: skip


def slices(tiny: bool, ranks: int) -> dict[str, list[Case]]:
    """Slice -> its cases, in the order in which they run."""
    sizes = (1 << 12,) if tiny else tuple(size * 1_000_000 for size in MEGABYTES)
    if tiny:
        made = {"heads": 4, "kv_heads": 4, "dim": 16, "v_dim": 16, "dtype": torch.float32}
        setups = [Setup("causal", (32 * ranks,), **made)]
    else:
        made = {"heads": 32, "kv_heads": 8, "dim": 128, "v_dim": 128}
        setups = [Setup("causal", (rows * ranks,), **made) for rows in ROWS if rows * ranks <= LONGEST]
    found = {
        "open": [Case("open", "first comm", opened)],
        "hops": [Case("hops", f"{size} bytes", partial(_sized, hops, size)) for size in sizes],
        "all-to-alls": [Case("all-to-alls", f"{size} bytes", partial(_sized, all_to_alls, size)) for size in sizes],
        "sums": [Case("sums", f"{size} bytes", partial(_sized, sums, size)) for size in sizes],
        "agree": [Case("agree", "equal facts", agree)],
        "layers": [Case("layers", str(setup), partial(_sized, layers, setup)) for setup in setups],
        "magi": [Case("magi", str(case), partial(_sized, workload, case)) for case in magi.workloads(tiny)],
    }
    return {name: [Case(c.slice, f"{c.name}, {ranks} ranks", c.run) for c in cases] for name, cases in found.items()}


def _sized(measure: Callable[[World, Any], Iterator[Row]], size: Any, world: World) -> Iterator[Row]:
    return measure(world, size)


def measured(comm: Comm, args: argparse.Namespace, opened: Row | None = None) -> list[Row]:
    """The new rows, on every rank; rank 0 writes and prints them. A collective."""
    machine = Machine(rehearsal=args.rehearse, minutes=args.minutes)
    if args.rehearse:
        machine.wait = lambda: None
    world = World(comm, machine, opened, symmetric=args.symmetric)
    variables: dict[str, Any] = {"shared": args.shared, "min_ctas": args.min_ctas, "symmetric": args.symmetric}
    variables |= {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    results = Results(args.json, machine.origin(args.commit) | {"variables": variables}) if comm.rank == 0 else None
    rows: list[Row] = []
    longest: dict[str, float] = {}  # seconds that a case takes, by slice
    for name, cases in slices(args.rehearse, comm.size).items():
        for case in cases if name in (args.slice or (name,)) else ():
            wanted = results is not None and not results.done(case)
            enough = machine.left() > max(RESERVE, 1.2 * longest.get(name, 0.0))
            wanted, enough = comm.gather("next case", (wanted, enough))[0]  # as rank 0 has it
            if not enough:
                return rows
            if wanted:
                began = time.monotonic()
                found = list(case.run(world))
                longest[name] = max(longest.get(name, 0.0), time.monotonic() - began)
                if results is not None:
                    found = results.add(case, found)
                    print(*(f"{row['slice']:12}{row['case']:36} {said(row)}" for row in found), sep="\n", flush=True)
                rows += found
    return rows


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--slice", action="append", choices=list(slices(True, 2)), help="may be given several times")
    found.add_argument("--json", type=Path, help=f"file of the rows, default {RESULTS}")
    found.add_argument("--minutes", type=float, default=float("inf"), help="after which no case starts")
    found.add_argument("--commit", help="what rows say where git cannot be asked")
    found.add_argument("--shared", action="store_true", help="the comm shares the group's communicator")
    found.add_argument("--min-ctas", type=int, help="of the comm's own communicators, see `seqpar.GroupComm`")
    found.add_argument("--symmetric", action="store_true", help="PeerComm with torch's symmetric memory")
    found.add_argument("--rehearse", action="store_true", help="tiny sizes over gloo on the CPU")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if a result is wrong."""
    options = parser().parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser().error("expected torchrun, as in: torchrun --nproc-per-node 8 -m bench.gpu.nccl")
    if int(os.environ["WORLD_SIZE"]) < 2:
        parser().error("expected two ranks or more: --nproc-per-node 2")
    if options.rehearse:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    if options.json is None:
        options.json = Path(tempfile.mkdtemp()) / "rehearsal.jsonl" if options.rehearse else RESULTS
    free = 0 if options.rehearse else torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    comm = GroupComm(private=not options.shared, min_ctas=options.min_ctas)
    ms = (time.perf_counter() - began) * 1e3
    memory = 0 if options.rehearse else free - torch.cuda.mem_get_info()[0]
    first = {"ms": ms, "ms_fastest": ms, "ms_slowest": ms, "tflops": None, "baseline": None, "ratio": None,
             "device_bytes": memory}  # fmt: skip
    rows = measured(comm, options, first)
    if comm.rank == 0:
        if comm.size in magi.GPUS and any(row["slice"] == "magi" for row in rows):
            print(magi.table(rows, comm.size))
        print(f"written to {options.json}")
    dist.destroy_process_group()
    return 1 if any(row.get("ok") is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
