"""A fork of a rank's process is no rank: it hears so at once, ends as it likes, and harms no rank."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from seqpar import native

SCRIPT = """
    import gc, os, signal, sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    from seqpar.comm import GroupComm, PeerError, ShmComm, Tag

    rank, folder, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
    comm = {"gloo": GroupComm, "shm": ShmComm}[kind](timeout=60.0)
    peer, y = 1 - rank, comm.empty((1,), torch.float32, torch.device("cpu"))
    work = comm.exchange({peer: [torch.ones(1)]}, {peer: [y]}, tag=Tag(1, 0, 0, 0))

    def child(end):
        pid = os.fork()
        if pid:
            return pid
        verbs = (
            lambda: comm.agree("x", {}), lambda: comm.gather("x", 1), work.wait, comm.check,
            lambda: comm.exchange({peer: [y]}, {}, tag=Tag(1, 1, 0, 0)),
        )
        for verb in verbs if end == "uses it" else ():
            try:
                verb()
                os._exit(2)
            except PeerError as error:
                if not f"the comm of rank {rank} belongs to process {os.getppid()}, not to a fork" in str(error):
                    os._exit(3)
        return end

    children = []
    for end in ("uses it", "exits", "drops it"):
        children.append(child(end))
        if children[-1] == "uses it":
            comm.abort("a fork has no say")
            os._exit(0)
        if children[-1] == "exits":
            sys.exit(0)
        if children[-1] == "drops it":
            del comm, work
            gc.collect()
            os._exit(0)

    codes, deadline = {}, time.monotonic() + 100
    while len(codes) < 3 and time.monotonic() < deadline:
        for pid in set(children) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in set(children) - set(codes):
        os.kill(pid, signal.SIGKILL)
    work.wait()
    comm.agree("afterwards", {})
    print([codes.get(pid, "hung") for pid in children], y.tolist())
"""


@pytest.mark.parametrize(
    "kind",
    [
        "gloo",
        pytest.param("shm", marks=pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")),
    ],
)
@pytest.mark.exhaustive
def test_a_fork_ends_as_it_likes_and_harms_no_rank(tmp_path, kind):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, script]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), tmp_path, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        out, err = process.communicate(timeout=600)
        assert (process.returncode, out.strip()) == (0, "[0, 0, 0] [1.0]"), err
