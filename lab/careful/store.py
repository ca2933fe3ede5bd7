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


def machine(run) -> list:
    """What may change rounding: packages, processor, processes, number format, threads."""
    return [*(version(name) for name in ("torch", "transformers", "tokenizers", "numpy")),
            run.ranks, run.accelerator.mixed_precision, run.shard, torch.get_num_threads(),
            torch.backends.cpu.get_cpu_capability(),
            *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]


def take(run, out: Path, code: str, folder: Path) -> dict | None:
    """Puts at `out` what another run, in `folder` or its subfolders, has made alike of the running
    phase; what is recorded of it; None where there is none."""
    settings = vars(run.settings) | vars(run.options)
    now = json.loads(json.dumps(machine(run)))
    for phases in sorted([*folder.glob("*/phases.json"), *folder.glob("phases.json")]):
        row, other = json.loads(phases.read_text()).get(run.name, {}), phases.parent
        made = row.get("made", {})
        if row.get("recipe") != run.recipe or other.samefile(run.folder) or any(
                settings.get(name) != value for name, value in made.get("reads", {}).items()):
            continue
        if [made.get("code"), made.get("machine")] != [code, now]:
            what = "code of its phase" if made.get("code") != code else "machine"
            tqdm.write(f"{run.name}: not taken from {other}, since the {what} differs")
            continue
        try:
            copy(other / run.name, out)
        except (FileNotFoundError, shutil.Error):  # somebody has deleted it since
            continue
        for saved in (other / run.name).parent.glob(f"{out.stem}-step*"):  # on the way to it
            copy(saved, out.parent / saved.name)
        return row | dict(reused=row.get("reused", str(other)))
    return None


def copy(source: Path, target: Path) -> None:
    """A file or folder, by hard links where the disk has them: agents are large."""
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, copy_function=lambda a, b: copy(Path(a), Path(b)))
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or not ours
        shutil.copyfile(source, target)
