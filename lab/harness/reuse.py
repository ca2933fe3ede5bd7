"""What runs of one seed have in common is made once: experts, SFT agents, their evaluations.

With --reuse FOLDER such a phase is taken from a run in there (or from FOLDER itself) whose hash of
all that went into it is the same. The log then holds what that run logged, and from where.
"""

import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch

from lab.harness import files
from lab.harness.settings import AFTER_SFT, values_of

SHARED = re.compile(r"experts\.jsonl|sft-\w+|eval-0-.+")


def ingredients(folder, base: str, training: list) -> str:
    """A hash of all that goes into the shared phases of a folder, beside the phases before each:
    packages and machine too, since they may change rounding. base: what identifies the model;
    training: how it is laid out on the machine.
    """
    settings = {name: value for name, value in folder.settings.flat().items()
                if name not in AFTER_SFT}
    found = {f.name: files.digest(Path(value)) for f, value in values_of(folder.settings)
             if value and f.metadata.get("file")}
    accelerator = folder.accelerator
    machine = [accelerator.num_processes, accelerator.mixed_precision, accelerator.device.type,
               *training, torch.get_num_threads(),
               torch.backends.cpu.get_cpu_capability(),
               *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
    return files.hashed([settings | found | dict(model=base), files.code_hash(), files.versions(),
                   machine])


def inputs(folder, output: str) -> str | None:
    """The hash of what goes into the phase that writes `output`; None: it is this run's alone."""
    s = folder.settings
    if s.method == "chat" or s.failure_from or not SHARED.fullmatch(output):
        return None
    before = {name: done["sha256"] for name, done in folder.phases.items()}
    return files.hashed([folder.ingredients, before, output])


@contextmanager
def once(folder, key: str | None):
    """Of runs that come to a phase of equal inputs together one makes it, and the others wait."""
    if not (folder.main and folder.settings.reuse and key):
        yield
        return
    path = Path(folder.settings.reuse) / f".{key[:16]}.lock"
    if (lock := files.held(path)) is None:
        folder.log.say(f"{folder.running} waits for another folder, which is making it")
        lock = files.held(path, wait=True)
    try:
        yield
    finally:
        lock.release()


def take(folder, output: str, key: str | None, temporary: Path) -> list[dict] | None:
    """Puts there what another run made of equal inputs; the events that it logged meanwhile, the
    last with that run's name; None: there is none."""
    if not folder.settings.reuse or not key:
        return None
    source = Path(folder.settings.reuse)
    for path in sorted([*source.glob("*/phases.json"), *source.glob("phases.json")]):
        other, phases = path.parent, files.read_object(path)
        done = phases.get(output, {})
        if done.get("inputs") != key or other.samefile(folder.path):
            continue
        try:
            events = logged(other, phases, output)
            if files.digest(other / output) != done["sha256"] or [
                    e["event"] for e in events if e.get("phase") == output][-1:] != ["phase"]:
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
