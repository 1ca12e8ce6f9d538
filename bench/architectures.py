"""What becomes of the architectures of transformers on two ranks, by every documented way in; writes the table.

python bench/architectures.py                 # all of them, to bench/results/architectures.json
python bench/architectures.py llama lfm2      # some of them, to the terminal alone
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))  # the table lies with the tests

from tests.ecosystem.architectures import TABLE
from tests.ecosystem.ways import RANKS, TOLERANCE, verdict, ways

RESULTS = Path(__file__).parent / "results/architectures.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(TABLE)}")
    names = parser.parse_args().names or list(TABLE)
    if unknown := sorted(set(names) - TABLE.keys()):
        parser.error(f"unknown: {', '.join(unknown)}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows, counts = {}, Counter[str]()
    for name in names:
        said = {way: verdict(TABLE[name], way) for way in ways(TABLE[name])}
        rows[name] = {"group": TABLE[name].group, "ways": said}
        counts.update(each.partition(":")[0].partition(" by ")[0] for each in said.values())
        for way, each in said.items():
            print(f"{name:24}{way:20}{each:.160}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    if set(names) == TABLE.keys():
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        result = {"ranks": RANKS, "dtype": "float64", "tolerance": TOLERANCE, "versions": versions, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
