"""`seqpar doctor`: installed versions, what works here, and why the rest does not."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from seqpar import __version__
from seqpar.cli.output import print_table

PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "transformers",
    "diffusers",
    "matplotlib",
    "rich",
)


EXAMPLES = """examples:
  seqpar doctor
  seqpar doctor --json          # to attach to a bug report
"""


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "doctor",
        help="what works here, and why the rest does not",
        description="Show versions, devices, kernels and transports, each with the reason if it cannot be used.\n"
        "The exit code is 0 if attention runs on this CPU.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=doctor)


def doctor(args: Any) -> int:
    """Print the whole report; returns 0 if attention runs on this machine's CPU, else 1."""
    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(
            "versions", ("package", "version"), [(k, v or "not installed") for k, v in found["versions"].items()]
        )
        print_table("system", ("what", "value"), list(found["system"].items()))
        for part in ("devices", "extension", "kernels", "transports", "checks"):
            rows = [(name, "no" if why else "yes", why or "") for name, why in found[part].items()]
            print_table(part, ("name", "usable", "why not"), rows)
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """The whole report as plain data; in place of a reason, None means usable."""
    attention = attention_runs()
    return {
        "versions": {"seqpar": __version__, "python": platform.python_version()} | {p: installed(p) for p in PACKAGES},
        "system": {
            "os": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
        },
        "devices": devices(),
        "extension": extension(),
        "kernels": kernels(),
        "transports": transports(),
        "checks": {"attention on this CPU": attention, "import seqpar in this directory": hidden(Path.cwd())},
        "ok": attention is None,
    }


def installed(package: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> dict[str, str | None]:
    """Device -> None if seqpar runs on it, else why not."""
    import torch

    found: dict[str, str | None] = {"cpu": None}
    hip = getattr(torch.version, "hip", None)
    if hip is not None:
        # A ROCm build also answers to torch.cuda, but reports no CUDA devices.
        found["rocm"] = f"ROCm is not supported: this torch is built for HIP {hip}; the CPU kernels work"
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found[f"cuda:{index} {torch.cuda.get_device_name(index)}, capability {major}.{minor}"] = None
    else:
        built = torch.version.cuda
        found["cuda"] = (
            f"torch is built for CUDA {built}, but sees no device" if built else "torch is built without CUDA"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "MPS is not supported; the CPU kernels work, and so does planning"
    return found


def extension() -> dict[str, str | None]:
    """Part of the compiled extension -> None if it is usable, else why not."""
    import torch

    from seqpar import native
    from seqpar.kernels.native import ISAS

    why, why_cuda = native.missing(), native.without_cuda()
    if why_cuda is None and torch.version.cuda is None:
        why_cuda = "compiled for CUDA; this torch has no CUDA"
    vectors = "" if why else f", vectors: {ISAS[native.ops().isa()]}"
    return {f"seqpar._C{vectors}": why, "seqpar._C for CUDA": why_cuda}


def kernels() -> dict[str, str | None]:
    """Kernel -> None if it is usable, else why not."""
    from seqpar.kernels import available

    return dict(available())


def transports() -> dict[str, str | None]:
    """Comm -> None if it is usable, else why not."""
    import torch
    import torch.distributed as dist

    from seqpar.comm import shm
    from seqpar.comm.peer.cuda import unusable

    found: dict[str, str | None] = {"LocalComm (threads)": None}
    shared = "ShmComm (processes of this machine)"
    gloo, nccl = "GroupComm over gloo", "GroupComm over nccl"
    peer = "PeerComm (GPUs of this machine)"
    if not dist.is_available():
        return found | dict.fromkeys((shared, gloo, nccl, peer), "torch is built without torch.distributed")
    found[shared] = shm.missing()
    found[gloo] = None if dist.is_gloo_available() else "torch is built without gloo"
    if not dist.is_nccl_available():
        found[nccl] = "torch is built without NCCL"
    elif getattr(torch.version, "hip", None) is not None:
        found[nccl] = "ROCm is not supported"
    else:
        found[nccl] = None if torch.cuda.is_available() else "no CUDA device"
    return found | {peer: unusable()}


def hidden(directory: Path) -> str | None:
    """Why a script in this directory would import another seqpar; None if it would import this one."""
    spec = PathFinder.find_spec("seqpar", [str(directory), *sys.path[1:]])
    package = Path(__file__).parent.parent
    if spec is None or spec.origin is None and not (directory / "seqpar").is_dir():
        return None
    if spec.origin is None:
        return (
            f"Python takes the folder {directory / 'seqpar'} for a namespace package and looks no further; start "
            f"elsewhere, or reinstall: pip install --no-build-isolation -e {package.parent}"
        )
    if not package.samefile(Path(spec.origin).parent):
        return f"it would import {spec.origin}, and this is {package}; start elsewhere"
    return None


def attention_runs() -> str | None:
    """None if attention on one rank gives the mean of the values that equal scores must give, else the error."""
    try:
        import torch

        import seqpar

        q, k = (torch.zeros(4, heads, 8, device="cpu") for heads in (2, 1))
        v = torch.arange(4.0, device="cpu").view(4, 1, 1).expand(4, 1, 8).contiguous()
        plan = seqpar.Plan(seqpar.Mask([3, 1]), seqpar.Layout.contiguous(4, 1))
        out = seqpar.attention(q, k, v, plan, seqpar.LocalComm())
        torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 0.5, 1.0, 3.0], device="cpu"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
