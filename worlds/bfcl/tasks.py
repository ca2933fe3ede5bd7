"""New tasks for BFCL's simulators, made of calls that somebody made there. What the user says is an
explorer model's, or a template, which spells the calls out and is easier than what people ask."""

import json
import random

from worlds import replay, words_of
from worlds.bfcl.calls import Simulators, failed, json_of, parse_calls, problem, script
from worlds.bfcl.data import CATEGORIES, functions, tasks

MOST_CALLS = 8  # of a new task [ours]


class TaskGenerator:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is what a user asks for, in one message that holds every value that is needed "
            'but names no function. Its actions are calls, each {"name": ..., "arguments": {...}}, '
            "without those that only look around; the last one changes something, or finds out "
            "what was asked.")

    def __init__(self, env):
        self.env = env
        known = [task for category in CATEGORIES for task in tasks(category).values()]
        self.said = {words_of(text) for task in known for text in task["turns"]}
        # Of every split: nobody's solution is asked for again, from whichever start state.
        self.solutions = {_flat(task["calls"]) for task in known}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Names of the functions whose calls returned no error, and of two in a row."""
        names = [call["name"] for call, _, _ in self._made(self.env.find(task)["start"], replies)]
        return {*names, *(f"{a}, {b}" for a, b in zip(names, names[1:]))}

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution, template} of an episode: at most two, which ask for what
        was done up to somewhere: in one turn, and in several, which end with changes."""
        start = self.env.find(task)["start"]
        made = list(self._made(start, replies))
        rows = [row for n in range(len(made)) if len(row := useful(made[:n + 1])) <= MOST_CALLS]
        if not rows:
            return []
        row = rng.choice(rows)
        calls = [call for call, _, _ in row]
        ways = [[calls]]
        if ends := [n for n, (_, _, changed) in enumerate(row[:-1], 1) if changed]:
            ends = [0, *sorted(rng.sample(ends, rng.randint(1, min(2, len(ends))))), len(calls)]
            ways.append([calls[a:b] for a, b in zip(ends, ends[1:])])
        return [self._proposal(start, [self.template(start, turn) for turn in way], way,
                               template=True) for way in ways]

    def parses(self, pattern: str) -> bool:
        """Of any function something can be asked."""
        return True

    def vary(self, task: str, pattern: str | None, rng: random.Random) -> list[dict]:
        """Proposals that ask for a part of what the task asks for, with the rare pattern if any."""
        found = self.finds(task, script(self.env.find(task)["calls"]), rng)
        return [proposal for proposal in found if pattern is None
                or pattern in self.patterns(task, proposal["solution"])]

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's proposal: its words, and its calls as the solution of one turn."""
        calls = [call for text in proposal["action_sequence"] for call in parse_calls(text)]
        if not calls or not all(isinstance(call, dict) for call in calls):
            return None
        return self._proposal(self.env.find(task)["start"], [proposal["query"]], [calls])

    def key(self, task: dict) -> str:
        """What makes two tasks one: the start state and the calls of each turn."""
        return f"{task['start']} {json.dumps(task['calls'], sort_keys=True)}"

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this task; None if one may."""
        if task["start"] not in {t["start"] for t in self.env.splits["train"].values()}:
            return f"{task['start']!r} is no start state of a training task"
        if not any(task["calls"]) or len(task["turns"]) != len(task["calls"]):
            return f"its {len(task['turns'])} turns need as many lists of calls"
        known = functions(task["start"])
        for call in (call for calls in task["calls"] for call in calls):
            if wrong := problem(call):
                return f"a call of {str(call['name'])[:60]!r}: {wrong}"
            if call["name"] not in known:
                return f"its simulators have no function {call['name'][:60]!r}"
        if _flat(task["calls"]) in self.solutions or self.said & {*map(words_of, task["turns"])}:
            return "a task of a split"
        return None

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution twice, and without its last call; why it proves nothing, or None."""
        task = proposal["task"]
        reward, results, states = self._play(task, proposal["solution"])
        if any(map(failed, results)):
            return "a call of its solution fails"
        if self._play(task, proposal["solution"]) != (reward, results, states):
            return "its replays differ"
        if reward != 1:
            return f"its solution earns {reward:.2f}"
        calls = [list(turn) for turn in task["calls"]]
        next(turn for turn in reversed(calls) if turn).pop()
        solved = self._play(task, script(calls))[0] == 1
        return "it is solved without its last call" if solved else None

    def template(self, start: str, calls: list[dict]) -> str:
        """What these calls do, by the first sentences of their documents."""
        known, said = functions(start), []
        for call in calls:
            text = known[call["name"]]["description"].rpartition("Tool description: ")[2].strip()
            given = ", ".join(f"{name} = {json.dumps(value)}"
                              for name, value in call["arguments"].items())
            said.append(text.partition(". ")[0].rstrip(".") + (f", with {given}" if given else ""))
        return ". Then: ".join(said) + "."

    def _proposal(self, start: str, turns: list[str], calls: list[list[dict]], **more) -> dict:
        return dict(text="\n".join(turns), task=dict(start=start, turns=turns, calls=calls),
                    solution=script(calls), **more)

    def _play(self, task: dict, replies: list[str]) -> tuple[float, list[str], str]:
        """The reward of these replies, the results of their calls, and the states at the end."""
        steps = replay(self.env, task, replies)
        return steps[-1].reward, self.env.results, self.env.world.states()

    def _made(self, start: str, replies: list[str]):
        """(call, result, whether it changed anything) of the replies' calls that did not fail."""
        world = Simulators(start)
        before = world.states()
        for call in (call for reply in replies for call in parse_calls(reply)):
            result, after = world.run(call), world.states()
            if not failed(result):
                yield call, result, before != after
            before = after


def useful(made: list[tuple]) -> list[tuple]:
    """The calls that changed something, the last, and those that later arguments come from."""
    kept, later = [], []  # later: values of arguments, as texts
    for call, result, changed in reversed(made):
        found = [str(value) for value in _values(json_of(result))]
        used = any(a == b or len(a) > 2 and a in b for a in found for b in later)
        if changed or used or not kept:
            kept.append((call, result, changed))
            later += [str(value) for value in _values(call["arguments"])]
    return kept[::-1]


def _values(value) -> list:
    """The texts and numbers in a value of JSON."""
    if isinstance(value, (dict, list)):
        inside = value.values() if isinstance(value, dict) else value
        return [found for item in inside for found in _values(item)]
    return [] if value is None or isinstance(value, bool) else [value]


def _flat(calls: list[list[dict]]) -> str:
    return json.dumps([call for turn in calls for call in turn], sort_keys=True)
