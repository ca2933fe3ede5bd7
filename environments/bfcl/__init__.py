"""BFCL: the multi-turn tasks of BFCL v3, on the simulators of the package bfcl-eval."""

import dataclasses
from typing import Literal

import environments


@dataclasses.dataclass(frozen=True)
class Options(environments.Options):
    # category of BFCL's multi-turn tasks, or "all" for the four of them [ours]
    bfcl_category: Literal["base", "miss_func", "miss_param", "long_context", "all"] = "base"
    # splits of a category: "ours" has 100 tasks for training, 20 for validation and 80 for testing;
    # "published" tests all 200, so that training and test tasks share start states [ours]
    bfcl_split: Literal["ours", "published"] = "ours"
    # reward: "all" is 1 if every turn passes BFCL's checks and otherwise 0, so that failures tie
    # and co-evolution has no pairs of failures; "turns" is the share of turns that pass
    # [BFCL; "turns" is ours]
    bfcl_reward: Literal["all", "turns"] = "all"

    presets = {
        # The opening of an episode has up to 29,000 characters.
        "": dict(max_tokens=16_384, max_new_tokens=1024, slots=16),
        # All episodes of the base category fit, and 128 tokens hold the longest reply of an expert.
        "smollm2": dict(iterations=1, train_tasks=40, eval_tasks=20, dpo_epochs=1, view="short",
                        bfcl_reward="turns", max_tokens=4096, max_new_tokens=128, slots=8,
                        gradient_checkpointing="on"),
        "quick": dict(train_tasks=20, eval_tasks=20),
    }

    def conflicts(self, s):
        return [(s.model == "tiny", "--model tiny",
                 "it cannot read the documents of functions; give another --model")]

    def make(self, view):
        from environments.bfcl.environment import Bfcl
        return Bfcl(view, self.bfcl_category, self.bfcl_split, self.bfcl_reward)
