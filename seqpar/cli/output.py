"""Output of commands: tables, and errors that end a command without a traceback."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class CommandError(Exception):
    """A command cannot do what was asked; the message names the change to make. The exit code is 2."""


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: with rich on a terminal if it is installed, else as aligned plain text."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout is not None and sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")
        for row in cells:
            # Brackets in a cell are text, not rich's markup.
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        Console().print(table, "")
        return
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(title)
    for row in [list(header), *cells]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()


@contextmanager
def progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """A function that advances a progress bar towards `total`; the bar shows on a terminal where rich is installed."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def need(module: str, package: str, what: str) -> None:
    """Raise CommandError, naming the package to install, unless `module` is installed."""
    if importlib.util.find_spec(module) is None:
        raise CommandError(f"{what} needs {module}, which is not installed: pip install '{package}'")


def size(count: float) -> str:
    """A number of bytes in words: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
