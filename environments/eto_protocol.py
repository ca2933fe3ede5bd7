"""Runs episodes in the same way as the code of ETO or IPR (--protocol eto).

WebShop and ScienceWorld follow the code of ETO (Yifan-Song793/ETO, Song et al. 2024). InterCodeSQL
follows the code of IPR (WeiminXiong/IPR, Xiong et al. 2024). The prompts are read from the user's
copy of one of these repositories. The table in environments/README.md lists all differences from
our own protocol.
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
    """Settings of the environments of ETO and IPR."""
    # Prompt, messages, rules, stop strings and rewards of the episodes: "ours" for those of this
    # project, or "eto" for those of ETO's code (or IPR's code in InterCodeSQL). "eto" also changes
    # the defaults of lengths, learning rate and temperature to match that code [ours]
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

    def in_protocol(self, env, examples):
        if self.protocol == "ours":
            return env
        wrapper, stem = WRAPPERS[env.name]
        instruction_file = f"instructions/{stem}_inst.txt"
        examples_file = f"icl_examples/{stem}_icl.json"
        must = (f"ETO's or IPR's eval_agent/prompt, with a text in {instruction_file} and a JSON "
                f"list of {examples} conversations or more in {examples_file}")
        with reading(f"--prompts {self.prompts}", must):
            instruction = Path(self.prompts, instruction_file).read_text(encoding="utf-8")
            conversations = []
            if examples:
                conversations = read_json(Path(self.prompts, examples_file))[:examples]
            if len(conversations) < examples:
                raise ValueError(f"{examples_file} has {len(conversations)} conversations")
            for conversation in conversations:
                for message in conversation:
                    text_in(message["content"])
        return wrapper(env, instruction, conversations)


class EtoEnvironment:
    """Wraps one of our environments so that its episodes are the same as in ETO's code.

    Args:
        inner: The environment to wrap. Attributes that this class does not define are read from it.
        instruction: The first message to the agent, which states the rules.
        examples: The example conversations. The prompt contains them when the agent acts, but not
            when it is trained.
    """
    stops = ("\nObservation:", "\nTask:", "\n---")
    heading = "Observation: "
    # ETO's observation after a reply without an action, copied verbatim
    no_action = "Invalid format. The input must contains 'Action: '"

    def __init__(self, inner: Environment, instruction: str, examples: list[list[dict]]):
        self.inner = inner
        self.inner.action = self.action  # makes the inner `step` parse replies as in ETO's code
        self.instruction = instruction
        self.examples = examples

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def reset(self, task: str) -> str:
        # Do not call inner.reset, because it would call inner.start instead of self.start.
        return self.start(self.find(task))

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """Returns the first messages of an episode: the instruction, the reply "OK", the example
        conversations and the task. In training, the examples and the task's heading are left out.
        """
        messages = [{"role": "user", "content": self.instruction},
                    {"role": "assistant", "content": "OK"}]
        if not playing:
            return [*messages, {"role": "user", "content": without_heading(observation)}]
        for example in self.examples:
            messages += [dict(message) for message in example]
        return [*messages, {"role": "user", "content": observation}]

    def action(self, reply: str) -> str | None:
        """Returns all text after the first "Action: ", as in ETO's code. If a reply contains
        several actions, the text contains all of them."""
        match = re.search(r"Action: (.*)", reply.strip(), re.S)
        return match[1] if match else None

    def step(self, reply: str) -> Step:
        if self.action(reply) is None:
            return self.without_action()
        step = self.inner.step(reply)
        return replace(step, observation=self.heading + step.observation)

    def without_action(self) -> Step:
        return Step(f"Observation: {self.no_action}", 0.0, False, idle=True)

    def expert(self):
        act = self.inner.expert()
        return lambda observation: act(without_heading(observation))


class EtoShop(EtoEnvironment):
    """Wraps WebShop. The agent may search on every page, as in ETO's code."""
    heading = "Observation:\n"

    def __init__(self, *args):
        super().__init__(*args)
        self.inner.searches_everywhere = True


class EtoScienceWorld(EtoEnvironment):
    """Wraps ScienceWorld. The reward is the highest score so far.

    The highest score starts at -1, so a wrong `focus on` as the first action gives reward -1. A
    reply without an action resets the highest score to 0.
    """

    def start(self, task) -> str:
        description = self.inner.start(task)
        self.inner.reached = -1.0
        return f"Task Description:\n{description}"

    def without_action(self) -> Step:
        self.inner.reached = 0.0
        return super().without_action()


class EtoInterCodeSQL(EtoEnvironment):
    """Wraps InterCodeSQL. The reward can be negative, and most error messages end with a newline.

    The action is parsed as in our own protocol.
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


# {name of an environment: (wrapper class, start of the names of its files in the prompt folder)}
WRAPPERS = {"webshop": (EtoShop, "webshop"), "scienceworld": (EtoScienceWorld, "sciworld"),
            "intercodesql": (EtoInterCodeSQL, "intercode_sql")}


def without_heading(observation: str) -> str:
    """Removes the heading that ETO's and IPR's code writes before an observation."""
    return re.sub(r"^(Observation|Task Description):\s*", "", observation)
