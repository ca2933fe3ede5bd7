"""What runs of one seed have in common is made once: experts, SFT agents, their evaluations.

A run with --reuse FOLDER takes such a phase from a run in there (or from FOLDER itself) whose hash
of all that went into it is its own. The log then holds what that run logged, and from where.
"""

import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from harness import files
from harness.settings import AFTER_SFT

SHARED = re.compile(r"experts\.jsonl|sft-\w+|eval-0-.+")
PATHS = ("experts", "split_file", "intercode_data", "prompts")  # settings that name files


def ingredients(run, base: str) -> str:
    """A hash of all that goes into the shared phases of a run, beside the phases before each.

    base: what identifies the model. Packages and machine count, since they may change rounding.
    """
    settings = {name: value for name, value in asdict(run.settings).items()
                if name not in AFTER_SFT}
    found = {name: files.digest(Path(settings[name])) for name in PATHS if settings[name]}
    accelerator = run.accelerator
    machine = [accelerator.num_processes, accelerator.mixed_precision, accelerator.device.type,
               run.shard, run.recompute, torch.get_num_threads(),
               torch.backends.cpu.get_cpu_capability(),
               *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
    return files.hashed([settings | found | dict(model=base), files.code_hash(), files.versions(),
                   machine])


def inputs(run, output: str) -> str | None:
    """The hash of what goes into the phase that writes `output`; None: it is this run's alone."""
    s = run.settings
    if s.method == "chat" or s.failure_from or not SHARED.fullmatch(output):
        return None
    before = {name: done["sha256"] for name, done in run.phases.items()}
    return files.hashed([run.ingredients, before, output])


@contextmanager
def once(run, key: str | None):
    """Of runs that come to a phase of equal inputs together one makes it, and the others wait."""
    lock = None
    if run.main and run.settings.reuse and key:
        path = Path(run.settings.reuse) / f".{key[:16]}.lock"
        if (lock := files.held(path)) is None:
            run.print_main(f"{run.running} waits for another run, which is making it")
            lock = files.held(path, wait=True)
    try:
        yield
    finally:
        if lock:
            lock.release()


def take(run, output: str, key: str | None, temporary: Path) -> list[dict] | None:
    """Puts there what another run made of equal inputs; the events that it logged meanwhile.

    The last one says which run that was. None: there is none.
    """
    if not run.settings.reuse or not key:
        return None
    folder = Path(run.settings.reuse)
    for path in sorted([*folder.glob("*/phases.json"), *folder.glob("phases.json")]):
        other, phases = path.parent, files.read_object(path)
        done = phases.get(output, {})
        if done.get("inputs") != key or other.samefile(run.path):
            continue
        try:
            whole = files.digest(other / output) == done["sha256"]
            events = logged(other, phases, output)
            if not whole or [e["event"] for e in events if e.get("phase") == output][-1:] != [
                    "phase"]:
                continue  # somebody has changed it since
            copy(other / output, temporary)
        except (FileNotFoundError, shutil.Error):  # or deleted it
            shutil.rmtree(temporary, ignore_errors=True)
            continue
        events[-1].setdefault("reused", str(other))
        return events
    return None


def logged(run: Path, phases: dict, output: str) -> list[dict]:
    """What a run logged while it made `output`."""
    end = phases[output]["metrics_bytes"]
    begin = max((done["metrics_bytes"] for done in phases.values()
                 if done["metrics_bytes"] < end), default=0)
    return [json.loads(line) for line in
            (run / "metrics.jsonl").read_bytes()[begin:end].splitlines()]


def copy(source: Path, target: Path) -> None:
    """A file or folder, by hard links where the disk has them: checkpoints are large."""
    if Path(source).is_dir():
        shutil.copytree(source, target, copy_function=copy)
        return
    try:
        os.link(source, target)
    except OSError:  # another disk, or not ours
        shutil.copyfile(source, target)
