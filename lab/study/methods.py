"""Defines the arms of a study. An arm is a method with some settings, and a study runs every arm
with every seed.

This file has the settings of each arm, the list of arms that a report compares with each other, and
functions that find and check the runs of each arm.
"""

import itertools
import re
from collections import defaultdict
from pathlib import Path

from common.settings import FREE, UsageError, has_mark, names_in, settings_of
from evolve import SIGNALS
from lab.runfiles import config_of, phases_of, phases_with
from lab.settings import METHODS, Settings

# The settings of each arm of the first system, coevolve.py. A value in braces is taken from the
# `coevolve` or `evolve` run with the same seed (see `taken_from`):
# - {steps}: optimiser steps of the target agent per iteration, averaged over the `coevolve` run
# - {lambda_sft}: value of --lambda-sft in the `coevolve` run
# - {tasks}: number of tasks at the end of the `evolve` run
FIRST = {
    "coevolve": "--method coevolve",
    "eto": "--method eto",
    "sft": "--method sft",
    "positive": "--method positive",
    "eto-steps": "--method eto --dpo-steps {steps}",
    # ETO with the pair weights and the SFT term of Section 4.3, which the paper also adds to DPO.
    "eto-sft": "--method eto --lambda-sft {lambda_sft} --pair-weights instruction",
    "eto-sft-steps": "--method eto --lambda-sft {lambda_sft} --pair-weights instruction "
                     "--dpo-steps {steps}",
    "positive-steps": "--method positive --dpo-steps {steps}",
    "frozen": "--method coevolve --d-fail none",
    "after": "--method coevolve --failure-plays after",
    # One rollout per task and iteration, as in the paper.
    "eto-one": "--method eto --rollouts 1",
    "coevolve-one": "--method coevolve --rollouts 1",
    "rft": "--method rft",
    "dart": "--method dart",
    "ppo": "--method ppo"}
# The settings of each arm of the second system, evolve.py: GRPO, evolution, and control experiments
# for evolution. A study of these arms should include the arm "sft", because the report compares
# each of them with it.
SECOND = {
    "grpo": "--method grpo",
    "evolve": "--method evolve",
    "grpo-tasks": "--method grpo --start-tasks {tasks}",
    "evolve-random": "--method evolve --guide random",
    **{f"evolve-only-{signal}": f"--method evolve --signals {signal}" for signal in SIGNALS}}
ARMS = FIRST | SECOND
# Pairs of arms (a, b). A report prints the difference a - b of each pair.
COMPARED = [
    *itertools.product(["coevolve"], FIRST), *itertools.product([*FIRST, "grpo"], ["sft"]),
    # These pairs show the effects of the SFT term, of rollouts from a second agent, and of the kind
    # of second agent.
    ("eto-sft", "eto"), ("eto-sft-steps", "eto-steps"), ("frozen", "eto-sft-steps"),
    ("positive", "eto-sft"), ("frozen", "eto-sft"),
    # These pairs show two effects: of a failure agent that learns before it plays for the target
    # (--failure-plays after), and of a single rollout per task.
    ("after", "eto"), ("after", "eto-sft-steps"), ("after", "frozen"), ("after", "positive"),
    ("coevolve-one", "eto-one"),
    *itertools.product(["evolve"], [*SECOND, "sft"])]


def method_of(arm: str) -> str:
    """Returns the value of --method in an arm's settings. It is "positive" for the arm
    "positive-steps"."""
    return ARMS[arm].split()[1]


# ------------------------------------------------------------------- the settings of a run


def needed_by(arm: str) -> list[str]:
    """Returns the arms whose runs must finish before this arm's run can start.

    If a setting of this arm is in braces, its value comes from a finished run of another arm. There
    is at most one such arm.
    """
    if "{tasks}" in ARMS[arm]:
        return ["evolve"]
    return ["coevolve"] if "{" in ARMS[arm] else []


def flags(arm: str, folder: Path, seed: int) -> list[str]:
    """Returns the command-line flags for the run of an arm with a seed. Values in braces are
    replaced with their values from the finished runs in the study's `folder`."""
    values = {}
    for other in needed_by(arm):
        values = taken_from(folder / f"{other}-s{seed}")
    return ARMS[arm].format(**values).split()


def taken_from(run: Path) -> dict:
    """Returns the values that replace the braces in `ARMS`, computed from a `coevolve` or `evolve`
    run. The keys are "steps" and "lambda_sft", or "tasks" for an `evolve` run."""
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
    """Returns the sizes of GRPO's task set, at the start and after each evolution phase. The list
    is empty for methods of coevolve.py, which have no such task set."""
    rows = phases_with(phases, "tasks")
    return [row["tasks"] for row in rows if row["output"].endswith("tasks.jsonl")]


def training_phases(phases: dict, agent: str = "") -> list[dict]:
    """Returns the records of the training phases after the initial SFT phase.

    Args:
        phases: The phases of a run.
        agent: Name of the agent that the phases train; "" returns the phases of all agents. The
            phases of `evolve.py` record no name, and count as phases of the target agent.
    """
    rows = [row for row in phases_with(phases, "steps", "seconds") if row["i"] > 0]
    return [row for row in rows if isinstance(row["steps"], int)
            and not row["output"].endswith(".jsonl") and agent in ("", row.get("name", "target"))]


# ---------------------------------------------------------------------- the runs of a report

# The folders of runs, as runs[arm][seed]. The arm may be a name that the user chose. A run that was
# branched from a run with another seed (--branch) has the key "OTHER>SEED" instead of its seed.
Runs = dict[str, dict[int | str, Path]]


def each(runs: Runs):
    """Yields (arm, seed, folder) of each run."""
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            yield arm, seed, run


def arm_of(run: Path) -> str:
    """Returns the arm of a run. The folder of a study's run is called ARM-sSEED. If the name of a
    folder does not begin with an arm, the run's method is returned instead."""
    arm = run.resolve().name.rpartition("-s")[0]
    return arm if arm in ARMS else config_of(run)["settings"]["method"]


def named(given: list[tuple[str, Path]]) -> Runs:
    """Groups runs, given as (name, folder), by name and seed. The runs may have any settings, and
    may be unfinished. Raises UsageError if the runs use different environments, or if two runs
    have the same name and seed."""
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
        # The outputs that a branch reused may have another seed. Such a run is compared only with
        # runs that have the same two seeds.
        if first_seed != seed:
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
    """Returns the finished runs of a study, in the order of ARMS.

    Raises UsageError if two runs have different values of a setting that both use. Settings that
    define the arm, such as --method, may differ.
    """
    runs = {}
    first = {}  # setting -> (first run that uses the setting, value of the setting in this run)
    for arm in ARMS:
        paths = [file.parent for file in folder.glob(f"{arm}-s[0-9]*/result.json")]
        # The runs of a study must have equal settings. These settings are exceptions: the arm sets
        # them, the preset of its method sets them, or its method does not use them.
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
    """Returns the names of settings that affect the results. The seed is left out, and so are
    settings marked as Free, which affect at most rounding."""
    return {name for name in names if not has_mark(Settings, name, FREE)} - {"seed"}


def setting_differences(runs: Runs) -> list[tuple[str, str, str]]:
    """Returns the relevant settings in which the named groups of runs differ. Each such setting has
    one tuple per group: (setting, name of the group, its values as text)."""
    settings = {}  # name of a group -> settings of each of its runs
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
