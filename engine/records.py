"""The files of a run that hold trajectories or pairs, one a line. Phases read and write them.

You may edit these files, so each line is checked when it is read. What is wrong with a line is
printed with file and line number.
"""

import math
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from common.files import read_jsonl, write_jsonl
from common.settings import UsageError
from dpo import Pair, Trajectory

# What a line of a file of pairs has, and each of its two sides.
OF_PAIR = dict(task=str, kind=str, chosen=dict, rejected=dict, weight=float, sft_weight=float)
OF_SIDE = dict(agent=str, iteration=int, rollout=int)
OF_MESSAGE = dict(role=str, content=str)


def read(*files: Path) -> list[Trajectory]:
    """Return the trajectories in some files, one after another."""
    trajectories = []
    for file in files:
        for n, row in enumerate(read_jsonl(file), 1):
            with refused_at(file, n):
                trajectories.append(trajectory_of(row))
    return trajectories


@contextmanager
def refused_at(file: Path, n: int):
    """Raise Refused, with file and line number, in place of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{file}, line {n}: {error}; fix the line, or delete the file to have it "
                      "made again") from None


def trajectory_of(row: dict) -> Trajectory:
    """Return the trajectory of a line. Raises ValueError if the line is not a whole one."""
    kinds = get_type_hints(Trajectory)
    other = row.keys() - kinds.keys()
    if other:
        raise ValueError(f"a trajectory has no {min(other)!r}; take it out")
    for field in fields(Trajectory):
        if field.default is None and field.name not in row:
            del kinds[field.name]
    check_types(row, kinds)
    for message in row["messages"]:
        check_types(message, OF_MESSAGE)

    t = Trajectory(**row)
    if len(t.ids) != len(t.action_mask):
        raise ValueError(f"it has {len(t.ids)} ids, and an action_mask of {len(t.action_mask)}")
    if not {*t.action_mask} <= {0, 1}:
        raise ValueError("action_mask has other numbers than 0 and 1")
    if len(t.log_probs) not in (0, sum(t.action_mask)):
        raise ValueError(f"it has {len(t.log_probs)} log_probs, and {sum(t.action_mask)} action "
                         "tokens")
    if min(t.ids, default=0) < 0:
        raise ValueError(f"the id {min(t.ids)} is below 0")
    return t


def check_types(row: dict, kinds: dict) -> None:
    """Raise ValueError if a value is missing, or is not of its type."""
    for name, kind in kinds.items():
        if name not in row:
            raise ValueError(f"{name!r} is missing")
        if not is_of(row[name], kind):
            expected = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{name} has to be of type {expected}, and is {row[name]!r:.60}")


def is_of(value, kind) -> bool:
    """Return True if a value of a JSON file has a type. A float has to be finite."""
    if isinstance(kind, UnionType):
        return any(is_of(value, part) for part in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and are_of(value, get_args(kind)[0])
    return are_of([value], kind)


def are_of(values: list, kind: type) -> bool:
    if kind is float:
        return {*map(type, values)} <= {int, float} and all(map(math.isfinite, values))
    return {*map(type, values)} <= {kind}


def check_ids(file: Path, vocabulary: int) -> None:
    """Raise Refused if a trajectory in a file has an id that is not below the vocabulary size. A
    file that is not of JSON lines is left to the phase that reads it."""
    rows = []
    with suppress(UsageError):
        rows = read_jsonl(file)
    for n, row in enumerate(rows, 1):
        ids = row.get("ids")
        with refused_at(file, n):
            if is_of(ids, list[int]) and max(ids, default=0) >= vocabulary:
                raise ValueError(f"the id {max(ids)} is not below the vocabulary size {vocabulary}")


def write(run, file: Path, rows: list) -> None:
    """Write trajectories, or other rows; of several ranks one does.

    Raises Refused if a trajectory has the name of another one of the run, and other ids.
    """
    if not run.main:
        return
    trajectories = [row for row in rows if isinstance(row, Trajectory)]
    if trajectories:
        check_names(run, trajectories)
    write_jsonl(file, rows)


def check_names(run, trajectories: list[Trajectory]) -> None:
    """Raise Refused if two trajectories of a run have one name and different ids. Pairs and the
    page would take one for the other."""
    for output in run.done.keys() - run.names.keys():  # written before this process began
        run.names[output] = names_in(run.folder / output)
    known = {}  # name -> (ids, output)
    for output in run.done:
        known |= {name: (ids, output) for name, ids in run.names[output].items()}
    for t in trajectories:
        name = name_of(t)
        ids, output = known.setdefault(name, (t.ids, run.name))
        if ids != t.ids:
            raise UsageError(f"{run.name}: a trajectory has {shown(name)}, as another one in "
                          f"{output}; give it another agent, iteration or rollout")
    run.names[run.name] = {name_of(t): t.ids for t in trajectories}


def names_in(path: Path) -> dict[tuple, list]:
    """Return the ids of the trajectories that a finished phase has written, by name."""
    file = path / "episodes.jsonl" if path.is_dir() else path  # GRPO's are in an agent's folder
    names = {}
    for row in read_jsonl(file) if file.suffix == ".jsonl" and file.exists() else []:
        if {"task", "ids", *OF_SIDE} <= row.keys():
            names[(row["task"], *(row[part] for part in OF_SIDE))] = row["ids"]
    return names


def name_of(t: Trajectory) -> tuple:
    """Return what pairs call a trajectory."""
    return t.task, t.agent, t.iteration, t.rollout


def shown(name: tuple) -> str:
    task, agent, iteration, rollout = name
    return f"task {task!r}, agent {agent!r}, iteration {iteration}, rollout {rollout}"


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
    """Return the pairs in a file, whose trajectories are in other files."""
    known = by_name(read(*trajectories))
    pairs = []
    for n, row in enumerate(read_jsonl(file), 1):
        with refused_at(file, n):
            pairs.append(pair_of(row, known))
    return pairs


def pair_of(row: dict, known: dict[tuple, Trajectory]) -> Pair:
    """Return the pair of a line. Raises ValueError if it cannot be trained on."""
    check_types(row, OF_PAIR)
    sides = []
    for side in row["chosen"], row["rejected"]:
        check_types(side, OF_SIDE)
        name = (row["task"], *(side[part] for part in OF_SIDE))
        if name not in known:
            raise ValueError(f"it names {shown(name)}, which is no trajectory of this run")
        if known[name].action_count == 0:
            raise ValueError(f"{shown(name)} has no action tokens to learn from")
        sides.append(known[name])
    if sides[0].ids == sides[1].ids:
        raise ValueError("its two sides have the same tokens")
    for name in "weight", "sft_weight":
        if row[name] < 0:
            raise ValueError(f"{name} is {row[name]}, below 0")
    return Pair(row["kind"], *sides, row["weight"], row["sft_weight"])


def by_name(trajectories: list[Trajectory]) -> dict[tuple, Trajectory]:
    """What pairs call a trajectory -> the trajectory. Refused where two are called the same."""
    known = {}
    for t in trajectories:
        name = name_of(t)
        if name in known and known[name] != t:
            raise UsageError(f"two trajectories are called {name}; give one another rollout")
        known[name] = t
    return known
