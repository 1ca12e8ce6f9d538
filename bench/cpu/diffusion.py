"""Tries transformers of diffusers on 2 and 3 ranks: output and every gradient beside those of one process, in fp64.

python -m bench.cpu.diffusion                     # a small model of every class, to bench/results/diffusion.json,
                                                  # which has a run of each release
python -m bench.cpu.diffusion Flux Wan            # classes with such names, to the terminal alone
python -m bench.cpu.diffusion --show --jobs 4     # all of them, to the terminal alone, in 4 processes
python -m bench.cpu.diffusion --checkout PATH     # the configs that tests of a checkout of diffusers have
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import tests
from bench.lib import records
from tests.integrations.diffusers_classes import TABLE, classes, made
from tests.integrations.diffusers_verdicts import FIT, SETTINGS, Case, said, verdict

QUANTISED = ("SDNQ", "Quant", "AutoRound")
LARGEST = 50_000_000  # parameters of a model of which every rank has a copy
RESULTS = Path(__file__).parents[1] / "results/diffusion.json"


def of_checkout(path: Path) -> Iterator[tuple[str, Case]]:
    """Name and case of each config of a model's own tests in a checkout of diffusers."""
    tests.__path__.append(str(path / "tests"))  # a package of the same name, with other modules
    os.environ.setdefault("DIFFUSERS_TEST_DEVICE", "cpu")
    for file in sorted(path.glob("tests/models/transformers/test_models_*.py")):
        try:
            module = importlib.import_module(f"tests.models.transformers.{file.stem}")
        except Exception as error:
            print(f"{file.stem}: not imported, {said(error)}")
            continue
        for name, config in vars(module).items():
            own = inspect.isclass(config) and config.__module__ == module.__name__
            if own and name.endswith("TesterConfig") and not any(word in name for word in QUANTISED):
                yield f"{file.stem[12:].removeprefix('transformer_')}:{name[:-12]}", partial(_configured, config)


def _configured(config: type[Any], samples: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model and inputs of a tester's config, with random weights, in fp64. samples: where the config takes some."""
    tester = config()
    torch.manual_seed(0)
    model = tester.model_class(**tester.get_init_dict())
    if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise MemoryError(
            f"it has {count:,} parameters, and copies of more than {LARGEST:,} would take too much memory"
        )
    model = model.double().eval()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
    takes = "batch_size" in inspect.signature(tester.get_dummy_inputs).parameters
    inputs = tester.get_dummy_inputs(**{"batch_size": samples} if takes else {})
    return model, tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def row(make: Case) -> dict[str, list[str]]:
    """Verdict -> the settings in which it is that. What is refused in one is not tried in others."""
    found: dict[str, list[str]] = {}
    for setting in SETTINGS:
        result = verdict(make, setting)
        found.setdefault(result, []).append(str(setting))
        if result.startswith("refused"):
            break
    return found


def rows_of(cases: dict[str, Case], jobs: int) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Name and row of each case, computed in so many processes."""
    waiting = dict(cases)
    while waiting:
        context = multiprocessing.get_context("fork")  # such a process has the modules of a checkout
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for name, future in [(name, pool.submit(row, make)) for name, make in waiting.items()]:
                try:
                    found = future.result()
                except BrokenProcessPool:
                    found = {"CRASHED: its process ended, perhaps for lack of memory": list(map(str, SETTINGS))}
                del waiting[name]
                yield name, found
                if future.exception() is not None:
                    break


def kind(found: dict[str, list[str]]) -> str:
    """A row in a word: its worst."""
    words = {result.partition(":")[0].partition(" ")[0] for result in found}
    return next((word for word in ("WRONG", "CRASHED", "refused", "exact") if word in words), "alone")


def table(rows: dict[str, dict[str, list[str]]]) -> str:
    """The table of a page: the classes that are exact, then the reasons for which others are refused."""
    exact = [name for name, found in rows.items() if kind(found) == "exact"]
    text = textwrap.fill(f"**Exact:** {', '.join(exact)}.", 120) + "\n\n| refused | because |\n|---|---|\n"
    for name, found in rows.items():
        if kind(found) == "refused":
            said = next(result for result in found if result.startswith("refused"))
            reason = said.partition("diffusers: ")[2].partition("; give ")[0].partition(", expected ")[0]
            where = found[said][0].partition(",")[0] if "exact" in found else ""
            text += f"| `{name}`{where and f', {where}'} | {reason.replace(f' of {name}', '')} |\n"
    return text


def summary(recorded: dict[str, Any]) -> str:
    """The sentence of a page: how many classes of each release are what."""
    some = []
    for version, run in sorted(recorded.items(), reverse=True):
        counts = Counter(map(kind, run["rows"].values()))
        assert not counts.keys() - set(FIT), counts
        of = f"Of {len(run['rows'])} of the {run['classes']} classes of diffusers {version}"
        some.append(f"{of}, {counts['exact']} are exact and {counts['refused']} are refused by name; none is wrong.")
    return textwrap.fill(" ".join(some), 120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="parts of names of classes")
    parser.add_argument("--show", action="store_true", help="write nothing, and fail where one is wrong")
    parser.add_argument("--checkout", type=Path, help="a checkout of diffusers, whose tests have other configs")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run them")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    here = classes()
    cases: Iterator[tuple[str, Case]] = ((name, partial(made, name)) for name in TABLE if name in here)
    if args.checkout:
        cases = of_checkout(args.checkout)
    chosen = {name: make for name, make in cases if not args.names or any(part in name for part in args.names)}
    rows: dict[str, dict[str, list[str]]] = {}
    for name, found in rows_of(chosen, args.jobs):
        rows[name] = found
        for result, settings in found.items():
            few = "" if len(settings) == len(SETTINGS) else f" ({'; '.join(settings)})"
            print(f"{name:44}{result:.300}{few}", flush=True)
    counts = Counter(map(kind, rows.values()))
    print(f"{len(rows)} of {len(here)}: {', '.join(f'{number} {word}' for word, number in counts.most_common())}")
    if args.show or args.checkout or args.names:
        parser.exit(bool(counts.keys() - set(FIT)))
    of_release = {"torch": torch.__version__, "classes": len(here), "rows": rows}
    recorded = json.loads(RESULTS.read_text()) | {diffusers.__version__: of_release}
    records.write(RESULTS, recorded)
    print(summary(recorded), table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
