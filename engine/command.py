"""The command line of a program: its settings, its run, and an end in one line, whatever happens.

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

# Errors that are the user's or the machine's, and no bug.
EXPECTED = (UsageError, EnvError, FloatingPointError, OSError, SafetensorError,
            torch.OutOfMemoryError, MemoryError)
# A full disk, as libraries report it that raise a plain Exception.
FULL = re.compile("No space left on device|Disk quota exceeded")
# What gloo and NCCL say where the process at the other end has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


def main(argv: list[str], settings_class, run_class, methods: dict, program: str,
         finish: Callable | None = None):
    """Runs the loop of a method, as a command line asks for it; the run.

    Args:
        argv: The words of the command line.
        settings_class: That of all its settings.
        run_class: `engine.run.Run`, or one that extends it.
        methods: name -> `Method`.
        program: What --help and messages call the program.
        finish: finish(run) does on the first rank what is left after the last phase, and returns a
            line about it.
    """
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for stream in sys.stdout, sys.stderr:  # a console may lack letters, and is no reason to end
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    transformers.utils.logging.disable_progress_bar()
    run = None
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` prints no error
        settings, options = parse(argv, settings_class, methods, environment, program)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a server that closes a socket is an error
        method = methods[settings.method]
        run = run_class(settings, options, method.beside)
        gc.freeze()  # else each freeing of memory walks all that was imported, 0.2 s
        method.loop(run)
        run.close()
        page = finish(run) if finish and run.main else ""
        run.machine.accelerator.end_training()  # here a tracker may print, and the result is last
        run.print("\n".join(closing_lines(run, page)))
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            os._exit(128 + signal.SIGPIPE)
        line = one_line(error, resumes=run is not None)
        if line is None:
            raise
        if rank() > 0:  # what all ranks say is said once, by the first
            time.sleep(5)
        end(line, 2)
    return run


def closing_lines(run, page: str) -> list[str]:
    """Returns the last lines of a run: its result, the line about its page, if it has one, and the
    commands that can follow."""
    folder = shlex.quote(str(run.folder))
    seconds = sum(row["seconds"] for row in run.done.values())
    lines = [f"\n{run.folder}: {console.headline(vars(run.settings))}", *console.closing(run.done),
             f"{seconds:,.0f} s in all", page or f"bash run.sh page {folder}",
             f"bash run.sh compare {folder} OTHER_RUN"]
    if any(output.endswith(("sft-target", "/target-agent")) for output in run.done):
        lines.append(f"bash run.sh play {run.settings.env} --agent {folder}")
    return lines


def is_unread() -> bool:
    """Returns True if stdout or stderr is a pipe that nobody reads any more."""
    pipes = select.poll()
    pipes.register(1, 0)
    pipes.register(2, 0)
    return any(event & select.POLLERR for _, event in pipes.poll(0))


def one_line(error: Exception, resumes: bool = False) -> str | None:
    """Returns the message of an error that is the user's or the machine's. None: it is a bug.

    Args:
        error: The error.
        resumes: The error ended a run that the same command resumes, once its cause is gone.
    """
    text = console.visible(" ".join(str(error).split()))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text:
        if not resumes:
            return "out of memory; lower --tokens-per-forward, --slots or --max-tokens"
        # A task's trajectories stay in one micro-batch, so fewer --tokens-per-forward may not help.
        return ("out of memory; add --gradient-checkpointing on, or lower --tokens-per-forward or "
                "--slots, and rerun the same command to resume; or lower --max-tokens and give "
                "another --out")
    if isinstance(error, RuntimeError) and any(said in text for said in PEER_GONE):
        return f"process {rank()} ends because another one has; its message says why"
    if isinstance(error, FloatingPointError):  # the same command would meet it again
        return f"{text}; lower the learning rate and give another --out"
    if FULL.search(text):
        text += "; make room on the disk"
    elif not isinstance(error, EXPECTED):
        return None
    if isinstance(error, UsageError) or not resumes:
        return text
    return f"{text}. Fix this and rerun the same command to resume"


def rank() -> int:
    """Returns the number of this process among those of the run, 0 if it is the only one."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else 0


def stop(number: int, _) -> None:
    """Ends the program by Ctrl-C or SIGTERM. Of several ranks only the first prints a line."""
    if rank() > 0:
        os._exit(128 + number)
    end("stopped; rerun the same command to resume", 128 + number)


def end(line: str, status: int) -> None:
    """Ends this process at once, with a line; it waits for no environment that hangs."""
    with suppress(Exception):
        sys.stdout.flush()  # what was said before stands before it
    with suppress(OSError):
        os.write(2, f"\r{line}\n".encode(errors="replace"))
    os._exit(status)
