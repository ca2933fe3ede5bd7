"""Settings of the environment AppWorld: an agent writes Python code that calls the APIs of a
person's apps."""

import dataclasses
from typing import Literal

import environments
from common.settings import OldFile


@dataclasses.dataclass(frozen=True)
class Options(environments.Options):
    # Folder that contains AppWorld's official `data` [a small AppWorld, made on first use]
    appworld_root: OldFile = None
    # Reward of an episode: "all" is 1 if all tests of the task pass (task goal completion, TGC) and
    # otherwise 0; "tests" is the fraction of tests that pass [AppWorld; AgentEvolver has both]
    appworld_reward: Literal["all", "tests"] = "all"

    presets = {
        # max_tokens is 4,000 tokens for the prompt plus 21,580 for the response [AgentEvolver].
        "": dict(max_tokens=25_580, max_new_tokens=1024, slots=8),
        # max_tokens is the context length of SmolLM2. The episodes of the small AppWorld fit into
        # 8,192 tokens, and the expert's replies in the small AppWorld have at most 200 tokens.
        "smollm2": dict(iterations=1, train_tasks=40, eval_tasks=20, dpo_epochs=1, max_tokens=8192,
                        max_new_tokens=200, slots=8, gradient_checkpointing="on"),
        "quick": dict(train_tasks=20, eval_tasks=20),
    }

    def conflicts(self, s):
        return [(s.model == "tiny", "--model tiny",
                 "it cannot write programs; give another --model")]

    @staticmethod
    def scenario(task: str) -> str | None:
        return task.rpartition("_")[0] or None  # tasks created during training have no scenario

    def make(self, view):
        from environments.appworld.environment import AppWorld
        return AppWorld(view, self.appworld_root, self.appworld_reward)
