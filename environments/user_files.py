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
    """Context manager that converts any exception in FAULTS to a UsageError.

    Args:
        where: The flag, the file and the position in the file, for the error message.
        must: The expected content, for the error message.
    """
    try:
        yield
    except FAULTS as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} "
        raise UsageError(f"{where}: {kind}{shorten(str(error), 200)}; it must be {must}") from None


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def text_in(value) -> str:
    """Returns `value` if it is a string, and raises ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)[:40]} is not a string")
    return value


def read_lists(folder: str | None, rule: dict, names: dict[str, str], read: Callable,
               must: str) -> dict[str, list]:
    """Reads the task lists that ETO and IPR publish, and returns the splits, a dict {split: tasks}.

    Args:
        folder: The folder of the task lists (--split-file), or None to return `rule` unchanged.
        rule: The default splits. Tasks in one of the lists are removed from "validation".
        names: A dict {split: NAME}. The list NAME_indices.json replaces the default split.
        read: A function that converts an entry of a list to a task, or to None to skip it.
        must: The expected content of a list, for the error message.
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
