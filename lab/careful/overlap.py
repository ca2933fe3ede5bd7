"""What an agent was trained on stands in its folder, and a run refuses to evaluate it on that."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coevolve import Run
from common.files import hashed, read_jsonl
from common.settings import Stated
from envs import Refused, World
from evolve import env_with

FILE = "trained_on.json"  # in an agent's folder


@dataclass(frozen=True)
class Overlap(Stated):
    overlap: Literal["refuse", "keep"] = "refuse"  # evaluated tasks that were trained on [ours]


def marks(env: World, task: str) -> set[str]:
    """The hash by which a task is known in whatever split; none for one that the world lacks."""
    with suppress(ValueError):
        return {hashed([env.name, repr(env.find(task))])}
    return set()


def trained_on(agent: Path) -> set[str]:
    """`marks` of what the agent in a folder, and those it came from, were trained on."""
    file = agent / FILE
    return {*json.loads(file.read_text())["marks"]} if file.exists() else set()


def record(run: Run, out: Path, agent: Path, *read) -> None:
    """Writes into an agent's folder what it and `agent`, from which it came, were trained on. read:
    the files, or lists of them, that its training read; in D's an added task is defined."""
    files = [file for part in read for file in (part if isinstance(part, list) else [part])]
    rows = [row for file in files if file.is_file() for row in read_jsonl(file) if "task" in row]
    env, tasks = env_with(run, rows), {row["task"] for row in rows}
    known = trained_on(agent).union(*(marks(env, task) for task in tasks))
    (out / FILE).write_text(json.dumps(dict(tasks=sorted(tasks), marks=sorted(known))))


def check(run: Run) -> None:
    """Refused where an agent that the run begins from was trained on an evaluated task."""
    s, env = run.settings, run.env
    evaluated = {task: marks(env, task) for split in run.splits
                 for task in env.tasks(split)[:s.eval_tasks or None]}
    sources = {f"--model {s.model}": trained_on(run.base)}
    if s.failure_from:
        sources[f"--failure-from {s.failure_from}"] = trained_on(Path(s.failure_from))
    for source, known in sources.items():
        both = [task for task in evaluated if evaluated[task] & known]
        if both and s.overlap == "refuse":
            raise Refused(
                f"{len(both)} of {len(evaluated)} evaluated tasks are also trained on ({source}), "
                f"such as {', '.join(both[:3])}; evaluate others (--eval-tasks, --eval-splits, of "
                "a real server --split-file), or these all the same (--overlap keep)")
