"""Reads and writes the trajectories and pairs of a run, in JSON lines format.

Users may edit these files, so each line is checked when it is read.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from common.files import json_line, read_jsonl
from common.settings import UsageError
from dpo import Pair, Trajectory

# Required fields and their types, for a line of a pairs file, for its entries `chosen` and
# `rejected`, and for a message of a trajectory.
PAIR_FIELDS = dict(task=str, kind=str, chosen=dict, rejected=dict, weight=float, sft_weight=float)
SIDE_FIELDS = dict(agent=str, iteration=int, rollout=int)
MESSAGE_FIELDS = dict(role=str, content=str)

# -------------------------------------------------------------------------------- writing, hashes


def write(file: Path, items: Iterable) -> None:
    with open(file, "w") as lines:
        lines.writelines(map(line_of, items))


def line_of(item) -> str:
    if isinstance(item, Pair):
        item = row_of(item) | dict(weight=item.weight, sft_weight=item.sft_weight)
    return json_line(item)


def is_rows(value) -> bool:
    """Returns True for a list of trajectories, pairs or dicts, including an empty list."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(
        isinstance(item, (Trajectory, Pair, dict)) for item in value)


def content_hash(items: Iterable) -> str:
    """Returns the SHA-256 hash of the content of a list of trajectories, pairs or dicts.

    The hash covers the lines that `write` writes. For pairs, whose lines contain only references to
    trajectories, it also covers the trajectories.
    """
    digest = hashlib.sha256()
    hashes = {}  # id(trajectory) -> hash of its line; a trajectory may be in several pairs
    for item in items:
        digest.update(line_of(item).encode())
        if isinstance(item, Pair):
            for t in item.chosen, item.rejected:
                if id(t) not in hashes:
                    hashes[id(t)] = hashlib.sha256(line_of(t).encode()).digest()
                digest.update(hashes[id(t)])
    return digest.hexdigest()


# ------------------------------------------------------------------------------------- reading


def read(file: Path, inputs: Iterable = (), vocabulary: float = math.inf) -> list:
    """Reads the trajectories, pairs or dicts in a .jsonl file.

    Raises UsageError with the file and the line if a line is not valid.

    Args:
        inputs: Values that contain the trajectories that a pairs file refers to.
        vocabulary: The vocabulary size. Token ids must be below it.
    """
    rows = read_jsonl(file)
    try:
        items = items_of(rows, inputs, vocabulary)
        check_names(items)
        return items
    except ValueError as error:
        raise UsageError(f"{file}, {error}; fix the line, or delete the file and rerun the same "
                         "command to make it again") from None


def items_of(rows: Iterable[dict], inputs: Iterable, vocabulary: float) -> list:
    """Converts rows to trajectories, pairs or dicts. The arguments are those of `read`.

    Raises ValueError with the line number if a row is not valid.
    """
    items = []
    by_name = None  # the trajectories in `inputs`, by name
    for n, row in enumerate(rows, 1):
        try:
            if "chosen" in row:
                if by_name is None:
                    by_name = trajectories_by_name(trajectories_in(inputs))
                items.append(pair_of(row, by_name))
            elif "ids" in row or "action_mask" in row:
                items.append(trajectory_of(row, vocabulary))
            else:
                items.append(row)
        except ValueError as error:
            raise ValueError(f"line {n}: {error}") from None
    return items


def check_names(items: Iterable) -> None:
    """Raises ValueError if two trajectories in a list have the same name."""
    names = Counter(name_of(item) for item in items if isinstance(item, Trajectory))
    for name, count in names.items():
        if count > 1:
            raise same_name(name)


def same_name(name: tuple) -> ValueError:
    return ValueError(f"two trajectories have {describe(name)}; give one of them another agent, "
                      "iteration or rollout")


def trajectories_in(value) -> Iterable[Trajectory]:
    """Yields every trajectory in a value: a trajectory, a pair, or a nested list or dict of these.
    """
    if isinstance(value, Trajectory):
        yield value
    elif isinstance(value, Pair):
        yield value.chosen
        yield value.rejected
    elif isinstance(value, dict):
        yield from trajectories_in(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from trajectories_in(part)


def trajectory_of(row: dict, vocabulary: float) -> Trajectory:
    kind = Trajectory
    additional = row.keys() - Trajectory.__annotations__.keys()
    for subclass in Trajectory.__subclasses__():  # for example `evolve.Explored`
        if additional and additional <= subclass.__annotations__.keys():
            kind = subclass
    types = get_type_hints(kind)
    unknown = row.keys() - types.keys()
    if unknown:
        raise ValueError(f"a trajectory has no field {min(unknown)!r}; remove it")
    for part in fields(kind):
        if part.default is None and part.name not in row:  # the field is optional
            del types[part.name]
    check_types(row, types)
    for message in row["messages"]:
        check_types(message, MESSAGE_FIELDS)

    t = kind(**row)
    if len(t.ids) != len(t.action_mask):
        raise ValueError(f"it has {len(t.ids)} ids, and an action_mask of length "
                         f"{len(t.action_mask)}")
    if not {*t.action_mask} <= {0, 1}:
        raise ValueError("action_mask contains other numbers than 0 and 1")
    if len(t.log_probs) not in (0, sum(t.action_mask)):
        raise ValueError(f"it has {len(t.log_probs)} log_probs, and {sum(t.action_mask)} action "
                         "tokens")
    if t.ids and not 0 <= min(t.ids) <= max(t.ids) < vocabulary:
        raise ValueError(f"not all of its ids ({min(t.ids)} to {max(t.ids)}) are in the vocabulary")
    return t


def check_types(row: dict, types: dict) -> None:
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


def name_of(t: Trajectory) -> tuple:
    """Returns the name of a trajectory, which is unique within a run."""
    return t.task, t.agent, t.iteration, t.rollout


def describe(name: tuple) -> str:
    task, agent, iteration, rollout = name
    return f"task {task!r}, agent {agent!r}, iteration {iteration}, rollout {rollout}"


def row_of(pair: Pair) -> dict:
    """Returns a dict with the task and kind of a pair, and the name and reward of each side."""
    sides = {}
    for side, t in dict(chosen=pair.chosen, rejected=pair.rejected).items():
        sides[side] = dict(agent=t.agent, iteration=t.iteration, rollout=t.rollout,
                           reward=t.reward)
    return dict(task=pair.chosen.task, kind=pair.kind, **sides)


def pair_of(row: dict, by_name: dict[tuple, Trajectory]) -> Pair:
    """Converts a line of a pairs file to a pair. The trajectories are looked up in `by_name`.

    Raises ValueError if a field is not valid, or if one of the trajectories does not exist.
    """
    check_types(row, PAIR_FIELDS)
    sides = []
    for side in row["chosen"], row["rejected"]:
        check_types(side, SIDE_FIELDS)
        name = (row["task"], *(side[part] for part in SIDE_FIELDS))
        if name not in by_name:
            raise ValueError(f"it names {describe(name)}, but the inputs of its phase have no such "
                             "trajectory")
        sides.append(by_name[name])
    for name in "weight", "sft_weight":
        if row[name] < 0:
            raise ValueError(f"{name} is {row[name]}, below 0")
    return Pair(row["kind"], *sides, row["weight"], row["sft_weight"])


def trajectories_by_name(trajectories: Iterable[Trajectory]) -> dict[tuple, Trajectory]:
    """Returns {name: trajectory}. The same trajectory may occur several times.

    Raises ValueError if two different trajectories have the same name.
    """
    by_name = {}
    for t in trajectories:
        stored = by_name.setdefault(name_of(t), t)
        if stored is not t and stored != t:
            raise same_name(name_of(t))
    return by_name


def check_can_be_read(items: list, inputs: Iterable, vocabulary: float) -> None:
    """Raises ValueError if `read` could not read a list again, from the file that `write` makes.

    A pairs file contains only references to trajectories. Therefore the trajectories of a pair must
    be in `inputs`, and not modified copies.
    """
    check_names(items)
    again = items_of((json.loads(line_of(item)) for item in items), inputs, vocabulary)
    for item, read_item in zip(items, again):
        if not isinstance(item, Pair):
            continue
        for t, known in zip(trajectories_in(item), trajectories_in(read_item)):
            if t != known:
                raise ValueError(f"a pair has a trajectory with {describe(name_of(t))}, but the "
                                 "inputs of the phase have none or another one")
