"""Lists all training methods (METHODS), and combines their settings in one class (Settings)."""

from dataclasses import dataclass

import coevolve
import evolve
from lab import baselines
from lab.chat import evaluate, explorer


@dataclass(frozen=True)
class Settings(evaluate.Chat, baselines.Baselines, explorer.Explorer, coevolve.Settings):
    """All settings of a run"""
    essential = (*evolve.Settings.essential, "explorer", "ppo_lr", "examples")
    presets = evolve.Settings.presets | {
        # This learning rate was chosen on the validation splits. The model tiny was not pretrained
        # on natural language, so it needs a higher learning rate than other models.
        "tiny": evolve.Settings.presets["tiny"] | dict(ppo_lr=1e-4),
        # These values are from our first runs on the built-in InterCodeSQL. They were not tuned on
        # a validation split. A run takes one to three hours on two CPU cores with 8 GB of memory.
        # With about a hundred expert trajectories, there are only a few optimiser steps. We
        # therefore use smaller batches and higher learning rates than the paper. The temperature is
        # 1 because the failures of a task then differ more from each other.
        "smollm2": dict(sft_epochs=2, sft_batch=8, sft_lr=1e-4, dpo_batch=16, dpo_lr=5e-6,
                        dpo_lr_later=2.5e-6, temperature=1.0, ppo_lr=5e-6, step_tasks=8,
                        step_rollouts=4, grpo_steps=20, grpo_lr=5e-6, start_tasks=25,
                        evolve_every=5, near_text=1.0),
        "quick smollm2": dict(train_tasks=8, eval_tasks=4, sft_batch=4),
        # The number of rollouts per task in each method. RFT uses 1: "As in the baselines, we
        # perform a single rollout per instruction" [Section 5.2.1]. DART uses n = 5 first rollouts
        # to estimate the difficulty of a task, and then adds more [Section 5.3]. PPO uses 4,
        # because it compares the rollouts of a task with each other [ours].
        "--method rft": dict(rollouts=1),
        "--method dart": dict(rollouts=5),
        "--method ppo": dict(rollouts=4),
        "--method evaluate": dict(temperature=0.0, rollouts=1),
        # "chat" applies if --model is an API endpoint. max_tokens limits the whole conversation. It
        # is set very high here, because the endpoint knows the context length of its model and
        # rejects longer conversations itself.
        "chat": dict(method="chat", temperature=0.0, rollouts=1, max_tokens=100_000),
    }

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        names = coevolve.Settings.preset_names(values)
        return [*names, "chat"] if evaluate.is_endpoint(values["model"]) else names


METHODS = coevolve.METHODS | explorer.METHODS | baselines.METHODS | evaluate.METHODS
