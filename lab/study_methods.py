"""The methods of a study: the flags that make each, what it is compared with, its finished runs."""

import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import numpy as np

from evolve import SIGNALS
from lab.runfiles import config_of, phases_of
from lab.settings import METHODS as METHODS_OF_RUNS
from lab.settings import Settings
from worlds.flags import Refused, limits_of

# Between the seeds of a method: what changes nothing, or rounding only.
MAY_DIFFER = {"seed", *(f.name for f in fields(Settings)
                        if any(limits.free for limits in limits_of(Settings, f.name)))}
# name -> (what a report calls it, its settings). In braces stands what another run of the seed says
# (`costs`): `steps`, as many optimiser steps of the target as co-evolution took; `token_steps`,
# steps that read as many tokens; `rollouts`, those of both its agents together; `tasks`, as many
# as evolution ended with.
METHODS = {
    "coevolve": ("co-evolution", "--method coevolve"),
    "eto": ("ETO", "--method eto"),
    "sft": ("SFT", "--method sft"),
    "positive": ("positive agent", "--method positive"),
    "eto-steps": ("ETO, equal steps", "--method eto --dpo-steps {steps}"),
    "eto-steps-rollouts": ("ETO, equal steps and rollouts",
                           "--method eto --dpo-steps {steps} --rollouts {rollouts}"),
    "eto-tokens": ("ETO, equal tokens", "--method eto --dpo-steps {token_steps}"),
    "positive-steps": ("positive agent, equal steps", "--method positive --dpo-steps {steps}"),
    "frozen": ("co-evolution, failure agent frozen", "--method coevolve --d-fail none"),
    "rft": ("RFT", "--method rft"),
    "dart": ("RFT + DART", "--method dart"),
    "ppo": ("PPO", "--method ppo"),
    **{f"lambda-{w}": (f"co-evolution, lambda_SFT {w}", f"--method coevolve --lambda-sft {w}")
       for w in ("0.01", "0.1", "0.5")}}  # Figure 4's values
# Of the second system, `evolve.py`, with its controls; for a study of their own, beside SFT.
EVOLUTIONS = {
    "grpo": ("GRPO on the start tasks", "--method grpo"),
    "evolve": ("evolution", "--method evolve"),
    "grpo-tasks": ("GRPO, as many start tasks as evolution ends with",
                   "--method grpo --start-tasks {tasks}"),
    "evolve-random": ("evolution, random exploration", "--method evolve --guide random"),
    **{f"evolve-{name}": (f"evolution, {name.replace('-', ' ')}",
                          "--method evolve --explorer aimed --rare-min 2 --start-share 0.5 "
                          f"--mastered leave{more}")
       for name, more in (("aimed", ""), ("aimed-random", " --guide random"))},
    "evolve-unverified": ("evolution, nothing verified", "--method evolve --verify false"),
    **{f"evolve-only-{signal}": (f"evolution, {signal} alone",
                                 f"--method evolve --signals {signal}") for signal in SIGNALS},
    **{f"evolve-without-{signal}": (
        f"evolution without {signal}",
        f"--method evolve --signals {','.join(s for s in SIGNALS if s != signal)}")
       for signal in SIGNALS}}
# How much of a failure agent, at equal steps of the target; each with what it is compared with.
FROZEN = {**{f"dose-k{k}": f"dose-k{k}-frozen" for k in (1, 2, 4, 8)},
          **dict.fromkeys(("dose-epochs-1", "dose-epochs-9", "dose-buffer"), "dose-k4-frozen")}
_DOSE = "--method coevolve --dpo-steps 60 --rollouts"
DOSES = {
    **{f"dose-k{k}": (f"{k} rollouts", f"{_DOSE} {k}") for k in (1, 2, 4, 8)},
    **{f"dose-k{k}-frozen": (f"{k} rollouts, frozen", f"{_DOSE} {k} --d-fail none")
       for k in (1, 2, 4, 8)},
    **{f"dose-epochs-{n}": (f"4 rollouts, {n} epochs", f"{_DOSE} 4 --failure-epochs {n}")
       for n in (1, 9)},
    "dose-buffer": ("4 rollouts, all iterations", f"{_DOSE} 4 --d-fail buffer")}
ALL = METHODS | EVOLUTIONS | DOSES
# What the paper says is ahead of what (in Figure 4: alike); and ours, what it does not compare.
CLAIMS = [("coevolve", "eto", "Tables 3, 4"), ("coevolve", "eto-steps", "ours"),
          ("coevolve", "eto-steps-rollouts", "ours"), ("coevolve", "eto-tokens", "ours"),
          ("coevolve", "positive", "Section 5.4"),
          ("coevolve", "positive-steps", "ours"), ("coevolve", "frozen", "ours"),
          ("positive", "eto", "ours"), ("coevolve", "ppo", "Table 3"),
          ("coevolve", "dart", "Section 5.3"), ("coevolve", "rft", "Table 3"),
          ("coevolve", "sft", "Table 3"), ("eto", "sft", "Table 3"), ("ppo", "sft", "Table 3"),
          ("rft", "sft", "Table 3"), ("dart", "rft", "Section 5.3"),
          *(("coevolve", m, "Figure 4: alike") for m in METHODS if m.startswith("lambda-")),
          *(("evolve", other, f"2604.15840, {where}") for other, where in (
              ("grpo", "Table 2"), ("evolve-random", "Table 3"),
              *((f"evolve-without-{signal}", "Table 5") for signal in SIGNALS),
              ("evolve-unverified", "Table 11"))),
          *(("evolve", f"evolve-only-{signal}", "ours") for signal in SIGNALS),
          *(("evolve-aimed", other, "ours") for other in (
              "evolve", "grpo", "grpo-tasks", "evolve-random", "evolve-aimed-random", "sft")),
          ("evolve", "grpo-tasks", "ours"), ("evolve", "sft", "ours"), ("grpo", "sft", "ours"),
          *((dose, frozen, "ours") for dose, frozen in FROZEN.items())]
SAMPLING = ("rft", "dart", "ppo")  # which play a task several times, and so never greedily
THRESHOLDS = (0.6, 0.7, 0.8)
MEASURES = ("reward", "success")


def name_of(method: str) -> str:
    return ALL[method][0] if method in ALL else method


def method_of(method: str) -> str:
    """--method of a run in the study: `positive` of positive-steps."""
    return ALL[method][1].split()[1]


def unread(method: str) -> set[str]:
    """The settings that a --method does not read."""
    parts = METHODS_OF_RUNS[method][1]
    return {f.name for f in fields(Settings)} - {name for part in parts for name in (
        [part] if isinstance(part, str) else [f.name for f in fields(part)])}


def equals(method: str) -> tuple[str, ...]:
    """Whose runs say what this one takes: how long the target trains, or on how many tasks."""
    asked = ALL[method][1] if method in ALL else ""
    return (("evolve",) if "{tasks}" in asked else ("coevolve", "eto") if "{token" in asked else
            ("coevolve",) if "{" in asked else ())


def flags(method: str, folder: Path, seed: int) -> list[str]:
    """The settings that make a run of `method` in a study's folder."""
    takes = [folder / f"{other}-s{seed}" for other in equals(method)]
    return ALL[method][1].format(**costs(*takes) if takes else {}).split()


def costs(like: Path, eto: Path | None = None) -> dict:
    """What `METHODS` has in braces, of runs of co-evolution and ETO, or of evolution."""
    if tasks := task_counts(like):
        return dict(tasks=tasks[-1])
    steps, tokens = mean_cost(like)
    eto_steps, eto_tokens = mean_cost(eto) if eto else (0, 1)
    return dict(steps=max(1, round(steps)),
                rollouts=2 * config_of(like)["settings"]["rollouts"],
                token_steps=max(1, round(eto_steps * tokens / eto_tokens)))


def task_counts(run: Path) -> list[int]:
    """How many tasks GRPO trained on, by evolution: those at the start, and so on."""
    return [row.get("D", row["tasks"]) for output, row in phases_of(run).items()
            if output.endswith("tasks.jsonl")]


def mean_cost(run: Path) -> tuple[float, float]:
    """Optimiser steps of the target, and tokens as often as it reads them, means over iterations.
    """
    taken = [(row["steps"], row.get("tokens", 0)) for row in trained(run, "target")]
    if not sum(tokens for _, tokens in taken):
        raise Refused(f"{run}: the target was not trained in it; let this run finish before "
                      "those at equal cost")
    return tuple(np.mean(taken, axis=0).tolist())


def trained(run: Path, agent: str = r"\w+") -> list[dict]:
    """The training phases after the first SFT, of all agents or one."""
    return [row for output, row in phases_of(run).items()
            if re.fullmatch(rf"iter\d+/{agent}-agent", output)]


def finished(folder: Path) -> dict[str, dict[int, Path]]:
    """method -> seed -> folder of the finished runs of a study."""
    return chosen([path for path in folder.glob("*-s[0-9]*") if (path / "result.json").exists()
                   and path.name.rpartition("-s")[0] in ALL], alike=())


def chosen(paths: list[Path], alike=("env", "model", "quick")) -> dict[str, dict[int, Path]]:
    """The same of any finished runs; their method by the folder's name where a study made it."""
    runs = defaultdict(dict)
    for path in paths:
        settings, name = config_of(path)["settings"], path.resolve().name.rpartition("-s")[0]
        if not (path / "result.json").exists():
            raise Refused(f"{path} has not finished; the command that began it goes on from there")
        method, seed = settings["method"], settings["seed"]
        if name in ALL and method_of(name) == method:
            method = name
        if seed in runs[method]:
            raise Refused(f"{path} and {runs[method][seed]} are both {method} with seed {seed}; "
                           "compare one of them")
        runs[method][seed] = path
    return checked(runs, alike)


def checked(runs: dict, alike: tuple) -> dict[str, dict[int, Path]]:
    """The runs in a report's order. Refused if those of a method differ in more than the seed, or
    those of several in more than what the study varies; alike: then only these may not differ."""
    order, first = [*ALL, *sorted(runs)], {}
    runs = {m: dict(sorted(runs[m].items())) for m in sorted(runs, key=order.index)}
    for method, by_seed in runs.items():
        asked = ALL[method][1].replace("-", "_") if method in ALL else ""
        own = {"method", *re.findall(r"__(\w+)", asked)}
        own |= {"temperature"} if method in SAMPLING else set()  # where the others play greedily
        for_seed = set(re.findall(r"__(\w+) {(?:steps|token_steps|tasks)}", asked))
        for path in by_seed.values():
            made = config_of(path)["settings"]
            for name in sorted(made.keys() - MAY_DIFFER - for_seed - unread(made["method"])):
                shared = name not in own and (not alike or name in alike)
                other, before = first.setdefault(("" if shared else method, name),
                                                 (path, made[name]))
                if made[name] != before:
                    raise Refused(f"{path} and {other} differ in {name} ({made[name]}, {before}); "
                                   "a report is on runs that differ in method and seed")
    return runs
