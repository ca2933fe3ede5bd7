"""Makes new tasks for AppWorld from code that an agent ran in a training task's start state.

The text of a new task is written by an explorer model or generated from a template. The template
lists each API call, so tasks from the template are easier than tasks written by people.
"""

import ast
import builtins
import itertools
import json
import random

from environments import with_pairs, words_of
from environments.appworld import data
from environments.appworld.python_code import block, calls_of, code_of, codes, tree_of

DONE = "apis.supervisor.complete_task()"
COMPLETES = "supervisor.complete_task"
SECRETS = ("access_token", "password", "username")


class TaskGenerator:
    """Makes, checks and verifies new tasks.

    A task is a dict with `start` (the id of the training task whose start state is used), `text`
    (the instruction) and `code` (the parts of its solution). A candidate is a dict with `text`,
    `task` and `solution` (a list of replies that solve the task).
    """
    form = ("A task is what a person asks for, in one message that holds every value that is "
            "needed but names no interface. Its actions are blocks of Python, ```python ... ```, "
            "that do it from the start, logins too; the last one calls "
            "apis.supervisor.complete_task, with the answer where something is asked.")

    def __init__(self, env):
        self.env = env
        self.documents = data.documents(env.judge.root)
        starts = [task["start"] for split in env.splits.values() for task in split.values()]
        self.instructions = {words_of(data.specs(env.judge.root, start)["instruction"])
                             for start in starts}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Returns the names of the APIs that were called, and all pairs of consecutive names."""
        trace = self.env.judge.trace(self.env.find(task), codes(replies))
        return with_pairs([name for result in trace.results for name, _ in result.calls])

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Makes a candidate from an episode, with a text generated from the template.

        The solution is the code of the replies up to a random reply that changed something in the
        apps, except code that raised an error. Returns a list with the candidate, or [] if no reply
        changed anything or the template describes none of the changes.
        """
        start = self.env.find(task)["start"]
        parts = [code for code in codes(replies) if COMPLETES not in calls_of(code)]
        results = self.env.judge.trace(dict(start=start), parts).results
        ran = [n for n, result in enumerate(results) if not result.failed]
        ends = [n for n in ran if results[n].changed]
        if not ends:
            return []
        end = rng.choice(ends)
        chosen = [n for n in ran if n <= end][-(data.MAX_REPLIES - 1):]
        text = self.template([results[n].calls for n in chosen if results[n].changed])
        if not text:
            return []
        code = [parts[n] for n in chosen]
        return [self._candidate(start, text, [*code, DONE], template=True)]

    def written(self, task: str, proposal: dict) -> dict | None:
        """Makes a candidate from an explorer model's proposal.

        Returns None if `action_sequence` contains no blocks, or a block that is not valid Python.
        """
        parts = [code_of(text) or text for text in proposal["action_sequence"]]
        if not parts or None in map(tree_of, parts):
            return None
        if COMPLETES not in calls_of(parts[-1]):
            parts.append(DONE)
        return self._candidate(self.env.find(task)["start"], proposal["query"], parts)

    def key(self, task: dict) -> str:
        """Returns a key: the start state, and the code with variables renamed to name0, name1, ...
        """
        tree, names = tree_of("\n".join(task.get("code", ()))), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id != "apis" and not hasattr(builtins, node.id):
                node.id = names.setdefault(node.id, f"name{len(names)}")
        return f"{task['start']} {ast.unparse(tree)}"

    def refusal(self, task: dict) -> str | None:
        """Returns the reason why a task must not be added to the run's tasks, or None."""
        code = task["code"]
        if task["start"] not in self.env.splits["train"]:
            return f"{task['start']!r} is no start state of a training task"
        if not 1 < len(code) <= data.MAX_REPLIES:
            return f"its solution has {len(code)} parts, not 2 to {data.MAX_REPLIES}"
        # IPython runs the code, and also accepts magic commands. The checks cannot parse these.
        if None in map(tree_of, code):
            return "a part of its solution is no Python"
        if words_of(task["text"]) in self.instructions:
            return "a task of a split"
        return None

    def verify(self, candidate: dict) -> str | None:
        """Verifies a candidate, and returns None or the reason why it does not pass.

        - Two runs of the solution must complete the task and end in the same state. No part of the
          solution may raise an error.
        - A run without the last part that changed the apps must not complete the task with the same
          final state. If no part changed the apps, completing the task without an answer must not
          be enough.
        """
        task, judge = candidate["task"], self.env.judge
        first = judge.trace(task, task["code"])
        second = judge.trace(task, task["code"])
        if not first.done or not second.done:
            return "its solution does not complete it"
        if any(result.failed for result in first.results):
            return "a part of its solution fails"
        if not self._same_end(task, first.changes, second.changes):
            return "its replays differ"
        changing = [n for n, result in enumerate(first.results) if result.changed]
        if changing:
            last = changing[-1]
            shorter_code = task["code"][:last] + task["code"][last + 1:]
        else:  # no part changed the apps, so the answer must be necessary
            shorter_code = [DONE]
        shorter = judge.trace(task, shorter_code)
        if shorter.process_error is not None:
            return "without its last change it does not run to its end"
        same = shorter.done and self._same_end(task, first.changes, shorter.changes)
        if same is None:
            return "its end without its last change cannot be compared"
        return "it is solved without its last change" if same else None

    def template(self, calls: list[list]) -> str:
        """Returns the text of a task, generated from the API calls of its solution.

        Each call is described by the first sentence of the API's documentation and by the call's
        arguments. Logins and calls that only read data are left out.

        Args:
            calls: One list of calls per part of the solution. A call is ["APP.API", arguments].
        """
        sentences = []
        for name, arguments in itertools.chain(*calls):
            document = self.documents.get(name)
            if not document or document["method"] == "GET" or document["api_name"] == "login":
                continue
            sentence = " ".join(document["description"].split()).partition(". ")[0].rstrip(".")
            values = [f"{key} = {json.dumps(value, ensure_ascii=False)}"
                      for key, value in arguments.items() if key not in SECRETS]
            sentences.append(", ".join([f"{sentence} ({document['app_name']})", *values]))
        return f"{'. Then: '.join(sentences)}." if sentences else ""

    def _candidate(self, start: str, text: str, code: list[str], **more) -> dict:
        return dict(text=text, task=dict(start=start, text=text, code=code),
                    solution=[block(part) for part in code], **more)

    def _same_end(self, task: dict, first: dict, second: dict) -> bool | None:
        """Returns True if two episodes of a task end with the same records and the same answer.

        Returns None if the two final states cannot be compared.
        """
        result = self.env.judge.compare(task["start"], first, second)
        return None if "error" in result else result["answer"] and result["apps"]
