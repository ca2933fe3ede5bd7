"""Expert trajectories (demonstrations): collection, filtering, and checks for test-set leakage."""

from collections import Counter
from pathlib import Path

from common.files import read_jsonl, run_of
from common.settings import UsageError
from dpo import Trajectory, better, equal
from environments.expert_files import experts
from envs import Environment


def collect_experts(run, file: Path | None) -> tuple[list[Trajectory], dict]:
    """Collects one expert trajectory per training task. This is the first phase of a run.

    The trajectories come from the environment's scripted expert, or from a file. If a file contains
    several trajectories of a task, for example rollouts of an agent, only the one with the highest
    reward is used.

    Returns:
        The expert trajectories, and a dict with two entries: `experts` is their number, and
        `dropped` contains the number of dropped trajectories for each reason.
    """
    s = run.settings
    env = run.make_env()
    evaluated = evaluated_tasks(env, run.splits)
    opening = len(env.opening(""))  # number of messages before the expert's first reply
    kept = []
    dropped = Counter()
    total = None if file else len(env.tasks("train")[:s.train_tasks or None])
    collected = experts(env, file, s.train_tasks, dropped, run.print)
    for task, messages, reward in run.bar(total, collected):
        ids, mask = run.encoder.encode(messages, opening)
        replies = sum(message["role"] == "assistant" for message in messages[opening:])
        t = Trajectory(task, "expert", messages=messages, ids=ids, action_mask=mask, reward=reward,
                       turns=replies, ended="done")
        if repr(env.find(task)) in evaluated:
            dropped["evaluated too"] += 1
        elif t.is_failure and reward <= s.expert_min_reward:
            dropped["reward"] += 1
        elif len(ids) > s.max_tokens:
            dropped["too long"] += 1
        elif misread := misread_reply(env, run.encoder, t, messages[opening:]):
            if "misread once decoded" not in dropped:
                run.print(f"{run.name}: the tokenizer turns the expert's reply {misread[0]!r} into "
                          f"{misread[1]!r}, which changes the reward of {task}; use another model")
            dropped["misread once decoded"] += 1
        else:
            kept.append(t)
    env.close()
    if not kept:
        raise UsageError(f"no expert trajectory is left; dropped: {dict(dropped)}; change the "
                         "settings that dropped them")

    best = best_of_tasks(kept)
    if len(best) < len(kept):
        dropped["not the best of its task"] = len(kept) - len(best)
    return best, dict(experts=len(best), dropped=dropped)


def misread_reply(env: Environment, encoder, t: Trajectory, messages: list[dict]) -> tuple | None:
    """Finds the first reply that the environment misreads after encoding and decoding.

    Agents imitate the tokens of an expert, and the environment gets the decoded text. If the
    decoded text of a reply contains a different action, the episode is run with the decoded
    replies. The reply counts as misread if this episode ends with a different reward. Returns the
    original and the decoded text of the reply, or None.

    Args:
        messages: The messages from the expert's first reply on.
    """
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    decoded = [encoder.close(encoder.reply(text), env.stops)[2] for text in texts]
    changed = [pair for pair in zip(texts, decoded) if env.action(pair[0]) != env.action(pair[1])]
    if changed:
        env.reset(t.task)
        for reply in decoded:
            step = env.step(reply)
            if step.done:
                break
        if not equal(step.reward, t.reward):
            return changed[0]
    return None


def evaluated_tasks(env: Environment, splits: tuple[str, ...]) -> set[str]:
    """Returns the contents of the tasks in the evaluation splits.

    Contents are compared instead of ids, because the same task may have several ids.
    """
    contents = set()
    for split in splits:
        for task in env.tasks(split):
            contents.add(repr(env.find(task)))
    return contents


def check_not_trained_on(
    env: Environment,
    splits: tuple[str, ...],
    models: dict[str, Path],
) -> None:
    """Raises UsageError if an initial model was trained on a task that this run evaluates.

    Args:
        splits: The evaluation splits.
        models: The initial models, by command-line flag.
    """
    evaluated = evaluated_tasks(env, splits)
    for flag, model in models.items():
        trained = {repr(env.find(task)) for task in trained_on(model, env.name)}
        both = trained & evaluated
        if both:
            raise UsageError(f"{flag} {model}: {len(both)} of {len(evaluated)} evaluated tasks are "
                             "also trained on; give other --eval-splits")


def trained_on(model: Path, env: str) -> set[str]:
    """Returns the ids of an environment's tasks that a model was trained on.

    The ids are known only if the model is inside the folder of the run that trained it.
    """
    tasks = set()
    run = run_of(model)
    if run:
        for file in [*run.glob("experts.jsonl"), *run.glob("iter*/tasks.jsonl")]:
            tasks |= {row["task"] for row in read_jsonl(file)}
    return {task for task in tasks if task.startswith(f"{env}-") and "-added-" not in task}


def best_of_tasks(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Returns the first trajectory with the highest reward of each task."""
    best = {}  # task -> trajectory
    for t in trajectories:
        if t.task not in best or better(t.reward, best[t.task].reward):
            best[t.task] = t
    return list(best.values())
