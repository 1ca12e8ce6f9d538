"""`seqpar demo`: trains the example on real documents, from the installed package or the source tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import seqpar
from seqpar.cli.output import CommandError, need

PACKAGE = Path(seqpar.__file__).parent


def add_command(commands: Any) -> None:
    """Declare the command. All its flags, even --help, are the script's."""
    parser = commands.add_parser(
        "demo",
        add_help=False,
        allow_abbrev=False,
        help="train a small decoder on real documents over local ranks",
    )
    parser.set_defaults(call=demo)


def find_example(name: str) -> Path:
    """The path of an example: inside the installed package, or beside the package in its source tree.

    Raises: CommandError naming both places.
    """
    places = [PACKAGE / "examples" / name, PACKAGE.parent / "examples" / name]
    for place in places:
        if place.is_file():
            return place
    raise CommandError(f"{name} is neither at {places[0]} nor at {places[1]}; reinstall seqpar")


def load(script: Path) -> ModuleType:
    """Import an example as a module; it can import the examples beside it."""
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
        need("rich", "cli", "the demo's output")
        need("matplotlib", "plot", "the demo's picture")
    return int(load(script).main(args.rest, prog="seqpar demo"))
