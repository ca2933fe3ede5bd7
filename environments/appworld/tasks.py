"""New tasks for AppWorld, made of code that somebody ran there: on a training task's start state,
what was done up to somewhere. What it asks for is an explorer model's words, or a template's, which
spells the calls out and is easier than what people ask."""

import ast
import builtins
import itertools
import json
import random

from environments import words_of
from environments.appworld import data
from environments.appworld.environment import block, code_of
from environments.appworld.judging import Trace
from environments.wording import asks, holds_call, holds_code, leaves, tokens, with_pairs

DONE = "apis.supervisor.complete_task()"
COMPLETES = "supervisor.complete_task"
SECRETS = ("access_token", "password", "username")
AROUND = ("login", "show_account_passwords", "complete_task")  # what any solution calls
FAILED = "Execution failed"  # what the package says first where code raises an error


class TaskGenerator:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is what a person asks for, in one message that holds every value that is "
            "needed but names no interface. Its actions are blocks of Python, ```python ... ```, "
            "that do it from the start, logins too; the last one calls "
            "apis.supervisor.complete_task, with the answer where something is asked.")

    def __init__(self, env):
        self.env = env
        self.documents = data.documents(env.judge.root)
        known = [task["start"] for split in env.splits.values() for task in split.values()]
        self.said = {words_of(data.specs(env.judge.root, start)["instruction"]) for start in known}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Names of the interfaces that the code calls, and of two in a row."""
        names = [name for code in codes(replies) for name in calls_of(code)]
        return with_pairs(names)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution, template} of an episode: at most one, which asks for
        what was done up to a part that changed something."""
        start = self.env.find(task)["start"]
        parts = [code for code in codes(replies) if COMPLETES not in calls_of(code)]
        trace = self.env.judge.trace(dict(start=start), parts)
        ran = [not output.startswith(FAILED) for output in trace.outputs]
        ends = [n for n, changed in enumerate(trace.changed) if changed and ran[n]]
        if not ends:
            return []
        end = rng.choice(ends)
        kept = [n for n in range(end + 1) if ran[n]][-(data.MOST_REPLIES - 1):]
        text = self.template([trace.calls[n] for n in kept if trace.changed[n]])
        if not text:
            return []
        code = [parts[n] for n in kept]
        return [self._proposal(start, text, [*code, DONE], template=True)]

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's proposal: its words, and its blocks as the solution."""
        parts = [code_of(text) or text for text in proposal["action_sequence"]]
        if not parts or None in map(tree_of, parts):
            return None
        if COMPLETES not in calls_of(parts[-1]):
            parts.append(DONE)
        return self._proposal(self.env.find(task)["start"], proposal["query"], parts)

    def key(self, task: dict) -> str:
        """What makes two tasks one: the start state and the code, however it is written."""
        tree, names = tree_of("\n".join(task.get("code", ()))), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id != "apis" and not hasattr(builtins, node.id):
                node.id = names.setdefault(node.id, f"name{len(names)}")
        return f"{task['start']} {ast.unparse(tree)}"

    def tells(self, text: str, solution: list[str]) -> bool:
        """Whether a text holds code of its solution, or a part that names an interface."""
        code = "\n".join(codes(solution))
        literals = [value for value in literals_of(code) if isinstance(value, str)]
        return holds_code(text, literals) or any(
            holds_call(text, name.partition(".")[2], self._prose(name), {})
            for name in calls_of(code))

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this task; None if one may."""
        code = task["code"]
        if task["start"] not in self.env.splits["train"]:
            return f"{task['start']!r} is no start state of a training task"
        if not 1 < len(code) <= data.MOST_REPLIES:
            return f"its solution has {len(code)} parts, not 2 to {data.MOST_REPLIES}"
        if None in map(tree_of, code):  # IPython, which runs it, takes more
            return "a part of its solution is no Python"
        if words_of(task["text"]) in self.said:
            return "a task of a split"
        about = []
        for part in code:
            names = [name for name in calls_of(part) if name.partition(".")[2] not in AROUND]
            if names:
                about += [*names, *map(self._prose, names), *map(str, literals_of(part))]
        return None if asks(task["text"], " ".join(about)) else "its text asks for nothing"

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution twice, and without its last change; why it proves nothing, or None."""
        task, judge = proposal["task"], self.env.judge
        first = judge.trace(task, task["code"])
        second = judge.trace(task, task["code"])
        if not first.done or not second.done:
            return "its solution does not complete it"
        if any(output.startswith(FAILED) for output in first.outputs):
            return "a part of its solution fails"
        if not self._alike(task, first.changes, second.changes):
            return "its replays differ"
        if not (proposal.get("template") or self._says_all(task, first)):
            return "its text does not say every value that its code needs"
        if any(first.changed):
            last = len(first.changed) - 1 - first.changed[::-1].index(True)
            less = task["code"][:last] + task["code"][last + 1:]
        else:  # it asks something: then the answer has to say it
            less = [DONE]
        shorter = judge.trace(task, less)
        if shorter.gone is not None:
            return "without its last change it is not played to its end"
        alike = shorter.done and self._alike(task, first.changes, shorter.changes)
        if alike is None:
            return "its end without its last change cannot be compared"
        return "it is solved without its last change" if alike else None

    def template(self, calls: list[list]) -> str:
        """What the calls of some parts do, by the first sentences of their documents; "" if they
        only look."""
        said = []
        for name, arguments in itertools.chain(*calls):
            document = self.documents.get(name)
            if not document or document["method"] == "GET" or document["api_name"] == "login":
                continue
            sentence = " ".join(document["description"].split()).partition(". ")[0].rstrip(".")
            given = [f"{key} = {json.dumps(value, ensure_ascii=False)}"
                     for key, value in arguments.items() if key not in SECRETS]
            said.append(", ".join([f"{sentence} ({document['app_name']})", *given]))
        return f"{'. Then: '.join(said)}." if said else ""

    def _proposal(self, start: str, text: str, code: list[str], **more) -> dict:
        return dict(text=text, task=dict(start=start, text=text, code=code),
                    solution=[block(part) for part in code], **more)

    def _alike(self, task: dict, one: dict, other: dict) -> bool | None:
        """Whether two ends are one; None where they cannot be compared."""
        told = self.env.judge.compare(task["start"], one, other)
        return None if "error" in told else told["answer"] and told["apps"]

    def _prose(self, name: str) -> str:
        """What the document of an interface says in words."""
        document = self.documents.get(name, dict(description="", parameters=()))
        arguments = [f"{row['name']} {row['description']}" for row in document["parameters"]
                     if row["name"] not in SECRETS]
        return " ".join([document["description"], *arguments])

    def _says_all(self, task: dict, trace: Trace) -> bool:
        """Whether the text says each literal of the code that an interface gets or that something
        is compared with, or the environment shows it: the document of its argument, the person,
        what was printed before. What ids and secrets are can be looked up."""
        owner = data.specs(self.env.judge.root, task["start"])["supervisor"]
        said = tokens(f"{task['text']} {json.dumps(owner)}")
        literals = []
        for code, output, calls in zip(task["code"], trace.outputs, trace.calls):
            literals += literals_of(code)
            needed = set()
            for node in ast.walk(tree_of(code)):
                if isinstance(node, ast.Compare):
                    needed |= tokens(" ".join(texts_of(node)))
            for name, arguments in calls:
                for argument in self.documents[name]["parameters"]:
                    key = argument["name"]
                    if key in SECRETS or key.endswith("_id") or key.startswith("page_"):
                        continue
                    given = [value for value in leaves(arguments.get(key)) if value in literals]
                    needed |= tokens(" ".join(map(str, given))) - tokens(json.dumps(argument))
            if needed - said:
                return False
            said |= tokens(output)
        return True


def literals_of(code: str) -> list:
    """The values that code writes out; none where it is no Python."""
    tree = tree_of(code)
    nodes = ast.walk(tree) if tree else ()
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


def texts_of(node: ast.Compare) -> list[str]:
    """The texts between which, and something else, code compares."""
    sides = [getattr(side, "value", None) for side in (node.left, *node.comparators)]
    return [side for side in sides if isinstance(side, str)]


def codes(replies: list[str]) -> list[str]:
    """The blocks of Python in replies."""
    found = map(code_of, replies)
    return [code for code in found if code]


def tree_of(code: str) -> ast.AST | None:
    """Code that can be read and written; None where it is no Python."""
    try:
        tree = ast.parse(code)
        ast.unparse(tree)
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def calls_of(code: str) -> list[str]:
    """The names of the interfaces that code calls; none where it is no Python."""
    tree = tree_of(code)
    return data.calls_in(tree) if tree else []
