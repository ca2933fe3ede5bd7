"""Reads files that the user provides, and reports any error in them as a one-line UsageError."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from common.settings import UsageError

# The exceptions that can occur when code parses malformed data without checking it first
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@contextmanager
def reading(where: str, must: str):
    """A context manager that converts any exception in FAULTS to a UsageError.

    Args:
        where: The source of the data, with which the message starts: the flag, the file and the
            position in the file.
        must: The expected content, with which the message ends: "it must be ...".
    """
    try:
        yield
    except FAULTS as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} "
        raise UsageError(f"{where}: {kind}{shorten(str(error), 200)}; it must be {must}") from None


def read_json(path: Path):
    """Reads a JSON file and returns its value."""
    return json.loads(path.read_text(encoding="utf-8"))


def text_in(value) -> str:
    """Returns the value unchanged if it is a string, and raises ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)[:40]} is not a string")
    return value


def read_lists(folder: str | None, rule: dict, names: dict[str, str], read: Callable,
               must: str) -> dict[str, list]:
    """Returns the splits of an environment, a dict {split: tasks}.

    ETO and IPR publish task lists, files with names of the form NAME_indices.json. If the user
    gives the folder of these files (--split-file), each list replaces the tasks of one split.

    Args:
        folder: The folder of the task lists, or None to return `rule` unchanged.
        rule: The default splits, a dict {split: tasks}. The validation split always comes from this
            dict, but tasks that are in one of the lists are removed from it.
        names: A dict {split: NAME}, the list for each split that is replaced.
        read: A function that converts an entry of a list to a task, or to None to skip the entry.
        must: The expected content of a list, for the error message.

    Raises:
        UsageError: If a list is missing, is malformed or has no task.
    """
    if folder is None:
        return rule
    lists = {}
    for split, name in names.items():
        file = Path(folder, f"{name}_indices.json")
        with reading(f"--split-file {file}", must):
            entries = dict.fromkeys(map(read, read_json(file)))
            lists[split] = [task for task in entries if task is not None]
            if not lists[split]:
                raise ValueError("the list has no task for these settings")

    listed = set()
    for tasks in lists.values():
        listed |= {*tasks}
    validation = [task for task in rule["validation"] if task not in listed]
    return {**rule, "validation": validation, **lists}
