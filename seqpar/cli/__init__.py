"""The command line: `seqpar doctor`, `plan`, `fit`, `calibrate`, `compare`, `run`, `demo`.

A command imports its tools when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from functools import partial

from seqpar import __version__
from seqpar.cli import calibrate, doctor, fit, plan, programs
from seqpar.cli.flags import shown
from seqpar.cli.output import CommandError

__all__ = ["main"]

# The exit codes that shells report for a program ended by a signal: SIGINT and SIGPIPE.
INTERRUPTED, UNREAD = 130, 141
# Errors that mean standard output is full. For other files the commands name the file themselves.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 for success, 2 for a wrong request, 1 for a failure.

    130 after Ctrl-C, 141 if the reader of its output has gone. An error is one line on standard error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are not valid text
    name = "seqpar"
    try:
        try:
            args = arguments(argv)
            name = f"seqpar {args.command}"
            return int(args.call(args))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk or a closed pipe shows up here, where it can still be reported
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CommandError, OSError, MemoryError) as error:
        return failed(name, error)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command and its flags."""
    parser = argparse.ArgumentParser(prog="seqpar", description="Long-context attention over many ranks.")
    parser.add_argument("--version", action="version", version=f"seqpar {__version__}")
    in_lines = partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=in_lines)
    for module in (doctor, plan, fit, calibrate, programs):
        module.add_command(commands)
    args, rest = parser.parse_known_args(argv)
    # Only the demo takes unknown flags: it passes them to its script.
    if args.command == "demo":
        args.rest = rest
    elif rest:
        parser.error(
            f"seqpar {args.command} does not know {' '.join(map(shown, rest))}; see seqpar {args.command} --help"
        )
    return args


def failed(name: str, error: CommandError | OSError | MemoryError) -> int:
    """Print one line for the error; returns the exit code."""
    code = 2 if isinstance(error, CommandError) else 1
    dropped = drop_output()
    if isinstance(dropped or error, BrokenPipeError):
        return UNREAD
    if dropped is not None or getattr(error, "errno", None) in FULL:
        error = dropped or error
        text = f"cannot write to standard output: {os.strerror(error.errno)}"
    elif isinstance(error, MemoryError):
        text = f"not enough memory: {error}"
    else:
        text = str(error)
    with contextlib.suppress(OSError):
        print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return code


def drop_output() -> OSError | None:
    """Why standard output does not accept the printed text; None if it does."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # otherwise Python tries again at exit and shows a traceback
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
