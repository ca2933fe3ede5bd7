"""Expert trajectories: played by an environment's scripted expert, or read from a file."""

import json
import re
from pathlib import Path
from textwrap import shorten

import envs
import report
from settings import SettingsError


def play_expert(env, task: str) -> tuple[list[dict], float]:
    """The scripted expert's conversation on a task and its reward."""
    observation = env.reset(task)
    messages, act = envs.opening(env, observation), env.expert()
    for _ in range(env.max_steps):
        reply = act(observation)
        step = env.step(reply)
        messages.append({"role": "assistant", "content": reply})
        if step.done:
            break
        observation = step.observation
        messages.append({"role": "user", "content": observation})
    return messages[:-1] if messages[-1]["role"] == "user" else messages, step.reward


def read_experts(path: str, env) -> list[tuple[str, list[dict], float]]:
    """(task, messages, reward) of each trajectory in a file.

    Takes our own experts.jsonl, or the format that ETO and IPR publish: a JSON list of `id` (its
    last number is the task's), `conversations` of `from` (human or gpt) and `value`, and, if
    known, `reward` (else 1). The rules that open a published conversation are replaced by the
    environment's prompt, so that experts and rollouts open alike. SettingsError naming the entry,
    also where `env` has no such task.
    """
    def refuse(problem, entry=None):
        where = f"--experts {path}" + ("" if entry is None else f", entry {entry}")
        raise SettingsError(f"{where}: {problem}")

    try:
        text = Path(path).read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else report.read_jsonl(path)
    except (OSError, ValueError, RecursionError) as error:
        refuse(f"{error}; give ETO's JSON list or a run's experts.jsonl")
    found, seen, roles = [], set(), {"human": "user", "gpt": "assistant"}
    for n, row in enumerate(rows):
        try:
            if "conversations" in row:
                task, reward = env.published_task(str(row["id"])), row.get("reward", 1.0)
                # "Observation:" before what the environment said is ETO's; our rollouts have none.
                messages = [{"role": roles[turn["from"]],
                             "content": re.sub(r"^Observation:\s*", "", turn["value"])}
                            for turn in row["conversations"]]
                if "Action:" not in messages[1]["content"]:  # the rules, and "OK"
                    messages = messages[2:]
                messages[:1] = envs.opening(env, messages[0]["content"])
            else:
                task, messages, reward = row["task"], row["messages"], row["reward"]
            while messages[-1]["role"] == "user":  # what followed the last action
                messages.pop()
            right = [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
            messages = [{"role": m["role"], "content": m["content"]} for m in messages]
            for m in messages:
                m["content"].encode()  # a str without half of a surrogate pair
            env.find(task)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            refuse(f"not a trajectory ({type(error).__name__}: {shorten(str(error), 200)})", n)
        if not right:
            refuse("its turns are not user and assistant in turn", n)
        if type(reward) not in (int, float) or not 0 <= reward <= 1:
            refuse(f"reward {shorten(repr(reward), 60)} is not a number in [0, 1]", n)
        if task in seen:
            refuse(f"{task} is there twice; keep one of them", n)
        seen.add(task)
        found.append((task, messages, float(reward)))
    if not found:
        refuse("holds no trajectory")
    return found
