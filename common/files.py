"""The files of a run: JSON lines, what tells a file from another, and what is said of a phase."""

import fcntl
import hashlib
import json
import os
import shutil
from functools import cache
from pathlib import Path

from common.settings import Refused, flag

# ------------------------------------------------------------------------------ reading, writing


def read_json(file: Path) -> dict:
    """The JSON object in a file; Refused, naming it, unless it is whole."""
    return whole_object(file.read_bytes(), file)


def read_jsonl(file: Path, growing: bool = False) -> list[dict]:
    """The objects in a file, one a line; Refused, naming the line, where one is not whole.
    growing: somebody may be writing the last line, which is left out unless it has its end."""
    lines = file.read_bytes().split(b"\n")
    last = lines.pop()  # what follows the last line's end: nothing, if the file is whole
    if last and not growing:
        lines.append(last)
    return [whole_object(line, f"{file}, line {n}") for n, line in enumerate(lines, 1)]


def whole_object(data: bytes, where) -> dict:
    try:
        value = json.loads(data.decode())
    except ValueError:  # also where it is not UTF-8
        value = None
    if isinstance(value, dict):
        return value
    begins = data.decode(errors="replace")[:40]
    raise Refused(f"{where}: {begins!r} is no whole JSON object in UTF-8; restore the file, or "
                  "delete it")


def write_json(file: Path, value) -> None:
    """Writes a value as JSON. It appears by renaming, so that a stop leaves it or what was there.
    """
    part = file.with_name(f"{file.name}.tmp")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, file)


def write_jsonl(file: Path, rows: list) -> None:
    """Writes objects, or the fields of dataclasses that are not None, one a line."""
    with open(file, "w") as lines:
        for row in rows:
            if not isinstance(row, dict):
                row = {name: value for name, value in vars(row).items() if value is not None}
            lines.write(json.dumps(row) + "\n")


def remove(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(folder: Path):
    """Keeps other processes out of a run's folder for as long as what it returns is open; Refused
    where one is in it. On a disk that has no locks nobody is kept out."""
    file = open(folder / "lock", "w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise Refused(f"--out {folder}: another process is running in this folder; wait for it or "
                      "give another") from None
    except OSError:
        pass
    return file


# -------------------------------------------------------------------- what tells one from another


def hashed(value) -> str:
    """16 hexadecimal digits, the same ones for the same value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def seed_of(*names) -> int:
    """48 bits, the same ones for the same names and numbers anywhere."""
    return int(hashlib.sha256("/".join(map(str, names)).encode()).hexdigest()[:12], 16)


@cache
def code_of(*sources: Path) -> str:
    """16 hexadecimal digits, the same ones for the same text of some files of code, and of those in
    some folders of it."""
    known = set()
    for source in sources:
        known |= {source, *source.glob("**/*.py")}
    digest = hashlib.sha256()
    for file in sorted(path for path in known if path.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def known_by(given, agents: dict[Path, str]):
    """What tells an input of a phase from another.

    Args:
        given: A path, or a list or dictionary of inputs.
        agents: The run's agents, and how each was made.

    Returns:
        Of a file its bytes, hashed; of an agent how it was made, since 27 GB take long to hash; of
        another folder name, size and last megabyte of each file; of what is not there, as on the
        hub, its name; of several inputs a list of these.
    """
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        return [known_by(part, agents) for part in given]
    if given.is_file():
        return hashlib.sha256(given.read_bytes()).hexdigest()
    if given in agents:
        return agents[given]

    found = []
    for file in sorted(given.glob("*.*")):
        if file.is_file():
            size = file.stat().st_size
            with open(file, "rb") as content:
                content.seek(max(0, size - (1 << 20)))
                end = hashlib.sha256(content.read()).hexdigest()
            found.append([file.name, size, end])
    return found or str(given)


def sizes_of_weights(agent: Path) -> dict[str, int]:
    """name -> bytes of the files of weights in an agent's folder; nothing of what is no folder."""
    return {file.name: file.stat().st_size for file in sorted(agent.glob("*.safetensors"))}


def made_by(row: dict) -> str:
    """What tells how an output was made from other ways; row: what is recorded of it."""
    return row.get("made_by", row["recipe"])


def why_again(path: Path, row: dict, recipe: str, settings: dict) -> str:
    """Why an output that is there has to be made again; nothing where it can stay.

    Args:
        path: The output.
        row: What was recorded of it.
        recipe: Its recipe as it is now.
        settings: Those of the run as they are now.
    """
    if row["recipe"] != recipe:
        return "what it is made from is another"
    for name, value in row.get("settings", {}).items():
        if settings.get(name, value) != value:  # a setting that the program lacks is no other one
            return f"it was made with {flag(name)} {value}"
    if row.get("weights", {}) != sizes_of_weights(path) and "weights" in row:
        return "its weights are not whole"
    return ""


# -------------------------------------------------------------------------------- what is said

# What shares of episodes are called for a person.
SHARES = {"success": "solved", "hard": "hard failures", "budget": "out of turns"}
# What is recorded of a phase beside what it found.
RECORDS = {"i", "seconds", "settings", "weights", "first_loss", "made", "resident_mb"}


def sentence(output: str, row: dict) -> str:
    """What is said of a finished phase, such as
    "iter1/target.jsonl  400 episodes, reward 0.512, 35% solved, 40% hard failures, ...  1:12"."""
    parts = []
    for name, value in row.items():
        if name not in RECORDS and isinstance(value, (int, float, dict)):
            parts.append(phrase(name, value, row))
    minutes, seconds = divmod(round(row["seconds"]), 60)
    return f"{output:28}  {', '.join(parts)}  {minutes}:{seconds:02}"


def phrase(name: str, value, row: dict) -> str:
    """A number in words, or some numbers by name with their sum; row: what stands beside it."""
    if isinstance(value, dict):
        each = ", ".join(f"{count:,} {kind}" for kind, count in value.items())
        total = f"{sum(value.values()):,} {name}"
        return f"{total} ({each})" if each else total
    if name in SHARES:
        return f"{value:.0%} {SHARES[name]}"
    if name == "turns":
        return f"{value:.1f} turns each"
    if name == "loss" and "first_loss" in row:
        return f"loss {row['first_loss']:.3f} -> {value:.3f}"
    if isinstance(value, float):
        return f"{name} {value:.3f}"
    if value == 1:
        name = name.removesuffix("s")
    return f"{value:,} {name}"


def line(name: str, numbers: dict) -> str:
    """A line of a run's table: a name, and the numbers in a row of phases.json."""
    words = [f"{name:28}"]
    for key, value in numbers.items():
        if key in RECORDS - {"i", "seconds"}:
            continue
        for inner, number in (value if isinstance(value, dict) else {key: value}).items():
            if isinstance(number, float):
                words.append(f"{inner} {number:.3f}")
            elif isinstance(number, int):
                words.append(f"{inner} {number:,}")
    return "  ".join(words)


def headline(s: dict) -> str:
    """Which run one of these settings is."""
    return f"{s['method']} on {s['env']}, model {s['model']}, seed {s['seed']}"


def table(title: str, done: dict[str, dict]) -> str:
    """What the phases of a run found, a line each: pairs, exploration, evaluation."""
    lines = [title]
    for work in ["make_pairs", "explore", "evaluate"]:
        for name, row in done.items():
            if row["work"] == work:
                lines.append(line(name, row))
    seconds = sum(row["seconds"] for row in done.values())
    return "\n".join([*lines, f"{seconds:,.0f} s in all"])
