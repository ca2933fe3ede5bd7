"""The arms of a study: their settings, the pairs of arms that a report compares, and their runs.

An arm is a method with some settings. A study runs every arm with every seed.
"""

import itertools
import re
from collections import defaultdict
from pathlib import Path

from common.settings import FREE, UsageError, has_mark, names_in, settings_of
from evolve import SIGNALS
from lab.runfiles import config_of, phases_of, phases_with
from lab.settings import METHODS, Settings

# arm -> its settings. A value in braces is taken from the run of co-evolution or evolution with the
# same seed (see `taken_from`). `steps` is the mean number of optimiser steps of the target agent
# per iteration of co-evolution, `lambda_sft` is co-evolution's setting, and `tasks` is the number
# of tasks at the end of evolution.
FIRST = {
    "coevolve": "--method coevolve",
    "eto": "--method eto",
    "sft": "--method sft",
    "positive": "--method positive",
    "eto-steps": "--method eto --dpo-steps {steps}",
    # ETO with the other parts that the paper adds to DPO: the weights and SFT term of Section 4.3.
    "eto-sft": "--method eto --lambda-sft {lambda_sft} --pair-weights instruction",
    "eto-sft-steps": "--method eto --lambda-sft {lambda_sft} --pair-weights instruction "
                     "--dpo-steps {steps}",
    "positive-steps": "--method positive --dpo-steps {steps}",
    "frozen": "--method coevolve --d-fail none",
    "after": "--method coevolve --failure-plays after",
    # One rollout per task, as in the paper.
    "eto-one": "--method eto --rollouts 1",
    "coevolve-one": "--method coevolve --rollouts 1",
    "rft": "--method rft",
    "dart": "--method dart",
    "ppo": "--method ppo"}
# Arms of the second system, `evolve.py`, and their controls. A study of them should include SFT.
SECOND = {
    "grpo": "--method grpo",
    "evolve": "--method evolve",
    "grpo-tasks": "--method grpo --start-tasks {tasks}",
    "evolve-random": "--method evolve --guide random",
    **{f"evolve-only-{signal}": f"--method evolve --signals {signal}" for signal in SIGNALS}}
ARMS = FIRST | SECOND
# (a, b): a report prints by how much arm a is ahead of arm b.
COMPARED = [
    *itertools.product(["coevolve"], FIRST), *itertools.product([*FIRST, "grpo"], ["sft"]),
    # These show the effect of the SFT term, of a second agent's rollouts, and of that agent's kind.
    ("eto-sft", "eto"), ("eto-sft-steps", "eto-steps"), ("frozen", "eto-sft-steps"),
    ("positive", "eto-sft"), ("frozen", "eto-sft"),
    # These show the effect of when the failure agent plays, and of a single rollout per task.
    ("after", "eto"), ("after", "eto-sft-steps"), ("after", "frozen"), ("after", "positive"),
    ("coevolve-one", "eto-one"),
    *itertools.product(["evolve"], [*SECOND, "sft"])]


def method_of(arm: str) -> str:
    """Returns the --method of an arm, such as "positive" for positive-steps."""
    return ARMS[arm].split()[1]


# ------------------------------------------------------------------- the settings of a run


def needed_by(arm: str) -> list[str]:
    """Returns a list of the arm that the values in braces are taken from. It is empty if this arm
    has no values in braces."""
    if "{tasks}" in ARMS[arm]:
        return ["evolve"]
    return ["coevolve"] if "{" in ARMS[arm] else []


def flags(arm: str, folder: Path, seed: int) -> list[str]:
    """Returns the settings of a run of an arm, as flags and values. `folder` is the study's."""
    values = {}
    for other in needed_by(arm):
        values = taken_from(folder / f"{other}-s{seed}")
    return ARMS[arm].format(**values).split()


def taken_from(run: Path) -> dict:
    """Returns the values for the braces in `ARMS` from a run of co-evolution or evolution."""
    phases = phases_of(run)
    tasks = task_counts(phases)
    if tasks:
        return dict(tasks=tasks[-1])
    steps = [row["steps"] for row in training_phases(phases, "target")]
    if not sum(steps):
        raise UsageError(f"{run}: the target was not trained in this run; finish it before you "
                         "start the runs with the same number of steps")
    return dict(steps=max(1, round(sum(steps) / len(steps))),
                lambda_sft=config_of(run)["settings"]["lambda_sft"])


def task_counts(phases: dict) -> list[int]:
    """Returns the number of tasks that GRPO trained on, at the start and after each evolution."""
    rows = phases_with(phases, "tasks")
    return [row["tasks"] for row in rows if row["output"].endswith("tasks.jsonl")]


def training_phases(phases: dict, agent: str = "") -> list[dict]:
    """Returns the records of the training phases after the first SFT, of all agents, or of the
    agent with this recorded name. Phases of `evolve.py` record no name and train the target."""
    rows = [row for row in phases_with(phases, "steps", "seconds") if row["i"] > 0]
    return [row for row in rows if isinstance(row["steps"], int)
            and not row["output"].endswith(".jsonl") and agent in ("", row.get("name", "target"))]


# ---------------------------------------------------------------------- the runs of a report

# arm, or a name that the user gives -> seed -> folder. If a run reused outputs of a run with
# another seed (--branch), its key is the text "OTHER>SEED" instead of its seed.
Runs = dict[str, dict[int | str, Path]]


def arm_of(run: Path) -> str:
    """Returns the arm of a run of a study, which its folder is named after. For other runs, returns
    the method."""
    arm = run.resolve().name.rpartition("-s")[0]
    return arm if arm in ARMS else config_of(run)["settings"]["method"]


def named(given: list[tuple[str, Path]]) -> Runs:
    """Groups (name, folder) by name and seed. The runs may have any settings and may be unfinished.
    Raises UsageError if the environments differ, or if two runs have the same name and seed."""
    runs = defaultdict(dict)
    envs = {}  # environment -> its first run
    for name, path in given:
        config = config_of(path)
        settings = config["settings"]
        envs.setdefault(settings["env"], path)
        if len(envs) > 1:
            (env, first), (other, _) = envs.items()
            raise UsageError(f"{path} is a run of {other}, and {first} of {env}; compare runs of "
                             "one environment")
        seed = settings["seed"]
        first_seed = config.get("branch", {}).get("seed", seed)
        if first_seed != seed:  # paired only with runs that changed the seed in the same way
            seed = f"{first_seed}>{seed}"
        other = runs[name].setdefault(seed, path)
        if other is not path:
            raise UsageError(f"{path} and {other} are both {name} with seed {seed}; leave one out, "
                             "or give each run a name: NAME=RUN NAME=RUN")
    ordered = {}
    for name, by_seed in runs.items():
        seeds = sorted(by_seed, key=lambda seed: (isinstance(seed, str), seed))
        ordered[name] = {seed: by_seed[seed] for seed in seeds}
    return ordered


def finished(folder: Path) -> Runs:
    """Returns the finished runs of a study, in the order of ARMS. Raises UsageError if two runs
    differ in a setting that both read and that neither arm sets."""
    runs = {}
    first = {}  # setting -> (the first run that reads it, its value)
    for arm in ARMS:
        paths = [file.parent for file in folder.glob(f"{arm}-s[0-9]*/result.json")]
        # Settings that the arm sets, or does not read.
        own = {name.replace("-", "_") for name in re.findall(r"--(\S+)", ARMS[arm])}
        own |= Settings.presets.get(f"--method {method_of(arm)}", {}).keys()
        own |= settings_of(Settings).keys() - names_in(METHODS[method_of(arm)].reads)
        for path in paths:
            settings = config_of(path)["settings"]
            for name in sorted(relevant({*settings}) - own):
                other, value = first.setdefault(name, (path, settings[name]))
                if settings[name] != value:
                    raise UsageError(f"{path} and {other} differ in {name} ({settings[name]}, "
                                     f"{value}), but the runs of a study may differ only in method "
                                     "and seed; `run.sh compare` reports on any runs")
        runs |= named([(arm, path) for path in paths])
    return runs


def relevant(names: set[str]) -> set[str]:
    """Returns those settings that change more than rounding, without the seed."""
    return {name for name in names if not has_mark(Settings, name, FREE)} - {"seed"}


def setting_differences(runs: Runs) -> list[tuple[str, str, str]]:
    """Returns (setting, name, values over the seeds) of each relevant setting in which the runs
    differ."""
    settings = {}  # name -> the settings of its runs
    for name, by_seed in runs.items():
        settings[name] = [config_of(path)["settings"] for path in by_seed.values()]
    keys = dict.fromkeys(itertools.chain(*itertools.chain(*settings.values())))
    rows = []
    for key in keys:
        values = {}
        for name, of_runs in settings.items():
            values[name] = ", ".join(dict.fromkeys(str(s.get(key, "-")) for s in of_runs))
        if len({*values.values()}) > 1 and key in relevant({*keys}):
            rows += [(key, name, value) for name, value in values.items()]
    return rows
