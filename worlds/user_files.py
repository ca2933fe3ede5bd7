"""Files that a user gives: whatever is wrong with one is said in a line."""

import json
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from common.settings import Refused

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
        raise Refused(f"{where}: {kind}{shorten(str(error), 200)}; it must be {must}") from None


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def text_in(value) -> str:
    """A value of a file that has to be a text; ValueError where it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)[:40]} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} is half of a surrogate pair, which is no "
                         "text") from None
    return value
