"""The values of flags: numbers, files to read, files to write."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from seqpar.cli.output import CommandError

DIGITS = 18  # digits of an integer, which then fits into 64 bits
LONGEST = 1 << 26  # bytes of a file; a device such as /dev/zero never ends


def integer(text: str) -> int:
    """The integer of a flag.

    Raises: argparse.ArgumentTypeError for anything else, and for too many digits.
    """
    if len(text) > 2 * DIGITS:
        raise argparse.ArgumentTypeError(f"expected an integer of at most {DIGITS} digits, got {shown(text)}")
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if abs(value) >= 10**DIGITS:
        raise argparse.ArgumentTypeError(f"expected an integer of at most {DIGITS} digits, got {text!r}")
    return value


def integers(text: str) -> list[int]:
    """The integers of a comma-separated list. Raises: as `integer`."""
    return [integer(part) for part in text.split(",")]


def refuse(args: Any, names: tuple[str, ...], why: str) -> None:
    """Raise CommandError if one of these flags is given."""
    for name in names:
        if getattr(args, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')} {why}")


def shown(text: str) -> str:
    """A text as messages show it: on one line, shortened if long."""
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return text if text.isprintable() and text else repr(text)


def content(source: str) -> str:
    """The text of a file, or of standard input if source is ``-``.

    Raises: CommandError naming the source if it cannot be read, is not text or is too long.
    """
    what = "standard input" if source == "-" else source
    try:
        if source == "-":
            if sys.stdin is None:
                raise CommandError(f"cannot read {what}: it is closed")
            text = sys.stdin.read(LONGEST + 1)
        else:
            with open(source, encoding="utf-8-sig") as file:
                text = file.read(LONGEST + 1)
    except OSError as error:
        raise CommandError(f"cannot read {what}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"{what} is not text: {error}") from None
    if len(text) > LONGEST:
        raise CommandError(f"{what} is longer than {LONGEST >> 20} MiB")
    return text


def check_writable(flag: str, path: Path) -> None:
    """Raise CommandError, naming the flag, if no file can be written at that path."""
    if path.is_dir():
        raise CommandError(f"{flag} {path} is a directory; name a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"{flag} {path}: {folder} is not a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"{flag} {path} is not writable")
