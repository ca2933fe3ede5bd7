"""Environments: text in, text out. Which there are, their experts, their repair.

They are folders of `worlds/`; `worlds.World` says what one is, `worlds/webshop/shop.py` is the one
to read first. A new one is a folder there and its name in `worlds.ENVIRONMENTS`.
"""

import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from worlds import (  # noqa: F401
    EnvError,
    Refused,
    Step,
    World,
    converse,
    environment,
    first_reply,
    opening,
    parse_reply,
    plain,
    turns,
    words_of,
)
from worlds.published import STOPS, opens_otherwise, read_experts, read_prompts  # noqa: F401

SUCCESS = 1.0  # the reward of a solved task; whatever is below is a failure


def make(name: str, view: str = "full", examples: int = 1, **options) -> "Repaired":
    """The environment called `name`; `view` is "full" (the official text) or "short". examples:
    that an agent is shown by ETO's protocol. options: the fields of its `Options`."""
    chosen = environment(name)(**options)
    env = chosen.make(view)
    if chosen.protocol == "eto":
        env.theirs = read_prompts(chosen.prompts, name, examples)
    return Repaired(env)


def experts(env: World, file: str | None, count: int,
            lost: list[str]) -> Iterator[tuple[str, list[dict], float]]:
    """(task, messages, reward) of `count` experts (0: all): of a file, else the scripted expert's.

    `lost` gets the tasks whose environment broke; EnvError if they are too many.
    """
    if file:
        yield from read_experts(file, env)[:count or None]
        return
    tasks = env.tasks("train")[:count or None]
    losses = LostEpisodes(len(tasks))
    for task in tasks:
        try:
            played = converse(env, env.reset(task), env.expert())
            losses.answered()
            yield task, *played
        except EnvError as error:
            lost.append(task)
            losses.add(error)


class Repaired:
    """An environment that, when it breaks, starts afresh and is played to where it was.

    Worlds repeat exactly, so an episode that was disturbed is the one that would have been.
    EnvError if that fails after all `waits`, or if the world is another one than before.
    """
    waits = (0.5, 1.0, 5.0, 25.0)  # seconds before each repetition: a server's restart takes some

    def __init__(self, env: World):
        self._env, self._seen = env, []

    def __getattr__(self, name):
        return getattr(self._env, name)

    def reset(self, task: str) -> str:
        self._task, self._seen = task, []  # of the episode: (reply, what it led to)
        self._seen.append((None, page := self._safely(lambda: self._env.reset(task))))
        return page

    def step(self, reply: str) -> Step:
        self._seen.append((reply, step := self._safely(lambda: self._env.step(reply))))
        return step

    def expert(self):
        return self._safely(self._env.expert)

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


class LostEpisodes:
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
