"""Slice `tune`: candidates for the tiles and launches of Triton's kernels, from which its table is chosen.

Candidates that spill or take more shared memory than there is are left out, as their binaries say; each of the others
replaces one direction's configuration and leaves the others as they are, so that dq and dk/dv are compared by the time
of the whole backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu.calls import TOLERANCE, OfKernel, Problem, Setup, asked, errors, oracle, verdict
from bench.gpu.machine import Machine, unable
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from bench.lib import records
from seqpar.kernels.triton import Triton
from seqpar.kernels.triton.config import Descriptor, LaunchConfig, configure, generation

DIRECTIONS = ("forward", "dq", "dkdv")
LEAST_PAIRS = 64 * 64  # of a tile worth timing, and half of it where a row has more than 128 columns
DIMS = ((128, 128), (64, 64), (96, 96), (192, 128), (256, 256))  # head dims of keys and values
TOKENS = 16384
SHIPPED = "shipped"


@dataclass(frozen=True)
class Candidate:
    """A configuration of one direction for head dims of keys and values."""

    direction: str
    dim: int
    v_dim: int
    config: LaunchConfig
    tiny: bool

    def setup(self, tokens: int | None = None) -> Setup:
        """The call that a candidate is timed on."""
        if self.tiny:
            return Setup("causal", (tokens or 64,), 2, 1, self.dim, self.v_dim, torch.float32)
        heads = 2048 // self.v_dim
        return Setup("causal", (tokens or TOKENS,), heads, heads, self.dim, self.v_dim)

    def configuration(self, d: Descriptor) -> LaunchConfig:
        """That of this candidate for its direction, else the shipped one."""
        return self.config if d.direction == self.direction else configure(d)

    def kernel(self) -> Triton:
        """The Triton kernel with this candidate for its direction."""
        return Triton(configure=self.configuration, variants=False)

    @property
    def call(self) -> str:
        """The direction and head dims that it is for."""
        return f"{self.direction} {self.dim if self.dim == self.v_dim else f'{self.dim}/{self.v_dim}'}"

    def __str__(self) -> str:
        c = self.config
        return f"{c.bm}x{c.bn} warps {c.warps} stages {c.stages}{' tma' if c.tma else ''}"


def tune(tiny: bool) -> list[Case]:
    """The cases: candidates with tiles of one shape are timed together, beside the shipped one."""
    if tiny:
        pairs = [Candidate("forward", 16, 16, LaunchConfig(bm, 32, 4, 1), True) for bm in (32, 64)]
        return [Case("tune", "forward 16", partial(_tune, pairs))]
    groups: dict[str, list[Candidate]] = {}
    for c in candidates():
        groups.setdefault(f"{c.call}, {c.config.bm}x{c.config.bn}", []).append(c)
    return [Case("tune", name, partial(_tune, group), later=True) for name, group in groups.items()]


def candidates() -> list[Candidate]:
    """All candidates of all directions and head dims, those with tiles of one shape together."""
    from bench.gpu.binaries import CANDIDATES

    return [
        Candidate(direction, *dims, c, False)
        for dims in DIMS
        for direction in DIRECTIONS
        for c in CANDIDATES
        if c.bm * c.bn * (1 if max(dims) <= 128 else 2) >= LEAST_PAIRS and c.stages > 1
    ]


def _tune(candidates: list[Candidate], machine: Machine) -> Iterator[Row]:
    back = candidates[0].direction != "forward"
    setup = candidates[0].setup()
    reason = Triton().refuses(asked(setup, machine, grads=True, deterministic=True))
    if reason:
        yield {"kernel": "triton", "mode": candidates[0].direction, "skipped": reason}
        return
    outcomes = machine.spread(partial(tried, device=machine.device), candidates)
    problem = Problem(setup, machine.device)
    one = OfKernel(Triton(), problem)
    runs = {SHIPPED: one.launches if back else one.forward}
    used: dict[str, Row] = {}
    for candidate, outcome in zip(candidates, outcomes):
        about = {"kernel": "triton", "mode": candidate.direction, "what": str(candidate)}
        row = outcome if isinstance(outcome, dict) else unable(outcome)
        if row.keys() & {"skipped", "error", "ok"}:
            yield about | row
            continue
        used[str(candidate)] = about | {"config": asdict(candidate.config)} | row
        contestant = OfKernel(candidate.kernel(), problem)
        runs[str(candidate)] = contestant.launches if back else contestant.forward
    times, missing = machine.times(runs)
    for name, timing in times.items():
        about = used.get(name, {"kernel": "triton", "mode": candidates[0].direction, "what": SHIPPED})
        row = rate(timing, flops=problem.flops(backward=back))
        yield about | row | {"baseline": SHIPPED, "ratio": times[SHIPPED].ms / timing.ms}
    yield from (used.get(name, {"kernel": "triton", "what": name}) | why for name, why in missing.items())


def tried(candidate: Candidate, device: torch.device) -> Row:
    """The resources of a binary that can be launched and is right. Triton keeps it on disk for the timing."""
    used: Row = {}
    try:
        if device.type == "cuda":
            used = _binary(candidate)
            if used.get("skipped"):
                return used
        back = candidate.direction != "forward"
        small = Problem(candidate.setup(40 if candidate.tiny else 700), device)
        found = errors(OfKernel(candidate.kernel(), small).results(back), oracle(small, back))
        off = verdict(found, TOLERANCE[small.setup.dtype])
        if off:
            return used | {"ok": False, "refused": off, "errors": found}
        OfKernel(candidate.kernel(), Problem(candidate.setup(), device)).results(back)
        return used
    except Exception as error:
        return used | unable(error)


def _binary(candidate: Candidate) -> Row:
    """The resources of a binary, and why it is left out; if this is unknown, a launch will tell."""
    import triton

    from bench.gpu import binaries

    major, minor = torch.cuda.get_device_capability()
    made_for = generation(10 * major + minor)
    case = binaries.Case(candidate.direction, candidate.dim, candidate.v_dim, "bf16", made_for, candidate.config)
    row = binaries.compiled(case)
    triton.runtime.driver.reset_active()  # back from the absent device to this one
    if "error" in row:
        return {"offline": row["error"]}
    used = {name: row[name] for name in ("registers", "spilled", "shared")}
    if used["shared"] > binaries.SHARED[made_for]:
        return used | {"skipped": f"{used['shared']} bytes of shared memory"}
    return used | ({"skipped": f"{used['spilled']} bytes spilled"} if used["spilled"] else {})


def ranking(rows: list[Row], path: Path) -> Path | None:
    """Write the candidates of each direction and head dims, best first by ratio to the shipped one."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["slice"] == "tune" and "ratio" in row and row["what"] != SHIPPED:
            kept = {name: row.get(name) for name in ("what", "ratio", "tflops", "ms", "config", "registers", "shared")}
            found.setdefault(row["case"].split(",")[0], []).append(kept)
    if not found:
        return None
    best = {name: sorted(each, key=lambda row: -row["ratio"]) for name, each in found.items()}
    records.write(path, best)
    return path
