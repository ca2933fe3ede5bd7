"""Prints the requirements in a file that this interpreter lacks, in one line.

    python3 lab/requirements.py FILE

The exit status is 1 if a requirement is missing. The interpreter may have no packages at all.
"""

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def lacking(lines) -> list[str]:
    """Returns each missing requirement with the installed version."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging (found none)"]
    missing = []
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        requirement, installed = Requirement(line), None
        with suppress(PackageNotFoundError):
            installed = version(requirement.name)
        if not installed or not requirement.specifier.contains(installed, prereleases=True):
            missing.append(f"{line} (found {installed or 'none'})")
    return missing


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        missing = lacking(file)
    print(", ".join(missing))
    sys.exit(bool(missing))
