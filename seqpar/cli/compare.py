"""`seqpar compare`: a training program on one rank and on several."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from seqpar.cli.flags import integer
from seqpar.cli.output import CommandError


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "compare",
        help="compare losses, gradients and weights of a training program on N ranks with those on one",
        description="Run module:program on one rank and on N ranks, and compare loss, gradients and weights. The exit "
        "code is 1 if they differ. See seqpar.testing.compare for what the program yields.",
    )
    parser.add_argument("program", metavar="module:program", help="a generator function of a module")
    parser.add_argument("-n", "--ranks", type=integer, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--steps", type=integer, default=1, metavar="N", help="optimizer steps (1)")
    parser.add_argument("--processes", action="store_true", help="ranks are processes, as DDP and FSDP2 need")
    parser.set_defaults(call=call)


def call(args: argparse.Namespace) -> int:
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
