"""The settings of the careful run beside those of the methods, and which method reads which."""

from dataclasses import dataclass
from typing import Literal, Optional

import coevolve
import evolve
from lab import baselines, chat, explorer
from lab.overlap import Overlap
from lab.studies import near_misses
from worlds.flags import Free, OldFile, Weight, Whole


@dataclass(frozen=True)
class Careful:
    """What the careful run adds"""
    quick: bool = False                  # the same path, cut to about a minute with tiny
    reuse: Free[OldFile] = None          # a run or a folder of runs, whose equal phases are taken
    margins: Whole = 10_000              # instructions whose pairs are measured, the hardest [ours]
    fast: Free[Literal["auto", "off"]] = "auto"  # packed passes and a cache, where they are right
    # between states inside a phase, at least 20 times what writing one takes; 0 = each step [ours]
    checkpoint_minutes: Free[Weight] = 10.0
    # a tracker of accelerate too, such as tensorboard or wandb [files only]
    track: Free[Optional[str]] = None
    threads: Free[Whole] = 0             # CPU threads of a process, 0 = its share of the cores


@dataclass(frozen=True)
class Settings(Careful, chat.Chat, baselines.Baselines, explorer.Explorer, coevolve.Settings):
    """All settings of a run."""
    presets = evolve.Settings.presets | {
        # Tuned on the validation splits; it starts from nothing and so needs larger steps.
        "tiny": evolve.Settings.presets["tiny"] | dict(ppo_lr=1e-4, slots=64),
        # As in a first trial on the databases, not tuned on a validation split yet; for one or
        # three hours on two cores and 8 GB. A hundred experts make few steps, so batches are
        # smaller than the paper's and steps go further. At temperature 1 failures differ more.
        "smollm2": dict(sft_epochs=2, sft_batch=8, sft_lr=1e-4, dpo_batch=16, dpo_lr=5e-6,
                        dpo_lr_later=2.5e-6, temperature=1.0, ppo_lr=5e-6, step_tasks=8,
                        step_rollouts=4, grpo_steps=20, grpo_lr=5e-6, start_tasks=25,
                        evolve_every=5, near_text=1.0, margins=20),
        "quick": dict(train_tasks=120, eval_tasks=40, iterations=1, sft_epochs=1, dpo_epochs=1,
                      grpo_steps=4, evolve_every=2, evaluate_every=1, start_tasks=12),
        "quick tiny": dict(train_tasks=60, eval_tasks=60, rollouts=2, iterations=2, dpo_epochs=2,
                           sft_epochs=3),
        "quick smollm2": dict(train_tasks=8, eval_tasks=4, sft_batch=4),
        "evaluate": dict(temperature=0.0, rollouts=1),
        # With the examples; the endpoint knows better what it can read.
        "chat": dict(method="chat", temperature=0.0, rollouts=1, max_tokens=100_000),
    }

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        names = evolve.Settings.preset_names(values)
        names += ["quick", f"quick {values['model']}"] if values["quick"] else []
        names += ["chat"] if chat.is_endpoint(values["model"]) else (  # "eto" is a protocol's
            ["evaluate"] if values["method"] == "evaluate" else [])
        return names


# method -> its loop, and what it reads
METHODS = {name: (loop, (*reads, Careful, Overlap)) for name, (loop, reads) in (
    coevolve.METHODS | explorer.METHODS | baselines.METHODS | near_misses.METHODS
    | chat.METHODS).items()}
