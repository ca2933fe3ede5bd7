"""The command line of a program: its settings, its run, and an end in one line, whatever happens.

`python coevolve.py`, `python evolve.py` and `bash run.sh ENV` all call `main`.
"""

import gc
import os
import signal
import sys
import time
from contextlib import suppress

import torch
import transformers
from safetensors import SafetensorError

from common.settings import Refused, parse
from engine import words
from environments import environment
from envs import EnvError

# Errors that are the user's or the machine's, and no bug.
EXPECTED = (Refused, EnvError, FloatingPointError, OSError, SafetensorError,
            torch.OutOfMemoryError, MemoryError)
# What gloo and NCCL say where the process at the other end has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


def main(argv: list[str], settings_class, run_class, methods: dict, program: str):
    """Runs the loop of a method, as a command line asks for it; the run.

    Args:
        argv: The words of the command line.
        settings_class: That of all its settings.
        run_class: `engine.run.Run`, or one that extends it.
        methods: name -> `Method`.
        program: What --help and messages call the program.
    """
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for stream in sys.stdout, sys.stderr:  # a console may lack letters, and is no reason to end
        stream.reconfigure(errors="backslashreplace")
    transformers.utils.logging.disable_progress_bar()
    try:
        settings, options = parse(argv, settings_class, methods, environment, program)
        method = methods[settings.method]
        run = run_class(settings, options, method.agents(settings), method.beside)
        gc.freeze()  # else each freeing of memory walks all that was imported, 0.2 s
        method.loop(run)
        run.close()
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        if rank() > 0:  # what all ranks say is said once, by the first
            time.sleep(5)
        end(line, 2)
    say_the_end(run)
    run.machine.accelerator.end_training()
    return run


def say_the_end(run) -> None:
    """Says what came of a run: its agents first, then its phases, then what can be done with it."""
    lines = [f"\n{run.folder}: {words.headline(vars(run.settings))}", *words.closing(run.done), "",
             *words.table(run.done), "",
             f"bash run.sh page {run.folder}",
             f"bash run.sh compare {run.folder} OTHER_RUN"]
    if any(output.endswith(("sft-target", "/target-agent")) for output in run.done):
        lines.append(f"bash run.sh play {run.settings.env} --agent {run.folder}")
    run.say("\n".join(lines))


def one_line(error: Exception) -> str | None:
    """What is said of an error that is the user's or the machine's; None: it is a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text:
        return ("out of memory; lower --tokens-per-forward or --slots, and the same command goes "
                "on; or lower --max-tokens, with another --out")
    if isinstance(error, RuntimeError) and any(said in text for said in PEER_GONE):
        return f"process {rank()} ends because another one has; its message says why"
    if not isinstance(error, EXPECTED):
        return None
    if isinstance(error, OSError) and "o space left" in text:
        text += "; make room on the disk of --out"
    if isinstance(error, Refused):
        return text
    return f"{text}. The same command goes on from here once that is mended"


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def stop(number: int, _) -> None:
    """Ends the program by Ctrl-C or SIGTERM; of several ranks one speaks."""
    if rank() > 0:
        os._exit(128 + number)
    end("stopped; the same command goes on from here", 128 + number)


def end(line: str, status: int) -> None:
    """Ends this process at once, with a line; it waits for no environment that hangs."""
    with suppress(Exception):
        sys.stdout.flush()  # what was said before stands before it
    os.write(2, f"\r{line}\n".encode(errors="replace"))
    os._exit(status)
