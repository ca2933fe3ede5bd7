"""Reads expert trajectories from a file: trajectories of a run, or a list of ETO or IPR.

ETO (Song et al. 2024) and IPR (Xiong et al. 2024) publish expert trajectories as a JSON list. This
file calls these published. A run writes its trajectories as JSON lines. An expert trajectory is
only used if it has the same opening, of prompt and first observation, as an episode here.
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
# Fields of a run's trajectories that are not used here
PLAYED = ("agent", "iteration", "rollout", "seed", "ids", "action_mask", "log_probs", "raw_reward",
          "turns", "idle", "ended", "signal")
# The roles in published files and in those of a run -> the roles of chat templates
ROLES = {"user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


def experts(env: Environment, file: str | None, count: int, dropped: Counter | None = None,
            report: Callable[[str], None] = print) -> Iterator[tuple[str, list[dict], float]]:
    """Yields expert trajectories, from a file or from the scripted expert.

    Args:
        env: The environment.
        file: The file, or None for the scripted expert.
        count: The number of tasks, or 0 for all of them.
        dropped: The counter of entries that are left out, by reason.
        report: A function that prints a line for the user.

    Yields:
        Task, messages and reward. The reward is 0 if the scripted expert has no next reply. A file
        may have several trajectories of a task, as the trajectories of an agent do.

    Raises:
        UsageError: If an entry of the file is malformed, or its task opens differently here.
    """
    if not file:
        for task in env.tasks("train")[:count or None]:
            messages, reward = converse(env, env.reset(task), env.expert())
            yield task, messages, reward
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
            theirs, ours = difference
            raise UsageError(f"--experts {file}: {task} is another task here. The openings differ, "
                             f"in the file | here: {theirs!r} | {ours!r}; give the environment and "
                             "the --view that these experts were made in, or experts of this one")
        yield task, messages, reward


def tasks_of(trajectories: list[tuple]) -> list[str]:
    """Returns the tasks in the result of `read_experts`, each once, in the order of the file."""
    return list(dict.fromkeys(task for task, _, _ in trajectories))


def read_experts(path: str, env: Environment, report: Callable[[str], None] | None = None,
                 ) -> list[tuple[str, list[dict], float]]:
    """Returns task, messages and reward of each entry of a file.

    A rollout whose context was full before its first reply has no messages.

    Args:
        path: The file.
        env: The environment.
        report: A function that prints how many published entries have no reward, if any, or None.

    Raises:
        UsageError: If the file or an entry is malformed. The message names the entry and the turn.
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
    """Returns task, messages and reward of an entry.

    Raises:
        ValueError: If the entry is no expert trajectory of this environment. An entry of the wrong
            type raises other exceptions, all of them in `user_files.FAULTS`.
    """
    # 1. Get the fields of a published entry or of a run's trajectory.
    if "conversations" in entry:
        task, messages, reward = read_published(entry, env)
    else:
        check_fields(entry, ("task", "messages", "reward"), PLAYED)
        task = entry["task"]
        reward = entry["reward"]
        messages = read_turns(entry["messages"], "role", "content")
        messages = without_examples(messages, entry.get("turns", 0), len(env.opening("")))

    # 2. Drop the observations after the last reply, which are not trained on.
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
    lowest = -1 if isinstance(env, EtoEnvironment) else 0  # ETO's protocol has negative rewards
    if type(reward) not in (int, float) or not lowest <= reward <= 1:
        raise ValueError(f"reward {reward!r} is not in [{lowest}, 1]")
    env.find(task)
    return task, messages, float(reward)


def never_replied(row: dict) -> bool:
    """Returns True if the context of a run's trajectory was full before its first reply."""
    return row.get("ended") == "context_limit" and row.get("turns") == 0


def check_fields(row: dict, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a required field is missing, or if the row has any field that is neither
    required nor optional.

    If such a field were ignored silently, the expert trajectory could differ from the one that the
    file means.
    """
    for name in required:
        if name not in row:
            raise ValueError(f"it has no {name!r}")
    for name in row:
        if name not in required + optional:
            raise ValueError(f"it has {name!r}, which is not supported; remove it")


def read_turns(turns: list[dict], role: str, text: str, *optional: str, roles=ROLES) -> list[dict]:
    """Returns the messages of a conversation in the form that chat templates take.

    Args:
        turns: The messages as they are in the file.
        role: The name of the field that has the role.
        text: The name of the field that has the text.
        optional: The names of fields that may be there as well, and are not read.
        roles: A dict {role in the file: role in a chat template}.

    Raises:
        ValueError: If a message has another form. The error gives its number, counted from 1.
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
    """Returns the messages of an episode without the examples in its prompt.

    In ETO's protocol, agents act with examples in the prompt and train without them.

    Args:
        messages: The messages of the episode.
        turns: The number of replies that have an action, or 0 if the file does not give it.
        opening: The number of messages before the first of these replies in training.
    """
    first = first_reply(messages, turns)
    if turns == 0 or first <= opening:
        return messages
    task = messages[first - 1]
    task = task | {"content": without_heading(task["content"])}
    return [*messages[:opening - 1], task, *messages[first:]]


def read_published(entry: dict, env: Environment) -> tuple[str, list[dict], float]:
    """Returns task, messages and reward of a published entry.

    An entry without a reward counts as 1. The messages get the opening that rollouts have here.
    With our protocol, the environment's prompt replaces the rules of the entry.
    """
    # 1. Read the messages, and check that the file's loss mask is ours: all replies are trained on.
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

    # 2. Replace the opening by that of the environment.
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
    """Returns the training task of a published id, such as webshop_17.

    The key of the task is the last number in the id. If the environment has task types, the last
    number is the variation, and the number before it is that of the type.
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
                       observation: str) -> tuple[str, str] | None:
    """Compares the opening of an expert trajectory with that of an episode here.

    The openings contain the prompt in one of the views, and the first observation. Text that a
    server draws anew at each start may differ.

    Args:
        env: The environment.
        messages: The messages of the expert trajectory.
        observation: The first observation of the task here.

    Returns:
        Excerpts of the expert's opening and of ours, around the first difference, or None if the
        openings are equal.
    """
    opening = env.opening(observation)
    for their_message, our_message in zip(messages, opening):
        theirs = comparable(env, their_message["content"])
        ours = comparable(env, our_message["content"])
        if theirs != ours:
            start = max(0, len(commonprefix([theirs, ours])) - 40)
            return theirs[start:start + 160], ours[start:start + 160]
    return None


def comparable(env: Environment, text: str) -> str:
    """Returns a text without its heading and the parts that a server draws anew, in lower case and
    with single spaces."""
    return " ".join(re.sub(env.drawn_anew, "", without_heading(text.strip())).lower().split())
