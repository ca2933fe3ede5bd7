"""New tasks for BFCL's simulators, made from calls of an episode.

The text of the user comes from an explorer model or from a template. The template spells the calls
out, so its tasks are easier than those that people write.
"""

import json
import random
from hashlib import sha256

from environments import converse, saying, words_of
from environments.bfcl.calls import Simulators, failed, json_of, parse_calls, problem, script
from environments.bfcl.data import CATEGORIES, functions, prose, tasks
from environments.wording import asks, holds_call, holds_code, leaves, tokens, with_pairs

MAX_CALLS = 8  # calls of a new task [ours]


class TaskGenerator:
    """Makes, checks and verifies new tasks. A task is {start, turns, calls}, see `data.tasks`.

    Args:
        env: The environment BFCL.
    """
    # The description of a task in the prompt of an explorer model
    form = ("A task is what a user asks for, in one message that holds every value that is needed "
            'but names no function. Its actions are calls, each {"name": ..., "arguments": {...}}, '
            "without those that only look around; the last one changes something, or finds out "
            "what was asked.")

    def __init__(self, env):
        self.env = env
        self.functions = {}  # the documents of all simulators' functions
        self.texts, self.solutions = set(), []
        for category in CATEGORIES:
            for task in tasks(category).values():
                self.functions |= functions(task["start"])
                self.texts |= {*map(words_of, task["turns"])}
                # A new task may not have the calls of an existing one, whatever its start state.
                self.solutions.append(self._without_defaults(task))

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Returns the names of the functions whose calls returned no error, and each two
        consecutive names."""
        made = successful_calls(self.env.find(task)["start"], replies)
        names = [call["name"] for call, _, _ in made]
        return with_pairs(names)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Makes candidates from an episode.

        The solution is the useful part of the episode's calls up to one of them. One candidate has
        it in one turn. The other splits it into turns that each end with a call that changed
        something, if there is such a call before the last.

        Args:
            task: Id of the episode's task.
            replies: The episode's replies.
            rng: Random number generator.

        Returns:
            At most two candidates {text, task, solution, template}.
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
        """Makes a candidate from an explorer model's proposal.

        Args:
            task: Id of the task that was explored.
            proposal: The text of the user, `query`, and the calls that solve it in one turn,
                `action_sequence`.

        Returns:
            The candidate, or None if an action is no call.
        """
        calls = [call for text in proposal["action_sequence"] for call in parse_calls(text)]
        if not calls or not all(isinstance(call, dict) for call in calls):
            return None
        return self._candidate(self.env.find(task)["start"], [proposal["query"]], [calls])

    def key(self, task: dict) -> str:
        """Returns the key that equal tasks share: the start state, and for each turn the results of
        its calls and the states after them."""
        simulators = Simulators(task["start"])
        effects = [(sorted(map(simulators.run, calls)), simulators.states())
                   for calls in task["calls"]]
        return f"{task['start']} {sha256(repr(effects).encode()).hexdigest()}"

    def tells(self, text: str, solution: list[str]) -> bool:
        """Returns True if a text holds a call of its solution, or a part of one, in any form."""
        values = []
        for call in (call for reply in solution for call in parse_calls(reply)):
            if isinstance(call, str) or problem(call) or call["name"] not in self.functions:
                continue
            values += call["arguments"].values()
            document = prose(self.functions[call["name"]])
            if holds_call(text, call["name"], document, call["arguments"]):
                return True
        return holds_code(text, values)

    def refusal(self, task: dict) -> str | None:
        """Returns the reason why no run may add this task, or None if one may."""
        if task["start"] not in {t["start"] for t in self.env.splits["train"].values()}:
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
        about = [task["calls"], [documents[call["name"]] for call in all_calls(task)]]
        if not asks(" ".join(task["turns"]), json.dumps(about)):
            return "its text asks for nothing"
        return None

    def verify(self, candidate: dict) -> str | None:
        """Verifies a candidate.

        Its solution must earn the reward 1 twice with the same results and states, and the solution
        without its last call must not earn it.

        Returns:
            The reason why the solution does not verify the task, or None if it does.
        """
        task = candidate["task"]
        if not (candidate.get("template") or states_all(task)):
            return "its text does not state every value that its calls need"
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
        """Returns a text that describes calls by the first sentences of their documents."""
        sentences = []
        for call in calls:
            values = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}"
                               for name, value in call["arguments"].items())
            text = prose(self.functions[call["name"]]).partition(". ")[0].rstrip(".")
            sentences.append(text + (f", with {values}" if values else ""))
        return ". Then: ".join(sentences) + "."

    def _without_defaults(self, task: dict) -> list[dict]:
        """Returns the calls of all turns, without arguments that have their default value."""
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
        """Returns the reward of an episode with these replies, the results of its calls, and the
        states of the simulators at its end."""
        _, reward = converse(self.env, self.env.start(task), saying(replies))
        return reward, self.env.results, self.env.simulators.states()


def all_calls(task: dict) -> list[dict]:
    """Returns the calls of all turns."""
    return [call for calls in task["calls"] for call in calls]


def successful_calls(start: str, replies: list[str]):
    """Yields (call, result, True if it changed a state) of the replies' calls that did not fail."""
    simulators = Simulators(start)
    before = simulators.states()
    for call in (call for reply in replies for call in parse_calls(reply)):
        result, after = simulators.run(call), simulators.states()
        if not failed(result):
            yield call, result, before != after
        before = after


def useful(made: list[tuple]) -> list[tuple]:
    """Selects the calls that changed a state, the last call, and calls with a result that a later
    argument contains.

    Args:
        made: Rows of `successful_calls`.

    Returns:
        The selected rows, in order.
    """
    selected, later_values = [], []  # later_values: arguments of the selected calls, as texts
    for call, result, changed in reversed(made):
        values = [str(value) for value in leaves(json_of(result))]
        used = any(a == b or len(a) > 2 and a in b for a in values for b in later_values)
        if changed or used or not selected:
            selected.append((call, result, changed))
            later_values += [str(value) for value in leaves(call["arguments"])]
    return selected[::-1]


def states_all(task: dict) -> bool:
    """Returns True if an agent can know every value in the arguments of the solution's calls.

    The user may state a value, or the environment may show it: in the document of its argument, in
    the start state, in the result of a call without arguments, or in that of an earlier call.
    """
    documents = functions(task["start"])
    explored, simulators = Simulators(task["start"]), Simulators(task["start"])
    known = tokens(explored.states())
    for name in documents:
        known |= tokens(explored.run(dict(name=name, arguments={})))
    for text, calls in zip(task["turns"], task["calls"]):
        known |= tokens(text)
        for call in calls:
            arguments = documents[call["name"]]["parameters"]["properties"]
            for name, value in call["arguments"].items():
                in_document = tokens(json.dumps(arguments.get(name)))
                if tokens(" ".join(map(str, leaves(value)))) - known - in_document:
                    return False
            known |= tokens(simulators.run(call))
    return True
