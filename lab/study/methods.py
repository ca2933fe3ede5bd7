"""The methods of a study: the flags that make each, what it is compared with, its finished runs."""

import itertools
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import numpy as np

from common.settings import FREE, Refused, has_mark
from evolve import SIGNALS
from lab.runfiles import config_of, kept_of, phases_of
from lab.settings import METHODS as METHODS_OF_RUNS
from lab.settings import Settings

# name -> (what a report calls it, its settings). In braces stands what another run of the seed says
# (`costs`): `steps`, as many optimiser steps of the target as co-evolution took; `lambda_sft`, its
# own; `tasks`, as many as evolution ended with.
METHODS = {
    "coevolve": ("co-evolution", "--method coevolve"),
    "eto": ("ETO", "--method eto"),
    "sft": ("SFT", "--method sft"),
    "positive": ("positive agent", "--method positive"),
    "eto-steps": ("ETO, equal steps", "--method eto --dpo-steps {steps}"),
    # ETO with what the paper adds to DPO beside a second agent: Section 4.3's weights and SFT term.
    "eto-sft": ("ETO with SFT term", "--method eto --lambda-sft {lambda_sft} "
                                     "--pair-weights instruction"),
    "eto-sft-steps": ("ETO with SFT term, equal steps",
                      "--method eto --lambda-sft {lambda_sft} --pair-weights instruction "
                      "--dpo-steps {steps}"),
    "positive-steps": ("positive agent, equal steps", "--method positive --dpo-steps {steps}"),
    "frozen": ("co-evolution, failure agent frozen", "--method coevolve --d-fail none"),
    "rft": ("RFT", "--method rft"),
    "dart": ("RFT + DART", "--method dart"),
    "ppo": ("PPO", "--method ppo")}
# Of the second system, `evolve.py`, with its controls; for a study of their own, beside SFT.
EVOLUTIONS = {
    "grpo": ("GRPO on the start tasks", "--method grpo"),
    "evolve": ("evolution", "--method evolve"),
    "grpo-tasks": ("GRPO, as many start tasks as evolution ends with",
                   "--method grpo --start-tasks {tasks}"),
    "evolve-random": ("evolution, random exploration", "--method evolve --guide random"),
    "evolve-aimed": ("evolution, aimed", "--method evolve --explorer aimed --rare-min 2 "
                                         "--start-share 0.5 --mastered leave"),
    **{f"evolve-only-{signal}": (f"evolution, {signal} alone",
                                 f"--method evolve --signals {signal}") for signal in SIGNALS}}
ALL = METHODS | EVOLUTIONS
# (a, b): a report says by how much a is ahead of b.
COMPARED = [*(("coevolve", m) for m in METHODS), *((m, "sft") for m in (*METHODS, "grpo")),
            # What each part adds: the SFT term, a second agent's rollouts; who that agent is.
            ("eto-sft", "eto"), ("eto-sft-steps", "eto-steps"), ("frozen", "eto-sft-steps"),
            ("positive", "eto-sft"), ("frozen", "eto-sft"),
            *((lead, m) for lead in ("evolve", "evolve-aimed") for m in (*EVOLUTIONS, "sft"))]
# Between the seeds of a method: what changes nothing, or rounding only; and what another run says.
MAY_DIFFER = {"method", "seed", *(f.name for f in fields(Settings)
                                  if has_mark(Settings, f.name, FREE))}
FROM_OTHERS = {"dpo_steps", "start_tasks"}


def name_of(method: str) -> str:
    return ALL.get(method, [method])[0]


def method_of(method: str) -> str:
    """--method of a run in the study: `positive` of positive-steps."""
    return ALL[method][1].split()[1]


def unread(method: str) -> set[str]:
    """The settings that a --method does not read; none, as far as is known, of a fork's own."""
    if method not in METHODS_OF_RUNS:
        return set()
    parts = METHODS_OF_RUNS[method][1]
    return {f.name for f in fields(Settings)} - {name for part in parts for name in (
        [part] if isinstance(part, str) else [f.name for f in fields(part)])}


def equals(method: str) -> tuple[str, ...]:
    """Whose runs say what this one takes: how long the target trains, or on how many tasks."""
    asked = ALL[method][1]
    return ("evolve",) if "{tasks}" in asked else ("coevolve",) if "{" in asked else ()


def flags(method: str, folder: Path, seed: int) -> list[str]:
    """The settings that make a run of `method` in a study's folder."""
    takes = [folder / f"{other}-s{seed}" for other in equals(method)]
    return ALL[method][1].format(**costs(*takes) if takes else {}).split()


def costs(like: Path) -> dict:
    """What `METHODS` has in braces, of a run of co-evolution or evolution."""
    if tasks := task_counts(phases_of(like)):
        return dict(tasks=tasks[-1])
    return dict(steps=max(1, round(mean_steps(like))),
                lambda_sft=config_of(like)["settings"].get("lambda_sft"))


def task_counts(phases: dict) -> list[int]:
    """How many tasks GRPO trained on, by evolution: those at the start, and so on."""
    return [row.get("D", row["tasks"]) for output, row in phases.items()
            if output.endswith("tasks.jsonl")]


def mean_steps(run: Path) -> float:
    """The target's optimiser steps, a mean of iterations."""
    taken = [row["steps"] for row in trained(phases_of(run), "target")]
    if not sum(taken):
        raise Refused(f"{run}: the target was not trained in it; let this run finish before "
                      "those at equal cost")
    return float(np.mean(taken))


def trained(phases: dict, agent: str = r"\w+") -> list[dict]:
    """The training phases after the first SFT, of all agents or one."""
    return [row for output, row in phases.items()
            if re.fullmatch(rf"iter\d+/{agent}-agent", output)]


def finished(folder: Path) -> dict[str, dict[int, Path]]:
    """method -> seed -> folder of the finished runs of a study, whose methods may differ in their
    own settings alone."""
    runs = chosen([path for path in folder.glob("*-s[0-9]*") if (path / "result.json").exists()
                   and path.name.rpartition("-s")[0] in ALL])
    own = {m: {*re.findall(r"__(\w+)", ALL[m][1].replace("-", "_")),
               *Settings.presets.get(f"--method {method_of(m)}", {})} for m in runs}
    alike(runs, own)
    return runs


def chosen(paths: list[Path]) -> dict[str, dict[int, Path]]:
    """The same of any finished runs; their method by the folder's name where a study made it.
    Refused if those of a method differ in more than the seed."""
    runs = defaultdict(dict)
    for path in paths:
        settings, method = config_of(path)["settings"], path.resolve().name.rpartition("-s")[0]
        if not (path / "result.json").exists():
            raise Refused(f"{path} has not finished; the command that began it goes on from "
                          "there, and NAME=RUN compares what is there")
        if method not in ALL or method_of(method) != settings["method"]:
            method = settings["method"]
        other = runs[method].setdefault(settings["seed"], path)
        if other != path or paths.count(path) > 1:
            raise Refused(f"{path} and {other} are both {method} with seed {settings['seed']}; "
                          "compare one of them, or name both: NAME=RUN NAME=RUN")
    order = [*ALL, *sorted(runs)]
    runs = {m: dict(sorted(runs[m].items())) for m in sorted(runs, key=order.index)}
    for method, by_seed in runs.items():
        alike({method: by_seed}, {method: FROM_OTHERS})
    return runs


def named(given: list[tuple[str, Path]]) -> dict[str, dict[int, Path]]:
    """name -> seed -> folder of runs, each with a name or named by its method; whatever their
    settings are, and whether or not they have finished."""
    runs = defaultdict(dict)
    for name, path in given:
        settings = config_of(path)["settings"]
        name = name or settings["method"]
        other = runs[name].setdefault(settings["seed"], path)
        if other is not path:
            raise Refused(f"{name}={path}: {other} has that name and seed {settings['seed']} too; "
                          "give one of them another name")
    return {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items()}


def split_name(word: str) -> tuple[str, Path]:
    """(NAME, RUN) of NAME=RUN. A path may have a = in it too; without a name it is empty."""
    name, sign, path = word.partition("=")
    if not sign or not name or not path or "/" in name or Path(word).exists():
        return "", Path(word)
    return name, Path(path)


def differences(runs: dict[str, dict[int, Path]]) -> list[tuple[str, str, str]]:
    """(setting, name, its values over the seeds) where runs differ in a setting that changes more
    than rounding. A run that lacks a setting, such as the plain core's, goes by the default."""
    settings = {name: [config_of(path)["settings"] for path in by_seed.values()]
                for name, by_seed in runs.items()}
    made = [*itertools.chain(*settings.values())]
    defaults = {f.name: f.default for f in fields(Settings)}
    found = []
    for key in dict.fromkeys(itertools.chain(*made)):
        values = {str(s.get(key, defaults.get(key))) for s in made}
        if len(values) == 1 or key in MAY_DIFFER - {"method"}:
            continue
        for name, of_seeds in settings.items():
            given = dict.fromkeys(str(s.get(key, "-")) for s in of_seeds)
            found.append((key, name, ", ".join(given)))
    return found


def differences_of_code(runs: dict[str, dict[int, Path]]) -> list[tuple[str, str, str]]:
    """(kind of phase, name, digits of its code over seeds) where runs of an environment made phases
    of a kind by different code. That is what the phase runs or, where a run of the plain core knows
    no more, the whole program."""
    made = defaultdict(list)  # (environment, kind) -> (name, what is recorded of a phase)
    for name, by_seed in runs.items():
        for path in by_seed.values():
            env = config_of(path)["settings"].get("env")
            for row in kept_of(path).values():
                made[env, row.get("work")].append((name, row))

    found = []
    for (_, work), rows in made.items():
        exact = all("made" in row for _, row in rows)
        codes = defaultdict(dict)  # name -> its codes, in order
        for name, row in rows:
            code = row["made"].get("code") if exact else row.get("code")
            if code:
                codes[name][code[:8]] = True
        if len(set(itertools.chain(*codes.values()))) > 1:
            found += [(work, name, ", ".join(of_name)) for name, of_name in codes.items()]
    return found


def alike(runs: dict[str, dict[int, Path]], own: dict[str, set[str]]) -> None:
    """Refused where runs differ in a setting that both read, but for a method's own."""
    first = {}
    for method, path in ((method, path) for method in runs for path in runs[method].values()):
        made = config_of(path)["settings"]
        for name in sorted(made.keys() - MAY_DIFFER - own[method] - unread(made["method"])):
            other, before = first.setdefault(name, (path, made[name]))
            if made[name] != before:
                raise Refused(f"{path} and {other} differ in {name} ({made[name]}, {before}); "
                              "a report is on runs that differ in method and seed; of others "
                              "give compare the names, NAME=RUN NAME=RUN")
