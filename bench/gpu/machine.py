"""The device that `bench/gpu/run.py` runs on, or the CPU in a rehearsal: its name, its clocks, and times on it."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import seqpar

SOURCES = Path(__file__).resolve().parents[2] / "seqpar"
PACKAGES = ("triton", "numpy", "flash-attn", "flash-attn-3", "flash-attn-4", "fa3-fwd")
PROCESSES = min(12, os.cpu_count() or 1)
LEAD = 1.0  # the least milliseconds in which the host gets ahead of the device
CYCLES = 10_000_000  # of a wait on the device whose time says how long one cycle takes


class DeviceLost(RuntimeError):
    """The device answers every call of this process with errors from now on."""


class TimeIsUp(BaseException):
    """The time of this run is up. No `Exception`, so that no check takes it for its own failure."""

    def __init__(self) -> None:
        super().__init__("the time was up")


@dataclass(frozen=True)
class Timing:
    """The milliseconds of several runs. host: until the host had issued a run; part of ms if it did not run ahead."""

    ms: float  # median
    fastest: float
    slowest: float
    runs: int
    host: float  # median


class Sample(NamedTuple):
    """The milliseconds of one run: on the device, and until the host had issued it."""

    ms: float
    host: float


class Machine:
    """The device and its clock.

    minutes: until a case is cut off. cold: overwrite the L2 cache before each run. without: libraries not to time.
    """

    def __init__(
        self, *, rehearsal: bool = False, minutes: float = math.inf, cold: bool = False, without: Sequence[str] = ()
    ) -> None:
        self.rehearsal, self.cold, self.without = rehearsal, cold, without
        self.device = torch.device("cpu" if rehearsal else "cuda")
        self.deadline = time.monotonic() + 60 * minutes
        self.known: dict[Hashable, Any] = {}  # values that cases derive once
        self.doubt: Callable[[str, str, int, int], str | None] = lambda kernel, dtype, dim, v_dim: None
        self._pool: ProcessPoolExecutor | None = None
        self._single: list[ProcessPoolExecutor] = []  # those of items that are tried again
        self._cache = torch.empty(0 if rehearsal or not cold else 1 << 28, dtype=torch.int8, device=self.device)

    def origin(self, commit: str | None) -> dict[str, Any]:
        """The origin of rows. sources: a digest of the package's files, since a commit does not cover later edits."""
        versions = {"seqpar": seqpar.__version__, "python": platform.python_version(), "torch": torch.__version__}
        versions |= {name: at for name in PACKAGES if (at := _version(name))}
        if not self.rehearsal:
            versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            versions["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        digest = hashlib.sha256()
        for path in sorted(SOURCES.rglob("*.py")):
            digest.update(str(path.relative_to(SOURCES)).encode() + path.read_bytes())
        return {
            "device": "rehearsal" if self.rehearsal else torch.cuda.get_device_name(),
            "versions": versions,
            "commit": commit or _said("git", "-C", str(SOURCES), "rev-parse", "HEAD") or "unknown",
            "sources": digest.hexdigest()[:12],
        }

    def left(self) -> float:
        """Seconds until the time is up."""
        return self.deadline - time.monotonic()

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Raise TimeIsUp in this block, which the main thread runs, when the time is up."""

        def end(*_: object) -> None:
            raise TimeIsUp

        if math.isinf(self.deadline):
            yield
            return
        before = signal.signal(signal.SIGALRM, end)
        timer = signal.setitimer(signal.ITIMER_REAL, max(self.left(), 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, before)

    def clocks(self) -> str | None:
        """Clocks of the multiprocessors and the memory in MHz, temperature and power, from nvidia-smi."""
        fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
        return (
            None if self.rehearsal else _said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")
        )

    def wait(self) -> None:
        """Wait for the device. Raises: DeviceLost."""
        if not self.rehearsal:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise DeviceLost(str(error)) from error

    def times(
        self, runs: Mapping[Hashable, Callable[[], object]], *, ahead: bool = True, seconds: float = 0.6, most: int = 20
    ) -> tuple[dict[Any, Timing], dict[Any, dict[str, str]]]:
        """The times of the runs, one of each in turn; and for runs without a time, the fields that say why.

        ahead: time the device alone: it first waits for twice as long as the host needs to issue a run. seconds: for
        all runs together. Each runs at least three times, or twice if it takes long, and at most ``most`` times.
        """
        rough, missing = {}, {}
        for name, run in runs.items():
            try:
                if not self.rehearsal:  # which needs no warm machine
                    self.once(run)
                rough[name] = self.once(run)
            except Exception as error:
                missing[name] = unable(error)
                self.wait()
        total = sum(sample.ms for sample in rough.values()) / 1e3
        least = 2 if total > 1 or self.rehearsal else 3
        turns = least if self.rehearsal else max(least, min(most, int(seconds / max(total, 1e-9))))
        leads = {name: max(LEAD, 2 * sample.host) if ahead else 0.0 for name, sample in rough.items()}
        taken: dict[Any, list[Sample]] = {name: [] for name in rough}
        for _ in range(turns):
            for name, samples in taken.items():
                sample = self.once(runs[name], lead=leads[name])
                if ahead and sample.host > leads[name] and not self.rehearsal:  # the device waited for the host
                    leads[name] = 2 * sample.host
                    sample = self.once(runs[name], lead=leads[name])
                samples.append(sample)
        return {name: _timing(samples) for name, samples in taken.items()}, missing

    def once(self, run: Callable[[], object], *, lead: float = 0.0) -> Sample:
        """One run. lead: milliseconds in which the device waits while the host issues the run; 0 if it is idle."""
        if self.rehearsal:
            began = time.perf_counter()
            run()
            ms = (time.perf_counter() - began) * 1e3
            return Sample(ms, ms)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cache.zero_()
        if lead:
            torch.cuda._sleep(int(lead * self._cycles))
        else:
            torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        run()
        host = (time.perf_counter() - began) * 1e3
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end), host)

    @cached_property
    def _cycles(self) -> float:
        """Cycles of the device's clock in a millisecond, once it has sped up."""
        for _ in range(2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(CYCLES)
            end.record()
            end.synchronize()
        return CYCLES / start.elapsed_time(end)

    def spread(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``work(item)`` of every item, or its exception, in several processes, so that kernels compile side by side.

        An item that failed is tried again in a process of its own, since another item may have broken the first one. A
        rehearsal runs all items in this process.
        """
        if self.rehearsal:
            return [_outcome(work, item) for item in items]
        if self._pool is None:
            self._pool = _processes(PROCESSES)
        results = self._gathered([self._pool.submit(work, item) for item in items])
        failed = [n for n, result in enumerate(results) if isinstance(result, Exception)]
        if failed:
            self.close()
            threads = ThreadPoolExecutor(PROCESSES)
            try:
                again = list(threads.map(lambda n: self._alone(work, items[n]), failed))
            except TimeIsUp:
                self.close()  # also ends what the threads wait for
                raise
            finally:
                threads.shutdown(cancel_futures=True)
            results = [again[failed.index(n)] if n in failed else result for n, result in enumerate(results)]
        return results

    def _gathered(self, futures: Sequence[Future[Any]]) -> list[Any]:
        wait(futures)
        return [f.exception() or f.result() for f in futures]

    def _alone(self, work: Callable[[Any], Any], item: Any) -> Any:
        pool = _processes(1)
        self._single.append(pool)
        try:
            return self._gathered([pool.submit(work, item)])[0]
        finally:
            _end(pool)

    def close(self) -> None:
        """End the processes."""
        for pool in [*self._single, *([] if self._pool is None else [self._pool])]:
            _end(pool)
        self._pool, self._single = None, []


def _timing(samples: Sequence[Sample]) -> Timing:
    times = [sample.ms for sample in samples]
    host = statistics.median(sample.host for sample in samples)
    return Timing(statistics.median(times), min(times), max(times), len(times), host)


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def _end(pool: ProcessPoolExecutor) -> None:
    """End the processes without waiting for one that hangs."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def unable(error: Exception) -> dict[str, str]:
    """The fields of a row for something that did not run: "skipped" if it cannot run here, "error" if it should."""
    name = type(error).__name__
    never = isinstance(error, (NotImplementedError, ImportError)) or name in ("OutOfResources", "CompilationError")
    return {"skipped" if never else "error": f"{name}: {str(error).strip() or 'without a word'}"[:300]}


def _outcome(work: Callable[[Any], Any], item: Any) -> Any:
    try:
        return work(item)
    except Exception as error:
        return error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """The output of a command, or None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
