"""What runs may take over from each other: phases that were made alike, by the same code.

A phase is known by its recipe, the settings that it has read, its code and the machine.
"""

import ast
import hashlib
import json
import os
import shutil
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from common import files
from lab.careful.kept import saved_agents

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"coevolve", "evolve"}  # in a phase these names mean modules, not the loops
# Settings that change no byte of what a phase makes.
NO_PART = {"out", "reuse", "track", "checkpoint_minutes", "save_every"}
# What is recorded of how a phase was made, beside what it found.
HOW_MADE = {"made", "settings", "weights", "code"}


def imported(tree: ast.Module) -> set[Path]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = (ROOT.joinpath(*name.split(".")) for name in names)
    return {path for stem in paths for path in (stem.with_suffix(".py"), stem / "__init__.py")
            if path.is_file()}


@lru_cache(None)
def definitions(*files: Path) -> dict[str, list[tuple[str, frozenset]]]:
    """name -> (source, the names in it) of every function, method, constant and field of that name
    in these files and in what they import of the project."""
    found, todo, seen = {}, list(files), set()
    while todo:
        if (file := todo.pop()) in seen:
            continue
        seen.add(file)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        todo += imported(tree)
        for node in [*tree.body, *(part for head in tree.body if isinstance(head, ast.ClassDef)
                                   for part in head.body)]:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [node.name] if isinstance(node, ast.FunctionDef) else [
                target.id for target in targets if isinstance(target, ast.Name)]
            used = frozenset(n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node)
                             if isinstance(n, (ast.Name, ast.Attribute))) - MODULES
            for name in names:
                found.setdefault(name, []).append((ast.unparse(node), used))
    return found


def code_of(work, env: str) -> str:
    """A hash of the code that a phase may run: its own, and of everything of the project's whose
    name stands in that, and so on, among the files of the phase, the run and the environment."""
    known = definitions(Path(sys.modules[work.__module__].__file__).resolve(),
                        ROOT / "lab/careful/run.py", *sorted((ROOT / "worlds" / env).glob("*.py")))
    todo, seen, parts = [work.__name__], set(), set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for source, used in known.get(name, ()):
                parts.add(source)
                todo += used
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def machine(run) -> dict:
    """What may change draws or rounding beside what a phase reads: packages, processor, processes,
    and how the run lays out its work, as it is in force."""
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
    cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return packages | dict(
        processor=torch.backends.cpu.get_cpu_capability(),
        cards=cards,
        threads=torch.get_num_threads(),
        processes=run.ranks,
        mixed_precision=run.accelerator.mixed_precision,
        shard=run.shard,
        gradient_checkpointing=run.recompute,
        fast=run.fast,
        slots=run.slots,
        tokens_per_forward=run.tokens_per_forward)


def take(run, out: Path, code: str, folder: Path) -> dict | None:
    """Puts at `out` what another run, in `folder` or its subfolders, has made alike of the running
    phase; what is recorded of it; None where there is none."""
    for phases in sorted([*folder.glob("*/phases.json"), *folder.glob("phases.json")]):
        other = phases.parent
        output = other / run.name
        row = files.read_json(phases).get(run.name, {})
        if other.samefile(run.folder) or not is_asked_for(row, run) or not output.exists():
            continue
        why = why_not_taken(row, output, code, run)
        if why:
            tqdm.write(f"{run.name}: not taken from {other}, since {why}")
            continue
        try:
            copy(output, out)
        except (FileNotFoundError, shutil.Error):  # somebody is deleting it
            continue
        for _, saved in saved_agents(output):
            copy(saved, out.parent / saved.name)
        return row | dict(reused=row.get("reused", str(other)))
    return None


def is_asked_for(row: dict, run) -> bool:
    """Whether a phase was made from what the running one is made from, with its settings; row: what
    is recorded of it."""
    settings = vars(run.settings) | vars(run.options)
    read = row.get("made", {}).get("reads", row.get("settings", {}))
    for name, value in read.items():
        if settings.get(name) != value:
            return False
    return row.get("recipe") == run.recipe


def why_not_taken(row: dict, output: Path, code: str, run) -> str:
    """Why such a phase of another run is not what the running one would make; else nothing.

    Args:
        row: What is recorded of it.
        output: What it made.
        code: A hash of the code that the running phase may run.
        run: The run.
    """
    made = row.get("made")
    if made is None:
        return "the plain core made it, which does not say on what machine"
    if made.get("code") != code:
        return "the code of its phase differs"
    differs = difference(made.get("machine"), json.loads(json.dumps(machine(run))))
    if differs:
        return differs
    if made.get("output") != files.known_by(output, {}):
        return "it has been changed since"

    every = run.settings.save_every
    saved = {step for step, _ in saved_agents(output)}
    if every and not saved.issuperset(range(every, steps_of(output) + 1, every)):
        return f"it has no agents of --save-every {every}"
    return ""


def difference(there, here: dict) -> str:
    """How the `machine` that made a phase differs from the one here; nothing where it does not."""
    if not isinstance(there, dict):
        return "an older version made it, which does not say how it laid out its work"
    found = []
    for name, value in here.items():
        if there.get(name) != value:
            found.append(f"{name} {there.get(name)}, here {value}")
    return f"it was made otherwise: {'; '.join(found)}" if found else ""


def steps_of(output: Path) -> int:
    """The steps of a training, as --save-every counts them: the lines of its log. A step of GRPO is
    one, however many updates it has."""
    log = output / "train.jsonl"
    return len(files.read_jsonl(log)) if log.exists() else 0


def copy(source: Path, target: Path) -> None:
    """Copies a file, which somebody may edit; or a folder, by hard links where the disk has them,
    since agents are large."""
    if not source.is_dir():
        shutil.copyfile(source, target)
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=link)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or not ours
        shutil.copyfile(source, target)
