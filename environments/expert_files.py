"""Reads expert trajectories (demonstrations) from a file.

The file is a JSON list, as published by ETO (Song et al. 2024) and IPR (Xiong et al. 2024), or
contains JSON lines, as written by a run of this project. The opening of a trajectory is its prompt
and its first observation. The opening must match the task's opening in our environment. If the two
openings differ, the trajectory was made on a different task.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from os.path import commonprefix
from pathlib import Path

from common.settings import UsageError
from environments import converse, first_reply
from environments.eto_protocol import EtoEnvironment, without_heading
from environments.user_files import reading, text_in
from envs import Environment

MUST = ("ETO's JSON list (id, conversations of from and value) or a run's trajectories (task, "
        "messages of role and content, reward; experts.jsonl, for example), of this environment's "
        "tasks")
# Optional fields of a run's trajectories. Only "turns" and "ended" are used here.
PLAYED = ("agent", "iteration", "rollout", "seed", "ids", "action_mask", "log_probs", "raw_reward",
          "turns", "idle", "ended", "signal")
# {role in a file of either format: role in a chat template}
ROLES = {"user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


def experts(env: Environment, file: str | None, count: int, dropped: Counter | None = None,
            report: Callable[[str], None] = print) -> Iterator[tuple[str, list[dict], float]]:
    """Yields expert trajectories as (task id, messages, reward).

    A file may contain several trajectories of the same task.

    Args:
        file: The path of the file, or None for the scripted expert. If the scripted expert gets
            stuck, the reward is 0.
        count: The number of tasks to use, or 0 for all tasks.
        dropped: A counter {reason: number of entries}, which counts the entries left out.
        report: A function that prints a line for the user.
    """
    if not file:
        for task in env.tasks("train")[:count or None]:
            yield task, *converse(env, env.reset(task), env.expert())
        return
    if dropped is None:
        dropped = Counter()
    trajectories = read_experts(file, env, report)
    selected = set(tasks_of(trajectories)[:count or None])
    for task, messages, reward in trajectories:
        if task not in selected:
            continue
        if not messages:
            dropped["too long"] += 1
            continue
        difference = opening_difference(env, messages, env.reset(task))
        if difference:
            raise UsageError(f"--experts {file}: {task} is another task here. The openings differ, "
                             f"in the file | here: {difference}; give the environment and the "
                             "--view that these experts were made in, or experts of this one")
        yield task, messages, reward


def tasks_of(trajectories: list[tuple]) -> list[str]:
    """Returns the distinct task ids in a result of `read_experts`, in the order of the file."""
    return list(dict.fromkeys(task for task, _, _ in trajectories))


def read_experts(path: str, env: Environment, report: Callable[[str], None] | None = None,
                 ) -> list[tuple[str, list[dict], float]]:
    """Reads a file of expert trajectories, and returns (task id, messages, reward) for each entry.

    The messages are empty if the context window was full before the agent's first reply. An entry
    without a reward gets reward 1, and `report` prints the number of such entries.
    """
    with reading(f"--experts {path}", MUST):
        text = Path(path).read_text(encoding="utf-8-sig")
        is_list = text.lstrip().startswith("[")
        rows = json.loads(text) if is_list else text.strip().split("\n")

    trajectories = []
    without_reward = 0
    for n, row in enumerate(rows):
        position = f"entry {n}" if is_list else f"line {n + 1}"
        with reading(f"--experts {path}, {position}", MUST):
            entry = row if is_list else json.loads(row)
            trajectories.append(read_entry(entry, env))
            without_reward += "reward" not in entry
    if without_reward and report:
        report(f"{path}: {without_reward} of {len(rows)} expert trajectories have no reward; they "
               "count as 1")
    return trajectories


def read_entry(entry: dict, env: Environment) -> tuple[str, list[dict], float]:
    """Returns (task id, messages, reward) of an entry in either file format.

    Raises one of the exceptions in `user_files.FAULTS` if the entry is not an expert trajectory of
    this environment.
    """
    # 1. Read the task, the messages and the reward, from either file format.
    if "conversations" in entry:
        task, messages, reward = read_published(entry, env)
    else:
        check_fields(entry, ("task", "messages", "reward"), PLAYED)
        task = entry["task"]
        reward = entry["reward"]
        messages = read_turns(entry["messages"], "role", "content")
        messages = without_examples(messages, entry.get("turns", 0), len(env.opening("")))

    # 2. Drop the observations after the last reply, because training does not use them.
    while messages and messages[-1]["role"] == "user":
        messages.pop()

    # 3. Check the messages, the reward and the task.
    if never_replied(entry):
        messages = []
    elif len(messages) <= len(env.opening("")):
        raise ValueError("the conversation has no reply")
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError("the messages do not alternate between user and assistant")
    lowest = -1 if isinstance(env, EtoEnvironment) else 0  # rewards in ETO's code can be negative
    if type(reward) not in (int, float) or not lowest <= reward <= 1:
        raise ValueError(f"reward {reward!r} is not in [{lowest}, 1]")
    env.find(task)
    return task, messages, float(reward)


def never_replied(row: dict) -> bool:
    """Returns True if the context window of a rollout was full before the first reply."""
    return row.get("ended") == "context_limit" and row.get("turns") == 0


def check_fields(row: dict, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a required field is missing, or if the row contains an unknown field.

    Unknown fields are not ignored, because a field may change the meaning of the row. For example,
    it may mark messages that the model should not be trained on.
    """
    for name in required:
        if name not in row:
            raise ValueError(f"it has no {name!r}")
    for name in row:
        if name not in required + optional:
            raise ValueError(f"it has {name!r}, which is not supported; remove it")


def read_turns(turns: list[dict], role: str, text: str, *optional: str, roles=ROLES) -> list[dict]:
    """Converts a conversation in a file to messages {"role": ..., "content": ...}.

    Args:
        turns: The messages in the file, each a dict.
        role: The name of the field with the role of a message.
        text: The name of the field with the text of a message.
        optional: The names of fields that are ignored.
        roles: A dict {role in the file: role in a chat template}.

    Raises:
        ValueError: A message is malformed. The error gives the number of the message, counted from
            1.
    """
    messages = []
    for n, turn in enumerate(turns, 1):
        try:
            check_fields(turn, (role, text), optional)
            if turn[role] not in roles:
                raise ValueError(f"its {role!r} is {turn[role]!r}, which is not supported; choose "
                                 f"from: {', '.join(roles)}")
            messages.append({"role": roles[turn[role]], "content": text_in(turn[text])})
        except ValueError as error:
            raise ValueError(f"turn {n}: {error}") from None
    return messages


def without_examples(messages: list[dict], turns: int, opening: int) -> list[dict]:
    """Removes the example conversations from the messages of an episode.

    With --protocol eto, the prompt contains examples when the agent acts, but not when it is
    trained.

    Args:
        turns: The number of the agent's replies, or 0 if it is unknown.
        opening: The number of messages before the first reply in an episode without examples.
    """
    first = first_reply(messages, turns)
    if turns == 0 or first <= opening:
        return messages
    task = messages[first - 1]
    task = task | {"content": without_heading(task["content"])}
    return [*messages[:opening - 1], task, *messages[first:]]


def read_published(entry: dict, env: Environment) -> tuple[str, list[dict], float]:
    """Converts a published entry, and returns (task id, messages, reward).

    If the entry has no reward, the reward is 1. The opening of our episodes replaces the opening of
    the conversation. With --protocol eto, the rules in the entry are kept.
    """
    # 1. Read the messages. A loss mask in the file must select all replies and nothing else,
    # because training always computes the loss on exactly these tokens.
    check_fields(entry, ("id", "conversations"), ("reward", "source"))
    messages = read_turns(entry["conversations"], "from", "value", "loss")
    has_rules = len(messages) > 1 and "Action:" not in messages[1]["content"]
    opening = 2 if has_rules else 0
    for n, message in enumerate(messages):
        loss = entry["conversations"][n].get("loss")
        is_trained = n >= opening and message["role"] == "assistant"
        if loss not in (None, is_trained):
            raise ValueError(f"turn {n + 1}: its 'loss' is {json.dumps(loss)}, but all replies are "
                             "trained on, and nothing else")

    # 2. Replace the opening with the opening of our environment.
    if len(messages) <= opening:
        raise ValueError("the conversation has no reply")
    first, *rest = messages[opening:]
    new_opening = env.opening(without_heading(first["content"]))
    if not isinstance(env, EtoEnvironment):
        for message in rest:
            if message["role"] == "user":
                message["content"] = without_heading(message["content"])
    elif has_rules:
        new_opening[:2] = messages[:2]
    task = published_task(env, str(entry["id"]))
    return task, [*new_opening, *rest], entry.get("reward", 1.0)


def published_task(env: Environment, name: str) -> str:
    """Converts a published id, such as webshop_17 or sciworld_0_12, to the id of a training task.

    The last number in a published id identifies the task. In ScienceWorld, it is the variation, and
    the number before it is the index of the task type.
    """
    form = "ETO's ids have the form webshop_17 or sciworld_0_12"
    if re.search(r"(^|[\W_])-\d", name):
        raise ValueError(f"id {name!r} has a negative number; {form}")
    numbers = [int(number) for number in re.findall("[0-9]+", name)]
    if len(numbers) < 1 + bool(env.published_types):
        raise ValueError(f"id {name!r} has no number of a task; {form}")
    if env.published_types:
        return f"{env.name}-train-{env.published_types[numbers[-2]]}-{numbers[-1]}"
    return f"{env.name}-train-{numbers[-1]}"


def opening_difference(env: Environment, messages: list[dict],
                       observation: str) -> str | None:
    """Compares the opening of an expert trajectory with the opening in our environment.

    Args:
        observation: The first observation of the same task in our environment.

    Returns:
        An excerpt of each opening, at the first difference, or None if there is no difference.
    """
    opening = env.opening(observation)
    for their_message, our_message in zip(messages, opening):
        theirs = comparable(env, their_message["content"])
        ours = comparable(env, our_message["content"])
        if theirs != ours:
            start = max(0, len(commonprefix([theirs, ours])) - 40)
            return f"{theirs[start:start + 160]!r} | {ours[start:start + 160]!r}"
    return None


def comparable(env: Environment, text: str) -> str:
    """Normalises a text for a comparison.

    Removes the heading, extra whitespace and all matches of `env.drawn_anew`, and converts the text
    to lower case. `drawn_anew` matches text that a real WebShop server changes at each start.
    """
    return " ".join(re.sub(env.drawn_anew, "", without_heading(text.strip())).lower().split())
