"""docs/tour.md: one task's way through both methods, with the numbers of two small runs.

    bash run.sh tour        makes runs/tour and runs/tour-evolve, then the text and its pictures
"""

import argparse
import math
from collections import Counter, defaultdict
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import AutoTokenizer

import coevolve
import dpo
from common.files import read_jsonl
from dpo import Trajectory
from evolve import advantages, replies
from lab.careful.run import Run
from lab.runfiles import command, config_of
from lab.settings import METHODS, Settings

FILES = Path(__file__).parent
RUN, EVOLVE = Path("runs/tour"), Path("runs/tour-evolve")
SFT, TRAINED = RUN / "sft-target", RUN / "iter1/target-agent"
SMALL = "--env webshop --quick --train-tasks 8 --eval-tasks 1 --threads 1"
RUNS = {RUN: "--method coevolve --iterations 1",
        EVOLVE: f"--method evolve --reuse {RUN} --grpo-steps 2 --evolve-every 1 --start-tasks 4 "
                "--step-tasks 4 --step-rollouts 6 --picks 2"}
CHARACTERS = 96  # of a line of the first picture


def by_task(file: Path) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for row in read_jsonl(file):
        found[row["task"]].append(row)
    return found


def first_system() -> dict:
    """A task of runs/tour with all kinds of pairs, a hard negative by the failure agent and margins
    that rose, this one's most."""
    s, measured = config_of(RUN)["settings"], by_task(TRAINED / "margins.jsonl")
    found, every = by_task(RUN / "iter1/pairs-target.jsonl"), coevolve.read(*(
        RUN / name for name in ("experts.jsonl", "iter1/target.jsonl", "iter1/failure.jsonl")))
    for task, pairs in found.items():
        for pair, before, after in zip(pairs, measured[task][0]["before"],
                                       measured[task][0]["after"]):
            pair.update(before=before, after=after, rose=after[2] > 0)
    task, by_hand = max((
        (task, hard) for task, pairs in found.items() if all(pair["rose"] for pair in pairs)
        and len({pair["kind"] for pair in pairs}) == 3 for hard in pairs
        if hard["kind"] == "expert>failure" and hard["rejected"]["reward"] >= s["hard_threshold"]),
        key=lambda chosen: chosen[1]["after"][2])
    rose = [pair["rose"] for pairs in found.values() for pair in pairs]
    episodes = [e for e in every if e.task == task]
    return dict(
        s=s, task=task, expert=episodes[0], episodes=episodes, pairs=found[task],
        by_hand=by_hand, loss=math.log(1 + math.exp(-by_hand["after"][2])),
        d_fail=by_task(RUN / "iter1/pairs-failure.jsonl")[task],
        tokens=tokens(episodes[0]), rose=sum(rose), measured=len(rose))


def tokens(e: Trajectory) -> list[dict]:
    """A trajectory's tokens, with log-probabilities in nats by the model as shipped and after SFT,
    and places in a text in which a turn begins a line."""
    tokenizer, rows, column, line = AutoTokenizer.from_pretrained(SFT), [], 0, 0
    log_probs = zip(*(dpo.token_log_probs(dpo.read_model(folder).eval(), [e]).tolist()
                      for folder in (coevolve.MODELS["tiny"], SFT)))
    for i, trained in zip(e.ids, e.action_mask):
        text = tokenizer.decode([i])
        if column and (column + len(text) > CHARACTERS or text in ("<|user|>", "<|assistant|>")):
            column, line = 0, line + 1
        base, sft = next(log_probs) if trained else (0.0, 0.0)
        rows.append(dict(text=text, trained=trained, base=base, sft=sft, column=column, line=line))
        column += len(text) + 1
    return rows


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


def second_system() -> dict:
    """The first task that a signal of runs/tour-evolve led to and whose episodes teach."""
    s, made = config_of(EVOLVE)["settings"], EVOLVE / "iter1"
    proposals, played = read_jsonl(made / "proposals.jsonl"), defaultdict(list)
    for e in coevolve.read(EVOLVE / "iter2/target-agent/episodes.jsonl"):
        played[e.task].append(e.reward)
    added = zip((row["task"] for row in read_jsonl(made / "tasks.jsonl") if row["joined"] == 1),
                (row for row in proposals if row["verdict"] == "added"), strict=True)
    task, proposal = next(each for each in added if advantages(played[each[0]]))
    return dict(
        s=s, task=task, proposal=proposal, rewards=played[task],
        advantages=advantages(played[task]),
        refused=Counter(row["reason"] for row in proposals if row["reason"]),
        signal=next(row for row in read_jsonl(made / "signals.jsonl") if row["picked"] and (
            row["signal"], row["task"]) == (proposal["signal"], proposal["source"])))


def make_tour(out: Path) -> None:
    env = Environment(loader=FileSystemLoader(FILES), undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    first, second = first_system(), second_system()
    out.mkdir(parents=True, exist_ok=True)
    for name, values in {
            "tour-mask.svg": dict(kind="mask", drawn=first["tokens"]),
            "tour-tree.svg": dict(kind="tree", drawn=tree(first["episodes"])),
            "tour.md": dict(a=first, b=second, run=RUN, evolve=EVOLVE)}.items():
        text = env.get_template(f"tour{Path(name).suffix}.j2").render(values)
        (out / name).write_text(text, encoding="utf-8")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh tour", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(coevolve.__file__).parent / "docs",
                        help="the folder of tour.md and its pictures [docs]")
    out = parser.parse_args(argv).out
    torch.set_num_threads(1)  # the last digit may depend on their number
    for run, flags in RUNS.items():
        coevolve.main([*f"{SMALL} {flags} --out".split(), str(run)], Settings, Run, METHODS)
    make_tour(out)
    print(f"{out / 'tour.md'} and its pictures")


if __name__ == "__main__":
    command("tour", main)
