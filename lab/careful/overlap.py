"""What an agent of the careful run was trained on, and how it played, stands in its folder: a run
refuses to evaluate it on what it was trained on, and plays it as it was trained.

The plain core and `learn` write no such file: of their agents nothing is refused. How one of the
plain core played stands in the run that it is in.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_origin

from coevolve import Run
from common.files import hashed, read_json, read_jsonl, write_json
from common.settings import Stated, flag, settings_of
from envs import Refused, World, environment
from evolve import env_with

FILE = "trained_on.json"  # in an agent's folder
# How an agent was trained to play, beside its environment's own settings.
PLAYED_WITH = ("view", "max_tokens", "max_new_tokens")


@dataclass(frozen=True)
class Overlap(Stated):
    """Evaluation of what was trained on"""
    # What becomes of a run that would evaluate tasks which its model was trained on [ours]
    overlap: Literal["refuse", "keep"] = "refuse"


def marks(env: World, task: str) -> set[str]:
    """The hash by which a task is known in whatever split; none for one that the world lacks."""
    with suppress(ValueError):
        return {hashed([env.name, repr(env.find(task))])}
    return set()


def trained_on(agent: Path) -> set[str]:
    """`marks` of what the agent in a folder, and those it came from, were trained on."""
    file = agent / FILE
    return set(read_json(file)["marks"]) if file.exists() else set()


def record(run: Run, out: Path, *inputs) -> None:
    """Writes into an agent's folder what it, and those it came from, were trained on, and how it
    played. inputs: those of its phase; in a file of D an added task is defined."""
    known = set()
    rows = []
    for path in paths_in(inputs):
        if path.is_dir():
            known |= trained_on(path)
        elif path.is_file():
            rows += [row for row in read_jsonl(path) if "task" in row]
    env = env_with(run, rows)
    tasks = {row["task"] for row in rows}
    for task in tasks:
        known |= marks(env, task)
    write_json(out / FILE, dict(tasks=sorted(tasks), marks=sorted(known), played=played_with(
        vars(run.settings) | vars(run.options))))


def played_with(values: dict) -> dict:
    """How an agent plays, of all settings of its run. Of an environment's settings that are texts,
    which name files and addresses, the value is None: they are somewhere else for somebody else."""
    options = settings_of(environment(values["env"]))
    found = {}
    for name in ("env", *PLAYED_WITH, *options):
        value = values.get(name)
        if value is None:
            continue
        found[name] = value
        if name in options and is_text(options[name].kind):
            found[name] = None
    return found


def is_text(kind) -> bool:
    """Whether values of this type are no numbers, and none of some words."""
    return kind not in (bool, int, float) and get_origin(kind) is not Literal


def way_of(agent: Path, env: str) -> dict:
    """`played_with` of an agent in its own environment: what stands in its folder, else, of an
    agent of the plain core, in the run that it is in. Nothing, if it is another's agent, or none;
    and no setting that there is not any more."""
    found = {}
    if (agent / FILE).exists():
        found = read_json(agent / FILE).get("played", {})
    elif agent.is_dir():
        for folder in agent.resolve().parents[:2]:
            if (folder / "phases.json").exists() and (folder / "config.json").exists():
                found = played_with(read_json(folder / "config.json")["settings"])
    if found.get("env") != env:
        return {}
    known = (*PLAYED_WITH, *settings_of(environment(env)))
    return {name: found[name] for name in known if name in found}


def flags_of(values: dict) -> list[str]:
    """The flags that give settings these values; none for None."""
    return [f"{flag(name)}={value}" for name, value in values.items() if value is not None]


def paths_in(inputs) -> list[Path]:
    """All paths in lists and dictionaries of them."""
    if isinstance(inputs, Path):
        return [inputs]
    found = []
    for part in inputs.values() if isinstance(inputs, dict) else inputs:
        found += paths_in(part)
    return found


def check(run: Run) -> None:
    """Refused where an agent that the run begins from was trained on an evaluated task."""
    s = run.settings
    env = run.env
    evaluated = {}  # task -> its marks
    for split in run.splits:
        for task in env.tasks(split)[:s.eval_tasks or None]:
            evaluated[task] = marks(env, task)
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
