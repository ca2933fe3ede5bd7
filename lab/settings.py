"""The settings of the careful run beside those of the methods, and which method reads which."""

from dataclasses import dataclass
from typing import Literal, Optional

import coevolve
import evolve
from common.settings import Free, OldFile, Weight, Whole
from lab import baselines
from lab.careful.overlap import Overlap
from lab.chat import evaluate, explorer


@dataclass(frozen=True)
class Careful:
    """The careful run: what a week of runs needs"""
    # The same path, cut to about a minute with tiny
    quick: bool = False
    # A run, or a folder of runs, whose phases are taken over where they were made alike [none]
    reuse: Free[OldFile] = None
    # Tasks whose pairs are measured after training, those with the hardest failures first [ours]
    margins: Whole = 10_000
    # Whether packed passes and a cache are used, where they give the same numbers [ours]
    fast: Free[Literal["auto", "off"]] = "auto"
    # Minutes between two states inside a phase, from which it goes on after a stop; at least 20
    # times what writing one takes, but for 0, which is each step [ours]
    checkpoint_minutes: Free[Weight] = 10.0
    # After so many steps of a training that is still to be made the agent is saved as it is then,
    # beside the one that the phase makes, as NAME-step20; 0 is never [ours]
    save_every: Free[Whole] = 0
    # A tracker of accelerate that gets all numbers, such as tensorboard or wandb [files alone]
    track: Free[Optional[str]] = None
    # The threads of a process on a CPU; 0 is its share of the cores
    threads: Free[Whole] = 0


@dataclass(frozen=True)
class Settings(Careful, evaluate.Chat, baselines.Baselines, explorer.Explorer,
               coevolve.Settings):
    """Every setting of a run"""
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
        if values["quick"]:
            names += ["quick", f"quick {values['model']}"]
        if evaluate.is_endpoint(values["model"]):
            names.append("chat")
        elif values["method"] == "evaluate":  # "eto", another method, is a protocol's name too
            names.append("evaluate")
        return names


def methods_of_all() -> dict:
    """name -> the method, of all that there are; each reads the careful run's settings, too."""
    found = {}
    for methods in (coevolve.METHODS, explorer.METHODS, baselines.METHODS, evaluate.METHODS):
        for name, method in methods.items():
            found[name] = method._replace(reads=(*method.reads, Careful, Overlap))
    return found


METHODS = methods_of_all()
