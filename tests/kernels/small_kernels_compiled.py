"""What the offline compiler is asked about the small kernels: (kernel, signature, constexprs) as launches make them.

An integer that is 1, which Triton makes a constant of its own accord, is one here too, under the path of its argument.
"""

from __future__ import annotations

from typing import Any

from seqpar.kernels.triton.merge import merge_rows
from seqpar.kernels.triton.rotary import rotate_rows
from seqpar.kernels.triton.rows import move


def move_case(
    dtypes: tuple[str, str], tensors: int, numbers: str | None, *, scatter: bool, add: bool, dense: bool
) -> Any:
    strides = (("i64", "i32", "constexpr"),) * tensors
    ours, none = ("p_to", "p_from") if scatter else ("p_from", "p_to")
    signature = {
        "p_xs": (f"*{dtypes[0]}",) * tensors, "p_ys": (f"*{dtypes[1]}",) * tensors, "p_from": "", "p_to": "",
        "n": "i32", "slices": ("constexpr" if dense else "i32",) * tensors, "dims": ("i32",) * tensors,
        "x_strides": strides, "y_strides": strides, "ADD": "constexpr", "BN": "constexpr", "BD": "constexpr",
    }  # fmt: skip
    constexprs: dict[Any, Any] = {"ADD": add, "BN": 32, "BD": 128}
    for name, kind in ((none, None), (ours, numbers)):
        signature[name] = "constexpr" if kind is None else f"*{kind}"
        if kind is None:
            constexprs[name] = None
    at = list(signature).index
    for t in range(tensors):
        constexprs |= {(at("x_strides"), t, 2): 1, (at("y_strides"), t, 2): 1}
        if dense:
            constexprs[at("slices"), t] = 1
    return move, signature, constexprs


def merge_case(acc: str, part: str, out: str) -> Any:
    signature = {
        "p_acc": f"*{acc}", "p_lse": f"*{acc}", "p_part": f"*{part}", "p_part_lse": f"*{acc}", "p_out": f"*{out}",
        "M": "i32", "D": "i32", "acc_strides": ("i32", "i32"), "lse_strides": ("i32", "i32"),
        "part_strides": ("i64", "i32"), "part_lse_strides": ("i32", "i32"), "out_strides": ("i32", "i32"),
        "BM": "constexpr", "BD": "constexpr",
    }  # fmt: skip
    return merge_rows, signature, {"BM": 32, "BD": 128}


def rotate_case(dtype: str, *, rows: bool, interleaved: bool, inverse: bool, tail: int) -> Any:
    signature = {
        "p_x": f"*{dtype}", "p_y": f"*{dtype}", "p_pos": "*i32", "p_freq": "*fp32",
        "p_rows": "*i64" if rows else "constexpr", "n": "i32", "D": "i32", "half": "i32",
        "x_strides": ("i32", "i32", "constexpr"), "y_strides": ("i64", "i32", "constexpr"), "SCALING": "constexpr",
        "INTERLEAVED": "constexpr", "INVERSE": "constexpr", "HEADS": "constexpr", "BN": "constexpr",
        "BJ": "constexpr", "BT": "constexpr",
    }  # fmt: skip
    constexprs: dict[Any, Any] = {
        "SCALING": 1.25, "INTERLEAVED": interleaved, "INVERSE": inverse, "HEADS": 8, "BN": 16, "BJ": 64, "BT": tail,
    }  # fmt: skip
    for name in ("x_strides", "y_strides"):
        constexprs[list(signature).index(name), 2] = 1
    return rotate_rows, signature, constexprs if rows else {"p_rows": None, **constexprs}


CASES: list[tuple[Any, dict[str, Any], dict[Any, Any]]] = [
    move_case(("bf16", "bf16"), 2, "i64", scatter=False, add=False, dense=True),
    move_case(("fp32", "fp32"), 3, "i32", scatter=False, add=False, dense=False),
    move_case(("fp16", "fp16"), 1, None, scatter=False, add=False, dense=True),
    move_case(("fp64", "bf16"), 1, "i64", scatter=True, add=False, dense=False),
    move_case(("fp32", "fp32"), 1, "i64", scatter=True, add=True, dense=True),
    move_case(("bf16", "fp64"), 1, None, scatter=True, add=True, dense=False),
    merge_case("fp32", "bf16", "fp32"),
    merge_case("fp32", "fp32", "fp16"),
    merge_case("fp64", "fp64", "fp64"),
    rotate_case("bf16", rows=True, interleaved=False, inverse=False, tail=0),
    rotate_case("fp16", rows=False, interleaved=True, inverse=True, tail=64),
    rotate_case("fp32", rows=True, interleaved=True, inverse=False, tail=0),
    rotate_case("fp64", rows=False, interleaved=False, inverse=True, tail=64),
]
