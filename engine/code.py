"""Records the code version of a run: the git commit, and hashes of files with local changes.

--branch and the command `compare` print the files that differ between two code versions.
"""

import hashlib
import re
import subprocess
from pathlib import Path

from common import ROOT

# Matches paths in virtual environments and in hidden folders.
INSTALLED = r"(^|/)(\.|site-packages/)"


def code_now() -> dict:
    """Returns the current code version of this program as a dict {commit, files}.

    `files` maps the name of each .py file that was changed or added since the commit to the hash of
    its content, or to None for a deleted file. Outside a git repository, `commit` is None, and
    `files` contains all .py files.
    """
    commit = git("rev-parse", "HEAD").strip() if git("ls-files", "coevolve.py") else None
    if commit:
        changed = git("diff", "--name-only", "--relative", "HEAD", "--", "*.py")
        new = git("ls-files", "--others", "--exclude-standard", "--", "*.py")
        names = (changed + new).splitlines()
    else:
        paths = [file.relative_to(ROOT) for file in ROOT.rglob("*.py")]
        names = [path.as_posix() for path in paths if not re.search(INSTALLED, path.as_posix())]
    return dict(commit=commit,
                files={name: blob_hash(ROOT / name) for name in sorted(names)})


def git(*words: str) -> str:
    """Returns the output of a git command, or "" if it fails or git is not installed."""
    try:
        result = subprocess.run(["git", "-c", "core.quotePath=off", *words], cwd=ROOT, text=True,
                                capture_output=True)
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def blob_hash(file: Path) -> str | None:
    """Returns the git blob hash of a file, or None if the file does not exist."""
    if not file.exists():
        return None
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def code_differences(first: dict | None, second: dict | None) -> list[str]:
    """Returns the names of the .py files that differ between two code versions.

    The code versions are results of `code_now`, or None if a config.json contains none. If they
    cannot be compared, the list contains only a text with the reason.
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
    # If both versions have the same commit, a file without a hash in one version is unchanged since
    # the commit. If the commits differ, the version without a hash does not contain the file.
    missing = "committed" if same_commit else None
    return [name for name in names if files[0].get(name, missing) != files[1].get(name, missing)]


def hashes_in_commit(commit: str) -> dict[str, str]:
    """Returns {file name: git blob hash} of a commit's .py files, or {} for an unknown commit."""
    files = {}
    for line in git("ls-tree", "-r", commit).splitlines():
        kind, name = line.split("\t")
        if name.endswith(".py"):
            files[name] = kind.split()[2]
    return files
