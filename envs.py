"""Environments: text in, text out. What one is, which there are, their experts, their repair.

They are folders of `worlds/`; read `worlds/webshop/shop.py` first. A new one is a file there, a
line in `make` and a name in the settings.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from tqdm import tqdm

from worlds import (  # noqa: F401
    EnvError,
    Refused,
    Step,
    converse,
    first_reply,
    opening,
    parse_reply,
    plain,
)
from worlds.published import STOPS, opens_otherwise, read_experts, read_prompts  # noqa: F401

SUCCESS = 1.0  # the reward of a solved task; whatever is below is a failure


class Env(Protocol):
    """One object plays one episode at a time. Worlds repeat exactly. Rewards are in [0, 1]; by
    ETO's protocol from -1. `worlds.World` is what all of them derive from.

    The environment does not count steps: a rollout stops after `max_steps` replies, and the reward
    is what it was then. One that breaks raises EnvError, which is no failure of the agent's. After
    `close`, `reset` starts afresh.
    """

    name: str
    test_splits: tuple[str, ...]
    max_steps: int  # of the task just reset
    prompt: str     # the rules, said once at the start of an episode
    split_by: str   # "by rule", or the folder of published lists
    latency: int    # passes of the model for which a rollout lets it work before it waits

    def tasks(self, split: str) -> list[str]: ...    # ids; ValueError: no such split
    def find(self, task: str): ...                   # what it is; ValueError: no such task
    def wording(self, task: str) -> str | None: ...  # its instruction, where that says which it is
    def add(self, task: dict) -> str: ...            # the id of a task made during the run
    def smith(self): ...                             # who makes tasks; Refused: nobody
    def reset(self, task: str) -> str: ...           # the first observation
    def step(self, reply: str) -> Step: ...          # observation, reward so far, done
    def expert(self) -> Callable[[str], str]: ...    # of the episode just reset: page -> reply
    def practice(self, seed: int, n: int, make) -> list: ...  # what the tiny model starts from
    def published_task(self, id: str) -> str: ...    # of a published expert trajectory's id
    def close(self) -> None: ...


def make(name: str, view: str = "full", protocol: str = "ours", prompts: str | None = None,
         examples: int = 1, **options) -> "Repaired":
    """The environment called `name`; `view` is "full" (the official text) or "short".

    protocol "eto": it talks as ETO's code does, by the texts in the folder `prompts` and so many of
    their examples. options: the settings that belong to it, such as webshop_url (see its class);
    Refused, naming what is wrong with one of them. What an environment needs is imported here and
    nowhere before.
    """
    theirs = read_prompts(prompts, name, examples) if protocol == "eto" else None
    if name == "webshop":
        url, lists = options.pop("webshop_url", None), options.pop("split_file", None)
        if url:
            from worlds.webshop.server import WebShopServer
            return Repaired(WebShopServer(url, view, lists, **options), theirs)
        from worlds.webshop.shop import WebShop
        return Repaired(WebShop(view, **options), theirs)
    if name == "scienceworld":
        from worlds.scienceworld.world import ScienceWorld
        return Repaired(ScienceWorld(view, **options), theirs)
    if name == "intercodesql":
        from worlds.intercodesql.world import InterCodeSQL
        return Repaired(InterCodeSQL(view, **options), theirs)
    if name == "bfcl":
        from worlds.bfcl.world import Bfcl
        return Repaired(Bfcl(view, **options))
    raise ValueError(f"unknown environment {name!r}; webshop, scienceworld, intercodesql or bfcl?")


# ------------------------------------------------------------------------------------- experts


def experts(env: Env, file: str | None, count: int,
            lost: list[str]) -> Iterator[tuple[str, list[dict], float]]:
    """(task, messages, reward) of `count` experts (0: all): of a file, else the scripted expert's.

    `lost` gets the tasks whose environment broke; EnvError if they are too many.
    """
    if file:
        yield from read_experts(file, env)[:count or None]
        return
    tasks = env.tasks("train")[:count or None]
    losses = Losses(len(tasks))
    for task in tasks:
        try:
            played = converse(env, env.reset(task), env.expert())
        except EnvError as error:
            lost.append(task)
            losses.add(error)
            continue
        losses.answered()
        yield task, *played


# ------------------------------------------------------------------------------- if one breaks


class Repaired:
    """An environment that, when it breaks, starts afresh and is played to where it was.

    Worlds repeat exactly, so an episode that was disturbed is the one that would have been.
    EnvError if that fails after all `waits`, or if the world is another one than before. This is
    the only place that repeats anything: an environment raises EnvError at the first fault.
    """
    waits = (0.5, 1.0, 5.0, 25.0)  # seconds before each repetition: a server's restart takes some

    def __init__(self, env, theirs=None):
        self._env, self._seen = env, []
        if theirs:
            env.theirs = theirs

    def __getattr__(self, name):
        return getattr(self._env, name)

    def reset(self, task: str) -> str:
        self._task, self._seen = task, []  # of the episode: (reply, what it led to)
        return self._note(None, self._safely(lambda: self._env.reset(task)))

    def step(self, reply: str) -> Step:
        return self._note(reply, self._safely(lambda: self._env.step(reply)))

    def expert(self):
        return self._safely(self._env.expert)

    def _note(self, reply, answer):
        self._seen.append((reply, answer))
        return answer

    def _safely(self, call):
        for attempt, wait in enumerate((*self.waits, None)):
            try:
                if attempt:
                    self._play_again()
                return call()
            except EnvError:
                self._env.close()
                if wait is None:
                    raise
                time.sleep(wait)

    def _play_again(self):
        for reply, before in self._seen:
            now = self._env.reset(self._task) if reply is None else self._env.step(reply)
            if now != before:
                raise EnvError(f"{self._task}: it is not the world it was before it broke; was a "
                               "server replaced? Restore it, or start a run with another --out")


# Lost episodes that are tolerated: this share of a phase, at least one. So many in succession mean
# that the environment itself is down [ours].
LOST_SHARE, LOST_IN_A_ROW, LOST = 0.01, 3, "the environment broke"


def too_many(lost: int, of: int) -> bool:
    return 0 < lost == of or lost > max(1, LOST_SHARE * of)


class Losses:
    """Counts the episodes of a phase, `of` in all, whose environment broke beyond repair."""

    def __init__(self, of: int):
        self.of, self.lost, self.in_a_row = of, 0, 0

    def add(self, error: EnvError) -> None:
        """Tells of a lost episode; raises `error` where they are too many."""
        self.lost += 1
        self.in_a_row += 1
        if self.in_a_row == LOST_IN_A_ROW or too_many(self.lost, self.of):
            raise error
        tqdm.write(f"lost, and left out: {error}", file=sys.stderr)

    def answered(self) -> None:
        self.in_a_row = 0
