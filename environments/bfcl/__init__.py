"""BFCL v3 multi-turn, on the simulators of the package bfcl-eval."""

import dataclasses
from typing import Literal

import environments


@dataclasses.dataclass(frozen=True)
class Options(environments.Options):
    # category of BFCL's multi-turn tasks, or all four [ours]
    bfcl_category: Literal["base", "miss_func", "miss_param", "long_context", "all"] = "base"
    # ours: 100 tasks of a category train, 20 validate, 80 test; published: all 200 test, so that
    # start states of the training are among them [ours]
    bfcl_split: Literal["ours", "published"] = "ours"
    # all: 1 where every turn passes BFCL's checks, else 0, so that failures tie and co-evolution
    # has no pairs of failures; turns: the share of turns that pass [BFCL, ours]
    bfcl_reward: Literal["all", "turns"] = "all"

    presets = {
        # Openings have up to 29,000 characters.
        "": dict(max_tokens=16_384, max_new_tokens=1024, slots=16),
        # The base category fits whole, and 128 tokens hold the longest reply of a ground truth.
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
