"""The folder of a run, and its phases: `once` runs a phase, saves its value, and reuses it later.

The loops in `coevolve.py` pass values from phase to phase. These values can be saved:

    list of trajectories    a .jsonl file, one trajectory per line
    list of pairs           a .jsonl file whose lines contain only references to trajectories
    list of dicts           a .jsonl file
    `Trained`               the folder of a model, with the logs of its training
    folder of a model       a copy of this folder, without its logs

config.json contains the settings of the run, and phases.json a record of each output.
"""

import os
import time
from collections import UserList
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from tqdm import tqdm

from common import files
from common.files import (
    OLDER,
    check_version,
    file_hash,
    hash_of,
    is_edited,
    plain,
    read_json,
    stat_of,
    write_json,
)
from common.settings import UsageError, check_same, settings_of
from dpo import Pair
from engine import branch, models
from engine.code import code_differences, code_now
from engine.console import sentence, visible
from engine.tracking import Tracking
from engine.trajectories import (
    check_can_be_read,
    check_names,
    content_hash,
    is_rows,
    read,
    write,
)

# ---------------------------------------------------------------------------------- saved values


class Saved(UserList):
    """A list of trajectories, pairs or dicts in a file of a run.

    The file is read at the first use, so a resumed run does not read the files of finished phases.
    Changing the list or its items does not change the file.
    """

    @classmethod
    def in_file(cls, file: Path, key: str, inputs: tuple) -> "Saved":
        """Creates a list whose file is read at the first use.

        Args:
            inputs: Values that contain the trajectories that a pairs file refers to.
        """
        saved = cls.__new__(cls)
        saved.file = file
        saved.key = key
        saved.inputs = inputs
        return saved

    @cached_property
    def data(self) -> list:
        items = read(self.file, self.inputs)
        # A pairs file contains only references to trajectories. The loop may have changed these
        # trajectories in the meantime.
        if isinstance(next(iter(items), None), Pair) and content_hash(items) != self.key:
            raise UsageError(f"{self.file}: trajectories were changed after these pairs were made "
                             "of them; change copies (dataclasses.replace) instead")
        self.inputs = ()
        return items

    @property
    def is_read(self) -> bool:
        return "data" in vars(self)

    def __copy__(self) -> "Saved":  # that of UserList needs a list that was read
        return self[:]


@dataclass
class Trained:
    """A trained model, with its logs."""
    model: torch.nn.Module
    logs: dict[str, list]  # {name of a .jsonl file in the model's folder: its rows}
    tensors: dict[str, dict] = field(default_factory=dict)  # {name of a .pt file: its content}


# -------------------------------------------------------------------------------- the run's folder


class Phases:
    """The folder of a run: its settings, its lock, and the outputs of its phases.

    `engine.run.Run` extends this class with the models of a run.
    """

    def __init__(self, machine, encoder, settings, options, reads: set[str], backends: dict | None):
        """
        Args:
            encoder: The `engine.chat.Encoder` of the base model.
            options: The settings that are specific to the environment.
            reads: The names of the settings that the method reads. Only these settings are
                recorded.
            backends: The backends of a new run, for its config.json; None for an existing run.
        """
        self.machine = machine
        self.main = machine.main
        self.encoder = encoder
        self.settings = settings
        self.options = options
        self.folder = folder_of(settings)
        self.fingerprint = encoder.fingerprint()
        self.name = ""  # the name of the output that the current phase makes
        # Maps each output that this process has made or reused to its record in phases.json.
        self.done = {}
        # Maps the folders of models to keys that identify their content. For a model of this run,
        # the key is the cache key of the phase that trained it. For a model from the Hugging Face
        # Hub, it is the commit.
        self.keys = {}
        # Only the main rank needs the code version, because only this rank writes config.json.
        self.code = code_now() if self.main else None

        self.declared = settings_of(type(settings)) | settings_of(type(options))
        stated = vars(settings) | vars(options)
        stated = {name: value for name, value in stated.items() if name in reads}
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = files.lock(self.folder)
            if backends and not (self.folder / "config.json").exists():
                self.create(stated, backends)
        # The other ranks wait with `gather`, because the main rank may have to download a model,
        # and the timeout of `wait` is shorter.
        machine.gather([])
        self.config = self.read_config(stated)
        # Maps outputs of an earlier process to their records in phases.json. A call of `once`
        # removes the record of its output from this dict.
        self.recorded = self.read_records()
        machine.wait()
        if self.main:
            before = self.config
            self.note(settings=before["settings"] | stated)
            write_json(self.folder / "phases.json", self.recorded)
            if "code" in before and before["code"] != self.code:
                changed = ", ".join(code_differences(before["code"], self.code)) or "its commit"
                self.print(f"{self.folder}: the code has changed since: {changed}")
        self.tracking = Tracking(machine.accelerator, self.folder, settings.track, stated)

    def create(self, stated: dict, backends: dict) -> None:
        """Writes the config.json of a new run. With --branch, copies outputs of another run."""
        branched = {}
        if self.settings.branch:
            branched = branch.take(self, self.settings.branch, stated)
        write_json(self.folder / "config.json",
                   dict(settings=stated, backends=backends, code=self.code, **branched))

    def read_config(self, stated: dict) -> dict:
        """Reads config.json, and checks that the run may be resumed with the given settings."""
        config = read_json(self.folder / "config.json")
        if "settings" not in config:
            raise UsageError(f"--out {self.folder}: its config.json is not that of a run; give "
                             "another folder")
        if "backends" not in config:
            raise UsageError(f"--out {self.folder}: {OLDER}")
        check_same(config["settings"], stated, self.declared)
        if self.settings.branch and "branch" not in config:
            raise UsageError(f"--out {self.folder}: its run was started without --branch; give "
                             "another folder")
        return config

    def read_records(self) -> dict[str, dict]:
        """Reads phases.json. Outputs whose files were deleted are left out."""
        file = self.folder / "phases.json"
        rows = read_json(file) if file.exists() else self.config.get("taken", {})
        check_version(f"--out {self.folder}", rows)
        return {name: row for name, row in rows.items() if (self.folder / name).exists()}

    def note(self, **facts) -> None:
        """Updates entries of config.json."""
        config = self.config | facts
        if self.main and self.config != config:
            self.config = config
            write_json(self.folder / "config.json", config)

    def close(self) -> None:
        """Marks the run as finished, and unlocks its folder.

        Records of outputs that this process has neither made nor reused are removed from
        phases.json, because they come from an earlier version of the training loop.
        """
        with prefix_errors("the end of the loop"):
            self.check_ranks(None)
        if self.main:
            write_json(self.folder / "phases.json", self.done)
            self.note(finished=True)
            self.lock.release()

    # ................................................................................... once

    def once(self, output: str, phase: Callable, /, *inputs, **parameters):
        """Returns phase(run, *inputs, **parameters), and saves it in the folder of the run.

        If an earlier process has saved the output with the same cache key, `once` skips the phase
        and returns the saved value. The cache key is a hash of the name and the parameters of the
        phase, the content of its inputs, and the tokenizer. The code of the phase is not part of
        the key.

        If a user has edited an output after the phase wrote it, the edited output is used. Its
        record in phases.json then contains the entry `edited`, the hash of its edited content.

        Args:
            output: The name of the output, which is a file or a folder in the run's folder.
            phase: A function phase(run, *inputs, **parameters). It returns a value that can be
                saved (see the top of this file), or a tuple of such a value and a dict of numbers
                for phases.json. In distributed runs, all ranks call it, and it has to return the
                same value on all of them.
            inputs: Lists of trajectories, pairs or dicts, files, folders of models, None, or lists
                and dicts of these.
            parameters: Numbers and strings.

        Returns:
            The folder of the output if it is a model, and otherwise a list (`Saved`). The result is
            the same whether the phase ran or was skipped.
        """
        path = self.folder / output
        self.name = output
        label = f"{phase.__name__}, for the output {output}"
        if output in self.done:
            raise UsageError(f"{label}: this run has already made it with the phase "
                             f"{self.done[output]['function']}; give each call of once its own "
                             "output")
        # 1. Compute the cache key.
        with prefix_errors(label):
            check_free(parameters, RECORD)
            values = plain(parameters)
            inputs_key = self.keys_of(inputs)
            self.check_ranks([output, phase.__name__, inputs_key, values])
        cache_key = hash_of([phase.__name__, inputs_key, values, self.fingerprint])

        # 2. Reuse a saved value with the same cache key. If there is none, run the phase.
        row = self.reuse(output, cache_key, inputs)
        if row is None:
            self.note(code=self.code, finished=False)
            started = time.perf_counter()
            self.prepare(path)
            value = phase(self, *inputs, **parameters)
            with prefix_errors(label):
                value, numbers = with_numbers(value, values)
                self.save(temporary(path), value, inputs)
                if self.keys_of(inputs) != inputs_key:
                    raise ValueError("it changed one of its inputs; let it change a copy")
            seconds = round(time.perf_counter() - started, 1)
            row = dict(function=phase.__name__, cache_key=cache_key, **values, seconds=seconds,
                       **numbers)
            row = self.record(output, value, row)
        self.done[output] = row

        # 3. Return the saved value.
        if "content" in row:
            return Saved.in_file(path, row.get("edited", row["content"]), inputs)
        self.keys[path] = row["cache_key"]
        return path

    def check_ranks(self, step: list | None) -> None:
        """Raises ValueError if the ranks are at different steps of the loop.

        The Python code between two phases runs on every rank, and its results may differ, for
        example after an unseeded shuffle. `step` identifies the step, and is None at the end of the
        loop.
        """
        if any(other != step for other in self.machine.gather([step])):
            raise ValueError("the ranks differ in the phase, its inputs or its parameters; make "
                             "the code between phases deterministic")

    def keys_of(self, inputs: Iterable) -> list:
        return [self.key_of(value) for value in inputs]

    def key_of(self, value):
        """Returns a key that identifies the content of a phase's input.

        An input is a list of trajectories, pairs or dicts, a path, None, or a list or dict of
        inputs.
        """
        if isinstance(value, Saved) and not value.is_read:
            return value.key
        if is_rows(value):  # the items of a list that was read may have been changed
            check_names(value)
            return content_hash(value)
        if isinstance(value, dict):
            return [list(value), self.keys_of(value.values())]
        if isinstance(value, (list, tuple)):
            return self.keys_of(value)
        if isinstance(value, Path):
            return self.keys[value] if value in self.keys else hashes_of(value)
        if value is not None:
            raise TypeError(f"the input {value!r:.60} is no list of trajectories or pairs, and no "
                            "path; give files and folders as Path(...), and numbers and strings by "
                            "name")
        return None

    def reuse(self, output: str, cache_key: str, inputs: tuple) -> dict | None:
        """Returns the record of an output that an earlier process made with the same cache key.

        Returns None if there is no such record.
        """
        row = self.recorded.pop(output, None)
        if row is None:
            return None
        path = self.folder / output
        if row["cache_key"] != cache_key:
            self.print(f"{output} is recomputed, because its inputs or parameters have changed")
            if self.main and is_edited(path, row):
                os.replace(path, path.with_name(f"{path.name}.edited"))
                self.print(f"{output} was edited; the edited file is now {output}.edited")
            return None
        row.pop("edited", None)
        if is_edited(path, row):
            row["edited"] = content_hash(read(path, inputs, self.encoder.vocabulary_size))
            self.print(f"{output} was edited; the run uses it as it is, but its recorded numbers "
                       "are from before the edit")
        elif path.is_file():
            row["stat"] = stat_of(path)
        return row

    def prepare(self, path: Path) -> None:
        """Creates an output's parent folder, and removes the files of an interrupted phase."""
        self.machine.wait()
        if self.main:
            # Remove result.json, because it must exist only in a finished run.
            files.remove(self.folder / "result.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            files.remove(temporary(path))
        self.machine.wait()

    def save(self, path: Path, value, inputs: tuple) -> None:
        """Saves a phase's value. Every rank has to call this method, but only one rank writes."""
        if isinstance(value, Trained):
            models.save(self.machine.accelerator, value.model, self.encoder, path)
            if self.main:
                for name, rows in value.logs.items():
                    write(path / name, rows)
                for name, content in value.tensors.items():
                    models.save_tensors(content, path / name)
        elif isinstance(value, Path):
            if self.main:
                files.copy_folder(value, path, without=".jsonl")
        elif is_rows(value):
            check_can_be_read(value, inputs, self.encoder.vocabulary_size)
            if self.main:
                write(path, value)
        else:
            raise TypeError(f"it returned {value!r:.60}; return a list of trajectories, pairs or "
                            "dicts, a trained model, or the folder of a model, and then a dict of "
                            "numbers, if there are any")

    def record(self, output: str, value, row: dict) -> dict:
        """Moves a finished output to its final path, and writes its record to phases.json.

        Therefore an interrupted phase never leaves an incomplete output at the final path. Returns
        the record on all ranks.
        """
        path = self.folder / output
        if self.main:
            files.remove(path)
            os.replace(temporary(path), path)
            if path.is_file():
                # `hash` and `stat` are for `is_edited`, which detects edits by a user.
                row |= dict(hash=file_hash(path), stat=stat_of(path), content=content_hash(value))
            write_json(self.folder / "phases.json", self.done | {output: row} | self.recorded)
        row = self.on_main(lambda: row)
        self.print(sentence(output, row))
        self.tracking.log("phase", output, row)
        return row

    def on_main(self, function: Callable):
        """Calls a function on the main rank only, and returns its result on all ranks."""
        return self.machine.gather([function()] if self.main else [])[0]

    # ............................................................................... console

    def print(self, text: str) -> None:
        """Prints a text on the main rank, above the progress bar if one is active."""
        if self.main:
            tqdm.write(visible(text))

    def bar(self, total: int | None, items: Iterable | None = None):
        """Returns a progress bar for the current phase. The bar is visible only in a terminal.

        `total` is None if the number of steps is unknown. If `items` is None, call the bar's
        `update` after each step.
        """
        hidden = None if self.main else True  # with None, tqdm shows the bar only in a terminal
        return tqdm(items, total=total, desc=self.name, leave=False, disable=hidden, delay=2)


def folder_of(s) -> Path:
    quick = "-quick" if s.quick else ""
    return Path(s.out or f"runs/{s.env}-{s.method}{quick}-s{s.seed}")


def check_folder(folder: Path) -> None:
    """Raises UsageError if `folder` is a file, or contains files that do not belong to a run.

    A new run could overwrite these files.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: it is a file; give a folder")
    names = {path.name for path in folder.glob("*")}
    # A run that was interrupted right after its start has the file `lock`, but neither config.json
    # nor phases.json.
    interrupted = "lock" in names and "phases.json" not in names
    if names and "config.json" not in names and not interrupted:
        raise UsageError(f"--out {folder}: it contains {min(names)}, but no config.json of a run; "
                         "give another folder")


def temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def hashes_of(path: Path):
    """Returns the hash of a file, or the names and hashes of the files in a folder.

    If the folder contains no files, returns the path itself.
    """
    if path.is_file():
        return file_hash(path)
    hashes = [[file.name, file_hash(file)] for file in sorted(path.glob("*.*")) if file.is_file()]
    return hashes or str(path)


def with_numbers(result, parameters: dict) -> tuple:
    """Splits the result of a phase into its value and its dict of numbers, which may be missing."""
    value, numbers = result if isinstance(result, tuple) else (result, {})
    if not isinstance(numbers, dict):
        raise TypeError(f"its second value is {numbers!r:.60}; return a dict of numbers")
    numbers = plain(numbers)
    check_free(numbers, (*RECORD, *parameters))
    for name, counts in numbers.items():
        values = counts.values() if isinstance(counts, dict) else ()
        if not all(isinstance(value, int | float) for value in values):
            raise TypeError(f"{name} is {counts!r:.60}; return a number, or a dict of numbers")
    return value, numbers


def check_free(names: Iterable[str], entries: Iterable[str]) -> None:
    """Raises ValueError if an entry already has the name."""
    taken = {*names} & {*entries}
    if taken:
        raise ValueError(f"the record of an output already has the entry {min(taken)!r}; give this "
                         "parameter or number another name")


# Keys of a phases.json record that are neither parameters of the phase nor numbers that it
# returned.
RECORD = ("function", "cache_key", "seconds", "hash", "stat", "content", "edited")


@contextmanager
def prefix_errors(label: str):
    """Turns a TypeError or ValueError into a UsageError whose message begins with `label`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"{label}: {error}") from error
