"""Whether a change alters bits: one corpus of calls runs on another commit and on this one.

    make bits
    python -m bench.bits --before COMMIT [--only GROUP ...]

The other commit is built in a folder of its own, native extension included, which is kept with its digests for the next
call. Of a call that must be refused, the kind of error is digested. Any other case that ends in an error compares
nothing and is named as broken. Exits with 1 if a digest differs that must be equal, or a case is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import rich
import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.lib import before  # noqa: E402
from bench.lib.corpus.groups import BROKEN, FREE, GROUPS  # noqa: E402

LIB = Path(__file__).parent / "lib"  # which has the corpus
Digests = dict[str, dict[str, str]]


def digests(tree: Path, groups: Sequence[str]) -> Digests:
    """The digests of the corpus, computed in a process by the seqpar of a tree."""
    code = (
        "import sys, seqpar, pathlib; from corpus.groups import run; "
        "assert pathlib.Path(seqpar.__file__).is_relative_to(sys.argv[1]), seqpar.__file__; "
        "run(pathlib.Path(sys.argv[2]), sys.argv[3:])"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digests.json"
        command = [sys.executable, "-c", code, str(tree), str(path), *groups]
        subprocess.run(command, check=True, cwd=tree, env=before.environment(tree, LIB))
        return json.loads(path.read_text())  # type: ignore[no-any-return]


def kept(commit: str, groups: Sequence[str]) -> Digests:
    """The digests of a commit: those kept from an earlier call, and new ones of the groups that it lacks."""
    tree = before.tree(commit)
    sources = b"".join(path.read_bytes() for path in sorted((LIB / "corpus").glob("*.py")))
    machine = f"{platform.processor()} {platform.release()} {torch.__version__}".encode()
    key = hashlib.sha1(sources + machine).hexdigest()[:12]
    path = before.cache() / f"{tree.name}-{key}.json"
    known: Digests = json.loads(path.read_text()) if path.exists() else {}
    missing = [group for group in groups if group not in known]
    if missing:
        print(f"before, {commit}:", file=sys.stderr, flush=True)
        known |= digests(tree, missing)
        path.write_text(json.dumps(known))
    return known


def compare(old: Digests, new: Digests) -> tuple[Table, list[str], list[str]]:
    """A table by group, the cases that differ, and those that end in an error now."""
    table = Table("group", "cases", "equal", "different", "broken", title="digests before and now")
    different, broken = [], []
    for group in new:
        names = sorted(old[group].keys() | new[group].keys())
        unequal = [name for name in names if old[group].get(name) != new[group].get(name)]
        lost = [name for name, value in new[group].items() if value.startswith(BROKEN)]
        table.add_row(group, *map(str, (len(names), len(names) - len(unequal), len(unequal), len(lost))))
        broken += [f"{group}: {name}: {new[group][name]}" for name in lost]
        different += [f"{group}: {name}: {old[group].get(name)} -> {new[group].get(name)}" for name in unequal]
    return table, different, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", default="46b7fc0", help="the commit to compare with (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="these groups alone")
    options = parser.parse_args()
    before.build(before.ROOT)
    old = kept(options.before, options.only)
    print("now:", file=sys.stderr, flush=True)
    table, different, broken = compare(old, digests(before.ROOT, options.only))
    rich.print(table)
    for line in different + broken:
        print(line)
    return int(bool(broken) or any(line.split(":")[0] not in FREE for line in different))


if __name__ == "__main__":
    sys.exit(main())
