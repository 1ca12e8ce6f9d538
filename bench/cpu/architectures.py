"""Tries the architectures of transformers on two ranks, by every documented way in, in fp64 and in fp32.

python -m bench.cpu.architectures                 # all of them, to bench/results/architectures.json and docs/
python -m bench.cpu.architectures llama lfm2      # some of them, to the terminal alone
python -m bench.cpu.architectures --show          # all of them, to the terminal alone, as for another release
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from bench.cpu.architectures_page import page
from bench.lib import records
from tests.ecosystem.architectures import TABLE
from tests.ecosystem.ways import FIT, RANKS, TOLERANCE, verdict, ways

DTYPES = {"float64": torch.float64, "float32": torch.float32}

RESULTS = Path(__file__).parents[1] / "results/architectures.json"
PAGE = Path(__file__).parents[2] / "docs/architectures.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(TABLE)}")
    parser.add_argument("--show", action="store_true", help="write nothing, and fail where one is wrong")
    args = parser.parse_args()
    names = args.names or list(TABLE)
    if unknown := sorted(set(names) - TABLE.keys()):
        parser.error(f"unknown: {', '.join(unknown)}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    counts = {each: Counter[str]() for each in DTYPES}
    for name in names:
        rows[name] = {"kind": TABLE[name].kind, "group": TABLE[name].group, **{each: {} for each in DTYPES}}
        for way, (each, dtype) in product(ways(TABLE[name]), DTYPES.items()):
            said = rows[name][each][way] = verdict(TABLE[name], way, dtype)
            counts[each][said.partition(":")[0].partition(" by ")[0]] += 1
            print(f"{name:24}{way:20}{each:10}{said:.150}", flush=True)
    for each, count in counts.items():
        print(f"{each}: {', '.join(f'{number} {kind}' for kind, number in count.most_common())}")
    if args.show:
        parser.exit(any(counts[each].keys() - set(FIT) for each in DTYPES))
    if set(names) == TABLE.keys():
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        tolerance = {each: TOLERANCE[dtype] for each, dtype in DTYPES.items()}
        facts = {"ranks": RANKS, "model_types": len(CONFIG_MAPPING_NAMES), "tolerance": tolerance}
        result = facts | {"versions": versions, "rows": rows}
        records.write(RESULTS, result)
        PAGE.write_text(page(result))


if __name__ == "__main__":
    main()
