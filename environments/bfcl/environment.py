"""BFCL v3 multi-turn: an agent calls functions for a user, who sends several messages."""

import json
from importlib import import_module

from environments import saying
from environments.bfcl import data
from environments.bfcl.calls import CLOSE, MAX_REPLIES, OPEN, Simulators, parse_calls, script
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
    """The multi-turn tasks of BFCL v3 on simulators of files, messages, trading, travel and others.

    A turn is a message of the user with the replies to it. The reward comes at the end of an
    episode: 1 if all turns with a ground truth pass the package's checks, and otherwise 0. After
    such a turn the simulators must be in the same state as after the ground truth, and the results
    of the ground truth must be among the agent's results so far. With bfcl_reward="turns" the
    reward is the share of these turns that pass.

    Args:
        view: "full" documents functions in JSON, "short" by signature and description.
        bfcl_category: One of CATEGORIES, or "all".
        bfcl_split: "ours" or "published", see `Options`.
        bfcl_reward: "all" or "turns".
    """
    name = "bfcl"
    rules = PROMPT
    test_splits = ("test",)
    max_turns = MAX_REPLIES + 1  # of one turn; `start` sets it for all turns of the task

    def __init__(self, view: str = "full", bfcl_category: str = "base", bfcl_split: str = "ours",
                 bfcl_reward: str = "all"):
        super().__init__(view)
        self.prompt = PROMPT  # also in the short view: no tiny model plays these tasks
        self.splits = data.splits(bfcl_category, bfcl_split == "published")
        self.share_of_turns = bfcl_reward == "turns"

    def task_generator(self):
        return import_module("environments.bfcl.tasks").TaskGenerator(self)

    def start(self, task: dict) -> str:
        self._task, self._turn, self._replies = task, 0, 0
        self._hidden = task.get("hidden", {})  # a task made in training hides no function
        self.simulators, self._truth = Simulators(task["start"]), Simulators(task["start"])
        self.results = []  # the results of all calls
        self._passed = []  # for each checked turn, True if it passed
        self.max_turns = (MAX_REPLIES + 1) * len(task["turns"])
        later = {name for names in self._hidden.values() for name in names}
        names = data.functions(task["start"])
        return message_of_user(self, [name for name in names if name not in later])

    def step(self, reply: str) -> Step:
        calls = parse_calls(reply)
        if calls:
            self._replies += 1
            results = [self.simulators.run(call) for call in calls]
            self.results += results
            if self._replies <= MAX_REPLIES:
                texts = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
                idle = not any(map(self.simulators.has_function, calls))
                return Step("\n".join(texts), 0.0, False, idle=idle)
            end = f"More than {MAX_REPLIES} replies with calls: the episode ends."
        else:
            self._check_turn()
            self._turn, self._replies = self._turn + 1, 0
            if self._turn < len(self._task["turns"]):
                new = self._hidden.get(str(self._turn), ())
                return Step(message_of_user(self, new), 0.0, False)
            end = "The conversation is over."
        # The share counts all turns with a ground truth, also those that were not reached.
        share = sum(self._passed) / sum(map(bool, self._task["calls"]))
        return Step(end, share if self.share_of_turns else float(share == 1), True)

    def possible(self) -> tuple[list[str], str]:
        return [], '{"name": ..., "arguments": {...}}, a call; or words, which end your turn'

    def reply(self, action: str) -> str:
        return f"{OPEN}\n{action}\n{CLOSE}" if action.startswith("{") else action

    def expert(self):
        return saying(script(self._task["calls"]))

    def _check_turn(self) -> None:
        """Makes the ground truth's calls of the turn, and records if the turn passes. This is what
        the package's `multi_turn_checker` does."""
        results = [self._truth.run(call) for call in self._task["calls"][self._turn]]
        if not results:
            return
        check = data.multi_turn_checker
        try:
            state = check.state_checker(self.simulators.instances, self._truth.instances)
            response = check.response_checker(self.results, results, self._turn)
            passed = self._replies > 0 and state["valid"] and response["valid"]
        except RecursionError:  # a directory inside itself, which no ground truth has
            passed = False
        self._passed.append(passed)


def message_of_user(env: Bfcl, names) -> str:
    """Returns the user's text of this turn, after the documents of the functions in `names`."""
    text = env._task["turns"][env._turn]
    if not names:
        return text
    documents = data.functions(env._task["start"])
    write = json.dumps if env.view == "full" else in_short
    lines = [write(documents[name]) for name in names]
    return "\n".join(["<tools>", *lines, "</tools>", "", text])


def in_short(document: dict) -> str:
    """Returns the document of a function in one line: its signature, its description and those of
    its arguments."""
    parameters = document["parameters"]
    required, arguments = parameters.get("required", []), parameters["properties"]
    signature = ", ".join(f"{name}{'' if name in required else '?'}: {argument['type']}"
                          for name, argument in arguments.items())
    return " ".join([f"{document['name']}({signature}):", data.prose(document),
                     *(f"{name}: {argument.get('description', '').strip()}"
                       for name, argument in arguments.items())])
