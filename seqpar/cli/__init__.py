"""The command line: `seqpar doctor`, `plan`, `calibrate`, `run`, `demo`. A command imports what it needs when run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from seqpar import __version__
from seqpar.cli import calibrate, demo, doctor, plan, run
from seqpar.cli.output import CommandError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command: 0 if it did what was asked, 2 if it was asked wrongly, else what went wrong."""
    parser = argparse.ArgumentParser(prog="seqpar", description="Long-context attention over many ranks.")
    parser.add_argument("--version", action="version", version=f"seqpar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (doctor, plan, calibrate, run, demo):
        module.add_command(commands)
    args, rest = parser.parse_known_args(argv)
    # Only the demo has flags that are not its own: they are the script's.
    if args.command == "demo":
        args.rest = rest
    elif rest:
        parser.error(f"seqpar {args.command} does not know {' '.join(rest)}; see seqpar {args.command} --help")
    try:
        return int(args.call(args))
    except CommandError as error:
        print(f"seqpar {args.command}: {error}", file=sys.stderr)
        return 2
