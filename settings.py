"""Every number of a run, once: its unit, its default and where the default comes from.

The defaults are the paper's (arXiv 2511.22254). `PRESETS` replaces some of them for the tiny
model, which starts from nothing and so needs larger steps; a flag on the command line beats both.
Only the standard library is imported here, so that `run.sh` can refuse a mistyped flag with
`python3 settings.py FLAGS` before it installs anything.
"""

import argparse
import math
import os
import re
import sys
from dataclasses import dataclass, field, fields
from typing import Literal, Optional, get_args, get_origin, get_type_hints
from urllib.parse import unquote, urlsplit


def setting(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    # What runs
    env: Literal["webshop", "scienceworld", "intercodesql"] = setting("webshop", "environment")
    method: Literal["sft", "rft", "dart", "ppo", "eto", "positive", "coevolve", "evaluate",
                    "chat"] = setting(
        "coevolve", "sft: Eq. 3 only; rft: and again with sampled successes; dart: more of them "
        "where it is hard; ppo: from sft on; eto: the loop without the failure agent; positive: "
        "with a second positive agent in its place; coevolve: the paper; evaluate: --model as it "
        "is; chat: an endpoint, only evaluated")
    model: str = setting("tiny", "hub name or folder; tiny: made from scratch in minutes; "
                         "https://host/v1: a chat endpoint, as --method chat")
    seed: int = setting(0, "seed of everything random in the run")
    out: Optional[str] = setting(
        None, "the run's folder [runs/ENV-METHOD-sSEED, with --quick -quick]")
    webshop_url: Optional[str] = setting(
        None, "address of a real WebShop server, http://host:port [the embedded shop]")
    task_types: Literal["all", "short"] = setting(
        "all", "ScienceWorld's task types: ETO's 24, or eight whose texts are short [ETO, ours]")
    split_file: Optional[str] = setting(
        None, "ScienceWorld: folder of published train_, dev_ and test_indices.json [by rule]")
    intercode_data: Optional[str] = setting(
        None, "folder of InterCode's ic_spider_dev.json and ic_spider_dbs.sql [generated data]")
    mysql_url: Optional[str] = setting(
        None, "server of InterCode's databases, mysql://user:password@host:port; the password may "
        "be in MYSQL_PWD instead [sqlite]")
    experts: Optional[str] = setting(
        None, "file of expert trajectories: ETO's JSON list or a run's experts.jsonl [scripted]")
    dry_run: Optional[str] = setting(
        None, "print memory, tokens and hours without loading weights, and stop: here, or for a "
        "machine such as 8xH100 [off]")
    quick: bool = setting(False, "the same path, cut to about a minute (too short to learn much)")
    iterations: int = setting(3, "K, co-evolution iterations [App. B: 3; 5 on InterCodeSQL]")

    # Data
    train_tasks: int = setting(0, "training instructions, 0 = all [Table 1: 1,624 on WebShop]")
    eval_tasks: int = setting(0, "tasks of each evaluated split, 0 = all [Table 1: 200]")
    eval_splits: Literal["test", "validation"] = setting(
        "test", "test: the test splits; validation: for tuning, so that no test task is looked at")
    expert_min_reward: float = setting(
        0.7, "experts at or below this reward are dropped; a reward of 1 stays [App. A: 0.7]")
    view: Literal["full", "short"] = setting(
        "full", "short: repeated text left out of observations, for a very small model [ours]")

    # Supervised fine-tuning, Eq. (3)-(5)
    sft_epochs: int = setting(3, "passes over the experts [App. B]")
    sft_batch: int = setting(48, "trajectories per optimiser step [App. B]")
    sft_lr: float = setting(1e-5, "peak learning rate [App. B]")
    sft_warmup: float = setting(0.03, "share of steps of linear warm-up, then cosine [App. B]")

    # Preference optimisation, Eq. (6)-(9)
    dpo_epochs: int = setting(3, "passes over the pairs of an iteration [App. B]")
    dpo_batch: int = setting(32, "pairs, or what batch_unit says, per optimiser step [App. B]")
    batch_unit: Literal["pairs", "instructions"] = setting(
        "pairs", "what dpo_batch counts; an instruction's pairs stay together [App. B, ETO]")
    dpo_lr: float = setting(1e-6, "learning rate in iteration 1 [App. B; ETO's script]")
    dpo_lr_later: float = setting(5e-7, "learning rate in later iterations [App. B; ETO's script]")
    dpo_steps: int = setting(
        0, "optimiser steps of the target in each iteration, cycling over its pairs, for a "
        "comparison at equal steps; 0 = dpo_epochs passes [ours]")
    dpo_schedule: Literal["constant", "cosine"] = setting(
        "constant", "learning rate after the warm-up [ETO's script]")
    dpo_warmup: float = setting(0.1, "share of steps of warm-up, then constant [ETO's script]")
    beta: float = setting(0.1, "DPO's beta in iteration 1 [App. B; ETO's script]")
    beta_later: float = setting(0.5, "DPO's beta in later iterations [App. B; ETO's script]")
    lambda_dpo: float = setting(1.0, "weight of the DPO term of Eq. (9) [Section 4.3]")
    lambda_sft: float = setting(0.1, "weight of the SFT term of Eq. (9) [Section 4.3]")
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
    hard_threshold: float = setting(0.6, "a failure of at least this reward is hard [Table 2]")
    cut_turns: int = setting(
        5, "a rejected trajectory is cut at the expert's length + so many turns, -1 = off [ETO]")

    # Exploration
    failure_from: Optional[str] = setting(
        None, "the failure agent starts as the last one of this run, also of another environment "
        "[after SFT]")
    explore_again: bool = setting(
        False, "D_tgt is made of new rollouts of the failure agent, after its training [ours]")
    rollouts: int = setting(1, "rollouts per instruction and agent [Section 5.2.1]")
    temperature: float = setting(0.7, "of exploration, 0 = greedy; evaluation is greedy [ours]")
    max_tokens: int = setting(4096, "tokens of a trajectory; it ends where they are full [ours]")
    too_long: Literal["drop", "cut"] = setting(
        "drop", "a trajectory that filled max_tokens: makes no pairs, or is used up to its last "
        "whole turn; either way it is counted [ours]")
    max_new_tokens: int = setting(256, "tokens of one reply [ours]")
    slots: int = setting(32, "episodes that run side by side; it changes rounding only [ours]")

    # Baselines
    samples: int = setting(
        5, "rft, dart: rollouts per instruction, DART's n [Section 5.3; RFT's is not given]")
    dart_budget: int = setting(
        10, "dart: N; an instruction gets N x (its share of failures) more rollouts [Section 5.3]")
    ppo_rollouts: int = setting(4, "ppo: rollouts per instruction and iteration, 2 or more [ours]")
    ppo_epochs: int = setting(2, "ppo: passes over an iteration's episodes [ours]")
    ppo_batch: int = setting(16, "ppo: instructions per optimiser step, with all rollouts [ours]")
    ppo_lr: float = setting(1e-6, "ppo: learning rate, constant after dpo_warmup [ours]")
    ppo_clip: float = setting(0.2, "ppo: the ratio is clipped to 1 +- this [Schulman et al. 2017]")
    ppo_kl: float = setting(0.05, "ppo: weight of the KL divergence from the SFT policy [ours]")

    # In-context models, --model https://...
    model_name: Optional[str] = setting(None, "chat: the model's name at the endpoint [-]")
    key_variable: str = setting("OPENAI_API_KEY", "chat: environment variable with the key [ours]")
    examples: int = setting(1, "chat: expert conversations shown first, 0 to 2 [not in the paper]")
    price_in: float = setting(0.0, "chat: dollars per million tokens read, for the cost [-]")
    price_out: float = setting(0.0, "chat: dollars per million tokens written [-]")

    # Optimiser and machine
    weight_decay: float = setting(0.0, "AdamW's [ETO's script]")
    max_grad_norm: float = setting(1.0, "gradient clipping [transformers' default, used by ETO]")
    tokens_per_forward: int = setting(
        4096, "tokens in one forward and backward pass; it changes rounding only [ours]")
    shard: Literal["auto", "on", "off"] = setting(
        "auto", "weights, gradients and moments sharded over the ranks (FSDP2); auto: on GPUs, "
        "not for tiny [ours]")
    gradient_checkpointing: Literal["auto", "on", "off"] = setting(
        "auto", "layers are computed again in the backward pass; auto: as shard [ours]")
    checkpoint_minutes: float = setting(
        10, "minutes between checkpoints inside a training phase, 0 = after every step [ours]")
    track: Optional[str] = setting(
        None, "also log to a tracker of accelerate, such as tensorboard or wandb [files only]")
    threads: int = setting(
        0, "CPU threads of a process, 0 = its share of the cores; tiny models play in one [ours]")


# What replaces the defaults, in this order: in an environment (the paper's), for the tiny model in
# it (tuned on the validation split, README), with --quick.
PRESETS = {
    "intercodesql": dict(iterations=5, expert_min_reward=1.0),  # App. B; App. A
    "tiny webshop": dict(
        train_tasks=500, view="short", max_tokens=768, max_new_tokens=32, slots=64,
        sft_epochs=2, sft_batch=16, sft_lr=5e-4,
        dpo_batch=16, dpo_lr=1e-5, dpo_lr_later=1e-5, beta=0.1, beta_later=0.1, lambda_sft=0.5,
        ppo_lr=1e-4,  # elsewhere not tuned
    ),
    "scienceworld": dict(expert_min_reward=1.0, slots=16),  # a slot has a simulator of its own
    "tiny scienceworld": dict(
        iterations=2, task_types="short", view="short", max_tokens=1280, max_new_tokens=24, slots=4,
        sft_epochs=10, sft_batch=16, sft_lr=1e-3,
        dpo_batch=16, dpo_lr=1e-5, dpo_lr_later=1e-5, beta=0.1, beta_later=0.1, lambda_sft=0.5,
        ppo_lr=1e-4,
    ),
    "tiny intercodesql": dict(
        train_tasks=500, view="short", max_tokens=512, max_new_tokens=48, slots=64,
        sft_epochs=1, sft_batch=16, sft_lr=1e-4,
        dpo_batch=16, dpo_lr=3e-5, dpo_lr_later=3e-5, beta=0.1, beta_later=0.1, lambda_sft=0.5,
        ppo_lr=1e-4,
    ),
    "chat": dict(method="chat", max_tokens=100_000),  # with the examples; the endpoint knows better
    "quick": dict(train_tasks=120, eval_tasks=40, iterations=1, sft_epochs=1, dpo_epochs=1),
    "quick tiny": dict(sft_epochs=6, sft_lr=1e-3),
}


# Methods that train a second agent beside the target; the others train the target alone.
SECOND_AGENT = {"coevolve": "failure", "positive": "positive"}


def agents_of(method: str) -> tuple[str, ...]:
    return ("target", SECOND_AGENT[method]) if method in SECOND_AGENT else ("target",)


class SettingsError(ValueError):
    """A flag that does not exist or a value that cannot be; the text is one line for the user."""

    def __init__(self, text: str):
        super().__init__(without_passwords(text))


def without_passwords(text: str) -> str:
    """`text`, the passwords of addresses in it replaced by ***."""
    return re.sub(r"(://[^:@/\s]*):(?!password@)\S*@", r"\1:***@", text)


LARGEST = 1e15  # of a number, so that none overflows later [ours]


def check(s: Settings) -> Settings:
    """`s` itself, or SettingsError naming every impossible value and what is possible."""
    wrong = []

    def need(names, holds, what):
        for name in names.split():
            value = getattr(s, name)
            if not (math.isfinite(value) and holds(value) and value < LARGEST):
                more = f", and below {LARGEST:g}" if value >= LARGEST else ""
                wrong.append(f"--{name.replace('_', '-')} {value}: {what}{more}")

    need("iterations sft_epochs sft_batch dpo_epochs dpo_batch rollouts max_tokens max_new_tokens "
         "slots tokens_per_forward samples ppo_epochs ppo_batch", lambda x: x >= 1,
         "must be at least 1")
    need("ppo_rollouts", lambda x: x >= 2, "must be at least 2, to be compared with each other")
    need("train_tasks eval_tasks seed checkpoint_minutes dpo_steps dart_budget",
         lambda x: x >= 0, "must be 0 or more")
    need("threads", lambda x: 0 <= x <= 1024, "must be 0 to 1,024")
    need("sft_lr dpo_lr dpo_lr_later ppo_lr ppo_clip beta beta_later max_grad_norm",
         lambda x: x > 0, "must be above 0")
    need("lambda_dpo lambda_sft ppo_kl weight_decay temperature", lambda x: x >= 0,
         "must be 0 or more")
    need("sft_warmup dpo_warmup", lambda x: 0 <= x < 1, "must be in [0, 1)")
    need("expert_min_reward hard_threshold", lambda x: 0 <= x <= 1, "must be in [0, 1]")
    need("cut_turns", lambda x: x >= -1, "must be -1 (off) or more")
    for name, value in vars(s).items():
        if isinstance(value, str) and not value.strip():
            wrong.append(f"--{name.replace('_', '-')} {value!r}: is empty; give it a value or "
                         "leave it out")
    if s.webshop_url is not None and not is_web_address(s.webshop_url):
        wrong.append(f"--webshop-url {s.webshop_url}: must be http://host:port or https://host")
    for flag, of in (("webshop_url", "webshop"), ("task_types", "scienceworld"),
                     ("split_file", "scienceworld"), ("intercode_data", "intercodesql"),
                     ("mysql_url", "intercodesql")):
        if getattr(s, flag) != getattr(Settings, flag) and s.env != of:
            wrong.append(f"--{flag.replace('_', '-')}: is for {of}, not for {s.env}")
    if s.mysql_url is not None and not is_mysql_address(s.mysql_url):
        wrong.append(f"--mysql-url {s.mysql_url}: must be {MYSQL_ADDRESS}")
    if s.mysql_url and not s.intercode_data:
        wrong.append("--mysql-url: give --intercode-data FOLDER too; the questions are there")
    if s.intercode_data and s.model == "tiny":
        wrong.append("--intercode-data: the tiny model knows the generated databases' words only; "
                     "give another --model")
    if s.webshop_url and not s.experts and not (
            s.method == "evaluate" or s.method == "chat" and s.examples == 0):
        wrong.append("--webshop-url: give --experts FILE too; the scripted expert knows the "
                     "embedded shop only")
    if s.webshop_url and s.model == "tiny":
        wrong.append("--webshop-url: the tiny model knows the embedded shop's words only; give "
                     "another --model")
    if s.dry_run and (s.model == "tiny" or s.method == "chat"):
        wrong.append("--dry-run: is for a model to be trained here; give another --model")
    if s.dry_run and s.method in ("rft", "dart", "ppo", "evaluate"):
        wrong.append(f"--dry-run: plans no {s.method}; give --method sft, eto, positive or "
                     "coevolve")
    need("examples", lambda x: 0 <= x <= 2, "must be 0, 1 or 2")
    need("price_in price_out", lambda x: x >= 0, "must be 0 or more")
    if is_endpoint(s.model) and not is_web_address(s.model):
        wrong.append(f"--model {s.model}: must be http://host:port/path or https://host/path")
    if is_endpoint(s.model) != (s.method == "chat"):
        wrong.append(f"--model {s.model} --method {s.method}: an endpoint needs --method chat, "
                     "and chat an endpoint")
    if s.method == "chat" and not s.model_name:
        wrong.append("--model-name: give the model's name at the endpoint")
    if s.failure_from and s.method != "coevolve":
        wrong.append(f"--failure-from: {s.method} has no failure agent; give --method coevolve")
    if s.explore_again and s.method not in SECOND_AGENT:
        wrong.append(f"--explore-again: {s.method} has no second agent; give --method coevolve")
    if s.temperature == 0 and (s.rollouts > 1 or s.method in ("rft", "dart", "ppo")):
        wrong.append("--temperature 0: all rollouts of an instruction would be the same; raise it")
    if s.lambda_dpo == 0 and s.lambda_sft == 0:
        wrong.append("--lambda-dpo 0 --lambda-sft 0: nothing would be trained; raise one")
    if s.max_new_tokens >= s.max_tokens:
        wrong.append(f"--max-new-tokens {s.max_new_tokens}: must be below --max-tokens "
                     f"{s.max_tokens}")
    if wrong:
        raise SettingsError("; ".join(wrong))
    return s


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
    first.add_argument("--env", default=Settings.env)
    first.add_argument("--model", default=Settings.model)
    first.add_argument("--quick", nargs="?", const=True, default=False, type=_boolean)
    seen = first.parse_known_args(argv)[0]
    names = [seen.env, f"{seen.model} {seen.env}"]
    names += ["quick", f"quick {seen.model}"] if seen.quick else []
    names += ["chat"] if is_endpoint(seen.model) else []
    return {name: value for n in names for name, value in PRESETS.get(n, {}).items()}


def parse(argv: list[str]) -> Settings:
    """Settings from the command line by transformers' HfArgumentParser; SettingsError if wrong."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(Settings, prog="coevolve.py", allow_abbrev=False)
    return _parse(parser, argv)


def precheck(argv: list[str]) -> Settings:
    """The same with the standard library alone, for a machine without packages yet."""
    parser = argparse.ArgumentParser(
        prog="run.sh ENV", usage="%(prog)s [settings]", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    hints = get_type_hints(Settings)
    for f in fields(Settings):
        hint, flags = hints[f.name], {f"--{f.name.replace('_', '-')}": 0, f"--{f.name}": 0}
        more = {"choices": get_args(hint)} if get_origin(hint) is Literal else {
            "type": {bool: _boolean, Optional[str]: str}.get(hint, hint)}
        if hint is bool:
            more.update(nargs="?", const=True)
        parser.add_argument(*flags, default=f.default, help=f.metadata["help"], **more)
    return _parse(parser, argv)


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> Settings:
    parser.error = _refuse
    ours = preset(argv)
    parser.set_defaults(**ours)
    if ours:
        parser.epilog = ("Preset for this environment and model (the paper's value): "
                         + ", ".join(f"{name} {value} ({getattr(Settings, name)})"
                                     for name, value in ours.items()))
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise SettingsError(f"unknown: {' '.join(unknown)}; --help lists every setting")
    if values.mysql_url is not None and is_mysql_address(values.mysql_url):
        parts = re.fullmatch(r"(.+?//[^:@]+):(.*)(@.+)", values.mysql_url)
        if parts:  # settings are logged and must not hold the password
            values.mysql_url = parts[1] + parts[3]
            os.environ["MYSQL_PWD"] = unquote(parts[2])
    return check(Settings(**vars(values)))


def _refuse(message: str):
    raise SettingsError(message)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() in ("true", "1", "yes")


if __name__ == "__main__":
    try:
        precheck(sys.argv[1:])
    except SettingsError as error:
        sys.exit(f"run.sh: {error}")  # run.sh turns every failure into exit status 2
