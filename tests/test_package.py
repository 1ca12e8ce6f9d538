"""The package as a whole: who imports whom, what a cold import loads, what a wheel holds, what the pins cover."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import seqpar
from bench.shape import reused
from seqpar import native
from seqpar.kernels import native as cpu_kernel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "seqpar"

FACTS = {"facts"}
BELOW = FACTS | {"native", "private"}
# unit -> (units of seqpar it may import besides itself, third parties it may import): lower never imports higher
FLOOR_2 = BELOW | {"plan", "planner", "comm", "kernels", "ops"}
FLOOR_3 = FLOOR_2 | {"parallel", "recurrent", "nn", "foreign", "trial", "dsp", "data", "train", "integrations"}
ANY = None  # layer 4 may use any third party
TENSORS = {"numpy", "torch"}
LAYERS: dict[str, tuple[set[str], set[str] | None]] = {
    "facts": (set(), {"numpy"}),
    "private": (set(), TENSORS),
    "plan": (FACTS, {"numpy"}),
    "planner": (FACTS | {"plan"}, {"numpy"}),
    "native": ({"_C"}, TENSORS),
    "comm": (BELOW, TENSORS),
    "kernels": (BELOW, TENSORS | {"triton", "flash_attn"}),
    "ops": (FLOOR_2, TENSORS),
    "foreign": ({"comm", "private"}, TENSORS),
    "trial": (FLOOR_2 | {"foreign"}, TENSORS),
    "parallel": (FLOOR_2, TENSORS),
    "recurrent": (FLOOR_2, TENSORS),
    **{unit: (FLOOR_2 | {"parallel"}, TENSORS) for unit in ("nn", "data")},
    "train": (FLOOR_2 | {"parallel", "foreign", "trial", "nn"}, TENSORS),
    "dsp": (FLOOR_2 | {"parallel", "foreign", "trial", "train"}, TENSORS | {"einops"}),
    "integrations": (FLOOR_3, TENSORS | {"transformers", "diffusers"}),
    "launch": (FLOOR_3, ANY),
    "testing": (FLOOR_3 | {"launch"}, ANY),
    "cli": (FLOOR_3 | {"launch", "testing", ""}, ANY),
    "__main__": (FLOOR_3 | {"cli"}, ANY),
    "__init__": (FLOOR_3, TENSORS),
}
# Files with third parties of their own, which they import where they are called.
OPTIONAL = {
    path: {"matplotlib"}
    for path in ("facts/drawing.py", "facts/picture.py", "plan/plot.py", "plan/travel_plot.py", "dsp/plan.py")
}
# sub-package -> its files in an order in which each imports only files before it; "a" is a.py or a/__init__.py
ORDER = {
    "facts": """
        drawing value intervals bands bounds documents trees picture unions slices mask layout past segments
        stretches tiles __init__
    """,
    "private": "__init__ accelerate diffusers flash_attn peft torch transformers",
    "plan": """
        steps residence parts traffic recurrence routes fetched hierarchy runs derive counts report plot
        travel_counts travel travel_report travel_plot plan __init__
    """,
    "dsp": """
        form space costs search plan spec specs moves grid checks trial runner agreed apply __init__
    """,
    "planner": """
        config presets blocks shape hardware training memory groups place nested count carried weights cost lines
        bound forecast problem batch step ladder fitting calibration __init__
    """,
    "comm": """
        entry protocol arguments header failure rendezvous base interrupt local_waits local nccl host_pool
        group_channel over_gloo over_nccl group
        shm/board shm/comm shm
        peer/signals peer/cuda peer/memory peer/pool peer/pieces peer/channel peer/comm peer
        __init__
    """,
    "ops": """
        core core/precompute core/compared core/agreement core/regions
        core/device core/handles core/collective_op core/alike
        move move/pack
        attention attention/signature attention/source attention/rows attention/call
        attention/keys attention/grads
        attention/heads attention/schedule attention/op attention/api
        attention/latent attention/merging attention/rotary
        move/switch move/relayout move/fetch
        recurrent recurrent/recompute recurrent/rows recurrent/relaid recurrent/conv
        recurrent/maps recurrent/gather recurrent/chain recurrent/scan
        recurrent/local recurrent/pipeline recurrent/checks recurrent/call recurrent/whole recurrent/blocks
        recurrent/computed recurrent/linear recurrent/channels __init__
    """,
    "nn": "attention __init__",
    "testing": "oracle comparison __init__",
    "foreign": "__init__ wrap hooks",
    "trial": """
        randomness weights protect nested segments finding rows readings identity record compare gradients blocks runs
        modules alone __init__
    """,
    "integrations": """
        adapters hf hf/config hf/latents
        sdpa/fused sdpa/mask sdpa/trials sdpa/reroute sdpa/model sdpa
        hf/mask hf/forward hf/attention hf/indexed hf/planning hf/plans
        hf/recurrent hf/recurrent/states hf/recurrent/linear hf/recurrent/mamba
        hf/recurrent/rglru hf/recurrent/mixers
        hf/experts hf/heads hf/positions hf/rewritten_attention
        hf/towers
        hf/trial hf/trial/twin hf/trial/runs hf/trial/fit
        hf/own_configs hf/guard hf/reading hf/cache hf/handle hf/generation hf/model hf/vision
        rows diffusers/attend diffusers/forward diffusers/blocks diffusers/model diffusers
        parallelize transformers __init__
    """,
    "kernels": """
        protocol dispatch dropout
        memory memory/upload
        triton/config triton/tile triton/shares triton/tables triton/arguments triton/launch triton/variants
        triton/forward triton/backward triton/parts triton
        triton/delta triton/merge triton/rows triton/rotary
        memory/copy memory/rotary
        softmax reference blockwise expanding native
        vendor/varlen vendor/library vendor/segmented
        vendor/aten vendor/flash vendor
        first_use preference
        recurrent/protocol recurrent/reference recurrent/chunked recurrent/steps recurrent/native
        recurrent/fla
        recurrent __init__
    """,
}
HEAVY = {
    "triton", "transformers", "diffusers", "accelerate", "flash_attn", "matplotlib", "rich", "scipy", "pandas",
    "hypothesis", "pytest", "einops", "torch._dynamo", "torch._inductor",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Absolute dotted names of everything a file imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def unit_of(path: Path) -> str:
    """The module or subpackage of seqpar, directly below it, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def edges(path: Path) -> tuple[set[str], set[str]]:
    """(units of seqpar, third parties) that a file imports; the unit "" is the package's own namespace."""
    units: set[str] = set()
    others: set[str] = set()
    for name in imports(path):
        top, *rest = name.split(".")
        if top != "seqpar":
            others.add(top)
            continue
        unit = rest[0] if rest else ""
        is_module = (PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").is_file() or unit == "_C"
        units.add(unit if unit and is_module else "")
    return units, others - set(sys.stdlib_module_names)


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "examples" not in path.relative_to(PACKAGE).parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_file_imports_only_lower_floors(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LAYERS, f"{path} is in no layer: add it to LAYERS"
    allowed, third_parties = LAYERS[unit]
    units, others = edges(path)
    assert units <= allowed | {unit}, f"{path} imports {sorted(units - allowed - {unit})} of seqpar"
    if third_parties is not None:
        third_parties = third_parties | OPTIONAL.get(path.relative_to(PACKAGE).as_posix(), set())
        assert others <= third_parties, f"{path} imports {sorted(others - third_parties)}"


def siblings(folder: Path) -> dict[str, set[str]]:
    """The files of a sub-package by name, each with those of them that it imports itself."""
    files = {
        path.relative_to(folder).as_posix().removesuffix(".py").removesuffix("/__init__"): path
        for path in folder.rglob("*.py")
    }

    def imported(name: str) -> str | None:
        top, unit, *rest = [*name.split("."), ""]
        if (top, unit) != ("seqpar", folder.name):
            return None
        # of a.b.c that is a function c of a.b, or another name of the package itself
        prefixes = ("/".join(rest[:end]) for end in range(len(rest), 0, -1))
        return next((prefix for prefix in prefixes if prefix in files), "__init__")

    return {name: {imported(other) for other in imports(path)} - {None, name} for name, path in files.items()}


@pytest.mark.parametrize("unit", ORDER)
def test_a_file_imports_only_files_before_it(unit: str) -> None:
    order, files = ORDER[unit].split(), siblings(PACKAGE / unit)
    possible = " ".join(TopologicalSorter(files).static_order())  # raises with the circle if there is one
    assert sorted(order) == sorted(files), f"ORDER of {unit} lists other files than there are; one order: {possible}"
    late = {name: sorted(files[name] - set(order[:place])) for place, name in enumerate(order)}
    late = {name: others for name, others in late.items() if others}
    assert not late, f"imports of files of {unit} that stand later in ORDER: {late}; one order: {possible}"


def test_no_class_name_stands_for_two_things() -> None:
    assert not reused(ROOT), "choose other names"


CONSTRUCTORS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def without_device(source: str) -> list[str]:
    """Calls of PyTorch's constructors that leave the device to `torch.set_default_device`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {id(call): ast.unparse(call.func).removeprefix("torch.") for call in calls}
    return [
        ast.unparse(call)
        for call in calls
        if names[id(call)] in CONSTRUCTORS
        and ast.unparse(call.func).startswith("torch.")
        and not {"device", "out", None} & {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize("path", sorted(ROOT.joinpath("seqpar").rglob("*.py")), ids=lambda path: path.stem)
def test_constructors_name_their_device(path: Path) -> None:
    assert without_device(path.read_text(encoding="utf-8")) == []


def test_what_two_languages_say_is_equal() -> None:
    """Numbers that Python and C++ both have, each in one place of its own language."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.h"))
    numbers = {name: [int(n) for n in re.findall(rf"\b{name} = (\d+)", text)] for name in ("SP_DIMS", "SP_MAX_DIM")}
    assert numbers == {"SP_DIMS": [native.DIMS], "SP_MAX_DIM": [cpu_kernel.MAX_DIM]}
    isas = re.findall(r"SP_(\w+) = (\d+)", text[text.index("enum { SP_PORTABLE") :].partition("}")[0])
    assert [(name.lower(), int(number)) for name, number in isas] == [(isa, n) for n, isa in enumerate(cpu_kernel.ISAS)]


def fresh(code: str) -> str:
    """What code prints in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env, cwd=ROOT.anchor, timeout=600
    ).stdout


class Imported(NamedTuple):
    """What a process finds after the first import of seqpar, the first use of its planner, and that of its command."""

    beyond_torch: list[str]  # modules that `import torch, numpy` does not load
    planner: list[str]
    modules: list[str]
    tools: list[str]  # of the command, loaded by any of these


@pytest.fixture(scope="module")
def imported() -> Imported:
    """One process for all, as to start one takes seconds."""
    code = """
import sys, numpy, torch
before = set(sys.modules)
import seqpar
print(*sorted(set(sys.modules) - before))
print(seqpar.planner.Link.__name__, seqpar.plan_batch([8], 2).layout.ranks)
modules = seqpar.data, seqpar.dsp, seqpar.recurrent, seqpar.train
print(*(module.__name__ for module in modules))
import seqpar.cli
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} & {"rich", "matplotlib"}))
"""
    return Imported(*(line.split() for line in fresh(code).split("\n")[:4]))


def test_a_cold_import_loads_nothing_heavy(imported: Imported) -> None:
    names = imported.beyond_torch
    heavy = [name for name in names for module in HEAVY if name == module or name.startswith(module + ".")]
    assert "seqpar" in names
    assert heavy == []


def test_a_cold_import_loads_few_modules_beyond_torch(imported: Imported) -> None:
    # What bench/cpu/import_time.py measures in seconds, in modules: torch itself loads over a thousand.
    others = [name for name in imported.beyond_torch if name.split(".")[0] != "seqpar"]
    assert len(others) <= 60, others


def test_the_planner_is_loaded_when_it_is_asked_for(imported: Imported) -> None:
    assert not [name for name in imported.beyond_torch if name.startswith("seqpar.planner")]
    assert imported.planner == ["Link", "2"]


def test_modules_of_the_package_need_no_import_of_their_own(imported: Imported) -> None:
    assert imported.modules == [f"seqpar.{name}" for name in ("data", "dsp", "recurrent", "train")]


def test_a_command_imports_its_tools_only_when_called(imported: Imported) -> None:
    assert imported.tools == []


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


PACKAGES = ["seqpar", *sorted(f"seqpar.{p.parent.name}" for p in PACKAGE.glob("*/__init__.py"))]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_resolve(name: str) -> None:
    module = importlib.import_module(name)
    names = list(getattr(module, "__all__", []))
    assert module.__doc__, f"{name} has no docstring"
    assert len(names) == len(set(names))
    assert [n for n in names if not hasattr(module, n)] == []


def test_the_version_has_its_place_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert versions[0] == seqpar.__version__
    assert "## [Unreleased]" in changelog


def requirement(text: str) -> str:
    """The normalised name of a requirement."""
    return re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")  # type: ignore[index]


def test_the_metadata_asks_for_no_second_torch_and_pins_what_ci_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {requirement(r) for r in project["build-system"]["requires"]} == {"setuptools", "wheel"}
    assert "torch>=2.11" in project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    direct = {
        requirement(r)
        for extra in ("cli", "docs", "plot", "ecosystem", "loops", "transformers", "diffusers", "test", "dev")
        for r in extras[extra]
    } - {"seqpar"}
    direct |= {requirement(r) for r in project["project"]["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {requirement(line) for line in lines if "==" in line and not line.startswith("#")}
    assert direct | {"torchvision"} <= pinned
    # beside a torch of another build torchvision breaks what imports it, so that CI must not have it by an extra
    assert not any(requirement(r) == "timm" for extra in ("loops", "test", "dev") for r in extras[extra])


def test_ci_runs_the_command_that_readers_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec make test"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from, with nothing to compile."""
    target = tmp_path / "tree"
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for name in ("seqpar", "examples"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return target


def wheel(tree: Path, **env: str) -> tuple[str, set[str], str]:
    """(file name, members, build output) of the wheel that a tree builds."""
    pytest.importorskip("setuptools", "77")
    done = subprocess.run(
        [sys.executable, "-c", "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"],
        cwd=tree, env=os.environ | env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return path.name, set(archive.namelist()), done.stdout + done.stderr


def test_a_wheel_holds_every_module_the_examples_and_the_marker_of_types(tree: Path) -> None:
    name, members, _ = wheel(tree, CXX="no-such-compiler")
    assert name == f"seqpar-{seqpar.__version__}-py3-none-any.whl"
    sources = {p.relative_to(tree).as_posix() for p in (tree / "seqpar").rglob("*.py")}
    examples = {f"seqpar/examples/{p.name}" for p in (tree / "examples").glob("*.py")}
    assert examples
    assert sources | examples | {"seqpar/py.typed"} <= members
    assert {m.split("/")[0] for m in members} == {"seqpar", f"seqpar-{seqpar.__version__}.dist-info"}


SOURCE = '#include <Python.h>\nstatic PyModuleDef m = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};\n'
WORKING = SOURCE + "PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&m); }\n"


@pytest.mark.parametrize(
    ("source", "env", "compiled", "message"),
    [
        ("#error does not compile\n", {}, False, "installs without seqpar._C"),
        (WORKING, {"CXX": "no-such-compiler"}, False, "no C++ compiler (no-such-compiler)"),
        (WORKING, {}, True, ""),
    ],
    ids=["broken", "no-compiler", "working"],
)
@pytest.mark.sampled(3)
def test_the_extension_is_built_where_it_can_be(
    tree: Path, source: str, env: dict[str, str], compiled: bool, message: str
) -> None:
    if not env and not shutil.which(os.environ.get("CXX", "c++").split()[0]):
        pytest.skip("no C++ compiler")
    if not env and not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no headers of Python")
    (tree / "csrc" / "api").mkdir(parents=True)
    (tree / "csrc" / "api" / "module.cpp").write_text(source, encoding="utf-8")
    _, members, output = wheel(tree, **env)
    assert any(m.startswith("seqpar/_C.") for m in members) == compiled
    assert message in output
    assert "seqpar/__init__.py" in members
