"""What this interpreter, which may have no package at all, lacks of requirements.txt, in one line:
`python3 lab/requirements.py FILE`; ends with status 1 if that is anything."""

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def lacking(lines) -> list[str]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging (found none)"]
    result = []
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        wanted, found = Requirement(line), None
        with suppress(PackageNotFoundError):
            found = version(wanted.name)
        if not found or not wanted.specifier.contains(found, prereleases=True):
            result.append(f"{line} (found {found or 'none'})")
    return result


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        found = lacking(file)
    print(", ".join(found))
    sys.exit(bool(found))
