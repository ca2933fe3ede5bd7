"""What environments share. Each of them is a folder here; read `webshop/shop.py` first.

The folder's `__init__` states its settings in a class `Options` and imports the standard library
alone; what it needs is imported where it is made.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from common.settings import Refused, Stated

ENVIRONMENTS = ("webshop", "scienceworld", "intercodesql", "bfcl", "appworld")  # the folders


@dataclass(frozen=True)
class Options(Stated):
    """The settings of an environment, which its folder adds; make(view) gives the `World`."""
    protocol = "ours"  # "eto" where an episode is told as ETO's code does

    @staticmethod
    def scenario(task: str) -> str | None:
        """What the task is a variant of, where variants are also scored together; else None."""
        return None


def environment(name: str) -> type[Options]:
    """What the folder of this name states."""
    if name not in ENVIRONMENTS:
        raise Refused(f"unknown environment {name!r}; choose from: {', '.join(ENVIRONMENTS)}")
    return import_module(f"worlds.{name}").Options


def is_web_address(text: str) -> bool:
    """Whether it is http(s)://host[:port][/path], with nothing else in it."""
    host, port, path = r"([\w.-]+|\[[\da-fA-F:.]+\])", r"(:[1-9]\d{0,4})?", r"(/[^\s\\?#@]*)?"
    return bool(re.fullmatch(f"https?://{host}{port}{path}", text))


def without_passwords(text: str) -> str:
    """`text`, the passwords of addresses in it replaced by ***."""
    return re.sub(r"(://[^:@/\s]*):(?!password@)\S*@", r"\1:***@", text)


class EnvError(Exception):
    """The environment broke, so the episode is void; the text is one line with the remedy."""


@dataclass(frozen=True)
class Step:
    observation: str  # the text the agent reads next
    reward: float     # the episode's reward so far, in [0, 1]; by ETO's protocol from -1
    done: bool
    raw: float | None = None  # the reward before it was clipped to [0, 1], where that can differ


class World:
    """An environment: one object plays one episode at a time, and worlds repeat exactly.

    A subclass states what is below, and has
        start(what) -> str                  begins an episode on what `find` gives; the observation
        step(reply) -> Step                 for `max_steps` replies at most; others count them
        expert() -> page -> reply           of the episode just reset; Refused: there is none
    One that breaks raises EnvError at the first fault; after `close`, `reset` starts afresh. Tasks
    have ids, NAME-SPLIT-KEY; the split of those made during a run is "added".
    """
    name: str
    rules = ""            # said once at the start of an episode, by the full view
    splits: dict[str, dict]  # split -> key -> what the task is, all the same in every process
    test_splits: tuple[str, ...]
    max_steps: int        # of the task just reset
    drawn_anew = "(?!)"   # what of a page each start of this world draws anew, as a pattern
    makes_tasks = False   # whether `tasks.py` of its folder makes new ones of what agents find
    theirs = None         # `published.Theirs`, where an episode is to be as in ETO's code
    success = 1.0         # the reward from which an episode is solved; one below is a failure
    published_types = ()  # of tasks, as the numbers in ids of published experts count them
    task_of = None        # key -> a task of no split, as published experts play too

    def __init__(self, view: str = "full"):
        self.view = view
        self.prompt = self.rules if view == "full" else ""
        self._added = {}  # key -> what the task is

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split, in order."""
        if split not in self.splits and split != "added":
            raise Refused(f"{self.name}: unknown split {split!r}; choose from: "
                          f"{', '.join(self.splits)}")
        return [f"{self.name}-{split}-{key}" for key in self.splits.get(split, self._added)]

    def reset(self, task: str) -> str:
        """Begins an episode on a task; the first observation."""
        return self.start(self.find(task))

    def find(self, task: str):
        """What the task is; ValueError if there is none."""
        try:
            name, split, key = task.split("-", 2)
            tasks = {self.name: {**self.splits, "added": self._added}}[name][split]
            made = self.task_of and split != "added" and key not in tasks
            return self.task_of(key) if made else tasks[key]
        except (KeyError, ValueError):
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them") from None

    def action(self, reply: str) -> str | None:
        """The action in a reply, what follows the last "Action:", else all; None: there is none."""
        if self.theirs:
            return self.theirs.action(reply)
        _, marker, action = reply.rpartition("Action:")
        return action.strip() if marker else reply

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        return opening(self, observation, playing)

    def possible(self) -> tuple[list[str], str]:
        """For a person: actions that can be played now, and the forms of others, in lines."""
        return [], ""

    def reply(self, action: str) -> str:
        """A reply that does an action, which a person wrote as it is."""
        return action if self.view == "short" or "Action:" in action else f"Action: {action}"

    def add(self, task: dict) -> str:
        """The id, NAME-added-N, of a task for this object alone; the same task has the same id."""
        known = [*self._added.values()]
        key = str(known.index(task) if task in known else len(known))
        self._added[key] = task
        return f"{self.name}-added-{key}"

    def task_generator(self):
        """What makes tasks of an agent's finds; Refused where nothing does."""
        if self.makes_tasks:
            return import_module(f"worlds.{self.name}.tasks").TaskGenerator(self)
        raise Refused(f"{self.name}: nobody makes new tasks in this world; give --method grpo "
                      "--start-from train, or play the built-in shop, built-in databases, bfcl or "
                      "appworld")

    def close(self) -> None:
        """Ends what runs; after it `reset` starts afresh."""


def words_of(text: str) -> str:
    """The text's words and numbers alone, in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def said(env, text: str) -> str:
    """What the agent reads after an action that led to `text`."""
    return env.theirs.observation(text) if env.theirs else text


def opening(env, observation: str, playing: bool = False) -> list[dict]:
    """The turns an episode opens with: what the agent is told, then its first observation; if
    playing, with the example that an agent reads in ETO's protocol and is not trained on."""
    if env.theirs:
        return env.theirs.opening(observation, playing)
    content = f"{env.prompt}\n\n{observation}" if env.prompt else observation
    return [{"role": "user", "content": content}]


def first_reply(messages: list[dict], steps: int) -> int:
    """How many turns come before the first of so many replies; "OK" and examples are none."""
    acted = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    return acted[-steps] if 0 < steps <= len(acted) else len(messages)


def converse(env, observation: str, act: Callable[[str], str]) -> tuple[list[dict], float]:
    """The conversation of one who replies act(bare observation) to the end, and its reward."""
    messages, page = opening(env, observation), observation
    for turn in range(1, env.max_steps + 1):
        reply = act(env.theirs.bare(page) if env.theirs else page)
        messages.append({"role": "assistant", "content": reply})
        step = env.step(reply)
        if step.done or turn == env.max_steps:
            return messages, step.reward
        page = step.observation
        messages.append({"role": "user", "content": page})


def replay(env, task, replies: list[str]) -> list[Step]:
    """The steps of these replies, to the end of the episode, on what a task is."""
    env.start(task)
    steps = []
    for reply in replies:
        steps.append(env.step(reply))
        if steps[-1].done:
            break
    env.close()
    return steps
