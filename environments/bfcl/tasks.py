"""New tasks for BFCL's simulators, made of calls that somebody made there. What the user says is an
explorer model's, or a template, which spells the calls out and is easier than what people ask."""

import json
import random
from hashlib import sha256

from environments import converse, saying, words_of
from environments.bfcl.calls import Simulators, failed, json_of, parse_calls, problem, script
from environments.bfcl.data import CATEGORIES, functions, prose, tasks
from environments.wording import asks, holds_call, holds_code, leaves, tokens, with_pairs

MOST_CALLS = 8  # of a new task [ours]


class TaskGenerator:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is what a user asks for, in one message that holds every value that is needed "
            'but names no function. Its actions are calls, each {"name": ..., "arguments": {...}}, '
            "without those that only look around; the last one changes something, or finds out "
            "what was asked.")

    def __init__(self, env):
        self.env = env
        self.functions = {}  # of all simulators
        self.said, self.solutions = set(), []
        for category in CATEGORIES:
            for task in tasks(category).values():
                self.functions |= functions(task["start"])
                self.said |= {*map(words_of, task["turns"])}
                # Nobody's solution is asked for again, from whichever start state.
                self.solutions.append(self._plain(task))

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Names of the functions whose calls returned no error, and of two in a row."""
        names = [call["name"] for call, _, _ in made(self.env.find(task)["start"], replies)]
        return with_pairs(names)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution, template} of an episode: at most two, which ask for what
        was done up to somewhere: in one turn, and in several, which end with changes."""
        start = self.env.find(task)["start"]
        done = list(made(start, replies))
        rows = [row for n in range(len(done)) if len(row := useful(done[:n + 1])) <= MOST_CALLS]
        if not rows:
            return []
        row = rng.choice(rows)
        calls = [call for call, _, _ in row]
        ways = [[calls]]
        if ends := [n for n, (_, _, changed) in enumerate(row[:-1], 1) if changed]:
            ends = [0, *sorted(rng.sample(ends, rng.randint(1, min(2, len(ends))))), len(calls)]
            ways.append([calls[a:b] for a, b in zip(ends, ends[1:])])
        return [self._proposal(start, list(map(self.template, way)), way, template=True)
                for way in ways]

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's proposal: its words, and its calls as the solution of one turn."""
        calls = [call for text in proposal["action_sequence"] for call in parse_calls(text)]
        if not calls or not all(isinstance(call, dict) for call in calls):
            return None
        return self._proposal(self.env.find(task)["start"], [proposal["query"]], [calls])

    def key(self, task: dict) -> str:
        """What makes two tasks one: the start state, and of each turn what its calls return and
        leave, however they are written."""
        simulators = Simulators(task["start"])
        done = [(sorted(map(simulators.run, calls)), simulators.states())
                for calls in task["calls"]]
        return f"{task['start']} {sha256(repr(done).encode()).hexdigest()}"

    def tells(self, text: str, solution: list[str]) -> bool:
        """Whether a text holds calls of its solution, or a part of one, in whatever form."""
        given = []
        for call in (call for reply in solution for call in parse_calls(reply)):
            if isinstance(call, str) or problem(call) or call["name"] not in self.functions:
                continue
            given += call["arguments"].values()
            document = prose(self.functions[call["name"]])
            if holds_call(text, call["name"], document, call["arguments"]):
                return True
        return holds_code(text, given)

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this task; None if one may."""
        if task["start"] not in {t["start"] for t in self.env.splits["train"].values()}:
            return f"{task['start']!r} is no start state of a training task"
        known = functions(task["start"])
        for call in in_one(task):
            if wrong := problem(call):
                return f"a call of {str(call['name'])[:60]!r}: {wrong}"
            if call["name"] not in known:
                return f"its simulators have no function {call['name'][:60]!r}"
        if self._plain(task) in self.solutions or self.said & {*map(words_of, task["turns"])}:
            return "a task of a split"
        about = [task["calls"], [known[call["name"]] for call in in_one(task)]]
        if not asks(" ".join(task["turns"]), json.dumps(about)):
            return "its text asks for nothing"
        return None

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution twice, and without its last call; why it proves nothing, or None."""
        task = proposal["task"]
        if not (proposal.get("template") or says_all(task)):
            return "its text does not say every value that its calls need"
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

    def template(self, calls: list[dict]) -> str:
        """What these calls do, by the first sentences of their documents."""
        said = []
        for call in calls:
            given = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}"
                              for name, value in call["arguments"].items())
            text = prose(self.functions[call["name"]]).partition(". ")[0].rstrip(".")
            said.append(text + (f", with {given}" if given else ""))
        return ". Then: ".join(said) + "."

    def _plain(self, task: dict) -> list[dict]:
        """The calls of all turns, without arguments that are what they are if not given."""
        found = []
        for call in in_one(task):
            known = self.functions[call["name"]]["parameters"]["properties"]
            given = {name: value for name, value in call["arguments"].items()
                     if name not in known or known[name].get("default") != value}
            found.append(dict(name=call["name"], arguments=given))
        return found

    def _proposal(self, start: str, turns: list[str], calls: list[list[dict]], **more) -> dict:
        return dict(text="\n".join(turns), task=dict(start=start, turns=turns, calls=calls),
                    solution=script(calls), **more)

    def _play(self, task: dict, replies: list[str]) -> tuple[float, list[str], str]:
        """The reward of these replies, the results of their calls, and the states at the end."""
        _, reward = converse(self.env, self.env.start(task), saying(replies))
        return reward, self.env.results, self.env.simulators.states()


def in_one(task: dict) -> list[dict]:
    """The calls of all turns."""
    return [call for calls in task["calls"] for call in calls]


def made(start: str, replies: list[str]):
    """(call, result, whether it changed anything) of the replies' calls that did not fail."""
    simulators = Simulators(start)
    before = simulators.states()
    for call in (call for reply in replies for call in parse_calls(reply)):
        result, after = simulators.run(call), simulators.states()
        if not failed(result):
            yield call, result, before != after
        before = after


def useful(done: list[tuple]) -> list[tuple]:
    """The calls that changed something, the last, and those that later arguments come from."""
    kept, later = [], []  # later: values of arguments, as texts
    for call, result, changed in reversed(done):
        found = [str(value) for value in leaves(json_of(result))]
        used = any(a == b or len(a) > 2 and a in b for a in found for b in later)
        if changed or used or not kept:
            kept.append((call, result, changed))
            later += [str(value) for value in leaves(call["arguments"])]
    return kept[::-1]


def says_all(task: dict) -> bool:
    """Whether the user says each value of the calls, or the environment shows it: the document of
    its argument, start state, what calls without arguments return, what the calls before it
    return."""
    known = functions(task["start"])
    looked, simulators = Simulators(task["start"]), Simulators(task["start"])
    said = tokens(looked.states())
    for name in known:
        said |= tokens(looked.run(dict(name=name, arguments={})))
    for text, calls in zip(task["turns"], task["calls"]):
        said |= tokens(text)
        for call in calls:
            arguments = known[call["name"]]["parameters"]["properties"]
            for name, value in call["arguments"].items():
                shown = said | tokens(json.dumps(arguments.get(name)))
                if tokens(" ".join(map(str, leaves(value)))) - shown:
                    return False
            said |= tokens(simulators.run(call))
    return True
