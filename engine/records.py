"""Reads and writes the trajectory files and pairs files of a run, in JSON lines format.

Users may edit these files. Therefore each line is checked when it is read, and error messages
contain the file and the line number.
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

# The required fields and their types. PAIR_FIELDS is for a line in a pairs file, SIDE_FIELDS for
# the entries `chosen` and `rejected` of such a line, and MESSAGE_FIELDS for a message in a
# trajectory.
PAIR_FIELDS = dict(task=str, kind=str, chosen=dict, rejected=dict, weight=float, sft_weight=float)
SIDE_FIELDS = dict(agent=str, iteration=int, rollout=int)
MESSAGE_FIELDS = dict(role=str, content=str)


def read(*files: Path) -> list[Trajectory]:
    """Reads the trajectories in one or more files, and returns them in the order of the files."""
    trajectories = []
    for file in files:
        for n, row in enumerate(read_jsonl(file), 1):
            with naming_line(file, n):
                trajectories.append(trajectory_of(row))
    return trajectories


@contextmanager
def naming_line(file: Path, n: int):
    """Turns a ValueError into a UsageError whose message starts with the file and line number."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{file}, line {n}: {error}; fix the line, or delete the file and "
                         "rerun the same command to make it again") from None


def trajectory_of(row: dict) -> Trajectory:
    """Converts a parsed JSON line to a trajectory. Raises ValueError if a field is not valid."""
    types = get_type_hints(Trajectory)
    unknown = row.keys() - types.keys()
    if unknown:
        raise ValueError(f"a trajectory has no field {min(unknown)!r}; remove it")
    for field in fields(Trajectory):
        if field.default is None and field.name not in row:  # the field is optional
            del types[field.name]
    check_types(row, types)
    for message in row["messages"]:
        check_types(message, MESSAGE_FIELDS)

    t = Trajectory(**row)
    if len(t.ids) != len(t.action_mask):
        raise ValueError(f"it has {len(t.ids)} ids, and an action_mask of length "
                         f"{len(t.action_mask)}")
    if not {*t.action_mask} <= {0, 1}:
        raise ValueError("action_mask contains other numbers than 0 and 1")
    if len(t.log_probs) not in (0, sum(t.action_mask)):
        raise ValueError(f"it has {len(t.log_probs)} log_probs, and {sum(t.action_mask)} action "
                         "tokens")
    if min(t.ids, default=0) < 0:
        raise ValueError(f"the id {min(t.ids)} is below 0")
    return t


def check_types(row: dict, types: dict) -> None:
    """Raises ValueError if a field is missing or has the wrong type."""
    for name, kind in types.items():
        if name not in row:
            raise ValueError(f"{name!r} is missing")
        if not has_type(row[name], kind):
            expected = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{name} must be of type {expected}, but is {row[name]!r:.60}")


def has_type(value, kind) -> bool:
    """Returns True if a value from a JSON file has the type `kind`, for example list[int].

    An int is also accepted as a float. Infinity and NaN are not accepted.
    """
    if isinstance(kind, UnionType):
        return any(has_type(value, part) for part in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and have_type(value, get_args(kind)[0])
    return have_type([value], kind)


def have_type(values: list, kind: type) -> bool:
    if kind is float:
        return {*map(type, values)} <= {int, float} and all(map(math.isfinite, values))
    return {*map(type, values)} <= {kind}


def check_ids(file: Path, vocabulary: int) -> None:
    """Raises UsageError if a trajectory in a file has a token id outside of the vocabulary.

    A file that is not in JSON lines format is skipped. The phase that reads it raises a UsageError.

    Args:
        file: The file to check.
        vocabulary: The vocabulary size.
    """
    rows = []
    with suppress(UsageError):
        rows = read_jsonl(file)
    for n, row in enumerate(rows, 1):
        ids = row.get("ids")
        with naming_line(file, n):
            if has_type(ids, list[int]) and max(ids, default=0) >= vocabulary:
                raise ValueError(f"the id {max(ids)} is not below the vocabulary size {vocabulary}")


def write(run, file: Path, rows: list) -> None:
    """Writes a .jsonl file on the main rank.

    Args:
        run: The run.
        file: The file to write.
        rows: Trajectories, or dictionaries.

    Raises:
        UsageError: A trajectory has the same name as another trajectory of the run, but different
            token ids.
    """
    if not run.main:
        return
    trajectories = [row for row in rows if isinstance(row, Trajectory)]
    if trajectories:
        check_names(run, trajectories)
    write_jsonl(file, rows)


def check_names(run, trajectories: list[Trajectory]) -> None:
    """Raises UsageError if two trajectories have the same name but different token ids.

    Names have to be unique in a run, because pairs files and the run's web page refer to a
    trajectory by its name (see `name_of`).

    Args:
        run: The run. The names of the new trajectories are added to its `ids_by_name`.
        trajectories: The trajectories that the current phase is going to write.
    """
    # An earlier process may have written some outputs. Read the names of their trajectories.
    for output in run.done.keys() - run.ids_by_name.keys():
        run.ids_by_name[output] = read_ids_by_name(run.folder / output)
    seen = {}  # name -> (ids, output)
    for output in run.done:
        seen |= {name: (ids, output) for name, ids in run.ids_by_name[output].items()}
    for t in trajectories:
        name = name_of(t)
        ids, output = seen.setdefault(name, (t.ids, run.name))
        if ids != t.ids:
            raise UsageError(f"{run.name}: a trajectory has {describe(name)}, and so has another "
                             f"one in {output}; give it another agent, iteration or rollout")
    run.ids_by_name[run.name] = {name_of(t): t.ids for t in trajectories}


def read_ids_by_name(path: Path) -> dict[tuple, list]:
    """Reads the names and the token ids of the trajectories in the output of a finished phase.

    Returns a dict {trajectory name: token ids}. The dict is empty if the output contains
    no trajectories.
    """
    # The output of GRPO is an agent's folder, which contains its trajectories in episodes.jsonl.
    file = path / "episodes.jsonl" if path.is_dir() else path
    ids = {}
    for row in read_jsonl(file) if file.suffix == ".jsonl" and file.exists() else []:
        if {"task", "ids", *SIDE_FIELDS} <= row.keys():
            ids[(row["task"], *(row[part] for part in SIDE_FIELDS))] = row["ids"]
    return ids


def name_of(t: Trajectory) -> tuple:
    """Returns the name of a trajectory, which is unique within a run."""
    return t.task, t.agent, t.iteration, t.rollout


def describe(name: tuple) -> str:
    task, agent, iteration, rollout = name
    return f"task {task!r}, agent {agent!r}, iteration {iteration}, rollout {rollout}"


# A pairs file does not contain the trajectories of its pairs. Each line refers to two trajectories
# by name. The trajectories are stored in trajectory files.


def write_pairs(run, file: Path, pairs: list[Pair]) -> None:
    write(run, file, [named(pair) | dict(weight=pair.weight, sft_weight=pair.sft_weight)
                      for pair in pairs])


def named(pair: Pair) -> dict:
    """Returns a dict that identifies a pair: its task, its kind, `chosen` and `rejected`.

    `chosen` and `rejected` contain the name and the reward of a trajectory.
    """
    sides = {}
    for side, t in dict(chosen=pair.chosen, rejected=pair.rejected).items():
        sides[side] = dict(agent=t.agent, iteration=t.iteration, rollout=t.rollout,
                           reward=t.reward)
    return dict(task=pair.chosen.task, kind=pair.kind, **sides)


def read_pairs(file: Path, trajectories: list[Path]) -> list[Pair]:
    """Reads the pairs in a file, and returns them in the order of the file.

    Args:
        file: The pairs file.
        trajectories: The trajectory files that contain the trajectories of the pairs.
    """
    by_name = trajectories_by_name(read(*trajectories))
    pairs = []
    for n, row in enumerate(read_jsonl(file), 1):
        with naming_line(file, n):
            pairs.append(pair_of(row, by_name))
    return pairs


def pair_of(row: dict, by_name: dict[tuple, Trajectory]) -> Pair:
    """Converts a parsed line of a pairs file to a pair.

    Args:
        row: The parsed line.
        by_name: The trajectories by name.

    Raises:
        ValueError: The pair cannot be used for training. For example, one of its trajectories does
            not exist or has no action tokens.
    """
    check_types(row, PAIR_FIELDS)
    sides = []
    for side in row["chosen"], row["rejected"]:
        check_types(side, SIDE_FIELDS)
        name = (row["task"], *(side[part] for part in SIDE_FIELDS))
        if name not in by_name:
            raise ValueError(f"it names {describe(name)}, but the run has no such trajectory")
        if by_name[name].action_count == 0:
            raise ValueError(f"{describe(name)} has no action tokens to learn from")
        sides.append(by_name[name])
    if sides[0].ids == sides[1].ids:
        raise ValueError("its two sides have the same tokens")
    for name in "weight", "sft_weight":
        if row[name] < 0:
            raise ValueError(f"{name} is {row[name]}, below 0")
    return Pair(row["kind"], *sides, row["weight"], row["sft_weight"])


def trajectories_by_name(trajectories: list[Trajectory]) -> dict[tuple, Trajectory]:
    """Returns a dict {name: trajectory}.

    Raises UsageError if two different trajectories have the same name.
    """
    by_name = {}
    for t in trajectories:
        name = name_of(t)
        if name in by_name and by_name[name] != t:
            raise UsageError(f"two trajectories have the name {name}; give one of them another "
                             "rollout")
        by_name[name] = t
    return by_name
