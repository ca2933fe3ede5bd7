"""Finds and creates environments. Each folder next to this file contains the environment of the
same name.

The file `__init__.py` of such a folder defines the class `Options`, and imports no optional
packages. The packages that an environment needs are imported only when the environment is created.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from common.settings import Stated, UsageError
from envs import Environment, Step, Stuck

ENVIRONMENTS = tuple(sorted(
    file.parent.name for file in Path(__file__).parent.glob("*/__init__.py")))
MYSQL_ADDRESS = "mysql://user@host:port, with the password in MYSQL_PWD"


@dataclass(frozen=True)
class Options(Stated):
    """Settings of an environment.

    A subclass adds settings and defines the method make(view), which returns the `Environment`.
    """
    # Only the environments of eto_protocol.py have a different protocol.
    protocol: ClassVar[str] = "ours"

    def in_protocol(self, env: Environment, examples: int) -> Environment:
        return env

    @staticmethod
    def scenario(task: str) -> str | None:
        """Returns the name of a task's scenario, or None if the environment has no scenarios.

        The tasks of a scenario are variants of each other. If an environment has scenarios, the
        evaluation also reports the fraction of scenarios in which all variants succeed.
        """
        return None


def environment(name: str) -> type[Options]:
    """Returns the settings class, `Options`, of the environment called `name`."""
    if name not in ENVIRONMENTS:
        raise UsageError(f"unknown environment {name!r}; choose from: {', '.join(ENVIRONMENTS)}")
    return import_module(f"environments.{name}").Options


def make(name: str, view: str = "full", examples: int = 1, **options) -> Environment:
    """Creates an environment and returns it.

    Args:
        view: "full" for the environment's official texts, or "short" for shorter texts.
        examples: The number of example conversations in the prompt with protocol="eto". Our own
            prompts contain no examples.
        options: Values for the fields of the environment's `Options`.
    """
    settings = environment(name)(**options)
    return settings.in_protocol(settings.make(view), examples)


def converse(env: Environment, observation: str,
             act: Callable[[str], str]) -> tuple[list[dict], float]:
    """Plays an episode. Returns its messages up to the last reply, and its reward.

    Args:
        env: The environment, after a call to `reset` or `start`.
        act: A function that takes an observation and returns a reply. If the function raises Stuck
            or StopIteration, the episode ends with reward 0.
    """
    messages = env.opening(observation)
    for turn in range(1, env.max_turns + 1):
        try:
            reply = act(observation)
        except (Stuck, StopIteration):
            return messages, 0.0
        messages.append({"role": "assistant", "content": reply})
        step = env.step(reply)
        if step.done or turn == env.max_turns:
            break
        observation = step.observation
        messages.append({"role": "user", "content": observation})
    return messages, step.reward


def replay(env: Environment, task, replies: list[str]) -> list[Step]:
    """Plays an episode with the given replies, and returns its steps. `task` is a task's value."""
    env.start(task)
    steps = []
    for reply in replies[:env.max_turns]:
        steps.append(env.step(reply))
        if steps[-1].done:
            break
    return steps


def saying(replies: Iterable[str]) -> Callable[[str], str]:
    """Returns a function `act` for `converse`, which returns the given replies one by one."""
    remaining = iter(replies)
    return lambda observation: next(remaining)


def first_reply(messages: list[dict], turns: int) -> int:
    """Returns the index of the message that contains the agent's first reply.

    With --protocol eto, the opening of an episode also contains assistant messages. The agent's own
    replies are therefore the last `turns` assistant messages. Returns len(messages) if `turns` is 0
    or if there are fewer than `turns` assistant messages.
    """
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    return replies[-turns] if 0 < turns <= len(replies) else len(messages)


def numbered(tasks: list) -> dict[str, object]:
    """Returns a dict that maps the keys "0", "1", ... to the tasks, in order."""
    return {str(n): task for n, task in enumerate(tasks)}


def words_of(text: str) -> str:
    """Returns the words and numbers of a text in lower case, separated by spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_web_address(text: str) -> bool:
    """Returns True if the whole text has the form http(s)://host[:port][/path]."""
    host = r"([\w.-]+|\[[\da-fA-F:.]+\])"
    port = r"(:[1-9]\d{0,4})?"
    path = r"(/[^\s\\?#@]*)?"
    return bool(re.fullmatch(f"https?://{host}{port}{path}", text))


def is_mysql_address(text: str) -> bool:
    """Returns True if the text has the form mysql://user@host or mysql://user@host:port."""
    match = re.fullmatch(r"mysql://[^:@/\s]+@[^:@/\s]+(?::([0-9]{1,5}))?/?", text)
    return bool(match) and 0 < int(match[1] or 3306) < 65536


def with_pairs(names: list[str]) -> set[str]:
    """Returns a set of all names and all pairs of consecutive names, such as "a, b"."""
    return {*names, *(f"{a}, {b}" for a, b in zip(names, names[1:]))}
