"""Records the code version of a run: the git commit, and hashes of files with local changes.

`Run` stores the code version in config.json. --branch and the command `compare` print which files
differ between the code versions of two runs.
"""

import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Matches paths in virtual environments and in hidden folders.
INSTALLED = r"(^|/)(\.|site-packages/)"


def code_now() -> dict:
    """Returns the current code version of this program as a dict {commit, files}.

    `commit` is the hash of the git commit. `files` maps the name of each .py file that was changed
    or added since the commit to the hash of its content. A deleted file has None instead of a hash.

    If the program is not in a git repository, `commit` is None, and `files` contains all .py files.
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
    """Runs a git command in the program's folder, and returns its output.

    Returns "" if the command fails or git is not installed.
    """
    try:
        result = subprocess.run(["git", "-c", "core.quotePath=off", *words], cwd=ROOT, text=True,
                                capture_output=True)
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def blob_hash(file: Path) -> str | None:
    """Computes the git blob hash of a file. Returns None if the file does not exist."""
    if not file.exists():
        return None
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def code_differences(first: dict | None, second: dict | None) -> list[str]:
    """Returns the names of the .py files that differ between two code versions.

    Args:
        first, second: Results of `code_now`. An argument is None if the config.json of the run
            contains no code version.

    Returns:
        The sorted file names. If the versions cannot be compared, the list contains a single text
        with the reason: a version is None, or its commit does not exist in this repository.
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
    # A file may have a hash in only one of the two versions. If both versions have the same commit,
    # the other version has the file as it was committed. Otherwise the other version does not have
    # the file, because `files` contains all files of both versions.
    missing = "committed" if same_commit else None
    return [name for name in names if files[0].get(name, missing) != files[1].get(name, missing)]


def hashes_in_commit(commit: str) -> dict[str, str]:
    """Returns a dict {file name: git blob hash} of all .py files in a commit.

    The dict is empty if the commit does not exist in this repository.
    """
    files = {}
    for line in git("ls-tree", "-r", commit).splitlines():
        kind, name = line.split("\t")
        if name.endswith(".py"):
            files[name] = kind.split()[2]
    return files
