"""What a run trains on and what it evaluates: counted and compared before any phase."""

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import envs
from harness.files import read_jsonl, read_object
from harness.settings import BUILT_IN, Settings, SettingsError, options_of


@dataclass
class Tasks:
    """The tasks of a run, by the settings and the environment alone."""

    counts: str = ""             # in words, the run's first line
    splits: tuple[str, ...] = ()  # that are evaluated
    split_by: str = ""           # "by rule", or the folder of published lists
    experts: int = 0             # from --experts FILE
    overlap: int = 0             # evaluated tasks that are trained on all the same
    training: list[str] = field(default_factory=list)  # without those left out
    left_out: set[str] = field(default_factory=set)  # training tasks that are evaluated
    tried: list[str] = field(default_factory=list)   # one of each kind, to be begun at once

    def record(self) -> dict:
        return dict(split_by=self.split_by, experts=self.experts, overlap=self.overlap)


def trains(s: Settings) -> bool:
    return s.method not in ("evaluate", "chat")


def survey(s: Settings, env) -> Tasks:
    """Counts the tasks of a run.

    SettingsError where there are too few, or some are in both; Refused where tasks would have to be
    made and nobody makes them.
    """
    if s.method == "evolve" or s.method == "grpo" and s.start_from == "explore":
        env.smith()
    found = Tasks(splits=env.test_splits if s.eval_splits == "test" else ("validation",),
                  split_by=getattr(env, "split_by", "by rule"))
    evaluated = {split: env.tasks(split)[:s.eval_tasks or None] for split in found.splits}
    counted = [(s.eval_tasks, "eval", split) for split in found.splits]
    words = [f"{len(tasks)} of {len(env.tasks(split))} {split}"
             for split, tasks in evaluated.items()]
    training = []
    if trains(s) and s.experts:  # which say what the training tasks are
        read = envs.read_experts(s.experts, env)[:s.train_tasks or None]
        training, found.experts = [task for task, _, _ in read], len(read)
    elif trains(s):
        counted.append((s.train_tasks, "train", "train"))
        training = env.tasks("train")[:s.train_tasks or None]
        words.insert(0, f"{len(training)} of {len(env.tasks('train'))} train")
    for asked, flag, split in counted:
        if asked > (there := len(env.tasks(split))):
            raise SettingsError(f"--{flag}-tasks {asked}: {s.env} has {there} {split} tasks; 0 "
                                "takes all")
    refuse_overlap(s, env, found, training, [t for tasks in evaluated.values() for t in tasks])
    if found.experts:
        words.insert(0, f"{found.experts} experts from {s.experts}")
    found.counts = f"{s.env}: {', '.join(words)} tasks; split {found.split_by}"
    if found.left_out:
        found.counts += f"; {len(found.left_out)} experts of evaluated tasks left out"
    if found.overlap:
        found.counts += f"; {found.overlap} evaluated tasks are also trained on"
    found.training = [task for task in training if task not in found.left_out]
    found.tried = [last_of(env, tasks) for tasks in (training, *evaluated.values()) if tasks]
    return found


def last_of(env, tasks: list[str]) -> str:
    """The last task, of a server the one with the highest number: if it has that, it has all."""
    numbers = [env.find(task) for task in tasks] if hasattr(env, "lasting") else []
    return tasks[numbers.index(max(numbers))] if numbers else tasks[-1]


# --------------------------------------------------------------------- trained on and evaluated


def refuse_overlap(s: Settings, env, found: Tasks, training: list[str],
                   evaluated: list[str]) -> None:
    """SettingsError if an evaluated task is trained on, unless --overlap says what to do then."""
    sources = [(f"--experts {s.experts}" if s.experts else "the training split", env, training)]
    model = None if s.model in BUILT_IN else s.model
    for flag, folder in (("--model", model), ("--failure-from", s.failure_from)):
        sources += [(f"{flag} {folder}, trained in {run}", *trained_in(run, s))
                    for run in runs_before(s, folder)]
    place = {mark: task for task in reversed(evaluated) for mark in marks(env, task)}
    for source, there, tasks in sources:
        both = [(task, place[mark]) for task in tasks
                for mark in marks(there, task) if mark in place]
        both = list({task: (task, other) for task, other in reversed(both)}.values())[::-1]
        own = tasks is training
        if not both:
            continue
        if own and s.overlap == "drop" and len(both) < len(tasks):
            found.left_out = {task for task, _ in both}
            found.experts -= len(both) if found.experts else 0
            continue
        if s.overlap == "keep":
            found.overlap = max(found.overlap, len({other for _, other in both}))
            continue
        shown = ", ".join(other if task == other else f"{other} (as {task})"
                          for task, other in both[:3])
        raise SettingsError(
            f"{len({other for _, other in both})} of {len(evaluated)} evaluated tasks are also "
            f"trained on ({source}), such as {shown}; evaluate others ("
            + "--split-file FOLDER of the lists that belong to these experts, " * (
                bool(s.env == "scienceworld" or s.webshop_url) and not s.split_file)
            + "--eval-tasks, --eval-splits), "
            + "leave out their experts (--overlap drop), " * own
            + "or evaluate them all the same (--overlap keep)")


def marks(env, task: str) -> set[str]:
    """By which a task is known in whatever split: what it is, and its instruction if that says so.

    Empty for a task that this environment does not have.
    """
    find, wording = (getattr(env, name, lambda task: None) for name in ("find", "wording"))
    try:
        what, wording = find(task), wording(task)
    except ValueError:
        return set()
    found = {task if what is None else repr(what)}
    return found | ({envs.plain(wording)} if wording else set())


TRAINED_ON = ("experts.jsonl", "iter0/tasks.jsonl")  # one of them is in a run that trains


def runs_before(s: Settings, folder: str | Path | None) -> list[Path]:
    """The runs on this environment whose agents made the model in a folder, the last one first."""
    found, seen = [], set()
    while folder and Path(folder).exists():  # else a name on the hub
        path = Path(folder).resolve()
        run = next((p for p in (path, *path.parents[:2]) if (p / "config.json").is_file()
                    and any((p / file).is_file() for file in TRAINED_ON)), None)
        if run is None or run in seen:
            break
        seen.add(run)
        before = settings_of(run)
        if before.get("env") == s.env:
            found.append(run)
        # A relative name was one in the folder that run was started from.
        model = before.get("model") or "tiny"
        folder = next((p / model for p in (Path(), *run.parents) if (p / model).exists()), model)
    return found


def trained_in(run: Path, s: Settings):
    """A run's own environment, as far as it is still there, and what was trained on: tasks of its
    experts and those of its tasks.jsonl, which it may have made."""
    before = settings_of(run)
    names = ("webshop_url", "intercode_data", "mysql_url", "bfcl_category")
    options = options_of(replace(s, **{name: before[name] for name in names if name in before}))
    try:
        env = envs.make(s.env, s.view, **options)
    except envs.Refused:
        env = envs.make(s.env, s.view, **options_of(s))
    tasks = []
    for file in sorted(run.glob("experts.jsonl")) + sorted(run.glob("iter*/tasks.jsonl")):
        for row in read_jsonl(file):
            with suppress(ValueError):
                made = file.name == "tasks.jsonl" and "task" in row
                tasks.append(env.add(row["task"]) if made else str(row.get("task", row.get("id"))))
    return env, tasks


def settings_of(run: Path) -> dict:
    return read_object(run / "config.json", settings=dict)["settings"]


# ----------------------------------------------------------------------------------- openings


def check_openings(run, experts: list[tuple[str, list[dict], float]]) -> None:
    """SettingsError at the first expert whose task opens otherwise here than in its conversation.

    Its id then means another task here: another catalogue, other data, other lists. One reset each.
    """
    s, losses, idle = run.settings, envs.Losses(len(experts)), queue.SimpleQueue()
    workers = min(4, s.slots, os.cpu_count() or 1, len(experts))
    for _ in range(workers):
        idle.put(run.tasks.make_env())

    def compare(expert):
        env = idle.get()
        try:
            return envs.opens_otherwise(env, expert[1], env.reset(expert[0]))
        finally:
            idle.put(env)

    pool = ThreadPoolExecutor(workers)
    try:
        with run.log.bar("openings of experts", len(experts), "task") as progress:
            for n, answer in enumerate([pool.submit(compare, expert) for expert in experts]):
                try:
                    apart = answer.result()
                    losses.answered()
                except envs.EnvError as error:
                    apart = losses.add(error)
                if apart:
                    raise SettingsError(
                        f"--experts {s.experts}: {experts[n][0]} is another task here. It opens "
                        f"there | here: {apart[0]!r} | {apart[1]!r}; give the environment and the "
                        "--view that these experts were made in, or experts of this one")
                progress.update()
    finally:
        pool.shutdown(cancel_futures=True)
        while not idle.empty():
            idle.get().close()

