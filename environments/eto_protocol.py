"""How ETO's code (IPR's, on InterCodeSQL) talks to an agent: --protocol eto.

    Yifan-Song793/ETO   WebShop and ScienceWorld      (Song et al. 2024)
    WeiminXiong/IPR     WebShop and InterCodeSQL      (Xiong et al. 2024)

Their texts stay in the user's copy. An `EtoEnvironment` wraps an environment of ours: rules are a
turn of their own, examples come before the task, observations have a heading, an action is what
follows the first "Action: ". The table in environments/README.md has all.
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
    """The settings of an environment that ETO or IPR published something for."""
    # how an episode is told to an agent: by this project, or as ETO's code does (IPR's on
    # InterCodeSQL), with its lengths, stops, rates and rewards [ours]
    protocol: Literal["ours", "eto"] = "ours"
    # eto: folder of ETO's or IPR's prompts, eval_agent/prompt of their repository [-]
    prompts: OldFile = None

    def conflicts(self, s):
        eto = self.protocol == "eto"
        return [
            (eto != bool(self.prompts), "--protocol eto --prompts FOLDER",
             "give both; the folder is eval_agent/prompt of ETO's or IPR's repository"),
            (eto and (s.model == "tiny" or s.view == "short"), "--protocol eto",
             "the tiny model and --view short know this project's texts only; give --view full "
             "and another --model"),
            (eto and s.method in ("grpo", "evolve"), f"--protocol eto --method {s.method}",
             "its explorers know this project's texts only; leave out one of them")]


NO_ACTION = "Invalid format. The input must contains 'Action: '"  # as their environments answer
NO_SQL_ACTION = (
    "I don't understand your input.\n Your input shoud include the key world \"Action:\".\n If you "
    "want to perform a query operation, please use the following format:\n Action: \n```sql\nthe "
    "mysql code\n```. And the action should be executable and should not contain natural "
    "language.\n If you have got the final answer, please use the following format:\n Action: "
    "submit. Remember your output should contain only one \"Action:\" part.")


class EtoEnvironment:
    """An environment whose episodes run as in ETO's code; the rest is the inner environment's."""
    stops = ("\nObservation:", "\nTask:", "\n---")
    heading = "Observation: "
    no_action = NO_ACTION

    def __init__(self, inner: Environment, instruction: str, examples: list[list[dict]]):
        """
        Args:
            inner: The environment itself, by our own protocol.
            instruction: What an agent is told first.
            examples: Conversations that an agent is shown which plays.
        """
        self.inner = inner
        self.inner.action = self.action  # it reads replies as this one does
        self.instruction = instruction
        self.examples = examples

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def reset(self, task: str) -> str:
        return self.start(self.find(task))

    def start(self, what) -> str:
        return self.inner.start(what)

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """The instruction and "OK", the examples (which nobody is trained on), then the task."""
        turns = [{"role": "user", "content": self.instruction},
                 {"role": "assistant", "content": "OK"}]
        if not playing:
            return [*turns, {"role": "user", "content": bare(observation)}]
        for example in self.examples:
            turns += [dict(turn) for turn in example]
        return [*turns, {"role": "user", "content": observation}]

    def action(self, reply: str) -> str | None:
        """All that follows the first "Action: ", so the first of several actions; None without."""
        found = re.search(r"Action: (.*)", reply.strip(), re.S)
        return found[1] if found else None

    def step(self, reply: str) -> Step:
        if self.action(reply) is None:
            return self.without_action()
        step = self.inner.step(reply)
        return replace(step, observation=self.heading + step.observation)

    def without_action(self) -> Step:
        """What follows a reply in which there is no action."""
        return Step(f"Observation: {self.no_action}", 0.0, False, idle=True)

    def expert(self):
        """The inner environment's, which reads observations without their heading."""
        act = self.inner.expert()
        return lambda observation: act(bare(observation))


class EtoShop(EtoEnvironment):
    """WebShop, where one can search on every page."""
    heading = "Observation:\n"

    def __init__(self, *args):
        super().__init__(*args)
        self.inner.searches_everywhere = True


class EtoScienceWorld(EtoEnvironment):
    """ScienceWorld: a wrong first `focus on` scores -1, and a reply without an action forgets what
    had been reached."""

    def start(self, what) -> str:
        description = super().start(what)
        self.inner.reached = -1.0
        return f"Task Description:\n{description}"

    def without_action(self) -> Step:
        self.inner.reached = 0.0
        return super().without_action()


class EtoInterCodeSQL(EtoEnvironment):
    """InterCodeSQL in IPR's code: a negative reward stays as it is, and most error texts end with a
    line break. Replies are read as by our own protocol."""
    no_action = NO_SQL_ACTION

    def __init__(self, inner: Environment, *more):
        self.action = inner.action
        super().__init__(inner, *more)
        self.inner.error_end = "\n"

    def step(self, reply: str) -> Step:
        step = super().step(reply)
        if step.done:
            return replace(step, observation="submitted", reward=step.raw)
        return step


# name of an environment -> what wraps it, and how the folder's files call it
TOLD = {"webshop": (EtoShop, "webshop"), "scienceworld": (EtoScienceWorld, "sciworld"),
        "intercodesql": (EtoInterCodeSQL, "intercode_sql")}


def in_eto_protocol(env: Environment, folder: str, examples: int) -> EtoEnvironment:
    """Wraps an environment.

    Args:
        env: One of ours, by the full view.
        folder: A copy of ETO's or IPR's eval_agent/prompt.
        examples: How many of the folder's an agent is shown that plays.

    Raises:
        Refused: The folder lacks something.
    """
    wrapper, stem = TOLD[env.name]
    instruction_file = f"instructions/{stem}_inst.txt"
    examples_file = f"icl_examples/{stem}_icl.json"
    must = (f"ETO's or IPR's eval_agent/prompt, with a text in {instruction_file} and a JSON list "
            f"of {examples} conversations or more in {examples_file}")
    with reading(f"--prompts {folder}", must):
        instruction = Path(folder, instruction_file).read_text(encoding="utf-8")
        kept = read_json(Path(folder, examples_file))[:examples] if examples else []
        if len(kept) < examples:
            raise ValueError(f"{examples_file} has {len(kept)} conversations")
        for conversation in kept:
            for turn in conversation:
                text_in(turn["content"])
    return wrapper(env, instruction, kept)


def bare(observation: str) -> str:
    """Without what their code writes before it."""
    return re.sub(r"^(Observation|Task Description):\s*", "", observation)
