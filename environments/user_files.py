"""Reads files that a user gives, and turns every fault in them into a UsageError of one line."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from common.settings import UsageError

# The exceptions that malformed data raise when code reads them as if they were well-formed
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@contextmanager
def reading(where: str, must: str):
    """Raises UsageError instead of any exception of FAULTS in the body of the `with` statement.

    Args:
        where: The source of the data for the message: flag, file and position in the file.
        must: The expected content, which the message adds after "it must be".
    """
    try:
        yield
    except FAULTS as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} "
        raise UsageError(f"{where}: {kind}{shorten(str(error), 200)}; it must be {must}") from None


def read_json(path: Path):
    """Returns the JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def text_in(value) -> str:
    """Returns a value that must be a string. Raises ValueError if it is not."""
    if not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)[:40]} is not a string")
    return value


def read_lists(folder: str | None, rule: dict, names: dict[str, str], read: Callable,
               must: str) -> dict[str, list]:
    """Returns the tasks of each split, from the lists of ETO or IPR if they are given.

    The flag --split-file gives the folder of the lists, which have the names NAME_indices.json.

    Args:
        folder: The folder, or None to use the rule.
        rule: A dict {split: tasks} for the splits that no list replaces. The validation tasks
            always come from it, without those that a list contains.
        names: A dict {split: NAME} of the lists.
        read: A function that turns an entry of a list into a task, or into None to leave it out.
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
