"""Settings of all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# Triton decides when a kernel is defined whether it will be interpreted: before the first import of one. The tests run
# on the CPU wherever they run; what a GPU must show is in bench/gpu.py.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Ranks as threads share the machine's cores: a time limit for each example would only measure who else runs.
# In CI the examples are the same every time, so that what was green stays green; elsewhere they go on searching.
settings.register_profile(
    "seqpar",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("seqpar")


def pytest_report_header() -> str:
    """What the report of the tests does not show otherwise."""
    return "triton: kernels run in its interpreter; the shipped bf16 variants are only compiled (test_compile.py)"


torch.set_num_threads(1)  # tensors of tests are tiny, and ranks as threads are parallel already
