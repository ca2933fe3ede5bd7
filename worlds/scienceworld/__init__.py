"""ScienceWorld, in its simulator."""

from dataclasses import dataclass
from typing import Literal, Optional

from worlds import option
from worlds.published import LISTS, Published


@dataclass(frozen=True)
class Options(Published):
    task_types: Literal["all", "short"] = option(
        "all", "task types: ETO's 24, or eight whose texts are short [ETO, ours]")
    split_file: Optional[str] = LISTS

    presets = {
        "": dict(expert_min_reward=1.0, slots=16),  # a slot has a simulator of its own
        "tiny": dict(iterations=2, task_types="short", max_tokens=1280, max_new_tokens=24, slots=4,
                     sft_epochs=10, sft_lr=1e-3, dpo_lr=1e-5, dpo_lr_later=1e-5, grpo_lr=5e-5),
        "smollm2": dict(iterations=2, train_tasks=60, eval_tasks=40, dpo_epochs=1,
                        task_types="short", max_tokens=3072, max_new_tokens=64, slots=8,
                        gradient_checkpointing="on"),
    }

    def make(self, view):
        from worlds.scienceworld.world import ScienceWorld
        return ScienceWorld(view, self.task_types, self.split_file)
