"""The arms of a study: the settings that make each, what each is compared with, and their runs."""

import itertools
import re
from collections import defaultdict
from pathlib import Path

from common.settings import FREE, UsageError, has_mark, names_in, settings_of
from evolve import SIGNALS
from lab.runfiles import config_of, phases_of, that_found
from lab.settings import METHODS, Settings

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
    "after": "--method coevolve --failure-plays after",
    # One rollout per task, as in the paper.
    "eto-one": "--method eto --rollouts 1",
    "coevolve-one": "--method coevolve --rollouts 1",
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
    # When the failure agent plays; and with one rollout.
    ("after", "eto"), ("after", "eto-sft-steps"), ("after", "frozen"), ("after", "positive"),
    ("coevolve-one", "eto-one"),
    *itertools.product(["evolve"], [*SECOND, "sft"])]


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
        raise UsageError(f"{run}: the target was not trained in it; let this run finish before those "
                      "at equal cost")
    return dict(steps=max(1, round(sum(steps) / len(steps))),
                lambda_sft=config_of(run)["settings"]["lambda_sft"])


def task_counts(phases: dict) -> list[int]:
    """How many tasks GRPO trained on, by evolution: those at the start, and so on."""
    found = that_found(phases, "tasks")
    return [row["tasks"] for row in found if row["output"].endswith("tasks.jsonl")]


def trained(phases: dict, agent: str = "") -> list[dict]:
    """The training phases after the first SFT, of all agents or one, by its recorded name. Those of
    `evolve.py` record none, since it trains the target alone."""
    found = [row for row in that_found(phases, "steps", "seconds") if row["i"] > 0]
    return [row for row in found if isinstance(row["steps"], int)
            and not row["output"].endswith(".jsonl") and agent in ("", row.get("name", "target"))]


# ----------------------------------------------------------------------- which runs there are
# arm, or a name of the user's -> seed -> folder. The seed of a run that took outputs of another
# seed (--branch) is the text "OTHER>SEED".
Runs = dict[str, dict[int | str, Path]]


def arm_of(run: Path) -> str:
    """The arm of a run that a study made, by the name of its folder; else its method."""
    arm = run.resolve().name.rpartition("-s")[0]
    return arm if arm in ARMS else config_of(run)["settings"]["method"]


def named(given: list[tuple[str, Path]]) -> Runs:
    """Runs under names; whatever their settings are, and whether or not they have finished."""
    runs = defaultdict(dict)
    envs = {}  # environment -> its first run
    for name, path in given:
        config = config_of(path)
        settings = config["settings"]
        envs.setdefault(settings["env"], path)
        if len(envs) > 1:
            (env, first), (other, _) = envs.items()
            raise UsageError(f"{path} is a run of {other}, and {first} of {env}; compare runs of one "
                          "environment")
        seed = settings["seed"]
        begun = config.get("branch", {}).get("seed", seed)
        if begun != seed:  # it is paired with none but those that changed the seed alike
            seed = f"{begun}>{seed}"
        other = runs[name].setdefault(seed, path)
        if other is not path:
            raise UsageError(f"{path} and {other} are both {name} with seed {seed}; leave one out, or "
                          "give each a name of its own: NAME=RUN NAME=RUN")
    ordered = {}
    for name, by_seed in runs.items():
        seeds = sorted(by_seed, key=lambda seed: (isinstance(seed, str), seed))
        ordered[name] = {seed: by_seed[seed] for seed in seeds}
    return ordered


def finished(folder: Path) -> Runs:
    """The finished runs of a study, in the order of ARMS. Refused where two differ in a setting
    that both read, but for what is an arm's own."""
    runs = {}
    first = {}  # setting -> the first run that reads it, and its value
    for arm in ARMS:
        done = [file.parent for file in folder.glob(f"{arm}-s[0-9]*/result.json")]
        # What an arm sets, or does not read.
        own = {name.replace("-", "_") for name in re.findall(r"--(\S+)", ARMS[arm])}
        own |= Settings.presets.get(f"--method {method_of(arm)}", {}).keys()
        own |= settings_of(Settings).keys() - names_in(METHODS[method_of(arm)].reads)
        for path in done:
            made = config_of(path)["settings"]
            for name in sorted(counting({*made}) - own):
                other, before = first.setdefault(name, (path, made[name]))
                if made[name] != before:
                    raise UsageError(f"{path} and {other} differ in {name} ({made[name]}, {before}); "
                                  "a study's runs differ in method and seed alone; compare "
                                  "reports on any")
        runs |= named([(arm, path) for path in done])
    return runs


def counting(names: set[str]) -> set[str]:
    """Those settings that change more than rounding, but for the seed."""
    return {name for name in names if not has_mark(Settings, name, FREE)} - {"seed"}


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
        if len({*values.values()}) > 1 and key in counting({*every}):
            found += [(key, name, value) for name, value in values.items()]
    return found
