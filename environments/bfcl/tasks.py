"""Makes new tasks for BFCL from the calls of an episode.

The user's message is written by an explorer model or generated from a template. The template
describes each call, so tasks from the template are easier than tasks written by people.
"""

import json
import random
from hashlib import sha256

from environments import replay, with_pairs, words_of
from environments.bfcl.calls import Simulators, failed, json_of, parse_calls, problem, script
from environments.bfcl.data import CATEGORIES, functions, prose, tasks

MAX_CALLS = 8  # maximum number of calls in the solution of a task from a template [ours]


class TaskGenerator:
    """Makes, checks and verifies new tasks.

    A task is a dict with "start", "turns" and "calls" (see `data.tasks`). A candidate is a dict
    with "text" (all messages of the user), "task" and "solution" (a list of replies that solve the
    task). A candidate from the template also contains the item "template", which is True.
    """
    form = ("A task is what a user asks for, in one message that holds every value that is needed "
            'but names no function. Its actions are calls, each {"name": ..., "arguments": {...}}, '
            "without those that only look around; the last one changes something, or finds out "
            "what was asked.")

    def __init__(self, env):
        self.env = env
        self.functions = {}  # maps the names of all simulators' functions to their documents
        self.texts, self.solutions = set(), []
        for category in CATEGORIES:
            for task in tasks(category).values():
                self.functions |= functions(task["start"])
                self.texts |= {*map(words_of, task["turns"])}
                # Store the calls without default arguments and without the start state. A new task
                # with the calls of an existing task is refused even if the start states differ.
                self.solutions.append(self._without_defaults(task))

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Returns the names of the functions that are called without an error, and all pairs of
        consecutive names."""
        made = successful_calls(self.env.find(task)["start"], replies)
        return with_pairs([call["name"] for call, _, _ in made])

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Makes at most two candidates from an episode.

        The solution consists of a random call of the episode and the useful earlier calls (see
        `useful`). The first candidate contains the whole solution in one turn. The second candidate
        divides the solution into two or three turns. Each of these turns, except the last turn,
        ends with a call that changed a state. If no call before the last one changed a state, there
        is no second candidate.
        """
        start = self.env.find(task)["start"]
        made = list(successful_calls(start, replies))
        choices = [useful(made[:n + 1]) for n in range(len(made))]
        choices = [rows for rows in choices if len(rows) <= MAX_CALLS]
        if not choices:
            return []
        rows = rng.choice(choices)
        calls = [call for call, _, _ in rows]
        solutions = [[calls]]
        if ends := [n for n, (_, _, changed) in enumerate(rows[:-1], 1) if changed]:
            ends = [0, *sorted(rng.sample(ends, rng.randint(1, min(2, len(ends))))), len(calls)]
            solutions.append([calls[a:b] for a, b in zip(ends, ends[1:])])
        return [self._candidate(start, list(map(self.template, turns)), turns, template=True)
                for turns in solutions]

    def written(self, task: str, proposal: dict) -> dict | None:
        """Makes a one-turn candidate from an explorer model's proposal.

        Returns None if "action_sequence" contains no calls or an invalid call.
        """
        calls = calls_in(proposal["action_sequence"])
        if not calls or not all(isinstance(call, dict) for call in calls):
            return None
        return self._candidate(self.env.find(task)["start"], [proposal["query"]], [calls])

    def key(self, task: dict) -> str:
        """Returns a key that is the same for equivalent tasks.

        Two tasks are equivalent if they have the same start state, and if their calls have the same
        results and lead to the same states in every turn.
        """
        simulators = Simulators(task["start"])
        effects = [(sorted(map(simulators.run, calls)), simulators.states())
                   for calls in task["calls"]]
        return f"{task['start']} {sha256(repr(effects).encode()).hexdigest()}"

    def refusal(self, task: dict) -> str | None:
        """Returns the reason why a task must not be added to the run's tasks, or None."""
        if task["start"] not in self.env.splits["train"]:
            return f"{task['start']!r} is no start state of a training task"
        documents = functions(task["start"])
        for call in all_calls(task):
            if error := problem(call):
                return f"a call of {str(call['name'])[:60]!r}: {error}"
            if call["name"] not in documents:
                return f"its simulators have no function {call['name'][:60]!r}"
        same_solution = self._without_defaults(task) in self.solutions
        if same_solution or self.texts & {*map(words_of, task["turns"])}:
            return "a task of a split"
        return None

    def verify(self, candidate: dict) -> str | None:
        """Verifies a candidate, and returns None or the reason why it is not valid.

        - The solution must earn reward 1, and none of its calls may fail.
        - A second episode with the same solution must have the same results and states.
        - The solution without its last call must not earn reward 1.
        """
        task = candidate["task"]
        reward, results, states = self._play(task, candidate["solution"])
        if any(map(failed, results)):
            return "a call of its solution fails"
        if self._play(task, candidate["solution"]) != (reward, results, states):
            return "its replays differ"
        if reward != 1:
            return f"its solution earns {reward:.2f}"
        calls = [list(turn) for turn in task["calls"]]
        next(turn for turn in reversed(calls) if turn).pop()
        solved = self._play(task, script(calls))[0] == 1
        return "it is solved without its last call" if solved else None

    def template(self, calls: list[dict]) -> str:
        """Returns a user message that requests the given calls. It contains the first sentence of
        each function's description, and the argument values."""
        sentences = []
        for call in calls:
            values = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}"
                               for name, value in call["arguments"].items())
            text = prose(self.functions[call["name"]]).partition(". ")[0].rstrip(".")
            sentences.append(text + (f", with {values}" if values else ""))
        return ". Then: ".join(sentences) + "."

    def _without_defaults(self, task: dict) -> list[dict]:
        """Returns the calls of all turns, and omits arguments that have their default value."""
        calls = []
        for call in all_calls(task):
            documented = self.functions[call["name"]]["parameters"]["properties"]
            arguments = {name: value for name, value in call["arguments"].items()
                         if name not in documented or documented[name].get("default") != value}
            calls.append(dict(name=call["name"], arguments=arguments))
        return calls

    def _candidate(self, start: str, turns: list[str], calls: list[list[dict]], **more) -> dict:
        return dict(text="\n".join(turns), task=dict(start=start, turns=turns, calls=calls),
                    solution=script(calls), **more)

    def _play(self, task: dict, replies: list[str]) -> tuple[float, list[str], str]:
        reward = replay(self.env, task, replies)[-1].reward
        return reward, self.env.results, self.env.simulators.states()


def all_calls(task: dict) -> list[dict]:
    return sum(task["calls"], [])


def calls_in(replies: list[str]) -> list[dict | str]:
    return [call for reply in replies for call in parse_calls(reply)]


def successful_calls(start: str, replies: list[str]):
    """Executes the calls in a list of replies, and yields (call, result, True if the call changed
    the state of a simulator) for each successful call."""
    simulators = Simulators(start)
    before = simulators.states()
    for call in calls_in(replies):
        result, after = simulators.run(call), simulators.states()
        if not failed(result):
            yield call, result, before != after
        before = after


def useful(made: list[tuple]) -> list[tuple]:
    """Selects the calls that a solution needs from the result of `successful_calls`.

    These are the last call, the calls that changed the state of a simulator, and the calls whose
    result contains a value that occurs in the arguments of a later selected call.
    """
    selected, later_values = [], []  # later_values: argument values of the selected calls
    for call, result, changed in reversed(made):
        values = [str(value) for value in leaves(json_of(result))]
        used = any(a == b or len(a) > 2 and a in b for a in values for b in later_values)
        if changed or used or not selected:
            selected.append((call, result, changed))
            later_values += [str(value) for value in leaves(call["arguments"])]
    return selected[::-1]


def leaves(value) -> list:
    """Returns all strings and numbers in a JSON value, at any depth."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return [leaf for item in items for leaf in leaves(item)]
    return [] if value is None or isinstance(value, bool) else [value]
