"""Other libraries' private names: the installed releases have them, and no other file of seqpar says one.

`make oldest` and `make newest` run this with the releases of their own.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import seqpar
from seqpar.private import PrivateNames
from seqpar.private import accelerate as accelerate_private
from seqpar.private import diffusers as diffusers_private
from seqpar.private import flash_attn as flash_private
from seqpar.private import torch as torch_private
from seqpar.private import transformers as transformers_private

PACKAGE = Path(seqpar.__file__).parent
LIBRARIES = sorted(path.stem for path in (PACKAGE / "private").glob("[!_]*.py"))


def names_of(library: str) -> PrivateNames:
    """The private names of a library that is installed."""
    names: PrivateNames = import_module(f"seqpar.private.{library}").names
    try:
        metadata.version(names.library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{names.library} is not installed")
    return names


c10d: Any = import_module("torch._C._distributed_c10d")


def hooked(library: str) -> nn.Module:
    """A module with a hook of accelerate or diffusers."""
    hooks, module = import_module(f"{library}.hooks"), nn.Linear(2, 2)
    if library == "accelerate":
        return hooks.add_hook_to_module(module, hooks.AlignDevicesHook())
    hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(hooks.ModelHook(), "x")
    return module


def lazily(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(import_module(module), name)


def written_by(function: Any) -> SimpleNamespace:
    """An object with all attributes that a function sets or reads."""
    return SimpleNamespace(**dict.fromkeys(function.__code__.co_names))


CONFIG, MODEL = lazily("transformers", "LlamaConfig"), lazily("transformers", "PreTrainedModel")
FSDP_STATE = lazily("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
FSDP_PARAM = lazily("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam")
FLATTENED = lazily("torch.distributed.fsdp._common_utils", "FSDP_FLATTENED")
SKIP_HOOK = lazily("diffusers.hooks.layer_skip", "TransformerBlockSkipHook")
# library -> an object that has an attribute, for each that is read
OBJECTS: dict[str, dict[str, Callable[[], Any]]] = {
    "accelerate": dict.fromkeys(("_old_forward", "_hf_hook"), lambda: hooked("accelerate")),
    "diffusers": {
        "_parallel_config": lazily("diffusers", "ModelMixin"),
        "_metadata": lambda: written_by(SKIP_HOOK().initialize_hook),
        "_diffusers_hook": lambda: hooked("diffusers"),
    },
    "flash_attn": dict.fromkeys(
        ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"), flash_private.interface_of_2
    ),
    "transformers": {
        **dict.fromkeys(("_attn_implementation", "_attn_implementation_internal"), lambda: CONFIG()()),
        **dict.fromkeys(("_can_record_outputs", "_can_set_attn_implementation", "_is_stateful", "_tp_size"), MODEL),
        "_global_mapping": lazily("transformers", "AttentionInterface"),
        "_reshape": lazily("transformers.models.bloom.modeling_bloom", "BloomAttention"),
        "_split_heads": lazily("transformers.models.falcon.modeling_falcon", "FalconAttention"),
    },
    "torch": {
        "_sequence_nr": lambda: torch.ones((), requires_grad=True).exp().grad_fn,
        "_current_level": lambda: torch.autograd.forward_ad,
        **dict.fromkeys(("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"), nn.Module),
        **dict.fromkeys(("_backward_hooks", "_backward_pre_hooks"), nn.Module),
        **dict.fromkeys(("_wrapped_call_impl", "_compiled_call_impl"), lambda: nn.Module),
        "_is_view": lambda: torch.Tensor,
        "_local_tensor": lazily("torch.distributed.tensor", "DTensor"),
        "_get_active_ddp_module": lambda: nn.parallel.DistributedDataParallel,
        "_comm_hooks": lambda: written_by(nn.parallel.DistributedDataParallel.__init__),
        "_get_fsdp_state": lambda: torch.distributed.fsdp.FSDPModule,
        "_fsdp_param_group": lambda: FSDP_STATE()(),
        "_unsharded_param": lambda: written_by(FSDP_PARAM().init_unsharded_param),
        "_fsdp_flattened": lambda: SimpleNamespace(**{FLATTENED(): None}),
        "_cdata": lambda: torch.ones(1).untyped_storage(),
        "_get_backend": lambda: dist.ProcessGroup,
        **dict.fromkeys(("_start_coalescing", "_end_coalescing"), lambda: c10d.Backend),
        **dict.fromkeys(("_reduce_scatter_base", "_allgather_base"), lambda: c10d.Backend),
        **dict.fromkeys(("_group_start", "_group_end"), lambda: getattr(dist, "ProcessGroupNCCL", None)),
        "_is_profiler_enabled": lambda: torch.autograd.profiler,
        "current_meta": lambda: import_module("torch.fx.traceback"),
        "activation_memory_budget": lambda: import_module("torch._functorch.config"),
    },
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_release_has_every_name(library: str) -> None:
    names = names_of(library)
    lacks = [] if dist.is_nccl_available() else ["ProcessGroupNCCL"]
    for name, path in names.paths.items():
        if not any(part in path for part in lacks):
            assert getattr(names, name) is not None


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_release_has_every_attribute(library: str) -> None:
    names, objects = names_of(library), OBJECTS.get(library, {})
    assert objects.keys() == set(names.attributes)
    assert [name for name, make in objects.items() if (x := make()) is not None and not hasattr(x, name)] == []


def test_hooks_of_accelerate_and_diffusers_keep_the_forward() -> None:
    names_of("accelerate")
    module = hooked("accelerate")
    assert accelerate_private.below_hook(module.forward.func, module, "forward") == (module, "_old_forward")
    module._hf_hook.weights_map = {"weight": 7}
    assert accelerate_private.offloaded(module, "weight") == 7 and accelerate_private.offloaded(module, "bias") is None
    names_of("diffusers")
    module = hooked("diffusers")
    place = diffusers_private.below_hook(module.forward.func)
    assert place is not None and place[1] == "forward" and hasattr(place[0], "forward")
    assert list(diffusers_private.hooks_of(module)) == ["x"] and not diffusers_private.hooks_of(nn.Linear(1, 1))
    processor = import_module("diffusers.models.transformers.transformer_flux").FluxAttnProcessor
    assert hasattr(processor, "_attention_backend") and diffusers_private.backend_of(processor) == "native"
    known = {each.value for each in import_module("diffusers.models.attention_dispatch").AttentionBackendName}
    assert known >= {name for name in diffusers_private.BACKENDS if name}


def test_masks_of_transformers_close_over_what_is_read() -> None:
    names_of("transformers")
    masking = import_module("transformers.masking_utils")
    factories = dict(transformers_private.FACTORIES)
    if not hasattr(masking, newer := "remap_positions_for_packed_sequence"):  # since 5.13
        del factories[newer]
    for name, given in factories.items():
        parameters = inspect.signature(factory := getattr(masking, name)).parameters
        inner = [code.co_freevars for code in factory.__code__.co_consts if inspect.iscode(code)]
        assert not given or (given in parameters and any(given in closed for closed in inner))


def test_a_name_that_is_gone_is_one_sentence() -> None:
    scope: dict[str, Any] = {"__name__": "m"}
    names = PrivateNames("torch", "2.11 to 2.15", scope, {"torch": "_gone", "torch.gone": "_a", "torch.ops:aten": "_b"})
    told = f"torch {metadata.version('torch')} has no {{}}, which seqpar needs here; install torch 2.11 to 2.15, or a"
    for name, full in (("gone", "torch._gone"), ("a", "torch.gone._a"), ("b", "torch.ops.aten._b")):
        with pytest.raises(ImportError, match=re.escape(told.format(full))):
            getattr(names, name)
    with pytest.raises(ImportError, match=re.escape(told.format("Linear._gone"))):
        names.attribute("_gone")(nn.Linear(1, 1))
    assert names.attribute("_gone")(nn.Linear(1, 1), 7) == 7
    with pytest.raises(AttributeError, match="module 'm' has no attribute 'other'"):
        _ = names.other


def test_a_name_is_looked_up_once() -> None:
    scope: dict[str, Any] = {}
    names = PrivateNames("torch", "", scope, {"torch._C": "_current_graph_task_id ours=_get_tracing_state"})
    assert names.paths["ours"] == "torch._C:_get_tracing_state"
    assert not scope
    assert names.current_graph_task_id() == -1 and scope == {"current_graph_task_id": torch._C._current_graph_task_id}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_releases_named_begin_with_the_oldest_that_is_allowed(library: str) -> None:
    names: PrivateNames = import_module(f"seqpar.private.{library}").names
    oldest = re.search(rf'"{names.library}>=([\d.]+)', (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest and names.tested.split()[0] == oldest[1]


def test_options_of_a_backend_have_a_timeout() -> None:
    options = c10d.Backend.Options("gloo")
    torch_private.set_timeout(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


def test_nodes_are_numbered_as_they_are_recorded() -> None:
    x = torch.ones((), requires_grad=True)
    first, y = torch_private.next_node(), x.exp()
    assert torch_private.number_of_node(y.grad_fn)() == first < torch_private.next_node()
    assert torch_private.node_under_way() == torch_private.backward_pass() == -1
    seen: list[int] = []
    y.register_hook(lambda grad: seen.extend((torch_private.node_under_way(), torch_private.backward_pass())))
    y.backward()
    assert seen[0] in (-1, first) and seen[1] >= 0


# Private names of Python's own library.
OF_FILES = {"_name_or_path"}  # keys of config.json
OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_replace", "_thread"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def own() -> frozenset[str]:
    """The names that seqpar defines itself."""
    found = OF_PYTHON | OF_FILES
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return frozenset(found)


def is_private(name: str) -> bool:
    begins = name.startswith("_") and not name.startswith(("__", "_seqpar"))
    return begins and name != "_" and name.isidentifier()


def foreign_names(tree: ast.Module, own: frozenset[str]) -> Iterator[str]:
    """Private names of other libraries in a file.

    They are names in an import of another library or behind one that was imported, and attributes and strings of one
    such name that nothing in seqpar defines.
    """
    libraries: set[str] = set()  # and Python's own
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            libraries |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("seqpar"):
            libraries |= {alias.asname or alias.name for alias in node.names}
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in full if any(map(is_private, name.split("."))))
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_PYTHON:
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr not in own or (isinstance(root, ast.Name) and root.id in libraries):
                yield ast.unparse(node)
        text = node.value if isinstance(node, ast.Constant) and node not in parts else None
        if isinstance(text, str) and is_private(text) and text not in own:
            yield repr(text)


def test_private_names_of_others_stand_in_their_librarys_file() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] != "private" and (names := sorted({*foreign_names(parsed(path), own())})):
            found[place.as_posix()] = names
    assert not found, f"{found}: list them in seqpar/private, in the file of their library, and use them from there"
