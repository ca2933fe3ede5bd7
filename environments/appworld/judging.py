"""What code leaves in the apps, and whether that is what it had to leave."""

from dataclasses import dataclass, field
from pathlib import Path

from environments.appworld import data
from environments.appworld.processes import Episode, Gone, server
from envs import EnvError


@dataclass
class Trace:
    """What a solution did. For each part of its code: what it printed, the calls that it made,
    [APP.API, arguments], and whether the apps changed."""
    outputs: list[str] = field(default_factory=list)
    calls: list[list] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)  # at its end, as an episode saves them
    done: bool = False  # whether it completed the task
    gone: str | None = None  # why its process ended before it; then nobody knows what it does


class Judge:
    """Plays solutions and compares ends, each in a process of its own.

    Args:
        python: the interpreter that has the package.
        root: the folder of AppWorld's `data`.
    """

    def __init__(self, python: str, root: Path):
        self.python = python
        self.root = root
        self._ends = {}  # a task made in training -> the trace of its own code

    def begin(self, task: dict) -> Episode:
        return Episode(server(self.python, self.root), task["start"], task.get("text"))

    def trace(self, task: dict, code: list[str]) -> Trace:
        """What code does in an episode of its own, part after part, to the end of the task."""
        found = Trace()
        episode = self.begin(task)
        try:
            before = episode.changes()
            for part in code:
                told = episode.run(part)
                found.changes = episode.changes()
                found.outputs.append(told.output)
                found.calls.append(told.calls)
                found.changed.append(of_apps(found.changes) != of_apps(before))
                before = found.changes
                if told.done:
                    found.done = True
                    break
        except Gone as error:
            found.gone = str(error)
            return found
        episode.end()
        return found

    def compare(self, start: str, one: dict, other: dict) -> dict:
        """Of two ends of a start state: whether the `apps` are the same, and the `answer`; `error`
        where they cannot be compared."""
        return server(self.python, self.root).once("compare", start, changes=[one, other])

    def share(self, task: dict, changes: dict[str, str]) -> float:
        """The share of a task's tests that pass on what an episode has left. Of a task made in
        training they are two: the apps, and the answer, are as after its own code."""
        test = self._alike if "code" in task else self._tests
        told = test(task, changes)
        if "error" not in told:
            return told["passed"] / told["tests"]
        # Either the changes are none that the package can read, so that the episode has failed, or
        # nothing can be judged here.
        told = test(task, data.start_changes(self.root, task["start"]))
        if "error" in told:
            raise EnvError(f"appworld: {task['start']} can't be judged: {told['error']}")
        return 0.0

    def _tests(self, task: dict, changes: dict[str, str]) -> dict:
        return server(self.python, self.root).once("judge", task["start"], changes=changes)

    def _alike(self, task: dict, changes: dict[str, str]) -> dict:
        key = repr(task)
        if key not in self._ends:
            found = self.trace(task, task["code"])
            if found.gone is not None:  # the machine may be busy, which is no agent's failure
                raise EnvError(
                    f"appworld: the code of a task made on {task['start']} is not played to its "
                    f"end: {found.gone}; give fewer --slots, or --verify true")
            self._ends[key] = found
        if not self._ends[key].done:
            return dict(passed=0, tests=2)  # where nobody has verified it
        told = self.compare(task["start"], self._ends[key].changes, changes)
        if "error" in told:
            return told
        return dict(passed=told["answer"] + told["apps"], tests=2)


def of_apps(changes: dict[str, str]) -> dict[str, str]:
    """Changes without those of the task itself, its state and answer."""
    return {file: text for file, text in changes.items()
            if file.endswith(".jsonl") and file != "supervisor.jsonl"}
