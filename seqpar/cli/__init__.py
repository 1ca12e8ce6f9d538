"""The command line: `seqpar doctor`, `plan`, `calibrate`, `run`, `demo`. A command imports what it needs when run."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from seqpar import __version__
from seqpar.cli import calibrate, demo, doctor, plan, run
from seqpar.cli.flags import shown
from seqpar.cli.output import CommandError

__all__ = ["main"]

# What shells report of a program that a signal ended: SIGINT and SIGPIPE.
INTERRUPTED, UNREAD = 130, 141
# Of standard output: commands name the files that they write themselves.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command: 0 if it did what was asked, 2 if it was asked wrongly, 1 if it failed.

    130 after Ctrl-C, and 141 where nobody reads what it prints. Whatever is wrong is said in one line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have bytes that are no text
    name = "seqpar"
    try:
        try:
            args = arguments(argv)
            name = f"seqpar {args.command}"
            return int(args.call(args))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk and a closed pipe show here, while they can still be told
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CommandError, OSError, MemoryError) as error:
        return failed(name, error)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command and its flags."""
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
        parser.error(
            f"seqpar {args.command} does not know {' '.join(map(shown, rest))}; see seqpar {args.command} --help"
        )
    return args


def failed(name: str, error: CommandError | OSError | MemoryError) -> int:
    """The exit code for an error, after one line that says it."""
    code = 2 if isinstance(error, CommandError) else 1
    dropped = drop_output()
    if isinstance(dropped or error, BrokenPipeError):
        return UNREAD
    if dropped is not None or getattr(error, "errno", None) in FULL:
        error = dropped or error
        text = f"cannot write to standard output: {os.strerror(error.errno)}"
    elif isinstance(error, MemoryError):
        text = f"this takes more memory than there is: {error}"
    else:
        text = str(error)
    with contextlib.suppress(OSError):
        print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return code


def drop_output() -> OSError | None:
    """Why standard output does not take what was printed, None if it does."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # else Python tries once more when it ends, and shows a traceback
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
