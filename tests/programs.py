"""Programs that tests run as processes of their own, forked from one that has imported the libraries they need.

To import torch takes seconds, and transformers or diffusers more. The first `Programs` of a run of tests starts a
process that imports them once and nothing of seqpar, and which all workers of pytest share; each rank of a program is
a fork of it, which then is what ``python script.py`` would be. Ranks meet at a store of the test's own process, and
each prints into a file of its own.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0  # seconds
LIBRARIES = (
    "torch._dynamo", "transformers.models.llama.modeling_llama", "transformers.models.gemma3.modeling_gemma3",
    "transformers.trainer", "diffusers.models.transformers.transformer_flux", "peft", "lightning",
    "trl.trainer.dpo_trainer", "trl.trainer.sft_trainer", "trl.trainer.reward_trainer",
    "trl.trainer.kto_trainer", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer",
)  # fmt: skip


class Programs:
    """Runs programs until it is closed. shared: a folder of this run of tests, the same in all its workers."""

    def __init__(self, shared: Path) -> None:
        port, self._process = shared / "programs", None
        with (shared / "programs.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._socket = _connected(port)
            if self._socket is None:
                self._process = _started(port)
                self._socket = _connected(port)
        assert self._socket is not None, "the process that programs are forked from did not start"
        self._answers = self._socket.makefile("r", encoding="utf-8")

    def alone(self, script: Path, folder: Path) -> str:
        """What a script prints that nothing launches. folder: as for `ranks`."""
        return self._run([script], folder, [{}])[0]

    def ranks(self, count: int, script: Path, folder: Path, *words: object) -> list[str]:
        """What every rank of a script prints; all must succeed.

        folder: where they work and write it. words: the script's arguments.
        """
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT), wait_for_workers=False)
        shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": 0, "GROUP_RANK": 0}
        each = [shared | {"RANK": n, "LOCAL_RANK": n} for n in range(count)]
        envs = [{name: str(value) for name, value in env.items()} for env in each]
        return self._run([script, *words], folder, envs)

    def _run(self, argv: list[object], folder: Path, envs: list[dict[str, str]]) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        self._socket.sendall(json.dumps([list(map(str, argv)), str(folder), envs]).encode() + b"\n")
        codes = json.loads(self._answers.readline())
        errors = [(folder / f"{rank}.err").read_text()[-4000:] for rank in range(len(envs))]
        assert not any(codes), "\n".join([f"exit codes {codes}", *errors])
        return [(folder / f"{rank}.out").read_text() for rank in range(len(envs))]

    def close(self) -> None:
        """Leave the process that programs are forked from. It ends with the last to leave, for whom the first waits."""
        self._answers.close()
        self._socket.close()
        if self._process is not None:
            self._process.wait()


def _connected(port: Path) -> socket.socket | None:
    """A connection to the process that wrote its port there, None if there is none any more."""
    try:
        found = socket.create_connection(("127.0.0.1", int(port.read_text())))
        if found.recv(1):  # a process that is about to end accepts nobody
            return found
        found.close()
    except (OSError, ValueError):
        pass
    return None


def _started(port: Path) -> subprocess.Popen[str]:
    """A new process, whose port is written there."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        port.write_text(said.readline())
    return process


def lines(block: str) -> list[str]:
    """The commands of a block of shell commands, without comments."""
    return [command for line in block.splitlines() if (command := line.split("#")[0].strip())]


def output(command: str, run: Programs, folder: Path) -> str:
    """What a command of a page prints, in that folder; it must succeed. Of make it is what it would run."""
    first, *words = shlex.split(command)
    if first == "torchrun":
        option, count, script, *words = words
        assert option == "--nproc-per-node"
        return "".join(run.ranks(int(count), ROOT / script, folder, *words))
    assert first == "make", command
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass
class Program:
    """Ranks that run, for whom, and the exit codes of those that have ended."""

    client: socket.socket
    ranks: list[int]
    deadline: float
    codes: dict[int, int] = field(default_factory=dict)

    def ended(self) -> bool:
        """Whether all ranks have; when one fails or the time is up, the others are killed."""
        for rank in self.left():
            pid, status = os.waitpid(rank, os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        if any(self.codes.values()) or time.monotonic() > self.deadline:
            self.kill()
        return not self.left()

    def left(self) -> list[int]:
        """Ranks that run."""
        return [rank for rank in self.ranks if rank not in self.codes]

    def kill(self) -> None:
        """End them."""
        for rank in self.left():
            os.kill(rank, signal.SIGKILL)


def import_libraries() -> None:
    """Import what is installed of `LIBRARIES`."""
    for name in LIBRARIES:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)


def serve() -> str | None:
    """In a fork, the script that it is to run; None when nobody asks any more."""
    gc.disable()
    import_libraries()
    gc.enable()
    gc.freeze()  # no garbage collection looks through the libraries, nor any of a fork
    assert threading.active_count() == 1, "a fork has no other thread"
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    clients: dict[socket.socket, TextIO] = {}
    running: list[Program] = []
    while True:
        for ready in select.select([listener, *clients], [], [], 0.01 if running else None)[0]:
            if ready is listener:
                client = listener.accept()[0]
                client.sendall(b"!")
                clients[client] = client.makefile("r", encoding="utf-8")
            elif line := clients[ready].readline():
                argv, folder, envs = json.loads(line)
                ranks: list[int] = []
                for rank, env in enumerate(envs):
                    if not (pid := os.fork()):
                        for open_ in (listener, *clients.values(), *clients):
                            open_.close()
                        become(argv, Path(folder), rank, env)
                        return str(argv[0])
                    ranks.append(pid)
                running.append(Program(ready, ranks, time.monotonic() + TIMEOUT))
            else:
                clients.pop(ready).close()
                ready.close()
        if not clients and running:
            for program in running:
                program.kill()
        for program in [program for program in running if program.ended()]:
            running.remove(program)
            if program.client in clients:
                program.client.sendall(json.dumps([program.codes[rank] for rank in program.ranks]).encode() + b"\n")
        if not clients and not running:
            return None


def become(argv: list[str], folder: Path, rank: int, env: dict[str, str]) -> None:
    """Make this fork a rank of a program."""
    for number, (path, mode) in enumerate([("/dev/null", "r"), (f"{rank}.out", "w"), (f"{rank}.err", "w")]):
        with open(folder / path, mode) as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.update(env)
    sys.argv[:], sys.path[0] = argv, str(Path(argv[0]).parent)
    # what this package has to say of a loop is not to be said of those that it shows
    warnings.filterwarnings("error", message=r"(?s).*(seqpar|sync_gradients|between rank)")


def main() -> int:
    """The exit code of this process."""
    script = serve()
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
