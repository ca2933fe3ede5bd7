"""Judges what an agent's code has changed in the apps."""

from dataclasses import dataclass, field
from pathlib import Path

from environments.appworld import data
from environments.appworld.processes import Episode, ProcessEnded, server
from envs import EnvError


@dataclass
class Trace:
    """The record of a solution that was run part by part.

    Attributes:
        outputs: The output of each part.
        calls: The calls of each part, a list of [APP.API, arguments].
        changed: For each part, True if it changed the apps.
        changes: All changes at the end, file -> text, as an episode saves them.
        done: True if the solution completed the task.
        process_error: The reason why the process ended before the solution did, or None. With a
            reason, the effect of the solution is unknown.
    """
    outputs: list[str] = field(default_factory=list)
    calls: list[list] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)
    done: bool = False
    process_error: str | None = None


class Judge:
    """Runs solutions and compares the final states of episodes, each in a process of its own.

    Args:
        python: The interpreter that has the package.
        root: The folder that holds AppWorld's `data`.
    """

    def __init__(self, python: str, root: Path):
        self.python = python
        self.root = root
        self._traces = {}  # a task made in training -> the trace of its own code

    def start_episode(self, task: dict) -> Episode:
        return Episode(server(self.python, self.root), task["start"], task.get("text"))

    def trace(self, task: dict, code: list[str]) -> Trace:
        """Runs the parts of a solution in a new episode until the task is completed, and returns
        their trace."""
        trace = Trace()
        episode = self.start_episode(task)
        try:
            before = episode.changes()
            for part in code:
                result = episode.run(part)
                trace.changes = episode.changes()
                trace.outputs.append(result.output)
                trace.calls.append(result.calls)
                trace.changed.append(changes_of_apps(trace.changes) != changes_of_apps(before))
                before = trace.changes
                if result.done:
                    trace.done = True
                    break
        except ProcessEnded as error:
            trace.process_error = str(error)
            return trace
        episode.end()
        return trace

    def compare(self, start: str, first: dict, second: dict) -> dict:
        """Compares the final states of two episodes with the same start state.

        Args:
            start: Id of the task whose start state it is.
            first: The changes of one episode.
            second: The changes of the other episode.

        Returns:
            `apps` and `answer`, each True if both episodes end with the same, or `error` if they
            cannot be compared.
        """
        return server(self.python, self.root).run_once("compare", start, changes=[first, second])

    def share(self, task: dict, changes: dict[str, str]) -> float:
        """Returns the share of a task's tests that pass on the changes of an episode.

        A task made in training has two tests: the apps and the answer must be the same as after its
        own code. Raises EnvError if not even the start state can be judged.
        """
        test = self._compare_with_own_code if "code" in task else self._run_tests
        result = test(task, changes)
        if "error" not in result:
            return result["passed"] / result["tests"]
        # Either the package cannot read the changes, so the episode has failed, or judging itself
        # does not work here. The start state shows which.
        result = test(task, data.start_changes(self.root, task["start"]))
        if "error" in result:
            raise EnvError(f"appworld: {task['start']} can't be judged: {result['error']}")
        return 0.0

    def _run_tests(self, task: dict, changes: dict[str, str]) -> dict:
        return server(self.python, self.root).run_once("judge", task["start"], changes=changes)

    def _compare_with_own_code(self, task: dict, changes: dict[str, str]) -> dict:
        key = repr(task)
        if key not in self._traces:
            trace = self.trace(task, task["code"])
            if trace.process_error is not None:  # the machine may be busy, so no agent has failed
                raise EnvError(
                    f"appworld: the code of a task made on {task['start']} did not run to its end: "
                    f"{trace.process_error}; give fewer --slots, or --verify true")
            self._traces[key] = trace
        if not self._traces[key].done:
            return dict(passed=0, tests=2)  # possible if the task was not verified
        result = self.compare(task["start"], self._traces[key].changes, changes)
        if "error" in result:
            return result
        return dict(passed=result["answer"] + result["apps"], tests=2)


def changes_of_apps(changes: dict[str, str]) -> dict[str, str]:
    """Returns the changes without those of the task itself, which are its state and answer."""
    return {file: text for file, text in changes.items()
            if file.endswith(".jsonl") and file != "supervisor.jsonl"}
