"""Judges the changes that an agent's code has made in the apps."""

from dataclasses import dataclass
from pathlib import Path

from environments.appworld import data
from environments.appworld.processes import CodeResult, Episode, ProcessEnded, server
from envs import EnvError


@dataclass
class Trace:
    """The results of running a solution part by part."""
    results: list[CodeResult]
    changes: dict[str, str]  # all changes in the apps at the end, {file name: text}
    process_error: str | None = None  # the reason why the process ended early

    @property
    def done(self) -> bool:
        return bool(self.results) and self.results[-1].done


class Judge:
    """Runs solutions, judges the final state of an episode, and compares two final states.

    Each of these jobs runs in a separate, isolated process.
    """

    def __init__(self, python: str, root: Path):
        self.python = python
        self.root = root
        self._traces = {}  # {task created during training: the Trace of its solution}

    def start_episode(self, task: dict) -> Episode:
        return Episode(server(self.python, self.root), task["start"], task.get("text"))

    def trace(self, task: dict, code: list[str]) -> Trace:
        """Runs the parts of a solution in a new episode, up to the part that completes the task."""
        trace = Trace([], {})
        episode = self.start_episode(task)
        try:
            before = episode.changes()
            for part in code:
                result = episode.run(part)
                trace.changes = episode.changes()
                result.changed = changes_of_apps(trace.changes) != changes_of_apps(before)
                trace.results.append(result)
                before = trace.changes
                if result.done:
                    break
        except ProcessEnded as error:
            trace.process_error = str(error)
            return trace
        episode.end()
        return trace

    def compare(self, start: str, first: dict, second: dict) -> dict:
        """Compares the changes of two episodes that began in the same start state.

        Returns:
            A dict with `apps` (True if the apps contain the same records) and `answer` (True if the
            two answers match). If the comparison fails, a dict with `error` instead.
        """
        return server(self.python, self.root).run_once("compare", start, changes=[first, second])

    def share(self, task: dict, changes: dict[str, str]) -> float:
        """Returns the fraction of a task's tests that pass after an episode with these changes.

        A task that was created during training has two tests. One test compares the final state of
        the apps with their state after the task's solution. The other test compares the two
        answers.
        """
        test = self._compare_with_own_code if "code" in task else self._run_tests
        result = test(task, changes)
        if "error" not in result:
            return result["passed"] / result["tests"]
        # Test the unchanged start state. If this also returns an error, judging does not work on
        # this machine. Otherwise the error is due to the agent's changes, and the reward is 0.
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
            # The solution may have exceeded the time limit because the machine is overloaded. The
            # agent's code is not the cause, because it was not run here.
            if trace.process_error is not None:
                raise EnvError(
                    f"appworld: the code of a task made on {task['start']} did not run to its end: "
                    f"{trace.process_error}; give fewer --slots, or --verify true")
            self._traces[key] = trace
        if not self._traces[key].done:
            return dict(passed=0, tests=2)  # the solution of an unverified task may be wrong
        result = self.compare(task["start"], self._traces[key].changes, changes)
        if "error" in result:
            return result
        return dict(passed=result["answer"] + result["apps"], tests=2)


def changes_of_apps(changes: dict[str, str]) -> dict[str, str]:
    """Returns the changes in all apps except "supervisor", which stores the task's answer."""
    return {file: text for file, text in changes.items()
            if file.endswith(".jsonl") and file != "supervisor.jsonl"}
