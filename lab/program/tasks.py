"""What a run trains on and what it evaluates: counted and compared before any phase."""

import json
import re
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lab import play_env as envs
from lab.harness.files import hashed, made_tasks, read_object, write_text
from lab.harness.settings import Settings, SettingsError, options_of

TRAINED_ON = "trained_on.json"  # in an agent's folder


@dataclass
class Tasks:
    """The tasks of a run, by the settings and the environment alone."""

    splits: tuple[str, ...]  # that are evaluated
    training: list[str]     # without those left out
    left_out: set[str]      # training tasks that are evaluated
    tried: list[str]        # one of each kind, to be begun at once
    about: dict             # for config.json
    counts: str             # in words, the run's first line


def trains(s: Settings) -> bool:
    return s.method not in ("evaluate", "chat")


def survey(s: Settings, env) -> Tasks:
    """Counts the tasks of a run; SettingsError where there are too few, or some are in both."""
    if s.method == "evolve" or s.method == "grpo" and (s.solve_check or s.start_from == "explore"):
        env.task_generator()
    words, training = [], {}  # training: task -> the opening of its expert in a file

    def take(split, asked, flag):
        there = env.tasks(split)
        if asked > len(there):
            raise SettingsError(f"{flag} {asked}: {s.env} has {len(there)} {split} tasks; 0 takes "
                                "all")
        words.append(f"{len(there[:asked or None])} of {len(there)} {split}")
        return there[:asked or None]

    if trains(s) and s.experts:  # which say what the training tasks are
        first = len(envs.opening(env, ""))  # turns before an expert's first reply
        training = {task: " ".join(m["content"] for m in messages[:first]) for task, messages, _
                    in envs.read_experts(s.experts, env)[:s.train_tasks or None]}
        words.append(f"{len(training)} experts from {s.experts}")
    elif trains(s):
        training = dict.fromkeys(take("train", s.train_tasks, "--train-tasks"), "")
    splits = env.test_splits if s.eval_splits == "test" else ("validation",)
    evaluated = [take(split, s.eval_tasks, "--eval-tasks") for split in splits]
    left_out, overlap = compare(s, env, training, sum(evaluated, []))
    # Of a server the task with the highest number: if it has that, it has all.
    tried = [max(tasks, key=lambda task: [int(n) for n in re.findall("[0-9]+", task)[-1:]])
             for tasks in (training, *evaluated) if tasks]
    training = [task for task in training if task not in left_out]
    return Tasks(
        splits, training, left_out, tried,
        dict(split_by=env.split_by, experts=len(training) if s.experts else 0, overlap=overlap),
        f"{s.env}: {', '.join(words)} tasks; split {env.split_by}"
        + f"; {len(left_out)} experts of evaluated tasks left out" * bool(left_out)
        + f"; {overlap} evaluated tasks are also trained on" * bool(overlap))


def compare(s: Settings, env, training: dict[str, str],
            evaluated: list[str]) -> tuple[set[str], int]:
    """Training tasks that are left out, and how many evaluated ones are trained on all the same.

    What --model and --failure-from were trained on counts too, and what the opening of an expert
    tells beside its own task.
    """
    left_out, overlap = set(), 0
    known = {task: marks(env, task) for task in evaluated}
    place = {mark: task for task in reversed(evaluated) for mark in known[task]}
    own = {task: marks(env, task) for task in training}
    for task, others in told(env, training, evaluated).items():
        own[task] = own[task].union(*(known[other] for other in others))
    sources = [(f"--experts {s.experts}" if s.experts else "the training split", own)]
    before = {f"--model {s.model}": [s.model]}
    if s.failure_from:
        before[f"--failure-from {s.failure_from}"] = Path(s.failure_from).glob("*/failure-agent")
    for flag, agents in before.items():
        seen = set().union(*map(trained_on, agents))
        sources.append((flag, {task: seen & known[task] for task in evaluated}))
    for source, tasks in sources:
        both = {task: place[mark] for task in tasks for mark in sorted(tasks[task] & place.keys())}
        if tasks is own and s.overlap == "drop" and len(both) < len(tasks):
            left_out = {*both}
        elif s.overlap == "keep":
            overlap = max(overlap, len({*both.values()}))
        elif both:
            shown = ", ".join(other if task == other else f"{other} (as {task})"
                              for task, other in [*both.items()][:3])
            raise SettingsError(
                f"{len({*both.values()})} of {len(evaluated)} evaluated tasks are also trained on "
                f"({source}), such as {shown}; evaluate others ("
                + "--split-file FOLDER of the lists that belong to these experts, " * (
                    s.flat().get("split_file", "-") is None)
                + "--eval-tasks, --eval-splits), "
                + "leave out their experts (--overlap drop), " * (tasks is own)
                + "or evaluate them all the same (--overlap keep)")
    return left_out, overlap


def told(env, openings: dict[str, str], evaluated: list[str]) -> dict[str, list[str]]:
    """For each expert's task the evaluated tasks whose instruction its opening says, word by word.
    Of those that overlap the longest counts, the task's own before all; of fewer than four words
    they stand in other texts too [ours].
    """
    def words(task):
        return f" {envs.words_of(''.join(env.wording(task)[:1]))} "

    tasks = {words(task): task for task in (*env.tasks("train"), *reversed(evaluated))}
    longest = sorted((said for said in tasks if said.count(" ") > 4), key=len, reverse=True)

    @lru_cache(None)  # without their own instructions most openings are the same
    def others(text):
        found = []
        for said in longest:
            if said in text:
                text = text.replace(said, " | ")
                found.append(tasks[said])
        return [task for task in found if task in evaluated]

    return {task: others(f" {envs.words_of(opening)} ".replace(words(task), " | "))
            for task, opening in openings.items() if opening}


def marks(env, task: str) -> set[str]:
    """Hashes by which a task is known in whatever split: of what it is, and of its instruction if
    that says so; none for a task that this environment does not have."""
    with suppress(ValueError):
        wording = envs.plain("\n".join(env.wording(task)))
        known = [repr(env.find(task)), *([wording] if wording else [])]
        return {hashed([env.name, mark])[:16] for mark in known}
    return set()


def trained_on(folder) -> set[str]:
    """`marks` of what the agent in a folder and its ancestors were trained on; empty: not known."""
    file = Path(folder) / TRAINED_ON
    return {*read_object(file)["marks"]} if file.exists() else set()


class RunTasks:
    """A run's environment, its splits, and the tasks that were made during the run."""

    def __init__(self, settings: Settings, folder):
        self.settings, self.folder = settings, folder
        self.tried_on = []  # proposals that the running phase plays
        with closing(self.make_env()) as env:
            found = survey(settings, env)  # what a run lacks shows at once
        self.splits, self.about = found.splits, found.about
        self.training, self.left_out, self.tried = found.training, found.left_out, found.tried
        folder.log.say(found.counts)

    def try_out(self) -> None:
        """Begins an episode of each kind, so that an environment's faults show at once."""
        with closing(self.make_env()) as env:
            env.waits = ()
            for task in self.tried:
                env.reset(task)

    def make_env(self):
        """An environment with the tasks that were made during the run."""
        s = self.settings
        env = envs.make(s.env, s.view, **options_of(s))
        for task in [*(row["task"] for row in self.added()), *self.tried_on]:
            env.add(task)
        return env

    def experts(self) -> list[tuple[str, list[dict], float]]:
        """(task, messages, reward) of --experts FILE, without those of evaluated tasks."""
        s = self.settings
        with closing(self.make_env()) as env:
            return [e for e in envs.read_experts(s.experts, env)[:s.train_tasks or None]
                    if e[0] not in self.left_out]

    def check_openings(self, experts: list[tuple[str, list[dict], float]]) -> None:
        """SettingsError at the first expert whose task opens otherwise here than in its
        conversation: its id means another task here, of another catalogue, data or lists."""
        lost = envs.LostEpisodes(len(experts))
        with (closing(self.make_env()) as env,
              self.folder.log.bar("openings of experts", len(experts), "task") as progress):
            for task, messages, _ in experts:
                try:
                    apart = envs.opens_otherwise(env, messages, env.reset(task))
                    lost.answered()
                except envs.EnvError as error:
                    apart = lost.add(error)
                if apart:
                    raise SettingsError(
                        f"--experts {self.settings.experts}: {task} is another task here. It opens "
                        f"there | here: {apart[0]!r} | {apart[1]!r}; give the environment and the "
                        "--view that these experts were made in, or experts of this one")
                progress.update()

    def added(self) -> list[dict]:
        return made_tasks(self.folder.path, self.folder.phases)

    def add(self, out: Path, tasks: list[dict], left: list[str]) -> list[str]:
        """Writes a phase's tasks.jsonl: from then on every environment of the run has them too.
        Their ids; left: those that nobody trains on any more. ValueError, naming what is wrong, for
        one that the environment refuses."""
        with closing(self.make_env()) as env:
            ids = [env.add(task) for task in tasks]
        self.folder.write_jsonl(out, [*(dict(id=id, task=task) for id, task in zip(ids, tasks)),
                                      *(dict(id=id, left=True) for id in left)])
        return ids

    def record(self, before, out: Path) -> None:
        """Writes into an agent's folder what it and `before`, from which it came, were trained on:
        later runs refuse to evaluate it on that, wherever the folder has been moved."""
        with closing(self.make_env()) as env:
            own = [*self.training, *(row["id"] for row in self.added())]
            known = trained_on(before).union(*(marks(env, task) for task in own))
        write_text(out / TRAINED_ON, json.dumps(dict(marks=sorted(known))))

    def of_split(self, split: str) -> list[str]:
        """The evaluated tasks of a split."""
        with closing(self.make_env()) as env:
            return env.tasks(split)[:self.settings.eval_tasks or None]

    def definitions(self, tasks: list[str]) -> list:
        with closing(self.make_env()) as env:
            return [env.find(task) for task in tasks]

    def task_generator(self):
        """Who makes tasks in an environment of its own; see `worlds/`."""
        return self.make_env().task_generator()
