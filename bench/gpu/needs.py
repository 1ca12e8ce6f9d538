"""What measurements on a GPU need of a machine, in one table before anything runs; it needs nothing itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SETUPTOOLS = (70, 1)  # the first with a bdist_wheel of its own, which setup.py imports
NVCC = (12, 8)  # the first that compiles csrc for every generation


@dataclass(frozen=True)
class Need:
    """Something that measurements use. state: what this machine has. lost: what does not run if that is too little."""

    name: str
    state: str
    ok: bool
    lost: str
    stops: bool = False  # whether nothing at all runs without it

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"MISSING: {'nothing runs' if self.stops else f'goes without {self.lost}'}"
        return f"  {self.name:16}{self.state:32}{verdict}"


def needs() -> list[Need]:
    """All needs, the most important first."""
    python = f"{sys.version.split()[0]}, {sys.executable}"
    found = [Need("Python", python, sys.version_info >= (3, 10), "everything", stops=True)]
    found += [_package(name, "everything", stops=True) for name in ("torch", "numpy", "einops")]
    triton = "Triton's kernels, which is most of it"
    found.append(_package("triton", triton))
    compiler = _program(os.environ.get("CC", ""), "gcc", "clang", "cc")
    found.append(Need("C compiler", compiler or "none as $CC, gcc, clang or cc", bool(compiler), triton))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found.append(Need("Python.h", str(header), header.is_file(), f"{triton}, and the extension"))
    extension = "slice comm, in which PeerComm is"
    found.append(_package("setuptools", extension, least=SETUPTOOLS))
    cxx = _program(os.environ.get("CXX", ""), "c++")
    found.append(Need("C++ compiler", cxx or "none as $CXX or c++", bool(cxx), extension))
    found.append(_nvcc(extension))
    found.append(_package("pytest", "the tests of PeerComm"))
    return [*found, _package("matplotlib", "pictures")]


def told(found: list[Need]) -> str:
    """The table of needs."""
    missing = [need.name for need in found if not need.ok]
    last = f"missing: {', '.join(missing)}" if missing else "nothing is missing"
    return "\n".join(["needs:", *map(str, found), last])


def _package(name: str, lost: str, *, least: tuple[int, ...] = (), stops: bool = False) -> Need:
    try:
        state = version(name)
    except PackageNotFoundError:
        return Need(name, "not installed", False, lost, stops)
    ok = _numbers(state) >= least
    return Need(name, state if ok else f"{state}, older than {'.'.join(map(str, least))}", ok, lost, stops)


def _program(*names: str) -> str | None:
    """The path of the first program that there is. A name may be a command with options, as in $CC."""
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), None)


def _nvcc(lost: str) -> Need:
    """Looked for where setup.py does."""
    home = os.environ.get("CUDA_HOME")
    path = _program(os.environ.get("CUDACXX", ""), f"{home}/bin/nvcc" if home else "", "nvcc",
                    "/usr/local/cuda/bin/nvcc")  # fmt: skip
    if path is None:
        return Need("nvcc", "none as $CUDACXX or in $CUDA_HOME", False, lost)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    release = answer.partition("release ")[2].partition(",")[0]
    ok = _numbers(release) >= NVCC
    return Need("nvcc", f"{release or 'of no version'}, {path}" + ("" if ok else ", older than 12.8"), ok, lost)


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of 2.13.0+cu130."""
    numbers: list[int] = []
    for word in text.split("+")[0].split("."):
        if not word.isdigit():
            break
        numbers.append(int(word))
    return tuple(numbers)
