"""``python -m tests.fuzz 17 18`` or ``python -m tests.fuzz 0-500``: how the cases of these numbers end."""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from tests.fuzz.draw import drawn, judged


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    start = time.process_time()
    for argument in arguments:
        first, _, last = argument.partition("-")
        for number in range(int(first), int(last or first) + 1):
            try:
                end = judged(number)
            except AssertionError as error:
                end = f"WRONG: {error}"
            counts[end.split(":")[0]] += 1
            if not last or end.startswith("WRONG"):
                print(number, end, flush=True)
            if not last:
                print(drawn(number))
    print(dict(counts), f"{time.process_time() - start:.1f} CPU seconds")
    return int(counts["WRONG"] > 0)


sys.exit(main(sys.argv[1:]))
