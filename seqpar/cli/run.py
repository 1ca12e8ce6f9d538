"""`seqpar run`: the torchrun line that starts a script on several ranks of this machine."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from seqpar.cli.flags import integer
from seqpar.cli.output import CommandError


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "run",
        help="print the torchrun command that runs a script on N local ranks",
        description="Print the torchrun command that runs a script on N ranks of this machine, and exit with code 2.",
    )
    parser.add_argument("-n", "--ranks", type=integer, required=True, metavar="N", help="processes to start")
    parser.add_argument("script", help="Python file to run")
    # argparse lists it as required, though it may be empty
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script").required = False
    parser.set_defaults(call=call)


def call(args: argparse.Namespace) -> int:
    """Raise the line as an error: nothing was started."""
    words = ["--standalone", "--nproc-per-node", str(args.ranks), args.script, *args.args]
    raise CommandError(f"use torchrun {shlex.join(words)}")
