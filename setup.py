"""What pyproject.toml cannot say: the examples ship inside the package, and `seqpar._C` is built where it can be."""

import os
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")


def extensions() -> list[Extension]:
    """The extension if there is anything to compile and anything to compile it with, else nothing: a pure wheel."""
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp"))
    if sources and not shutil.which(COMPILER.split()[0]):
        print(f"seqpar: no C++ compiler ({COMPILER}): installing without seqpar._C, PyTorch kernels serve")
        sources = []
    return [Extension("seqpar._C", sources, language="c++", optional=True)] if sources else []


class BuildExtension(build_ext):
    """Compiles csrc; a failure costs the compiled kernels, not the installation."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            # build_ext reports this class for an optional extension and goes on; any other would end the build
            raise CompileError(f"{error}; seqpar installs without seqpar._C, PyTorch kernels serve") from error


setup(
    packages=[*find_packages(include=["seqpar", "seqpar.*"]), "seqpar.examples"],
    package_dir={"seqpar.examples": "examples"},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
)
