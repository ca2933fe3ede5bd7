"""Every number of a run, once: its unit, its default and where the default comes from.

The defaults are the first paper's (arXiv 2511.22254) in `Common` to `Preferences`, the second's in
`Grpo`. `PRESETS`, and those of an environment's folder, replace some of them; a flag beats all. An
environment's own settings are stated in its folder and stand in `s.options`. Only the standard
library is imported, so that `run.sh` can refuse a mistyped flag before it installs anything.
"""

import argparse
import math
import operator
import os
import re
import shutil
import sys
import textwrap
from dataclasses import Field, asdict, dataclass, fields
from typing import Literal, Optional, get_args, get_origin, get_type_hints
from urllib.parse import unquote

from worlds import ENVIRONMENTS, Options, environment, is_web_address, without_passwords
from worlds import option as setting

METHODS = {
    "sft": "Eq. 3 only", "rft": "and again with sampled successes",
    "dart": "with more of them where it is hard", "ppo": "from sft on",
    "eto": "the loop without the failure agent",
    "positive": "the loop with a second positive agent in its place", "coevolve": "the paper",
    "grpo": "on a fixed set of tasks",
    "evolve": "on tasks that grow from the agent's weaknesses (arXiv 2604.15840)",
    "evaluate": "--model as it is", "chat": "an endpoint, only evaluated",
}
# Methods that train a second agent beside the target; the others train the target alone.
SECOND_AGENT = {"coevolve": "failure", "positive": "positive"}
EVOLVING = ("grpo", "evolve")  # methods of lab/mutual.py
SAMPLING = ("rft", "dart", "ppo")  # which play a task several times, and so never greedily
PREFERRING = ("eto", *SECOND_AGENT)
SIGNALS = ("forgetting", "boundary", "rare")


def is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def are_signals(text: str) -> bool:
    asked = text.split(",")
    return set(asked) <= set(SIGNALS) and len(set(asked)) == len(asked)


# Limits beside those of `worlds.option`. only: the methods that a setting is for. free: it changes
# nothing in the files of a run, rounding: nothing but rounding; both may change when it goes on.
# In brackets: the paper; ETO: its scripts; S, D: a summary of and notes on arXiv 2604.15840; AE:
# AgentEvolver's config, the likeliest for the rest of it; ours.


@dataclass(frozen=True)
class Common:
    """What runs, and on which data"""
    env: Literal[ENVIRONMENTS] = setting("webshop", "environment")
    method: Literal[tuple(METHODS)] = setting(
        "coevolve", "; ".join(f"{name}: {what}" for name, what in METHODS.items()))
    model: str = setting(
        "tiny", "hub name, folder, https://host/v1 (an endpoint), tiny or smollm2",
        like=lambda text: not is_endpoint(text) or is_web_address(text),
        form="http://host:port/path or https://host/path")
    seed: int = setting(0, "of everything random in the run", at_least=0)
    out: Optional[str] = setting(
        None, "the run's folder [runs/ENV-METHOD-sSEED, with --quick -quick]", free=True)
    reuse: Optional[str] = setting(
        None, "a run, or a folder of runs, whose equal experts and SFT agents are taken", free=True)
    experts: Optional[str] = setting(
        None, "file: ETO's JSON list, or a run's experts.jsonl [scripted experts]", file=True)
    dry_run: Optional[str] = setting(
        None, "print memory, tokens and hours, and stop: here, or a machine such as 8xH100")
    quick: bool = setting(False, "the same path, cut to about a minute with tiny")
    train_tasks: int = setting(
        0, "training instructions, 0 = all [Table 1: 1,624 on WebShop]", at_least=0)
    eval_tasks: int = setting(0, "tasks of each evaluated split, 0 = all [Table 1]", at_least=0)
    eval_splits: Literal["test", "validation"] = setting("test", "validation: for tuning")
    overlap: Literal["refuse", "drop", "keep"] = setting(
        "refuse", "evaluated tasks that are also trained on; drop: without their experts [ours]")
    expert_min_reward: float = setting(
        0.7, "experts at or below it are dropped; a reward of 1 stays [App. A]",
        at_least=0, at_most=1)
    view: Literal["full", "short"] = setting(
        "full", "short: observations without repeated text, for a very small model [ours]")
    max_tokens: int = setting(4096, "of a trajectory, which ends where they are full [ours]",
                              at_least=1)
    max_new_tokens: int = setting(256, "of one reply [ours]", at_least=1)
    slots: int = setting(32, "episodes side by side [ours]", at_least=1, rounding=True)


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning, Eq. (3)-(5)"""
    sft_epochs: int = setting(3, "passes over the experts [App. B]", at_least=1)
    sft_batch: int = setting(48, "trajectories per optimiser step [App. B]", at_least=1)
    sft_lr: float = setting(1e-5, "peak learning rate [App. B]", above=0)
    sft_warmup: float = setting(0.03, "share of steps of linear warm-up, then cosine [App. B]",
                                at_least=0, below=1)


@dataclass(frozen=True)
class Exploration:
    """Exploration: what agents play to learn from"""
    iterations: int = setting(3, "K [App. B: 3; 5 on InterCodeSQL]", at_least=1)
    rollouts: int = setting(1, "per instruction and agent [Section 5.2.1]", at_least=1)
    temperature: float = setting(0.7, "0 = greedy, as evaluation always is [ours]", at_least=0)
    too_long: Literal["drop", "cut"] = setting(
        "drop", "what filled max_tokens makes no pairs, or is used up to its last turn [ours]")


@dataclass(frozen=True)
class Preferences:
    """Pairs and preference optimisation, Eq. (6)-(9)"""
    dpo_epochs: int = setting(3, "passes over the pairs of an iteration [App. B]", at_least=1)
    dpo_batch: int = setting(32, "of batch_unit, per optimiser step [App. B]", at_least=1)
    batch_unit: Literal["pairs", "instructions"] = setting(
        "pairs", "what dpo_batch counts; an instruction's pairs stay together [App. B, ETO]")
    dpo_lr: float = setting(1e-6, "learning rate in iteration 1 [App. B; ETO]", above=0)
    dpo_lr_later: float = setting(5e-7, "in later iterations [App. B; ETO]", above=0)
    dpo_steps: int = setting(
        0, "optimiser steps of the target in each iteration; 0 = dpo_epochs [ours]", at_least=0)
    dpo_schedule: Literal["constant", "cosine"] = setting(
        "constant", "learning rate after the warm-up [ETO]")
    dpo_warmup: float = setting(0.1, "share of steps of warm-up [ETO]", at_least=0, below=1)
    beta: float = setting(0.1, "DPO's beta in iteration 1 [App. B; ETO]", above=0)
    beta_later: float = setting(0.5, "in later iterations [App. B; ETO]", above=0)
    lambda_dpo: float = setting(1.0, "weight of the DPO term of Eq. (9) [Section 4.3]", at_least=0)
    lambda_sft: float = setting(0.1, "weight of the SFT term of Eq. (9) [Section 4.3]", at_least=0)
    log_prob: Literal["sum", "mean"] = setting(
        "sum", "of a trajectory, over its action tokens [Eq. 2, 5, 7]")
    sft_term: Literal["sum", "mean"] = setting("sum", "of Eq. (9), over action tokens [as written]")
    reference: Literal["phase", "sft"] = setting(
        "phase", "pi_ref: the agent as it enters the phase, or after SFT [ETO]")
    normalise: Literal["pairs", "weights"] = setting(
        "pairs", "what a batch's loss is divided by: their number, or sum of weights [ours]")
    expert_beaten: Literal["swap", "drop"] = setting(
        "swap", "a prediction better than the expert is the chosen one, or no pair [Eq. 8, ETO]")
    pair_weights: Literal["instruction", "none"] = setting(
        "instruction", "an instruction's expert pairs share a weight of 1, or have 1 each [4.3]")
    d_fail: Literal["all", "cross", "buffer", "none"] = setting(
        "all", "all pairs of failures; target x failure agent (literal Eq. 6); over all iterations "
        "so far; none: the failure agent is frozen [Section 4.2]")
    failure_epochs: int = setting(
        0, "passes of the failure agent over its pairs; 0 = dpo_epochs [ours]", at_least=0,
        only=("coevolve",))
    d_tgt_failures: Literal["cross", "hard", "none"] = setting(
        "cross", "failure pairs: F_tgt x F_fail; those with a hard chosen one; none [Eq. 8]")
    hard_threshold: float = setting(0.6, "a failure of at least this reward is hard [Table 2]",
                                    at_least=0, at_most=1)
    cut_turns: int = setting(
        5, "rejected ones are cut at the expert's length + so many turns, -1 = off [ETO]",
        at_least=-1)
    rejected_ends: Literal["count", "leave out"] = setting(
        "count", "ends of turns and episode in a rejected log-probability [Eq. 7]")
    failure_from: Optional[str] = setting(
        None, "a run, whose last failure agent this one starts from [after SFT]",
        only=("coevolve",))
    explore_again: bool = setting(
        False, "D_tgt is made of new rollouts of the failure agent, after its training [ours]",
        only=tuple(SECOND_AGENT))
    margins: int = setting(
        10_000, "instructions whose pairs are measured after training, the hardest [ours]",
        at_least=0)


@dataclass(frozen=True)
class Baselines:
    """RFT, DART and PPO"""
    samples: int = setting(5, "rft, dart: rollouts per instruction, DART's n [Section 5.3; ours]",
                           at_least=1)
    dart_budget: int = setting(
        10, "dart: N; N x (share of failures) more rollouts of an instruction [Section 5.3]",
        at_least=0)
    ppo_rollouts: int = setting(4, "per instruction and iteration [ours]", at_least=2)
    ppo_epochs: int = setting(2, "passes over an iteration's episodes [ours]", at_least=1)
    ppo_batch: int = setting(16, "instructions per step, with all rollouts [ours]", at_least=1)
    ppo_lr: float = setting(1e-6, "learning rate, constant after dpo_warmup [ours]", above=0)
    ppo_clip: float = setting(0.2, "the ratio is clipped to 1 +- this [Schulman 2017]", above=0)
    ppo_kl: float = setting(0.05, "weight of the KL from the SFT policy [ours]", at_least=0)


@dataclass(frozen=True)
class Grpo:
    """GRPO, and tasks that evolve"""
    warm_start: Literal["sft", "none"] = setting("sft", "starts after SFT, or as it is [D: none]")
    start_from: Literal["explore", "train"] = setting(
        "explore", "start tasks: of unguided exploration [S], or of the training split [ours]")
    start_tasks: int = setting(100, "so many start tasks, at most [D]", at_least=1)
    grpo_steps: int = setting(120, "T, training steps [D]", at_least=1)
    evolve_every: int = setting(10, "E, steps between two evolutions of the tasks [D]", at_least=1)
    evaluate_every: int = setting(2, "evaluation after so many times E steps [D: 20]", at_least=1)
    step_tasks: int = setting(32, "B, tasks a step [D, AE]", at_least=1)
    step_rollouts: int = setting(8, "K, episodes of a task in a step [D, AE]", at_least=2)
    grpo_batch: int = setting(8, "tasks per optimiser step, B / 8 of them a step [AE]; equal "
                              "rewards are counted in, and left out [ours]", at_least=1)
    grpo_lr: float = setting(1e-6, "learning rate, constant [D, AE]", above=0)
    grpo_temperature: float = setting(0.9, "of training episodes [D, AE]", above=0)
    grpo_kl: float = setting(1e-3, "beta, weight of the KL to the first policy [D, AE]", at_least=0)
    clip_low: float = setting(0.2, "the ratio is clipped to 1 - this [AE]", above=0, below=1)
    clip_high: float = setting(0.28, "and to 1 + this [AE]", above=0)
    signals: str = setting("forgetting,boundary,rare", "that lead exploration [S]",
                           like=are_signals, form=f"some of {','.join(SIGNALS)}, each once")
    window: int = setting(5, "W, visits of a task that forgetting looks back on [ours]", at_least=1)
    rare_below: float = setting(2.0, "theta, percent of episodes: a pattern in fewer is rare "
                                "[ours]", above=0, at_most=100)
    rare_min: int = setting(1, "episodes that hold a rare pattern, at least [S; D: 2]", at_least=1)
    picks: int = setting(8, "picked signals of each kind, at most [ours]", at_least=1)
    guide: Literal["signals", "random"] = setting(
        "signals", "what it goes back to: picked signals [S], or as many tasks at random [D]")
    explorer: str = setting(
        "policy", "who explores: policy, the agent [ours], or https://host/v1 [D: Qwen3-Max]; "
        "aimed: the agent for start tasks, later nobody: what is picked is varied by script [ours]",
        like=lambda text: text in ("policy", "aimed") or is_web_address(text),
        form="policy, aimed or https://host/v1")
    explorer_model: Optional[str] = setting(None, "the explorer's name at its endpoint [-]")
    explorer_episodes: int = setting(6, "episodes of the explorer for a pick, or variations [ours]",
                                     at_least=1)
    explorer_temperature: float = setting(1.1, "of the explorer [ours; AE: 1]", above=0)
    add_most: int = setting(20, "tasks that join in one evolution, at most [ours]", at_least=0)
    near_text: float = setting(
        0.8, "a proposal's largest Jaccard share of words in common with an earlier one [AE]",
        above=0, at_most=1)
    verify: bool = setting(True, "proposed tasks join only if their solution replays [S]")
    solve_check: int = setting(0, "and if of so many plays the agent solves some and not all, 4 to "
                               "8 are sensible; 0 = not played [ours]", at_least=0)
    start_share: float = setting(0.0, "of a step's tasks that are start tasks, at least; 0: passes "
                                 "over all tasks [ours]", at_least=0, at_most=1)
    mastered: Literal["keep", "leave"] = setting(
        "keep", "added tasks whose last visit's episodes were all solved; leave: they leave [ours]")


@dataclass(frozen=True)
class Chat:
    """In-context models, --model https://..."""
    model_name: Optional[str] = setting(None, "the model's name at the endpoint [-]")
    examples: int = setting(
        1, "conversations shown first: of experts; with --protocol eto of its prompts [ETO; IPR: 0 "
        "on WebShop]", at_least=0, at_most=2)
    price_in: float = setting(0.0, "dollars per million tokens read, for the cost [-]", at_least=0)
    price_out: float = setting(0.0, "dollars per million tokens written [-]", at_least=0)


@dataclass(frozen=True)
class Machine:
    """Optimiser and machine"""
    weight_decay: float = setting(0.0, "AdamW's [ETO; in GRPO ours: verl's is 0.01]", at_least=0)
    max_grad_norm: float = setting(1.0, "gradient clipping [transformers' default]", above=0)
    tokens_per_forward: int = setting(
        0, "of a rank in one pass; 0: 16,384 on GPUs, 4,096 on CPUs and with tiny [ours]",
        at_least=0, rounding=True)
    bf16: Literal["auto", "on", "off"] = setting(
        "auto", "of passes; auto: where it is faster, from 10 M parameters on, not tiny [ours]")
    shard: Literal["auto", "on", "off"] = setting(
        "auto", "all that trains over the ranks (FSDP2); auto: on GPUs, not tiny [ours]",
        rounding=True)
    gradient_checkpointing: Literal["auto", "on", "off"] = setting(
        "auto", "layers are computed again in the backward pass; auto: as shard [ours]",
        rounding=True)
    checkpoint_minutes: float = setting(
        10, "between states inside a phase, at least 20 times what one takes; 0 = each step [ours]",
        at_least=0, free=True)
    answer_seconds: float = setting(300, "an endpoint's answer may take, all of it [ours]", above=0,
                                    free=True)
    answer_kb: float = setting(1000, "of an endpoint's answer, else the episode is lost [ours]",
                               above=0, free=True)
    track: Optional[str] = setting(
        None, "a tracker of accelerate too, such as tensorboard or wandb [files only]", free=True)
    threads: int = setting(0, "CPU threads of a process, 0 = its share of the cores [ours]",
                           at_least=0, at_most=1024, rounding=True)


GROUPS = {  # -> the methods that read them
    Common: tuple(METHODS),
    Sft: tuple(m for m in METHODS if m not in ("evaluate", "chat")),
    Exploration: (*SAMPLING, *PREFERRING),
    Preferences: PREFERRING,
    Baselines: SAMPLING,
    Grpo: EVOLVING,
    Chat: ("chat",),
    Machine: tuple(METHODS),
}


@dataclass(frozen=True)
class Settings(*reversed(GROUPS)):
    """All settings of a run, `s.beta`, and at `s.options` those of its environment."""
    options: Options = None

    def __post_init__(self):
        if self.options is None:
            object.__setattr__(self, "options", environment(self.env)())

    def flat(self) -> dict:
        """Every setting by its name, as config.json has them."""
        return {f.name: value for f, value in values_of(self)}


def values_of(s: Settings) -> list[tuple[Field, object]]:
    """Every field with its value, those of the environment last."""
    return [(f, getattr(part, f.name)) for part in (s, s.options) for f in fields(part)
            if f.name != "options"]


def from_flat(**values) -> Settings:
    """Settings of what `Settings.flat` gave; what is missing has its default."""
    kind = environment(values.get("env", Settings.env))
    own = {f.name: values.pop(f.name) for f in fields(kind) if f.name in values}
    return Settings(**values, options=kind(**own))


FREE = tuple(f.name for f in fields(Settings) if f.metadata.get("free"))
ROUNDING = tuple(f.name for f in fields(Settings) if f.metadata.get("rounding"))
# Experts, SFT agents and their evaluations depend on none of these; on any other setting they may.
AFTER_SFT = ("method", *FREE, *(f.name for group in (Exploration, Preferences, Baselines, Grpo)
                                for f in fields(group)))

# What replaces the defaults of all environments. An environment's folder has presets of its own by
# the same names and "", for all runs in it; they come after these. In this order: "", the model,
# the protocol, both, "quick", "quick MODEL", "aimed", "chat".
PRESETS = {
    # Tuned on the validation splits; it starts from nothing and so needs larger steps.
    "tiny": dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1, lambda_sft=0.5,
                 ppo_lr=1e-4, step_tasks=16, near_text=1.0),
    # As in a first trial on the databases, not tuned on a validation split yet; for one or three
    # hours on two cores and 8 GB. A hundred experts make few steps, so batches are smaller than the
    # paper's and steps go further. At temperature 1 failures differ more.
    "smollm2": dict(sft_epochs=2, sft_batch=8, sft_lr=1e-4, dpo_batch=16, dpo_lr=5e-6,
                    dpo_lr_later=2.5e-6, temperature=1.0, ppo_lr=5e-6, step_tasks=8,
                    step_rollouts=4, grpo_steps=20, grpo_lr=5e-6, start_tasks=25, evolve_every=5,
                    near_text=1.0, margins=20),
    # ETO's and IPR's scripts and agent configurations.
    "eto": dict(max_new_tokens=512, temperature=0.0, sft_lr=2e-5),
    "quick": dict(train_tasks=120, eval_tasks=40, iterations=1, sft_epochs=1, dpo_epochs=1,
                  grpo_steps=4, evolve_every=2, evaluate_every=1, start_tasks=12),
    "quick tiny": dict(train_tasks=60, eval_tasks=60, rollouts=2, iterations=2, dpo_epochs=2,
                       sft_epochs=3),
    "quick smollm2": dict(train_tasks=8, eval_tasks=4, sft_batch=4),
    "aimed": dict(rare_min=2, start_share=0.5, mastered="leave"),
    "chat": dict(method="chat", max_tokens=100_000),  # with the examples; the endpoint knows better
}


def options_of(s: Settings) -> dict:
    """What `envs.make` takes beside the environment's name and the view."""
    return dict(asdict(s.options), examples=s.examples)


def agents_of(method: str) -> tuple[str, ...]:
    return ("target", SECOND_AGENT[method]) if method in SECOND_AGENT else ("target",)


def tokens_per_forward(s: Settings, gpu: bool) -> int:
    """Where the setting leaves it to the machine; the tiny model computes alike everywhere."""
    return s.tokens_per_forward or (16_384 if gpu and s.model != "tiny" else 4096)


def segments_of(s: Settings) -> int:
    """Of lab/mutual.py: GRPO between two evolutions, `evolve_every` steps or, at the end, fewer."""
    return -(-s.grpo_steps // s.evolve_every)


def start_episodes(s: Settings) -> int:
    """Of the unguided exploration; of the agent's one in six becomes a new task or more [ours]."""
    return s.start_tasks * (1 if is_endpoint(s.explorer) else 6)


class SettingsError(ValueError):
    """A flag that does not exist or a value that cannot be; the text is one line for the user."""

    def __init__(self, text: str):
        super().__init__(without_passwords(text))


LARGEST = 1e15  # of a number, so that none overflows later [ours]
BOUNDS = (("at_least", "at least", operator.ge), ("at_most", "at most", operator.le),
          ("above", "above", operator.gt), ("below", "below", operator.lt))


def check(s: Settings) -> Settings:
    """`s` itself, or SettingsError naming every impossible value and what is possible."""
    wrong = [f"{flag(f.name)} {value!r}: {problem}" for f, value in values_of(s)
             if (problem := out_of_bounds(f, value, s))]
    wrong += [f"{flags}: {problem}" for holds, flags, problem
              in (*conflicts(s), *s.options.conflicts(s)) if holds]
    if wrong:
        raise SettingsError("; ".join(wrong))
    return s


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def out_of_bounds(f: Field, value, s: Settings) -> str | None:
    """What is wrong with the value of one field, by its own limits; None if nothing is."""
    limits = f.metadata
    if value != f.default and s.method not in (only := limits.get("only", METHODS)):
        return f"is for --method {' or '.join(only)}, not for {s.method}"
    if isinstance(value, str) and not value.strip():
        return "is empty; give it a value or leave it out"
    if isinstance(value, str) and "like" in limits and not limits["like"](value):
        return f"must be {limits['form']}"
    if value and limits.get("real") and s.model == "tiny":
        return "the tiny model knows the built-in environment's words only; give another --model"
    if isinstance(value, (str, bool)) or value is None:
        return None
    bounds = [(words, limits[name], holds) for name, words, holds in BOUNDS if name in limits]
    if not (math.isfinite(value) and value < LARGEST):
        bounds.append(("below", LARGEST, operator.lt))
    if all(holds(value, limit) for _, limit, holds in bounds):
        return None
    return "must be " + " and ".join(f"{words} {limit:g}" for words, limit, _ in bounds)


def conflicts(s: Settings) -> list[tuple[bool, str, str]]:
    """(whether it is so, flags, what is wrong) for settings that do not go together."""
    return [
        (bool(s.dry_run) and (s.model == "tiny" or s.method in (*SAMPLING, "evaluate", "chat")),
         "--dry-run", "plans sft, eto, positive, coevolve, grpo and evolve; give one of them as "
         "--method, and another --model than tiny"),
        (is_endpoint(s.model) != (s.method == "chat"), f"--model {s.model} --method {s.method}",
         "an endpoint needs --method chat, and chat an endpoint"),
        (s.method == "chat" and not s.model_name, "--model-name",
         "give the model's name at the endpoint"),
        (s.temperature == 0 and (s.rollouts > 1 or s.method in SAMPLING),
         "--temperature 0", "all rollouts of an instruction would be the same; raise it"),
        (s.lambda_dpo == 0 and s.lambda_sft == 0, "--lambda-dpo 0 --lambda-sft 0",
         "nothing would be trained; raise one"),
        (is_endpoint(s.explorer) and not s.explorer_model, "--explorer-model",
         "give the explorer's name at its endpoint"),
        (s.solve_check == 1, "--solve-check 1",
         "one play is solved never or always; give 0, or 2 and more"),
        (s.method == "evolve" and s.grpo_steps <= s.evolve_every, f"--grpo-steps {s.grpo_steps}",
         f"the tasks would never evolve; give more than --evolve-every {s.evolve_every}"),
        (s.max_new_tokens >= s.max_tokens, f"--max-new-tokens {s.max_new_tokens}",
         f"must be below --max-tokens {s.max_tokens}")]


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations or help, which raises SettingsError."""

    def __init__(self):
        super().__init__(add_help=False, allow_abbrev=False)

    def add(self, f: Field, hint) -> None:
        """Adds a field's flag, spelled with - or with _."""
        more = {"choices": get_args(hint)} if get_origin(hint) is Literal else {
            "type": {bool: _boolean, Optional[str]: str}.get(hint, hint)}
        if hint is bool:
            more.update(nargs="?", const=True)
        self.add_argument(*dict.fromkeys((flag(f.name), f"--{f.name}")), default=f.default, **more)

    def error(self, message: str):
        raise SettingsError(message)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() in ("true", "1", "yes")


def preset(argv: list[str]) -> dict:
    """The values of PRESETS that stand in for the defaults, by what `argv` says."""
    first, hints = Parser(), get_type_hints(Settings)
    for f in fields(Settings):
        if f.name in ("env", "model", "method", "quick", "explorer"):
            first.add(f, hints[f.name])
    first.add_argument("--protocol", default="ours")
    seen = first.parse_known_args(argv)[0]
    names = ["", seen.model, seen.protocol, f"{seen.model} {seen.protocol}"]
    names += ["quick", f"quick {seen.model}"] if seen.quick else []
    names += [seen.explorer, *(["chat"] if is_endpoint(seen.model) else [])]
    values, own = dict(env=seen.env), environment(seen.env).presets
    for name in names:
        values |= PRESETS.get(name, {}) | own.get(name, {})
    if seen.method in SAMPLING and values.get("temperature") == 0:
        del values["temperature"]
    return values


def read(argv: list[str]) -> Settings:
    """Settings from the command line, not checked but for their types."""
    parser, presets = Parser(), preset(argv)
    kind = environment(presets["env"])
    hints = get_type_hints(Settings) | get_type_hints(kind)
    for f in (*fields(Settings), *fields(kind)):
        if f.name != "options":
            parser.add(f, hints[f.name])
    parser.set_defaults(**presets)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0].replace("_", "-")
        its = [e for e in ENVIRONMENTS if name in {flag(f.name) for f in fields(environment(e))}]
        raise SettingsError(f"{name} is for {' and '.join(its)}, not for {values.env}" if its
                            else f"unknown: {' '.join(unknown)}; --help lists every setting")
    for f in fields(kind):  # settings are logged: no password in them
        variable, address = f.metadata.get("password"), getattr(values, f.name)
        if variable and (parts := re.fullmatch(r"(.+?//[^:@]+):([^@/\s]*)(@[^@]+)", address or "")):
            setattr(values, f.name, parts[1] + parts[3])
            os.environ[variable] = unquote(parts[2])
    return from_flat(**vars(values))


def parse(argv: list[str]) -> Settings:
    """Settings from the command line; SettingsError, one line, if something is wrong with it."""
    return check(read(argv))


def usage(argv: list[str]) -> str:
    """What --help prints: the groups that the chosen method reads, and where the others are."""
    s = read([word for word in argv if word not in ("-h", "--help")])
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    shown, hidden = [f"bash run.sh {s.env} [settings]: settings, their values here and what they "
                     "are [source]"], []
    for group, methods in {type(s.options): tuple(METHODS), **GROUPS}.items():
        title = f"Of {s.env} alone" if group is type(s.options) else group.__doc__
        if s.method not in methods:
            hidden.append(f"{title}: --method {'|'.join(methods)} --help")
            continue
        shown += ["", title]
        for f, value in values_of(s):
            if f.name in {own.name for own in fields(group)}:
                was = f" ({f.default})" * (value != f.default)
                what = f.metadata["help"] + "; changes rounding only" * (f.name in ROUNDING)
                shown += textwrap.wrap(f"  {flag(f.name)} {value}{was}: {what}", width,
                                       subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join([*shown, "", *hidden, "In parentheses: the default, where this environment, "
                      "the model or a flag replaces it."])


if __name__ == "__main__":
    try:
        if {"-h", "--help"} & {*sys.argv}:
            print(usage(sys.argv[1:]))
        else:
            parse(sys.argv[1:])
    except SettingsError as error:
        sys.exit(f"run.sh: {error}")  # run.sh turns every failure into exit status 2
