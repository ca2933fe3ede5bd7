"""Finds and makes environments. Each folder here is one, and is called by its name.

The `__init__` of a folder holds the environment's settings, a class `Options`, and imports nothing
but the standard library; packages that the environment needs are imported when it is made.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from common.settings import Stated, UsageError
from envs import Environment, Stuck

# The names of all environments, which every command uses
ENVIRONMENTS = tuple(sorted(
    file.parent.name for file in Path(__file__).parent.glob("*/__init__.py")))


@dataclass(frozen=True)
class Options(Stated):
    """Settings of an environment; a folder adds its own. make(view) returns the `Environment`."""
    protocol = "ours"  # "eto" to run episodes as ETO's code does, see eto_protocol.py

    @staticmethod
    def scenario(task: str) -> str | None:
        """Returns the name that variants of one task share if a success on all of them is also
        reported, or None."""
        return None


def environment(name: str) -> type[Options]:
    """Returns the `Options` of the environment called `name`."""
    if name not in ENVIRONMENTS:
        raise UsageError(f"unknown environment {name!r}; choose from: {', '.join(ENVIRONMENTS)}")
    return import_module(f"environments.{name}").Options


def make(name: str, view: str = "full", examples: int = 1, **options) -> Environment:
    """Makes the environment called `name`.

    Args:
        name: One of ENVIRONMENTS.
        view: "full", the official text, or "short".
        examples: The number of examples in the prompt, with ETO's protocol.
        options: The fields of the environment's `Options`.
    """
    chosen = environment(name)(**options)
    env = chosen.make(view)
    if chosen.protocol == "eto":
        from environments.eto_protocol import in_eto_protocol
        return in_eto_protocol(env, chosen.prompts, examples)
    return env


def converse(env: Environment, observation: str,
             act: Callable[[str], str]) -> tuple[list[dict], float]:
    """Runs the current episode with the replies of `act`.

    Args:
        env: The environment, after `reset` or `start`.
        observation: The first observation.
        act: observation -> reply.

    Returns:
        The messages, and the reward. The reward is 0 if `act` had no next reply.
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
    """Somebody who says these replies one after the other, whatever is observed."""
    left = iter(replies)
    return lambda observation: next(left)


def first_reply(messages: list[dict], steps: int) -> int:
    """How many turns come before the first of so many replies; "OK" and examples are none."""
    acted = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
    return acted[-steps] if 0 < steps <= len(acted) else len(messages)


def words_of(text: str) -> str:
    """The text's words and numbers alone, in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_web_address(text: str) -> bool:
    """Whether it is http(s)://host[:port][/path], with nothing else in it."""
    host = r"([\w.-]+|\[[\da-fA-F:.]+\])"
    port = r"(:[1-9]\d{0,4})?"
    path = r"(/[^\s\\?#@]*)?"
    return bool(re.fullmatch(f"https?://{host}{port}{path}", text))
