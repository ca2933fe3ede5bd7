"""Demonstrations: the experts that agents imitate, of a script or a file, and which are kept."""

from collections import Counter
from pathlib import Path

from common.files import read_jsonl, run_of
from common.settings import UsageError
from dpo import Trajectory, better
from engine.records import write
from environments.expert_files import experts
from envs import Environment


def collect_experts(run, out: Path, file: Path | None = None) -> dict:
    """Collects an expert for each training task, from a file or from the scripted expert. Where a
    file has several of a task, as an agent's own trajectories are, the best is its expert."""
    s = run.settings
    env = run.make_env()
    evaluated = evaluated_tasks(env, run.splits)
    opening = len(env.opening(""))  # turns before an expert's first reply
    kept = []
    dropped = Counter()
    total = None if file else len(env.tasks("train")[:s.train_tasks or None])
    collected = experts(env, file, s.train_tasks, dropped, run.print)
    for task, messages, reward in run.bar(total, collected):
        ids, mask = run.encoder.encode(messages, opening)
        replies = sum(turn["role"] == "assistant" for turn in messages[opening:])
        t = Trajectory(task, "expert", messages=messages, ids=ids, action_mask=mask, reward=reward,
                       turns=replies, ended="done")
        if repr(env.find(task)) in evaluated:
            dropped["evaluated too"] += 1
        elif t.is_failure and reward <= s.expert_min_reward:
            dropped["reward"] += 1
        elif len(ids) > s.max_tokens:
            dropped["too long"] += 1
        else:
            kept.append(t)
    env.close()
    if not kept:
        raise UsageError(f"no expert is left: {dict(dropped)}; lower what dropped it")

    if len(kept) < dropped.total():
        run.print(f"{run.name}: warning: {len(kept)} of {len(kept) + dropped.total()} expert "
                f"trajectories are kept; dropped: {dict(dropped)}; see "
                f"--expert-min-reward {s.expert_min_reward} and --max-tokens {s.max_tokens}")
    best = best_of_tasks(kept)
    if len(best) < len(kept):
        dropped["not the best of its task"] = len(kept) - len(best)
    write(run, out, best)
    return dict(experts=len(best), dropped=dropped)


def evaluated_tasks(env: Environment, splits: tuple[str, ...]) -> set[str]:
    """What the evaluated tasks are, since a task may have several ids."""
    found = set()
    for split in splits:
        for task in env.tasks(split):
            found.add(repr(env.find(task)))
    return found


def check_not_trained_on(run) -> None:
    """Refused where a model that the run begins from was trained on an evaluated task, as far as
    the run that it lies in says so."""
    evaluated = evaluated_tasks(run.env, run.splits)
    for flag, model in run.given_models().items():
        both = {repr(run.env.find(task)) for task in trained_on(model, run.env.name)} & evaluated
        if both:
            raise UsageError(f"{flag} {model}: {len(both)} of {len(evaluated)} evaluated tasks are "
                          "also trained on; give other --eval-splits")


def trained_on(model: Path, env: str) -> set[str]:
    """The tasks of an environment on which the run was trained that a model lies in; none, if it
    lies in none."""
    tasks = set()
    run = run_of(model)
    if run:
        for file in [*run.glob("experts.jsonl"), *run.glob("iter*/tasks.jsonl")]:
            tasks |= {row["task"] for row in read_jsonl(file)}
    return {task for task in tasks if task.startswith(f"{env}-") and "-added-" not in task}


def best_of_tasks(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Of each task the trajectory with the most reward, of equal ones the first."""
    best = {}  # task -> trajectory
    for t in trajectories:
        if t.task not in best or better(t.reward, best[t.task].reward):
            best[t.task] = t
    return list(best.values())
