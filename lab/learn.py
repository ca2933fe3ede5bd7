"""Trains an agent on your own trajectories: `bash run.sh learn FILE.jsonl --model MODEL`.

Each line of the file is a trajectory: {"task", "messages": [{"role", "content"}, ...], "reward"}.
If two agents played the trajectories, each line also contains the name of its "agent". No
environment is needed.

The best trajectory of each task becomes its expert trajectory. First, the agent is trained with SFT
(supervised fine-tuning) on the expert trajectories, Eq. (3) to (5). Then it is trained with
preference learning, Eq. (9), on pairs of trajectories of the same task. In a pair, the trajectory
with the higher reward is the chosen one, Eq. (8). The reference model is the agent after SFT.

The trained agent is written to the folder OUT. The run itself is in OUT/run, and contains the same
phases as a run of coevolve.py. To resume an interrupted run, repeat the command.
"""

import json
import math
import re
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import transformers

import coevolve
from common import files
from common.settings import Free, Method, OldFile, UsageError, names_in, parse
from dpo import Pair, Trajectory, better
from engine import branch, command, models
from engine.console import headline
from engine.experts import best_of_tasks
from engine.machine import MachineSettings
from engine.run import Run
from engine.trajectories import write
from environments import Options, first_reply
from environments.expert_files import PLAYED, ROLES, check_fields, never_replied, read_turns
from environments.user_files import reading
from envs import Environment
from lab import runfiles
from lab.page import page, report

MUST = "task, messages of role and content, reward from 0 to 1, and agent if there are two"


def learn(run: Run) -> None:
    """Trains the agent with SFT on the best trajectory of each task, and then with preference
    learning on pairs of trajectories."""
    # 1. Choose the expert trajectories. Save the remaining trajectories of each agent to a file.
    # Make the pairs. Each phase prints how many trajectories it uses, and how many it drops.
    once = run.once
    file = Path(run.settings.file)
    experts = once("experts.jsonl", best, file)
    played = {}  # name of an agent -> its trajectories without the expert trajectories
    for name in dict.fromkeys(t.agent for t in run.trajectories):
        played[name] = once(f"iter1/{name}.jsonl", others, file, experts, name=name)
    pairs = once("iter1/pairs-target.jsonl", make_pairs, experts, played)

    # 2. Train, and copy the agent to OUT.
    after_sft = once("sft-target", coevolve.train_sft, run.base, experts, name="target")
    agent = once("iter1/target-agent", coevolve.train_target, after_sft, after_sft, pairs,
                 experts, name="target", i=1)
    if run.main:
        lay_out(run.folder.parent, [after_sft, agent])


def lay_out(out: Path, agents: list[Path]) -> None:
    """Links or copies the files of the last agent to the folder `out`, and joins the training logs
    of all agents in one file there."""
    for file in agents[-1].iterdir():
        if file.suffix != ".jsonl":
            files.remove(out / file.name)
            branch.link(file, out / file.name)
    lines = []
    for agent in agents:  # without pairs, the last agent has no log
        lines += runfiles.rows_in(agent / "train.jsonl")
    write(out / "train.jsonl", lines)


# ---------------------------------------------------------------------------------- the phases


def best(run: Run, file: Path) -> tuple[list[Trajectory], dict]:
    """Returns the expert trajectory of each task: the first one with the highest reward. A failure
    becomes an expert trajectory only if its reward exceeds --expert-min-reward."""
    least = run.settings.expert_min_reward
    experts = {}
    for t in best_of_tasks(run.trajectories):
        if not t.is_failure or better(t.reward, least):
            experts[t.task] = replace(t, agent="expert", iteration=0)
    dropped = Counter(run.dropped)
    dropped["of tasks without an expert"] = sum(t.task not in experts for t in run.trajectories)
    if not experts:
        raise UsageError(f"{file}: no expert trajectory is left: {dict(dropped)}; lower "
                         f"--expert-min-reward {least}, or raise --max-tokens "
                         f"{run.settings.max_tokens}")
    return list(experts.values()), dict(experts=len(experts), dropped=+dropped)


def others(run: Run, file: Path, experts: list[Trajectory],
           name: str) -> tuple[list[Trajectory], dict]:
    """Returns the trajectories of the agent `name` that did not become expert trajectories. Tasks
    without an expert trajectory are left out."""
    lines = {t.task: t.rollout for t in experts}  # task -> line number of its expert trajectory
    kept = [t for t in run.trajectories
             if t.agent == name and lines.get(t.task, t.rollout) != t.rollout]
    if not kept:
        return [], dict(episodes=0)
    return kept, coevolve.summarise(kept, run.settings.hard_threshold)


def make_pairs(run: Run, experts: list[Trajectory],
               played: dict[str, list[Trajectory]]) -> tuple[list[Pair], dict]:
    """Makes the preference pairs of Eq. (8).

    The failures of the first agent in the file are F_tgt, and those of the second agent and the
    experts are F_fail. If there is only one agent, all of these failures are paired with each
    other, as in D_fail.
    """
    s = run.settings
    agents = [name for name in played if name != "expert" and played[name]]
    of_target = [t for name in agents[:1] for t in played[name]]
    of_rest = [t for name in played if name not in agents[:1] for t in played[name]]
    made = []
    for expert, e_tgt, e_fail in coevolve.by_task(experts, of_target, of_rest):
        if len(agents) > 1:
            made.append(coevolve.d_tgt(expert, e_tgt, e_fail, s))
            continue
        e_tgt += e_fail
        pairs, reasons = coevolve.d_tgt(expert, e_tgt, [], s)
        failures, more_reasons = coevolve.d_fail([], e_tgt, s)
        if s.failure_pair_weights == "rollouts":  # the same weights as in coevolve.d_tgt
            for pair in failures:
                pair.weight = 1.0 / math.comb(len(e_tgt), 2)
        made.append((pairs + failures, reasons + more_reasons))
    return coevolve.joined(run, experts, made)


# ------------------------------------------------------------------------------ the trajectories


class Recorded(Environment):
    """Placeholder for an environment. Its tasks have recorded trajectories, so no task is played
    and the environment needs no rules, tools or rewards."""
    name = "learn"
    splits = {}
    test_splits = ()

    def find(self, task: str) -> str:
        return task


def trajectories_in(file: Path, encoder, most: int) -> tuple[list[Trajectory], Counter]:
    """Reads a file with one trajectory per line. The rollout index of a trajectory is its line
    number.

    Returns the trajectories with at most `most` tokens, and a Counter of the dropped ones. Raises
    UsageError if a line is invalid, no trajectory is left, or the file has more than two agents.
    """
    trajectories = []
    dropped = Counter()
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        with reading(f"{file}, line {number}", MUST):
            row = json.loads(line.decode("utf-8-sig"))  # skips a byte order mark
            t = None if never_replied(row) else trajectory_of(row, encoder)
        if t is None or len(t.ids) > most:
            dropped["too long"] += 1
        else:
            t.rollout = number
            trajectories.append(t)
    if not trajectories:
        raise UsageError(f"{file}: no trajectory is left: {dict(dropped)}; give one in each line, "
                         f"or raise --max-tokens {most}")

    agents = dict.fromkeys(t.agent for t in trajectories if t.agent != "expert")
    if len(agents) > 2:
        raise UsageError(f"{file}: it has {len(agents)} agents: {', '.join(agents):.80}; leave out "
                         "all but two. A line without \"agent\" counts as one of target, and lines "
                         "of expert are not counted")
    return trajectories, dropped


def trajectory_of(row: dict, encoder) -> Trajectory:
    """Converts a line of the file, parsed as a dict, to a trajectory. Raises ValueError if the line
    is invalid.

    The last `turns` replies are the agent's actions. If the line has no `turns`, all replies are
    actions. Token ids and action mask are computed from the messages, as for --experts.
    """
    check_fields(row, ("task", "messages", "reward"), PLAYED)
    task, agent, reward = row["task"], row.get("agent", "target"), row["reward"]
    if not isinstance(task, str):
        raise ValueError(f"task {task!r} must be a name")
    if not isinstance(agent, str) or not re.fullmatch(r"(?!pairs)\w[\w .:@+-]*", agent):
        raise ValueError(f"agent {agent!r} must be a name of letters and digits, since it names a "
                         "file of the run")
    if type(reward) not in (int, float) or not 0 <= reward <= 1:
        raise ValueError(f"reward {reward!r} is not a number from 0 to 1")

    messages = read_turns(row["messages"], "role", "content", roles=ROLES | {"system": "system"})
    roles = [message["role"] for message in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise ValueError(f"its messages have the roles {roles}; user and assistant must alternate")
    while messages[-1]["role"] != "assistant":  # drop the messages after the last reply
        messages.pop()
    turns = row.get("turns") or roles.count("assistant")
    opening = first_reply(messages, turns)
    if opening == len(messages):
        raise ValueError(f"'turns' is {turns!r}, but the number of replies is "
                         f"{roles.count('assistant')}")
    t = Trajectory(task, agent, iteration=1, messages=messages, reward=float(reward), turns=turns,
                   ended="done")
    t.ids, t.action_mask = encoder.encode(messages, opening)
    if "action_mask" in row:
        mask = row["action_mask"]
        marked = sum(after > before for before, after in zip(mask, mask[1:]))
        texts = sum(bool(message["content"]) for message in messages[opening:][::2])
        # The mask must be 1 for some tokens of every reply that contains text. Empty replies are
        # exempt.
        if not texts <= marked <= turns:
            raise ValueError(f"'action_mask' marks {marked} replies, but the last {turns} are "
                             "trained on; give their number as 'turns', or remove the mask")
    return t


# ------------------------------------------------------------------------------------- command

READS = ("file", "out", "model", "seed", "track", "expert_min_reward", "max_tokens",
         "hard_threshold", "sft_epochs", "sft_batch", "sft_lr", "weight_decay", "max_grad_norm",
         "dpo_epochs", "dpo_steps", "dpo_batch", "dpo_lr", "beta", "lambda_dpo", "lambda_sft",
         "log_prob_reduction", "reference", "denominator", "expert_beaten", "pair_weights",
         "failure_pair_weights", "cut_turns", "rejected_ends", MachineSettings)


@dataclass(frozen=True)
class Settings(coevolve.Settings):
    """Learning from your own trajectories"""
    # File with one trajectory per line; give it as the first argument, without this flag [none]
    file: Free[OldFile] = None
    # Folder for the trained agent; the run is in its subfolder `run` [runs/learn-FILE]
    out: Free[Optional[str]] = None
    # The best trajectory of a task becomes its expert trajectory if it is a success, or if its
    # reward is larger than this value [ours]
    expert_min_reward: float = 0.0
    env: str = "trajectories of one's own"
    method: str = "learn"
    max_new_tokens: int = 1  # nothing is generated, so the context needs no room for replies
    essential = tuple(names_in(READS[:-1]))
    presets = {}

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [(self.file is None, "FILE", "give the file of trajectories as the first argument")]


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
    if command.rank() == 0:
        print(f"{out}: {headline(vars(s))}")
    # Read the trajectories before a model is loaded, so that faults in the file appear quickly.
    encoder = models.read_encoder(models.folder_of(s.model))
    trajectories, dropped = trajectories_in(Path(s.file), encoder, s.max_tokens)
    run = Run(replace(s, out=str(out / "run")), options, METHODS["learn"], Recorded)
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
