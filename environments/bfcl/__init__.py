"""Settings of the environment BFCL.

The environment contains the multi-turn tasks of BFCL v3 (Berkeley Function Calling Leaderboard).
The tasks run on the simulators of the package bfcl-eval.
"""

import dataclasses
from typing import Literal

import environments


@dataclasses.dataclass(frozen=True)
class Options(environments.Options):
    # Category of BFCL's multi-turn tasks, or "all" for all four categories [ours]
    bfcl_category: Literal["base", "miss_func", "miss_param", "long_context", "all"] = "base"
    # Splits of the 200 tasks in a category: "ours" uses 100 tasks for training, 20 for validation
    # and 80 for testing; "published" uses all 200 for testing, including the 100 training tasks and
    # the 20 validation tasks [ours]
    bfcl_split: Literal["ours", "published"] = "ours"
    # Reward of an episode: "all" is 1 if every turn passes BFCL's checks, and otherwise 0. "turns"
    # is the fraction of turns that pass. With "all", every failure has reward 0, so co-evolution
    # cannot form pairs of failures [BFCL]
    bfcl_reward: Literal["all", "turns"] = "all"

    presets = {
        # The opening messages of an episode contain up to 29,000 characters, so an episode with its
        # replies needs more tokens than the default of max_tokens.
        "": dict(max_tokens=16_384, max_new_tokens=1024, slots=16),
        # All episodes of the category "base" fit into 4,096 tokens. The longest reply of the
        # scripted expert fits into 128 tokens.
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
