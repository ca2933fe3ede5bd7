"""What a run changed against another one: its code, the first output that differs, and its greedy
episodes. `compare` prints this first, since two arms that were meant to differ may be the same."""

from collections import Counter
from pathlib import Path

from safetensors import safe_open

from common.files import file_hash, read_jsonl
from engine.code import code_differences
from engine.console import phrase
from lab.page.report import Table
from lab.runfiles import config_of, phases_of, that_found
from lab.study.methods import Runs, differences

PAIR = ("chosen", "rejected", "weight", "sft_weight")
EPISODE = ("task", "messages", "reward")


def changes(runs: Runs) -> Table:
    """Return what differs between each arm and the first: settings, code, outputs, episodes."""
    first, *others = runs
    rows = []
    for arm, by_seed in runs.items():
        code = code_of(list(by_seed.values()), list(by_seed.values())[:1])
        if code:
            rows.append((arm, "code, between its seeds", ", ".join(code)))
    for arm in others:
        if not differences({first: runs[first], arm: runs[arm]}):
            rows.append((arm, "settings", "none differ"))
        code = code_of(list(runs[arm].values()), list(runs[first].values()))
        rows.append((arm, "code", ", ".join(code) or "none differs"))
        common = [seed for seed in runs[first] if seed in runs[arm]]
        if not common:
            rows.append((arm, "outputs", "no seed in common"))
        for seed in common:
            before, after = runs[first][seed], runs[arm][seed]
            rows.append((arm, f"first output, seed {seed}", first_difference(before, after)))
            rows.append((arm, f"greedy episodes, seed {seed}", episode_differences(before, after)))
    return f"What differs from {first}", ["<method", "<what", "<difference"], rows


def code_of(runs: list[Path], others: list[Path]) -> list[str]:
    """Return the files of code that differ between any run and any of some others."""
    names = {}
    for run in runs:
        for other in others:
            one, two = config_of(other).get("code"), config_of(run).get("code")
            if run != other:
                names |= dict.fromkeys(code_differences(one, two))
    return list(names)


def first_difference(before: Path, after: Path) -> str:
    """Return the first output of both runs that differs, and how."""
    rows, others = phases_of(before), phases_of(after)
    own = [f"only {run} has {output}" for run, some, rest in
           ((before, rows, others), (after, others, rows)) for output in some if output not in rest]
    for output in rows:
        if output in others:
            how = difference_of(before / output, after / output)
            if how:
                return f"{output}: {how}"
    return "; ".join(["no output of both differs", *own[:1]])


def difference_of(before: Path, after: Path) -> str:
    """Return how an output differs from another run's; "" if it does not."""
    if not before.exists() or not after.exists():
        return "" if before.exists() == after.exists() else "one run has deleted it"
    if before.is_dir():
        return difference_of_agents(before, after)
    if file_hash(before) == file_hash(after):
        return ""
    rows, others = read_jsonl(before), read_jsonl(after)
    if all({*EPISODE} <= row.keys() for row in rows + others):
        count = count_other(episodes_in(rows), episodes_in(others))
        return count and f"{count} episodes differ"  # else only log-probabilities, by rounding
    if all({"kind", *PAIR} <= row.keys() for row in rows + others):
        kinds = [phrase("pairs", Counter(row["kind"] for row in some), {})
                 for some in (rows, others)]
        if kinds[0] != kinds[1]:
            return f"{kinds[0]} -> {kinds[1]}"
        changed = sum(one != other for one, other in zip(rows, others))
        weights = [sum(row["weight"] for row in some) for some in (rows, others)]
        return f"{changed} of {kinds[0]} differ, weights {weights[0]:.4g} -> {weights[1]:.4g}"
    return f"{len(rows)} -> {len(others)} lines, of other content"


def difference_of_agents(before: Path, after: Path) -> str:
    """Return how two agents differ: loss, its terms and norm of the first step, and the weights."""
    weights = [{file.name: file_hash(file) for file in folder.glob("*.safetensors")}
               for folder in (before, after)]
    logs = [read_jsonl(file) if file.is_file() else []
            for file in (before / "train.jsonl", after / "train.jsonl")]
    if weights[0] == weights[1] and logs[0] == logs[1]:
        return ""
    parts = []
    if len(logs[0]) != len(logs[1]):
        parts.append(f"{len(logs[0])} -> {len(logs[1])} steps")
    if logs[0] and logs[1]:
        one, other = logs[0][0], logs[1][0]
        for name in "loss", "dpo", "sft", "norm":
            if name in one and name in other:
                parts.append(f"first {name} {one[name]:.4g} -> {other[name]:.4g}")
    parts.append("the same weights" if weights[0] == weights[1] else weights_apart(before, after))
    return "; ".join(parts)


def weights_apart(before: Path, after: Path) -> str:
    """Return by how much the weights of two agents differ. Rounding alone makes about 1e-8."""
    largest = 0.0
    for file in before.glob("*.safetensors"):
        if not (after / file.name).exists():
            return "other files of weights"
        with safe_open(file, "pt") as one, safe_open(after / file.name, "pt") as other:
            if {*one.keys()} != {*other.keys()}:
                return "other names of weights"
            for name in one.keys():
                difference = one.get_tensor(name) - other.get_tensor(name)
                largest = max(largest, difference.abs().max().item())
    return f"weights differ by at most {largest:.2g}"


def episodes_in(rows: list[dict]) -> dict[tuple, tuple]:
    """Return (what was said, reward) of each episode, by its name."""
    return {(row["task"], row.get("agent"), row.get("iteration"), row.get("rollout")):
            (row["messages"], row["reward"]) for row in rows}


def count_other(episodes: dict, others: dict) -> str:
    """Return "N of M" of the episodes that both have, if any differs, or if one lacks some."""
    common = episodes.keys() & others.keys()
    count = sum(episodes[name] != others[name] for name in common)
    lacking = len(episodes.keys() ^ others.keys())
    more = f" (and {lacking} that one of them lacks)" if lacking else ""
    return f"{count} of {len(common)}{more}" if count or lacking else ""


def episode_differences(before: Path, after: Path) -> str:
    """Return how many greedy episodes differ in the last iteration that both have evaluated."""
    evaluated = []
    for run in before, after:
        rows = that_found(phases_of(run), "split", "name", "episodes")
        evaluated.append({row["output"]: row["i"] for row in rows
                          if (run / row["output"]).is_file()})
    common = evaluated[0].keys() & evaluated[1].keys()
    if not common:
        return "none that both have"
    i = max(evaluated[0][output] for output in common)
    episodes, others = {}, {}
    for output in common:
        if evaluated[0][output] == i:
            episodes |= episodes_in(read_jsonl(before / output))
            others |= episodes_in(read_jsonl(after / output))
    count = count_other(episodes, others)
    if not count:
        return f"all {len(episodes)} are identical, iteration {i}"
    return f"{count} have other text, iteration {i}"
