"""Runs a server, and ends it with all that it started as soon as standard input closes.

    python keeper.py COMMAND ...

The run holds the other end of that pipe, and however the run ends, the system closes it: also by
SIGKILL or `os._exit`, when the run itself can do nothing any more.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

GRACE = 10  # seconds between SIGTERM and SIGKILL [ours]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def keep(command: list[str]) -> int:
    """Runs the command to its end, or to that of standard input; the status it ended with."""
    # What a server leaves behind becomes a child of this process, which can end it then.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_keeper)
    threading.Thread(target=end_with_run, args=(server,), daemon=True).start()
    status = server.wait()
    kill_descendants()
    return status if status >= 0 else 128 - status


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def end_with_keeper() -> None:
    """Asks the system to kill the server where the keeper itself is killed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_run(server: subprocess.Popen) -> None:
    while os.read(0, 1024):
        pass
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE)
    server.kill()


def kill_descendants() -> None:
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
