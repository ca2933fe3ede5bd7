"""The environment BFCL, with the multi-turn tasks of BFCL v3.

A user sends several messages, and the agent calls functions to fulfil the user's requests.
"""

import json

from environments import saying
from environments.bfcl import data
from environments.bfcl.calls import CLOSE, MAX_REPLIES, OPEN, Simulators, parse_calls, script
from environments.bfcl.tasks import TaskGenerator
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
    """The multi-turn tasks of BFCL v3, on simulators for files, messages, trading and more.

    A turn consists of a message from the user and the agent's replies to it. A turn is checked if
    its ground truth contains calls. As in bfcl-eval, a checked turn passes if three conditions are
    met:

    - The agent has made a call in this turn.
    - The simulators are in the same state as after the calls of the ground truth.
    - The agent's calls in this episode have returned all results of the ground truth's calls for
      this turn.

    At the end of an episode, the reward is 1 if all checked turns pass, and otherwise 0. With
    bfcl_reward="turns", the reward is the fraction of the checked turns that pass.

    Args:
        view: "full" shows the documentation of each function as JSON, "short" in one line.
        bfcl_category: One of CATEGORIES, or "all".
        bfcl_split: "ours" or "published" (see `Options`).
        bfcl_reward: "all" or "turns".
    """
    name = "bfcl"
    rules = PROMPT
    test_splits = ("test",)
    # A turn has at most MAX_REPLIES replies with calls, and one reply in words. `start` multiplies
    # this number by the number of turns in the task.
    max_turns = MAX_REPLIES + 1

    def __init__(self, view: str = "full", bfcl_category: str = "base", bfcl_split: str = "ours",
                 bfcl_reward: str = "all"):
        super().__init__(view)
        # Unlike in other environments, the short view keeps the prompt. The tiny model, which would
        # not need the prompt, never plays BFCL.
        self.prompt = PROMPT
        self.splits = data.splits(bfcl_category, bfcl_split == "published")
        self.share_of_turns = bfcl_reward == "turns"

    def task_generator(self):
        return TaskGenerator(self)

    def start(self, task: dict) -> str:
        self._task, self._turn, self._replies = task, 0, 0
        self._hidden = task.get("hidden", {})  # a task created during training hides no functions
        self.simulators, self._truth = Simulators(task["start"]), Simulators(task["start"])
        self.results = []  # the results of the agent's calls, as texts
        self._passed = []  # one bool for each turn checked so far, True if the turn passed
        self.max_turns = (MAX_REPLIES + 1) * len(task["turns"])
        later = set().union(*self._hidden.values())
        names = [name for name in data.functions(task["start"]) if name not in later]
        return message_of_user(self, names)

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
        # Turns that the episode did not reach count as failed.
        share = sum(self._passed) / sum(map(bool, self._task["calls"]))
        return Step(end, share if self.share_of_turns else float(share == 1), True)

    def possible(self) -> tuple[list[str], str]:
        return [], '{"name": ..., "arguments": {...}}, a call; or words, which end your turn'

    def reply(self, action: str) -> str:
        return f"{OPEN}\n{action}\n{CLOSE}" if action.startswith("{") else action

    def expert(self):
        return saying(script(self._task["calls"]))

    def _check_turn(self) -> None:
        """Checks the current turn as bfcl-eval does, and appends the result to `_passed`."""
        results = [self._truth.run(call) for call in self._task["calls"][self._turn]]
        if not results:
            return
        check = data.multi_turn_checker
        try:
            state = check.state_checker(self.simulators.instances, self._truth.instances)
            response = check.response_checker(self.results, results, self._turn)
            passed = self._replies > 0 and state["valid"] and response["valid"]
        except RecursionError:
            # The agent has put a directory into itself, which the ground truth never does.
            passed = False
        self._passed.append(passed)


def message_of_user(env: Bfcl, names) -> str:
    """Returns the documents of the named functions, followed by the user's message in this turn."""
    text = env._task["turns"][env._turn]
    if not names:
        return text
    documents = data.functions(env._task["start"])
    write = json.dumps if env.view == "full" else in_short
    lines = [write(documents[name]) for name in names]
    return "\n".join(["<tools>", *lines, "</tools>", "", text])


def in_short(document: dict) -> str:
    """Returns a function's signature, description, and descriptions of its arguments in one line.
    """
    parameters = document["parameters"]
    required, arguments = parameters.get("required", []), parameters["properties"]
    signature = ", ".join(f"{name}{'' if name in required else '?'}: {argument['type']}"
                          for name, argument in arguments.items())
    return " ".join([f"{document['name']}({signature}):", data.prose(document),
                     *(f"{name}: {argument.get('description', '').strip()}"
                       for name, argument in arguments.items())])
