"""Prints the time of `import seqpar` beside that of `import torch`: medians over fresh processes, in turn."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

LIMIT = 1.3
TIMED = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def seconds(module: str) -> float:
    """Seconds to import a module in a process of its own."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(module)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    for module in ("torch", "seqpar"):
        seconds(module)  # byte-compiled and in the page cache from here on
    torch, seqpar = zip(*((seconds("torch"), seconds("seqpar")) for _ in range(rounds)))
    ratio = statistics.median(seqpar) / statistics.median(torch)
    for module, times in (("torch", torch), ("seqpar", seqpar)):
        print(f"import {module:7} {statistics.median(times):.3f} s  ({min(times):.3f} to {max(times):.3f})")
    print(f"ratio {ratio:.3f}, limit {LIMIT}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
