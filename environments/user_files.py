"""Reads files that the user provides, and reports any error in them as a one-line UsageError."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from common.settings import UsageError

# If code parses malformed data without checking it first, any of these exceptions can occur.
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@contextmanager
def reading(where: str, must: str):
    """Converts any exception in FAULTS to a UsageError. This function is a context manager.

    Args:
        where: The source of the data: the flag, the file and the position in the file. The error
            message starts with this text.
        must: The expected content. The error message ends with "it must be" and this text.
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
    """Reads the task lists that ETO and IPR publish, and returns the splits, a dict {split: tasks}.

    Each list is a file with a name such as train_indices.json. The user gives the folder of these
    files with --split-file. Each list replaces the tasks of one split.

    Args:
        folder: The folder of the task lists, or None to return `rule` unchanged.
        rule: The default splits, a dict {split: tasks}. The validation split is always read from
            this dict, but without the tasks that are in one of the lists.
        names: A dict {split: NAME} of the splits that are replaced. The list for a split is the
            file NAME_indices.json.
        read: A function that converts an entry of a list to a task. The function returns None if
            the entry should be skipped.
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

    listed = set().union(*lists.values())
    validation = [task for task in rule["validation"] if task not in listed]
    return {**rule, "validation": validation, **lists}
