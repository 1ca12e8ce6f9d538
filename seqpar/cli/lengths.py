"""Document lengths of commands: from the command line, standard input, or a file in one of several formats."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from seqpar.cli.flags import DIGITS, content, integer, refuse, shown
from seqpar.cli.output import CommandError, need

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COLUMN = "length"
LEAST, MOST = 16, 1 << 20  # tokens of a document of --random
TOKENS = 1 << 31  # tokens of a batch must be below this


def add_lengths(parser: Any) -> None:
    """Declare the flags that `documents` reads."""
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--lengths",
        metavar="N,N,...|FILE|-",
        help="tokens of each packed document: integers, or a file or standard input (-) with integers separated by "
        "blanks, commas or line ends, or with a column of CSV, JSON, JSONL or (a file only) Parquet",
    )
    given.add_argument("--random", type=integer, metavar="N", help="N documents of heavy-tailed random lengths")
    parser.add_argument("--column", metavar="NAME", help=f"column or key that has the lengths (default: {COLUMN})")
    parser.add_argument("--seed", type=integer, default=0, help="seed of --random (default: 0)")


def documents(args: Any) -> NDArray[np.int64]:
    """The lengths that the flags give. Raises: CommandError."""
    import numpy as np

    if args.lengths is not None:
        return np.array(lengths_of(args.lengths, args.column))
    refuse(args, ("column",), "is for --lengths")
    if not 1 <= args.random < TOKENS // LEAST:
        raise CommandError(f"--random must be at least 1 and below {TOKENS // LEAST:,}, got {args.random}")
    if args.seed < 0:
        raise CommandError(f"--seed must be at least 0, got {args.seed}")
    # Like real corpora: most documents are short, most tokens are in few long ones.
    drawn = np.random.default_rng(args.seed).lognormal(np.log(1024), 1.3, args.random)
    return np.clip(drawn, LEAST, MOST).astype(np.int64)


def lengths_of(source: str, column: str | None = None) -> list[int]:
    """Document lengths from numbers, from a file, or from standard input if the source is ``-``.

    A file that ends in ``.parquet`` is Parquet. The format of other text is recognized by how it begins: JSON or JSONL
    by a bracket, CSV by a header, otherwise integers. column: of Parquet, CSV, and objects of JSON; "length" if None.

    Raises: CommandError naming the source, and the line or row that is not an integer.
    """
    if re.fullmatch(r"[\s,\d+-]+", source) and re.search(r"\d", source):
        return _listed("--lengths", source, column)
    where = "standard input" if source == "-" else source
    if source != "-" and not _exists(source):
        raise CommandError(f"--lengths {shown(source)} is neither integers separated by commas nor a file of them")
    if source.lower().endswith(".parquet"):
        return _checked(where, "row", enumerate(_parquet(source, column or COLUMN), 1))
    text = content(source)
    first = text.lstrip().partition("\n")[0]
    if first[:1] in ("[", "{"):
        return _checked(where, "entry", enumerate(_json(where, text, column), 1))
    if re.search(r"[^\W\d]", first) and not re.fullmatch(r"[\d.eE+\s-]+", first):
        return _checked(where, "row", enumerate(_csv(where, text, column or COLUMN), 1))
    return _listed(where, text, column)


def _exists(source: str) -> bool:
    """Whether a file of that name exists; False for a name that no file can have."""
    try:
        return os.path.lexists(source)
    except ValueError:
        return False


def _listed(where: str, text: str, column: str | None) -> list[int]:
    """Lengths of a text of integers, separated by blanks, commas or line ends."""
    if column is not None:
        raise CommandError(f"--column {shown(column)} is for CSV, JSON, JSONL and Parquet; {where} has only integers")
    words = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r",\s*,|^\s*,", line):
            raise CommandError(f"{where}, line {number}: expected a number between commas, got {shown(line)!r}")
        words += [(number, word) for word in re.split(r"[\s,]+", line) if word]
    return _checked(where, "line", words)


def _checked(where: str, unit: str, numbered: Iterable[tuple[int, object]]) -> list[int]:
    """The values as integers, each with the number of its unit."""
    lengths = []
    for number, value in numbered:
        if isinstance(value, str) and re.fullmatch(rf"\s*[+-]?\d{{1,{DIGITS}}}\s*", value):
            value = int(value)
        if type(value) is not int or abs(value) >= 10**DIGITS:
            raise CommandError(
                f"{where}, {unit} {number}: expected an integer of at most {DIGITS} digits, got {shown(str(value))}"
            )
        lengths.append(value)
    if not lengths:
        raise CommandError(f"{where} holds no lengths")
    return lengths


def _no_column(where: str, column: str, names: Iterable[str]) -> CommandError:
    known = shown(", ".join(names))
    return CommandError(f"{where} has no column {shown(column)!r}, its columns are {known}; give --column NAME")


def _csv(where: str, text: str, column: str) -> list[object]:
    """The column of a text with a header. Commas, semicolons or tabs separate the columns."""
    header = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    rows = csv.DictReader(text.lstrip().splitlines(), delimiter=delimiter, skipinitialspace=True)
    names = [name.strip() for name in rows.fieldnames or ()]
    if column not in names:
        raise _no_column(where, column, names)
    rows.fieldnames = names
    return [row[column] for row in rows]


def _json(where: str, text: str, column: str | None) -> list[object]:
    """The lengths of a JSON text, or of the JSON texts of its lines."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            entries = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise CommandError(f"{where} is neither JSON nor JSONL: {error}") from None
    if isinstance(entries, dict):  # columns, or one line of JSONL
        of_column = _entry(where, entries, column)
        return of_column if isinstance(of_column, list) else [of_column]
    return [_entry(where, entry, column) for entry in entries]


def _entry(where: str, entry: Any, column: str | None) -> Any:
    """An entry's column, or the entry itself if it has none."""
    if not isinstance(entry, dict):
        return entry
    name = column or COLUMN
    if name not in entry:
        raise _no_column(where, name, entry)
    return entry[name]


def _parquet(path: str, column: str) -> list[object]:
    """The column of a Parquet file."""
    need("pyarrow", "pyarrow", "a Parquet file")
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        if column not in names:
            raise _no_column(path, column, names)
        values: list[object] = pyarrow.parquet.read_table(path, columns=[column])[column].to_pylist()
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}") from None
    return values
