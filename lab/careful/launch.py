"""`accelerate launch` as run.sh uses it: `python3 -m lab.careful.launch -m lab FLAGS`."""

import logging
import os
import signal
import subprocess
import sys

import psutil
from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def launch() -> None:
    # Spinning threads take a shared machine's cores from their own team: a tenth of the speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Texts of all lengths would leave gaps in blocks of fixed size, a quarter of the memory.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Ctrl-C reaches the training process by itself, kill does not; either way wait for its end.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: [p.terminate() for p in psutil.Process().children()])
    logging.disable(logging.ERROR)  # what it guesses, and of several processes what ended them
    try:
        main()
    except subprocess.CalledProcessError as error:  # its message is on the screen already
        sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
    except ChildFailedError as error:  # of several processes; likewise
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"run.sh: process {rank} was ended by signal {-code}", file=sys.stderr)
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as error:  # of several processes, which the launcher has ended
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    launch()
