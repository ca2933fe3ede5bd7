"""Experts of a file: trajectories of a run, or a list that ETO or IPR published."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from os.path import commonprefix
from pathlib import Path

from common.settings import UsageError
from environments import converse, first_reply
from environments.eto_protocol import EtoEnvironment, bare
from environments.user_files import reading, text_in
from envs import Environment

MUST = ("ETO's JSON list (id, conversations of from and value) or a run's trajectories (task, "
        "messages of role and content, reward; experts.jsonl, for example), of this environment's "
        "tasks")
# What a run writes of an episode beside what is trained on.
PLAYED = ("agent", "iteration", "rollout", "seed", "ids", "action_mask", "log_probs", "raw_reward",
          "turns", "idle", "ended", "signal")
ROLES = {"user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


def experts(env: Environment, file: str | None, count: int,
            dropped: Counter | None = None) -> Iterator[tuple[str, list[dict], float]]:
    """Experts, one after the other.

    Args:
        env: The environment.
        file: Where they are; None for the scripted expert.
        count: Of how many tasks, 0 for all.
        dropped: Gets, by reason, the number of entries that are left out.

    Yields:
        Task, messages and reward. The reward of a scripted expert that could not go on is 0. A file
        may have several of a task, as the trajectories of an agent do.

    Raises:
        Refused: An entry of the file is no expert's, or its task opens otherwise here.
    """
    if not file:
        for task in env.tasks("train")[:count or None]:
            messages, reward = converse(env, env.reset(task), env.expert())
            yield task, messages, reward
        return
    if dropped is None:
        dropped = Counter()
    found = read_experts(file, env)
    asked = set(tasks_of(found)[:count or None])
    for task, messages, reward in found:
        if task not in asked:
            continue
        if not messages:
            dropped["too long"] += 1
            continue
        apart = opens_otherwise(env, messages, env.reset(task))
        if apart:
            raise UsageError(f"--experts {file}: {task} is another task here. It opens there | here: "
                          f"{apart[0]!r} | {apart[1]!r}; give the environment and the --view that "
                          "these experts were made in, or experts of this one")
        yield task, messages, reward


def tasks_of(found: list[tuple]) -> list[str]:
    """The tasks of what `read_experts` found, each once, in its order."""
    return list(dict.fromkeys(task for task, _, _ in found))


def read_experts(path: str, env: Environment) -> list[tuple[str, list[dict], float]]:
    """Task, messages and reward of each entry of a file; Refused naming its entry and turn. A
    rollout that never replied has no messages."""
    with reading(f"--experts {path}", MUST):
        text = Path(path).read_text(encoding="utf-8-sig")
        is_list = text.lstrip().startswith("[")
        rows = json.loads(text) if is_list else text.strip().split("\n")

    found = []
    for n, row in enumerate(rows):
        place = f"entry {n}" if is_list else f"line {n + 1}"
        with reading(f"--experts {path}, {place}", MUST):
            entry = row if is_list else json.loads(row)
            found.append(read_entry(entry, env))
    return found


def read_entry(entry: dict, env: Environment) -> tuple[str, list[dict], float]:
    """Task, messages and reward of an entry; ValueError and others where it is no expert's."""
    if "conversations" in entry:
        task, messages, reward = published(entry, env)
    else:
        check_fields(entry, ("task", "messages", "reward"), PLAYED)
        task = entry["task"]
        reward = entry["reward"]
        messages = read_turns(entry["messages"], "role", "content")
        messages = without_examples(messages, entry.get("turns", 0), len(env.opening("")))

    while messages and messages[-1]["role"] == "user":  # what followed the last action
        messages.pop()
    if never_replied(entry):
        messages = []
    elif len(messages) <= len(env.opening("")):
        raise ValueError("there is no reply in it")
    roles = [turn["role"] for turn in messages]
    if roles != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError("its turns are not user and assistant in turn")
    least = -1 if isinstance(env, EtoEnvironment) else 0  # its rewards begin there
    if type(reward) not in (int, float) or not least <= reward <= 1:
        raise ValueError(f"reward {reward!r} is not in [{least}, 1]")
    env.find(task)
    return task, messages, float(reward)


def never_replied(row: dict) -> bool:
    """Whether a trajectory's context was full before its first reply."""
    return row.get("ended") == "context_limit" and row.get("turns") == 0


def check_fields(row: dict, needed: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
    """ValueError where a field is missing, or one is there beside these. What is not read would be
    left out in silence, and the expert would be another one than the file's."""
    for name in needed:
        if name not in row:
            raise ValueError(f"it has no {name!r}")
    for name in row:
        if name not in needed + more:
            raise ValueError(f"it has {name!r}, which nothing here reads; take it out")


def read_turns(turns: list[dict], who: str, text: str, *more: str, roles=ROLES) -> list[dict]:
    """The messages of a conversation; ValueError where a turn is of another form.

    Args:
        turns: Its turns.
        who: The field that says who speaks.
        text: The field that has what is said.
        more: Fields that may be there beside.
        roles: who may speak -> how a chat template calls them.
    """
    messages = []
    for n, turn in enumerate(turns, 1):
        try:
            check_fields(turn, (who, text), more)
            if turn[who] not in roles:
                raise ValueError(f"its {who!r} is {turn[who]!r}, and only {', '.join(roles)} are "
                                 "read")
            messages.append({"role": roles[turn[who]], "content": text_in(turn[text])})
        except ValueError as error:
            raise ValueError(f"turn {n}: {error}") from None
    return messages


def without_examples(messages: list[dict], steps: int, opening: int) -> list[dict]:
    """An episode's messages without the examples that an agent which plays is shown by ETO's
    protocol.

    Args:
        messages: The episode's.
        steps: How many replies are actions; 0 where the file does not say.
        opening: How many turns come before the first of them in training.
    """
    first = first_reply(messages, steps)
    if steps == 0 or first <= opening:
        return messages
    task = messages[first - 1] | {"content": bare(messages[first - 1]["content"])}
    return [*messages[:opening - 1], task, *messages[first:]]


def published(entry: dict, env: Environment) -> tuple[str, list[dict], float]:
    """Task, messages and reward (1 where it is not known) of an entry of ETO's or IPR's list. It
    opens as rollouts do: by our own protocol the environment's prompt replaces its rules."""
    check_fields(entry, ("id", "conversations"), ("reward", "source"))
    messages = read_turns(entry["conversations"], "from", "value", "loss")
    has_rules = len(messages) > 1 and "Action:" not in messages[1]["content"]
    opening = 2 if has_rules else 0
    for n, turn in enumerate(messages):
        loss = entry["conversations"][n].get("loss")
        trained = n >= opening and turn["role"] == "assistant"
        if loss not in (None, trained):
            raise ValueError(f"turn {n + 1}: its 'loss' is {json.dumps(loss)}, but all replies are "
                             "trained on, and nothing else")

    if len(messages) <= opening:
        raise ValueError("there is no reply in it")
    first, *rest = messages[opening:]
    begins = env.opening(bare(first["content"]))
    if not isinstance(env, EtoEnvironment):
        for turn in rest:
            if turn["role"] == "user":
                turn["content"] = bare(turn["content"])
    elif has_rules:
        begins[:2] = messages[:2]
    task = published_task(env, str(entry["id"]))
    return task, [*begins, *rest], entry.get("reward", 1.0)


def published_task(env: Environment, name: str) -> str:
    """The training task that an id ends in: its number, or those of its type and variation."""
    form = "ETO's are as webshop_17 or sciworld_0_12"
    if re.search(r"(^|[\W_])-\d", name):
        raise ValueError(f"id {name!r} is below 0; {form}")
    numbers = [int(number) for number in re.findall("[0-9]+", name)]
    if len(numbers) < 1 + bool(env.published_types):
        raise ValueError(f"id {name!r} has no number of a task; {form}")
    if env.published_types:
        return f"{env.name}-train-{env.published_types[numbers[-2]]}-{numbers[-1]}"
    return f"{env.name}-train-{numbers[-1]}"


def opens_otherwise(env: Environment, messages: list[dict], shown: str) -> tuple[str, str] | None:
    """Where an expert's opening and the environment's part: prompt, view and first observation.

    Args:
        env: The environment.
        messages: The expert's.
        shown: What the environment shows of the task.

    Returns:
        What they say there and here from where they part, or None if they do not. What a server
        draws at each start may differ.
    """
    opening = env.opening(shown)
    for there, here in zip(messages, opening):
        told = same_each_start(env, there["content"])
        tells = same_each_start(env, here["content"])
        if told != tells:
            start = max(0, len(commonprefix([told, tells])) - 40)
            return told[start:start + 160], tells[start:start + 160]
    return None


def same_each_start(env: Environment, text: str) -> str:
    """A text without what is drawn anew, and without differences in case and white space."""
    return " ".join(re.sub(env.drawn_anew, "", bare(text.strip())).lower().split())
