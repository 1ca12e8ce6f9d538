"""What pictures share: colours, matplotlib's style, and the check of a path. Imports matplotlib only when called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

INK, MUTED, EDGE = "#1f2430", "#6b7280", "#d1d5db"
LONG = ("#2563a8", "#e07b28", "#3a8f4f", "#b5443f", "#7d5ba6", "#8c6248", "#cf6fa5", "#1f9aa8", "#a3962b")
STYLE: Any = {
    "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "legend.frameon": False,
}  # fmt: skip


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
