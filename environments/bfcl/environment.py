"""BFCL v3 multi-turn: an agent calls functions for a user, who says several things."""

import json
from importlib import import_module

from environments import saying
from environments.bfcl import data
from environments.bfcl.calls import CLOSE, MOST_REPLIES, OPEN, Simulators, parse_calls, script
from envs import Environment, Step

PROMPT = """\
You do what a user asks for by calling functions. The functions that you have are documented \
below, one a line; use them with the arguments that they name.

A call is a JSON object between tags, with the name of the function and its arguments by name:
<tool_call>
{"name": "function", "arguments": {"argument": "value"}}
</tool_call>

A reply may hold several calls, each between tags of its own. They are made in order; then you \
read the result of each, and may call again. Go on until all that the user asked for is done, in \
at most 20 replies. Then reply in words, without a call: this hands over to the user, who may ask \
for more. Do the same, and make no call for it, where a function or a value is missing that you \
would need."""


class Bfcl(Environment):
    """Multi-turn tasks of BFCL v3 on simulators of files, messages, trading, travel and others.
    The reward comes at the end: 1 if after each turn with a ground truth the simulators are in its
    state and its results are among the agent's so far (the package's checks), else 0; with
    bfcl_reward="turns" the share of these turns. view="short": functions are documented by
    signature and description."""
    name = "bfcl"
    rules = PROMPT
    test_splits = ("test",)
    max_turns = MOST_REPLIES + 1  # of the task just reset: of all its turns

    def __init__(self, view: str = "full", bfcl_category: str = "base", bfcl_split: str = "ours",
                 bfcl_reward: str = "all"):
        super().__init__(view)
        self.prompt = PROMPT  # in either view: no model is made for these tasks
        self.splits = data.splits(bfcl_category, bfcl_split == "published")
        self.share_of_turns = bfcl_reward == "turns"

    def task_generator(self):
        return import_module("environments.bfcl.tasks").TaskGenerator(self)

    def start(self, task: dict) -> str:
        self._task, self._turn, self._replies = task, 0, 0
        self._hidden = task.get("hidden", {})  # a new task hides nothing
        self.simulators, self._truth = Simulators(task["start"]), Simulators(task["start"])
        self.results, self._passed = [], []  # of all calls; whether each checked turn passed
        self.max_turns = (MOST_REPLIES + 1) * len(task["turns"])
        later = {name for names in self._hidden.values() for name in names}
        known = data.functions(task["start"])
        return what_is_said(self, [name for name in known if name not in later])

    def step(self, reply: str) -> Step:
        calls = parse_calls(reply)
        if calls:
            self._replies += 1
            results = [self.simulators.run(call) for call in calls]
            self.results += results
            if self._replies <= MOST_REPLIES:
                told = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
                idle = not any(map(self.simulators.knows, calls))
                return Step("\n".join(told), 0.0, False, idle=idle)
            end = f"More than {MOST_REPLIES} replies with calls: the episode ends."
        else:
            self._check_turn()
            self._turn, self._replies = self._turn + 1, 0
            if self._turn < len(self._task["turns"]):
                return Step(what_is_said(self, self._hidden.get(str(self._turn), ())), 0.0, False)
            end = "The conversation is over."
        # Turns that were not reached have not passed.
        share = sum(self._passed) / sum(map(bool, self._task["calls"]))
        return Step(end, share if self.share_of_turns else float(share == 1), True)

    def possible(self) -> tuple[list[str], str]:
        return [], '{"name": ..., "arguments": {...}}, a call; or words, which end your turn'

    def reply(self, action: str) -> str:
        return f"{OPEN}\n{action}\n{CLOSE}" if action.startswith("{") else action

    def expert(self):
        return saying(script(self._task["calls"]))

    def _check_turn(self) -> None:
        """Makes the turn's calls of the ground truth and compares, as `multi_turn_checker` does."""
        results = [self._truth.run(call) for call in self._task["calls"][self._turn]]
        if not results:
            return
        check = data.multi_turn_checker
        try:
            state = check.state_checker(self.simulators.instances, self._truth.instances)
            response = check.response_checker(self.results, results, self._turn)
            passed = self._replies > 0 and state["valid"] and response["valid"]
        except RecursionError:  # a directory inside itself is in no ground truth
            passed = False
        self._passed.append(passed)


def what_is_said(env: Bfcl, shown) -> str:
    """What the user says in this turn, after the documents of the functions shown, if any."""
    said = env._task["turns"][env._turn]
    if not shown:
        return said
    known = data.functions(env._task["start"])
    write = json.dumps if env.view == "full" else in_short
    lines = [write(known[name]) for name in shown]
    return "\n".join(["<tools>", *lines, "</tools>", "", said])


def in_short(document: dict) -> str:
    """The document of a function in a line: signature, description, what its arguments are."""
    parameters = document["parameters"]
    required, arguments = parameters.get("required", []), parameters["properties"]
    signature = ", ".join(f"{name}{'' if name in required else '?'}: {what['type']}"
                          for name, what in arguments.items())
    return " ".join([f"{document['name']}({signature}):", data.prose(document),
                     *(f"{name}: {what.get('description', '').strip()}"
                       for name, what in arguments.items())])
