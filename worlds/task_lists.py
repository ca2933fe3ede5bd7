"""Lists of tasks that ETO and IPR published, as they lie in their repositories (--split-file)."""

from collections.abc import Callable
from pathlib import Path

from worlds.user_files import read_json, reading


def read_lists(folder: str | None, rule: dict, names: dict[str, str], read: Callable,
               must: str) -> dict[str, list]:
    """The tasks of each split.

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
