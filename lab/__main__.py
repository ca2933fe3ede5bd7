"""`python -m lab --env webshop ...`: any method with the careful run, as `bash run.sh` starts it.

What the user or the machine did wrong, and a stop, end it with one line.
"""

import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import transformers

import coevolve
import dpo
import envs
from common.settings import Parser, flag, parse
from lab.careful import machine, overlap
from lab.careful.run import Run
from lab.careful.watch import Watch
from lab.page import page, report
from lab.pretrain import smollm2
from lab.settings import METHODS, Settings
from worlds import without_passwords

# What gloo and NCCL say where the process at the other end has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")
GOES_ON = "PART_OF_A_STUDY" not in os.environ  # a study says it of itself, and not each of its runs


def main(argv: list[str]) -> None:
    settings, options = settings_of(argv)
    transformers.utils.logging.disable_progress_bar()
    if settings.model == "smollm2":
        coevolve.MODELS["smollm2"] = smollm2.base()
    if settings.method == "chat":  # in no folder; a run has this one's tokenizer, and no use for it
        coevolve.MODELS[settings.model] = coevolve.MODELS["tiny"]
    check_machine(settings)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(settings.threads or max(1, cores() // ranks))
    run = Run(settings, options)
    watch = Watch(run.accelerator.process_index, run.ranks) if run.ranks > 1 else None
    METHODS[settings.method].loop(run)
    if run.main:
        coevolve.close(run)
        print(report.close(run.folder))
        with suppress(KeyboardInterrupt):
            print(page.make_page(run.folder))
    if watch:
        watch.stop()
    run.accelerator.wait_for_everyone()  # one that ends earlier takes its connections along
    run.accelerator.end_training()


def settings_of(argv: list[str]) -> tuple:
    """The settings and the environment's own. An agent that is evaluated plays as it was trained
    to, unless told otherwise."""
    # Which agent plays where is read alone before all else, since it says what else is meant.
    first = Parser(add_help=False, allow_abbrev=False)
    for name in ("env", "method", "model"):
        first.add_argument(flag(name), default=getattr(Settings, name))
    asked, _ = first.parse_known_args(argv)
    way = {}
    if asked.method == "evaluate":
        way = overlap.way_of(Path(asked.model), asked.env)

    flags = overlap.flags_of(way)
    settings, options = parse([*flags, *argv], Settings, METHODS, envs.environment,
                              "bash run.sh ENV")
    if flags and os.environ.get("RANK", "0") == "0":
        print(f"{asked.model} plays as it was trained, unless told otherwise: {' '.join(flags)}")
        lacking = [flag(name) for name in way if way[name] is None and not vars(options)[name]]
        if lacking:
            print(f"its folder does not say with which {' and '.join(lacking)} it was trained: "
                  "give the same, or it plays elsewhere")
    return settings, options


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def check_machine(s: Settings) -> None:
    """Refused where this machine cannot do what is asked, before anything is loaded."""
    if s.model == "tiny" or s.method == "chat":
        return
    why = machine.check_torch()
    if torch.cuda.is_available() and s.method != "evaluate":
        parts = 1 if s.shard == "off" else int(os.environ.get("WORLD_SIZE", 1))
        why = machine.check_memory(
            dpo.read_config(coevolve.MODELS.get(s.model, s.model)), parts,
            torch.cuda.get_device_properties(0).total_memory, s.tokens_per_forward or 8192,
            beside=s.method in Run.trains_while_it_plays)
    if why:
        raise envs.Refused(f"--model {s.model}: {why}")


def one_line(error: Exception) -> str | None:
    """The message for an expected error, the user's or the machine's; None: it is a bug."""
    if "DefaultCPUAllocator" in str(error):
        error = MemoryError()
    if not isinstance(error, coevolve.EXPECTED):
        if isinstance(error, RuntimeError) and any(text in str(error) for text in PEER_GONE):
            return (f"process {os.environ.get('RANK', '0')} ends because another of this run has "
                    "ended; its message says why")
        return None
    text = without_passwords(coevolve.one_line(error))
    says_how = isinstance(error, (envs.Refused, dpo.Unusable)) or "goes on" in text
    if GOES_ON and not says_how:
        text += ". The same command goes on from here once that is mended"
    return text


def end(line: str, status: int) -> None:
    """Ends this process at once, with one line; it waits for no environment that hangs."""
    os.write(2, f"\rrun.sh: {' '.join(line.split())}\n".encode(errors="replace"))
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


def stop(number, _) -> None:  # by Ctrl-C or SIGTERM; of several ranks one speaks
    if os.environ.get("RANK", "0") == "0":
        end("stopped; the same command goes on from here" if GOES_ON else "stopped", 128 + number)
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    gc.freeze()  # else each freeing of memory between phases walks all that was imported, 0.2 s
    try:
        main(sys.argv[1:])
    except Exception as error:
        if one_line(error) is None:
            raise
        if os.environ.get("RANK", "0") != "0":  # what all ranks say is said once, by the first
            time.sleep(5)
        end(one_line(error), 2)
    if os.environ.get("WORLD_SIZE", "1") != "1":  # a thread of gloo's that is left aborts, seldom,
        sys.stdout.flush()                        # a process that takes itself apart
        os._exit(0)
