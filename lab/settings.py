"""The settings of all methods, and the settings that each method reads."""

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
        # The rate was chosen on the validation splits. Tiny was not pretrained on natural language,
        # so it needs larger steps.
        "tiny": evolve.Settings.presets["tiny"] | dict(ppo_lr=1e-4),
        # These values are from the first runs on the built-in InterCodeSQL, and were not tuned on a
        # validation split. A run takes one to three hours on two cores with 8 GB. A hundred expert
        # trajectories make only a few optimiser steps, so batches are smaller than the paper's and
        # learning rates are higher. At temperature 1, failures of a task differ more.
        "smollm2": dict(sft_epochs=2, sft_batch=8, sft_lr=1e-4, dpo_batch=16, dpo_lr=5e-6,
                        dpo_lr_later=2.5e-6, temperature=1.0, ppo_lr=5e-6, step_tasks=8,
                        step_rollouts=4, grpo_steps=20, grpo_lr=5e-6, start_tasks=25,
                        evolve_every=5, near_text=1.0),
        "quick smollm2": dict(train_tasks=8, eval_tasks=4, sft_batch=4),
        # Rollouts per task: "As in the baselines, we perform a single rollout per instruction"
        # [Section 5.2.1], so RFT has one. DART adds more samples, and estimates the difficulty from
        # n = 5 [Section 5.3]. PPO has four [ours], because it compares the rollouts of a task.
        "--method rft": dict(rollouts=1),
        "--method dart": dict(rollouts=5),
        "--method ppo": dict(rollouts=4),
        "--method evaluate": dict(temperature=0.0, rollouts=1),
        # Prompts contain examples, so they are long. The limit is high, because the endpoint knows
        # the context length of its model, and refuses a conversation that is longer.
        "chat": dict(method="chat", temperature=0.0, rollouts=1, max_tokens=100_000),
    }

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        names = coevolve.Settings.preset_names(values)
        return [*names, "chat"] if evaluate.is_endpoint(values["model"]) else names


METHODS = coevolve.METHODS | explorer.METHODS | baselines.METHODS | evaluate.METHODS
