"""Compiles what `bench.gpu.run` launches, on a machine without that GPU, so that time on the GPU is spent on running.

    TRITON_CACHE_DIR=/kept python -m bench.gpu.ahead       # all below but `tune`, for capability 9.0
    TRITON_CACHE_DIR=/kept python -m bench.gpu.ahead --slice tune --capability 100 --processors 148
    TRITON_CACHE_DIR=/kept make gpu                        # on the GPU machine, with the same Triton

Triton finds a binary by its kernel's source, its arguments' kinds, the GPU and its own files, so the folder may come
from another machine, and another Python, at the same path. A call gets CPU tensors of the true shapes and a
driver that launches nothing: results are not looked at. Slices that call `seqpar.attention` compile more on the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch

from bench.gpu import binaries, correct, launches, ring, speed, trees, tune
from bench.gpu.calls import OfKernel, Problem, Setup
from seqpar.kernels.dispatch import triton_installed
from seqpar.kernels.triton import Triton
from seqpar.kernels.triton.config import Descriptor, LaunchConfig, configure

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Absent:
    """A GPU that is not here. processors: its streaming multiprocessors, which decide whether work is split."""

    capability: int
    processors: int

    def kernel(self, *, tf32: bool = False, chosen: Callable[[Descriptor], LaunchConfig] = configure) -> Triton:
        """Triton's kernels with the configurations of this GPU."""
        made_for = self.capability
        return Triton(tf32=tf32, configure=lambda d: chosen(replace(d, generation=made_for)), variants=False)

    def check(self, check: correct.Check, *, tf32: bool) -> None:
        """Compile what a check launches."""
        correct.run(self.kernel(tf32=tf32), check, correct.inputs(check, CPU))

    def call(self, setup: Setup) -> None:
        """Compile what forward and backward of a call launch, and of the small call that is checked before."""
        for each in (setup.small(1300), setup):
            OfKernel(self.kernel(), Problem(each, CPU)).step()

    def ranks(self, layout: str, transport: str) -> None:
        """Compile what ranks one after another launch."""
        many = ring.virtual(layout, transport, 8, self.kernel(), Problem(ring.setup_of(False), CPU))
        many.forward()
        many.backward()

    def candidate(self, candidate: tune.Candidate) -> None:
        """Compile a candidate, once as `tune` looks at its resources and once as it is launched."""
        case = binaries.Case(
            candidate.direction, candidate.dim, candidate.v_dim, "bf16", self.capability, candidate.config
        )
        row = binaries.compiled(case)
        self.stand_in()
        if "error" in row or row["spilled"] or row["shared"] > binaries.SHARED[self.capability]:
            return
        kernel = self.kernel(chosen=candidate.configuration)
        for tokens in (700, None):
            one = OfKernel(kernel, Problem(candidate.setup(tokens), CPU))
            one.forward()
            one.launches()

    def stand_in(self) -> None:
        """Make this process compile for this GPU."""
        launches.stand_in(self.capability, self.processors)


Work = tuple[str, Callable[[Absent], None]]


def work(slices: list[str]) -> list[Work]:
    """The calls that are compiled for each slice, each with a name to print."""
    found: list[Work] = []
    if "correct" in slices:
        checks = [check for group in correct.groups(False).values() for check in group]
        found += [(f"correct {check}", partial(Absent.check, check=check, tf32=False)) for check in checks]
        wide = [check for check in checks if check.dtype == torch.float32]
        found += [(f"correct {check}, tf32", partial(Absent.check, check=check, tf32=True)) for check in wide]
    setups = [setup for setup, later in speed.setups(False) if not later] if "forward" in slices else []
    setups += trees.setups(False) if "trees" in slices else []
    found += [(str(setup), partial(Absent.call, setup=setup)) for setup in setups]
    if "ring" in slices:
        found += [(f"ring {way}", partial(Absent.ranks, layout="zigzag", transport=way)) for way in ("fetch", "ring")]
    if "tune" in slices:
        found += [(f"tune {c.call}, {c}", partial(Absent.candidate, candidate=c)) for c in tune.candidates()]
    return found


def done(gpu: Absent, item: Work) -> tuple[bool, str]:
    """Whether a process could compile a call, and the line that says so."""
    torch.set_num_threads(1)
    name, compile_call = item
    began = time.monotonic()
    try:
        gpu.stand_in()
        compile_call(gpu)
    except Exception as error:
        return False, f"{name}: {type(error).__name__}: {error}"[:500]
    return True, f"{name}: {time.monotonic() - began:.1f} s"


def main(arguments: list[str] | None = None) -> int:
    """Print a line for everything that was compiled. The exit code: 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    slices = ("correct", "forward", "ring", "trees", "tune")
    parser.add_argument("--slice", action="append", choices=slices, help="forward is backward too")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(binaries.SHARED))
    parser.add_argument(
        "--processors", type=int, default=132, help="of the GPU (default: %(default)s, an H100 or H200)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--case", action="append", help="a part of the names of what to compile; several times")
    parser.add_argument("--most", type=int, help="only the first so many")
    args = parser.parse_args(arguments)
    if not triton_installed():
        parser.error("triton is not installed, which compiles the kernels")
    os.environ.pop("TRITON_INTERPRET", None)  # which compiles nothing
    gpu = Absent(args.capability, args.processors)
    items, failed = work(args.slice or list(slices[:-1])), 0
    items = [item for item in items if any(part in item[0] for part in args.case or [""])][: args.most]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for right, said in pool.map(partial(done, gpu), items):
            failed += not right
            print(said, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
