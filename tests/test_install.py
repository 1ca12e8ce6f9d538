"""What people install: the sdist and the wheel made of it, each in an environment that knows nothing of this tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import seqpar
from seqpar import native

ROOT = Path(__file__).parent.parent
TIMEOUT = 1800  # a whole build on two cores that do other things as well
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def built(kind: str, tree: Path, where: Path, **env: str) -> Path:
    """The sdist or the wheel that a tree builds in this environment."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(where)], cwd=tree, env=OUTSIDE | env, capture_output=True, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return where / done.stdout.splitlines()[-1]


def installed(wheel: Path, where: Path) -> Path:
    """The Python of a fresh environment that has the wheel, and torch and numpy of this one."""
    venv.create(where, with_pip=False)
    python = where / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True, env=OUTSIDE, timeout=TIMEOUT,
    )  # fmt: skip
    # a path in a .pth file does not bring the .pth files that lie there: an editable seqpar stays behind
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    Path(site.strip(), "torch.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python


def smoke(python: Path, where: Path) -> dict[str, Any]:
    """What tests/smoke.py finds there; and doctor agrees that attention runs."""
    script = where / "smoke.py"
    script.write_text((ROOT / "tests" / "smoke.py").read_text(encoding="utf-8"), encoding="utf-8")
    here = partial(subprocess.run, check=True, stdout=subprocess.PIPE, cwd=where, env=OUTSIDE, timeout=TIMEOUT)
    found = json.loads(here([python, script]).stdout)
    here([python.parent / "seqpar", "doctor", "--json"])
    assert Path(found["seqpar"]).is_relative_to(python.parent.parent)
    assert found["error"] < 2e-6
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist: what a build from PyPI starts from."""
    where = tmp_path_factory.mktemp("sdist")
    archive = built("sdist", ROOT, where)
    with tarfile.open(archive) as tar:
        tar.extractall(where, filter="data")
    return where / archive.name.removesuffix(".tar.gz")


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the extension is for Linux")
@pytest.mark.timeout(TIMEOUT)
def test_a_wheel_made_of_the_sdist_brings_the_compiled_kernels(source: Path, tmp_path: Path) -> None:
    # no warning, no spill: set-up goes on after one, so that it is here that it fails; of optimised C++ the sanitizers'
    # test is as strict
    wheel = built("wheel", source, tmp_path, SEQPAR_STRICT="1", CXXFLAGS="-O0")
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-cp310-abi3-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == ["seqpar/_C.abi3.so"]
    found = smoke(installed(wheel, tmp_path / "env"), tmp_path)
    assert found["missing"] is None
    assert found["kernel"] == "native"
    assert (found["without cuda"] is None) == (native.without_cuda() is None), "nvcc is found there and here alike"


def test_without_a_compiler_the_sdist_installs_and_works_in_python(source: Path, tmp_path: Path) -> None:
    wheel = built("wheel", source, tmp_path, CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    found = smoke(installed(wheel, tmp_path / "env"), tmp_path)
    assert "seqpar._C was not built" in found["missing"]
    assert found["kernel"] == "aten"


@pytest.mark.exhaustive
def test_a_clone_in_the_working_directory_does_not_hide_an_editable_install(source: Path, tmp_path: Path) -> None:
    clone = tmp_path / "work" / "seqpar"  # a folder of the package's name, which Python takes for a namespace
    shutil.copytree(source, clone)
    wheel = built("editable", clone, tmp_path, CXX="no-such-compiler")
    python = installed(wheel, tmp_path / "env")
    script = tmp_path / "work" / "train.py"
    script.write_text("import seqpar; print(seqpar.__file__, callable(seqpar.parallelize))", encoding="utf-8")
    printed = subprocess.check_output([python, script], cwd=script.parent, env=OUTSIDE, text=True, timeout=TIMEOUT)
    assert printed.split() == [str(clone / "seqpar" / "__init__.py"), "True"]
    example = "from seqpar.cli.programs import find_example; print(find_example('demo.py'))"
    printed = subprocess.check_output([python, "-c", example], cwd=tmp_path, env=OUTSIDE, text=True, timeout=TIMEOUT)
    assert printed.strip() == str(clone / "examples" / "demo.py")


def test_here_the_extension_is_built(source: Path) -> None:
    """Else what tests the compiled kernels would test nothing."""
    assert native.missing() is None
    assert (source / "csrc" / "api" / "module.cpp").is_file()


EXTENSION = Path(seqpar.__file__).parent / "_C.abi3.so"


@pytest.mark.skipif(not shutil.which("nm"), reason="binutils list the symbols")
def test_the_extension_asks_torch_and_python_for_what_is_stable_alone() -> None:
    lines = subprocess.check_output(["nm", "-D", "--undefined-only", EXTENSION], text=True).splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines}
    assert {"aoti_torch_abi_version", "torch_parallel_for", "PyModule_Create2"} <= names
    unstable = [name for name in names if name.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch", "_Py"))]
    assert unstable == []


# What csrc/api uses of torch's headers; it compiles against those of 2.11. A later torch declares more, which nothing
# hides from a build for 2.11.
OF_TORCH_2_11 = {
    "STABLE_TORCH_LIBRARY_FRAGMENT", "STABLE_TORCH_LIBRARY_IMPL", "STD_TORCH_CHECK", "TORCH_BOX", "torch_parallel_for(",
    "torch::headeronly::DeviceType::CPU", "torch::headeronly::ScalarType", "torch::stable::Device",
    "torch::stable::Tensor", "torch::stable::accelerator::DeviceGuard", "torch::stable::from_blob",
}  # fmt: skip


def test_the_extension_is_written_for_the_oldest_torch() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc" / "api").iterdir())
    used = re.findall(r"\btorch::[\w:]+|\b(?:STABLE|STD|TORCH|AOTI)_[A-Z_]+\b|\btorch_[a-z_0-9]+\(", text)
    assert set(used) == OF_TORCH_2_11


@pytest.mark.skipif(native.without_cuda() is not None, reason="the extension was built without CUDA")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton brings cuobjdump")
def test_the_extension_has_code_for_every_generation_of_gpus_and_later_ones() -> None:
    import triton

    (tool,) = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump*")
    listed = subprocess.check_output([tool, "-lelf", "-lptx", EXTENSION], text=True)
    for source in (ROOT / "csrc" / "cuda").glob("*.cu"):
        for name in ("sm_80.cubin", "sm_90a.cubin", "sm_100a.cubin", "sm_100.ptx"):
            assert f"{source.stem}.{name}" in listed
