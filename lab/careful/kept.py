"""What the running phase goes on from after a stop: episodes that had ended, states of training.

What runs beside an episode changes the rounding of its logits and so, very rarely, a token. On a
CPU, where runs repeat to the bit, chunks of episodes are played, each begun with empty slots, and
a chunk that is not whole is played again.
"""

import json
import os
import shutil
import time
from contextlib import closing
from pathlib import Path

import torch.distributed.checkpoint as dcp
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as states

from dpo import Trajectory

CHUNK = 8      # episodes of a slot in a chunk [ours]
LOOKED_AT = 8  # kept episodes that are begun again, to see if it is still their world [ours]
NAMES = ("weights", "moments")  # of a state
SHARE = 0.05   # of a phase's time may go into writing states [ours]


class Kept:
    """The episodes of a phase that have ended, in a file.

    Args:
        file: The file, of an earlier process or new.
        make_env: Makes an environment, in which some episodes are begun again, to see whether the
            world is still theirs: a server may have been replaced.
    """

    def __init__(self, file: Path, make_env):
        self.file = file
        self.rows = {identity(row): row for row in whole_lines(file)}
        some = list(self.rows.values())[::-(-len(self.rows) // LOOKED_AT)] if self.rows else []
        if some and not begin_alike(some, make_env()):
            file.unlink()
            self.rows = {}

    def add(self, episodes: list[Trajectory]) -> None:
        self.file.parent.mkdir(exist_ok=True)
        with open(self.file, "a") as file:
            for t in episodes:
                row = {name: value for name, value in vars(t).items() if value is not None}
                self.rows[identity(row)] = row
                file.write(json.dumps(row) + "\n")

    def missing(self, episodes: list[Trajectory]) -> list[Trajectory]:
        """Those of these episodes that are not kept."""
        return [t for t in episodes if identity(vars(t)) not in self.rows]

    def of(self, episodes: list[Trajectory]) -> list[Trajectory] | None:
        """The kept ones of these episodes, if all are."""
        if self.missing(episodes):
            return None
        return [type(t)(**self.rows[identity(vars(t))]) for t in episodes]


def whole_lines(path: Path) -> list[dict]:
    """The objects in a file, if it is there, which loses what follows the last whole line."""
    if not path.exists():
        return []
    found = []
    end = 0
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
                begun = env.opening(env.reset(row["task"]), playing=True)
            except ValueError:  # a task of a later play of the phase, which this world lacks yet
                return False
            if begun != row["messages"][:len(begun)]:
                return False
    return True


class Checkpoint:
    """The newest state of a phase: weights, moments, and its log so far.

    Its folder step-N appears by renaming; then the one before goes.

    Args:
        accelerator: accelerate's.
        folder: Of the states.
        minutes: Between two of them at least; 0: after each step.
        lines: The log, a line for each step, which gets those of a state that is restored.
    """

    def __init__(self, accelerator, folder: Path, minutes: float, lines: list[dict]):
        self.accelerator = accelerator
        self.folder = folder
        self.lines = lines
        self.seconds = 60 * minutes
        self.saved_at = time.monotonic()
        self.took = 0.0  # seconds, to write the last one

    def restore(self, model, optimizer) -> int:
        """Puts the newest state back; the number of steps it had made."""
        saved = sorted(self.folder.glob("step-*"), key=lambda path: int(path.name[5:]))
        if not saved:
            return 0
        state = dict(zip(NAMES, states.get_state_dict(model, optimizer)))
        try:
            dcp.load(state, checkpoint_id=saved[-1], no_dist=self.accelerator.num_processes == 1)
            self.lines += json.loads((saved[-1] / "log.json").read_text())
        except (Exception, CheckpointException) as error:  # whatever a damaged file makes of it
            raise OSError(f"{saved[-1]} is damaged ({type(error).__name__}); delete {self.folder} "
                          "to begin the phase again") from None
        states.set_state_dict(model, optimizer, model_state_dict=state["weights"],
                              optim_state_dict=state["moments"])
        return int(saved[-1].name[5:])

    def keep(self, model, optimizer, step: int) -> None:
        """Every rank calls this after the same step. A state is written after the minutes given, or
        as many more as keep writing a SHARE of the time; the main rank's clock decides."""
        least = max(self.seconds, self.took / SHARE if self.seconds else 0)
        due = broadcast_object_list([time.monotonic() - self.saved_at >= least])[0]
        if due and optimizer.state:  # before the first update there are no moments
            self.write(model, optimizer, step)

    def write(self, model, optimizer, step: int) -> None:
        started = time.monotonic()
        main = self.accelerator.is_main_process
        temporary = self.folder / "writing"
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        dcp.save(dict(zip(NAMES, states.get_state_dict(model, optimizer))), checkpoint_id=temporary,
                 no_dist=self.accelerator.num_processes == 1)
        if main:
            (temporary / "log.json").write_text(json.dumps(self.lines))
            before = list(self.folder.glob("step-*"))
            temporary.rename(self.folder / f"step-{step}")
            for path in before:
                shutil.rmtree(path)
        self.accelerator.wait_for_everyone()
        self.saved_at = time.monotonic()
        self.took = self.saved_at - started


def saved_agents(agent: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each agent that --save-every has saved on the way to one in a folder."""
    found = []
    for folder in agent.parent.glob(f"{agent.name}-step*"):
        step = folder.name.removeprefix(f"{agent.name}-step")
        if step.isdecimal():
            found.append((int(step), folder))
    return found
