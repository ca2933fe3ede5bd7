"""Trains an agent on trajectories of your own: `bash run.sh learn FILE.jsonl --model MODEL`.

A line of the file is a trajectory: {"task", "messages": [{"role", "content"}, ...], "reward"}, and
"agent", where two agents played. There is no environment. The best trajectory of each task is its
expert: SFT imitates the experts, Eq. (3)-(5), then a phase of preferences, Eq. (9), learns from
pairs by reward, Eq. (8), with the agent after SFT as the reference.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

import coevolve
import dpo
from common.files import write_jsonl
from common.settings import Refused, Stated, faults, flag, help_of, settings_of, taken_by
from dpo import Group, Trajectory
from worlds.expert_files import never_replied

# The core's settings that are read here.
READS = ("model", "seed", "expert_min_reward", "max_tokens", "tokens_per_forward", "sft_epochs",
         "sft_batch", "sft_lr", "sft_warmup", "weight_decay", "max_grad_norm", "dpo_epochs",
         "dpo_batch", "batch_unit", "dpo_lr", "dpo_warmup", "beta", "lambda_dpo", "lambda_sft",
         "log_prob", "sft_term", "normalise", "pair_weights", "cut_turns", "rejected_ends")
OWN = dict(expert_min_reward=0.0)  # defaults of its own: the best that there is [ours]
SUCCESS = 1.0  # the reward from which on a trajectory is no failure
MUST = "give {task, messages of role and content, reward from 0 to 1}, and agent if there are two"


def main(argv: list[str]) -> None:
    file, out, s = settings_from(argv)
    dropped = Counter()
    played = read_trajectories(file, dropped)  # what is wrong with them costs no load of a model
    transformers.utils.logging.disable_progress_bar()
    learner = Learner(s)
    played = encoded(played, file, learner.encoder, s.max_tokens, dropped)
    experts, others = split(played, s.expert_min_reward, dropped)
    if not experts:
        raise Refused(f"{file}: no expert is left: {dict(dropped)}; lower --expert-min-reward "
                      f"{s.expert_min_reward}")
    groups = coevolve.preference_groups(pair_rows(experts, others, s, dropped), experts, others, s,
                                        learner.encoder)
    say(experts, groups, dropped)

    log = learner.imitate(experts)
    if groups:
        log += learner.prefer(groups)
    dpo.save(learner.accelerator, learner.model, learner.encoder, out)
    write_jsonl(out / "train.jsonl", log)
    print(f"the agent is in {out}")


# ------------------------------------------------------------------------------------- settings


def settings_from(argv: list[str]) -> tuple[Path, Path, coevolve.Settings]:
    """The file, the folder of the agent, which is made, and the settings; Refused, if something is
    wrong."""
    stated = settings_of(coevolve.Settings)
    parser = argparse.ArgumentParser("bash run.sh learn", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the trajectories, one a line")
    parser.add_argument("--out", type=Path, help="the folder of the agent: runs/learn-FILE")
    for name in READS:
        default = OWN.get(name, stated[name].default)
        parser.add_argument(flag(name), default=argparse.SUPPRESS, **taken_by(stated[name]),
                            help=help_of(stated[name], default, "here"))
    given = vars(parser.parse_args(argv))
    file = given.pop("file")
    out = given.pop("out") or Path("runs") / f"learn-{file.stem}"

    # Nothing is played: no limit is for replies.
    s = replace(coevolve.Settings(max_new_tokens=1, **OWN), **given)
    wrong = faults(stated, given, set(READS), s, Stated())
    if wrong:
        raise Refused("; ".join(wrong))
    if not file.is_file():
        raise Refused(f"{file}: no such file; give one that has a trajectory in each line")
    if out.is_file() or (out.exists() and list(out.iterdir())):
        raise Refused(f"--out {out}: it is not empty; give another folder, or delete it")
    make_folder(out)
    return file, out, s


def make_folder(out: Path) -> None:
    """Makes the agent's folder; Refused where nothing can be written into it, which else would be
    known after all training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise Refused(f"--out {out}: nothing can be written there ({error.strerror}); give another "
                      "folder") from None


# ----------------------------------------------------------------------------- the trajectories


def read_trajectories(file: Path, dropped: Counter) -> list[Trajectory]:
    """The trajectories in a file, a line each, without ids. Their rollouts are the numbers of their
    lines, so that no two are called the same. Refused, naming file and line, if one is none.
    dropped gets the number of those whose context was full before their first reply."""
    found = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        with naming(file, number):
            row = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a mark
            if not isinstance(row, dict):
                raise ValueError("it is no JSON object")
            if never_replied(row):
                dropped["too long"] += 1
                continue
            t = trajectory_of(row)
        t.rollout = number
        found.append(t)
    if not found:
        raise Refused(f"{file}: it has no trajectory with a reply; {MUST}, a line each")

    agents = list(dict.fromkeys(t.agent for t in found if t.agent != "expert"))
    if len(agents) > 2:
        raise Refused(f"{file}: it has {len(agents)} agents, such as {', '.join(agents[:3])}, and "
                      "failures are paired of one or two; leave out the others; a line without "
                      "agent is target's, and expert is the name for demonstrations")
    return found


@contextmanager
def naming(file: Path, number: int):
    """Refuses what is wrong with a line of a file, which it names."""
    try:
        yield
    except ValueError as error:
        raise Refused(f"{file}, line {number}: {error}; {MUST}") from None


def encoded(
    trajectories: list[Trajectory],
    file: Path,
    encoder: dpo.Encoder,
    max_tokens: int,
    dropped: Counter,
) -> list[Trajectory]:
    """Gives trajectories their ids.

    Args:
        trajectories: Those of `read_trajectories`.
        file: Where they are from.
        encoder: Of the model.
        max_tokens: What a trajectory may have at most.
        dropped: Gets the number of trajectories that are longer.

    Returns:
        The trajectories that are not longer.

    Raises:
        Refused: One cannot be encoded, or none is left; the text names file and line.
    """
    found = []
    for t in trajectories:
        with naming(file, t.rollout):
            t.ids, t.action_mask = encoder.encode(t.messages, opening_of(t.messages))
        if len(t.ids) > max_tokens:
            dropped["too long"] += 1
        else:
            found.append(t)
    if not found:
        raise Refused(f"{file}: no trajectory is left: {dict(dropped)}; raise --max-tokens "
                      f"{max_tokens}")
    return found


def opening_of(messages: list[dict]) -> int:
    """How many turns a conversation opens with, before the assistant's first reply."""
    roles = [message.get("role") for message in messages]
    return roles.index("assistant")


def trajectory_of(row: dict) -> Trajectory:
    """The trajectory of a line, without ids; ValueError, if it is none. Its first reply is the
    first action."""
    task = row.get("task")
    agent = row.get("agent", "target")
    reward = row.get("reward")
    if not isinstance(task, str) or not isinstance(agent, str):
        raise ValueError(f"task {task!r} and agent {agent!r} have to be names")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not 0 <= reward <= 1:
        raise ValueError(f"reward {reward!r} is no number from 0 to 1")
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"messages {messages!r:.60} are no list of turns")

    roles = [message.get("role") for message in messages]
    for number, role in enumerate(roles, 1):
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"turn {number} has the role {role!r}")
    if "assistant" not in roles:
        raise ValueError("the assistant says nothing in it")
    opening = opening_of(messages)
    if opening == 0:
        raise ValueError("it begins with the assistant, who has read nothing")
    while messages[-1]["role"] != "assistant":  # what followed the last reply
        messages = messages[:-1]
    expected = ["assistant", "user"] * len(messages)
    if roles[opening:len(messages)] != expected[:len(messages) - opening]:
        raise ValueError("its turns are not user and assistant in turn")
    return Trajectory(task, agent, messages=messages, reward=float(reward),
                      steps=roles.count("assistant"), ended="done")


def split(
    trajectories: list[Trajectory],
    least: float,
    dropped: Counter,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Tells experts from others.

    Args:
        trajectories: Those of the file.
        least: What an expert's reward has to exceed, unless it solves its task.
        dropped: Gets the number of trajectories of tasks that have no expert.

    Returns:
        The expert of each task, which is the first of its best trajectories; and all others of
        these tasks.
    """
    experts = {}  # task -> its expert
    for t in coevolve.best_of_tasks(trajectories):
        if coevolve.may_be_expert(t.reward, least, SUCCESS):
            experts[t.task] = t
    others = []
    for t in trajectories:
        if t.task not in experts:
            dropped["of tasks without an expert"] += 1
        elif t is not experts[t.task]:
            others.append(t)
    return [replace(t, agent="expert") for t in experts.values()], others


def pair_rows(
    experts: list[Trajectory],
    others: list[Trajectory],
    s: coevolve.Settings,
    dropped: Counter,
) -> list[dict]:
    """Makes the pairs of all tasks.

    Args:
        experts: One of each task.
        others: The trajectories that are no experts. The paper's F_tgt are those of the first
            agent that is not called "expert", F_fail those of all others.
        s: The settings.
        dropped: Gets, by reason, the number of comparisons that make no pair.

    Returns:
        Rows as in a file of pairs.
    """
    agents = list(dict.fromkeys(t.agent for t in others if t.agent != "expert"))
    target = agents[0] if agents else "expert"
    rows = []
    for expert in experts:
        of_task = [t for t in others if t.task == expert.task]
        own = [t for t in of_task if t.agent == target]
        rest = [t for t in of_task if t.agent != target]
        found = coevolve.d_tgt(expert, own, rest, s, dropped, SUCCESS)
        # Eq. (8) pairs failures of two agents. Those of a single one are paired as in D_fail.
        if len(agents) < 2:
            within = itertools.combinations(own, 2)
            for chosen, rejected in coevolve.ordered_failures(within, dropped, SUCCESS):
                found.append(coevolve.pair_row("failure>failure", chosen, rejected, 1.0, 0.0))
        rows += [dict(task=expert.task, **row) for row in found]
    return rows


def say(experts: list[Trajectory], groups: list[Group], dropped: Counter) -> None:
    """Says what is learned from, and what is not."""
    kinds = Counter(pair.kind for pair in dpo.pairs_of(groups))
    made = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    left = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    print(f"{len(experts):,} experts, {kinds.total():,} pairs ({made or 'SFT is all'}), not used: "
          f"{left or 'nothing'}", flush=True)


# ------------------------------------------------------------------------------------- training


class Learner:
    """A model that is trained in place."""

    def __init__(self, s: coevolve.Settings):
        self.s = s
        on_gpu = torch.cuda.is_available()
        self.accelerator = Accelerator(mixed_precision="bf16" if on_gpu else "no")
        folder = coevolve.MODELS.get(s.model, s.model)
        rows = dpo.read_config(folder).get_text_config().vocab_size
        self.encoder = dpo.Encoder(dpo.read(transformers.AutoTokenizer, folder), rows)
        self.model = dpo.load(self.accelerator, folder, recompute=on_gpu, shard=False)
        self.tokens = s.tokens_per_forward or (8192 if on_gpu else 1024)
        # Some models err where texts of a pass are padded.
        alone, *_ = dpo.trial(self.model, self.encoder)
        self.log_probs = partial(self.log_probs_of, tokens=0 if alone else self.tokens)

    def log_probs_of(self, model, trajectories: list[Trajectory], tokens: int) -> torch.Tensor:
        return dpo.log_probs_in_passes(self.accelerator, model, trajectories, tokens)

    def imitate(self, experts: list[Trajectory]) -> list[dict]:
        """SFT, Eq. (3)-(5): some passes over the experts."""
        steps = coevolve.sft_steps(experts, "learn", self.s)
        return self.train(steps, coevolve.sft_objective(self.s))

    def prefer(self, groups: list[Group]) -> list[dict]:
        """Weighted DPO + SFT, Eq. (9), of which the model as it is now is the reference."""
        s = self.s
        dpo.add_references(self.model, groups, self.log_probs, self.tokens)
        steps = coevolve.preference_steps(groups, "learn", "D_tgt", 1, s)
        divisor = coevolve.pair_weight
        if s.normalise == "pairs":
            divisor = coevolve.pair_count
        loss = partial(dpo.preference_loss, s=s)
        return self.train(steps, dpo.Objective(loss, divisor, s.dpo_lr, s.dpo_warmup))

    def train(self, steps: list[list[Group]], objective: dpo.Objective) -> list[dict]:
        """Trains the model, and says how the loss went; the lines of the log."""
        objective = replace(objective, weight_decay=self.s.weight_decay,
                            max_grad_norm=self.s.max_grad_norm, tokens=self.tokens)
        optimizer = dpo.adamw(self.model, objective)
        log = list(dpo.training(self.model, optimizer, steps, objective, self.log_probs))
        print(f"{len(log):,} steps, loss {log[0]['loss']:.3f} -> {log[-1]['loss']:.3f}", flush=True)
        return log


# --------------------------------------------------------------------------------------- errors


def one_line(error: Exception) -> str | None:
    """The message for an expected error, the user's or the machine's; None: it is a bug. Nothing
    goes on from where it was: the command is given again."""
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if memory or "DefaultCPUAllocator" in str(error):
        return ("out of memory; lower --tokens-per-forward, or --max-tokens, which leaves longer "
                "trajectories out, or give a smaller --model")
    if not isinstance(error, coevolve.EXPECTED):
        return None
    text = " ".join(str(error).split())
    if "No space left on device" in text:
        text += "; make room on the disk of --out, delete that folder, and train again"
    return text


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"learn: {line}", file=sys.stderr)
        sys.exit(2)
