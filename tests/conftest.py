"""Settings of all tests."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.programs import Programs
from tests.releases import skip_newer
from tests.sampling import sample

# Triton decides when a kernel is defined whether it will be interpreted: before the first import of one. The tests run
# on the CPU wherever they run; what a GPU must show is in bench/gpu/run.py.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Ranks as threads share the machine's cores: a time limit for each example would only measure who else runs.
# The examples are the same every time, so that what was green stays green; --hypothesis-profile=search looks for more.
settings.register_profile(
    "seqpar", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True,
    max_examples=33,
)  # fmt: skip
settings.register_profile("search", settings.get_profile("seqpar"), derandomize=False, max_examples=100)
settings.load_profile("seqpar")


# Files that take longest, in this order before all others, so that no worker is left with one of them at the end.
LONGEST = (
    "test_sanitizers.py", "test_install.py", "kernels/test_compile.py", "kernels/test_triton_launches.py",
    "test_docs.py", "test_examples.py", "ops/test_trees_and_unions.py", "ops/test_attention.py",
    "test_cli.py", "ecosystem/test_loops.py", "kernels/test_triton.py", "ops/test_guarantees.py", "test_package.py",
    "kernels/test_vendor.py", "integrations/hf/test_vision.py", "integrations/hf/test_loops.py",
    "integrations/test_diffusers.py", "kernels/test_triton_ends.py", "ops/test_compile.py",
    "ops/test_refusals.py", "comm/test_shm.py", "comm/test_peer.py", "integrations/sdpa/test_sdpa.py",
    "kernels/test_kernels.py", "integrations/hf/test_model.py", "test_bench.py",
)  # fmt: skip


# `make quick`: the geometry whole, and a case or two of every op, comm, kernel and way in. Beginnings of test names.
QUICK = (
    "facts/", "plan/", "planner/test_batch.py::test_equal_documents", "kernels/test_merge.py::test_merging",
    "kernels/test_kernels.py::test_no_rows_and_no_keys", "kernels/test_kernels.py::test_large_scores_lose_no_row",
    "ops/test_attention.py::test_widths_per_document", "ops/test_attention.py::test_shares_without_heads",
    "ops/test_attention.py::test_real_processes", "ops/test_verbs.py::test_switch_takes_equal_shares",
    "ops/test_verbs.py::test_unshard_sums_gradients", "ops/test_verbs.py::test_every_verb_over_processes",
    "ops/test_rotary.py::test_a_rank_turns",
    "comm/test_exchange.py::TestThreads", "comm/test_exchange.py::TestProcesses::test_adjoint",
    "comm/test_exchange.py::TestProcesses::test_agree", "comm/test_exchange.py::TestSharedMemory::test_adjoint",
    "comm/test_exchange.py::TestSharedMemory::test_agree", "nn/test_attention.py::test_options",
    "data/test_share.py::test_processes", "train/test_gradients.py::test_gradients_are_summed_over_processes",
    "train/test_loss.py::test_shares_add_up", "dsp/test_moves.py::test_moves_on_processes",
    "integrations/hf/test_model.py::test_a_model_on_ranks[Llama",
    "test_package.py",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage collection looks through the modules and tests, which stay: it would do so for seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or libraries report what they find at the end of Python as leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first, each in its own order; the tests of `QUICK` marked, and what CI leaves out of samples."""
    skip_newer(items)
    top = Path(__file__).parent
    places = {top / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    quick = tuple(f"{top.name}/{name}" for name in QUICK)
    for item in items:
        if item.nodeid.startswith(quick):
            item.add_marker(pytest.mark.quick)
    sampled: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("exhaustive") is None:
            sampled.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sampled.values():
        kept = sample([case.callspec.params for case in cases], *cases[0].get_closest_marker("sampled").args)
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(pytest.mark.exhaustive)


def pytest_runtest_setup() -> None:
    """The same random numbers for a test whichever tests ran before it in the same worker."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Runs programs, by a process that all workers share."""
    own = tmp_path_factory.getbasetemp()
    found = Programs(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
    yield found
    found.close()


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """No compiled graph of another test, whose guards and counts would mix with this one's, and none left to others."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_report_header() -> str:
    """What the report of the tests does not show otherwise."""
    return "triton: kernels run in its interpreter; the shipped bf16 variants are only compiled (test_compile.py)"


torch.set_num_threads(1)  # tensors of tests are tiny, and ranks as threads are parallel already

from seqpar.testing import run_processes, run_threads  # noqa: E402 (it imports kernels)

# where a test says nothing of it: on a busy machine a rank may compile for minutes while others wait for it
for run in (run_processes, run_threads):
    run.__kwdefaults__["timeout"] = 200.0
