"""--branch RUN@OUTPUT: a new run takes what RUN made before OUTPUT, and goes on from there with
today's settings and code. `Run` calls `take` when it opens a new folder."""

import os
import shutil
from pathlib import Path

from common.files import read_json, remove
from common.settings import Refused
from engine.words import counted


def take(run, branch: str, now: dict) -> dict:
    """Copies the outputs of a run before one of them into another's folder, agents by hard links.

    Args:
        run: The run that gets them.
        branch: RUN@OUTPUT.
        now: The settings of the run that gets them.

    Returns:
        What its config.json says of them.
    """
    name, _, output = branch.rpartition("@")
    source = Path(name)
    if not (source / "phases.json").exists():
        raise Refused(f"--branch {branch}: {name or branch} is no run; give RUN@OUTPUT, such as "
                      "runs/webshop-coevolve-s0@iter1/pairs-target.jsonl")
    rows = read_json(source / "phases.json")
    if output not in rows:
        raise Refused(f"--branch {branch}: the run has no {output!r}; choose from: "
                      f"{', '.join(rows)}")
    before = read_json(source / "config.json")["settings"]
    others = [f"{key} ({before[key]} -> {now[key]})" for key in sorted(before.keys() & now.keys())
              if before[key] != now[key] and key not in ("out", "branch")]
    taken = {}
    for done, row in rows.items():
        if done == output:
            break
        if not (source / done).exists():
            raise Refused(f"--branch {branch}: {source / done} is not there any more")
        copy(source / done, run.folder / done)
        taken[done] = row
    run.say(f"{counted(len(taken), 'outputs')} taken from {source}, up to {output}; "
            f"other settings: {', '.join(others) or 'none'}")
    record = dict(run=str(source), output=output, seed=before["seed"], settings=others)
    return dict(branch=record, taken=taken)


def copy(source: Path, target: Path) -> None:
    """Copies a file or an agent's folder."""
    remove(target)  # where the run was stopped as it took
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link)
    else:
        shutil.copyfile(source, target)


def link(source: str, target: str) -> None:
    """Links weights, which nobody edits, and copies what else is in an agent's folder."""
    try:
        if not source.endswith((".safetensors", ".pt")):
            raise OSError
        os.link(source, target)
    except OSError:  # or on another disk
        shutil.copyfile(source, target)
