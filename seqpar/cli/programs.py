"""The commands of programs: `seqpar compare`, a user's on one rank and on several; `seqpar run` and `seqpar demo`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import seqpar
from seqpar.cli.flags import integer
from seqpar.cli.output import CommandError, need

PACKAGE = Path(seqpar.__file__).parent


def add_command(commands: Any) -> None:
    """Declare the three commands and their flags; those of the demo, even --help, are its script's."""
    parser = commands.add_parser(
        "compare",
        help="compare losses, gradients, weights and buffers of a training program on N ranks with those on one",
        description="Run module:program on one rank and on N ranks, and compare loss, gradients, weights and buffers.\n"
        "The exit code is 1 if they differ. See seqpar.testing.compare for what the program yields.",
    )
    parser.add_argument("program", metavar="module:program", help="a generator function of a module")
    parser.add_argument("-n", "--ranks", type=integer, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--steps", type=integer, default=1, metavar="N", help="optimizer steps (1)")
    parser.add_argument("--processes", action="store_true", help="ranks are processes, as DDP and FSDP2 need")
    parser.set_defaults(call=run_compare)
    parser = commands.add_parser(
        "run",
        help="print the torchrun command that runs a script on N local ranks",
        description="Print the torchrun command that runs a script on N ranks of this machine, and exit with code 2.",
    )
    parser.add_argument("-n", "--ranks", type=integer, required=True, metavar="N", help="processes to start")
    parser.add_argument("script", help="Python file to run")
    # argparse lists it as required, though it may be empty
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script").required = False
    parser.set_defaults(call=print_torchrun)
    parser = commands.add_parser(
        "demo",
        add_help=False,
        allow_abbrev=False,
        help="train a small decoder on real documents over local ranks",
    )
    parser.set_defaults(call=demo)


def run_compare(args: argparse.Namespace) -> int:
    """Print the comparison; returns 0 if the values are equal up to rounding, else 1."""
    from seqpar.testing import compare

    for flag, least in (("ranks", 2), ("steps", 1)):
        if getattr(args, flag) < least:
            raise CommandError(f"--{flag} must be at least {least}, got {getattr(args, flag)}")
    found = compare(_program(args.program), ranks=args.ranks, steps=args.steps, processes=args.processes)
    print(found)
    return 0 if found.equal else 1


def _program(words: str) -> Any:
    """The function that ``module:program`` names."""
    module, _, name = words.partition(":")
    if not module or not name.isidentifier():
        raise CommandError(f"program is {words!r}, expected module:program")
    sys.path.insert(0, os.getcwd())  # as of `python -m`
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise CommandError(f"no module {module!r} here or on Python's path") from None
    except AttributeError:
        if module in sys.modules:
            raise CommandError(f"module {module!r} has no {name!r}") from None
        raise


def print_torchrun(args: argparse.Namespace) -> int:
    """Raise the line as an error: nothing was started."""
    words = ["--standalone", "--nproc-per-node", str(args.ranks), args.script, *args.args]
    raise CommandError(f"use torchrun {shlex.join(words)}")


def find_example(name: str) -> Path:
    """The path of an example: inside the installed package, or next to the package in its source tree.

    Raises: CommandError naming both places.
    """
    places = [PACKAGE / "examples" / name, PACKAGE.parent / "examples" / name]
    for place in places:
        if place.is_file():
            return place
    raise CommandError(f"{name} is neither at {places[0]} nor at {places[1]}; reinstall seqpar")


def load(script: Path) -> ModuleType:
    """Import an example as a module; it can import the examples next to it."""
    name = f"seqpar_example_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up annotations
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module


def demo(args: Any) -> int:
    """Run examples/demo.py, which checks its flags before it starts its ranks; returns its exit code."""
    script = find_example("demo.py")
    if not {"-h", "--help"} & set(args.rest):
        need("rich", "seqpar[cli]", "the demo's output")
        need("matplotlib", "seqpar[plot]", "the demo's picture")
    return int(load(script).main(args.rest, prog="seqpar demo"))
