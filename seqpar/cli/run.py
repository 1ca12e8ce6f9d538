"""`seqpar run -n N script.py`: N ranks on this machine, started by torch's own launcher."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqpar.cli.flags import integer
from seqpar.cli.output import CommandError

MOST = 1024  # processes on one machine; more is a typing error


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "run",
        help="run a script on N local ranks",
        description="Run a script on N ranks of this machine, as torchrun --standalone --nproc-per-node N does. The "
        "exit code is that of the rank that failed first.",
    )
    parser.add_argument("-n", "--ranks", type=integer, required=True, metavar="N", help="processes to start")
    parser.add_argument("script", help="Python file to run")
    # argparse lists it as required, though it may be empty
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script").required = False
    parser.set_defaults(call=lambda args: launch(args.ranks, args.script, args.args))


def launch(ranks: int, script: str | Path, args: Sequence[str]) -> int:
    """Run `script` on `ranks` local processes. Returns the first failed rank's exit code, 128 + n for signal n, or 0.

    OMP_NUM_THREADS is set to the machine's cores divided by the ranks, unless it is set already. Ctrl-C ends every rank
    at once and returns 130.

    Raises: CommandError if the script does not exist or the number of ranks is out of range.
    """
    if not 1 <= ranks <= MOST:
        raise CommandError(f"-n must be 1 to {MOST:,}, got {ranks}")
    if not Path(script).is_file():
        raise CommandError(f"no such file: {script}")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # The launcher passes the signal it gets on to its ranks. It must not get SIGINT: Python turns that into an
    # exception, which waits until the rank leaves its collective. SIGTERM ends the rank inside it.
    handled = ",".join(name for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        # A second Ctrl-C must not interrupt the shutdown of the ranks.
        if not interrupted:
            interrupted = True
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        flags = ["--standalone", "--nproc-per-node", str(ranks), "--signals-to-handle", handled]
        run(parse_args([*flags, str(script), *args]))
    except ChildFailedError as error:
        # The rank's own traceback is above.
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        how = f"exited with {code}" if code >= 0 else f"was ended by {names.get(-code, f'signal {-code}')}"
        print(f"seqpar run: rank {rank} failed first: it {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 130 if interrupted else 128 + int(error.sigval)
    finally:
        # After an interruption nothing is left to do but return: another Ctrl-C must not turn that into a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN if interrupted else before)
    return 0
