"""Programs that tests run as processes of their own, forked from one that has imported the libraries they need.

To import torch takes seconds, and transformers or diffusers more. `Programs` starts a process that imports them once
and nothing of seqpar; each rank of a program is a fork of it, which then is what ``python script.py`` would be. Ranks
meet at a store of the test's own process, and each prints into a file of its own.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0  # seconds


class Programs:
    """Runs programs until it is closed. libraries: modules that programs find imported."""

    def __init__(self, *libraries: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__, *libraries], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def alone(self, script: Path, folder: Path) -> str:
        """What a script prints that nothing launches. folder: as for `ranks`."""
        return self._run(script, folder, [{}])[0]

    def ranks(self, count: int, script: Path, folder: Path) -> list[str]:
        """What every rank of a script prints; all must succeed. folder: where they work and write it."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT), wait_for_workers=False)
        shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": 0, "GROUP_RANK": 0}
        each = [shared | {"RANK": n, "LOCAL_RANK": n} for n in range(count)]
        return self._run(script, folder, [{name: str(value) for name, value in env.items()} for env in each])

    def _run(self, script: Path, folder: Path, envs: list[dict[str, str]]) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps([str(script), str(folder), envs]), file=self._server.stdin, flush=True)
        codes = json.loads(self._server.stdout.readline())
        errors = [(folder / f"{rank}.err").read_text()[-4000:] for rank in range(len(envs))]
        assert not any(codes), "\n".join([f"exit codes {codes}", *errors])
        return [(folder / f"{rank}.out").read_text() for rank in range(len(envs))]

    def close(self) -> None:
        """End the process that programs are forked from."""
        with self._server:
            pass  # it ends when nobody asks any more


def lines(block: str) -> list[str]:
    """The commands of a block of shell commands, without comments."""
    return [command for line in block.splitlines() if (command := line.split("#")[0].strip())]


def output(command: str, folder: Path) -> str:
    """What a command of a page prints, in that folder; it must succeed. Of make it is what it would run.

    In the folder, `examples` leads to the examples.
    """
    first, *words = shlex.split(command)
    module = {"torchrun": "torch.distributed.run", "seqpar": "seqpar"}
    folder, argv = (ROOT, ["make", "-n"]) if first == "make" else (folder, [sys.executable])
    if first in module:
        argv += ["-m", module[first]]
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    # a port of torchrun's own, whatever else runs on the machine
    env = os.environ | {"PET_STANDALONE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*argv, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@contextmanager
def programs(*libraries: str) -> Iterator[Programs]:
    """`Programs` that are closed in the end."""
    found = Programs(*libraries)
    try:
        yield found
    finally:
        found.close()


# --- the process that forks -------------------------------------------------------------------------------------------


def serve(libraries: list[str]) -> str | None:
    """In a fork, the script that it is to run; None when there are no more."""
    for name in libraries:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork has no other thread"
    while line := sys.stdin.readline():
        script, folder, envs = json.loads(line)
        ranks = []
        for rank, env in enumerate(envs):
            if not (pid := os.fork()):
                become(script, Path(folder), rank, env)
                return str(script)
            ranks.append(pid)
        print(json.dumps(ended(ranks)), flush=True)
    return None


def become(script: str, folder: Path, rank: int, env: dict[str, str]) -> None:
    """Make this fork a rank of a program."""
    for number, (path, mode) in enumerate([("/dev/null", "r"), (f"{rank}.out", "w"), (f"{rank}.err", "w")]):
        with open(folder / path, mode) as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.update(env)
    sys.argv[:], sys.path[0] = [script], str(Path(script).parent)
    # what this package has to say of a loop is not to be said of those that it shows
    warnings.filterwarnings("error", message=r"(?s).*(seqpar|sync_gradients|between rank)")


def ended(ranks: list[int]) -> list[int]:
    """The exit codes of processes; when one fails or the time is up, the others are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
        if any(codes.values()) or time.monotonic() > deadline:
            deadline = float("inf")
            for other in set(ranks) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in ranks]


def main() -> int:
    """The exit code of this process."""
    script = serve(sys.argv[1:])
    if script is None:
        return 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # taking all libraries apart would take a second
