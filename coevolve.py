"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Read from the top, then `dpo.py` (tokens in, gradients or tokens out) and `envs.py` (text in, text
out; the episode). A task is the paper's instruction u, an episode is one play of it, and its record
is a trajectory e. A phase reads files of the run and writes one, which can be looked at, or edited.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from tqdm import tqdm

import dpo
import envs
from common import files
from common.files import hashed, line, read_json, read_jsonl, seed_of, write_jsonl
from common.settings import (
    Count,
    Free,
    OldFile,
    Rate,
    Share,
    Stated,
    Weight,
    Whole,
    check_same,
    parse,
)
from dpo import Group, Pair, Trajectory

# ------------------------------------------------------------------------------------ the loop

AGENTS = {"sft": ("target",), "eto": ("target",), "coevolve": ("target", "failure"),
          "positive": ("target", "positive")}  # the parameter-matched control of Section 5.4


def coevolve(run: Run) -> None:
    """The method, Sections 4.1-4.3. ETO is this loop with the target alone, SFT its beginning.
    once(file, phase, what it reads ..., ...) does the phase, unless the file was made from that."""
    s, once, names = run.settings, run.once, AGENTS[run.settings.method]
    experts = once("experts.jsonl", collect_experts, *map(Path, filter(None, [s.experts])))
    agents = {name: once(f"sft-{name}", train_sft, run.base, experts, name=name)  # another seed
              for name in names}                                                 # Eq. (3)-(5)
    if "failure" in names and s.failure_from:
        agents["failure"] = Path(s.failure_from)
    first, earlier = dict(agents), []
    evaluations(run, agents, 0)
    for i in range(1, s.iterations + 1) if s.method != "sft" else ():
        played = {name: once(f"iter{i}/{name}.jsonl", explore, agent, experts, name=name, i=i)
                  for name, agent in agents.items()}
        for name in reversed(names):  # the failure agent first
            pairs = once(f"iter{i}/pairs-{name}.jsonl", make_pairs, experts, played, earlier,
                         trains=name)                                            # Eq. (6), (8)
            episodes = [experts, *played.values(), *earlier]
            agents[name] = once(f"iter{i}/{name}-agent", train_preferences, agents[name],
                                first[name], pairs, episodes, name=name, i=i)    # Eq. (7), (9)
        evaluations(run, agents, i)
        earlier += played.values() if s.d_fail == "buffer" else ()


def evaluations(run: Run, agents: dict[str, Path], i: int) -> None:
    for (name, agent), split in itertools.product(agents.items(), run.splits):
        run.once(f"eval-{i}-{name}-{split}.jsonl", evaluate, agent, name=name, i=i, split=split)


# ---------------------------------------------------------------------------------- the phases
# phase(run, out, files ..., ...) writes `out`, a temporary path, and returns numbers for the table.


def collect_experts(run: Run, out: Path, file: Path | None = None) -> dict:
    """Expert trajectories of the training tasks, of a file or the scripted expert's."""
    s, env, kept, dropped = run.settings, run.make_env(), [], Counter()
    evaluated = {repr(env.find(task)) for split in run.splits for task in env.tasks(split)}
    first = len(envs.opening(env, ""))  # turns before an expert's first reply
    for task, messages, reward in envs.experts(env, file, s.train_tasks):
        ids, mask = run.encoder.encode(messages, first)
        if repr(env.find(task)) in evaluated:  # whatever its number
            dropped["evaluated too"] += 1
        elif reward <= s.expert_min_reward and reward < env.success:
            dropped["reward"] += 1
        elif len(ids) > s.max_tokens:
            dropped["too long"] += 1
        else:
            steps = sum(m["role"] == "assistant" for m in messages[first:])
            kept.append(Trajectory(task, "expert", messages=messages, ids=ids, action_mask=mask,
                                   reward=reward, steps=steps, ended="done"))
    env.close()
    if not kept:
        raise envs.Refused(f"no expert is left: {dict(dropped)}; lower what dropped it")
    write(run, out, kept)
    return dict(experts=len(kept), dropped=dropped)


def train_sft(run: Run, out: Path, base: Path, experts: Path, name: str) -> dict:
    """A model fine-tuned on the experts' action tokens, Eq. (3)-(5)."""
    s, rng = run.settings, random.Random(seed_of(run.settings.seed, "sft", name))
    groups = [Group([e]) for e in read(experts)]
    steps = [batch for _ in range(s.sft_epochs)
             for batch in dpo.batches(groups, s.sft_batch, "instructions", rng)]
    # A batch's mean is per action token, as in ETO's trainer.
    return run.fit(run.load(base), out, steps, dpo.Objective(
        dpo.sft_loss, lambda g: g.sequences[0].action_tokens, s.sft_lr, s.sft_warmup, "cosine"))


def explore(run: Run, out: Path, agent: Path, experts: Path, name: str, i: int) -> dict:
    """Sampled episodes of an agent on every expert's task."""
    episodes = [Trajectory(e.task, name, i, n, seed_of(run.settings.seed, name, i, e.task, n))
                for e in read(experts) for n in range(run.settings.rollouts)]
    episodes = run.play(agent, episodes, run.settings.temperature)
    write(run, out, episodes)
    return scores(episodes, run)


def evaluate(run: Run, out: Path, agent: Path, name: str, i: int, split: str) -> dict:
    """Greedy episodes of an agent on a split."""
    tasks = run.env.tasks(split)[:run.settings.eval_tasks or None]
    episodes = run.play(agent, [Trajectory(task, name, i) for task in tasks], 0.0)
    write(run, out, episodes)
    return scores(episodes, run)


def make_pairs(run: Run, out: Path, experts: Path, played: dict[str, Path],
               earlier: list[Path], trains: str) -> dict:
    """The pairs that one agent learns from, D_fail or D_tgt. What makes no pair is counted."""
    s, rows, dropped = run.settings, [], Counter()
    now = {name: by_task(read(file), dropped) for name, file in played.items()}
    before = by_task(read(*earlier), Counter())  # what was dropped then is counted there
    for expert in instructions(read(experts), now, s):
        target, *others = (found[expert.task] for found in now.values())
        second = [*itertools.chain(*others)]
        if trains in ("target", "positive"):  # "in the same manner as ETO" [Section 5.4]
            sides = (target, second) if trains == "target" else (second, [])
            pairs = d_tgt(expert, *sides, s, dropped, run.env.success)
        else:
            pairs = d_fail(target, second + before[expert.task], s, dropped, run.env.success)
        rows += [dict(task=expert.task, **pair) for pair in pairs]
    write(run, out, rows)
    if not rows and run.main:
        print(f"{run.name}: no pairs, since {dict(dropped)}; raise --temperature or --rollouts")
    return dict(pairs=Counter(row["kind"] for row in rows), dropped=dropped)


def by_task(episodes: list[Trajectory], dropped: Counter) -> dict[str, list[Trajectory]]:
    """task -> its trajectories that can train; counts in `dropped` the others."""
    found = defaultdict(list)
    for t in episodes:
        if t.ended == "context" or not any(t.action_mask):
            dropped["too long"] += 1
        else:
            found[t.task].append(t)
    return found


def train_preferences(run: Run, out: Path, agent: Path, first: Path, pairs: Path,
                      episodes: list[Path], name: str, i: int) -> dict:
    """The agent after weighted DPO + SFT on its pairs, Eq. (9), without SFT weights Eq. (7)."""
    s, rng = run.settings, random.Random(seed_of(run.settings.seed, "dpo", name, i))
    groups = preference_groups(read_jsonl(pairs), read(*episodes), s)
    if not groups:  # the agent stays as it is
        if run.main:
            shutil.copytree(agent, out)
        return dict(steps=0)
    s = replace(s, beta=s.beta if i == 1 else s.beta_later,
                lambda_dpo=1.0 if name.startswith("failure") else s.lambda_dpo)
    epochs = s.failure_epochs if name.startswith("failure") and s.failure_epochs else s.dpo_epochs
    steps, most = [], s.dpo_steps if name == "target" else 0  # of them; 0: so many epochs
    while len(steps) < most if most else epochs:
        steps += dpo.batches(groups, s.dpo_batch, s.batch_unit, rng)
        epochs -= 1
    reference = first if s.reference == "sft" else agent
    model = run.load(reference)
    if s.reference != "none":  # else log pi_ref is 0
        dpo.add_references(model, groups, run.log_probs, run.tokens_per_forward * run.ranks)
    if reference != agent:
        del model  # one at a time in memory
        model = run.load(agent)
    return run.fit(model, out, steps[:most or None], dpo.Objective(
        partial(dpo.preference_loss, s=s),
        lambda g: len(g.pairs) if s.normalise == "pairs" else sum(p.weight for p in g.pairs),
        s.dpo_lr if i == 1 else s.dpo_lr_later, s.dpo_warmup))


# ----------------------------------------------------------------------------------- the pairs


def instructions(experts: list[Trajectory], played: dict, s: Settings) -> list[Trajectory]:
    """The experts whose instructions make pairs: all. played: agent -> task -> its trajectories."""
    return experts


def d_tgt(expert: Trajectory, target: list[Trajectory], failure: list[Trajectory], s: Settings,
          dropped: Counter, success: float = 1.0) -> list[dict]:
    """The target's pairs for one instruction, Eq. (8), with the weights of Section 4.3.

    target, failure: this iteration's rollouts of the two agents; rewards are in [0, 1], from
    `success` on a trajectory is no failure. Returns rows of pairs-*.jsonl without the task; counts
    in `dropped`, by reason, the comparisons that make no pair."""
    # Eq. (8): D_tgt = {e_exp > e_tgt} u {e_exp > e_fail} u {e_w > e_l in F_tgt x F_fail}, by reward
    pairs = []
    for prediction in target + failure:
        kind = f"expert>{prediction.agent}"
        if prediction.reward < expert.reward:
            pairs.append((kind, expert, prediction))
        elif prediction.reward == expert.reward:
            dropped["as good as the expert"] += 1
        elif s.expert_beaten == "swap":
            pairs.append((kind, prediction, expert))
        else:
            dropped["better than the expert"] += 1
    # All expert-prediction pairs of an instruction weigh 1.0 together.
    weight = 1.0 / len(pairs) if pairs and s.pair_weights == "instruction" else 1.0
    rows = [pair_row(kind, w, l, weight, sft_weight=weight) for kind, w, l in pairs]
    # F_tgt x F_fail: DPO alone, lambda_SFT = 0.
    candidates = itertools.product(target, failure) if s.d_tgt_failures != "none" else ()
    for w, l in ordered_failures(candidates, dropped, success):
        if s.d_tgt_failures == "hard" and w.reward < s.hard_threshold:
            dropped["no hard failure"] += 1
        else:
            rows.append(pair_row("failure>failure", w, l, 1.0, sft_weight=0.0))
    return rows


def d_fail(target: list[Trajectory], failure: list[Trajectory], s: Settings, dropped: Counter,
           success: float = 1.0) -> list[dict]:
    """The failure agent's pairs for one instruction, Eq. (6): the better failure is preferred.
    Arguments and result as for `d_tgt`; --d-fail buffer has earlier iterations in `failure`."""
    if s.d_fail == "none":  # the failure agent stays as it is
        return []
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}; "all" has the pairs within one agent too,
    # since the failure agent learns from failures "from both the target and itself" (Section 4.2).
    candidates = (itertools.product(target, failure) if s.d_fail == "cross" else
                  itertools.combinations(target + failure, 2))
    return [pair_row("failure>failure", w, l, 1.0, sft_weight=0.0)
            for w, l in ordered_failures(candidates, dropped, success)]


def ordered_failures(candidates, dropped: Counter, success: float):
    """Of two failures with different rewards, the better one first."""
    for a, b in candidates:
        if max(a.reward, b.reward) >= success:
            dropped["not both failures"] += 1
        elif a.reward == b.reward:
            dropped["equal failures"] += 1
        else:
            yield (a, b) if a.reward > b.reward else (b, a)


def pair_row(kind: str, chosen: Trajectory, rejected: Trajectory, weight: float,
             sft_weight: float) -> dict:
    chosen, rejected = (dict(agent=t.agent, iteration=t.iteration, rollout=t.rollout,
                             reward=t.reward) for t in (chosen, rejected))
    return dict(kind=kind, chosen=chosen, rejected=rejected, weight=weight, sft_weight=sft_weight)


def preference_groups(rows: list[dict], episodes: list[Trajectory], s: Settings) -> list[Group]:
    """Rows of pairs as groups: an instruction's distinct trajectories, once each, and its pairs."""
    groups, places = {}, {}  # places: trajectory and how it is cut -> index
    known = files.Known({(t.task, t.agent, t.iteration, t.rollout): t for t in episodes})
    for row in rows:
        task, at = row["task"], []
        group = groups.setdefault(task, Group([]))
        # A rejected trajectory that wanders on long after the expert was done teaches little.
        longest = known[task, "expert", 0, 0].steps + s.cut_turns if s.cut_turns >= 0 else math.inf
        for side in "chosen", "rejected":
            key = task, *(row[side][name] for name in ("agent", "iteration", "rollout"))
            turns = min(known[key].steps, longest if side == "rejected" else math.inf)
            ends = side == "chosen" or s.rejected_ends == "count"
            if (key, turns, ends) not in places:
                places[key, turns, ends] = len(group.sequences)
                group.sequences.append(shortened(known[key], turns, ends))
            at.append(places[key, turns, ends])
        group.pairs.append(Pair(row["kind"], *at, row["weight"], row["sft_weight"]))
    return [*groups.values()]


def shortened(t: Trajectory, turns: int, ends: bool) -> Trajectory:
    """The trajectory up to the end of its turn number `turns`. Without `ends`, its mask leaves out
    what ends a turn, the last token of each reply, and the reply that ended the episode."""
    mask = [*t.action_mask, 0]
    last = [k for k in range(len(t.ids)) if mask[k] and not mask[k + 1]]
    if turns < len(last):
        size = last[turns - 1] + 1
        t = replace(t, ids=t.ids[:size], action_mask=mask[:size], ended="budget")
        last = last[:turns]
    if not ends:
        until = last[-2] if t.ended == "done" and len(last) > 1 else len(t.ids)
        left = [int(acts and k not in last and k < until) for k, acts in enumerate(t.action_mask)]
        t = replace(t, action_mask=left if any(left) else t.action_mask)
    return t


# ------------------------------------------------------------------------------------ settings
# In brackets the source: the paper; ETO, the scripts of Song et al.; ours. A comment is the help, a
# type has the limits; what is Free changes nothing but rounding, and may differ when a run goes on.
AUTO = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Common:
    env: Literal[envs.ENVIRONMENTS] = "webshop"
    method: str = "coevolve"             # what is trained, and how
    model: str = "tiny"                  # or a causal LM with a chat template: folder or hub name
    seed: Whole = 0                # of everything random in the run
    out: Free[Optional[str]] = None  # the run's folder [runs/ENV-METHOD-sSEED]
    experts: OldFile = None        # ETO's list, or a run's experts.jsonl [scripted experts]
    expert_min_reward: float = 0.7       # experts at or below it are dropped, but for 1 [App. A]
    train_tasks: Whole = 0         # instructions, 0 = all [Table 1]
    eval_tasks: Whole = 0          # of each evaluated split, 0 = all [Table 1]
    eval_splits: Literal["test", "validation"] = "test"  # validation: for tuning
    view: Literal["full", "short"] = "full"  # short: without repeated text, for tiny [ours]
    max_tokens: Count = 4096       # of a trajectory, which ends there [ours]
    max_new_tokens: Count = 256    # of a reply [ours]
    sft_epochs: Count = 3          # [App. B]
    sft_batch: Count = 48          # trajectories per step [App. B]
    sft_lr: Rate = 1e-5            # peak [App. B]
    sft_warmup: Share = 0.03       # share of steps, linear, then cosine [App. B]
    weight_decay: Weight = 0.0     # in all phases [ETO]
    max_grad_norm: Rate = 1.0      # in all phases [transformers' default]
    slots: Free[Whole] = 0   # episodes side by side; 0: 32 on GPUs, else 8 [ours]
    tokens_per_forward: Free[Whole] = 0  # of a rank; 0: 8,192 on GPUs, else 1,024
    bf16: AUTO = "auto"                  # passes and rollouts; auto: on GPUs, not tiny [ours]
    shard: Free[AUTO] = "auto"     # what trains over the ranks (FSDP2), if several
    gradient_checkpointing: Free[AUTO] = "auto"  # layers run again in the backward pass


@dataclass(frozen=True)
class Preferences:
    iterations: Count = 3          # K [App. B; 5 on InterCodeSQL]
    rollouts: Count = 1            # per instruction and agent [Section 5.2.1]
    temperature: Weight = 0.7      # evaluation is greedy [ours; ETO explores greedily]
    dpo_epochs: Count = 3          # passes over the pairs of an iteration [App. B]
    dpo_steps: Whole = 0           # of the target in an iteration; 0 = dpo_epochs [ours]
    dpo_batch: Count = 32          # of batch_unit, per step [App. B]
    batch_unit: Literal["pairs", "instructions"] = "pairs"  # an instruction stays whole [ETO]
    dpo_lr: Rate = 1e-6            # in iteration 1 [App. B; ETO]
    dpo_lr_later: Rate = 5e-7      # [App. B; ETO]
    dpo_warmup: Share = 0.1        # share of steps, linear, then constant [ETO]
    beta: Rate = 0.1               # in iteration 1 [App. B; ETO]
    beta_later: Rate = 0.5         # [App. B; ETO]
    lambda_dpo: Weight = 1.0       # of Eq. (9) [Section 4.3]
    lambda_sft: Weight = 0.1       # of Eq. (9) [Section 4.3]
    log_prob: Literal["sum", "mean"] = "sum"  # over a trajectory's action tokens [Eq. 2, 5, 7]
    sft_term: Literal["sum", "mean"] = "sum"  # of Eq. (9), likewise [as written]
    reference: Literal["phase", "sft", "none"] = "phase"  # pi_ref: as the phase begins [ETO]
    normalise: Literal["pairs", "weights"] = "pairs"  # what a batch's sum is divided by [ours]
    expert_beaten: Literal["swap", "drop"] = "swap"   # by a prediction: that is chosen [Eq. 8]
    pair_weights: Literal["instruction", "none"] = "instruction"  # its expert pairs: 1 [4.3]
    d_tgt_failures: Literal["cross", "hard", "none"] = "cross"  # pairs of failures [Eq. 8]
    hard_threshold: Weight = 0.6   # a failure from it on is hard [Table 2]
    cut_turns: int = 5                   # rejected: the expert's turns + so many, < 0: all [ETO]
    rejected_ends: Literal["count", "leave out"] = "count"  # ends of turns and episode [Eq. 7]


@dataclass(frozen=True)
class FailureAgent:
    # all pairs of failures; cross: target x failure agent, the literal Eq. (6); buffer: over all
    # iterations so far; none: the agent is frozen [Section 4.2]
    d_fail: Literal["all", "cross", "buffer", "none"] = "all"
    failure_epochs: Whole = 0      # 0 = dpo_epochs [ours]
    failure_from: OldFile = None   # folder of an agent that it starts from [after SFT]


@dataclass(frozen=True)
class Settings(FailureAgent, Preferences, Common, Stated):
    """Every number of a run."""
    # In place of the defaults, by the model's or the protocol's name; environments have others.
    presets = {"tiny": dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1,
                            lambda_sft=0.5),
               "eto": dict(max_new_tokens=512, temperature=0.0, sft_lr=2e-5)}

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [(self.max_new_tokens >= self.max_tokens, f"--max-new-tokens {self.max_new_tokens}",
                 f"must be below --max-tokens {self.max_tokens}"),
                (self.rollouts > 1 and self.temperature == 0, "--temperature 0",
                 "all rollouts of an instruction would be the same; raise it")]


# method -> its loop, and the settings that the loop reads: classes of them, or names
METHODS = {name: (coevolve, (Common, Preferences)) for name in ("eto", "positive")} | {
    "sft": (coevolve, (Common,)), "coevolve": (coevolve, (Common, Preferences, FailureAgent))}


# --------------------------------------------------------------------------------------- a run

MODELS = {"tiny": Path(__file__).parent / "tiny"}  # what a name means


class Run:
    """A run's folder, machine and models; one that was stopped goes on after a finished phase."""

    def __init__(self, settings: Settings, options):
        s, gpu = settings, torch.cuda.is_available()
        large = gpu and s.model != "tiny"
        self.settings, self.options, self.name = s, options, ""  # of the running phase's output
        self.folder = Path(s.out or f"runs/{s.env}-{s.method}-s{s.seed}")
        self.base = MODELS.get(s.model) or Path(s.model)
        self.bf16, self.recompute = (large if flag == "auto" else flag == "on"
                                     for flag in (s.bf16, s.gradient_checkpointing))
        self.accelerator = Accelerator(
            cpu=not gpu, mixed_precision="bf16" if self.bf16 else "no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))])
        self.main, self.ranks = self.accelerator.is_main_process, self.accelerator.num_processes
        self.patient = None if self.ranks == 1 else torch.distributed.new_group(
            backend="gloo", timeout=timedelta(days=7))  # one rank may play for hours longer
        self.shard = self.ranks > 1 and s.shard != "off"
        self.tokens_per_forward = s.tokens_per_forward or (8192 if gpu else 1024)
        self.make_env = partial(envs.make, s.env, s.view, **asdict(options))
        self.env = self.make_env()
        self.splits = self.env.test_splits if s.eval_splits == "test" else ("validation",)
        self.tokenizer = dpo.read(transformers.AutoTokenizer, self.base)
        self.encoder = dpo.Encoder(self.tokenizer)
        self.done = {}  # output -> what is recorded of it; self.before: by an earlier process
        self.open()

    def open(self) -> None:
        """The folder, new or of a run with the same settings; else Refused."""
        config, phases = (self.folder / f"{name}.json" for name in ("config", "phases"))
        now = asdict(self.settings) | asdict(self.options)
        if self.main and not config.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            ways = (False, False, True) if self.base == MODELS["tiny"] else dpo.trial(
                self.replica(self.base), self.encoder, self.settings.max_tokens)
            files.write_json(config, dict(settings=now, ways=ways))
        self.accelerator.wait_for_everyone()
        before = read_json(config)
        check_same(before.get("settings"), json.loads(json.dumps(now)), type(self.settings))
        self.passes_alone, *self.ways = before["ways"]  # of replies: alone, with a cache
        if self.main and before["ways"] != [False, False, True]:
            print(f"{self.base}: passes alone, replies alone, with a cache: {before['ways']}")
        self.before = read_json(phases) if phases.exists() else {}

    def once(self, output: str, work, *inputs, **how) -> Path:
        """Does work(run, temporary path, *inputs, **how) -> numbers, unless `output` was made so:
        from files of the same bytes, from agents that were made alike, and with this `how`."""
        path, self.name = self.folder / output, output
        agents = {self.folder / n: r.get("made_by", r["recipe"]) for n, r in self.done.items()}
        self.recipe = recipe = hashed([work.__name__, files.known_by(inputs, agents), how])
        recorded = self.before.pop(output, {})
        if recorded.get("recipe") == recipe and path.exists():
            self.done[output] = recorded
            return path
        if recorded and self.main:
            tqdm.write(f"{output} is made again: it is gone, or what it was made from is another")
        started, temporary = time.perf_counter(), path.with_name(f"{path.name}.tmp")
        self.accelerator.wait_for_everyone()
        if self.main:
            path.parent.mkdir(exist_ok=True)
            files.remove(temporary)
        self.accelerator.wait_for_everyone()
        numbers = self.make(temporary, work, *inputs, **how)
        self.accelerator.wait_for_everyone()
        self.done[output] = dict(work=work.__name__, recipe=recipe, **how) | dict(
            seconds=round(time.perf_counter() - started, 1)) | numbers
        if self.main:
            files.remove(path)
            os.replace(temporary, path)
            self.record(output)
        self.accelerator.wait_for_everyone()
        return path

    def make(self, out: Path, work, *inputs, **how) -> dict:
        return work(self, out, *inputs, **how)

    def record(self, output: str) -> None:
        """Writes and prints that a phase is finished."""
        files.write_json(self.folder / "phases.json", self.done | self.before)
        tqdm.write(line(output, self.done[output]))

    def load(self, agent: Path):
        """The model in a folder, ready to train."""
        return dpo.load(self.accelerator, agent, self.recompute, self.shard)

    def log_probs(self, model, sequences: list[Trajectory], sampler=dpo.Sampler()) -> torch.Tensor:
        tokens = 0 if self.passes_alone else self.tokens_per_forward
        return dpo.log_probs(self.accelerator, model, sequences, tokens, sampler)

    def fit(self, model, out: Path, steps: list[list[Group]], how: dpo.Objective) -> dict:
        """Trains a model of `load` into a folder, whose train.jsonl has a line for each step."""
        s, events = self.settings, []
        how = replace(how, weight_decay=s.weight_decay, max_grad_norm=s.max_grad_norm,
                      tokens=self.tokens_per_forward * self.ranks)
        with bar(self, len(steps)) as progress:
            dpo.fit(model, steps, partial(self.log_probs, sampler=how.sampler), how,
                    lambda event: (events.append(event), progress.update()))
        dpo.save(self.accelerator, model, self.tokenizer, out)
        write(self, out / "train.jsonl", events)
        return dict(steps=len(events), first_loss=events[0]["loss"], loss=events[-1]["loss"])

    def answer(self, model, temperature: float):
        """What replies to conversations, [(t, random numbers)] -> [(sampled ids, log_probs)]."""
        never = self.encoder.never(model.config.get_text_config().vocab_size)
        reply = partial(dpo.replies, model, self.encoder, dpo.Sampler(temperature, never),
                        self.settings.max_new_tokens, self.env.stops)
        return lambda asked: reply([(t.ids, rng) for t, rng in asked], *self.ways)

    def replica(self, agent: Path):
        """The model in a folder as it plays, whole on each rank."""
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        return dpo.read_model(agent, dtype, self.accelerator.device).eval()

    def play(self, agent, episodes: list[Trajectory], temperature: float, make_env=None) -> list:
        """Plays what the episodes begin, each rank a share; all get all, in the order given.
        make_env: of environments that know more tasks than the run's."""
        share = episodes[self.accelerator.process_index::self.ranks]
        share = self.play_share(share, self.answer(self.replica(agent), temperature),
                                make_env or self.make_env)
        if self.ranks > 1:
            shares = [None] * self.ranks
            torch.distributed.all_gather_object(shares, share, self.patient)
            share = itertools.chain(*shares)
        order = {(t.task, t.rollout): n for n, t in enumerate(episodes)}
        return sorted(share, key=lambda t: order[t.task, t.rollout])

    def play_share(self, share: list[Trajectory], answer, make_env) -> list[Trajectory]:
        slots = self.settings.slots or (32 if self.accelerator.device.type == "cuda" else 8)
        with bar(self, len(share)) as progress:
            envs.play(make_env, self.encoder, share, answer, slots, self.settings.max_tokens,
                      lambda t: progress.update())
        return share


def write(run: Run, file: Path, rows: list) -> None:
    if run.main:
        write_jsonl(file, rows)


def bar(run: Run, total: int):
    return tqdm(total=total, desc=run.name, leave=False, disable=not run.main, delay=2)


def read(*paths: Path) -> list[Trajectory]:
    return [Trajectory(**row) for file in paths for row in read_jsonl(file)]


def scores(episodes: list[Trajectory], run: Run) -> dict:
    """Means over episodes; the shares of successes and of hard failures are those of Table 2."""
    hard, success = run.settings.hard_threshold, run.env.success
    rows = [dict(reward=t.reward, success=t.reward >= success, hard=hard <= t.reward < success,
                 turns=t.steps, budget=t.ended == "budget") for t in episodes]
    return dict(episodes=len(rows), **{k: sum(row[k] for row in rows) / len(rows) for k in rows[0]})


def table(run: Run) -> str:
    return files.table(f"\n{run.folder}: {files.headline(vars(run.settings))}", run.done)


def main(argv: list[str], settings: type = Settings, run: type = Run, methods: dict = METHODS):
    """Runs the loop of a method. Another class of settings or run, or other methods, extends it."""
    transformers.utils.logging.disable_progress_bar()
    try:
        run = run(*parse(argv, settings, methods, envs.environment))
        methods[run.settings.method][0](run)
    except (envs.Refused, envs.EnvError, dpo.Unusable, FloatingPointError, OSError) as error:
        sys.exit(f"coevolve.py: {' '.join(str(error).split())}")  # the user's or the machine's
    if run.main:
        print(table(run))
    run.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
