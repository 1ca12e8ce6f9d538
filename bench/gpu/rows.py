"""Rows of `bench/gpu/run.py`: cases that are measured together, and a file of rows that are not measured again.

The rows of a case say by which try they were taken. Only those of its last one count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Variants that are measured together, in turns. run(machine) returns their rows.

    later: runs after the first cases of other slices.
    """

    slice: str
    name: str
    run: Callable[[Any], Iterable[Row]]
    later: bool = False


class Results:
    """Rows in a file, one JSON object a line, appended case by case: a run that is killed loses the case at hand.

    origin: device, versions, commit and sources, which every row carries. Rows of another origin stay unread.
    """

    def __init__(self, path: Path, origin: Row) -> None:
        self.path, self.origin = path, origin
        self.rows = [row for row in read(path) if all(row.get(name) == value for name, value in origin.items())]

    def done(self, case: Case) -> bool:
        """Whether a case need not run again: it was measured, or lost the device. Wrong and failed ones run twice.

        A try that the end of the time cut off does not count.
        """
        last = self._of(case, self._tries(case))
        if any("lost" in row for row in last):
            return True
        whole = [n for n in range(1, self._tries(case) + 1) if not _was_cut(self._of(case, n))]
        return bool(last) and not _was_cut(last) and (len(whole) > 1 or not any(map(failed, last)))

    def cuts(self, case: Case) -> int:
        """How often the end of the time cut a case off."""
        return sum(_was_cut(self._of(case, n)) for n in range(1, self._tries(case) + 1))

    def _of(self, case: Case, number: int) -> list[Row]:
        return [row for row in self.rows if (row["slice"], row["case"], row["try"]) == (case.slice, case.name, number)]

    def _tries(self, case: Case) -> int:
        return max(
            (row["try"] for row in self.rows if (row["slice"], row["case"]) == (case.slice, case.name)), default=0
        )

    def add(self, case: Case, rows: Iterable[Row]) -> list[Row]:
        """Append the rows of a case."""
        name = {"slice": case.slice, "case": case.name, "try": self._tries(case) + 1}
        full = [{**name, **row, **self.origin} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            if file.tell() and self.path.read_bytes()[-1:] != b"\n":
                file.write(b"\n")  # the last line was cut off
            file.write("".join(json.dumps(row) + "\n" for row in full).encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows += full
        return full


def read(path: Path) -> list[Row]:
    """All rows of a file; lines that were cut off are left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def wrong(row: Row) -> bool:
    """Whether the row is of a check that failed."""
    return row.get("ok") is False


def doubt(rows: list[Row], kernel: str, dtype: str, dim: int, v_dim: int) -> str | None:
    """The failure that a check found in a kernel for a dtype and a head dim, or None."""
    last = {(row["case"], row["what"]): row for row in rows if row["slice"] == "correct" and row["kernel"] == kernel}
    for row in last.values():
        if "refused" in row and row.get("covers") in (None, [dtype, dim, v_dim]):
            return f"{row['what']}: {row['refused']}"
    return None


def failed(row: Row) -> bool:
    """Whether the row has no figure, for a reason that may pass."""
    return "error" in row or wrong(row)


def _was_cut(rows: list[Row]) -> bool:
    return any("cut" in row for row in rows)
