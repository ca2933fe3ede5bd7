"""Files that a user gives: whatever is wrong with one is said in a line."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from common.settings import UsageError

FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@contextmanager
def reading(where: str, must: str):
    """Refuses what is wrong with a file.

    Args:
        where: flag, file and place in the file.
        must: what should be there.
    """
    try:
        yield
    except FAULTS as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} "
        raise UsageError(f"{where}: {kind}{shorten(str(error), 200)}; it must be {must}") from None


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def text_in(value) -> str:
    """A value of a file that has to be a text; ValueError where it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)[:40]} is no text")
    return value


def read_lists(folder: str | None, rule: dict, names: dict[str, str], read: Callable,
               must: str) -> dict[str, list]:
    """The tasks of each split, by lists that ETO and IPR published (--split-file).

    Args:
        folder: of NAME_indices.json; None where the rule holds.
        rule: split -> tasks, where no file replaces them. The validation tasks stay the rule's,
            without those that a file lists.
        names: split -> NAME.
        read: entry of a list -> task, or None for one that is left out.
        must: what a list has to be.

    Returns:
        split -> tasks.

    Raises:
        Refused: a file is not there or is no such list.
    """
    if folder is None:
        return rule
    found = {}
    for split, name in names.items():
        file = Path(folder, f"{name}_indices.json")
        with reading(f"--split-file {file}", must):
            entries = dict.fromkeys(map(read, read_json(file)))
            found[split] = [task for task in entries if task is not None]
            if not found[split]:
                raise ValueError("it has no task for these settings")

    listed = set()
    for tasks in found.values():
        listed |= {*tasks}
    validation = [task for task in rule["validation"] if task not in listed]
    return {**rule, "validation": validation, **found}
