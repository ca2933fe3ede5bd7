"""Finds the differences between runs: in settings, in code, in the first output that differs, and
in the greedy episodes of the evaluation.

`run.sh compare` prints these differences first. They reveal mistakes, such as two arms that were
meant to differ but are identical. An arm is a method with some settings (see `methods.py`), and it
has one run per seed.
"""

from collections import Counter
from pathlib import Path

from safetensors import safe_open

from common.files import file_hash, read_jsonl
from engine.code import code_differences
from engine.console import phrase
from lab.page.report import Table
from lab.runfiles import config_of, phases_of, phases_with, rows_in
from lab.study.methods import Runs, setting_differences

PAIR = {"kind", "chosen", "rejected", "weight", "sft_weight"}  # keys of a pair
EPISODE = {"task", "messages", "reward"}                       # keys of an episode


def changes(runs: Runs) -> Table:
    """Returns a table of the differences between each arm and the first arm."""
    first, *others = runs
    rows = []
    for arm, by_seed in runs.items():
        run, *other_seeds = by_seed.values()
        names = code_changes(run, other_seeds)
        if names:
            rows.append((arm, "code, between its seeds", ", ".join(names)))
    for arm in others:
        if not setting_differences({first: runs[first], arm: runs[arm]}):
            rows.append((arm, "settings", "none differ"))
        run, *_ = runs[first].values()
        names = code_changes(run, runs[arm].values())
        rows.append((arm, "code", ", ".join(names) or "none differs"))
        common = [seed for seed in runs[first] if seed in runs[arm]]
        if not common:
            rows.append((arm, "outputs", "no seed in common"))
        for seed in common:
            pair = runs[first][seed], runs[arm][seed]
            rows.append((arm, f"first output, seed {seed}", first_difference(*pair)))
            rows.append((arm, f"greedy episodes, seed {seed}", episode_changes(*pair)))
    return f"What differs from {first}", ["<method", "<what", "<difference"], rows


def code_changes(run: Path, others) -> list[str]:
    """Compares the recorded code of a run with that of each of the other runs. Returns the names of
    all code files that differ."""
    code = config_of(run).get("code")
    names = {}
    for other in others:
        names |= dict.fromkeys(code_differences(code, config_of(other).get("code")))
    return [*names]


def first_difference(before: Path, after: Path) -> str:
    """Finds the first output that both runs have and that differs between them. Returns its name
    and a description of the difference. If no common output differs, the text names an output that
    exists in only one of the runs."""
    outputs, others = phases_of(before), phases_of(after)
    for output in outputs:
        difference = output in others and output_change(before / output, after / output)
        if difference:
            return f"{output}: {difference}"
    for run, own, theirs in (before, outputs, others), (after, others, outputs):
        for output in own:
            if output not in theirs:
                return f"no output of both differs; only {run} has {output}"
    return "no output of both differs"


def output_change(before: Path, after: Path) -> str:
    """Describes the difference between an output (a file, or an agent's folder) and the same output
    of another run. Returns "" if they are equal. Two episodes are equal if their messages and
    rewards are equal. Their log-probabilities are not compared, because rounding changes them."""
    if not before.exists() or not after.exists():
        return "" if before.exists() == after.exists() else "one run has deleted it"
    if before.is_dir():
        return agent_change(before, after)
    if file_hash(before) == file_hash(after):
        return ""
    rows, others = read_jsonl(before), read_jsonl(after)
    if all(EPISODE <= row.keys() for row in rows + others):
        count = count_changed(episodes_in(rows), episodes_in(others))
        return count and f"{count} episodes differ"
    if all(PAIR <= row.keys() for row in rows + others):
        pairs, other_pairs = pair_counts(rows), pair_counts(others)
        if pairs != other_pairs:
            return f"{pairs} -> {other_pairs}"
        changed = sum(row != other for row, other in zip(rows, others))
        weight, other_weight = weight_of(rows), weight_of(others)
        return f"{changed} of {pairs} differ, weights {weight:.4g} -> {other_weight:.4g}"
    return f"{len(rows)} -> {len(others)} lines, of other content"


def pair_counts(rows: list[dict]) -> str:
    return phrase("pairs", Counter(row["kind"] for row in rows), {})


def weight_of(rows: list[dict]) -> float:
    """Returns the sum of the weights of all pairs in a pairs file."""
    return sum(row["weight"] for row in rows)


def agent_change(before: Path, after: Path) -> str:
    """Describes the difference between two agents' folders. Returns "" if the agents are equal.

    The text has the numbers of training steps if they differ. It also has the values of the first
    training step (loss, loss terms and gradient norm) and the largest difference between the
    weights.
    """
    weights = weight_change(before, after)
    log, other = rows_in(before / "train.jsonl"), rows_in(after / "train.jsonl")
    if not weights and log == other:
        return ""
    parts = []
    if len(log) != len(other):
        parts.append(f"{len(log)} -> {len(other)} steps")
    for step, other_step in zip(log[:1], other[:1]):
        for name in "loss", "dpo", "sft", "norm":
            if name in step and name in other_step:
                parts.append(f"first {name} {step[name]:.4g} -> {other_step[name]:.4g}")
    return "; ".join([*parts, weights or "the same weights"])


def weight_change(before: Path, after: Path) -> str:
    """Returns a text with the largest absolute difference between the weights of two agents, or ""
    if their weight files are equal. Rounding alone causes a difference of about 1e-8."""
    largest = None
    for file in before.glob("*.safetensors"):
        other = after / file.name
        if not other.exists():
            return "other files of weights"
        if file_hash(file) == file_hash(other):
            continue
        with safe_open(file, "pt") as weights, safe_open(other, "pt") as others:
            if shapes_in(weights) != shapes_in(others):
                return "other names or shapes of weights"
            for name in weights.keys():
                difference = weights.get_tensor(name) - others.get_tensor(name)
                largest = max(largest or 0.0, difference.abs().max().item())
    return "" if largest is None else f"weights differ by at most {largest:.2g}"


def shapes_in(weights) -> dict[str, list[int]]:
    return {name: weights.get_slice(name).get_shape() for name in weights.keys()}


def episodes_in(rows: list[dict]) -> dict[tuple, tuple]:
    """Returns a dict of episodes. The key (task, agent, iteration, rollout) identifies an episode.
    The value is (messages, reward)."""
    return {tuple(row.get(key) for key in ("task", "agent", "iteration", "rollout")):
            (row["messages"], row["reward"]) for row in rows}


def count_changed(episodes: dict, others: dict) -> str:
    """Compares two dicts of episodes, as `episodes_in` returns them. Returns the text "N of M" if N
    of the M common episodes differ. The number of episodes that only one dict has is added in
    brackets. Returns "" if the dicts are equal."""
    common = episodes.keys() & others.keys()
    count = sum(episodes[name] != others[name] for name in common)
    lacking = len(episodes.keys() ^ others.keys())
    more = f" (and {lacking} that one of them lacks)" if lacking else ""
    return f"{count} of {len(common)}{more}" if count or lacking else ""


def episode_changes(before: Path, after: Path) -> str:
    """Compares the greedy episodes of two runs in the last iteration that both have evaluated.
    Returns a text with the number of episodes that differ."""
    common = [row for row in phases_with(phases_of(before), "split", "name", "episodes")
              if (before / row["output"]).is_file() and (after / row["output"]).is_file()]
    if not common:
        return "none that both have"
    i = max(row["i"] for row in common)
    episodes, others = {}, {}
    for row in common:
        if row["i"] == i:
            episodes |= episodes_in(read_jsonl(before / row["output"]))
            others |= episodes_in(read_jsonl(after / row["output"]))
    count = count_changed(episodes, others)
    if not count:
        return f"all {len(episodes)} are identical, iteration {i}"
    return f"{count} have other text, iteration {i}"
