"""What environments share. Each of them is a folder here; read `webshop/shop.py` first.

A folder's `__init__` states the environment's settings in a class `Options` and imports the
standard library alone; what the environment needs is imported where it is made.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

from common.settings import Refused, Stated

ENVIRONMENTS = ("webshop", "scienceworld", "intercodesql", "bfcl", "appworld")  # the folders

MARKS = "*_`\"'"  # that chat models write around an action
# How they label one, with marks and a number or not; and what ends it.
LABEL = re.compile(r"^[^a-z\n]*action[^a-z\n:：]*[:：\n]", re.I | re.M)
NEXT = re.compile(r"\n|(?:Thought|Action|Observation):")


class EnvError(Exception):
    """The environment broke, so the episode is void; the text is one line with the remedy."""


class Stuck(Exception):
    """A scripted expert does not know how to go on from the page that it reads."""


@dataclass(frozen=True)
class Step:
    """What a reply led to."""
    observation: str  # the text the agent reads next
    reward: float     # the episode's reward so far, in [0, 1]; by ETO's protocol from -1
    done: bool
    raw: float | None = None  # the reward before it was clipped to [0, 1], where that can differ
    # The reply changed nothing: it has no action, none that is known or offered there, or one after
    # which all is as before. It is there to be counted, and equal steps may differ in it.
    idle: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Options(Stated):
    """The settings of an environment, which its folder adds. make(view) gives the `World`."""
    protocol = "ours"  # "eto" where an episode is told as ETO's code does, see eto_protocol.py

    @staticmethod
    def scenario(task: str) -> str | None:
        """What the task is a variant of, where variants are also scored together; else None."""
        return None


class World:
    """An environment: one object plays one episode at a time, and worlds repeat exactly.

    A subclass states `name`, `splits`, `test_splits` and `max_steps`, and defines `start`, `step`
    and, if it has one, `expert`. All else has a default. An environment that breaks raises EnvError
    at the first fault; after `close`, `reset` starts afresh.

    A task has an id, NAME-SPLIT-KEY, by which `find` knows it. What it *is* may be anything: a
    goal, a question, a number. The split of tasks made during a run is "added".
    """
    name: str
    splits: dict[str, dict]       # split -> key -> what the task is, all the same in every process
    test_splits: tuple[str, ...]  # the splits that a run evaluates
    max_steps: int                # replies in an episode, of the task just reset; others count them
    stops = ("Observation:",)     # a reply ends before one of these texts [ours]
    rules = ""                    # said once at the start of an episode, by the full view
    drawn_anew = "(?!)"           # what of a page each start of a server draws anew, a pattern
    makes_tasks = False           # whether `tasks.py` of its folder makes new ones of finds
    published_types = ()          # of tasks, as the numbers in ids of published experts count them
    task_of = None                # key -> a task of no split, as published experts play too

    def __init__(self, view: str = "full"):
        self.view = view
        self.prompt = self.rules if view == "full" else ""
        self._added = {}  # key -> what the task is

    # ------------------------------------------------------------------ an episode

    def reset(self, task: str) -> str:
        """Begins an episode on a task; the first observation."""
        return self.start(self.find(task))

    def start(self, what) -> str:
        """Begins an episode on what a task is, as `find` gives it; the first observation."""
        raise NotImplementedError(f"{type(self).__name__}.start")

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """The turns that an episode opens with: what the agent is told, then what it observes.

        Args:
            observation: The first one.
            playing: As an agent reads them that plays; else as it is trained on them. They differ
                where an agent is shown examples.
        """
        content = f"{self.prompt}\n\n{observation}" if self.prompt else observation
        return [{"role": "user", "content": content}]

    def action(self, reply: str) -> str | None:
        """The action in a reply: the line behind the first "Action:", else all of it; None: there
        is none. What follows that line was written before its answer was read. Emphasis, quotes
        and code marks around an action are no part of it."""
        label = LABEL.search(reply) or re.search("Action:", reply)
        if label:
            return unmarked(NEXT.split(unmarked(reply[label.end():]))[0])
        return unmarked(reply) if reply.lstrip()[:1] in {*MARKS} else reply

    def step(self, reply: str) -> Step:
        """Does what a reply says. It is called `max_steps` times at most."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Ends what runs; after it `reset` starts afresh."""

    # ------------------------------------------------------------------ its tasks

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split, in order."""
        if split not in self.splits and split != "added":
            raise Refused(f"{self.name}: unknown split {split!r}; choose from: "
                          f"{', '.join(self.splits)}")
        return [f"{self.name}-{split}-{key}" for key in self.splits.get(split, self._added)]

    def find(self, task: str):
        """What the task with this id is; ValueError if there is none."""
        try:
            name, split, key = task.split("-", 2)
            found = {self.name: {**self.splits, "added": self._added}}[name][split]
            if key not in found and split != "added" and self.task_of:
                return self.task_of(key)
            return found[key]
        except (KeyError, ValueError):
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them") from None

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

    # ------------------------------------------------------------------ who else plays

    def expert(self) -> Callable[[str], str]:
        """The scripted expert of the episode just reset: observation -> reply. It raises Stuck, or
        StopIteration, where it cannot go on."""
        raise Refused(f"{self.name}: it has no scripted expert; give --experts FILE")

    def possible(self) -> tuple[list[str], str]:
        """For a person: actions that can be played now, and the forms of others, in lines."""
        return [], ""

    def reply(self, action: str) -> str:
        """A reply that does an action, which a person wrote as it is."""
        return action if self.view == "short" or "Action:" in action else f"Action: {action}"


def environment(name: str) -> type[Options]:
    """What the folder of this name states."""
    if name not in ENVIRONMENTS:
        raise Refused(f"unknown environment {name!r}; choose from: {', '.join(ENVIRONMENTS)}")
    return import_module(f"worlds.{name}").Options


def make(name: str, view: str = "full", examples: int = 1, **options) -> World:
    """Makes the environment called `name`.

    Args:
        name: one of ENVIRONMENTS.
        view: "full", the official text, or "short".
        examples: that an agent is shown by ETO's protocol.
        options: the fields of the environment's `Options`.
    """
    chosen = environment(name)(**options)
    world = chosen.make(view)
    if chosen.protocol == "eto":
        from worlds.eto_protocol import told_as_eto
        return told_as_eto(world, chosen.prompts, examples)
    return world


def converse(env: World, observation: str, act: Callable[[str], str]) -> tuple[list[dict], float]:
    """Lets somebody play the episode just begun.

    Args:
        env: The environment, after `reset` or `start`.
        observation: The first one.
        act: observation -> reply.

    Returns:
        The conversation, and its reward; 0 where `act` could not go on.
    """
    messages = env.opening(observation)
    for turn in range(1, env.max_steps + 1):
        try:
            reply = act(observation)
        except (Stuck, StopIteration):
            return messages, 0.0
        messages.append({"role": "assistant", "content": reply})
        step = env.step(reply)
        if step.done or turn == env.max_steps:
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


def unmarked(text: str) -> str:
    """What stands inside the code marks that a text begins with, and in emphasis or quotes."""
    code = re.match(rf"[\s{MARKS}]*?(`+)(?:\w*\n)?(.*?)(?:\1|$)", text, re.S)
    inside = code[2] if code else text
    spaces = "".join(filter(str.isspace, {*inside}))  # of any kind
    return inside.strip(MARKS + spaces)


def words_of(text: str) -> str:
    """The text's words and numbers alone, in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_web_address(text: str) -> bool:
    """Whether it is http(s)://host[:port][/path], with nothing else in it."""
    host = r"([\w.-]+|\[[\da-fA-F:.]+\])"
    port = r"(:[1-9]\d{0,4})?"
    path = r"(/[^\s\\?#@]*)?"
    return bool(re.fullmatch(f"https?://{host}{port}{path}", text))


def without_passwords(text: str) -> str:
    """`text`, the passwords of addresses in it replaced by ***."""
    return re.sub(r"(://[^:@/\s]*):(?!password@)\S*@", r"\1:***@", text)
