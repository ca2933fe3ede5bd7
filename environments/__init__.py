"""Finds and makes environments. Each folder here is an environment and has its name.

The `__init__` of such a folder defines the environment's settings, a class `Options`. It imports
only the standard library and this project. The packages that the environment needs are imported
when it is made. The functions below `make` are helpers that several environments share.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from common.settings import Stated, UsageError
from envs import Environment, Stuck

# The names of all environments. Every command accepts these.
ENVIRONMENTS = tuple(sorted(
    file.parent.name for file in Path(__file__).parent.glob("*/__init__.py")))


@dataclass(frozen=True)
class Options(Stated):
    """Settings of an environment.

    A subclass adds its settings and defines make(view), which returns the `Environment`.
    """
    protocol = "ours"  # "eto" runs episodes as the code of ETO does, see eto_protocol.py

    @staticmethod
    def scenario(task: str) -> str | None:
        """Returns the name that the variants of a task share, or None.

        If there is one, the evaluation also reports the fraction of names whose variants all
        succeed.
        """
        return None


def environment(name: str) -> type[Options]:
    """Returns the `Options` of the environment called `name`."""
    if name not in ENVIRONMENTS:
        raise UsageError(f"unknown environment {name!r}; choose from: {', '.join(ENVIRONMENTS)}")
    return import_module(f"environments.{name}").Options


def make(name: str, view: str = "full", examples: int = 1, **options) -> Environment:
    """Makes the environment called `name`.

    Args:
        name: The name, one of ENVIRONMENTS.
        view: The form of the texts: "full", which is the official one, or "short".
        examples: The number of example conversations in the prompt. Only the protocol of ETO has
            such examples.
        options: The fields of the environment's `Options`.
    """
    settings = environment(name)(**options)
    env = settings.make(view)
    if settings.protocol == "eto":
        from environments.eto_protocol import in_eto_protocol
        return in_eto_protocol(env, settings.prompts, examples)
    return env


def converse(env: Environment, observation: str,
             act: Callable[[str], str]) -> tuple[list[dict], float]:
    """Runs the current episode with the replies of `act`.

    Args:
        env: The environment, after `reset` or `start`.
        observation: The first observation.
        act: A function observation -> reply.

    Returns:
        The messages without the observation after the last reply, and the reward. The reward is 0
        if `act` raises Stuck or StopIteration, because it has no next reply.
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


def saying(replies: Iterable[str]) -> Callable[[str], str]:
    """Returns a function observation -> reply that returns these replies in order, whatever the
    observations are. After the last reply it raises StopIteration."""
    remaining = iter(replies)
    return lambda observation: next(remaining)


def first_reply(messages: list[dict], turns: int) -> int:
    """Returns the index of the message with the agent's first reply.

    Assistant messages before it belong to the opening: the "OK" after the rules, and those of the
    examples. If `turns` is 0, or larger than the number of assistant messages, the result is the
    number of messages.

    Args:
        messages: All messages of an episode.
        turns: The number of the agent's replies.
    """
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    return replies[-turns] if 0 < turns <= len(replies) else len(messages)


def words_of(text: str) -> str:
    """Returns the words and numbers of a text in lower case, separated by spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_web_address(text: str) -> bool:
    """Returns True if the whole text has the form http(s)://host[:port][/path]."""
    host = r"([\w.-]+|\[[\da-fA-F:.]+\])"
    port = r"(:[1-9]\d{0,4})?"
    path = r"(/[^\s\\?#@]*)?"
    return bool(re.fullmatch(f"https?://{host}{port}{path}", text))
