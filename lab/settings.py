"""The settings of all methods, and which method reads which."""

from dataclasses import dataclass

import coevolve
import evolve
from lab import baselines
from lab.chat import evaluate, explorer


@dataclass(frozen=True)
class Settings(evaluate.Chat, baselines.Baselines, explorer.Explorer, coevolve.Settings):
    """Every setting of a run"""
    essential = (*evolve.Settings.essential, "explorer", "ppo_lr", "examples")
    presets = evolve.Settings.presets | {
        # Tuned on the validation splits; it starts from nothing and so needs larger steps.
        "tiny": evolve.Settings.presets["tiny"] | dict(ppo_lr=1e-4),
        # As in a first trial on the databases, not tuned on a validation split yet; for one or
        # three hours on two cores and 8 GB. A hundred experts make few steps, so batches are
        # smaller than the paper's and steps go further. At temperature 1 failures differ more.
        "smollm2": dict(sft_epochs=2, sft_batch=8, sft_lr=1e-4, dpo_batch=16, dpo_lr=5e-6,
                        dpo_lr_later=2.5e-6, temperature=1.0, ppo_lr=5e-6, step_tasks=8,
                        step_rollouts=4, grpo_steps=20, grpo_lr=5e-6, start_tasks=25,
                        evolve_every=5, near_text=1.0),
        "quick smollm2": dict(train_tasks=8, eval_tasks=4, sft_batch=4),
        # Rollouts of a task: DART's n is 5, RFT's and PPO's are ours.
        # "As in the baselines, we perform a single rollout per instruction" [Section 5.2.1]; more
        # samples are what DART adds, with n = 5 [Section 5.3].
        "--method rft": dict(rollouts=1),
        "--method dart": dict(rollouts=5),
        "--method ppo": dict(rollouts=4),
        "--method evaluate": dict(temperature=0.0, rollouts=1),
        # With the examples; the endpoint knows better what it can read.
        "chat": dict(method="chat", temperature=0.0, rollouts=1, max_tokens=100_000),
    }

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        names = coevolve.Settings.preset_names(values)
        return [*names, "chat"] if evaluate.is_endpoint(values["model"]) else names


METHODS = coevolve.METHODS | explorer.METHODS | baselines.METHODS | evaluate.METHODS
