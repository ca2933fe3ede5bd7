"""What an agent was trained on stands in its folder, and a run refuses to evaluate it on that."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coevolve import Run
from envs import Refused, World
from worlds import flags, plain
from worlds.files import hashed
from worlds.published import read_experts

FILE = "trained_on.json"  # in an agent's folder


@dataclass(frozen=True)
class Overlap(flags.Stated):
    overlap: Literal["refuse", "keep"] = "refuse"  # evaluated tasks that were trained on [ours]


def marks(env: World, task: str) -> set[str]:
    """Hashes by which a task is known in whatever split: of what it is, and of its instruction if
    that says so; none for a task that this environment does not have."""
    with suppress(ValueError):
        wording = plain("\n".join(env.wording(task)))
        return {hashed([env.name, mark]) for mark in (repr(env.find(task)), wording) if mark}
    return set()


def trained_on(agent: Path) -> set[str]:
    """`marks` of what the agent in a folder, and those it came from, were trained on."""
    file = agent / FILE
    return {*json.loads(file.read_text())["marks"]} if file.exists() else set()


def record(run: Run, out: Path, before: Path, tasks: Iterable[str], env: World = None) -> None:
    """Writes into an agent's folder what it and `before`, from which it came, were trained on.
    env: where it knows more tasks than the run's, as those made during a run."""
    if run.main:
        known = trained_on(before).union(*(marks(env or run.env, task) for task in {*tasks}))
        (out / FILE).write_text(json.dumps(dict(tasks=sorted({*tasks}), marks=sorted(known))))


def check(run: Run) -> None:
    """Refused where an evaluated task was trained on by an agent that the run begins from, or is a
    training task by another id; `collect_experts` leaves out those with the same id."""
    s, env = run.settings, run.env
    evaluated = {task: marks(env, task) for split in run.splits
                 for task in env.tasks(split)[:s.eval_tasks or None]}
    sources = {f"--model {s.model}": trained_on(run.base)}
    if s.failure_from:
        sources[f"--failure-from {s.failure_from}"] = trained_on(Path(s.failure_from))
    if s.method not in ("evaluate", "chat"):
        names = [e[0] for e in read_experts(s.experts, env)] if s.experts else env.tasks("train")
        sources[f"--experts {s.experts}" if s.experts else "the training split"] = set().union(*(
            marks(env, task) for task in names[:s.train_tasks or None] if task not in evaluated))
    for source, known in sources.items():
        both = [task for task in evaluated if evaluated[task] & known]
        if both and s.overlap == "refuse":
            raise Refused(
                f"{len(both)} of {len(evaluated)} evaluated tasks are also trained on ({source}), "
                f"such as {', '.join(both[:3])}; evaluate others (--eval-tasks, --eval-splits, of "
                "a real server --split-file), or these all the same (--overlap keep)")
