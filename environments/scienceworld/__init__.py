"""Settings of the environment ScienceWorld, which uses the ScienceWorld package's simulator."""

from dataclasses import dataclass
from typing import Literal

from common.settings import OldFile
from environments.eto_protocol import ProtocolOptions


@dataclass(frozen=True)
class Options(ProtocolOptions):
    # Task types: "all" for the 24 types that ETO uses, or "short" for the 8 types with short texts
    # [ETO]
    task_types: Literal["all", "short"] = "all"
    # Folder of ETO's task lists [the first variations of each split of the simulator]
    split_file: OldFile = None

    presets = {
        "": dict(expert_min_reward=1.0, slots=16),  # every slot has its own simulator
        # sft_epochs, train_tasks: We chose these values on the validation split with seeds 0 to 2.
        # Of three candidates, they give the highest success rate after SFT, and agents can still
        # improve after SFT. The success rates after SFT, and the fractions of hard negatives among
        # the failures, are:
        #     these values (100 expert trajectories, 10 epochs): 0.22 to 0.27, and 32%
        #     60 expert trajectories instead: 0.18 to 0.27, and 27% to 36%
        #     4 epochs instead: 0.12 to 0.22, and 38%
        #
        # lambda_sft: We tried 0.1, 0.5 and 1. The default of 0.1 gives the highest validation
        # reward (docs/studies.md).
        "tiny": dict(iterations=2, train_tasks=100, task_types="short", max_tokens=1280,
                     max_new_tokens=24, slots=4, sft_epochs=10, sft_lr=1e-3,
                     dpo_lr=1e-5, dpo_lr_later=1e-5, grpo_lr=5e-5),
        "smollm2": dict(iterations=2, train_tasks=60, eval_tasks=40, dpo_epochs=1,
                        task_types="short", max_tokens=3072, max_new_tokens=64, slots=8,
                        gradient_checkpointing="on"),
        # A short run spends most of its time in the simulators. Each simulator needs a few seconds
        # to warm up. After the warm-up, an episode takes about a third of a second.
        "quick tiny": dict(train_tasks=16, eval_tasks=8, iterations=1, slots=2),
    }

    def make(self, view):
        from environments.scienceworld.environment import ScienceWorld
        return ScienceWorld(view, self.task_types, self.split_file)
