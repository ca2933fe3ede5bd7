"""The files of a run that hold trajectories or pairs, one a line. Phases read and write them."""

from dataclasses import fields
from pathlib import Path

from common.files import read_jsonl, write_jsonl
from common.settings import Refused
from dpo import Pair, Trajectory


def read(*files: Path) -> list[Trajectory]:
    """The trajectories in some files, one after another."""
    known = {field.name for field in fields(Trajectory)}
    trajectories = []
    for file in files:
        for n, row in enumerate(read_jsonl(file), 1):
            other = row.keys() - known
            if other:
                raise Refused(f"{file}, line {n}: a trajectory has no {min(other)!r}; take it out")
            trajectories.append(Trajectory(**row))
    return trajectories


def write(run, file: Path, rows: list) -> None:
    """Writes trajectories, or other rows; of several ranks one does."""
    if run.main:
        write_jsonl(file, rows)


# A line of a file of pairs names its two trajectories, which are in files of their own.


def write_pairs(run, file: Path, pairs: list[Pair]) -> None:
    write(run, file, [named(pair) | dict(weight=pair.weight, sft_weight=pair.sft_weight)
                      for pair in pairs])


def named(pair: Pair) -> dict:
    """What a pair is called in files."""
    sides = {}
    for side, t in dict(chosen=pair.chosen, rejected=pair.rejected).items():
        sides[side] = dict(agent=t.agent, iteration=t.iteration, rollout=t.rollout,
                           reward=t.reward)
    return dict(task=pair.chosen.task, kind=pair.kind, **sides)


def read_pairs(file: Path, trajectories: list[Path]) -> list[Pair]:
    """The pairs in a file, whose trajectories are in other files."""
    known = by_name(read(*trajectories))
    pairs = []
    for row in read_jsonl(file):
        sides = []
        for side in (row["chosen"], row["rejected"]):
            name = (row["task"], side["agent"], side["iteration"], side["rollout"])
            if name not in known:
                raise Refused(f"a pair names {name}, which is no trajectory of this run; mend the "
                              "pairs file, or delete it to make it again")
            sides.append(known[name])
        pairs.append(Pair(row["kind"], *sides, row["weight"], row["sft_weight"]))
    return pairs


def by_name(trajectories: list[Trajectory]) -> dict[tuple, Trajectory]:
    """What pairs call a trajectory -> the trajectory. Refused where two are called the same."""
    known = {}
    for t in trajectories:
        name = (t.task, t.agent, t.iteration, t.rollout)
        if name in known and known[name] != t:
            raise Refused(f"two trajectories are called {name}; give one another rollout")
        known[name] = t
    return known
