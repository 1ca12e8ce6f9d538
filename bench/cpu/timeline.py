"""Writes a Chrome trace of attention calls, forward and backward, and says how much of their exchanges is hidden.

    python -m bench.cpu.timeline --out trace.json                                   # two processes over gloo
    python -m bench.cpu.timeline --out trace.json --device cuda --ranks 4           # ranks share one GPU
    torchrun --nproc-per-node 8 -m bench.cpu.timeline --out trace.json              # NCCL, a GPU each

The trace (chrome://tracing, ui.perfetto.dev) has a range for every step's computation, posting and waiting, and on the
CPU a row "exchanges", from the time when both ends have posted to the arrival of the last byte; NCCL's kernels also
wait for a late peer. The overlap share is the part of the time with an exchange under way in which the same rank
computes (on one GPU: any rank), the waited share that in which its host waits; on the CPU the rest lies under posting,
in which gloo writes what the socket takes. Head trades and the gradients of the last step have nothing to hide behind.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import seqpar
from bench.lib.watched import Side, Watched
from seqpar.comm import Comm, GroupComm, Tag, Work
from seqpar.ops.attention.call import Phase
from seqpar.testing import run_processes, run_threads

Event = dict[str, Any]
Spans = list[tuple[float, float]]  # microseconds, disjoint and ascending

COMPUTING = ("seqpar compute", "seqpar differentiate")
WAITING = "seqpar wait"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Timed:
    """Records when each exchange of CPU tensors is posted and when it is complete."""

    def __init__(self) -> None:
        self.found: list[Event] = []

    def exchange(self, post: Callable[[], Work], sends: Side, recvs: Side, tag: Tag) -> Work:
        name, start = f"{Phase(tag.phase).name.lower()} {tag.stage}", time.time_ns() / 1e3
        peers = sorted({peer for side in (sends, recvs) for peer, tensors in side.items() if any(map(len, tensors))})
        work = post()

        def note() -> None:
            event = {"ph": "X", "cat": "exchange", "name": name, "ts": start, "dur": time.time_ns() / 1e3 - start}
            self.found.append(event | {"tid": "exchanges", "args": {"peers": peers, "call": tag.call}})

        return TimedWork(work, note)


class TimedWork:
    """A work that a thread waits for from the start, so that its completion has a time."""

    def __init__(self, work: Work, note: Callable[[], None]) -> None:
        self.error: BaseException | None = None

        def complete() -> None:
            try:
                work.wait()
                note()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=complete, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


class OnStream:
    """Runs the copies of a `LocalComm` on a CUDA stream of their own, as NCCL does."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def exchange(self, post: Callable[[], Work], sends: Side, recvs: Side, tag: Tag) -> Work:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return post()


def layer(comm: Comm, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """One rank's attention calls, forward and backward."""
    tokens, ranks = args.tokens, comm.size
    layouts = {
        "contiguous": lambda: seqpar.Layout.contiguous(tokens, ranks),
        "zigzag": lambda: seqpar.Layout.zigzag([tokens], ranks),
        "striped": lambda: seqpar.Layout.striped(tokens, ranks),
    }
    plan = seqpar.Plan(
        seqpar.Mask([tokens]), layouts[args.layout](), transport=args.transport, ulysses=args.ulysses,
        stage_bytes=args.stage_mib << 20,
    )  # fmt: skip
    g = torch.Generator().manual_seed(comm.rank)
    rows, dtype, kv_heads = plan.rows(comm.rank), getattr(torch, args.dtype), args.kv_heads or args.heads
    shapes = [(rows, heads, args.dim) for heads in (args.heads, kv_heads, kv_heads, args.heads)]
    q, k, v, dout = (torch.randn(shape, generator=g).to(device, dtype) for shape in shapes)

    def run() -> None:
        for _ in range(args.calls):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            seqpar.attention(*leaves, plan, comm, kernel=args.kernel).backward(dout)

    return run


def profiled(device: torch.device, run: Callable[[], object], threads: bool = False) -> list[Event]:
    """The events of a run in Chrome's format, with times in microseconds since 1970."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    config = _ExperimentalConfig(profile_all_threads=True) if threads else None
    with profile(activities=activities, experimental_config=config) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        found = json.loads(Path(f"{folder}/trace.json").read_text())
    events: list[Event] = found["traceEvents"]
    for event in events:
        if "ts" in event:
            event["ts"] += found.get("baseTimeNanoseconds", 0) / 1e3
    return events


def cpu_rank(comm: Comm, args: argparse.Namespace) -> list[Event]:
    """The events of one process of a gloo group, exchanges included."""
    comm.check_every = "batch"  # testing's default compares every call, and the ranks would start together
    timed, device = Timed(), torch.device("cpu")
    run = layer(Watched(comm, timed), args, device)
    run()
    timed.found.clear()
    comm.agree("start", {})
    events = profiled(device, run)
    return [event | {"pid": comm.rank} for event in events + timed.found]


def nccl_rank(comm: Comm, args: argparse.Namespace) -> list[Event]:
    """The events of one process of an NCCL group with a GPU of its own. The exchanges are NCCL's kernels."""
    device = torch.device("cuda", torch.cuda.current_device())
    run = layer(comm, args, device)
    run()
    torch.cuda.synchronize()
    comm.agree("start", {})
    events = profiled(device, run)
    for event in events:
        if event.get("cat") in ON_GPU and "nccl" in event["name"].lower():
            event["cat"] = "exchange"
    return [event | {"pid": f"rank {comm.rank} {event.get('pid', '')}"} for event in events]


def sharing_gpu(args: argparse.Namespace) -> list[Event]:
    """The events of ranks that are threads and share one GPU: a stream for each, and one for all exchanges."""
    device = torch.device("cuda", torch.cuda.current_device())
    copies = torch.cuda.Stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(args.ranks)]
    barrier = threading.Barrier(args.ranks + 1, timeout=300)

    def rank_main(comm: Comm) -> None:
        comm.check_every = "batch"
        with torch.cuda.stream(streams[comm.rank]):
            run = layer(Watched(comm, OnStream(copies)), args, device)
            run()
            torch.cuda.synchronize()
            barrier.wait()  # all ranks are warm
            barrier.wait()  # the profiler runs
            run()
            torch.cuda.synchronize()
            barrier.wait()

    def during() -> None:
        with torch.cuda.stream(copies):
            torch.cuda._sleep(1000)  # its kernel identifies the stream in the trace
        barrier.wait()
        barrier.wait()

    ranks = threading.Thread(target=run_threads, args=(args.ranks, rank_main), daemon=True)
    ranks.start()
    barrier.wait()
    events = profiled(device, during, threads=True)
    ranks.join()
    stream = next(e["args"]["stream"] for e in events if e.get("cat") == "kernel" and "spin" in e["name"])
    for event in events:
        if event.get("cat") in ON_GPU and event["args"].get("stream") == stream and "spin" not in event["name"]:
            event["cat"] = "exchange"
    return events


def spans(events: Iterable[Event]) -> Spans:
    """The disjoint spans of time that at least one event covers."""
    merged: Spans = []
    for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def length(found: Spans) -> float:
    """The length of spans in microseconds."""
    return sum(stop - start for start, stop in found)


def common(a: Spans, b: Spans) -> Spans:
    """The spans of time that both cover."""
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return [(start, stop) for start, stop in pairs if start < stop]


def summary(events: list[Event]) -> dict[str, float]:
    """Milliseconds of one rank, or of all on one GPU: whole, computing, exchanging, hidden, waiting."""
    timed = [e for e in events if e.get("ph") == "X"]
    exchanges = [e for e in timed if e["cat"] == "exchange"]
    ranges = [e for e in timed if e["cat"] == "user_annotation" and e["name"].startswith("seqpar ")]
    kernels = [e for e in timed if e["cat"] in ON_GPU]
    computing = spans(kernels or [e for e in ranges if e["name"].startswith(COMPUTING)])
    exchanging = spans(exchanges)
    hidden = length(common(exchanging, computing))
    every = spans([*ranges, *exchanges, *kernels])
    whole = every[-1][1] - every[0][0] if every else 0.0
    waiting = spans([e for e in ranges if e["name"].startswith(WAITING)])
    times = {"whole": whole, "computing": length(computing), "exchanging": length(exchanging), "hidden": hidden}
    times |= {"host waiting": length(waiting)}
    found = {name: value / 1e3 for name, value in times.items()}
    if not exchanging:
        return found | {"overlap share": 1.0, "waited share": 0.0}
    exposed = length(common(waiting, exchanging))
    return found | {"overlap share": hidden / length(exchanging), "waited share": exposed / length(exchanging)}


def from_both_posted(ranks: list[list[Event]]) -> None:
    """Let each exchange begin when the last of its ranks posts it; the ranks share the clock of one machine."""
    own = [{(e["args"]["call"], e["name"]): e for e in events if e.get("tid") == "exchanges"} for events in ranks]
    posted = [{name: e["ts"] for name, e in exchanges.items()} for exchanges in own]
    for exchanges in own:
        for name, event in exchanges.items():
            start = max([event["ts"], *(posted[peer][name] for peer in event["args"]["peers"])])
            event["dur"] = max(0.0, event["ts"] + event["dur"] - start)
            event["ts"] = start


def by_phase(events: list[Event]) -> dict[str, float]:
    """The overlap share of each phase, if its exchanges have names."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if event.get("tid") == "exchanges":
            found.setdefault(event["name"].split()[0], []).append(event)
    return {name: summary([e for e in events if e.get("cat") != "exchange"] + own)["overlap share"]
            for name, own in found.items()}  # fmt: skip


def written(ranks: list[list[Event]], out: Path) -> None:
    """One trace of all ranks, whose times start at its first event."""
    events = [event for rank in ranks for event in rank]
    first = min(event["ts"] for event in events if event.get("ph") == "X" and event["ts"] > 0)
    for event in events:
        if "ts" in event:
            event["ts"] -= first
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the trace")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes, or threads on one GPU; torchrun has its own")
    parser.add_argument("--calls", type=int, default=3, help="calls in the trace, one after the other")
    parser.add_argument("--transport", choices=["fetch", "ring", "double_ring", "gather"], default="ring")
    parser.add_argument("--layout", choices=["contiguous", "zigzag", "striped"], default="zigzag")
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--stage-mib", type=int, default=64, help="MiB of keys that arrive together (fetch)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--kernel", default="auto")
    return parser.parse_args()


def under_torchrun(args: argparse.Namespace) -> list[list[Event]] | None:
    """The events of every rank on rank 0, None on the others."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    comm = GroupComm()
    events = nccl_rank(comm, args)
    found: list[Any] | None = [None] * comm.size if comm.rank == 0 else None
    dist.gather_object(events, found, dst=0, group=dist.new_group(backend="gloo"))
    dist.destroy_process_group()
    return found


def main() -> None:
    """Run the calls and write their trace."""
    args = arguments()
    if dist.is_torchelastic_launched():
        ranks = under_torchrun(args)
        if ranks is None:
            return
    elif args.device == "cuda":
        ranks = [sharing_gpu(args)]
    else:
        ranks = run_processes(args.ranks, cpu_rank, args)
        from_both_posted(ranks)
    for number, events in enumerate(ranks):
        name = "all ranks" if len(ranks) < args.ranks else f"rank {number}"
        text = [f"{k} {v:.1%}" if k.endswith("share") else f"{k} {v:,.1f} ms" for k, v in summary(events).items()]
        print(f"{name}: {', '.join(text)}")
        if phases := by_phase(events):
            print(f"  of it in {', '.join(f'{phase} {share:.1%}' for phase, share in phases.items())}")
    written(ranks, args.out)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
