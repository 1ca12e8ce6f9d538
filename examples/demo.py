"""Train a decoder on real documents, on several ranks and in one process, and compare the losses.

The documents are the source files of Python's standard library, with their real, heavy-tailed lengths. Every step packs
whole documents into a batch of ``--tokens`` tokens and trains two copies of the same model on it:

    sharded      every rank holds some rows of the batch, attention is `seqpar.attention`, gradients are summed
    one process  rank 0 holds the whole batch, attention is torch's own, document by document

``--model hybrid`` is a decoder whose layers carry a state, except each fourth, which attends (see hybrid.py): states
of the gated delta rule, and the rows before its short convolution, pass from rank to rank.

A thread plans every batch one step ahead, from its document lengths alone.

The two loss curves must agree up to rounding. The effect of rounding on training is measured: a third copy, in one
process, gets every weight nudged by a rounding error before every step. The tolerance is the drift of its loss from the
reference times `DRIFT_FACTOR`.

Run ``python examples/demo.py --ranks 4`` or ``torchrun --nproc-per-node 4 examples/demo.py``. The exit code is 0 for a
pass, 1 for a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import hybrid
import numpy as np
import torch
import torch._dynamo  # before the group exists: imported later, it keeps the group and gloo alive until Python ends
import torch.distributed as dist
import torch.nn.functional as F
from decoder import START, Attend, Config, Decoder
from torch import Tensor

import seqpar
from seqpar.cli.flags import integer
from seqpar.cli.output import CommandError, print_table
from seqpar.cli.plan import hardware, picture
from seqpar.comm import shm
from seqpar.comm.protocol import Stats

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
LAYOUTS = ("planned", "contiguous", "zigzag", "striped")
TRANSPORTS = ("fetch", "ring", "double_ring", "gather")
COMMS = ("shm", "gloo")
STRIPE = 64  # rows dealt to a rank at a time by --layout striped
IGNORED = -100  # the label of a document's last token, which predicts nothing
DRIFT_FACTOR = 8  # sharding rounds in every layer, a nudge once per weight: similar errors, not equal ones
CONFIGS = {
    "decoder": Config(dim=128, layers=2, heads=4, kv_heads=2, head_dim=32, hidden=352),
    "hybrid": hybrid.CONFIG,
}
Mix = Attend | hybrid.Mixers  # what joins rows in a model's layers


@dataclass(frozen=True)
class Batch:
    """Packed documents. tokens, labels ``[T]``; labels are shifted inside each document, before sharding."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens: Tensor
    labels: Tensor

    @property
    def positions(self) -> Tensor:
        """Position of every token inside its document."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def valid(self) -> int:
        """Tokens with a label, over all ranks: the divisor of the loss."""
        return int((self.labels != IGNORED).sum())


def corpus() -> list[tuple[str, bytes]]:
    """(name, bytes) of the standard library's source files, sorted by name; test suites and packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    documents = [(p.relative_to(root).as_posix(), p.read_bytes()) for p in paths]
    documents = [(name, text) for name, text in documents if text]
    if not documents:
        raise SystemExit(f"demo: no Python sources under {root}; this Python's standard library is not stored as files")
    return documents


def batches(documents: Sequence[tuple[str, bytes]], *, tokens: int, seed: int) -> Iterator[Batch]:
    """Endless batches of exactly `tokens` tokens, equal for equal seeds.

    Documents come in a shuffled order. One that does not fit the rest of a batch waits for the next one, and the first
    later document that fits is taken; a document is cut only if none fits.
    """
    generator = np.random.default_rng(seed)
    queue: list[int] = []
    while True:
        chosen: list[tuple[str, bytes]] = []
        left = tokens
        while left:
            if len(queue) < len(documents):
                queue.extend(generator.permutation(len(documents)).tolist())
            fits = (at for at, index in enumerate(queue) if len(documents[index][1]) < left)
            name, text = documents[queue.pop(next(fits, 0))]
            chosen.append((name, text[: left - 1]))  # one token goes to START
            left -= 1 + len(chosen[-1][1])
        yield pack(chosen)


def pack(documents: Sequence[tuple[str, bytes]]) -> Batch:
    """One batch of START and the bytes of each document; a token's label is the next token of its document."""
    tokens, labels = [], []
    for _, text in documents:
        row = torch.tensor([START, *text])
        tokens.append(row)
        labels.append(torch.cat((row[1:], row.new_tensor([IGNORED]))))
    lengths = tuple(len(row) for row in tokens)
    return Batch(tuple(name for name, _ in documents), lengths, torch.cat(tokens), torch.cat(labels))


def plan_for(batch: Batch, args: argparse.Namespace, ranks: int) -> seqpar.Plan:
    """The planner's plan of a batch, or the plan of the chosen layout, transport and Ulysses width."""
    if args.layout == "planned":
        return seqpar.plan_batch(batch.lengths, ranks, model=model_shape(args.model, args.dtype), hardware=args.machine)
    total = sum(batch.lengths)
    layout = {
        "contiguous": lambda: seqpar.Layout.contiguous(total, ranks),
        "zigzag": lambda: seqpar.Layout.zigzag(batch.lengths, ranks),
        "striped": lambda: seqpar.Layout.striped(total, ranks, block=STRIPE),
    }[args.layout]()
    return seqpar.Plan(seqpar.Mask(batch.lengths), layout, ulysses=args.ulysses, transport=args.transport)


def model_shape(model: str, dtype: str) -> seqpar.ModelShape:
    """A model's sizes for the planner."""
    c = CONFIGS[model]
    shape = seqpar.ModelShape(
        f"the demo's {model}", c.dim, c.layers, c.heads, c.kv_heads, c.head_dim, c.hidden, c.vocabulary, dtype=dtype
    )
    if model == "decoder":
        return shape
    return replace(shape, recurrent=hybrid.layer_shape(c), recurrent_layers=hybrid.recurrent_layers(c))


@dataclass(frozen=True)
class Loaded:
    """A batch and its plan.

    planning: CPU seconds for the plan and this rank's steps. waited: seconds until both came.
    """

    batch: Batch
    plan: seqpar.Plan
    planning: float
    waited: float


def load(args: argparse.Namespace, *, ranks: int, rank: int) -> Iterator[Loaded]:
    """All batches with their plans. A thread plans each batch during the step before: planning needs no peer."""
    stream = batches(corpus(), tokens=args.tokens, seed=args.seed)

    def make() -> tuple[Batch, seqpar.Plan, float]:
        batch = next(stream)
        started = time.thread_time()
        plan = plan_for(batch, args, ranks)
        predicted_bytes(plan, rank, args)  # derives this rank's steps, or its first layer would
        return batch, plan, time.thread_time() - started

    with ThreadPoolExecutor(1, "loader") as loader:
        ahead = loader.submit(make)
        for left in reversed(range(args.steps)):
            started = time.perf_counter()
            try:
                made = ahead.result()
            except ValueError as error:  # the same on every rank
                raise SystemExit(f"demo: {error}") from None
            waited = time.perf_counter() - started
            if left:
                ahead = loader.submit(make)
            yield Loaded(*made, waited)


def dense_attend(lengths: Sequence[int]) -> Attend:
    """Ordinary attention: torch's own, causal, one document after the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        documents = zip(*(x.transpose(0, 1)[None].split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*document, is_causal=True) for document in documents]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)

    return attend


def seqpar_attend(plan: seqpar.Plan, comm: seqpar.Comm) -> Attend:
    """The same function over the whole batch, on ranks that each hold some of its rows."""
    return lambda q, k, v: seqpar.attention(q, k, v, plan, comm)


def predicted_bytes(plan: seqpar.Plan, rank: int, args: argparse.Namespace) -> int:
    """The bytes that a rank sends in one training step by the plan: all layers, forward and backward."""
    c, shape = CONFIGS[args.model], model_shape(args.model, args.dtype)
    call = {"heads": c.heads, "kv_heads": c.kv_heads, "dim": c.head_dim, "dtype": args.dtype}
    attention = sum(plan.bytes(rank, backward=backward, **call) for backward in (False, True))
    passed = hybrid.predicted_bytes(plan, rank, c, args.dtype) if args.model == "hybrid" else 0
    return shape.attention_count * attention + passed


class Mark(torch.autograd.Function):
    """The identity on tensors; calls `note` once the gradients of all tensors have arrived."""

    @staticmethod
    def forward(ctx, note: Callable[[], None], *tensors: Tensor):
        """The tensors themselves."""
        ctx.note = note
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """The gradients themselves, after the note."""
        ctx.note()
        return (None, *grads)


class Clock:
    """A rank's seconds: attention, recurrences, waiting, the gradient sum, and the rest of the model."""

    def __init__(self, stats: Stats, model: str) -> None:
        self.stats = stats
        self.seconds = {"attention": 0.0, "waiting for peers": 0.0, "gradient sum": 0.0, "total": 0.0}
        if model == "hybrid":
            self.seconds["recurrences"] = 0.0
        self._since = 0.0, 0.0

    def enter(self) -> None:
        """A call that may wait for peers starts, forward or backward."""
        self._since = time.perf_counter(), self.stats.wait_seconds

    def leave(self, name: str) -> None:
        """A call ended: its time is computation, added to `name`, except for the time spent waiting."""
        waited = self.stats.wait_seconds - self._since[1]
        self.seconds["waiting for peers"] += waited
        self.seconds[name] += time.perf_counter() - self._since[0] - waited

    def timed(self, function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """A function of tensors, with its forward and its backward on this clock."""

        def call(*tensors: Tensor) -> Tensor:
            tensors = Mark.apply(lambda: self.leave(name), *tensors)
            self.enter()
            out = function(*tensors)
            self.leave(name)
            return Mark.apply(self.enter, out)[0]

        return call

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[None]:
        """Add the seconds of the body to `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def shares(self) -> dict[str, float]:
        """Seconds by activity; they sum to the total, which is left out."""
        rest = self.seconds["total"] - sum(s for name, s in self.seconds.items() if name != "total")
        found = {**self.seconds, "rest of the model": rest}
        order = ("attention", "recurrences", "waiting for peers", "rest of the model", "gradient sum")
        return {name: found[name] for name in order if name in found}


class Trainer:
    """A model and its optimiser. All trainers of one seed start from the same weights and take the same steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        # the weights stay fp32 under bf16: a step of AdamW is smaller than bf16's rounding
        master = torch.float64 if args.dtype == "float64" else torch.float32
        torch.manual_seed(args.seed)
        kind = {"decoder": Decoder, "hybrid": hybrid.Hybrid}[args.model]
        self.model = kind(CONFIGS[args.model], DTYPES[args.dtype]).to(master)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def backward(self, tokens: Tensor, positions: Tensor, labels: Tensor, *, valid: int, mix: Mix) -> Tensor:
        """Set the gradients; returns this rank's share of the loss, a sum over its rows divided by `valid`."""
        self.optimizer.zero_grad(set_to_none=False)
        logits = self.model(tokens, positions, mix)
        losses = logits.to(self.model.embedding.dtype)
        loss = F.cross_entropy(losses, labels, ignore_index=IGNORED, reduction="sum") / valid
        loss.backward()
        return loss.detach().double()

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks, in one message."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.model.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for p, g in zip(self.model.parameters(), flat.split([g.numel() for g in gradients]), strict=True):
            p.grad = g.view_as(p)

    @torch.no_grad()
    def nudge(self, epsilon: float, generator: torch.Generator) -> None:
        """Move every weight by a random fraction of one rounding error."""
        for p in self.model.parameters():
            p.mul_(1 + epsilon * (torch.rand(p.shape, generator=generator, dtype=p.dtype) - 0.5))


@dataclass(frozen=True)
class Row:
    """The figures of one step, over all ranks."""

    sharded: float
    reference: float
    nudged: float
    bytes_moved: int
    bytes_predicted: int
    seconds: float  # of the sharded step, the slowest rank's
    reference_seconds: float
    planning: float  # CPU seconds of rank 0's loader thread

    @property
    def difference(self) -> float:
        """Of the sharded loss from the reference."""
        return abs(self.sharded - self.reference)

    @property
    def drift(self) -> float:
        """Of the nudged loss from the reference."""
        return abs(self.nudged - self.reference)


class Run:
    """One rank's part of the demo: a sharded trainer; on rank 0 the reference too, on rank 1 the nudged copy."""

    def __init__(self, args: argparse.Namespace, comm: seqpar.Comm) -> None:
        self.args, self.comm, self.clock = args, comm, Clock(comm.stats, args.model)
        self.nudging_rank = 1 % comm.size  # another rank's memory than the reference's, if there is one
        self.sharded = Trainer(args)
        self.reference = Trainer(args) if comm.rank == 0 else None
        self.nudged = Trainer(args) if comm.rank == self.nudging_rank else None
        self.generator = torch.Generator().manual_seed(args.seed)

    def step(self, loaded: Loaded) -> Row:
        """Train every model on one batch."""
        batch, plan = loaded.batch, loaded.plan
        whole = torch.zeros(2, dtype=torch.float64)  # losses of the reference and of the nudged run
        # one after the other, each with all the threads that the ranks of the sharded step have together
        with threads(1):
            started = time.perf_counter()
            if self.reference is not None:
                whole[0] = self._whole(self.reference, batch)
            reference_seconds = time.perf_counter() - started
            dist.barrier()
            if self.nudged is not None:
                self.nudged.nudge(torch.finfo(DTYPES[self.args.dtype]).eps, self.generator)
                whole[1] = self._whole(self.nudged, batch)
        dist.barrier()  # the sharded step is timed alone

        sent = self.comm.stats.bytes_sent
        started = time.perf_counter()
        with threads(self.comm.size):
            loss = self._sharded(batch, plan)
        seconds = time.perf_counter() - started
        moved = self.comm.stats.bytes_sent - sent, predicted_bytes(plan, self.comm.rank, self.args)
        sums = torch.tensor([loss, *whole, *moved], dtype=torch.float64)
        dist.all_reduce(sums)
        slowest = torch.tensor([seconds, reference_seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return Row(*sums[:3].tolist(), *(int(b) for b in sums[3:]), *slowest.tolist(), loaded.planning)

    def _whole(self, trainer: Trainer, batch: Batch) -> Tensor:
        mix: Mix = dense_attend(batch.lengths)
        if self.args.model == "hybrid":
            mix = hybrid.dense(batch.lengths, mix)
        loss = trainer.backward(batch.tokens, batch.positions, batch.labels, valid=batch.valid, mix=mix)
        trainer.optimizer.step()
        return loss

    def _sharded(self, batch: Batch, plan: seqpar.Plan) -> Tensor:
        rank, clock = self.comm.rank, self.clock
        with clock.adding("total"):
            tokens, labels = (seqpar.shard(x, plan, rank) for x in (batch.tokens, batch.labels))
            positions = torch.from_numpy(plan.rope_positions(rank))
            mix: Mix = clock.timed(seqpar_attend(plan, self.comm), "attention")
            if self.args.model == "hybrid":
                attend, convolve, recur = hybrid.sharded(plan, self.comm, mix)
                mix = hybrid.Mixers(attend, *(clock.timed(mixer, "recurrences") for mixer in (convolve, recur)))
            loss = self.sharded.backward(tokens, positions, labels, valid=batch.valid, mix=mix)
            with clock.adding("waiting for peers"):  # early ranks wait here, so that the sum is timed alone
                dist.barrier()
            with clock.adding("gradient sum"):
                self.sharded.sum_gradients()
            self.sharded.optimizer.step()
        return loss


def cores() -> int:
    """The cores of this machine that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def threads(processes: int) -> Iterator[None]:
    """Divide this machine's cores among busy processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, cores() // processes))
    yield
    torch.set_num_threads(before)


class Report:
    """Rank 0's output: plain lines; on a terminal, if rich is installed, also colour and a progress bar."""

    def __init__(self, shown: bool, steps: int) -> None:
        self.shown = shown
        self.bar = None
        if shown and sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console()
            # Ctrl-C ends this process at once: a cursor hidden at that moment would stay hidden
            console.show_cursor = lambda show=True: False
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task("training", total=steps)

    def line(self, text: str, style: str = "") -> None:
        """Print a line and flush it, for pipes."""
        if self.bar is not None:
            self.bar.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        elif self.shown:
            print(text, flush=True)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """The heading of the step lines, and the bar while the body runs."""
        self.line("")
        self.line(
            "      loss in one      loss on        their    tokens/s    time to       bytes   documents by the ranks"
        )
        self.line("step      process    all ranks   difference  on ranks        plan       moved   that share each")
        with self.bar or contextlib.nullcontext():
            yield

    def step(self, index: int, row: Row, plan: seqpar.Plan) -> None:
        """One line per step."""
        self.line(
            f"{index:4d}  {row.reference:12.7f} {row.sharded:12.7f} {row.difference:12.1e}"
            f" {plan.mask.tokens / row.seconds:11,.0f} {row.planning * 1e3:7.1f} ms"
            f" {row.bytes_moved / 1e6:8.2f} MB   {degree_counts(plan)}"
        )
        if self.bar is not None:
            self.bar.advance(self.task)

    def table(self, ranks: Sequence[tuple[dict[str, float], int]]) -> None:
        """Seconds and bytes of every rank."""
        header = ("rank", *ranks[0][0], "total", "sent")
        rows = [
            (rank, *(f"{s:.2f} s" for s in (*seconds.values(), sum(seconds.values()))), f"{sent / 1e6:.2f} MB")
            for rank, (seconds, sent) in enumerate(ranks)
        ]
        self.line("")
        print_table("where each rank's time went in the sharded steps, and the bytes it sent", header, rows)


def degree_counts(plan: seqpar.Plan) -> str:
    """Documents by the number of ranks that share each: ``3 on 1, 1 on 2, 1 on 4``."""
    degrees, counts = np.unique(np.asarray(plan.degrees), return_counts=True)
    return ", ".join(f"{count} on {degree}" for degree, count in zip(degrees, counts, strict=True))


def tolerance(rows: Sequence[Row], dtype: str) -> float:
    """The largest difference that is rounding: the nudged run's largest drift, times `DRIFT_FACTOR`."""
    # a loss is itself rounded: a drift below its rounding means nothing
    stored = torch.float64 if dtype == "float64" else torch.float32
    return DRIFT_FACTOR * max(*(r.drift for r in rows), torch.finfo(stored).eps * max(r.reference for r in rows))


def verdict(rows: Sequence[Row], dtype: str) -> tuple[bool, str]:
    """(passed, line): whether the losses agree up to rounding, and as many bytes moved as predicted."""
    largest, tolerated = max(row.difference for row in rows), tolerance(rows, dtype)
    # not `largest > tolerated`: a NaN compares false, and must fail
    if not (largest <= tolerated and all(math.isfinite(row.difference) for row in rows)):
        return False, f"FAIL: largest loss difference {largest:.1e} over {len(rows)} steps (tolerance {tolerated:.1e})"
    moved, predicted = sum(row.bytes_moved for row in rows), sum(row.bytes_predicted for row in rows)
    if moved != predicted:
        return False, f"FAIL: {moved:,} bytes moved over {len(rows)} steps, but the plans predicted {predicted:,}"
    return True, (
        f"PASS: largest loss difference {largest:.1e} over {len(rows)} steps "
        f"(tolerance {tolerated:.1e} = {DRIFT_FACTOR} x the drift of a run nudged by one {dtype} rounding per step)"
    )


def closing(ranks: int) -> tuple[str, ...]:
    """The last lines after a pass: what was shown, and where to go next."""
    return (
        f"shown: {ranks} ranks trained on the same batches as one process, with the same losses up to rounding, and "
        "moved exactly the bytes that the plans predicted",
        "next: seqpar plan --help plans batches of your own, seqpar calibrate measures this machine for the planner; "
        "in Python, help(seqpar.parallelize) shards a model of transformers, diffusers or plain PyTorch",
    )


def arguments(argv: Sequence[str] | None = None, prog: str = "demo") -> argparse.Namespace:
    """The command line. Under torchrun, WORLD_SIZE is the number of ranks, and --ranks may only agree with it."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Train on real documents over several ranks and in one process, and compare."
    )
    parser.add_argument("--ranks", type=integer, help="processes (default 4; torchrun's own number under torchrun)")
    parser.add_argument("--model", choices=tuple(CONFIGS), default="decoder", help="what to train (%(default)s)")
    parser.add_argument("--tokens", type=integer, default=8192, help="tokens per batch (default %(default)s)")
    parser.add_argument("--steps", type=integer, default=30, help="training steps (default %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="planned", help="who holds which tokens (%(default)s)")
    parser.add_argument(
        "--hardware", help="machine, a preset or a file of seqpar calibrate, for --layout planned (cpu)"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="how keys travel, for the other layouts (fetch)")
    parser.add_argument("--comm", choices=COMMS, help="transport between ranks (default shm where it works)")
    parser.add_argument("--ulysses", type=integer, help="ranks that trade tokens for heads, for the other layouts (1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of activations (%(default)s)")
    parser.add_argument("--seed", type=integer, default=0, help="seed of weights and batches (%(default)s)")
    parser.add_argument("--out", default="out/demo.png", help="picture to write (%(default)s)")
    args = parser.parse_args(argv)
    world = os.environ.get("WORLD_SIZE")
    if world is not None and args.ranks not in (None, int(world)):
        parser.error(f"--ranks {args.ranks} contradicts torchrun, which started {world} processes; leave one out")
    args.ranks = int(world) if world is not None else args.ranks if args.ranks is not None else 4
    args.why_not_shm = without_shared_memory()
    args.comm = args.comm or ("gloo" if args.why_not_shm else "shm")
    for name in ("transport", "ulysses") if args.layout == "planned" else ():
        if getattr(args, name) is not None:
            parser.error(f"--{name} is the planner's choice; it goes with another --layout")
    if args.hardware is not None and args.layout != "planned":
        parser.error("--hardware is for --layout planned")
    args.transport, args.ulysses = args.transport or "fetch", 1 if args.ulysses is None else args.ulysses
    for name, least in (("ranks", 1), ("tokens", 2), ("steps", 1), ("ulysses", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} is too small; it must be at least {least}")
    if args.ranks % args.ulysses:
        parser.error(f"--ulysses {args.ulysses} does not divide the {args.ranks} ranks")
    try:
        if args.layout == "planned":
            args.machine = hardware("cpu" if args.hardware is None else args.hardware)
        if os.environ.get("RANK", "0") == "0":  # who draws
            picture(args.out)
    except CommandError as error:
        parser.error(str(error))
    args.out = Path(args.out)
    return args


def without_shared_memory() -> str | None:
    """Why the ranks cannot write into each other's memory, or None."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return "the ranks are on several machines"
    return shm.missing()


def carrier(args: argparse.Namespace, comm: seqpar.Comm) -> str:
    """The comm and its transport, in words."""
    if args.comm == "shm":
        return f"{type(comm).__name__} (shared memory)"
    return f"{type(comm).__name__} (gloo{f'; no shared memory: {args.why_not_shm}' if args.why_not_shm else ''})"


def train(args: argparse.Namespace, comm: seqpar.Comm) -> bool:
    """Run all steps, show them, and return whether the two curves agree."""
    if comm.rank == 0:
        from demo_picture import draw  # imported here, so that a missing matplotlib is noticed before the work

    report = Report(comm.rank == 0, args.steps)
    run = Run(args, comm)
    weights = sum(p.numel() for p in run.sharded.model.parameters())
    width = f"for {args.machine.name}" if args.layout == "planned" else f"ulysses {args.ulysses}"
    report.line(
        f"Training a small {args.model} on the source files of Python's standard library, {args.steps} steps: once in "
        f"one process by plain PyTorch, once on {args.ranks} ranks by seqpar. The losses must agree up to rounding."
    )
    report.line(
        f"{args.ranks} ranks, {args.layout} layout, {args.transport} over {carrier(args, comm)}, {width}, "
        f"{args.dtype}; {args.model}, {args.tokens:,} tokens per batch, {weights:,} weights"
    )
    rows: list[Row] = []
    plans: list[seqpar.Plan] = []
    first: Loaded | None = None  # for the picture
    waited = 0.0
    with report.progress():
        for index, loaded in enumerate(load(args, ranks=comm.size, rank=comm.rank)):
            waited += loaded.waited if index else 0.0  # no earlier step hides the first plan
            first = first or loaded
            rows.append(run.step(loaded))
            plans.append(loaded.plan)
            report.step(index, rows[-1], loaded.plan)

    mine = run.clock.shares(), comm.stats.bytes_sent
    ranks = [mine] * comm.size
    dist.all_gather_object(ranks, mine)
    passed, line = verdict(rows, args.dtype)
    if comm.rank == 0:
        report.table(ranks)
        tokens, predicted = args.tokens * args.steps, sum(r.bytes_predicted for r in rows)
        report.line(
            f"tokens/s on the same {cores()} cores: {tokens / sum(r.seconds for r in rows):,.0f} on {args.ranks} "
            f"ranks, {tokens / sum(r.reference_seconds for r in rows):,.0f} in one process with a thread for each core"
        )
        report.line(f"bytes moved: {sum(r.bytes_moved for r in rows):,}; predicted by the plans: {predicted:,}")
        report.line(
            f"planning: {1e3 * float(np.median([r.planning for r in rows])):.1f} ms of a loader thread per batch, one "
            f"batch ahead; after the first, training waited {1e3 * waited:.1f} ms for plans in all"
        )
        gaps = [p.forecast.gap for p in plans if p.forecast is not None]
        if gaps:
            report.line(f"plans: predicted {np.median(gaps):.1%} above a lower bound on {args.machine.name} (median)")
        report.line(f"loss: {rows[0].sharded:.4f} at the first step, {rows[-1].sharded:.4f} at the last")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        seconds = [seconds for seconds, _ in ranks]
        draw(args.out, args, rows, first, seconds, tolerance=tolerance(rows, args.dtype), verdict=line)
        report.line(f"picture: {args.out}")
        report.line(line, style="bold green" if passed else "bold red")
        for text in closing(args.ranks) if passed else ():
            report.line(text)
    return passed


def launch(ranks: int, script: Path, args: Sequence[str]) -> int:
    """Run `script` on `ranks` local processes. Returns the first failed rank's exit code, 128 + n for signal n, or 0.

    OMP_NUM_THREADS is set to the machine's cores divided by the ranks, unless it is set already. Ctrl-C ends every rank
    at once and returns 130.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # The launcher passes the signal it gets on to its ranks. It must not get SIGINT: Python turns that into an
    # exception, which waits until the rank leaves its collective. SIGTERM ends the rank inside it.
    handled = ",".join(name for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        # A second Ctrl-C must not interrupt the shutdown of the ranks.
        if not interrupted:
            interrupted = True
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        flags = ["--standalone", "--nproc-per-node", str(ranks), "--signals-to-handle", handled]
        run(parse_args([*flags, str(script), *args]))
    except ChildFailedError as error:
        # The rank's own traceback is above.
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        how = f"exited with {code}" if code >= 0 else f"was ended by {names.get(-code, f'signal {-code}')}"
        print(f"demo: rank {rank} failed first: it {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 130 if interrupted else 128 + int(error.sigval)
    finally:
        # After an interruption nothing is left to do but return: another Ctrl-C must not turn that into a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN if interrupted else before)
    return 0


def main(argv: Sequence[str] | None = None, prog: str = "demo") -> int:
    """The launcher, or one rank's work."""
    args = arguments(argv, prog)
    if "RANK" not in os.environ:
        print(f"Starting {args.ranks} processes; the first step takes a few seconds.", flush=True)
        return launch(args.ranks, Path(__file__).resolve(), sys.argv[1:] if argv is None else argv)
    # a rank blocked in gloo runs no Python handler: let Ctrl-C end it at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
    dist.init_process_group("gloo")
    passed = train(args, seqpar.ShmComm() if args.comm == "shm" else seqpar.GroupComm())
    dist.barrier()  # no rank leaves while a peer still reads
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
