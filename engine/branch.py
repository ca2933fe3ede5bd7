"""--branch RUN@OUTPUT: a new run takes what RUN made before OUTPUT, and goes on from there with
today's settings and code. `Run` calls `take` when it opens a new folder."""

import os
import shutil
from pathlib import Path

from common.files import read_json, remove
from common.settings import FREE, UsageError, has_mark, settings_of
from engine.code import code_differences
from engine.console import counted


def take(run, branch: str, now: dict) -> dict:
    """Copies the outputs of a run before one of them into another's folder, agents by hard links.

    Args:
        run: The run that gets them.
        branch: RUN@OUTPUT.
        now: The settings of the run that gets them.

    Returns:
        What its config.json says of them.

    Raises:
        Refused: There is no such run or output, or the two runs have not the same environment,
            with its options, model and view.
    """
    name, _, output = branch.rpartition("@")
    source = Path(name)
    if not name or (Path(branch) / "phases.json").exists():
        raise UsageError(f"--branch {branch}: give RUN@OUTPUT, such as "
                      "runs/webshop-coevolve-s0@iter1/pairs-target.jsonl")
    if not (source / "phases.json").exists():
        raise UsageError(f"--branch {branch}: {name} is no run; give RUN@OUTPUT")
    rows = read_json(source / "phases.json")
    if output not in rows:
        raise UsageError(f"--branch {branch}: the run has no {output!r}; choose from: "
                      f"{', '.join(rows)}")
    config = read_json(source / "config.json")
    others = differing(config["settings"], now)
    options = type(run.options)
    of_env = [name for name in settings_of(options) if not has_mark(options, name, FREE)]
    wrong = [others[name] for name in ("env", *of_env, "model", "view") if name in others]
    if wrong:
        raise UsageError(f"--branch {branch}: the run has another {', '.join(wrong)}; give the same, "
                      "or begin a new run without --branch")
    seed = others.pop("seed", None)
    code = code_differences(config.get("code"), run.code)
    taken = {}
    for done, row in rows.items():
        if done == output:
            break
        if not Path(done).parts or Path(done).is_absolute() or ".." in Path(done).parts:
            raise UsageError(f"{source / 'phases.json'}: the output {done!r} is not in the run's "
                          "folder; restore the file")
        if not (source / done).exists():
            raise UsageError(f"--branch {branch}: {source / done} is not there any more")
        copy(source / done, run.folder / done)
        taken[done] = row
    settings = list(others.values())
    run.print(f"{counted(len(taken), 'outputs')} taken from {source}, up to {output}; "
            f"other settings: {', '.join(settings) or 'none'}; "
            f"other code: {', '.join(code) or 'none'}")
    if seed:
        run.print(f"what is taken was made with another {seed}; `compare` will not pair this run "
                "with others of its seed")
    # Of a branch of a branch, the seed is that of its first outputs.
    first = config.get("branch", {}).get("seed", config["settings"]["seed"])
    branch = dict(run=str(source), output=output, seed=first, settings=settings, code=code)
    return dict(branch=branch, taken=taken)


def differing(before: dict, now: dict) -> dict[str, str]:
    """Return the settings that differ, name -> "name (before -> now)"; - is for a missing one."""
    found = {}
    for name in sorted(before.keys() | now.keys()):
        values = before.get(name, "-"), now.get(name, "-")
        if values[0] != values[1] and name not in ("out", "branch"):
            found[name] = f"{name} ({values[0]} -> {values[1]})"
    return found


def copy(source: Path, target: Path) -> None:
    """Copies a file or an agent's folder."""
    remove(target)  # where the run was stopped as it took
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link)
    else:
        shutil.copyfile(source, target)


def link(source: str, target: str) -> None:
    """Links weights, which nobody edits, and copies what else is in an agent's folder."""
    try:
        if not source.endswith((".safetensors", ".pt")):
            raise OSError
        os.link(source, target)
    except OSError:  # or on another disk
        shutil.copyfile(source, target)
