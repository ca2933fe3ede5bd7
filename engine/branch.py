"""The setting --branch RUN@OUTPUT, which starts a new run from the outputs of an earlier run.

The new run copies all outputs of RUN that come before OUTPUT. Then it computes OUTPUT and all later
outputs with the current settings and code.
"""

import os
import shutil
from pathlib import Path

from common.files import check_version, copy_folder, read_json, remove
from common.settings import FREE, UsageError, settings_of, values_of
from engine.code import code_differences
from engine.console import counted


def take(run, branch: str, now: dict) -> dict:
    """Copies outputs of another run to the folder of a new run.

    Weight files become hard links, which take no disk space.

    Returns:
        A dict with two entries for config.json. `branch` names the other run and OUTPUT, and lists
        the settings and the code that differ. `taken` contains the records of the copied outputs,
        read from the phases.json of the other run.

    Raises:
        UsageError: RUN or OUTPUT does not exist, a file that has to be copied does not exist, or
            the two runs have different values of `env`, `model`, `view` or an option of the
            environment that is not Free.
    """
    # 1. Read the records of the other run.
    name, _, output = branch.rpartition("@")
    source = Path(name)
    if not (source / "phases.json").exists():
        raise UsageError(f"--branch {branch}: give RUN@OUTPUT, where RUN is the folder of a run, "
                         "such as runs/webshop-coevolve-s0@iter1/pairs-target.jsonl")
    rows = read_json(source / "phases.json")
    check_version(f"--branch {branch}", rows)
    if output not in rows:
        raise UsageError(f"--branch {branch}: the run has no output {output!r}; choose from: "
                         f"{', '.join(rows)}")

    # 2. Compare the settings.
    config = read_json(source / "config.json")
    changes = differing_settings(config["settings"], now, run.declared)
    options = type(run.options)
    env_options = [name for name in settings_of(options) if FREE not in run.declared[name].marks]
    conflicts = [changes[name] for name in ("env", *env_options, "model", "view")
                 if name in changes]
    if conflicts:
        raise UsageError(f"--branch {branch}: the run has other values of {', '.join(conflicts)}; "
                         "give the same values, or start a new run without --branch")
    seed = changes.pop("seed", None)
    inherited = inherited_settings(config["settings"], now, type(run.settings), options)
    code = code_differences(config.get("code"), run.code)

    # 3. Copy the outputs.
    taken = {}
    for name, row in rows.items():
        if name == output:
            break
        if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"{source / 'phases.json'}: the output {name!r} is not in the run's "
                             "folder; restore the file")
        if not (source / name).exists():
            raise UsageError(f"--branch {branch}: {source / name} does not exist any more; choose "
                             "an earlier OUTPUT, or rerun RUN to make it again")
        copy(source / name, run.folder / name)
        taken[name] = row

    # 4. Print and return the name of the other run, and the settings and code that differ.
    settings = list(changes.values())
    run.print(f"{counted(len(taken), 'outputs')} copied from {source}, up to {output}; "
              f"other settings: {', '.join(settings) or 'none'}; "
              f"other code: {', '.join(code) or 'none'}")
    if inherited:
        run.print(f"settings of {source}, where the defaults differ: {', '.join(inherited)}")
    if seed:
        run.print(f"the copied outputs were made with another {seed}; `compare` will not pair this "
                  "run with others of its seed")
    # Record the seed of the run that made the earliest copied outputs. This seed is in the entry
    # `branch` if RUN was itself started with --branch.
    first_seed = config.get("branch", {}).get("seed", config["settings"]["seed"])
    branch = dict(run=str(source), output=output, seed=first_seed, settings=settings, code=code)
    return dict(branch=branch, taken=taken)


def settings_of_run(branch: str) -> dict:
    """Returns the settings of RUN in --branch RUN@OUTPUT, which are the defaults of the new run."""
    config = Path(branch.rpartition("@")[0]) / "config.json"
    return read_json(config).get("settings", {}) if config.exists() else {}


def inherited_settings(before: dict, now: dict, kind: type, options: type) -> list[str]:
    """Returns the values of RUN that differ from the current defaults, as "beta (0.1, not 0.2)".
    """
    names = ("env", "method", "model", "quick", *settings_of(options))
    defaults, _ = values_of({name: now[name] for name in names}, {}, kind, options)
    return [f"{name} ({value}, not {defaults[name]})" for name, value in now.items()
            if value == before.get(name) != defaults[name]]


def differing_settings(before: dict, now: dict, declared: dict) -> dict[str, str]:
    """Returns the settings that differ between two runs, as {name: "beta (0.1 -> 0.2)"}.

    A missing setting has the value "-". A setting that follows another setting is left out if both
    settings have the same value in each of the runs.
    """
    changes = {}
    for name in sorted(before.keys() | now.keys()):
        values = before.get(name, "-"), now.get(name, "-")
        follows = name in declared and all(map(declared[name].has_followed, (before, now)))
        if values[0] != values[1] and not follows and name not in ("out", "branch"):
            changes[name] = f"{name} ({values[0]} -> {values[1]})"
    return changes


def copy(source: Path, target: Path) -> None:
    """Copies one output of a run, which is a file or an agent's folder."""
    remove(target)  # an interrupted copy may have left an incomplete target
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        copy_folder(source, target, link)
    else:
        shutil.copyfile(source, target)


def link(source: Path, target: Path) -> None:
    """Makes a hard link to a weight file, or a copy of any other file.

    Users may edit other files, and an edit must not change the original run. A weight file is also
    copied if it is on a different disk, or if a new file would have a different mode, for example
    because the other run belongs to a different user.
    """
    target.touch()
    is_weights = source.suffix in (".safetensors", ".pt")
    if is_weights and target.stat().st_mode == source.stat().st_mode:
        try:
            target.unlink()
            return os.link(source, target)
        except OSError:  # `target` is on a different disk, so a hard link is not possible
            pass
    shutil.copyfile(source, target)
