"""`seqpar calibrate`: measures this machine for the planner and writes a file for `Hardware.load`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import seqpar
from seqpar.cli.flags import check_writable, integer
from seqpar.cli.output import CommandError, print_table, progress

if TYPE_CHECKING:
    import torch

    from seqpar.planner import ModelShape
    from seqpar.planner.calibration import ExchangeTiming, Fit, LinearTiming

LONGEST = 1 << 15  # tokens of the longest document: all cases are in memory at once
ROUNDS = 4  # of exchanges at most, while a fit fails
GOOD = 0.05  # mean error on unseen rows up to which a fit counts as good
# Message sizes in bytes: (fitted, unseen).
SIZES = {
    "cpu": ((1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24), (1 << 18, 1 << 23)),
    "cuda": ((1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28), (1 << 22, 1 << 27)),
}
HOP = 1 << 22  # bytes of the exchange that runs during a computation
TOKENS = {"cpu": ((256, 1024), (512,)), "cuda": ((2048, 8192), (4096,))}

EXAMPLES = """examples:
  seqpar calibrate --quick
  seqpar calibrate --ranks 8 --out node.json
  seqpar plan --lengths 3000,500,1200 --ranks 8 --model tiny --hardware node.json
"""


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine for the planner",
        description="Time attention, linear layers and links of this machine, fit the planner's cost model\n"
        "to the times and write it to a file. The error of each fit is measured on shapes that were not fitted.\n"
        "Takes about a minute and a half; --quick takes less.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--ranks", type=integer, default=2, help="processes that exchange messages to measure the links (default: 2)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to measure (default: cuda if torch sees one)")
    parser.add_argument(
        "--model", help="model whose layers are timed, a preset of ModelShape (default: llama-8b on cuda, tiny on cpu)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("hardware.json"), help="file to write (default: hardware.json)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats and shorter documents")
    parser.add_argument("--json", action="store_true", help="print the written JSON")
    parser.set_defaults(call=calibrate)


def calibrate(args: Any) -> int:
    """Measure and write the file; returns 0.

    Raises: CommandError for wrong flags, and for a fit that fails.
    """
    import torch

    from seqpar.planner import ModelShape

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda, but torch sees none; seqpar doctor says why")
    # one rank per core, or per device
    most = torch.cuda.device_count() if device.type == "cuda" else max(2, os.cpu_count() or 1)
    if not 2 <= args.ranks <= most:
        has = f"{most} GPUs" if device.type == "cuda" else f"{os.cpu_count()} cores"
        raise CommandError(f"--ranks must be 2 to {most}, got {args.ranks}: this machine has {has}, one for each rank")
    check_writable("--out", args.out)
    threads = torch.get_num_threads()
    try:
        model = ModelShape.preset(
            {"cpu": "tiny", "cuda": "llama-8b"}[device.type] if args.model is None else args.model
        )
        if device.type == "cpu":
            torch.set_num_threads(1)  # one core per rank
        data = measured(model, device, ranks=args.ranks, quick=args.quick)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from None
    finally:
        torch.set_num_threads(threads)
    try:
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {args.out}: {error.strerror}") from None
    if args.json:
        print(json.dumps(data, indent=1))
    else:
        show(data)
        print(f"written: {args.out}; load it with seqpar.Hardware.load")
    return 0


def measured(model: ModelShape, device: torch.device, *, ranks: int, quick: bool) -> dict[str, Any]:
    """The hardware as in `Hardware.to_dict`; under "measured" the machine and the rows that it was fitted to."""
    from seqpar.cli import measure
    from seqpar.launch import run_processes
    from seqpar.planner import Hardware
    from seqpar.planner.calibration import fit_attention
    from seqpar.planner.hardware import p2p_channels

    seconds, each = (4.0, 0.01) if quick else (45.0, 0.05)
    with progress("attention", seconds) as tick:
        longest = measure.longest_document(model, device, each, LONGEST)
        attended = measure.attention(model, device, seconds, longest, tick)
    seen, unseen = ([r for case, rows in attended for r in rows if case.unseen == u] for u in (False, True))
    attention = fit_attention(seen, unseen)
    linear, multiplied = _linear(model, device, seconds / 3)
    fits, exchanged = _links(device, ranks, quick)
    beside = run_processes(ranks, measure.hidden, HOP, 11 if quick else 40, device.type == "cuda", timeout=60.0)
    about = environment(device) | {
        "model": model.name, "device": device.type, "ranks": ranks, "kernel": measure.kernel_for(model, device),
    }  # fmt: skip
    nodes = (
        "; links between nodes were not measured and are assumed to equal links inside a node"
        if "across" not in fits
        else ""
    )
    hardware = Hardware(
        name=about["machine"],
        source=f"measured by seqpar calibrate on {about['machine']} at {about['time']} with {model.name}{nodes}",
        attention=attention.value,
        linear_rate=linear.value,
        inside=replace(fits["inside"].value, channels=p2p_channels(ranks) if device.type == "cuda" else None),
        across=fits.get("across", fits["inside"]).value,
        hidden=min(beside),
        kernel=about["kernel"],
        **_size(device),
    )
    errors = {"attention": attention, "linear": linear} | fits
    about["errors"] = {name: {"mean": fit.error, "unseen": list(fit.errors)} for name, fit in errors.items()}
    about["rows"] = {
        "attention": [{"case": asdict(case)} | asdict(row) for case, rows in attended for row in rows],
        "linear": [asdict(row) for row in multiplied],
    } | {name: [asdict(row) for row in rows] for name, rows in exchanged.items()}
    return hardware.to_dict() | {"measured": about}


def _linear(model: ModelShape, device: torch.device, seconds: float) -> tuple[Fit[float], list[LinearTiming]]:
    """The fit of a layer without attention, and the measured rows."""
    from seqpar.cli import measure
    from seqpar.planner.calibration import fit_linear

    seen, unseen = TOKENS[device.type]
    with progress("linear layers", seconds) as tick:
        rows = measure.linear(model, device, seconds, seen + unseen, tick)
    return fit_linear(rows[: len(seen)], rows[len(seen) :]), rows


def _links(
    device: torch.device, ranks: int, quick: bool
) -> tuple[dict[str, Fit[Any]], dict[str, list[ExchangeTiming]]]:
    """The fits of the links by name, and the measured rows.

    A busy machine takes a core away for longer than a small exchange lasts: more turns are measured while a fit fails.
    """
    from seqpar.cli import measure
    from seqpar.launch import run_processes
    from seqpar.planner.calibration import fit_link

    seen, unseen = SIZES[device.type]
    sizes = seen + unseen
    turns = 11 if quick else 40
    found: list[dict[str, list[list[float]]]] = []
    with progress("links", ROUNDS) as tick:
        for attempt in range(1, ROUNDS + 1):
            more = run_processes(ranks, measure.exchanges, sizes, turns, device.type == "cuda", timeout=60.0)
            found = measure.pooled(found, more) if found else more
            rows = measure.links(found, sizes)
            try:
                fits = {name: fit_link(x[: len(seen)], x[len(seen) :], what=name) for name, x in rows.items()}
            except ValueError:
                if attempt == ROUNDS:
                    raise
            else:
                break
            finally:
                tick(1.0)
    return fits, rows


def _size(device: torch.device) -> dict[str, int]:
    """Memory in bytes of one rank, and the ranks of this machine: one per GPU, or one per core."""
    import torch

    if device.type == "cuda":
        return {"memory": torch.cuda.get_device_properties(0).total_memory, "node": torch.cuda.device_count()}
    cores = os.cpu_count() or 1
    return {"memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // cores, "node": cores}


def environment(device: torch.device) -> dict[str, Any]:
    """Machine, versions, time, and the commit if the package is in its own repository."""
    import torch

    if device.type == "cuda":
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        path = Path("/proc/cpuinfo")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        machine = f"{next(names, platform.processor() or platform.machine())}, {os.cpu_count()} cores"
    return {
        "machine": machine,
        "versions": {"seqpar": seqpar.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(Path(seqpar.__file__).parent.parent),
    }


def _commit(root: Path) -> str | None:
    """The commit of the repository whose root is `root`; None for a package installed inside another repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    top, _, commit = done.stdout.strip().partition("\n")
    return commit if done.returncode == 0 and Path(top).resolve() == root.resolve() else None


def show(data: dict[str, Any]) -> None:
    """Print the fitted values and their errors on unseen measurements."""
    about, a = data["measured"], data["attention"]
    values = {
        "attention": f"{a['rate'] / 1e9:,.1f} GFLOP/s, backward {a['backward_rate'] / 1e9:,.1f}; a query row costs "
        f"{a['query_pairs']:.0f} pairs, a fetched key row {a['key_pairs']:.0f}; a piece {a['piece'] * 1e6:.1f} us, "
        f"a step {a['stage'] * 1e6:.1f}",
        "linear": f"{data['linear_rate'] / 1e9:,.1f} GFLOP/s",
    } | {
        name: f"{data[name]['bandwidth'] / 1e9:.2f} GB/s after {data[name]['latency'] * 1e6:.0f} us"
        for name in ("inside", "across")
    }
    values["inside"] += f"; {data['hidden']:.0%} of it overlaps with computation"
    rows: list[Sequence[object]] = []
    for name, value in values.items():
        error = about["errors"].get(name)
        if error is None:
            rows.append((name, value, "-", "not measured: as inside"))
            continue
        mean, most = error["mean"], max(map(abs, error["unseen"]))
        rows.append((name, value, f"{mean:.1%}, at most {most:.1%}", "" if mean <= GOOD else f"above {GOOD:.0%}"))
    unseen = len(about["errors"]["attention"]["unseen"])
    title = f"{data['name']}, {about['model']}, kernel {about['kernel']}, error on {unseen} unseen calls"
    print_table(title, ("what", "fitted", "error", "note"), rows)
