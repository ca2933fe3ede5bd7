"""Checks whether the packages in a requirements file are installed.

    python3 lab/requirements.py FILE

Prints the missing packages in one line. The exit status is 1 if a package is missing, and 0
otherwise. The script needs only the standard library, so it also runs in a Python installation
without any packages.
"""

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def lacking(lines) -> list[str]:
    """Returns the unsatisfied requirements among the lines of a requirements file, for example
    ["torch>=2.4 (found 2.1.0)", "trl (found none)"]."""
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
