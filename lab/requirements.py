"""What this interpreter lacks of requirements.txt: `python3 lab/requirements.py FILE`.

Prints it in one line, and ends with status 1 if that is anything. run.sh runs it with interpreters
that may have no package at all: `packaging` is the only one that it needs.
"""

import sys
from importlib.metadata import PackageNotFoundError, version


def lacking(lines) -> list[str]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging (found none)"]
    result = []
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        wanted = Requirement(line)
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            found = None
        if not found or not wanted.specifier.contains(found, prereleases=True):
            result.append(f"{line} (found {found or 'none'})")
    return result


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        found = lacking(file)
    print(", ".join(found))
    sys.exit(bool(found))
