"""Episodes that have ended in the phase that is running: one that was stopped plays on from them.

What runs beside an episode changes the rounding of its logits and so, very rarely, a token. On a
CPU, where runs repeat to the bit, chunks of episodes are played, each begun with empty slots, and
a chunk that is not whole is played again.
"""

import json
import os
from contextlib import closing
from pathlib import Path

import envs
from dpo import Trajectory

CHUNK = 8      # episodes of a slot in a chunk [ours]
LOOKED_AT = 8  # kept episodes that are begun again, to see if it is still their world [ours]


class Kept:
    def __init__(self, file: Path, make_env):
        self.file, rows = file, whole_lines(file)
        self.rows = {identity(row): row for row in rows}
        if rows and not begin_alike(rows[::-(-len(rows) // LOOKED_AT)], make_env()):
            file.unlink()  # a server may have been replaced
            self.rows = {}

    def add(self, episodes: list[Trajectory]) -> None:
        rows = [{k: v for k, v in vars(t).items() if v is not None} for t in episodes]
        self.rows |= {identity(row): row for row in rows}
        self.file.parent.mkdir(exist_ok=True)
        with open(self.file, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def of(self, episodes: list[Trajectory]) -> list[Trajectory] | None:
        """The kept ones of these episodes, if all are."""
        rows = [self.rows.get(identity(vars(t))) for t in episodes]
        return None if None in rows else [Trajectory(**row) for row in rows]


def whole_lines(path: Path) -> list[dict]:
    """The objects in a file, if it is there, which loses what follows the last whole line."""
    found, end = [], 0
    if not path.exists():
        return found
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:  # after a loss of power
            break
        end += len(line) + 1
    os.truncate(path, end)
    return found


def identity(row: dict) -> tuple:
    return tuple(row[name] for name in ("task", "agent", "iteration", "rollout", "seed"))


def begin_alike(rows: list[dict], env) -> bool:
    """Whether these episodes still begin as they did."""
    with closing(env):
        for row in rows:
            try:
                begun = envs.opening(env, env.reset(row["task"]), playing=True)
            except ValueError:  # a task of a later play of the phase, which this world lacks yet
                return False
            if begun != row["messages"][:len(begun)]:
                return False
    return True
