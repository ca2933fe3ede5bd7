"""The command line of a program: parses settings, runs a method, and ends errors in one line.

`python coevolve.py`, `python evolve.py` and `bash run.sh ENV` all call `main`.
"""

import gc
import os
import re
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import transformers
from safetensors import SafetensorError

from common.settings import UsageError, parse
from engine import console
from environments import environment
from envs import EnvError

# Errors that come from the user's input or from the machine. All other errors are bugs.
EXPECTED = (UsageError, EnvError, FloatingPointError, OSError, SafetensorError,
            torch.OutOfMemoryError, MemoryError)
# Messages about a full disk, which some libraries raise as a plain Exception.
FULL = re.compile("No space left on device|Disk quota exceeded")
# Messages of gloo and NCCL when the process at the other end has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


def main(argv: list[str], settings_class, run_class, methods: dict, program: str,
         finish: Callable | None = None):
    """Runs the method that a command line selects, and returns the run.

    An expected error ends the process with one line on stderr and exit status 2.

    Args:
        argv: The command-line arguments.
        settings_class: The class of all settings.
        run_class: `engine.run.Run`, or a class that extends it.
        methods: The `Method` of each method name.
        program: Name of the program in --help and in messages.
        finish: Called as finish(run) on the first rank, after the last phase. It completes the run
            and returns a line to print.
    """
    # 1. Signals, output streams and settings.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for stream in sys.stdout, sys.stderr:  # a character that a console lacks must not end the run
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    transformers.utils.logging.disable_progress_bar()
    run = None
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` prints no error
        settings, options = parse(argv, settings_class, methods, environment, program)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a server that closes a socket is an error

        # 2. The run.
        method = methods[settings.method]
        run = run_class(settings, options, method.beside, method.group(settings))
        gc.freeze()  # otherwise each garbage collection visits all imported objects, 0.2 s
        method.loop(run)
        run.close()

        # 3. The result.
        page = finish(run) if finish and run.main else ""
        run.machine.accelerator.end_training()  # trackers may print here, so the result comes last
        run.print("\n".join(closing_lines(run, page)))
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            os._exit(128 + signal.SIGPIPE)
        line = one_line(error, resumes=run is not None)
        if line is None:
            raise
        if rank() > 0:  # if all ranks have the same error, only the first one prints it
            time.sleep(5)
        end(line, 2)
    return run


def closing_lines(run, page: str) -> list[str]:
    """Returns the last lines of a run: its result, and commands to use next.

    Args:
        run: The finished run.
        page: The line about the run's page, or "" if the run has none.
    """
    folder = shlex.quote(str(run.folder))
    seconds = sum(row["seconds"] for row in run.done.values())
    lines = [f"\n{run.folder}: {console.headline(vars(run.settings))}", *console.closing(run.done),
             f"{seconds:,.0f} s in all", page or f"bash run.sh page {folder}",
             f"bash run.sh compare {folder} OTHER_RUN"]
    if any(output.endswith(("sft-target", "/target-agent")) for output in run.done):
        lines.append(f"bash run.sh play {run.settings.env} --agent {folder}")
    return lines


def is_unread() -> bool:
    """Returns True if stdout or stderr is a pipe whose reader has closed it."""
    pipes = select.poll()
    pipes.register(1, 0)
    pipes.register(2, 0)
    return any(event & select.POLLERR for _, event in pipes.poll(0))


def one_line(error: Exception, resumes: bool = False) -> str | None:
    """Returns an expected error's message in one line with a remedy, or None if it is a bug.

    Args:
        error: The error.
        resumes: True if the error ended a run that the same command resumes after a fix.
    """
    text = console.visible(" ".join(str(error).split()))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text:
        if not resumes:
            return "out of memory; lower --tokens-per-forward, --slots or --max-tokens"
        # All trajectories of a task are in one micro-batch, so a lower --tokens-per-forward may not
        # be enough.
        return ("out of memory; add --gradient-checkpointing on, or lower --tokens-per-forward or "
                "--slots, and rerun the same command to resume; or lower --max-tokens and give "
                "another --out")
    if isinstance(error, RuntimeError) and any(message in text for message in PEER_GONE):
        return f"process {rank()} ends because another process ended; see the message of that one"
    if isinstance(error, FloatingPointError):  # the same command would fail again
        return f"{text}; lower the learning rate and give another --out"
    if FULL.search(text):
        text += "; make room on the disk"
    elif not isinstance(error, EXPECTED):
        return None
    if isinstance(error, UsageError) or not resumes:
        return text
    return f"{text}. Fix this and rerun the same command to resume"


def rank() -> int:
    """Returns the rank of this process, which is 0 if it is the only one."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else 0


def stop(number: int, _) -> None:
    """Ends the program after Ctrl-C or SIGTERM. Only the first rank prints a line."""
    if rank() > 0:
        os._exit(128 + number)
    end("stopped; rerun the same command to resume", 128 + number)


def end(line: str, status: int) -> None:
    """Prints a line and ends this process at once, without waiting for an environment that hangs.
    """
    with suppress(Exception):
        sys.stdout.flush()  # print earlier output before the line
    with suppress(OSError):
        os.write(2, f"\r{line}\n".encode(errors="replace"))
    os._exit(status)
