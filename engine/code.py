"""The code of a run: its commit, and the files that differ from it. `Run` records both; `--branch`
and `compare` print which files differ between two runs."""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_now() -> dict:
    """Return the code of this program: {commit, files}.

    `files` has the hash of every .py file that differs from the commit, None for a deleted one, and
    of every .py file if the program is not in a git repository (`commit` is None then).
    """
    commit = git("rev-parse", "HEAD") if git("ls-files", "coevolve.py") else None
    if commit:
        changed = git("diff", "--name-only", "--relative", "HEAD", "--", "*.py")
        new = git("ls-files", "--others", "--exclude-standard", "--", "*.py")
        names = (changed + new).splitlines()
    else:
        packages = [file.parent for file in ROOT.glob("*/__init__.py")]
        files = [*ROOT.glob("*.py"), *(file for part in packages for file in part.rglob("*.py"))]
        names = [file.relative_to(ROOT).as_posix() for file in files]
    return dict(commit=commit and commit.strip(),
                files={name: blob_hash(ROOT / name) for name in sorted(names)})


def git(*words: str) -> str:
    """Return what git prints in the program's folder, "" if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-c", "core.quotePath=off", *words], cwd=ROOT, text=True,
                              capture_output=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def blob_hash(file: Path) -> str | None:
    """Return git's hash of a file's content, None if the file is not there."""
    if not file.exists():
        return None
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def code_differences(one: dict | None, other: dict | None) -> list[str]:
    """Return the names of the files that differ between two records of `code_now`.

    If the files of one cannot be known, because it has no record or this repository does not have
    its commit, the list has one entry that says so.
    """
    if not one or not other:
        return ["(one of the runs has no record of its code)"]
    files = []
    for record in one, other:
        committed = {}
        if record["commit"] and one["commit"] != other["commit"]:
            committed = files_of(record["commit"])
            if not committed:
                return [f"(commit {one['commit']} and {other['commit']}, not both of them here)"]
        files.append(committed | record["files"])
    names = sorted(files[0].keys() | files[1].keys())
    return [name for name in names if files[0].get(name) != files[1].get(name)]


def files_of(commit: str) -> dict[str, str]:
    """Return the hashes of the .py files of a commit, by name; none if it is not known here."""
    files = {}
    for line in git("ls-tree", "-r", commit).splitlines():
        kind, name = line.split("\t")
        if name.endswith(".py"):
            files[name] = kind.split()[2]
    return files
