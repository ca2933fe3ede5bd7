"""Entry point of the training programs: parses settings, runs a method, and reports errors.

`python coevolve.py`, `python evolve.py` and `bash run.sh ENV` all call `run_program`.
"""

import gc
import os
import re
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
from engine import branch, console
from environments import environment
from envs import EnvError

# Errors caused by the user's input or by the machine. All other errors are bugs.
EXPECTED = (UsageError, EnvError, OSError, SafetensorError)
# Messages of disk-full errors, which some libraries raise as a plain Exception.
FULL = re.compile("No space left on device|Disk quota exceeded")
# Parts of the errors that gloo and NCCL raise if another process of a distributed run has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


def run_program(argv: list[str], settings_class, run_class, methods: dict, program: str,
                finish: Callable | None = None):
    """Runs the training method that --method selects, and returns the `Run` object.

    If one of the errors in `EXPECTED` occurs, the process prints a single line to stderr and exits
    with status 2.

    Args:
        settings_class: The settings class of the program, a subclass of `Stated`.
        run_class: `engine.run.Run` or a subclass.
        finish: A function finish(run), which is called on rank 0 after the last phase. It writes a
            summary of the run, such as an HTML page, and returns a line to print.
    """
    # 1. Set up signal handlers and output streams, and parse the settings.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    # Characters that the console cannot encode are escaped, because an encoding error would end the
    # run. In a notebook, the output streams have no encoding.
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    transformers.utils.logging.disable_progress_bar()
    run = None
    try:
        # While --help is printed, SIGPIPE ends the process silently, so `--help | head` shows no
        # error. Later, SIGPIPE is ignored, so that a connection closed by a server raises an error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        settings, options = parse(argv, settings_class, methods, environment, program,
                                  branch.settings_of_run)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

        # 2. Run the method.
        method = methods[settings.method]
        run = run_class(settings, options, method)
        # Each garbage collection would spend 0.2 s on visiting all imported objects.
        gc.freeze()
        method.loop(run)
        run.close()

        # 3. Print the results.
        page = finish(run) if finish and run.main else ""
        # Some experiment trackers, such as wandb, print a summary when they are closed. Therefore
        # the results of the run are printed afterwards.
        run.machine.accelerator.end_training()
        run.print("\n".join(closing_lines(run, page)))
    except Exception as error:
        line = one_line(error, resumes=run is not None)
        if line is None:
            raise
        # If all ranks fail with the same error, only rank 0 should print it. The launcher usually
        # ends the other ranks within 5 s after rank 0 has exited.
        if rank() > 0:
            time.sleep(5)
        end(line, 2)
    return run


def closing_lines(run, page: str) -> list[str]:
    """Returns the lines that are printed at the end of a run: its results and suggested commands.

    `page` is a line about the run's HTML page, or "" if no page was written.
    """
    folder = shlex.quote(str(run.folder))
    seconds = sum(row["seconds"] for row in run.done.values())
    lines = [f"\n{run.folder}: {console.headline(vars(run.settings))}", *console.closing(run.done),
             f"{seconds:,.0f} s in all", page or f"bash run.sh page {folder}",
             f"bash run.sh compare {folder} OTHER_RUN"]
    if any(output.endswith(("sft-target", "/target-agent")) for output in run.done):
        lines.append(f"bash run.sh play {run.settings.env} --agent {folder}")
    return lines


def one_line(error: Exception, resumes: bool = False) -> str | None:
    """Formats an expected error as a single line with a remedy. Returns None for an unexpected
    error (a bug).

    `resumes` is true if the run had already started, so that the same command can resume it.
    """
    text = console.visible(" ".join(str(error).split()))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text:
        if not resumes:
            return "out of memory; lower --tokens-per-forward, --slots or --max-tokens"
        # A lower --tokens-per-forward may not suffice. It limits the size of micro-batches, but all
        # trajectories of a task have to be in the same micro-batch.
        return ("out of memory; add --gradient-checkpointing on, or lower --tokens-per-forward or "
                "--slots, and rerun the same command to resume; or lower --max-tokens and give "
                "another --out")
    if isinstance(error, RuntimeError) and any(message in text for message in PEER_GONE):
        return f"process {rank()} ends because another process ended; see the message of that one"
    if isinstance(error, FloatingPointError):  # a resumed run would fail with the same error
        return f"{text}; lower the learning rate and give another --out"
    if FULL.search(text):
        text += "; make room on the disk"
    elif not isinstance(error, EXPECTED):
        return None
    if isinstance(error, UsageError) or not resumes:
        return text
    return f"{text}. Fix this and rerun the same command to resume"


def rank() -> int:
    """Returns the rank of this process, or 0 if the run is not distributed."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else 0


def stop(number: int, _) -> None:
    """Handles Ctrl-C and SIGTERM by ending the process. Only rank 0 prints a message."""
    if rank() > 0:
        os._exit(128 + number)
    end("stopped; rerun the same command to resume", 128 + number)


def end(line: str, status: int) -> None:
    """Prints a line to stderr and ends this process immediately.

    Cleanup handlers and threads are skipped, because an environment that hangs could block them.
    """
    with suppress(Exception):
        sys.stdout.flush()  # earlier output has to appear before `line`
    with suppress(OSError):
        os.write(2, f"\r{line}\n".encode(errors="replace"))
    os._exit(status)
