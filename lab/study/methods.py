"""Defines the arms of a study. An arm is a method with some settings, and a study runs every arm
with every seed.

This file contains the settings of each arm, the list of arms that a report compares with each
other, and functions that find and check the runs of each arm.
"""

import itertools
import re
from collections import defaultdict
from pathlib import Path

from common.settings import FREE, UsageError, names_in, settings_of
from evolve import SIGNALS
from lab.runfiles import config_of, phases_of, phases_with, target_of
from lab.settings import METHODS, Settings

# ETO with the pair weights and the SFT term that the paper adds to DPO in Section 4.3.
ETO_SFT = "--method eto --lambda-sft {lambda_sft} --pair-weights instruction"
# The settings of each arm of the first system, coevolve.py. A value in braces is taken from the
# `coevolve` or `evolve` run with the same seed (see `taken_from`):
# - {steps}: optimiser steps of the target agent per iteration, averaged over the `coevolve` run
# - {lambda_sft}: value of --lambda-sft in the `coevolve` run, unless --eto-lambda-sft is given
# - {tasks}: number of tasks at the end of the `evolve` run
FIRST = {
    "coevolve": "--method coevolve",
    "eto": "--method eto",
    "sft": "--method sft",
    "positive": "--method positive",
    "eto-steps": "--method eto --dpo-steps {steps}",
    "eto-sft": ETO_SFT,
    "eto-sft-steps": f"{ETO_SFT} --dpo-steps {{steps}}",
    "positive-steps": "--method positive --dpo-steps {steps}",
    "frozen": "--method coevolve --d-fail none",
    "after": "--method coevolve --failure-plays after",
    # One rollout per task and iteration, as in the paper.
    "eto-one": "--method eto --rollouts 1",
    "eto-sft-one": f"{ETO_SFT} --rollouts 1",
    "positive-one": "--method positive --rollouts 1",
    "coevolve-one": "--method coevolve --rollouts 1",
    "rft": "--method rft",
    "dart": "--method dart",
    "ppo": "--method ppo"}
# The settings of each arm of the second system, evolve.py: GRPO, evolution, and control experiments
# for evolution. A study of these arms should include the arm "sft", because the report compares
# each of them with "sft".
SECOND = {
    "grpo": "--method grpo",
    "evolve": "--method evolve",
    "grpo-tasks": "--method grpo --start-tasks {tasks}",
    "evolve-random": "--method evolve --guide random",
    "evolve-unverified": "--method evolve --verify false",
    **{f"evolve-only-{signal}": f"--method evolve --signals {signal}" for signal in SIGNALS}}
ARMS = FIRST | SECOND
# The primary comparisons of a study. They compare rewards on `test`, and their p-values are
# corrected for multiple tests. Baselines of the paper are compared with one rollout per task, as in
# the paper.
PRIMARY = [("coevolve-one", "eto-one"), ("coevolve", "eto-sft-steps"),
           ("coevolve-one", "positive-one"), ("coevolve", "frozen")]
# Pairs of arms (a, b). A report prints the difference a - b of each pair.
COMPARED = [
    *PRIMARY,
    *itertools.product(["coevolve"], FIRST), *itertools.product([*FIRST, "grpo"], ["sft"]),
    # These pairs show the effects of the SFT term, of rollouts from a second agent, and of the kind
    # of second agent.
    ("eto-sft", "eto"), ("eto-sft-steps", "eto-steps"), ("frozen", "eto-sft-steps"),
    ("positive", "eto-sft"), ("frozen", "eto-sft"),
    # These pairs show two effects: of a failure agent that learns before it plays for the target
    # (--failure-plays after), and of a single rollout per task.
    ("after", "eto"), ("after", "eto-sft-steps"), ("after", "frozen"), ("after", "positive"),
    ("coevolve-one", "eto-sft-one"), ("eto-sft-one", "eto-one"),
    *itertools.product(["evolve"], [*SECOND, "sft"])]
COMPARED = [(a, b) for a, b in dict.fromkeys(COMPARED) if a != b]


def method_of(arm: str) -> str:
    """Returns the --method of an arm, such as "positive" for "positive-steps"."""
    return ARMS[arm].split()[1]


# ------------------------------------------------------------------- the settings of a run


def needed_by(flags: str) -> list[str]:
    """Returns the arms whose runs must finish before a run with these flags can start. Values in
    braces come from a run of at most one other arm."""
    if "{tasks}" in flags:
        return ["evolve"]
    return ["coevolve"] if "{" in flags else []


def filled(flags: str, folder: Path, seed: int) -> list[str]:
    """Returns the flags of an arm for the run with this seed. Values in braces come from the
    finished runs in the study's `folder`."""
    values = {}
    for other in needed_by(flags):
        values = taken_from(folder / f"{other}-s{seed}")
    return flags.format(**values).split()


def taken_from(run: Path) -> dict:
    """Returns the values that replace the braces in `ARMS`, computed from a `coevolve` or `evolve`
    run. The keys are "steps" and "lambda_sft", or "tasks" for an `evolve` run."""
    phases = phases_of(run)
    tasks = task_counts(phases)
    if tasks:
        return dict(tasks=tasks[-1])
    steps = [row["steps"] for row in training_phases(phases) if is_target(row, phases)]
    if not sum(steps):
        raise UsageError(f"{run}: the target was not trained in this run; finish it before you "
                         "start the runs with the same number of steps")
    return dict(steps=max(1, round(sum(steps) / len(steps))),
                lambda_sft=config_of(run)["settings"]["lambda_sft"])


def task_counts(phases: dict) -> list[int]:
    """Returns the sizes of GRPO's task set, at the start and after each evolution phase. The list
    is empty for methods of coevolve.py, which have no such task set."""
    return [row["tasks"] for row in phases_with(phases, "tasks")
            if row["output"].endswith("tasks.jsonl")]


def training_phases(phases: dict) -> list[dict]:
    """Returns the records of the training phases after the initial SFT phase."""
    return [row for row in phases_with(phases, "steps", "seconds")
            if row["i"] > 0 and isinstance(row["steps"], int)
            and not row["output"].endswith(".jsonl")]


def is_target(row: dict, phases: dict) -> bool:
    """Returns True if a phase trained or played the target. A record without a name is from
    `evolve.py`, whose only agent is the target."""
    target = target_of(phases)
    return row.get("name", target) == target


# ---------------------------------------------------------------------- the runs of a report

# The folders of the runs in one environment, as runs[arm][seed]. The arm may be a name that the
# user chose. A run that was branched from a run with a different seed (--branch) has the key
# "OTHER>SEED" instead of its seed.
Runs = dict[str, dict[int | str, Path]]


def each(runs: Runs):
    """Yields (arm, seed, folder) of each run."""
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            yield arm, seed, run


def arm_of(run: Path) -> str:
    """Returns the arm of a run whose folder is called ARM-sSEED, and the method of any other run.
    """
    arm = run.resolve().name.rpartition("-s")[0]
    return arm if arm in ARMS else config_of(run)["settings"]["method"]


def grouped(given: list[tuple[str, Path]]) -> dict[str, Runs]:
    """Groups runs, given as (name, folder), by environment, name and seed.

    The runs may have any settings, and may be unfinished. Raises UsageError if two runs in an
    environment evaluate different splits, or have the same name and seed.
    """
    envs = defaultdict(lambda: defaultdict(dict))
    splits = {}  # environment -> (its first run, --eval-splits of this run)
    for name, path in given:
        config = config_of(path)
        settings = config["settings"]
        env = settings["env"]
        evaluated = settings.get("eval_splits")
        first, others = splits.setdefault(env, (path, evaluated))
        if evaluated != others:
            raise UsageError(f"{path} has --eval-splits {evaluated}, and {first} {others}; compare "
                             "runs that evaluate the same splits")
        seed = settings["seed"]
        first_seed = config.get("branch", {}).get("seed", seed)
        # A branch may reuse outputs of a run with a different seed. The branch is then compared
        # only with runs that have the same two seeds.
        if first_seed != seed:
            seed = f"{first_seed}>{seed}"
        other = envs[env][name].setdefault(seed, path)
        if other is not path:
            raise UsageError(f"{path} and {other} are both {name} with seed {seed}; leave one out, "
                             "or give each run a name: NAME=RUN NAME=RUN")
    return envs


def finished(folder: Path) -> dict[str, Runs]:
    """Returns the finished runs of a study. Raises UsageError if two runs have different values of
    a setting that both use. Settings of an arm, or of the preset of its method, are compared only
    between the seeds of this arm."""
    given = []
    first = {}  # (arm or "", setting) -> (first run that uses the setting, its value)
    for arm, flags in ARMS.items():
        own = {name.replace("-", "_") for name in re.findall(r"--(\S+)", flags)}
        own |= Settings.presets.get(f"--method {method_of(arm)}", {}).keys()
        varying = own & {"dpo_steps", "start_tasks"}  # taken from another run with the same seed
        for file in sorted(folder.glob(f"{arm}-s[0-9]*/result.json")):
            path = file.parent
            settings = config_of(path)["settings"]
            for name in sorted({*settings} - varying - ignored(settings)):
                key = (arm if name in own else "", name)
                other, value = first.setdefault(key, (path, settings[name]))
                if settings[name] != value:
                    raise UsageError(f"{path} and {other} differ in {name} ({settings[name]}, "
                                     f"{value}), but the runs of a study may differ only in method "
                                     "and seed; `run.sh compare` reports on any runs")
            given.append((arm, path))
    return grouped(given)


def ignored(settings: dict) -> set[str]:
    """Returns the names of settings that cannot explain a difference between two runs: the seed,
    settings marked as Free, which affect at most rounding, and settings that the method does not
    read. Settings that only a modified copy of the program declares are never ignored, and its
    methods count as reading every setting."""
    method = METHODS.get(settings["method"])
    reads = names_in(method.reads) if method else {*settings}
    return {"seed"} | {name for name, declared in settings_of(Settings).items()
                       if name not in reads or FREE in declared.marks}


def setting_differences(runs: Runs) -> list[tuple[str, str, str]]:
    """Returns the settings in which arms differ, as tuples (setting, arm, the arm's values as
    text).

    A setting is compared between the arms whose methods read it. In the other arms, and in runs
    whose program did not have the setting, its value is "-". A setting is left out if, in every
    run, it equals the setting that it follows.
    """
    settings = {}  # arm -> settings of each of its runs
    for arm, by_seed in runs.items():
        settings[arm] = [config_of(run)["settings"] for run in by_seed.values()]
    of_all_runs = list(itertools.chain(*settings.values()))
    keys = dict.fromkeys(itertools.chain(*of_all_runs))
    for name, declared in settings_of(Settings).items():
        if all(map(declared.has_followed, of_all_runs)):
            keys.pop(name, None)
    rows = []
    for key in keys:
        values = {}  # arm -> its values, "" if its method does not read the setting
        for arm, of_runs in settings.items():
            texts = [str(s.get(key, "-")) for s in of_runs if key not in ignored(s)]
            values[arm] = ", ".join(dict.fromkeys(texts))
        if len({*values.values()} - {""}) > 1:
            rows += [(key, arm, value or "-") for arm, value in values.items()]
    return rows
