"""`seqpar demo`: the example that trains on real documents, from the installed package or the source tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import seqpar
from seqpar.cli.output import CommandError, need
from seqpar.cli.run import launch

PACKAGE = Path(seqpar.__file__).parent


def add_command(commands: Any) -> None:
    """Declare the command; flags it does not know are the script's, and so is --help."""
    parser = commands.add_parser(
        "demo",
        add_help=False,
        allow_abbrev=False,
        help="train a small decoder on real documents over local ranks",
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("-h", "--help", action="store_true")
    parser.set_defaults(call=demo)


def find_example(name: str) -> Path:
    """The path of an example: inside the installed package, else beside the package in its source tree.

    Raises: CommandError naming both places.
    """
    places = [PACKAGE / "examples" / name, PACKAGE.parent / "examples" / name]
    for place in places:
        if place.is_file():
            return place
    raise CommandError(f"{name} is neither at {places[0]} nor at {places[1]}; reinstall seqpar")


def demo(args: Any) -> int:
    """The exit code of examples/demo.py over `args.ranks` processes."""
    script = find_example("demo.py")
    if args.help:
        return subprocess.call([sys.executable, str(script), "--help"])
    need("rich", "cli", "the demo's output")
    need("matplotlib", "plot", "the demo's picture")
    return launch(args.ranks, script, ["--ranks", str(args.ranks), *args.rest])
