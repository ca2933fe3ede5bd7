"""docs/tour.md: one task's way through both methods, with the numbers of two `--quick` runs.

    bash run.sh tour        makes runs/tour and runs/tour-evolve, then the text and its pictures

`tour.md.j2` holds the sentences, `tour.svg.j2` the pictures, this file what is computed.
"""

import argparse
import math
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import AutoTokenizer

import coevolve
import dpo
import evolve
from dpo import Trajectory
from lab.runfiles import command, config_of
from worlds.files import read_jsonl

ROOT, FILES = Path(__file__).parent.parent, Path(__file__).parent / "page_files"
RUN, EVOLVE = Path("runs/tour"), Path("runs/tour-evolve")
BEFORE, AFTER = RUN / "sft-target", RUN / "iter1/target-agent"
CHARACTERS = 96  # of a line of the first picture


def make_runs() -> None:
    for run, *flags in (RUN, "coevolve"), (EVOLVE, "evolve", "--reuse", RUN):
        subprocess.run([sys.executable, "-m", "lab", "--env", "webshop", "--quick",
                        "--train-tasks", "30", "--eval-tasks", "8", "--threads", "1",
                        "--out", run, "--method", *flags], check=True)


@cache
def trajectories(path: Path) -> dict[str, list[Trajectory]]:
    """task -> its trajectories in a file."""
    found = defaultdict(list)
    for t in coevolve.read(path):
        found[t.task].append(t)
    return found


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


def settings_of(run: Path) -> SimpleNamespace:
    return SimpleNamespace(**config_of(run)["settings"])


@cache
def model_of(folder):
    return dpo.read_model(folder).eval()


@torch.inference_mode()
def log_probs(folder, episodes: list[Trajectory], sampler=dpo.Sampler()) -> list[list[float]]:
    """log pi(t_k | t_<k) of each episode's action tokens, by the model in a folder, in nats."""
    found = dpo.token_log_probs(model_of(folder), episodes, sampler)
    return [each.tolist() for each in found.split([e.action_tokens for e in episodes])]


def first_system() -> dict:
    """A task of runs/tour with all kinds of pairs, a near-success and margins that rose; of several
    the one whose episodes have the fewest different replies."""
    s, found, rose = settings_of(RUN), [], []
    measured = {row["task"]: row for row in read_jsonl(AFTER / "margins.jsonl")}
    for e in coevolve.read(RUN / "experts.jsonl"):
        dropped = Counter()
        target, failure = (trajectories(RUN / f"iter1/{agent}.jsonl")[e.task]
                           for agent in ("target", "failure"))
        pairs = coevolve.d_tgt(e, target, failure, s, dropped)
        for n, pair in enumerate(pairs):
            pair.update((when, measured[e.task][when][n]) for when in ("before", "after"))
        up = [pair["after"][2] > 0 for pair in pairs]
        hard = any(p["kind"] == "expert>failure" and p["rejected"]["reward"] >= s.hard_threshold
                   for p in pairs)
        rose += up
        found.append(((len({p["kind"] for p in pairs}), hard, all(up),
                       -len(tree([e, *target, *failure]))), (e, target, failure, pairs, dropped)))
    expert, target, failure, pairs, dropped = max(found, key=lambda x: x[0])[1]
    by_hand = max((pair for pair in pairs if pair["kind"] == "expert>failure"),
                  key=lambda pair: pair["rejected"]["reward"])
    rejected = failure[by_hand["rejected"]["rollout"]]
    (e_w, e_l), (ref_w, ref_l) = (
        [sum(each) for each in log_probs(folder, [expert, rejected])] for folder in (AFTER, BEFORE))
    base, sft = (log_probs(folder, [expert])[0] for folder in (coevolve.MODELS["tiny"], BEFORE))
    tokens, first = token_rows(expert, base, sft), expert.action_mask[
        expert.action_mask.index(1):].index(0)  # tokens of the first reply
    loss, margin = dpo.dpo_loss(*map(torch.tensor, (e_w, e_l, ref_w, ref_l)), s)
    return dict(
        s=s, task=expert.task, expert=expert, pairs=pairs, dropped=dropped, by_hand=by_hand,
        rose=sum(rose), measured=len(rose),
        nats=(e_w, ref_w, e_l, ref_l), loss=loss.item(), margin=margin.item(),
        tokens=tokens, first=first, sums=dict(base=sum(base), sft=sum(sft)),
        head=dict(base=sum(base[:first]), sft=sum(sft[:first])),
        d_fail=[pair for pair in read_jsonl(RUN / "iter1/pairs-failure.jsonl")
                if pair["task"] == expert.task],
        episodes=[expert, *target, *failure],
        later=[e for agent in ("target", "failure")
               for e in trajectories(RUN / f"iter2/{agent}.jsonl")[expert.task]])


def token_rows(e: Trajectory, base: list[float], sft: list[float]) -> list[dict]:
    """The trajectory's tokens as text; those that are trained on with two log-probabilities."""
    tokenizer, numbers = AutoTokenizer.from_pretrained(BEFORE), iter(zip(base, sft))
    rows = []
    for i, trained in zip(e.ids, e.action_mask):
        before, after = next(numbers) if trained else (None, None)
        rows.append(dict(text=tokenizer.decode([i]), trained=trained, base=before, sft=after))
    return rows


def second_system() -> dict:
    """A task that a signal of runs/tour-evolve led to, whose next group of episodes teaches; of
    several the one with the ratio that clipping changes most."""
    s, iteration, tokenizer = (settings_of(EVOLVE), EVOLVE / "iter1",
                               AutoTokenizer.from_pretrained(BEFORE))
    proposals, found = read_jsonl(iteration / "proposals.jsonl"), []
    sampler = dpo.Sampler(s.grpo_temperature, dpo.Encoder(tokenizer).never(
        model_of(BEFORE).config.vocab_size))
    played = trajectories(EVOLVE / "iter2/target-agent/episodes.jsonl")
    added = [row for row in proposals if row["verdict"] == "added"]
    joined = [row for row in read_jsonl(iteration / "tasks.jsonl") if row["joined"] == 1]
    for row, proposal in zip(joined, added, strict=True):
        group = [e for e in played[row["task"]]
                 if e.iteration == s.evolve_every + 1]  # played by iter1/target-agent as it is
        if advantages := evolve.advantages([e.reward for e in group]):
            found.append(dict(new=row["task"], proposal=proposal,
                              group=list(zip(group, advantages)),
                              term=most_clipped(group, advantages, sampler, s)))
    told = max(found, key=lambda x: abs(x["term"]["unclipped"] - x["term"]["term"]))
    told["term"]["token"] = tokenizer.decode([told["term"]["token"]])
    return dict(
        s=s, **told, refused=Counter(row["reason"] for row in proposals if row["reason"]),
        signal=next(row for row in read_jsonl(iteration / "signals.jsonl") if row["picked"] and
                    all(row[name] == told["proposal"][of]
                        for name, of in (("signal", "signal"), ("task", "source")))))


def most_clipped(group: list[Trajectory], advantages: list[float], sampler, s) -> dict:
    """Of the group's tokens the one whose term of the loss clipping changes most. Its ratio is that
    of iter2/target-agent to the agent that sampled it."""
    old, now = (log_probs(EVOLVE / f"iter{i}/target-agent", group, sampler) for i in (1, 2))
    terms = []
    for k, (e, A) in enumerate(zip(group, advantages)):
        written = [token for token, acts in zip(e.ids, e.action_mask) if acts]
        for token, log_old, log_now in zip(written, old[k], now[k], strict=True):
            ratio = math.exp(log_now - log_old)
            clipped = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
            terms.append(dict(episode=e.rollout, token=token, A=A, old=log_old, now=log_now,
                              ratio=ratio, unclipped=ratio * A, term=min(ratio * A, clipped * A)))
    return max(terms, key=lambda term: abs(term["unclipped"] - term["term"]))


def flowed(tokens: list[dict]) -> list[dict]:
    """The tokens with their places, in characters and lines, where a turn begins a new line."""
    column = line = 0
    for token in tokens:
        n = len(token["text"])
        if column and (column + n > CHARACTERS or token["text"] in ("<|user|>", "<|assistant|>")):
            column, line = 0, line + 1
        token.update(column=column, line=line, n=n)
        column += n + 1
    return tokens


def tree(episodes: list[Trajectory]) -> list[dict]:
    """The replies of all episodes as a tree, a line each: what it follows, and whose end it is."""
    nodes = {}
    for e in sorted(episodes, key=replies):
        for depth, said in enumerate(replies(e)):
            path = tuple(replies(e)[:depth + 1])
            node = nodes.setdefault(path, dict(text=said, depth=depth, line=len(nodes), ends=[],
                                               agents=set(), up=nodes.get(path[:-1])))
            node["agents"].add(e.agent)
        node["ends"].append(e)
    return list(nodes.values())


def code(file: str, part: str) -> str:
    """The one line of a file that holds `part`, as it stands there."""
    line, = (line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
             if part in line)
    return line


def make_tour(out: Path) -> None:
    env = Environment(loader=FileSystemLoader(FILES), undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    env.globals.update(code=code, replies=replies, run=RUN, evolve=EVOLVE)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the last digit may depend on their number
    first, second = first_system(), second_system()
    pictures = dict(mask=flowed(first["tokens"]), tree=tree(first["episodes"]),
                    margins=first["pairs"])
    for kind, drawn in pictures.items():
        svg = env.get_template("tour.svg.j2").render(kind=kind, drawn=drawn)
        (out / f"tour-{kind}.svg").write_text(svg, encoding="utf-8")
    text = env.get_template("tour.md.j2").render(a=first, b=second)
    (out / "tour.md").write_text(text, encoding="utf-8")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh tour", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs",
                        help="the folder of tour.md and its pictures [docs]")
    out = parser.parse_args(argv).out
    transformers.utils.logging.disable_progress_bar()
    make_runs()
    make_tour(out)
    print(f"{out / 'tour.md'} and its pictures")


if __name__ == "__main__":
    command("tour", main)
