"""Trains an agent on trajectories of your own: `bash run.sh learn FILE.jsonl --model MODEL`.

A line of the file is a trajectory: {"task", "messages": [{"role", "content"}, ...], "reward"}, and
"agent", where two agents played. There is no environment. The best trajectory of each task is its
expert: SFT imitates the experts, Eq. (3)-(5), then a phase of preferences, Eq. (9), learns from
pairs by reward, Eq. (8), with the agent after SFT as the reference. Both are the core's phases in a
run, OUT/run, which goes on where it was stopped; the agent stands in OUT.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional
from urllib.parse import quote

import transformers

import coevolve
from common import files
from common.settings import Free, Method, OldFile, UsageError, names_in, parse
from dpo import Trajectory, better
from engine import branch, command, models
from engine.console import counted, phrase
from engine.experts import best_of_tasks
from engine.machine import MachineSettings
from engine.records import read, write, write_pairs
from engine.run import Run
from environments import Options, first_reply
from environments.expert_files import PLAYED, ROLES, check_fields, never_replied, read_turns
from environments.user_files import reading
from envs import Environment
from lab import runfiles
from lab.page import page, report

MUST = "task, messages of role and content, reward from 0 to 1, and agent if there are two"


def learn(run: Run) -> None:
    """Imitates the best trajectory of each task, then learns from pairs with the others."""
    once = run.once
    file = Path(run.settings.file)
    experts = once("experts.jsonl", best, file)
    played = {}  # name of an agent -> the file of its trajectories that are no experts
    for name in dict.fromkeys(t.agent for t in run.trajectories):
        output = f"iter1/{quote(name, safe=' ')}.jsonl"
        played[name] = once(output, others, file, experts, name=name)
    pairs = once("iter1/pairs-target.jsonl", make_pairs, experts, played, trains="target")
    kept, made = run.done["experts.jsonl"], run.done["iter1/pairs-target.jsonl"]
    dropped = Counter(kept["dropped"]) + Counter(made["dropped"])
    run.print(f"{counted(kept['experts'], 'experts')}, {phrase('pairs', made['pairs'], {})}, "
            f"{phrase('not used', dropped, {})}")

    after_sft = once("sft-target", coevolve.train_sft, run.base, experts, name="target")
    agent = once("iter1/target-agent", coevolve.train_preferences, after_sft, after_sft, pairs,
                 experts, [*played.values()], name="target", role="D_tgt", i=1)
    if run.main:
        lay_out(run.folder.parent, [after_sft, agent])


def lay_out(out: Path, agents: list[Path]) -> None:
    """Puts the last of some agents into a folder, with what all of them logged as they trained."""
    for file in agents[-1].iterdir():
        if file.suffix != ".jsonl":
            files.remove(out / file.name)
            branch.link(str(file), str(out / file.name))
    lines = []
    for agent in agents:
        if (agent / "train.jsonl").exists():  # else there was nothing to learn from
            lines += files.read_jsonl(agent / "train.jsonl")
    files.write_jsonl(out / "train.jsonl", lines)


# ---------------------------------------------------------------------------------- the phases


def best(run: Run, out: Path, file: Path) -> dict:
    """Writes the expert of each task: its best trajectory, of equal ones the first."""
    least = run.settings.expert_min_reward
    experts = {}
    for t in best_of_tasks(run.trajectories):
        if not t.is_failure or better(t.reward, least):
            experts[t.task] = replace(t, agent="expert", iteration=0)
    dropped = Counter(run.dropped)
    dropped["of tasks without an expert"] = sum(t.task not in experts for t in run.trajectories)
    if not experts:
        raise UsageError(f"{file}: no expert is left: {dict(dropped)}; lower --expert-min-reward "
                      f"{least}, or raise --max-tokens {run.settings.max_tokens}")
    write(run, out, list(experts.values()))
    return dict(experts=len(experts), dropped=+dropped)


def others(run: Run, out: Path, file: Path, experts: Path, name: str) -> dict:
    """Writes what else an agent played of the tasks that have an expert."""
    lines = {t.task: t.rollout for t in read(experts)}
    found = [t for t in run.trajectories
             if t.agent == name and lines.get(t.task, t.rollout) != t.rollout]
    write(run, out, found)
    return coevolve.summarise(found, run.settings.hard_threshold) if found else dict(episodes=0)


def make_pairs(run: Run, out: Path, experts: Path, played: dict[str, Path], trains: str) -> dict:
    """Makes the pairs of Eq. (8). The paper's F_tgt are the failures of the first agent, F_fail
    those of the second; those of a single one are paired with each other, as in D_fail."""
    s = replace(run.settings, d_tgt_failures="none")
    dropped = Counter()
    agents = [name for name in played if name != "expert" and read(played[name])]
    of_target = [played[name] for name in agents[:1]]
    of_rest = [file for file in played.values() if file not in of_target]
    target = coevolve.by_task(read(*of_target))
    rest = coevolve.by_task(read(*of_rest))
    pairs = []
    for expert in read(experts):
        own, more = target[expert.task], rest[expert.task]
        pairs += coevolve.d_tgt(expert, own + more, [], s, dropped)
        candidates = list(itertools.product(own, more))
        if len(agents) < 2:
            candidates = list(itertools.combinations(more + own, 2))
        for pair in coevolve.ordered_failures(candidates, dropped):
            if s.failure_pair_weights == "rollouts":  # as in coevolve.d_tgt
                pair.weight = 1.0 / len(candidates)
            pairs.append(pair)
    write_pairs(run, out, pairs)
    return dict(pairs=Counter(pair.kind for pair in pairs), dropped=dropped)


# ------------------------------------------------------------------------------ the trajectories


class Recorded(Environment):
    """In place of an environment: of its tasks there are trajectories, and nothing is played."""
    name = "learn"
    splits = {}
    test_splits = ()

    def find(self, task: str) -> str:
        return task


def trajectories_in(file: Path, encoder, most: int) -> tuple[list[Trajectory], Counter]:
    """The trajectories in a file, a line each; a line's number is the rollout's. What has more than
    `most` tokens is counted. Refused, naming the line, if one cannot be used as it is."""
    found = []
    dropped = Counter()
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        with reading(f"{file}, line {number}", MUST):
            row = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a mark
            t = None if never_replied(row) else trajectory_of(row, encoder)
        if t is None or len(t.ids) > most:
            dropped["too long"] += 1
        else:
            t.rollout = number
            found.append(t)
    if not found:
        raise UsageError(f"{file}: no trajectory is left: {dict(dropped)}; give one in each line, "
                      f"or raise --max-tokens {most}")

    agents = dict.fromkeys(t.agent for t in found if t.agent != "expert")
    if len(agents) > 2:
        raise UsageError(f"{file}: it has {len(agents)} agents: {', '.join(agents):.80}; failures are "
                      "paired of one or two, leave out the others; a line without agent is "
                      "target's, and expert is the name for demonstrations")
    return found, dropped


def trajectory_of(row: dict, encoder) -> Trajectory:
    """The trajectory of a line; ValueError, if it is none. Its last `turns` replies are actions, or
    all of them if it does not say. Ids and mask are made anew of the messages, as for --experts."""
    check_fields(row, ("task", "messages", "reward"), PLAYED)
    task, agent, reward = row["task"], row.get("agent", "target"), row["reward"]
    if not isinstance(task, str) or not isinstance(agent, str) or agent == "pairs-target":
        raise ValueError(f"task {task!r} and agent {agent!r} have to be names")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise ValueError(f"reward {reward!r} is no number from 0 to 1")

    messages = read_turns(row["messages"], "role", "content", roles=ROLES | {"system": "system"})
    roles = [turn["role"] for turn in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise ValueError(f"its turns are of {roles}, not of user and assistant in turn")
    while roles[-1] != "assistant":  # what followed the last reply
        roles.pop()
    messages = messages[:len(roles)]
    turns = row.get("turns") or roles.count("assistant")
    opening = first_reply(messages, turns)
    if opening == len(messages):
        raise ValueError(f"its 'turns' are {turns!r}, and its replies {roles.count('assistant')}")
    t = Trajectory(task, agent, iteration=1, messages=messages, reward=float(reward), turns=turns,
                   ended="done")
    t.ids, t.action_mask = encoder.encode(messages, opening)
    if "action_mask" in row:
        mask = row["action_mask"]
        marked = sum(after > before for before, after in zip(mask, mask[1:]))
        texts = sum(bool(turn["content"]) for turn in messages[opening:][::2])
        if not texts <= marked <= turns:  # a reply without a text may have no token
            raise ValueError(f"its 'action_mask' marks {marked} replies, and its last {turns} are "
                             "trained on; give their number as 'turns', or take the mask out")
    return t


# ------------------------------------------------------------------------------------- command

READS = ("file", "out", "model", "seed", "track", "expert_min_reward", "max_tokens", "sft_epochs",
         "sft_batch", "sft_lr", "sft_warmup", "weight_decay", "max_grad_norm", "dpo_epochs",
         "dpo_steps", "dpo_batch", "dpo_lr", "dpo_warmup", "beta", "lambda_dpo",
         "lambda_sft", "log_prob_reduction", "reference", "denominator", "expert_beaten",
         "pair_weights", "failure_pair_weights", "cut_turns", "rejected_ends", MachineSettings)


@dataclass(frozen=True)
class Settings(coevolve.Settings):
    """Learning from trajectories of one's own"""
    # The trajectories, one a line; it stands first, without this flag [none]
    file: Free[OldFile] = None
    # The folder that gets the agent, and the run that made it, in `run` [runs/learn-FILE]
    out: Free[Optional[str]] = None
    # What the best trajectory of a task has to exceed to be its expert, unless it solves it [ours]
    expert_min_reward: float = 0.0
    env: str = "trajectories of one's own"
    method: str = "learn"
    max_new_tokens: int = 1  # nothing is played: no limit is for replies
    essential = tuple(names_in(READS[:-1]))
    presets = {}

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [(self.file is None, "FILE", "give the file of trajectories first")]


METHODS = {"learn": Method(learn, READS, "SFT on the best trajectory of each task, "
                           "then preferences between it and the others")}


def main(argv: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    if argv and not argv[0].startswith("-"):
        argv = ["--file", *argv]
    s, options = parse(argv, Settings, METHODS, lambda env: Options, "bash run.sh learn FILE")
    out = Path(s.out or f"runs/learn-{Path(s.file).stem}")
    if out.is_dir() and any(out.iterdir()) and not (out / "run").is_dir():
        raise UsageError(f"--out {out}: it is not empty; give another folder, or delete it")
    # What is wrong with the trajectories is said before a model is loaded.
    encoder = models.read_encoder(models.folder_of(s.model))
    trajectories, dropped = trajectories_in(Path(s.file), encoder, s.max_tokens)
    run = Run(replace(s, out=str(out / "run")), options, make_env=Recorded)
    run.trajectories = trajectories
    run.dropped = dropped
    learn(run)
    run.close()
    run.machine.accelerator.end_training()
    if run.main:
        report.close(run.folder)
        print(f"the agent is in {out}; {page.make_page(run.folder)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, command.stop)
    signal.signal(signal.SIGTERM, command.stop)
    runfiles.command("learn", main)
