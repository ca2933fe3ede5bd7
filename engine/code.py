"""The code of a run: its commit, and the files that differ from it. `Run` records both; `--branch`
and `compare` print which files differ between two runs."""

import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALLED = r"(^|/)(\.|site-packages/)"  # of a virtual environment, and other hidden folders


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
        paths = [file.relative_to(ROOT) for file in ROOT.rglob("*.py")]
        names = [path.as_posix() for path in paths if not re.search(INSTALLED, path.as_posix())]
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
    same = one["commit"] == other["commit"]
    files = []
    for record in one, other:
        committed = {}
        if record["commit"] and not same:
            committed = files_of(record["commit"])
            if not committed:
                return [f"(not known: this repository has no commit {record['commit']})"]
        files.append(committed | record["files"])
    names = sorted(files[0].keys() | files[1].keys())
    missing = "as in the commit of both" if same else None  # None: the file is not there
    return [name for name in names if files[0].get(name, missing) != files[1].get(name, missing)]


def files_of(commit: str) -> dict[str, str]:
    """Return the hashes of the .py files of a commit, by name; none if it is not known here."""
    files = {}
    for line in git("ls-tree", "-r", commit).splitlines():
        kind, name = line.split("\t")
        if name.endswith(".py"):
            files[name] = kind.split()[2]
    return files
