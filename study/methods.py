"""The methods of a study: the flags that make each, what it is compared with, its finished runs."""

from pathlib import Path

import numpy as np

from harness.files import RunError, read_object
from harness.report import AGENTS, events, reading, result
from harness.settings import EVOLVING, SAMPLING, SIGNALS
from study.compare import MAY_DIFFER

# Beside the methods themselves: with as many optimiser steps of the target as co-evolution took on
# the same seed, with as many rollouts too (the positive agent has them anyway), with steps that
# read as many tokens; a failure agent that is not trained; Figure 4's values.
METHODS = ("coevolve", "eto", "sft", "positive", "eto-steps", "eto-steps-rollouts", "eto-tokens",
           "positive-steps", "frozen", "rft", "dart", "ppo", "lambda-0.01", "lambda-0.1",
           "lambda-0.5")
NAMES = {"coevolve": "co-evolution", "eto": "ETO", "sft": "SFT", "positive": "positive agent",
         "eto-steps": "ETO, equal steps", "eto-steps-rollouts": "ETO, equal steps and rollouts",
         "eto-tokens": "ETO, equal tokens", "positive-steps": "positive agent, equal steps",
         "frozen": "co-evolution, failure agent frozen", "rft": "RFT", "dart": "RFT + DART",
         "ppo": "PPO", "grpo": "GRPO on the start tasks", "evolve": "evolution",
         "grpo-tasks": "GRPO, as many start tasks as evolution ends with",
         "evolve-random": "evolution, random exploration",
         "evolve-unverified": "evolution, nothing verified",
         **{f"evolve-only-{signal}": f"evolution, {signal} alone" for signal in SIGNALS},
         **{f"evolve-without-{signal}": f"evolution without {signal}" for signal in SIGNALS}}
# Of the second system, `mutual.py`, with its controls; for a study of their own, beside SFT.
EVOLUTIONS = tuple(name for name in NAMES if name.split("-")[0] in EVOLVING)
# What the paper says is ahead of what (in Figure 4: alike); and ours, what it does not compare.
CLAIMS = [("coevolve", "eto", "Tables 3, 4"), ("coevolve", "eto-steps", "ours"),
          ("coevolve", "eto-steps-rollouts", "ours"), ("coevolve", "eto-tokens", "ours"),
          ("coevolve", "positive", "Section 5.4"),
          ("coevolve", "positive-steps", "ours"), ("coevolve", "frozen", "ours"),
          ("positive", "eto", "ours"), ("coevolve", "ppo", "Table 3"),
          ("coevolve", "dart", "Section 5.3"), ("coevolve", "rft", "Table 3"),
          ("coevolve", "sft", "Table 3"), ("eto", "sft", "Table 3"), ("ppo", "sft", "Table 3"),
          ("rft", "sft", "Table 3"), ("dart", "rft", "Section 5.3"),
          ("coevolve", "lambda-0.01", "Figure 4: alike"),
          ("coevolve", "lambda-0.1", "Figure 4: alike"),
          ("coevolve", "lambda-0.5", "Figure 4: alike"),
          *(("evolve", other, f"2604.15840, {where}") for other, where in (
              ("grpo", "Table 2"), ("evolve-random", "Table 3"),
              *((f"evolve-without-{signal}", "Table 5") for signal in SIGNALS),
              ("evolve-unverified", "Table 11"))),
          *(("evolve", f"evolve-only-{signal}", "ours") for signal in SIGNALS),
          ("evolve", "grpo-tasks", "ours"), ("evolve", "sft", "ours"), ("grpo", "sft", "ours")]
# What a method sets beside --method and what it takes of other runs.
SETS = {"frozen": "--d-fail none", "evolve-random": "--explorer random",
        "evolve-unverified": "--verify false",
        **{f"evolve-only-{signal}": f"--signals {signal}" for signal in SIGNALS},
        **{f"evolve-without-{signal}": "--signals " + ",".join(s for s in SIGNALS if s != signal)
           for signal in SIGNALS},
        **{m: m.replace("lambda-", "--lambda-sft ") for m in METHODS if m.startswith("lambda-")}}
THRESHOLDS = (0.6, 0.7, 0.8)
MEASURES = ("reward", "success")
SECOND = AGENTS[2:]


def name_of(method: str) -> str:
    return NAMES.get(method, f"co-evolution, lambda_SFT {method.removeprefix('lambda-')}")


def method_of(method: str) -> str:
    """--method of a run in the study: `positive` of positive-steps."""
    base = method.split("-")[0]
    return "coevolve" if base in ("lambda", "frozen") else base


def flags(method: str, folder: Path, seed: int) -> list[str]:
    """The settings that make a run of `method`; equal steps are those of co-evolution's run."""
    found = ["--method", method_of(method), *SETS.get(method, "").split()]
    if method == "grpo-tasks":
        found += ["--start-tasks", str(tasks_of(folder / f"evolve-s{seed}")[-1])]
    elif likes := equals(method):
        like, *eto = [folder / f"{other}-s{seed}" for other in likes]
        steps, tokens = mean_cost(like)
        if eto:
            eto_steps, eto_tokens = mean_cost(*eto)
            steps = eto_steps * tokens / eto_tokens
        found += ["--dpo-steps", str(max(1, round(steps)))]
        if "-rollouts" in method:
            found += ["--rollouts", str(2 * result(like)["settings"]["rollouts"])]
    return found


def equals(method: str) -> tuple[str, ...]:
    """Whose runs say what this one takes: how long the target trains, or on how many tasks."""
    return (("evolve",) if method == "grpo-tasks" else
            ("coevolve",) if "-steps" in method else
            ("coevolve", "eto") if "-tokens" in method else ())


def mean_cost(run: Path) -> tuple[float, float]:
    """Optimiser steps and tokens of the target's training in an iteration, means over iterations.

    Tokens are those of the trajectories, counted as often as they are read.
    """
    taken = [(e["steps"], e.get("tokens", 0)) for e in of_target(trained(run))]
    if not sum(tokens for _, tokens in taken):
        raise RunError(f"{run}: the target was not trained in it; let this run finish before "
                       "those at equal cost")
    return tuple(np.mean(taken, axis=0).tolist())


def tasks_of(run: Path) -> list[int]:
    """How many tasks a run of `mutual.py` trained on, step by step."""
    with reading(run / "metrics.jsonl"):
        return [e["D"] for e in events(run)["grpo"]]


def trained(run: Path) -> list[dict]:
    """The training phases after the first SFT."""
    with reading(run / "metrics.jsonl"):
        return [e for e in events(run)["phase"]
                if e["phase"].startswith("iter") and e["phase"].endswith("-agent")]


def of_target(phases: list[dict]) -> list[dict]:
    return [e for e in phases if e["phase"].endswith("/target-agent")]


def finished(folder: Path) -> dict[str, dict[int, Path]]:
    """method -> seed -> folder of the finished runs of a study, methods in a report's order."""
    runs = {}
    for path in folder.glob("*-s*"):
        method, _, seed = path.name.rpartition("-s")
        if method in METHODS + EVOLUTIONS and seed.isdigit() and (path / "result.json").exists():
            runs.setdefault(method, {})[int(seed)] = path
    return {method: dict(sorted(runs[method].items())) for method in METHODS + EVOLUTIONS
            if method in runs}


def refuse_unlike(runs: dict[str, dict[int, Path]]) -> None:
    """RunError if runs differ in more than the seed and what the study varies between methods."""
    first = {}
    for method, found in runs.items():
        own = {"method"}  # what `flags` gives this method
        own |= {flag[2:].replace("-", "_") for flag in SETS.get(method, "").split()[::2]}
        own |= {"rollouts"} if "-rollouts" in method else set()
        own |= {"temperature"} if method in SAMPLING else set()  # where the others play greedily
        for path in found.values():
            config = read_object(path / "config.json", settings=dict)
            made = config["settings"] | dict(precision=config.get("precision", "no"))
            for name, value in made.items():
                if name in MAY_DIFFER:
                    continue
                if name in ("dpo_steps", "start_tasks") and equals(method):  # by seed
                    continue
                key = method if name in own else "", name
                other, before = first.setdefault(key, (path, value))
                if value != before:
                    raise RunError(f"{path} and {other} differ in {name} ({value}, "
                                   f"{before}); give each study a folder of its own")
