"""The code version of a run: the git commit, and the files that differ from it.

`Run` records both. --branch and `compare` print the files that differ between two runs.
"""

import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALLED = r"(^|/)(\.|site-packages/)"  # paths in virtual environments and hidden folders


def code_now() -> dict:
    """Returns the version of this program's code, {commit, files}.

    `files` maps the .py files that differ from the commit to their hashes, and deleted files to
    None. If the program is not in a git repository, `commit` is None, and `files` holds all .py
    files.
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
    """Returns the output of git in the program's folder, or "" if git fails or is not installed."""
    try:
        result = subprocess.run(["git", "-c", "core.quotePath=off", *words], cwd=ROOT, text=True,
                                capture_output=True)
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def blob_hash(file: Path) -> str | None:
    """Returns git's hash of a file's content, or None if the file does not exist."""
    if not file.exists():
        return None
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def code_differences(first: dict | None, second: dict | None) -> list[str]:
    """Returns the names of the files that differ between two results of `code_now`.

    If a run has no such record, or this repository does not have its commit, the list has a single
    entry with this reason.
    """
    if not first or not second:
        return ["(one of the runs has no record of its code)"]
    same_commit = first["commit"] == second["commit"]
    files = []
    for record in first, second:
        committed = {}
        if record["commit"] and not same_commit:
            committed = hashes_in_commit(record["commit"])
            if not committed:
                return [f"(unknown: this repository has no commit {record['commit']})"]
        files.append(committed | record["files"])
    names = sorted(files[0].keys() | files[1].keys())
    # With the same commit, an unlisted file is as in that commit. Otherwise it does not exist.
    missing = "committed" if same_commit else None
    return [name for name in names if files[0].get(name, missing) != files[1].get(name, missing)]


def hashes_in_commit(commit: str) -> dict[str, str]:
    """Returns the hashes of the .py files in a commit, by name.

    The result is empty if this repository does not have the commit.
    """
    files = {}
    for line in git("ls-tree", "-r", commit).splitlines():
        kind, name = line.split("\t")
        if name.endswith(".py"):
            files[name] = kind.split()[2]
    return files
