"""torch's private names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch._functorch.config as functorch_config
import torch.fx.traceback as fx_traceback
from torch.autograd import forward_ad, profiler

from seqpar.private import PrivateNames

names = PrivateNames(
    "torch", "2.11 to 2.15", globals(), {
        "torch": """
            _foreach_copy_ _foreach_mul_ _foreach_norm _native_multi_head_attention _scaled_dot_product_attention_math
            _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _transformer_encoder_layer_fwd
            torch_cudnn_attention=_scaled_dot_product_cudnn_attention
            torch_cpu_attention=_scaled_dot_product_flash_attention_for_cpu
        """,
        "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
        "torch._utils": "_unflatten_dense_tensors",
        "torch._C": """
            DispatchKey DisableTorchFunction DisableTorchFunctionSubclass _AutoDispatchBelowAutograd _DisableFuncTorch
            _ForceDispatchKeyGuard _are_functorch_transforms_active _construct_storage_from_data_pointer
            _current_autograd_node _current_graph_task_id _dispatch_tls_local_exclude_set
            _dispatch_tls_local_include_set _is_any_autocast_enabled _is_fwd_grad_enabled _len_torch_dispatch_stack
            _len_torch_function_stack
            _storage_Use_Count
        """,
        "torch._dynamo.eval_frame": "skip_code",
        "torch._C._autograd": """
            _get_sequence_nr _pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks
            _top_saved_tensors_default_hooks
        """,
        "torch._C._functorch": "is_legacy_batchedtensor",
        "torch.ops:aten": """
            _flash_attention_backward _flash_attention_forward _scaled_dot_product_cudnn_attention
            _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu
            _scaled_dot_product_flash_attention_for_cpu_backward
        """,
        "torch.nn.functional": "_in_projection _in_projection_packed",
        "torch.nn.modules.batchnorm": "_BatchNorm _NormBase",
        "torch.nn.modules.conv": "_ConvNd",
        "torch.nn.modules.dropout": "_DropoutNd",
        "torch.nn.modules.instancenorm": "_InstanceNorm",
        "torch.nn.modules.module": "_has_any_global_hook",
        "torch.nn.modules.pooling": "_AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd _MaxPoolNd",
        "torch._subclasses.fake_tensor": """
            DataDependentOutputException DynamicOutputShapeException FakeTensorMode
        """,
        "torch.overrides": "_pop_mode_temporarily",
        "torch.utils._python_dispatch": """
            TorchDispatchMode _get_current_dispatch_mode_stack is_traceable_wrapper_subclass
        """,
        "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
    },
)  # fmt: skip
__getattr__ = names.__getattr__

number_of_node = names.attribute("_sequence_nr")
# of a module
parameters_of, buffers_of = names.attribute("_parameters"), names.attribute("_buffers")
forward_hooks, forward_pre_hooks = names.attribute("_forward_hooks"), names.attribute("_forward_pre_hooks")
backward_hooks, backward_pre_hooks = names.attribute("_backward_hooks"), names.attribute("_backward_pre_hooks")
TENSORS, HOOKS = ("_parameters", "_buffers"), ("_forward_hooks", "_forward_pre_hooks")
wrapped_call = names.attribute("_wrapped_call_impl")
COMPILED = names.key("_compiled_call_impl")
FLAT = "_flat_param"  # the parameter of a module under FSDP1, whose others have the mark
flattened = names.attribute("_fsdp_flattened")
local_tensor = names.attribute("_local_tensor")  # of a DTensor
is_view = names.attribute("_is_view")
# of wrappers: DDP, and `fully_shard` with its parameters
active_ddp, comm_hooks = names.attribute("_get_active_ddp_module"), names.attribute("_comm_hooks")
state_of, group_of = names.attribute("_get_fsdp_state"), names.attribute("_fsdp_param_group")
unsharded = names.attribute("_unsharded_param")
cdata = attrgetter(names.key("_cdata"))  # of a storage: where its memory is described
# methods of process groups and of their backends
get_backend = names.attribute("_get_backend")
start_coalescing, end_coalescing = names.attribute("_start_coalescing"), names.attribute("_end_coalescing")
reduce_scatter_base, allgather_base = names.attribute("_reduce_scatter_base"), names.attribute("_allgather_base")
group_start, group_end = names.attribute("_group_start"), names.attribute("_group_end")
# variables of torch's modules, which others set
is_profiling = partial(names.attribute("_is_profiler_enabled"), profiler)  # in any thread
meta_of_graph = partial(names.attribute("current_meta"), fx_traceback)  # of the nodes that are traced now
# the part of its activations that a compiled graph keeps, rather than repeat ops in its backward
memory_budget = partial(names.attribute("activation_memory_budget"), functorch_config)


names.key("_current_level")


def forward_level() -> int:
    """The level of forward-mode derivatives, -1 outside. Every eager call reads it, and `torch.compile` traces it."""
    return forward_ad._current_level  # type: ignore[attr-defined,no-any-return]


# Autograd numbers nodes as a thread records them, so a call that is repeated in a backward pass, as by a checkpoint,
# can be ordered before or after other recorded nodes.


def next_node() -> int:
    """The number of this thread's next node."""
    return names.get_sequence_nr()  # type: ignore[no-any-return]


def backward_pass() -> int:
    """The number of the backward pass running in this thread, or -1."""
    return names.current_graph_task_id()  # type: ignore[no-any-return]


def node_under_way() -> int:
    """The number of the node whose backward is running in this thread, or -1."""
    node = names.current_autograd_node() if backward_pass() >= 0 else None
    return -1 if node is None else number_of_node(node)()  # type: ignore[no-any-return]


def has_hooks(module: Any) -> bool:
    """Whether something listens to a module's calls or changes them, in backward too."""
    several = forward_hooks, forward_pre_hooks, backward_hooks, backward_pre_hooks
    return any(hooks(module) for hooks in several) or names.has_any_global_hook()


def uncompiled_calls(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, str, Any]]:
    """Name, module and attribute of each compiled call, and what the attribute is without a compiler."""
    dynamo = sys.modules.get("torch._dynamo")
    for path, module in named:
        if COMPILED in module.__dict__ and module.__dict__[COMPILED] is not None:
            yield path, module, COMPILED, None
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            yield path, module, "forward", module._orig_mod.__call__


def compiled_alike(compiled: Any, function: Callable[..., Any], mode: type) -> tuple[Callable[..., Any], bool]:
    """A function compiled as another one is, and whether it is: not where all of it has to be one graph.

    mode: the class of the torch function mode around it, which is traced with the function, and not alone.
    """
    config = getattr(compiled, "get_compiler_config", None)
    context = None if config is None else config.__closure__[0].cell_contents
    if context is None or context.fullgraph:
        return function, False
    names.skip_code(mode.__torch_function__.__code__)  # type: ignore[attr-defined]
    return context(function), True


def groups_of(module: Any) -> Iterator[Any]:
    """The groups of parameters of a module that `fully_shard` was called for."""
    state = state_of(module)()
    several = getattr(state, "_fsdp_param_groups", None)  # of a PyTorch that has several for a module
    yield from filter(None, [group_of(state)] if several is None else several)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Give a backend's options another timeout."""
    options._timeout = timeout


def frame_of(pack: Any, kind: type) -> Any:
    """The frame of a checkpoint that a hook of saved tensors belongs to, whose `recompute_fn` runs again; or None.

    kind: `CheckpointFunction`, from the module of such hooks.
    """
    names = pack.__code__.co_freevars if getattr(pack, "__module__", "") == kind.__module__ else ()
    return pack.__closure__[names.index("frame")].cell_contents if "frame" in names else None
