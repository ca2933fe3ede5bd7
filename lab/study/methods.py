"""The arms of a study: the settings that make each, what each is compared with, and their runs."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import coevolve
import evolve
from common.settings import FREE, Refused, has_mark, names_in, settings_of
from evolve import SIGNALS
from lab import baselines
from lab.runfiles import config_of, phases_of, that_found

# arm -> its settings. In braces stands what another run of the seed says (`taken_from`): `steps`,
# as many optimiser steps of the target as co-evolution took; `lambda_sft`, its own; `tasks`, as
# many as evolution ended with.
FIRST = {
    "coevolve": "--method coevolve",
    "eto": "--method eto",
    "sft": "--method sft",
    "positive": "--method positive",
    "eto-steps": "--method eto --dpo-steps {steps}",
    # ETO with what the paper adds to DPO beside a second agent: Section 4.3's weights and SFT term.
    "eto-sft": "--method eto --lambda-sft {lambda_sft} --pair-weights instruction",
    "eto-sft-steps": "--method eto --lambda-sft {lambda_sft} --pair-weights instruction "
                     "--dpo-steps {steps}",
    "positive-steps": "--method positive --dpo-steps {steps}",
    "frozen": "--method coevolve --d-fail none",
    "rft": "--method rft",
    "dart": "--method dart",
    "ppo": "--method ppo"}
# Of the second system, `evolve.py`, with its controls; for a study of their own, beside SFT.
SECOND = {
    "grpo": "--method grpo",
    "evolve": "--method evolve",
    "grpo-tasks": "--method grpo --start-tasks {tasks}",
    "evolve-random": "--method evolve --guide random",
    **{f"evolve-only-{signal}": f"--method evolve --signals {signal}" for signal in SIGNALS}}
ARMS = FIRST | SECOND
# (a, b): a report says by how much a is ahead of b.
COMPARED = [
    *itertools.product(["coevolve"], FIRST), *itertools.product([*FIRST, "grpo"], ["sft"]),
    # What each part adds: the SFT term, a second agent's rollouts; who that agent is.
    ("eto-sft", "eto"), ("eto-sft-steps", "eto-steps"), ("frozen", "eto-sft-steps"),
    ("positive", "eto-sft"), ("frozen", "eto-sft"),
    *itertools.product(["evolve"], [*SECOND, "sft"])]
METHODS = coevolve.METHODS | evolve.METHODS | baselines.METHODS


@dataclass(frozen=True)
class Settings(baselines.Baselines, evolve.Settings):
    """Every setting of these methods"""


def method_of(arm: str) -> str:
    """--method of a run in the study: `positive` of positive-steps."""
    return ARMS[arm].split()[1]


# ------------------------------------------------------------------------ what makes a run


def needed_by(arm: str) -> list[str]:
    """The arm whose run says what this one takes, if it takes anything."""
    if "{tasks}" in ARMS[arm]:
        return ["evolve"]
    return ["coevolve"] if "{" in ARMS[arm] else []


def flags(arm: str, folder: Path, seed: int) -> list[str]:
    """The settings that make a run of an arm in a study's folder."""
    said = {}
    for other in needed_by(arm):
        said = taken_from(folder / f"{other}-s{seed}")
    return ARMS[arm].format(**said).split()


def taken_from(run: Path) -> dict:
    """What `ARMS` has in braces, of a run of co-evolution or evolution."""
    phases = phases_of(run)
    tasks = task_counts(phases)
    if tasks:
        return dict(tasks=tasks[-1])
    steps = [row["steps"] for row in trained(phases, "target")]
    if not sum(steps):
        raise Refused(f"{run}: the target was not trained in it; let this run finish before those "
                      "at equal cost")
    return dict(steps=max(1, round(sum(steps) / len(steps))),
                lambda_sft=config_of(run)["settings"]["lambda_sft"])


def task_counts(phases: dict) -> list[int]:
    """How many tasks GRPO trained on, by evolution: those at the start, and so on."""
    found = that_found(phases, "tasks")
    return [row.get("D", row["tasks"]) for row in found if row["output"].endswith("tasks.jsonl")]


def trained(phases: dict, agent: str = "") -> list[dict]:
    """The training phases after the first SFT, of all agents or one."""
    found = that_found(phases, "steps")
    return [row for row in found if re.fullmatch(rf"iter\d+/.*{agent}-agent", row["output"])]


# ----------------------------------------------------------------------- which runs there are
# arm, or a name of the user's -> seed -> folder.
Runs = dict[str, dict[int, Path]]


def finished(folder: Path) -> Runs:
    """The finished runs of a study."""
    paths = []
    for path in folder.glob("*-s[0-9]*"):
        if path.name.rpartition("-s")[0] in ARMS and (path / "result.json").exists():
            paths.append(path)
    return chosen(paths)


def chosen(paths: list[Path]) -> Runs:
    """Finished runs by arm: that of the folder's name where a study made it, else their method.
    Refused if they differ in more than seed and method."""
    given = []
    for path in paths:
        method = config_of(path)["settings"]["method"]
        if not (path / "result.json").exists():
            raise Refused(f"{path} has not finished; the command that began it goes on from "
                          "there, and NAME=RUN compares what is there")
        arm = path.resolve().name.rpartition("-s")[0]
        if arm not in ARMS or method_of(arm) != method:
            arm = method
        given.append((arm, path))
    runs = named(given)
    check_alike(runs)
    order = [*ARMS, *sorted(runs)]
    return dict(sorted(runs.items(), key=lambda item: order.index(item[0])))


def named(given: list[tuple[str, Path]]) -> Runs:
    """Runs under names, or else of their methods; whatever their settings are, and whether or not
    they have finished."""
    runs = defaultdict(dict)
    for name, path in given:
        settings = config_of(path)["settings"]
        by_seed = runs[name or settings["method"]]
        other = by_seed.setdefault(settings["seed"], path)
        if other is not path:
            raise Refused(f"{path} and {other} are both {name or settings['method']} with seed "
                          f"{settings['seed']}; leave one out, or give each a name of its own: "
                          "NAME=RUN NAME=RUN")
    return {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items()}


def check_alike(runs: Runs) -> None:
    """Refused where runs differ in a setting that both read, but for what is an arm's own."""
    first = {}  # setting -> the first run that reads it, and its value
    for arm, by_seed in runs.items():
        own = {name.replace("-", "_") for name in re.findall(r"--(\S+)", ARMS.get(arm, ""))}
        for path in by_seed.values():
            made = config_of(path)["settings"]
            own |= Settings.presets.get(f"--method {made['method']}", {}).keys()
            for name in sorted(counting(made) - own - unread(made["method"]) - {"method"}):
                other, before = first.setdefault(name, (path, made[name]))
                if made[name] != before:
                    raise Refused(f"{path} and {other} differ in {name} ({made[name]}, {before}); "
                                  "a report is on runs that differ in method and seed; of others "
                                  "give compare the names, NAME=RUN NAME=RUN")


def counting(names: Iterable[str]) -> set[str]:
    """Those settings that change more than rounding, but for the seed."""
    return {name for name in names if not has_mark(Settings, name, FREE)} - {"seed"}


def unread(method: str) -> set[str]:
    """The settings that a --method does not read; none, as far as is known, of a fork's own."""
    if method not in METHODS:
        return set()
    return settings_of(Settings).keys() - names_in(METHODS[method].reads)


def differences(runs: Runs) -> list[tuple[str, str, str]]:
    """(setting, name, its values over the seeds) where runs differ in a setting that changes more
    than rounding."""
    made = {}  # name -> the settings of its runs
    for name, by_seed in runs.items():
        made[name] = [config_of(path)["settings"] for path in by_seed.values()]
    every = {}
    for settings in itertools.chain(*made.values()):
        every |= settings
    found = []
    for key in every:
        values = {}
        for name, of_name in made.items():
            values[name] = ", ".join(dict.fromkeys(str(s.get(key, "-")) for s in of_name))
        if len({*values.values()}) > 1 and key in counting(every):
            found += [(key, name, value) for name, value in values.items()]
    return found
