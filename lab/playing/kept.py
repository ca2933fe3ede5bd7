"""Episodes that have ended in the phase that is running: one that was stopped plays on from them.

What runs beside an episode changes the rounding of its logits and so, very rarely, a token. On a
CPU, where runs repeat to the bit, `rollout` plays chunks of episodes, each begun with empty slots,
and a chunk that is not whole is played again. On a GPU, and of an endpoint, every episode counts.
"""

import json
import os
import threading
from contextlib import closing
from pathlib import Path

from lab import play_env as envs
from lab.harness import files
from lab.tokens import Trajectory

CHUNK = 8      # episodes of a slot in a chunk [ours]
LOOKED_AT = 8  # kept episodes that are begun again, to see if it is still their world [ours]


class Kept:
    """A file that begins with what the phase started from and then has an episode a line; of an
    endpoint also a line for each answered request, those of lost episodes too."""

    def __init__(self, path: Path, inputs: list):
        self.path, self.head, self.lock = path, dict(inputs=inputs), threading.Lock()
        head, *rows = (path.exists() and whole_lines(path)) or [None]
        if head != self.head:
            path.unlink(missing_ok=True)
            rows = []
        self.rows = {identity(row): row for row in rows if "task" in row}
        self.spent = [row["spent"] for row in rows if "spent" in row]

    def add(self, t: Trajectory) -> None:
        """Appends an episode that has ended. One that was lost is to be tried again."""
        if t.ended != "lost":
            self._append(t.record())

    def spend(self, used: dict) -> None:
        """Appends what an answered request took."""
        self._append(dict(spent=used))
        self.spent.append(used)

    def _append(self, row: dict) -> None:
        with self.lock:
            rows = [row] if self.path.exists() else [self.head, row]
            self.path.parent.mkdir(exist_ok=True)
            with files.writing(self.path), open(self.path, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def fill(self, share: list[Trajectory], size: int = 1, make_env=None) -> list[Trajectory]:
        """`share` with the kept episodes of whole chunks (of `size`) in place of their beginnings;
        not if they begin otherwise in make_env() by now: a server may have been replaced."""
        rows = [self.rows.get(identity(vars(t))) for t in share]
        for first in range(0, len(rows), size):
            if None in (part := rows[first:first + size]):
                rows[first:first + size] = [None] * len(part)
        kept = [row for row in rows if row]
        if kept and make_env and not begin_alike(kept[::-(-len(kept) // LOOKED_AT)], make_env()):
            self.path.unlink()
            return share
        return [Trajectory(**row) if row else t for t, row in zip(share, rows)]


def whole_lines(path: Path) -> list:
    """The values in a file, which loses what follows the last whole line."""
    found, end = [], 0
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
            begun = envs.opening(env, env.reset(row["task"]), playing=True)
            if begun != row["messages"][:len(begun)]:
                return False
    return True
