"""Runs episodes in the same way as the code of ETO or IPR (--protocol eto).

The table shows which environments each repository has. For InterCodeSQL we follow the code of IPR.
For WebShop and ScienceWorld we follow the code of ETO.

    Yifan-Song793/ETO   WebShop and ScienceWorld      (Song et al. 2024)
    WeiminXiong/IPR     WebShop and InterCodeSQL      (Xiong et al. 2024)

The prompts are read from the user's copy of one of these repositories. The class `EtoEnvironment`
wraps one of our environments and changes the messages of its episodes. The first message contains
only the rules. The next messages are example conversations, and then the task follows. Every
observation starts with a heading such as "Observation: ". The action is the text after the first
"Action: ". The table in environments/README.md lists all differences from our own protocol.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.settings import OldFile
from environments import Options
from environments.user_files import read_json, reading, text_in
from envs import Environment, Step


@dataclass(frozen=True)
class ProtocolOptions(Options):
    """Settings of WebShop, ScienceWorld and InterCodeSQL, which are the environments of ETO and
    IPR."""
    # Prompt, messages, rules, stop strings and rewards of the episodes: "ours" for those of this
    # project, or "eto" for those of ETO's code (of IPR's code in InterCodeSQL). "eto" also changes
    # the defaults of lengths, learning rate and temperature to those of that code [ours]
    protocol: Literal["ours", "eto"] = "ours"
    # Folder with the prompts for --protocol eto: eval_agent/prompt in ETO's or IPR's repository [-]
    prompts: OldFile = None

    def conflicts(self, s):
        eto = self.protocol == "eto"
        return [
            (eto != bool(self.prompts), "--protocol eto --prompts FOLDER",
             "give both; the folder is eval_agent/prompt of ETO's or IPR's repository"),
            (eto and (s.model == "tiny" or s.view == "short"), "--protocol eto",
             "the tiny model and --view short need this project's texts; give --view full and "
             "another --model"),
            (eto and s.method in ("grpo", "evolve"), f"--protocol eto --method {s.method}",
             "the explorers of this method need this project's texts; leave out one of the two")]


class EtoEnvironment:
    """Wraps one of our environments so that its episodes are the same as in ETO's code.

    Every attribute that this class does not define is looked up in the wrapped environment.
    """
    stops = ("\nObservation:", "\nTask:", "\n---")
    heading = "Observation: "
    # ETO's code returns this observation after a reply without an action. The text is copied
    # verbatim.
    no_action = "Invalid format. The input must contains 'Action: '"

    def __init__(self, inner: Environment, instruction: str, examples: list[list[dict]]):
        """
        Args:
            inner: The environment to wrap.
            instruction: The first message to the agent, which states the rules.
            examples: The example conversations. The prompt contains them when the agent acts, but
                not when it is trained.
        """
        self.inner = inner
        self.inner.action = self.action  # makes the inner `step` parse replies as in ETO's code
        self.instruction = instruction
        self.examples = examples

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def reset(self, task: str) -> str:
        # Not the `reset` of `inner`, which would not call the `start` of this class.
        return self.start(self.find(task))

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """Returns the first messages of an episode: the instruction, the reply "OK", the example
        conversations and the task.

        With playing=False, the function returns the messages for training. These messages contain
        no examples, and the task has no heading.
        """
        messages = [{"role": "user", "content": self.instruction},
                    {"role": "assistant", "content": "OK"}]
        if not playing:
            return [*messages, {"role": "user", "content": without_heading(observation)}]
        for example in self.examples:
            messages += [dict(message) for message in example]
        return [*messages, {"role": "user", "content": observation}]

    def action(self, reply: str) -> str | None:
        """Returns all text after the first "Action: ", or None if the reply has no "Action: ".

        If a reply contains several actions, the result contains all of them, because ETO's code
        also returns all text after the first "Action: ".
        """
        match = re.search(r"Action: (.*)", reply.strip(), re.S)
        return match[1] if match else None

    def step(self, reply: str) -> Step:
        if self.action(reply) is None:
            return self.without_action()
        step = self.inner.step(reply)
        return replace(step, observation=self.heading + step.observation)

    def without_action(self) -> Step:
        """Returns the result of a reply that contains no action. The observation is an error
        message, and the reward is 0."""
        return Step(f"Observation: {self.no_action}", 0.0, False, idle=True)

    def expert(self):
        """Returns the scripted expert of the wrapped environment. The expert gets the observations
        without their heading."""
        act = self.inner.expert()
        return lambda observation: act(without_heading(observation))


class EtoShop(EtoEnvironment):
    """Wraps WebShop. The agent may search on every page, as in ETO's code."""
    heading = "Observation:\n"

    def __init__(self, *args):
        super().__init__(*args)
        self.inner.searches_everywhere = True


class EtoScienceWorld(EtoEnvironment):
    """Wraps ScienceWorld so that its rewards are the same as in ETO's code.

    The reward is the highest score so far. The highest score starts at -1 instead of 0, so a wrong
    `focus on` as the first action gives the reward -1. A reply without an action resets the highest
    score to 0.
    """

    def start(self, task) -> str:
        description = self.inner.start(task)
        self.inner.reached = -1.0
        return f"Task Description:\n{description}"

    def without_action(self) -> Step:
        self.inner.reached = 0.0
        return super().without_action()


class EtoInterCodeSQL(EtoEnvironment):
    """Wraps InterCodeSQL so that its episodes are the same as in IPR's code.

    The reward can be negative, and most error messages end with a newline. The action is extracted
    from a reply in the same way as in our own protocol.
    """
    no_action = (
        "I don't understand your input.\n Your input shoud include the key world \"Action:\".\n If "
        "you want to perform a query operation, please use the following format:\n Action: \n```sql"
        "\nthe mysql code\n```. And the action should be executable and should not contain natural "
        "language.\n If you have got the final answer, please use the following format:\n Action: "
        "submit. Remember your output should contain only one \"Action:\" part.")

    def __init__(self, inner: Environment, *args):
        self.action = inner.action
        super().__init__(inner, *args)
        self.inner.error_end = "\n"

    def step(self, reply: str) -> Step:
        step = super().step(reply)
        if step.done:
            return replace(step, observation="submitted", reward=step.raw)
        return step


# This dict maps the name of an environment to its wrapper class, and to the start of the names of
# its files in the prompt folder.
WRAPPERS = {"webshop": (EtoShop, "webshop"), "scienceworld": (EtoScienceWorld, "sciworld"),
            "intercodesql": (EtoInterCodeSQL, "intercode_sql")}


def in_eto_protocol(env: Environment, folder: str, examples: int) -> EtoEnvironment:
    """Wraps an environment so that its episodes are the same as in ETO's or IPR's code.

    Args:
        env: One of our environments, in the full view.
        folder: A copy of the folder eval_agent/prompt from ETO's or IPR's repository.
        examples: The number of example conversations to read from the folder. The prompt contains
            these examples when the agent acts.

    Raises:
        UsageError: If a file is missing or malformed, or if there are fewer than `examples`
            example conversations.
    """
    wrapper, stem = WRAPPERS[env.name]
    instruction_file = f"instructions/{stem}_inst.txt"
    examples_file = f"icl_examples/{stem}_icl.json"
    must = (f"ETO's or IPR's eval_agent/prompt, with a text in {instruction_file} and a JSON list "
            f"of {examples} conversations or more in {examples_file}")
    with reading(f"--prompts {folder}", must):
        instruction = Path(folder, instruction_file).read_text(encoding="utf-8")
        conversations = read_json(Path(folder, examples_file))[:examples] if examples else []
        if len(conversations) < examples:
            raise ValueError(f"{examples_file} has {len(conversations)} conversations")
        for conversation in conversations:
            for message in conversation:
                text_in(message["content"])
    return wrapper(env, instruction, conversations)


def without_heading(observation: str) -> str:
    """Removes the heading "Observation:" or "Task Description:" from the start of an observation.
    ETO's and IPR's code writes such headings."""
    return re.sub(r"^(Observation|Task Description):\s*", "", observation)
