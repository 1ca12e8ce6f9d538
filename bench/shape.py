"""The shape of the code: lines and files, functions that a call enters, and class names that are used twice.

    python -m bench.shape                        # of this tree
    python -m bench.shape --before COMMIT        # beside those of a commit
    python -m bench.shape --functions            # and the names of the functions entered

Lines of code hold something besides a comment or a docstring. Functions are those of seqpar that run on rank 0 of two
processes over gloo, each counted once: in the first call, where ranks compare and derive the steps of the plan, and in
a later one; and their files. For a transformers model, a Llama of two layers, they are those of two threads. Detectors
are the files that notice mistakes of a user or of a model.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

BENCH = Path(__file__).resolve().parent
ORDERS = ("type: ignore", "noqa", "fmt:", "pragma")  # comments for tools
LONGEST = 450  # lines of a file
# files and folders of seqpar that notice mistakes
DETECTORS = (
    "trial", "train/checks.py", "foreign/asleep.py", "foreign/saved_state.py", "foreign/rounding.py",
    "foreign/randomness.py", "foreign/code.py", "foreign/hooks.py", "foreign/weights.py", "foreign/fingerprint.py",
    "foreign/gradients.py", "integrations/probe", "integrations/sdpa/trials.py", "integrations/sdpa/calls.py",
    "integrations/hf/trial", "integrations/hf/afterwards.py", "integrations/hf/guard.py", "integrations/adapters.py",
    "dsp/trial.py", "dsp/checks.py", "dsp/agreed.py", "train/weights.py", "train/loop.py", "train/once.py",
    "train/wrappers.py", "train/norms.py", "train/check.py", "ops/core/compared.py",
    "ops/core/regions.py", "ops/core/repetition.py",
)  # fmt: skip
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines(path: Path) -> tuple[int, int, int]:
    """Lines of code, of comments, and of docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and not any(word in token.string for word in ORDERS):
                comments.add(token.start[0])
            elif token.type not in BLANK and token.type != tokenize.ENCODING:
                code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docs), len(comments), len(docs)


def packages(tree: Path) -> dict[str, tuple[int, int, int]]:
    """`lines` of the sub-packages of seqpar; modules beside them are one package."""
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for path in sorted((tree / "seqpar").rglob("*.py")):
        inside = path.relative_to(tree / "seqpar").parts
        found[inside[0] if len(inside) > 1 else "(modules)"].append(lines(path))
    return {package: tuple(map(sum, zip(*counted))) for package, counted in found.items()}  # type: ignore[misc]


def sizes(tree: Path) -> dict[str, int]:
    """Lines and files of a tree, blank lines too."""
    counted = {path: path.read_bytes().count(b"\n") for path in sorted(tree.rglob("*.py"))}

    def total(*folders: str) -> int:
        inside = [tree / folder for folder in folders]
        return sum(n for path, n in counted.items() if any(path.is_relative_to(folder) for folder in inside))

    package = {path: n for path, n in counted.items() if path.is_relative_to(tree / "seqpar")}
    return {
        "lines of seqpar": total("seqpar"),
        "files of seqpar": len(package),
        f"files of seqpar of more than {LONGEST} lines": sum(n > LONGEST for n in package.values()),
        "lines of detectors": total(*(f"seqpar/{part}" for part in DETECTORS)),
        "lines of tests": total("tests"),
        "lines of bench": total("bench"),
    }


def reused(tree: Path) -> dict[str, list[str]]:
    """Class name -> the files that define it, or an alias or a type of that name, if there are several."""
    classes: set[str] = set()
    places: dict[str, set[str]] = defaultdict(set)
    for path in sorted((tree / "seqpar").rglob("*.py")):
        where = path.relative_to(tree / "seqpar").as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                names = [node.name]
                classes.add(node.name)
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                places[name].add(where)
    return {name: sorted(files) for name, files in sorted(places.items()) if name in classes and len(files) > 1}


def entered(call: Callable[[], Any]) -> list[str]:
    """The functions of seqpar that a call runs in this thread, in the order of their first time."""
    import seqpar

    root = str(Path(seqpar.__file__).parent)
    found: dict[str, None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            found[f"{code.co_filename[len(root) + 1 :]}:{code.co_firstlineno} {code.co_name}"] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def of_rank(_: Any) -> dict[str, list[str]]:
    """The functions that a rank enters in each call, the first time and later."""
    import torch

    import seqpar
    from seqpar import dsp

    comm = seqpar.GroupComm()  # as users create it; the tests' comm compares every call
    plan = seqpar.Plan(seqpar.Mask([128, 64]), seqpar.Layout.zigzag([128, 64], comm.size))
    rows = plan.rows(comm.rank)
    q, k, v = (torch.randn(rows, heads, 32).requires_grad_() for heads in (4, 2, 2))
    results: dict[str, list[str]] = {}
    outs: list[Any] = []
    for when in ("first", "again"):
        results[f"attention, {when}"] = entered(lambda: outs.append(seqpar.attention(q, k, v, plan, comm)))
        results[f"its backward, {when}"] = entered(lambda: outs.pop().sum().backward())
    space = dsp.Space({"b": 2, "t": 4, "s": 6}, comm)
    x = dsp.split(torch.randn(2, 4, 6, 8), space, "b t s c", "t")
    for when in ("first", "again"):
        results[f"a DSP switch, {when}"] = entered(lambda: dsp.switch(x, space, "b t s c", "t", "s"))
    return results


def of_model(comm: Any, model: Any) -> dict[str, list[str]]:
    """The functions that a rank enters in `parallelize` of a model, and in its sixth training forward."""
    import torch

    import seqpar
    from seqpar.train import sync_gradients

    comm.check_every = "batch"  # as of users' comms; threads compare every call
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = {"parallelize of a Llama": entered(lambda: seqpar.parallelize(model, comm))}
    for step in range(6):
        ids, outs = torch.full((1, 8 + comm.rank), 1 + step), []
        results["its sixth forward"] = entered(lambda: outs.append(model(input_ids=ids, labels=ids)))  # noqa: B023
        outs[0].loss.backward()
        sync_gradients(model.parameters(), comm)
        optimizer.step()
        optimizer.zero_grad()
    return results


def traced() -> dict[str, list[str]]:
    """`of_rank` of rank 0 of two processes, and `of_model` of two threads together, which share caches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from seqpar.testing import run_processes, run_threads

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
    ranks = run_threads(2, of_model, model)
    both = {call: list(dict.fromkeys(name for rank in ranks for name in rank[call])) for call in ranks[0]}
    return run_processes(2, of_rank)[0] | both  # type: ignore[no-any-return]


def functions(tree: Path) -> dict[str, list[str]]:
    """The result of `traced`, by the seqpar of a tree."""
    from bench.lib import before

    code = "import json, shape; print(json.dumps(shape.traced()))"
    environment = before.environment(tree, BENCH)
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, check=True, capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def entries(names: list[str]) -> str:
    """How many functions, in how many files."""
    return f"{len(names)} in {len({name.split(':')[0] for name in names})}"


def row_of(values: list[Any]) -> list[str]:
    return ["" if value is None else f"{value:,}" for value in values]


def main() -> None:
    from bench.lib import before

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", help="a commit to show beside this tree")
    parser.add_argument("--functions", action="store_true", help="name the functions")
    options = parser.parse_args()
    trees = {"now": before.ROOT}
    if options.before:
        trees = {"before": before.tree(options.before)} | trees
    table = Table("lines", *(f"{kind}\n{when}" for when in trees for kind in ("code", "comments", "docstrings")))
    counted = {when: packages(tree) for when, tree in trees.items()}
    for package in sorted({package for found in counted.values() for package in found}):
        table.add_row(package, *row_of([n for found in counted.values() for n in found.get(package, (None,) * 3)]))
    sums = [sum(column) for found in counted.values() for column in zip(*found.values())]
    table.add_row("all", *row_of(sums), style="bold")
    rich.print(table)

    table = Table("", *trees)
    totals = {when: sizes(tree) for when, tree in trees.items()}
    for name in totals["now"]:
        table.add_row(name, *row_of([found[name] for found in totals.values()]))
    rich.print(table)

    paths = {when: functions(tree) for when, tree in trees.items()}
    table = Table("functions entered on rank 0 of 2", *trees)
    for call in paths["now"]:
        table.add_row(call, *(entries(found[call]) for found in paths.values()))
    rich.print(table)
    if options.functions:
        for call in paths["now"]:
            print(f"{call}:", *paths["now"][call], sep="\n  ")

    table = Table("class names used twice", *trees)
    names = {when: reused(tree) for when, tree in trees.items()}
    for name in sorted({name for found in names.values() for name in found}):
        table.add_row(name, *("\n".join(found.get(name, ["-"])) for found in names.values()))
    table.add_row("all", *(str(len(found)) for found in names.values()), style="bold")
    rich.print(table)


if __name__ == "__main__":
    main()
