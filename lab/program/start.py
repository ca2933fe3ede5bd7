"""How a run starts and ends: settings, machine, the loop of its method, report; one line."""

import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace

import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from lab import play_env as envs
from lab.engine.checkpoint import Damaged
from lab.harness import files, report, reuse
from lab.harness.folder import Folder
from lab.harness.settings import (
    EVOLVING,
    Settings,
    SettingsError,
    is_endpoint,
    parse,
    tokens_per_forward,
    without_passwords,
)
from lab.playing.endpoint import explorer_of
from lab.program.run import Run
from lab.program.tasks import RunTasks, trains
from lab.training.models import check_model, make_accelerator
from lab.training.trainer import Trainer


def start(argv: list[str], loop_of, page) -> None:
    """Runs loop_of(method)(run) with the settings in `argv`, then page(folder) of a finished run.
    What the user or the machine did wrong, and a stop, end this process with one line."""
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    gc.freeze()  # else each freeing of memory between phases walks all that was imported, 0.2 s
    try:
        main(argv, loop_of, page)
    except Exception as error:
        if one_line(error) is None:
            raise
        if os.environ.get("RANK", "0") != "0":  # what all ranks say is said once, by the first
            time.sleep(5)
        end(one_line(error), 2)
    if os.environ.get("WORLD_SIZE", "1") != "1":  # a thread of gloo's that is left aborts, seldom,
        sys.stdout.flush()                        # a process that takes itself apart
        sys.stderr.flush()
        os._exit(0)


def main(argv: list[str], loop_of, page=None) -> None:
    settings = parse(argv)
    disable_progress_bar()  # one bar per phase is ours; those of loading and saving are noise
    if settings.dry_run:
        if os.environ.get("RANK", "0") == "0":
            from lab.program.dry_run import dry_run
            from lab.training import smollm2

            if settings.model == "smollm2":
                settings = replace(settings, model=str(smollm2.base()))
            check_model(settings.model, settings.max_tokens, weights=False)
            dry_run(settings)
        return
    accelerator = make_accelerator(settings)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(settings.threads or max(1, cores // accelerator.num_processes))
    run = open_run(settings, accelerator)
    loop_of(settings.method)(run)
    if run.main:
        finish(run, page)
    run.folder.close()


def open_run(settings: Settings, accelerator: Accelerator) -> Run:
    """The run of these settings, new or to go on; SettingsError if the folder cannot be its. The
    base model, which may take minutes, comes last."""
    s = replace(settings, tokens_per_forward=tokens_per_forward(
        settings, accelerator.device.type == "cuda"))
    folder = Folder(s, accelerator)
    tasks = RunTasks(s, folder)
    if folder.main:  # alone: a WebShop server must not load its catalogue twice at once
        if not (folder.path / "result.json").exists():
            ask_explorer(s, folder.log)
        folder.take()
        tasks.try_out()
    accelerator.wait_for_everyone()
    before = folder.find_earlier()
    if s.experts and trains(s) and "experts.jsonl" not in folder.phases:
        folder.on_main(lambda: tasks.check_openings(tasks.experts()))
    trainer = Trainer(s, folder, tasks)
    folder.record(before, trainer.identity, tasks.about)
    folder.ingredients = folder.on_main(lambda: reuse.ingredients(
        folder, trainer.identity, [trainer.shard, trainer.recompute]))
    accelerator.wait_for_everyone()
    return Run(s, accelerator, folder, tasks, trainer)


def ask_explorer(s: Settings, log) -> None:
    """A word of the explorer's endpoint: address, name, key and temperature are tried."""
    if s.method in EVOLVING and is_endpoint(s.explorer):
        _, took = explorer_of(s)([{"role": "user", "content": "Answer with: ok"}], tries=4)
        log.say(f"explorer: {s.explorer_model} answers; tokens: {took['prompt_tokens']} read, "
                f"{took['completion_tokens']} written")


def finish(run: Run, page) -> None:
    """Writes result.json and the page, and prints what the run's files hold."""
    path, say = run.folder.path, run.log.say
    result, found = path / "result.json", json.dumps(report.result(path), indent=1)
    if result.exists() and result.read_bytes() == found.encode():
        say(f"{path} was finished before; what it holds:")
    else:
        files.write_text(result, found)
    say(report.table(path))
    if page is None:
        return
    try:
        say(page(path))
    except Exception as error:  # whatever it is, the run is finished
        say(f"{path} is finished, but its page failed: {type(error).__name__}: "
            f"{' '.join(str(error).split())}")


# A study says it of itself, and not each of its runs too.
GOES_ON = "PART_OF_A_STUDY" not in os.environ

# What gloo and NCCL say where the process at the other end has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


def one_line(error: Exception) -> str | None:
    """The message for an expected error, the user's or the machine's; None: it is a bug."""
    if isinstance(error, (SettingsError, files.RunError, envs.Refused, Damaged)):
        return without_passwords(str(error))
    if isinstance(error, FloatingPointError):
        return (f"{error}; all finished phases are kept; look at these tasks, or lower the "
                "learning rate and give another --out")
    if isinstance(error, envs.EnvError) or (
            isinstance(error, OSError) and error.errno in files.UNWRITABLE):
        return f"{error}{'. The same command goes on from here once that is mended' * GOES_ON}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
        what = ". ".join(str(error).split(". ")[:2]) or "out of memory"
        return (f"{what}; lower --tokens-per-forward or --slots, and the same command goes on from "
                "here; or lower --max-tokens, with another --out")
    if isinstance(error, RuntimeError) and any(s in str(error) for s in PEER_GONE):
        return (f"process {os.environ.get('RANK', '0')} ends because another of this run has "
                "ended; its message says why")
    return None


def end(line: str, status: int) -> None:
    """Ends this process at once, with one line; it waits for no environment that hangs. What was
    finished is on the disk, and simulators end with their parent."""
    os.write(2, f"\r{os.path.basename(sys.argv[0])}: {line}\n".encode(errors="replace"))
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


def stop(number, _) -> None:  # by Ctrl-C or SIGTERM; of several ranks one speaks
    if os.environ.get("RANK", "0") == "0":
        end(f"stopped{'; the same command goes on from here' * GOES_ON}", 128 + number)
    os._exit(128 + number)
