"""What pyproject.toml cannot say: the examples ship inside the package, and `seqpar._C` is built where it can be.

csrc makes one extension. ``api/`` stands on the LibTorch Stable ABI and Python's limited API, so that one wheel serves
every Python and torch from the oldest supported on. Every other folder is a subject and knows no torch: its .cpp files
need a compiler alone, some of them are compiled for one generation of processors and chosen at run time; its .cu files
are compiled where nvcc is found. ``test/`` is no part of the extension.

    SEQPAR_CUDA=0                          leaves out the CUDA part
    SEQPAR_CUDA_ARCHS="80;90a;100a+PTX"    the generations it is compiled for
    SEQPAR_STRICT=1                        warnings, spills and local memory are errors, and an error ends the build
    CXX, CUDACXX, CUDA_HOME, MAX_JOBS      as everywhere
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
TORCH_ABI = "0x020b000000000000"  # the LibTorch Stable ABI of torch 2.11
PYTHON_ABI = "0x030a0000"  # the limited API of Python 3.10
CXX = os.environ.get("CXX", "c++").split()
CXXFLAGS = os.environ.get("CXXFLAGS", "").split()
# the tests build so, and warnings are mended; users have other compilers than we do
STRICT = ["-Werror"] if os.environ.get("SEQPAR_STRICT") == "1" else []
WARNINGS = ["-Wall", "-Wextra", *STRICT]
SUBJECTS = ("base", "attention", "recurrent", "copy", "shm", "peer")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
ISA = {
    "avx2.cpp": ["-mavx2", "-mfma"],
    "avx512.cpp": AVX512,
    "avx512_bf16.cpp": [*AVX512, "-mavx512bf16"],
    "amx.cpp": [*AVX512, "-mavx512bf16"],  # AMX's own instructions are assembly, which needs no flag of the compiler
}  # fmt: skip


def find_torch() -> Path | None:
    """The directory of the torch to build against, which is not imported.

    A build that pip isolates does not see the environment it builds for, but knows where it is.
    """
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    return next((place for place in places if (place / "include/torch/csrc/stable/library.h").is_file()), None)


def find_nvcc() -> str | None:
    """The path of nvcc, None if there is none or it is not wanted."""
    if os.environ.get("SEQPAR_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    places = (os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc")
    return next((place for place in places if place and Path(place).is_file()), None)


def obstacle() -> str | None:
    """Why the extension cannot be built here, None if it can."""
    if sys.platform != "linux":
        return f"it is for Linux, this is {sys.platform}"
    if not shutil.which(CXX[0]):
        return f"there is no C++ compiler ({CXX[0]})"
    if find_torch() is None:
        return "there is no torch to build against: install torch>=2.11 first"
    return None


def gencode(nvcc: str) -> list[str]:
    """nvcc's flags for the generations asked for that it knows; ``+PTX`` adds code that later ones can compile."""
    known = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout.split()
    flags = []
    for arch in os.environ.get("SEQPAR_CUDA_ARCHS", "80;90a;100a+PTX").split(";"):
        name = arch.removesuffix("+PTX")
        if f"sm_{name.rstrip('af')}" not in known and not STRICT:
            continue
        flags += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
        if arch != name:
            base = name.rstrip("af")
            flags += ["-gencode", f"arch=compute_{base},code=compute_{base}"]
    return flags


Job = tuple[Path, list[str]]  # a source, and the command that compiles it, without the object

OPTIMISED = ["-O3", "-std=c++17", f"-I{ROOT / 'csrc'}"]


def plain(folders: Sequence[str]) -> list[Job]:
    """C++ that needs nothing but a compiler."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    command = [*CXX, *OPTIMISED, "-fPIC", "-fvisibility=hidden", *WARNINGS, *CXXFLAGS]
    paths = sorted(path for folder in folders for path in (ROOT / "csrc" / folder).glob("*.cpp"))
    return [(path, [*command, *(ISA.get(path.name, []) if x86 else [])]) for path in paths]


def runs_here(path: Path) -> bool:
    """Whether this processor has the instructions that a source is compiled for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    found = re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = found[1].replace("_", "").split() if found else []
    return all(flag.removeprefix("-m") in has for flag in ISA.get(path.name, []))


def bindings(nvcc: str | None) -> list[Job]:
    """C++ against torch and Python."""
    needs = [
        f"-DPy_LIMITED_API={PYTHON_ABI}", f"-DTORCH_TARGET_VERSION={TORCH_ABI}", "-DTORCH_STABLE_ONLY",
        "-isystem", f"{find_torch()}/include", "-isystem", sysconfig.get_path("include"),
        *(["-DSEQPAR_WITH_CUDA"] if nvcc else []),
    ]  # fmt: skip
    return [(path, [*command, *needs]) for path, command in plain(["api"])]


def kernels(nvcc: str) -> list[Job]:
    """CUDA without torch."""
    strict = ["-Werror", "all-warnings", "-Xptxas", "-Werror"] if STRICT else []
    host = ",".join(["-fPIC", "-fvisibility=hidden", *WARNINGS])
    checked = ["-Xptxas", "-warn-spills,-warn-lmem-usage", "-lineinfo", "-Xcompiler", host, *strict]
    paths = sorted(path for folder in SUBJECTS for path in (ROOT / "csrc" / folder).glob("*.cu"))
    return [(path, [nvcc, *OPTIMISED, *checked, *gencode(nvcc)]) for path in paths]


def fresh(target: Path, source: Path, command: list[str]) -> bool:
    """Whether the object was made by this command from sources that have not changed since."""
    note = target.with_suffix(".cmd")
    if not target.is_file() or not note.is_file() or note.read_text() != " ".join(command):
        return False
    headers = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".inc", ".cuh"))
    return target.stat().st_mtime > max(path.stat().st_mtime for path in (source, *headers))


def made(jobs: Sequence[Job], folder: Path) -> list[str]:
    """The object files of all jobs, compiled side by side where they are not fresh."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        running = [pool.submit(compiled, *job, folder) for job in jobs]
        return [str(job.result()) for job in running]


def compiled(source: Path, command: list[str], folder: Path) -> Path:
    """The object file of one source."""
    target = folder / f"{source.parent.name}-{source.name}.o"
    if not fresh(target, source, command):
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
        target.with_suffix(".cmd").write_text(" ".join(command))
    return target


class BuildExtension(build_ext):
    """Compiles csrc; a failure costs the compiled kernels, not the installation."""

    def get_ext_filename(self, name: str) -> str:
        """One file for all versions of Python."""
        return os.path.join(*name.split(".")) + ".abi3.so"

    def build_extension(self, ext: Extension) -> None:
        target, nvcc = Path(self.get_ext_fullpath(ext.name)), find_nvcc()
        try:
            try:
                self._build(target, nvcc)
            except subprocess.CalledProcessError as error:
                if STRICT or not nvcc:
                    raise
                print(f"seqpar: building without CUDA, since {nvcc} does not compile it: {error}", file=sys.stderr)
                self._build(target, None)
        except Exception as error:
            # build_ext reports this class for an optional extension and goes on; any other would end the build
            raise CompileError(f"{error}; seqpar installs without seqpar._C, PyTorch kernels serve") from error

    def _build(self, target: Path, nvcc: str | None) -> None:
        folder = Path(self.build_temp)
        target.parent.mkdir(parents=True, exist_ok=True)
        jobs = [*bindings(nvcc), *plain(SUBJECTS), *(kernels(nvcc) if nvcc else [])]
        objects = made(jobs, folder)
        # no libtorch_cuda: what is linked with it does not load beside a torch without CUDA
        libraries = [f"-L{find_torch()}/lib", "-ltorch_cpu", "-lc10"]
        linker = [nvcc, "-cudart", "static"] if nvcc else CXX
        subprocess.run([*linker, "-shared", "-o", str(target), *objects, *libraries], check=True)


class Sanitize(Command):
    """Builds what knows no torch with its own tests, once for each set of sanitizers, and runs it."""

    description = "run the tests of csrc under address, undefined-behaviour and thread sanitizers"
    user_options = [("build-temp=", None, "where the binaries go")]
    SANITIZERS = ("address,undefined", "thread")

    def initialize_options(self) -> None:
        self.build_temp = "build/sanitize"

    def finalize_options(self) -> None:
        self.folder = Path(self.build_temp)

    def run(self) -> None:
        jobs = plain([*SUBJECTS, "test"])
        # what this processor cannot run is linked and no more
        idle = made([(path, [*command, "-O0"]) for path, command in jobs if not runs_here(path)], self.folder)
        for sanitizers in self.SANITIZERS:
            flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-O1", "-g1", "-pthread"]
            folder = self.folder / sanitizers
            watched = made([(path, [*command, *flags]) for path, command in jobs if runs_here(path)], folder)
            binary = folder / "test"
            subprocess.run([*CXX, *flags, *watched, *idle, "-o", str(binary)], check=True)
            subprocess.run([binary], check=True)
            print(f"{sanitizers}: clean")


class BuildWheel(bdist_wheel):
    """One wheel for Python 3.10 and newer if it holds the extension, else one for every platform."""

    def finalize_options(self) -> None:
        if self.distribution.has_ext_modules():
            self.py_limited_api = "cp310"
        super().finalize_options()


# An editable install is then a path to this folder, which the interpreter searches in full before it takes a folder
# called seqpar in the working directory, as a clone is, for a namespace. With examples setuptools would add a finder,
# which is asked after such folders.
EDITABLE = "editable_wheel" in sys.argv
why_not = obstacle()
if why_not:
    print(f"seqpar: installing without seqpar._C, PyTorch kernels serve: {why_not}", file=sys.stderr)
setup(
    packages=[*find_packages(include=["seqpar", "seqpar.*"]), *([] if EDITABLE else ["seqpar.examples"])],
    package_dir={"": "."} if EDITABLE else {"seqpar.examples": "examples"},
    ext_modules=[] if why_not else [Extension("seqpar._C", [], optional=not STRICT)],
    cmdclass={"build_ext": BuildExtension, "bdist_wheel": BuildWheel, "sanitize": Sanitize},
)
