"""The folder of a run: phases that happen once, their files, and how it goes on."""

import ctypes
import json
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from accelerate import Accelerator

from lab import tokens as dpo
from lab.engine import ranks
from lab.engine.checkpoint import appear
from lab.harness import files, reuse
from lab.harness.log import Log
from lab.harness.settings import FREE, ROUNDING, Settings, SettingsError

LAYOUT = 3  # of a run's folder: its settings and the files in which phases keep episodes


class Folder:
    """What is on the disk of a run; every rank has one, the main one writes."""

    def __init__(self, settings: Settings, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        self.main = accelerator.is_main_process
        self.on_main = partial(ranks.on_main, accelerator)  # what answer() is there, on all ranks
        self.path = files.run_path(settings)
        self.log = Log(accelerator, self.path / "metrics.jsonl")
        self.phases = {}    # the recorded ones: what each wrote -> its hash, and the log's
        self.finished = []  # those found or done by this process
        self.running = ""   # what the running phase writes
        self.lock = None
        self.ingredients = ""  # a hash of what goes into phases that runs may share
        if settings.reuse and not Path(settings.reuse).is_dir():
            raise SettingsError(f"--reuse {settings.reuse}: there is no such folder; give one of "
                                "runs, or leave it out")

    def take(self) -> None:
        """Makes the folder and holds it for this process; SettingsError if it cannot be had."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = files.held(self.path / "lock")
        except OSError as error:
            raise SettingsError(f"--out {self.path}: {error.strerror}; give a folder that can be "
                                "written") from None
        if self.lock is None:
            raise SettingsError(f"{self.path}: another process is running in this folder; wait for "
                                "it or give another --out")

    def find_earlier(self) -> dict | None:
        """config.json of a run that goes on, its settings these; and its finished phases."""
        config, phases = self.path / "config.json", self.path / "phases.json"
        before = files.read_object(config) if config.exists() else None
        if before is not None and "settings" not in before:
            raise SettingsError(f"{config} is not a run's, which would write over it; give another "
                                "--out")
        results = [name for name in ("metrics.jsonl", "phases.json", "experts.jsonl", "result.json")
                   if (self.path / name).exists() and (self.path / name).stat().st_size]
        if results and not (before and phases.exists()):
            lacks = "phases.json" if before else "config.json"
            raise SettingsError(f"{self.path} holds {results[-1]} but no {lacks}; restore it or "
                                "give another --out")
        self.phases = files.read_object(phases) if phases.exists() else {}
        self.log.phases = len(self.phases)
        if not self.phases and not any((self.path / "playing").glob("*.jsonl")):
            before = None  # nothing was finished with these settings, no episode nor request
        if before and before.get("layout") != LAYOUT:
            raise SettingsError(f"{self.path} was made by an earlier version of this program, "
                                "with other settings and files; give another --out")
        if before:
            now = self.settings.flat()
            may = {n: now[n] for n in (*FREE, *ROUNDING)}
            self._refuse_changes({**before["settings"], **may}, now)
        self._drop_unfinished_events()
        return before

    def record(self, before: dict | None, base: str, tasks: dict) -> None:
        """Writes config.json and phases.json of a new run; of an old one the model must be `base`.
        tasks: how they were split."""
        precision, now = self.accelerator.mixed_precision, self.settings.flat()
        if before:
            if before["base"] != base:
                raise SettingsError(f"{self.path} was made from another model than --model "
                                    f"{self.settings.model} is now; give another --out")
            self._refuse_changes(dict(precision=before["precision"]), dict(precision=precision))
            if before["code"] != files.code_hash():
                self.log.say(
                    f"{self.path} was begun by other code: its finished phases stay as they are. "
                    "Give another --out to compute all with this code")
            if changed := {n: now[n] for n in ROUNDING if now[n] != before["settings"].get(n)}:
                self.log("changed", **changed)  # config.json keeps what the run began with
        elif self.main:
            files.write_text(self.path / "config.json", json.dumps(dict(
                settings=now, base=base, layout=LAYOUT, tasks=tasks,
                precision=precision, code=files.code_hash(), commit=files.git_commit(),
                versions=files.versions()), indent=1))
        if not (self.path / "phases.json").exists():
            self._write_phases()
        if self.settings.track:
            self.accelerator.init_trackers("coevolve", {
                name: value for name, value in now.items() if value is not None})

    def _refuse_changes(self, before: dict, now: dict) -> None:
        changed = [f"{name} ({before.get(name)} -> {now.get(name)})"
                   for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            raise SettingsError(f"{self.path} was made with other settings: {', '.join(changed)}; "
                                "give another --out, or these again")

    def phase(self, output: str, work) -> None:
        """Runs work(temporary path) -> numbers for the log, unless it was done before: recorded
        with a hash of `output` that still holds. The output appears by renaming."""
        path = self.path / output
        if self._done(output):
            return
        started, temporary = time.perf_counter(), path.with_name(path.name + ".tmp")
        if self.main:
            path.parent.mkdir(exist_ok=True)
            for old in (temporary, path, self.path / "result.json"):
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        self.running = output
        inputs = self.on_main(lambda: reuse.inputs(self, output))
        with reuse.once(self, inputs):
            with files.writing(temporary):
                events = self.on_main(lambda: reuse.take(self, output, inputs, temporary))
                numbers = {} if events else work(temporary)
            self.accelerator.free_memory()  # of models that nobody holds any more
            self.accelerator.wait_for_everyone()
            if self.main:
                files.replace(temporary, path)
                for inside in ("playing", "checkpoint"):  # what it kept to go on from
                    shutil.rmtree(self.path / inside, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            appear(path)  # to who reads it next
            events = events or [dict(
                event="phase", phase=output, seconds=round(time.perf_counter() - started, 2),
                resident_mb=psutil.Process().memory_info().rss >> 20, **numbers)]
            for event in events:
                self.log(**event)
            self.phases[output] = self.on_main(lambda: self._entry(path, inputs))  # on all ranks
            self._write_phases()
        with suppress(OSError, AttributeError):  # glibc would keep what a phase has freed, GBs
            ctypes.CDLL(None).malloc_trim(0)
        self.log.say(line(**events[-1]))

    def _entry(self, path: Path, inputs: str | None) -> dict:
        """What is recorded of a finished phase: hashes of what it wrote, and of the log so far; of
        what went into it, where another run may take it over."""
        metrics = self.path / "metrics.jsonl"
        files.force(metrics)
        return dict(sha256=files.digest(path), metrics_sha256=files.digest(metrics),
                    metrics_bytes=metrics.stat().st_size, **dict(inputs=inputs) if inputs else {})

    def _done(self, output: str) -> bool:
        """Whether the phase is recorded and its output unchanged; else forgets all that follows."""
        path, earlier = self.path / output, self.finished
        self.finished = [*earlier, output]
        if output in self.phases and (found := self.on_main(
                lambda: path.exists() and files.digest(path))):
            if found == self.phases[output]["sha256"]:
                return True
            raise SettingsError(f"{path} is not what its phase wrote; restore it, or delete it to "
                                "compute it and all that follows again")
        if set(self.phases) - set(earlier):
            self.log.say(f"{path} is gone: computing it and all that follows again")
            self.phases = {n: self.phases[n] for n in earlier if n in self.phases}
            self._write_phases()
            self._drop_unfinished_events()
        return False

    def _write_phases(self) -> None:
        self.log.phases = len(self.phases)
        if self.main:
            files.write_text(self.path / "phases.json", json.dumps(self.phases, indent=1))

    def _drop_unfinished_events(self) -> None:
        """Cuts the log after the last finished phase: the others will write theirs again."""
        if not self.main:
            return
        last = max(self.phases.values(), key=lambda done: done["metrics_bytes"], default=None)
        metrics = self.path / "metrics.jsonl"
        with open(metrics, "ab") as f:
            f.truncate(min(f.tell(), last["metrics_bytes"] if last else 0))
        if last and files.digest(metrics) != last["metrics_sha256"]:
            raise SettingsError(f"{metrics} is not what the finished phases wrote; restore it, or "
                                "give another --out")

    def inputs(self) -> str:
        """Identifies the running phase and what it starts from: the phases before it, by hash."""
        done = {name: recorded["sha256"] for name, recorded in self.phases.items()}
        return self.on_main(lambda: files.hashed([self.running, done]))

    def read_jsonl(self, name: str) -> list[dict]:
        return files.read_jsonl(self.path / name)

    def trajectories(self, name: str) -> list[dpo.Trajectory]:
        """The trajectories in a file of the run."""
        return [dpo.Trajectory(**row, file=name) for row in self.read_jsonl(name)]

    def write_jsonl(self, path: Path, rows: list) -> None:
        """Writes objects, or the records of trajectories, one a line."""
        if self.main:
            records = [row.record() if isinstance(row, dpo.Trajectory) else row for row in rows]
            files.write_text(path, "".join(json.dumps(row) + "\n" for row in records))

    def close(self) -> None:
        """Ends trackers, releases the folder, and ends together with the other ranks."""
        self.accelerator.wait_for_everyone()  # one that ends earlier takes its connections along
        self.accelerator.end_training()
        if self.main:
            self.lock.release()


def line(event, phase: str, seconds: float, resident_mb: int, reused: str = "", **numbers) -> str:
    """What is printed of a finished phase."""
    told = [f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value:,}"
            for key, value in numbers.items()]
    return "  ".join([f"{phase:28}{seconds:7.1f} s", *([f"made by {reused}"] if reused else []),
                      *told])
