"""Checks the package on one NVIDIA GPU and then times it, row by row into a file; a wrong result is not timed.

    python -m bench.gpu.run                                # everything, most valuable first
    python -m bench.gpu.run --minutes 8                    # stops then; the next call goes on where this one ended
    python -m bench.gpu.run --slice correct --slice ring   # these alone; --list names them and their cases
    python -m bench.gpu.run --case '16384, 16 heads' --case 'forward 128'    # cases with one of these in their names
    python -m bench.gpu.run --without flex                 # whose compilation takes a minute
    python -m bench.gpu.run --rehearse                     # every slice in tiny shapes on the CPU, to a temporary file
    python -m bench.gpu.run --needs                        # what this machine lacks, and nothing else
    python -m bench.gpu.run --json /kept/new.jsonl --rows /kept/old.jsonl --minutes 8     # goes on from a copy of old

Any Python with torch, numpy and einops will do: PYTHONPATH=. in this repository, as `make gpu` sets it.

A row is one JSON object a line: slice, case, kernel, mode; ``tflops`` (2 · area · H · (D + D_v) operations forward,
2.5 times that backward) or ``gbps`` (bytes read and written); milliseconds, the median of interleaved runs, with the
fastest and slowest; what it is compared with, and ``ratio``, above 1 if faster; device, versions and commit. Rows of
checks have ``ok`` and errors, rows without a figure say why under ``skipped``, ``error`` or ``refused``. A case whose
rows are there for this device, versions, commit and sources is not measured again; one that the end of the time cut
off, which its row says under ``cut``, is. Binaries that Triton has compiled are kept in $TRITON_CACHE_DIR.

Times are of the device alone unless the slice is `auto`, `model` or `host`: it first waits for twice as long as the
host needs to issue a run, which ``host_ms`` says. Exit code 1: a result was wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.needs import needs, told

if TYPE_CHECKING:
    from bench.gpu.machine import Machine
    from bench.gpu.rows import Case, Row

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu.jsonl"
RESERVE = 15  # seconds before the end in which no case starts


def slices() -> dict[str, Callable[[bool], list[Case]]]:
    """Slice -> its cases, in the order in which they run; imported late, as Triton reads its environment then."""
    from bench.gpu.correct import correct
    from bench.gpu.model import model
    from bench.gpu.offload import offload
    from bench.gpu.peer_comm import comm
    from bench.gpu.profile import profile
    from bench.gpu.recurrent import recurrent
    from bench.gpu.ring import ring
    from bench.gpu.small import small
    from bench.gpu.speed import accumulate, backward, ceilings, forward
    from bench.gpu.step import step
    from bench.gpu.trees import trees
    from bench.gpu.tune import tune
    from bench.gpu.verb import auto, host

    return {
        "correct": correct, "ceilings": ceilings, "forward": forward, "backward": backward, "ring": ring, "step": step,
        "accumulate": accumulate, "auto": auto, "model": model, "trees": trees, "recurrent": recurrent, "small": small,
        "offload": offload, "comm": comm, "host": host, "profile": profile, "tune": tune,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 if no result is wrong, 2 if nothing can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", action="append", help="one of --list; may be given several times")
    parser.add_argument("--case", action="append", help="a part of the names of cases; may be given several times")
    parser.add_argument(
        "--without", action="append", default=[], help="a library not to time; its cases count as measured all the same"
    )
    parser.add_argument("--list", action="store_true", help="name slices and cases, and run nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which the case at hand is cut off")
    parser.add_argument("--json", type=Path, help=f"file of the rows, default {RESULTS}")
    parser.add_argument("--rows", type=Path, help="file of earlier rows, copied to --json first unless that exists")
    parser.add_argument("--needs", action="store_true", help="say what this machine lacks, and run nothing")
    parser.add_argument("--commit", help="what rows say where git cannot be asked")
    parser.add_argument("--cold", action="store_true", help="overwrite the L2 cache before every run")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args(arguments)
    machine_has = needs()
    if args.needs:
        print(told(machine_has))
        return 0 if all(need.ok for need in machine_has) else 1
    if not args.list:
        print(told(machine_has), flush=True)
    if any(need.stops and not need.ok for need in machine_has):
        parser.error("this machine lacks what everything needs, as the table above says")
    import torch

    if not (args.rehearse or args.list) and (not torch.cuda.is_available() or torch.version.hip):
        parser.error("this script needs one CUDA device; see `seqpar doctor`, or --rehearse")
    if args.rehearse:
        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
    known = slices()
    if unknown := set(args.slice or ()) - set(known):
        parser.error(f"unknown slice {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    cases = [case for name in known if name in (args.slice or known) for case in known[name](args.rehearse)]
    for part in args.case or ():
        if not any(part in case.name for case in cases):
            parser.error(f"no case has {part!r} in its name; see --list")
    cases = [case for case in cases if any(part in case.name for part in args.case or [""])]
    from bench.gpu.rivals import PEERS

    if unknown := set(args.without) - {peer.name for peer in PEERS}:
        libraries = ", ".join(dict.fromkeys(peer.name for peer in PEERS))
        parser.error(f"unknown library {', '.join(sorted(unknown))}; there are {libraries}")
    cases.sort(key=lambda case: case.later)
    if args.list:
        for case in cases:
            print(f"{case.slice:12}{case.name}{'  (later)' if case.later else ''}")
        return 0
    return _measure(args, cases)


def _measure(args: argparse.Namespace, cases: list[Case]) -> int:
    from bench.gpu.machine import Machine
    from bench.gpu.plot import plot
    from bench.gpu.rows import Results, doubt, wrong
    from bench.gpu.tune import ranking

    machine = Machine(rehearsal=args.rehearse, minutes=args.minutes, cold=args.cold, without=args.without)
    path = args.json or (Path(tempfile.mkdtemp()) / "rehearsal.jsonl" if args.rehearse else RESULTS)
    if args.rows is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(args.rows, path)
    results = Results(path, machine.origin(args.commit))
    machine.doubt = lambda *of: doubt(results.rows, *of)
    # what was cut off twice may need longer than a slice of time has, so it lets the others go first
    todo = sorted((case for case in cases if not results.done(case)), key=lambda case: results.cuts(case) > 1)
    print(f"{results.origin['device']}: {len(cases) - len(todo)} of {len(cases)} cases are in {path}", flush=True)
    longest: dict[str, float] = {}  # seconds that a case takes, by slice
    clocks = machine.clocks()
    for n, case in enumerate(todo):
        if machine.left() < max(RESERVE, 1.2 * longest.get(case.slice, 0.0)):
            print(f"stopped before the time is up, {len(todo) - n} cases left")
            break
        began = time.monotonic()
        rows, before, clocks = _rows(machine, case), clocks, machine.clocks()
        longest[case.slice] = max(longest.get(case.slice, 0.0), time.monotonic() - began)
        rows = results.add(case, ({**row, "clocks": [before, clocks]} if clocks else row for row in rows))
        for row in rows:
            print(f"{row['slice']:11}{row['case']:45} {said(row)}", flush=True)
        if any("cut" in row for row in rows):
            print(f"the time is up, {len(todo) - n} cases left")
            break
        if any("lost" in row for row in rows):
            print("the device answers with errors only; the next call leaves this case out")
            break
    machine.close()
    for made in (plot(results.rows, path.with_suffix(".png")), ranking(results.rows, path.with_suffix(".tuning.json"))):
        if made:
            print(f"written to {made}")
    bad = [row for row in results.rows if wrong(row)]
    print(f"written to {path}; {len(bad)} of {len(results.rows)} rows are wrong")
    return 1 if bad else 0


def _rows(machine: Machine, case: Case) -> list[Row]:
    """The rows of a case, and of what ended it."""
    from bench.gpu.machine import DeviceLost, TimeIsUp, unable

    rows: list[Row] = []
    try:
        with machine.until_the_end():
            try:
                for row in case.run(machine):
                    rows.append(row)
            except DeviceLost:
                raise
            except Exception as error:
                machine.wait()
                rows.append({"kernel": "", "mode": "", **unable(error)})
    except DeviceLost as error:
        rows.append({"kernel": "", "mode": "", "ok": False, "lost": str(error)[:300]})
    except TimeIsUp as error:
        rows.append({"kernel": "", "mode": "", "cut": str(error)})
    return rows


def said(row: Row) -> str:
    """A row as a line to print."""
    what = f"{row['kernel']:12}{row['mode']:23} {row.get('what') or ''} "
    for name in ("cut", "lost", "refused", "missed", "error", "skipped"):
        if name in row:
            return f"{what}{name}: {row[name]}"
    if "ok" in row:
        return f"{what}ok, {row['ratio']:.2f} of the tolerance" if row.get("ratio") is not None else f"{what}ok"
    unit = ("tflops", "TFLOP/s") if row.get("tflops") is not None else ("gbps", "GB/s")
    value = f"{row[unit[0]]:8.1f} {unit[1]}" if row.get(unit[0]) is not None else ""
    ratio = f" {row['ratio']:.2f} of {row['baseline']}" if row.get("ratio") is not None else ""
    host = f", host {row['host_ms']:.3f} ms" if "host_ms" in row else ""
    return f"{what}{value} {row['ms']:9.3f} ms{ratio}{host}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a case that was cut off may have left threads that nobody ends
