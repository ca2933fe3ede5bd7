"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Read this file first: the loop, its phases, the pairs, the rollouts. `dpo.py` turns tokens into
gradients, `envs.py` turns text into text, `settings.py` holds every number. Each phase reads files
and writes one file or folder of the run, so every stage can be looked at, and a run that was
stopped goes on after its last finished phase.

    python coevolve.py --env webshop          train and evaluate (run.sh does this)
    python coevolve.py show RUN               read trajectories of a run side by side
"""

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import dpo
import envs
import report
import tiny
from settings import Settings, SettingsError, parse


# ----------------------------------------------------------------------------------- the loop


def coevolve(run: "Run") -> None:
    """The method, Sections 4.1-4.3. ETO is the same loop without the failure agent."""
    s = run.settings
    agents = ("target", "failure") if s.method == "coevolve" else ("target",)

    collect_experts(run)
    for agent in agents:  # the same experts, another seed each
        train_sft(run, agent)                                                    # Eq. (3)-(5)
        evaluate(run, agent, 0)
    if s.method == "sft":
        return

    for i in range(1, s.iterations + 1):
        for agent in agents:
            explore(run, agent, i)
        pairs = make_pairs(run, agents, i)                                       # Eq. (6), (8)
        if "failure" in agents:
            train_preferences(run, "failure", i, pairs)                          # Eq. (7)
            if s.explore == "again":
                explore(run, "failure", i, again=True)
                pairs = make_pairs(run, agents, i, again=True)
        train_preferences(run, "target", i, pairs)                               # Eq. (9)
        for agent in agents:
            evaluate(run, agent, i)


# ---------------------------------------------------------------------------------- the phases


def collect_experts(run: "Run") -> None:
    """experts.jsonl: the scripted expert on every training task, kept above expert_min_reward."""
    s = run.settings

    def work(out: Path) -> dict:
        tokenizer, env = AutoTokenizer.from_pretrained(run.base), run.make_env()
        encoder, rows, dropped = dpo.Encoder(tokenizer), [], {"reward": [], "too long": []}
        tasks = env.tasks("train")
        if s.train_tasks > len(tasks):
            raise SettingsError(f"--train-tasks {s.train_tasks}: {s.env} has {len(tasks)}")
        for task in tasks[:s.train_tasks or None]:
            messages, reward = play_expert(env, task)
            ids, mask = encoder.encode(messages)
            if reward <= s.expert_min_reward and reward < env.success:
                dropped["reward"].append(task)
            elif len(ids) > s.max_tokens:
                dropped["too long"].append(task)
            else:
                turns = sum(m["role"] == "assistant" for m in messages)
                rows.append(dict(task=task, agent="expert", iteration=0, rollout=0, seed=0,
                                 messages=messages, ids=ids, action_mask=mask, reward=reward,
                                 steps=turns, ended="done"))
        env.close()
        for reason, names in dropped.items():
            run.log_dropped("experts", reason, names)
        if not rows:
            raise SettingsError("no expert trajectory is left; lower --expert-min-reward or raise "
                                "--max-tokens")
        run.write_jsonl(out, rows)
        return dict(episodes=len(rows), tokens=sum(len(r["ids"]) for r in rows))

    run.phase("experts", "experts.jsonl", work)


def play_expert(env, task: str) -> tuple[list[dict], float]:
    """The scripted expert's conversation on a task and its reward."""
    observation = env.reset(task)
    messages, act = opening(env, observation), env.expert()
    for _ in range(env.max_steps):
        reply = act(observation)
        step = env.step(reply)
        messages.append({"role": "assistant", "content": reply})
        if step.done:
            break
        observation = step.observation
        messages.append({"role": "user", "content": observation})
    return messages[:-1] if messages[-1]["role"] == "user" else messages, step.reward


def opening(env, observation: str) -> list[dict]:
    """The turn an episode opens with: what the agent is told, then its first observation."""
    content = f"{env.prompt}\n\n{observation}" if env.prompt else observation
    return [{"role": "user", "content": content}]


def train_sft(run: "Run", agent: str) -> None:
    """sft-AGENT: the base model fine-tuned on the experts' action tokens, Eq. (3)-(5)."""
    s = run.settings

    def work(out: Path) -> dict:
        experts = run.read_jsonl("experts.jsonl")
        groups = [dpo.Group(e["task"], [dpo.Sequence(e["ids"], e["action_mask"])]) for e in experts]
        rng = random.Random(seed_of(s.seed, "sft", agent))
        epochs = [dpo.batches(groups, s.sft_batch, "instructions", rng)
                  for _ in range(s.sft_epochs)]
        return run.fit(f"sft-{agent}", run.base, out, epochs, dpo.sft_objective,
                       dpo.count_action_tokens, lr=s.sft_lr, warmup=s.sft_warmup,
                       schedule="cosine")

    run.phase(f"sft-{agent}", f"sft-{agent}", work)


def explore(run: "Run", agent: str, i: int, again: bool = False) -> None:
    """iter<i>/AGENT.jsonl: `rollouts` sampled episodes of an agent on every training task.

    again: by the failure agent already trained in this iteration (--explore again).
    """
    s, suffix = run.settings, "-again" if again else ""

    def work(out: Path) -> dict:
        tasks = [e["task"] for e in run.read_jsonl("experts.jsonl")]
        episodes = [Episode(task, agent + suffix, i, r, seed_of(s.seed, agent + suffix, i, task, r))
                    for task in tasks for r in range(s.rollouts)]
        rows = run.rollout(f"explore-{agent}{suffix} {i}", run.agent(agent, i if again else i - 1),
                           episodes, s.temperature)
        run.write_jsonl(out, rows)
        hard = [s.hard_threshold <= r["reward"] < run.success for r in rows]
        won = [r["reward"] >= run.success for r in rows]
        run.log("exploration", agent=agent + suffix, iteration=i, trajectories=len(rows),
                success=mean(won), negative=1 - mean(won) - mean(hard), hard_negative=mean(hard),
                reward=mean(r["reward"] for r in rows))
        return dict(episodes=len(rows), tokens=sum(len(r["ids"]) for r in rows),
                    reward=mean(r["reward"] for r in rows), hard_negative=mean(hard))

    run.phase(f"iter{i}-explore-{agent}{suffix}", f"iter{i}/{agent}{suffix}.jsonl", work)


def evaluate(run: "Run", agent: str, i: int) -> None:
    """eval-<i>-AGENT-SPLIT.jsonl: greedy episodes on the evaluated splits after iteration i."""
    s = run.settings
    for split in run.test_splits if s.eval_splits == "test" else ("validation",):
        def work(out: Path) -> dict:
            env = run.make_env()
            tasks = env.tasks(split)[:s.eval_tasks or None]
            env.close()
            rows = run.rollout(f"evaluate-{agent} {i}", run.agent(agent, i),
                               [Episode(task, agent, i, 0, 0) for task in tasks], temperature=0)
            run.write_jsonl(out, rows)
            rewards = [r["reward"] for r in rows]
            low, high = report.bootstrap_interval(rewards)
            scores = dict(reward=mean(rewards), reward_low=low, reward_high=high,
                          success=mean(r >= run.success for r in rewards),
                          steps=mean(r["steps"] for r in rows))
            run.log("evaluation", agent=agent, iteration=i, split=split, tasks=len(rows), **scores)
            return dict(episodes=len(rows), tokens=sum(len(r["ids"]) for r in rows), **scores)

        run.phase(f"evaluate-{i}-{agent}-{split}", f"eval-{i}-{agent}-{split}.jsonl", work)


def make_pairs(run: "Run", agents: tuple[str, ...], i: int, again: bool = False) -> str:
    """iter<i>/pairs.jsonl: D_fail and D_tgt of the iteration; returns its path in the run.

    again: D_tgt once more, with what the trained failure agent found (iter<i>/pairs-again.jsonl).
    """
    s, name = run.settings, f"iter{i}/pairs{'-again' if again else ''}.jsonl"

    def work(out: Path) -> dict:
        rollouts = {agent: {} for agent in ("target", "failure")}  # agent -> task -> trajectories
        dropped = {"too long": [], "no pair": []}
        for agent in agents:
            file = f"iter{i}/{agent}{'-again' if again and agent == 'failure' else ''}.jsonl"
            for row in run.read_jsonl(file):
                if row["ended"] == "context" and (s.too_long == "drop" or not row["steps"]):
                    dropped["too long"].append(row["task"])
                else:
                    rollouts[agent].setdefault(row["task"], []).append(row)
        earlier = {}  # with a buffer, D_fail also holds the failures of earlier iterations
        if s.d_fail == "buffer":
            for j, agent in itertools.product(range(1, i), agents):
                for row in run.read_jsonl(f"iter{j}/{agent}.jsonl"):
                    earlier.setdefault(row["task"], []).append(row)
        rows = []
        for expert in run.read_jsonl("experts.jsonl"):
            task = expert["task"]
            own, other = (rollouts[agent].get(task, []) for agent in ("target", "failure"))
            new = [("target", pair) for pair in d_tgt(expert, own, other, s, run.success)]
            if "failure" in agents and not again:
                new += [("failure", pair) for pair in
                        d_fail(own, other, earlier.get(task, []), s, run.success)]
            if not new:
                dropped["no pair"].append(task)
            rows += [dict(task=task, trains=trains, **pair) for trains, pair in new]
        run.write_jsonl(out, rows)
        for reason, names in dropped.items():
            run.log_dropped(f"iter{i}-pairs", reason, names)
        for trains in agents:
            kept = {}
            for row in rows:
                if row["trains"] == trains:
                    kept[row["kind"]] = kept.get(row["kind"], 0) + 1
            if not (again and trains == "failure"):
                run.log("pairs", iteration=i, trains=trains, kept=kept,
                        dropped={reason: len(names) for reason, names in dropped.items()})
        return dict(pairs=len(rows))

    run.phase(f"iter{i}-pairs{'-again' if again else ''}", name, work)
    return name


def train_preferences(run: "Run", agent: str, i: int, pairs_file: str) -> None:
    """iter<i>/AGENT-agent: the agent after DPO on its pairs of this iteration, Eq. (7) or (9)."""
    s, first = run.settings, i == 1
    beta, lr = (s.beta, s.dpo_lr) if first else (s.beta_later, s.dpo_lr_later)

    def work(out: Path) -> dict:
        before = run.agent(agent, i - 1)
        groups = preference_groups(run, agent, pairs_file)
        if not groups:
            run.log_dropped(f"iter{i}-{agent}", "no pairs: the agent stays as it is", ["all"])
            if run.main:
                shutil.copytree(before, out)
            return dict(steps=0)
        rng = random.Random(seed_of(s.seed, "dpo", agent, i))
        epochs = [dpo.batches(groups, s.dpo_batch, s.batch_unit, rng) for _ in range(s.dpo_epochs)]
        # For the failure agent every sft_weight is 0 and this is Eq. (7).
        objective = partial(dpo.preference_objective, beta=beta, lambda_dpo=s.lambda_dpo,
                            lambda_sft=s.lambda_sft, log_prob=s.log_prob, sft_term=s.sft_term)

        def divisor(batch):
            pairs = [p for g in batch for p in g.pairs]
            return len(pairs) if s.normalise == "pairs" else sum(p.weight for p in pairs)

        reference = before if s.reference == "phase" else run.agent(agent, 0)
        return run.fit(f"iter{i}-{agent}", before, out, epochs, objective, divisor, lr=lr,
                       warmup=s.dpo_warmup, schedule="constant", reference=reference, groups=groups)

    run.phase(f"iter{i}-{agent}", f"iter{i}/{agent}-agent", work)


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(expert: dict, own: list[dict], other: list[dict], s: Settings, success=1.0) -> list[dict]:
    """The target's pairs for one instruction, Eq. (8), with the weights of Section 4.3.

    expert, own (the target's rollouts), other (the failure agent's) are trajectories with a
    reward in [0, 1]. Returns rows of pairs.jsonl without task and trains.
    """
    pairs = []
    for prediction in own + other:
        kind = f"expert>{'target' if prediction in own else 'failure'}"
        if prediction["reward"] < expert["reward"]:
            pairs.append((kind, expert, prediction))
        elif prediction["reward"] > expert["reward"] and s.expert_beaten == "swap":
            pairs.append((kind, prediction, expert))
    # All expert-prediction pairs of an instruction weigh 1.0 together.
    weight = 1.0 / len(pairs) if pairs and s.pair_weights == "instruction" else 1.0
    rows = [row_of(kind, w, l, weight, sft_weight=weight) for kind, w, l in pairs]
    if s.d_tgt_failures == "none":
        return rows
    # F_tgt x F_fail: DPO alone, lambda_SFT = 0.
    for kind, w, l in ordered(itertools.product(own, other), success):
        if s.d_tgt_failures == "cross" or w["reward"] >= s.hard_threshold:
            rows.append(row_of(kind, w, l, 1.0, sft_weight=0.0))
    return rows


def d_fail(own: list[dict], other: list[dict], earlier: list[dict], s: Settings,
           success=1.0) -> list[dict]:
    """The failure agent's pairs for one instruction, Eq. (6): a better failure is preferred."""
    candidates = (itertools.product(own, other) if s.d_fail == "cross" else
                  itertools.combinations(own + other + earlier, 2))
    return [row_of(kind, w, l, 1.0, sft_weight=0.0) for kind, w, l in ordered(candidates, success)]


def ordered(candidates, success: float):
    """Of two failures with different rewards, the better one first."""
    for a, b in candidates:
        if a["reward"] < success and b["reward"] < success and a["reward"] != b["reward"]:
            yield "failure>failure", *((a, b) if a["reward"] > b["reward"] else (b, a))


def row_of(kind: str, chosen: dict, rejected: dict, weight: float, sft_weight: float) -> dict:
    name = lambda t: {key: t[key] for key in ("agent", "iteration", "rollout", "reward")}
    return dict(kind=kind, chosen=name(chosen), rejected=name(rejected), weight=weight,
                sft_weight=sft_weight)


def preference_groups(run: "Run", agent: str, pairs_file: str) -> list[dpo.Group]:
    """pairs.jsonl as groups: an instruction's distinct trajectories, once each, and its pairs."""
    s = run.settings
    pairs = [row for row in run.read_jsonl(pairs_file) if row["trains"] == agent]
    named = {(p[side]["agent"], p[side]["iteration"])
             for p in pairs for side in ("chosen", "rejected")}
    trajectories = {}
    for who, iteration in sorted({("expert", 0), *named}):
        file = "experts.jsonl" if who == "expert" else f"iter{iteration}/{who}.jsonl"
        for row in run.read_jsonl(file):
            trajectories[row["task"], who, iteration, row["rollout"]] = row
    groups, places = {}, {}
    for p in pairs:
        task = p["task"]
        group = groups.setdefault(task, dpo.Group(task, []))

        def place(side, turns=None):  # the index in the group of a trajectory, cut after `turns`
            key = (task, p[side]["agent"], p[side]["iteration"], p[side]["rollout"])
            row = trajectories[key]
            turns = turns if turns is not None and turns < row["steps"] else None
            if (key, turns) not in places:
                places[key, turns] = len(group.sequences)
                group.sequences.append(cut(row["ids"], row["action_mask"], turns))
            return places[key, turns]

        longest = None  # a rejected trajectory that wanders teaches little after this many turns
        if s.cut_turns >= 0:
            longest = trajectories[task, "expert", 0, 0]["steps"] + s.cut_turns
        group.pairs.append(dpo.Pair(p["kind"], place("chosen"), place("rejected", longest),
                                    p["weight"], p["sft_weight"]))
    return list(groups.values())


def cut(ids: list[int], mask: list[int], turns: int | None) -> dpo.Sequence:
    """The trajectory up to the end of its turn number `turns` (None: whole)."""
    ends = [k + 1 for k in range(len(mask)) if mask[k] and (k + 1 == len(mask) or not mask[k + 1])]
    end = len(ids) if turns is None or turns >= len(ends) else ends[turns - 1]
    return dpo.Sequence(ids[:end], mask[:end])


# --------------------------------------------------------------------------------- the rollouts


@dataclass
class Episode:
    """One episode: what it is, and what has happened so far."""

    task: str
    agent: str
    iteration: int
    rollout: int
    seed: int
    messages: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)   # everything read and written, in order
    mask: list[int] = field(default_factory=list)  # 1 where the agent sampled the token
    past: int = 0                                  # how many of `ids` are in the cache
    reply_at: int = 0                              # where the running reply begins
    reward: float = 0.0
    steps: int = 0
    ended: str = ""                                # done, budget or context

    def record(self) -> dict:
        return dict(task=self.task, agent=self.agent, iteration=self.iteration,
                    rollout=self.rollout, seed=self.seed, messages=self.messages, ids=self.ids,
                    action_mask=self.mask, reward=self.reward, steps=self.steps, ended=self.ended)


class SlotCache:
    """Keys and values of the episodes side by side, kept over all turns of an episode."""

    def __init__(self, model, slots: int, tokens: int):
        c = model.config.get_text_config()
        d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        shape = (c.num_hidden_layers, 2, slots, c.num_key_value_heads, tokens, d)
        self.kv = torch.empty(shape, dtype=model.dtype, device=model.device)

    def append(self, layer, slot, past, k, v):
        """Adds k, v (1, H, n, d) after the slot's `past` tokens; returns all of its K and V."""
        end = past + k.shape[2]
        K, V = self.kv[layer, :, slot]
        K[:, past:end], V[:, past:end] = k[0], v[0]
        return K[None, :, :end], V[None, :, :end]


@torch.inference_mode()
def rollout(model, encoder: dpo.Encoder, make_env, episodes: list[Episode], *, temperature: float,
            slots: int, max_tokens: int, max_new_tokens: int, tokens_per_forward: int,
            progress=None) -> list[Episode]:
    """Plays the episodes, `slots` side by side, and returns them in the order given.

    Each turn of this loop runs the model once over whatever waits in the slots: one sampled token,
    or a page that was just read. The cache is kept across turns and a finished slot takes the next
    episode at once. Every episode draws from its own seed, so what runs beside it changes nothing.
    `make_env()` gives each slot its environment. Rewards stay those of the last step.
    """
    model.eval()
    slots = min(slots, len(episodes))
    waiting, cache = list(reversed(episodes)), SlotCache(model, slots, max_tokens)
    environments, playing, dice = {}, {}, {}  # by slot
    forbidden = torch.tensor(encoder.forbidden, dtype=torch.long, device=model.device)
    try:
        while waiting or playing:
            for slot in range(slots):
                if slot not in playing and waiting:
                    if slot not in environments:
                        environments[slot] = make_env()
                    e = playing[slot] = waiting.pop()
                    e.messages = opening(environments[slot], environments[slot].reset(e.task))
                    dice[slot] = random.Random(e.seed)
                    _read(e, encoder.start(e.messages), max_tokens)

            # As many whole segments as fit in one pass; the slots left out are first next time.
            chosen, room = [], tokens_per_forward
            for slot in sorted(playing, key=lambda slot: len(playing[slot].ids)
                               - playing[slot].past):
                n = len(playing[slot].ids) - playing[slot].past
                if n <= room or not chosen:
                    chosen.append(slot)
                    room -= n
            logits = _next_token_logits(model, cache, [(slot, playing[slot]) for slot in chosen])
            logits[:, forbidden] = -torch.inf
            draws = [dice[slot].random() for slot in chosen] if temperature else None
            for slot, token in zip(chosen, sample(logits, temperature, draws).tolist()):
                e = playing[slot]
                e.ids.append(token)
                e.mask.append(1)
                if _reply_ended(e, encoder, token, max_tokens, max_new_tokens):
                    _act(e, encoder, environments[slot], max_tokens)
                if e.ended:
                    del playing[slot]
                    if progress is not None:
                        progress.update()
    finally:
        for env in environments.values():
            env.close()
    return episodes


def _next_token_logits(model, cache, playing) -> torch.Tensor:
    """One pass over the tokens not yet in the cache; logits after each segment's last, (S, V)."""
    new = [e.ids[e.past:] for _, e in playing]
    device, lengths = model.device, [len(ids) for ids in new]
    ids = torch.tensor([i for part in new for i in part], device=device)              # (N,)
    positions = torch.cat([torch.arange(e.past, len(e.ids), device=device) for _, e in playing])
    last = torch.tensor(lengths, device=device).cumsum(0) - 1                         # (S,)
    logits = model(input_ids=ids[None], position_ids=positions[None], lengths=lengths,
                   slots=[(cache, slot, e.past) for slot, e in playing],
                   logits_to_keep=last, use_cache=False).logits[0]                    # (S, V)
    for _, e in playing:
        e.past = len(e.ids)
    return logits.float()


def sample(logits: torch.Tensor, temperature: float, draws: list[float] | None) -> torch.Tensor:
    """A token per row of logits (S, V): the best one at temperature 0, else by inverse CDF.

    draws: one uniform number in [0, 1) per row, from the episode's own generator.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cdf = torch.softmax(logits.double() / temperature, -1).cumsum(-1)                 # (S, V)
    u = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cdf[:, -1:]
    return (cdf <= u).sum(-1)


def _read(e: Episode, ids: list[int], max_tokens: int) -> None:
    """The episode reads `ids`, or ends if no reply would fit after them."""
    if len(e.ids) + len(ids) >= max_tokens:
        e.ended = "context"
        return
    e.ids += ids
    e.mask += [0] * len(ids)
    e.reply_at = len(e.ids)


def _reply_ended(e: Episode, encoder, token: int, max_tokens: int, max_new_tokens: int) -> bool:
    """Whether the reply is complete; an end of turn that was not sampled gets mask 0."""
    if token == encoder.end_of_turn:
        return True
    reply = e.ids[e.reply_at:]
    if ":" in encoder.decode([token]) and "Observation:" in encoder.decode(reply[-8:]):
        ours = encoder.decode(reply).index("Observation:")  # what follows is the environment's
        while len(encoder.decode(e.ids[e.reply_at:])) > ours:
            e.ids.pop()
            e.mask.pop()
    elif len(reply) < max_new_tokens and len(e.ids) < max_tokens - 1:
        return False
    e.ids.append(encoder.end_of_turn)
    e.mask.append(0)
    e.past = min(e.past, len(e.ids) - 1)
    return True


def _act(e: Episode, encoder, env, max_tokens: int) -> None:
    """The reply goes to the environment, and its observation to the episode."""
    reply = encoder.decode(e.ids[e.reply_at:])
    step = env.step(reply)
    e.messages.append({"role": "assistant", "content": reply})
    e.reward, e.steps = step.reward, e.steps + 1
    if step.done or e.steps == env.max_steps:
        e.ended = "done" if step.done else "budget"
        return
    _read(e, encoder.observation(step.observation), max_tokens)
    if not e.ended:
        e.messages.append({"role": "user", "content": step.observation})


# ------------------------------------------------------------------------------ a run's folder


class Run:
    """The run's folder and machine: phases that happen once, and the log."""

    def __init__(self, settings: Settings, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        self.main = accelerator.is_main_process
        self.path = Path(settings.out or
                         f"runs/{settings.env}-{settings.method}-s{settings.seed}")
        if self.main:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingsError(f"{self.path}: another process is running in this folder; "
                                    "wait for it or give another --out") from None
            self._same_settings()
        accelerator.wait_for_everyone()
        state = self.path / "phases.json"
        self.phases = json.loads(state.read_text()) if state.exists() else {}
        self._truncate_log()
        accelerator.wait_for_everyone()
        env = self.make_env()
        self.success, self.test_splits = env.success, env.test_splits
        env.close()

    def _same_settings(self) -> None:
        config, now = self.path / "config.json", asdict(self.settings)
        if config.exists():
            before = json.loads(config.read_text())["settings"]
            changed = [f"{name} ({before.get(name)} -> {now.get(name)})"
                       for name in sorted({*before, *now} - {"out"})
                       if before.get(name) != now.get(name)]
            if changed:
                raise SettingsError(f"{self.path} was made with other settings: "
                                    f"{', '.join(changed)}; give another --out, or these again")
            return
        if any(self.path.glob("*.jsonl")):
            raise SettingsError(f"{self.path} holds files but no config.json; give another --out")
        packages = ("torch", "transformers", "accelerate", "numpy")
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True,
                             cwd=Path(__file__).parent)
        write_text(config, json.dumps(dict(
            settings=now, commit=git.stdout.strip() or None,
            versions={"python": platform.python_version(),
                      **{name: version(name) for name in packages}}), indent=1))

    def make_env(self):
        return envs.make(self.settings.env, self.settings.view, self.settings.webshop_url)

    def try_env(self) -> None:
        """Opens the last training task, so that what is missing shows now and not in hours.

        One process alone: a WebShop server must not load its catalogue twice at once.
        """
        if self.main:
            env = self.make_env()
            env.reset(env.tasks("train")[:self.settings.train_tasks or None][-1])
            env.close()
        self.accelerator.wait_for_everyone()

    # Phases

    def phase(self, name: str, output: str, work) -> None:
        """Runs work(temporary path) -> numbers for the log, unless it has been done before.

        Done means: recorded with a hash of `output` that still holds. The output appears by
        renaming, so a run killed at any moment has all of it or nothing.
        """
        path = self.path / output
        if name in self.phases:
            if path.exists() and digest(path) == self.phases[name]["sha256"]:
                return
            if path.exists():
                raise SettingsError(f"{path} is not what phase {name} wrote; restore it, or delete "
                                    "it to compute it and all that follows again")
            later = list(self.phases)[list(self.phases).index(name):]
            self.say(f"{path} is gone: computing it and all that follows again")
            self.phases = {n: p for n, p in self.phases.items() if n not in later}
            self._truncate_log()
        started, temporary = time.perf_counter(), path.with_name(path.name + ".tmp")
        if self.main:
            path.parent.mkdir(exist_ok=True)
            for old in (temporary, path):
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        numbers = work(temporary)
        self.accelerator.wait_for_everyone()
        if not self.main:
            return
        os.replace(temporary, path)
        seconds = time.perf_counter() - started
        self.log("phase", phase=name, seconds=round(seconds, 2), resident_mb=resident_mb(),
                 **numbers)
        self.phases[name] = dict(sha256=digest(path),
                                 metrics_bytes=(self.path / "metrics.jsonl").stat().st_size)
        write_text(self.path / "phases.json", json.dumps(self.phases, indent=1))
        self.say(f"{name:24}{seconds:7.1f} s  " + "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value:,}"
            for key, value in numbers.items()))

    def _truncate_log(self) -> None:
        """Drops the events of phases that did not finish: their second run writes them again."""
        if self.main:
            kept = max((p["metrics_bytes"] for p in self.phases.values()), default=0)
            with open(self.path / "metrics.jsonl", "ab") as f:
                f.truncate(kept)

    def fit(self, phase: str, before, out: Path, epochs, objective, normaliser, *, lr, warmup,
            schedule, reference=None, groups=()) -> dict:
        """Trains the agent in folder `before` into folder `out`; returns numbers for the log.

        reference: the folder of pi_ref, whose log-probabilities of `groups` are computed first.
        """
        s, last = self.settings, {}
        tokens = sum(g.tokens for epoch in epochs for batch in epoch for g in batch)
        with self.bar(phase, tokens, "token") as progress:
            if reference is not None:
                dpo.add_reference(load_model(reference).to(self.accelerator.device), groups,
                                  s.tokens_per_forward)

            def log(event):
                last.update(event)
                self.log("train", phase=phase, **event)

            model = dpo.fit(self.accelerator, load_model(before), epochs, objective, normaliser,
                            lr=lr, warmup=warmup, schedule=schedule, weight_decay=s.weight_decay,
                            max_grad_norm=s.max_grad_norm,
                            tokens_per_forward=s.tokens_per_forward, log=log, progress=progress)
        if self.main:
            model.save_pretrained(out)
            AutoTokenizer.from_pretrained(before).save_pretrained(out)
        self.accelerator.free_memory()
        return dict(steps=last["step"], tokens=tokens, loss=last["loss"])

    def rollout(self, phase: str, agent: Path, episodes: list[Episode], temperature) -> list[dict]:
        """The episodes' trajectories as rows, in order; each rank plays its share."""
        s, device = self.settings, self.accelerator.device
        share = episodes[self.accelerator.process_index::self.accelerator.num_processes]
        model = load_model(agent, torch.bfloat16 if device.type == "cuda" else torch.float32)
        encoder = dpo.Encoder(AutoTokenizer.from_pretrained(agent))
        with self.bar(phase, len(share), "episode") as progress:
            rollout(model.to(device), encoder, self.make_env, share, temperature=temperature,
                    slots=s.slots, max_tokens=s.max_tokens, max_new_tokens=s.max_new_tokens,
                    tokens_per_forward=s.tokens_per_forward, progress=progress)
        order = {(e.task, e.rollout): n for n, e in enumerate(episodes)}
        rows = gather_object([e.record() for e in share])
        return sorted(rows, key=lambda row: order[row["task"], row["rollout"]])

    def agent(self, agent: str, i: int) -> Path:
        """The folder of an agent's checkpoint after iteration i; 0 is after SFT."""
        return self.path / (f"iter{i}/{agent}-agent" if i else f"sft-{agent}")

    # Files and log

    def read_jsonl(self, name: str) -> list[dict]:
        return report.read_jsonl(self.path / name)

    def write_jsonl(self, path: Path, rows: list[dict]) -> None:
        if self.main:
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, event: str, **fields) -> None:
        if self.main:
            with open(self.path / "metrics.jsonl", "a") as f:
                f.write(json.dumps(dict(event=event, **fields)) + "\n")

    def log_dropped(self, phase: str, reason: str, tasks: list[str]) -> None:
        if tasks:
            self.log("dropped", phase=phase, reason=reason, count=len(tasks), tasks=tasks[:10])

    def bar(self, phase: str, total: int, unit: str):
        return tqdm(total=total, unit=unit, desc=phase, leave=False, disable=not self.main,
                    unit_scale=unit == "token", dynamic_ncols=True)

    def say(self, line: str) -> None:
        if self.main:
            tqdm.write(line)


def load_model(folder, dtype=torch.float32):
    """A causal LM from a folder or hub name; fp32 to train: bf16 weights would not move at 1e-6."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="ragged")


def check_model(folder) -> None:
    """SettingsError unless `folder` has a causal LM's config and a usable chat template."""
    try:
        architectures = AutoConfig.from_pretrained(folder).architectures or ["none"]
        if not any(name.endswith("ForCausalLM") for name in architectures):
            raise ValueError(f"its architecture is {', '.join(architectures)}, not a causal LM")
        dpo.Encoder(AutoTokenizer.from_pretrained(folder))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--model {folder}: {str(error).splitlines()[0]}; give tiny, a hub name within reach, "
            "or a folder with config, weights and tokenizer") from None


def digest(path: Path) -> str:
    """sha256 over a file, or over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        total.update(f"{file.name} {file.stat().st_size} ".encode())
        with open(file, "rb") as f:
            while block := f.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def write_text(path: Path, text: str) -> None:
    """The whole text or nothing: written beside `path`, then renamed."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)


def resident_mb() -> int:
    """This process's resident memory in MB (0 where /proc is not there)."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def seed_of(*parts) -> int:
    """A 48-bit seed from names and numbers: the same parts give the same seed anywhere."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:6], "big")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def main(argv: list[str]) -> None:
    if argv[:1] == ["show"]:
        parser = argparse.ArgumentParser(prog="coevolve.py show", description=report.show.__doc__)
        parser.add_argument("run", help="a run's folder")
        parser.add_argument("tasks", nargs="*", help="task ids; none: the hardest negatives")
        parser.add_argument("--count", type=int, default=3, help="how many, where none is named")
        asked = parser.parse_args(argv[1:])
        return print(report.show(asked.run, asked.tasks or None, asked.count))
    settings = parse(argv)
    disable_progress_bar()  # one bar per phase is ours; those of loading and saving are noise
    gpu = torch.cuda.is_available()  # not MPS: log-probabilities are summed in float64
    accelerator = Accelerator(cpu=not gpu, mixed_precision="bf16" if gpu else "no")
    cores = len(os.sched_getaffinity(0)) // accelerator.num_processes
    torch.set_num_threads(settings.threads or max(1, cores))
    run = Run(settings, accelerator)
    if (run.path / "result.json").exists():
        run.say(f"{run.path} is finished; what it holds:")
    else:
        run.try_env()
        run.base = tiny.base(accelerator, run) if settings.model == "tiny" else settings.model
        check_model(run.base)
        coevolve(run)
        if run.main:
            write_text(run.path / "result.json", json.dumps(report.result(run.path), indent=1))
            report.figure(run.path, run.path / "curves.png")
    run.say(report.table(run.path))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (SettingsError, report.RunError, envs.EnvError) as error:
        print(f"coevolve.py: {error}", file=sys.stderr)
        sys.exit(2)
