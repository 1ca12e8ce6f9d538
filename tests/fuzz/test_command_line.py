"""Random command lines and files, most with mistakes: each does what was asked, or says in one line what is wrong.

Processes are not started and nothing is measured: what would do that is replaced. ``run_again(17, folder)`` is case 17.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from seqpar.cli import calibrate, main
from seqpar.facts.drawing import checked_path
from seqpar.plan import Plan
from seqpar.planner import Hardware

CASES, ALL, BLOCK = 60, 1500, 100

COUNTS = ("1", "2", "3", "4", "8", "16")
ODD_NUMBERS = (
    "0", "-1", "+", "-", "", " ", "x", "1.5", "1e3", "nan", "inf", "-inf", "1e308", "1e-320", "0x10", "1_0",
    "٣", "²", " 7", "2147483647", "2147483648", "65537", "999999999999999999", "-999999999999999999", "9" * 19,
    "9" * 30, "9" * 5000,
    "-" + "9" * 40, "1,2", "1,", ",", "1,2,3", "[1]", "None", "True",
)  # fmt: skip
LENGTHS = ("5", "64,64", "1000,20,3", " 7 8", "9,,9", "300\n5", "4096", "1," * 40)
ODD_LENGTHS = (
    "5,0", "5,-1", "+", ",", "", " ", "-", "x,y", "1.5", "1e3", "999999999999999999", "9" * 30, "1," * 3000 + "x", "٣",
    "4611686018427387904,4611686018427387904",
)  # fmt: skip
WORDS = (
    "",
    "-",
    "--",
    "---",
    "-h",
    "--version",
    "--nonsense",
    "x",
    "\udcff",
    "\n",
    "--json",
    "plan",
    "[b]",
    "%s",
    "{0}",
)


Values = tuple[tuple[str, ...], tuple[str, ...]]  # good ones and odd ones

COUNT: Values = (COUNTS, ODD_NUMBERS)
PLANNED: dict[str, Values] = {
    "--recompute": (("none", "full"), ("", "x")), "--token-slack": (("0", "0.5", "3"), ODD_NUMBERS),
    "--max-tokens-per-rank": (("4096", "100000"), ODD_NUMBERS),
    "--model": (("tiny", "llama-8b"), ("", "nope", "\udcff")),
}  # fmt: skip
FIXED: dict[str, Values] = {
    "--transport": (("fetch", "ring", "gather"), ("", "x")), "--ulysses": (("1", "2"), ODD_NUMBERS),
    "--heads": (("8", "32"), ODD_NUMBERS), "--kv-heads": (("1", "2"), ODD_NUMBERS),
    "--dim": (("8", "64"), ODD_NUMBERS), "--dtype": (("float32",), ("int8", "")),
}  # fmt: skip
LAYOUT: Values = (("zigzag", "striped", "contiguous"), ("planned", "", "x"))
DEMO: dict[str, Values] = {
    **dict.fromkeys(("--ranks", "--steps", "--seed"), COUNT), "--layout": LAYOUT, "--tokens": (("512",), ODD_NUMBERS),
    "--comm": (("shm", "gloo"), ("", "tcp")), "--ulysses": (("1", "2"), ODD_NUMBERS),
}  # fmt: skip
CALIBRATE: dict[str, Values] = {
    "--ranks": (("2",), ODD_NUMBERS), "--device": (("cpu",), ("x",)), "--model": PLANNED["--model"]
}  # fmt: skip
SWITCHES = {"plan": ("--json", "--full"), "calibrate": ("--json", "--quick"), "doctor": ("--json",)}


class Case(NamedTuple):
    """A command line, and what its standard input holds."""

    argv: list[str]
    stdin: bytes


def files(draw: Random, folder: Path) -> list[str]:
    """Names of good files, mutated files, folders and of what is not there."""
    lengths, hardware = folder / "lengths", folder / "hardware.json"
    lengths.write_bytes(mutated(draw, b"30\n5, 12\n\n8 9\n64,1\n"))
    hardware.write_bytes(mutated(draw, json.dumps(Hardware.preset("cpu").to_dict()).encode()))
    return [
        str(lengths),
        str(hardware),
        str(folder),
        str(folder / "no" / "file"),
        "/dev/null",
        "/dev/full",
        "",
        "x" * 300,
    ]


def mutated(draw: Random, text: bytes) -> bytes:
    """A text of which some bytes are others, are left out or come again; one in three stays as it is."""
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        at, end = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
        text = draw.choice(
            (
                text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
                text[:at] + draw.choice(ODD_NUMBERS).encode() + text[at:],
                text[:at] + text[end:] if end - at < 20 else text[:at],
                text[:end] + text[at:end] + text[end:],
                b"[" * draw.choice((5, 100_000)) + text,
            )
        )
    return text


class Drawing:
    """A command line in the making. folder: where its files are. wrong: how much of it is."""

    def __init__(self, number: int, folder: Path) -> None:
        self.draw = Random(number)
        self.paths = files(self.draw, folder)
        self.folder = folder
        self.wrong = self.draw.choice((0.0, 0.1, 0.4))
        self.argv: list[str] = []

    def one(self, values: Values) -> str:
        return self.draw.choice(values[self.draw.random() < self.wrong])

    def flags(self, values: dict[str, Values], often: float) -> None:
        for flag, of_flag in values.items():
            if self.draw.random() < often:
                value = self.one(of_flag)
                self.argv += [f"{flag}={value}"] if self.draw.random() < 0.3 else [flag, value]

    def written(self, flag: str, *names: str) -> dict[str, Values]:
        odd = (*self.paths, str(self.folder / "noending"), "x.")
        return {flag: (tuple(str(self.folder / name) for name in names), odd)}

    def plan(self) -> None:
        lengths: Values = ((*LENGTHS, self.paths[0], "-"), (*ODD_LENGTHS, *self.paths))
        self.flags({"--random": COUNT} if self.draw.random() < 0.2 else {"--lengths": lengths}, 1.0 - self.wrong / 8)
        fixed = self.draw.random() < 0.4
        if fixed:
            self.flags({"--layout": LAYOUT}, 1.0 - self.wrong / 4)
        else:
            self.flags({"--hardware": (("cpu", "h100", self.paths[1]), tuple(self.paths))}, 0.5)
        self.flags(dict.fromkeys(("--ranks", "--node", "--seed", "--window"), COUNT), 0.3)
        self.flags((FIXED if fixed else PLANNED) | self.written("--plot", "a.png", "new/b.SVG"), 0.3)

    def demo(self) -> None:
        self.flags(DEMO | self.written("--out", "a.png", "new/b.SVG"), 0.4)

    def calibrate(self) -> None:
        self.flags(CALIBRATE | self.written("--out", "out.json"), 0.5)

    def run(self) -> None:
        self.flags({"-n": COUNT}, 1.0 - self.wrong / 4)
        self.argv += [self.one(((__file__,), tuple(self.paths))), *self.draw.sample(WORDS, 2)]

    def doctor(self) -> None: ...

    def mutate(self) -> None:
        while self.draw.random() < self.wrong:
            at = self.draw.randrange(len(self.argv) + 1)
            word = self.draw.choice((*WORDS, *self.paths[:2]))
            self.argv[at : at + self.draw.randrange(2)] = [word] * self.draw.randrange(3)


def drawn(number: int, folder: Path) -> Case:
    """The case of a number, the same everywhere; folder: where its files are written."""
    drawing = Drawing(number, folder)
    draw = drawing.draw
    command = draw.choices(("plan", "demo", "calibrate", "run", "doctor"), (30, 8, 5, 5, 1))[0]
    drawing.argv.append(command)
    getattr(drawing, command)()
    if command != "run":
        drawing.argv += [flag for flag in SWITCHES.get(command, ()) if draw.random() < 0.2]
    drawing.mutate()
    return Case(drawing.argv, mutated(draw, b"7,\n8\n"))


def outcome(case: Case) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2))
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(case.argv)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.stdin = before
    for stream in (out, err):
        stream.seek(0)
    return code, out.read(), err.read()


def judge(case: Case) -> str:
    """ "done", or "refused" and what is said.

    Raises: AssertionError for what is neither, and any other error as it came.
    """
    code, out, err = outcome(case)
    assert "Traceback" not in err
    if code:
        *usage, said = err.splitlines()
        assert code in (1, 2) and said.startswith("seqpar"), err
        assert not usage or usage[0].startswith("usage: seqpar"), err
        assert len(said) < 12_000 and said.count(": ") >= 1, err
        return f"refused: {said}"
    assert not err, err
    if case.argv[0] == "plan" and out.startswith("{"):
        facts = json.loads(out)
        assert sum(rank["rows"] for rank in facts["ranks"]) == facts["tokens"] == sum(facts["lengths"])
    elif case.argv[0] == "plan":
        assert "document" in out or "usage: seqpar" in out
        for line in out.splitlines():
            if line.startswith("picture: "):
                assert Path(line.removeprefix("picture: ")).is_file()
    return "done"


def run_again(number: int, folder: Path) -> str:
    """How the case of a number ends. Raises: AssertionError that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    case = drawn(number, folder)
    try:
        return judge(case)
    except Exception as error:
        raise AssertionError(f"case {number}, {case}: {type(error).__name__}: {error}") from error


def draw_nothing(plan: Plan, path: str | Path, *, call: object = None) -> None:
    """Stands for a picture, which takes a second."""
    checked_path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()


@pytest.fixture
def harmless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, where commands start nothing and measure nothing."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.setattr(Plan, "plot", draw_nothing)
    monkeypatch.setattr(calibrate, "measured", lambda *args, **options: {})
    monkeypatch.setattr(calibrate, "show", lambda data: None)
    monkeypatch.setattr("torch.distributed.run.run", lambda args: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return tmp_path


def check(first: int, last: int, folder: Path) -> None:
    """Raises: AssertionError with a line for every case that is neither right nor refused, or if all end alike."""
    failures, ends = [], set()
    for number in range(first, last):
        try:
            ends.add(run_again(number, folder / str(number)).split(":")[0])
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)
    assert ends == {"done", "refused"}


def test_a_command_line_is_done_or_refused_in_one_line(harmless: Path) -> None:
    check(0, CASES, harmless)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, ALL, BLOCK), ids=lambda n: f"cases {n} to {n + BLOCK - 1}")
def test_any_command_line_is(first: int, harmless: Path) -> None:
    check(first, first + BLOCK, harmless)
