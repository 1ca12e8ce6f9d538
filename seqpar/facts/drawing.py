"""What pictures share: colours, matplotlib's style, and a file. Imports matplotlib only when called."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, MUTED, EDGE = "#1f2430", "#6b7280", "#d1d5db"
# Okabe and Ito's, which the colour-blind tell apart (Color Universal Design, 2008), and two more.
LONG = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#8c6248", "#7d5ba6")
STYLE: Any = {
    "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "legend.frameon": False,
}  # fmt: skip
DARK = STYLE | dict.fromkeys(("axes.labelcolor", "text.color"), "#e6e8eb")
DARK |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#a3aab5")
DARK |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#0d1117")


@contextmanager
def picture(
    what: str, path: str | Path, size: tuple[float, float], style: Any = STYLE
) -> Iterator[Any]:  # fmt: skip
    """A figure to draw on, in the block; then it is written, in the format of the file's suffix.

    Raises: ImportError, naming the caller, without matplotlib; and as `checked_path`.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # not pyplot: no backend, no window, no global state
    except ImportError:
        raise ImportError(f"{what} needs matplotlib, which is not installed: pip install 'seqpar[plot]'") from None
    path = checked_path(path)
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def instead(axis: Any, words: str) -> None:
    """Words in the middle of axes on which nothing is drawn."""
    axis.text(0.5, 0.5, words, ha="center", va="center", transform=axis.transAxes, color=MUTED)


def checked_path(path: str | Path) -> Path:
    """The path of a picture, unchanged, once it is known to be writable.

    Raises: ValueError for a suffix that is not a format, OSError for a directory or a path that cannot be written.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    # matplotlib would append a suffix
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if os.path.splitext(path)[1][1:].lower() not in formats:
        raise ValueError(f"the ending of {str(path)!r} is not a picture format; end it in .{', .'.join(formats)}")
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError("it is a directory")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is not a directory")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise PermissionError(f"{path if path.exists() else above} is not writable")
    return path
