"""Episodes that have ended in the phase that is running: one that was stopped plays on from them.

What runs beside an episode changes the rounding of its logits and so, very rarely, a token. On a
CPU, where runs repeat to the bit, `rollout` plays chunks of episodes, each begun with empty slots,
and a chunk that is not whole is played again. On a GPU every episode counts.
"""

import json
import os
from pathlib import Path

import envs
from dpo import Trajectory
from harness import files

CHUNK = 8      # episodes of a slot in a chunk; what that costs is in docs/speed.md [ours]
LOOKED_AT = 8  # kept episodes that are begun again, to see if it is still their world [ours]


class Kept:
    """A file that begins with what the phase started from and then has an episode a line."""

    def __init__(self, path: Path, inputs: list):
        self.path, self.inputs = path, inputs
        head, *rows = (path.exists() and whole_lines(path)) or [None]
        self.rows = {identity(row): row for row in rows} if head == inputs else {}
        if not self.rows:
            self._begin()

    def _begin(self, rows=()) -> None:
        self.path.parent.mkdir(exist_ok=True)
        files.write_text(self.path, "".join(json.dumps(x) + "\n" for x in (self.inputs, *rows)))

    def add(self, t: Trajectory) -> None:
        """Appends an episode that has ended. One that was lost is to be tried again."""
        if t.ended != "lost":
            with files.writing(self.path), open(self.path, "a") as file:
                file.write(json.dumps(t.record()) + "\n")

    def fill(self, share: list[Trajectory], size: int, make_env) -> list[Trajectory]:
        """`share` with the kept episodes of whole chunks (of `size`) instead of their beginnings.

        Without, if the world is another one by now, such as a server's that was started again.
        """
        rows = [self.rows.get(identity(vars(t))) for t in share]
        for first in range(0, len(rows), size):
            if None in (part := rows[first:first + size]):
                rows[first:first + size] = [None] * len(part)
        again = {identity(vars(t)) for t, row in zip(share, rows) if not row} & self.rows.keys()
        if again:  # they leave the file, so that a chunk in it is never of two processes
            self._begin(row for name, row in self.rows.items() if name not in again)
        kept = [row for row in rows if row]
        if kept and not begin_alike(kept[::-(-len(kept) // LOOKED_AT)], make_env()):
            self._begin()
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
    try:
        for row in rows:
            begun = envs.opening(env, env.reset(row["task"]), playing=True)
            if begun != row["messages"][:len(begun)]:
                return False
        return True
    finally:
        env.close()
