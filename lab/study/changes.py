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
from lab.runfiles import config_of, phases_of, phases_with
from lab.study.methods import Runs, setting_differences

PAIR = {"kind", "chosen", "rejected", "weight", "sft_weight"}  # keys of a pair
EPISODE = {"task", "messages", "reward"}                       # keys of an episode


def changes(runs: Runs) -> Table:
    """Returns a table of the differences between each arm and the first arm."""
    first, *others = runs
    rows = []
    for arm, by_seed in runs.items():
        names = code_changes([*by_seed.values()][:1], by_seed.values())
        if names:
            rows.append((arm, "code, between its seeds", ", ".join(names)))
    for arm in others:
        if not setting_differences({first: runs[first], arm: runs[arm]}):
            rows.append((arm, "settings", "none differ"))
        names = code_changes(runs[first].values(), runs[arm].values())
        rows.append((arm, "code", ", ".join(names) or "none differs"))
        common = [seed for seed in runs[first] if seed in runs[arm]]
        if not common:
            rows.append((arm, "outputs", "no seed in common"))
        for seed in common:
            pair = runs[first][seed], runs[arm][seed]
            rows.append((arm, f"first output, seed {seed}", first_difference(*pair)))
            rows.append((arm, f"greedy episodes, seed {seed}", episode_changes(*pair)))
    return f"What differs from {first}", ["<method", "<what", "<difference"], rows


def code_changes(before, after) -> list[str]:
    """Compares the recorded code of each run in `before` with that of each run in `after`. Returns
    the names of all code files that differ."""
    names = {}
    for run in before:
        for other in after:
            if run != other:
                records = [config_of(each).get("code") for each in (run, other)]
                names |= dict.fromkeys(code_differences(*records))
    return [*names]


def first_difference(before: Path, after: Path) -> str:
    """Finds the first output that both runs have and that differs between them. Returns its name
    and a description of the difference. If no common output differs, the text names an output that
    exists in only one of the runs."""
    outputs = {run: phases_of(run) for run in (before, after)}
    for output in outputs[before]:
        difference = output in outputs[after] and output_change(before / output, after / output)
        if difference:
            return f"{output}: {difference}"
    alone = [f"only {run} has {output}" for run, other in ((before, after), (after, before))
             for output in outputs[run] if output not in outputs[other]]
    return "; ".join(["no output of both differs", *alone[:1]])


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
    files = read_jsonl(before), read_jsonl(after)
    rows = [*files[0], *files[1]]
    if all(EPISODE <= row.keys() for row in rows):
        count = count_changed(*map(episodes_in, files))
        return count and f"{count} episodes differ"
    if all(PAIR <= row.keys() for row in rows):
        kinds = [phrase("pairs", Counter(row["kind"] for row in file), {}) for file in files]
        if kinds[0] != kinds[1]:
            return f"{kinds[0]} -> {kinds[1]}"
        changed = sum(row != other for row, other in zip(*files))
        weights = [sum(row["weight"] for row in file) for file in files]
        return f"{changed} of {kinds[0]} differ, weights {weights[0]:.4g} -> {weights[1]:.4g}"
    return f"{len(files[0])} -> {len(files[1])} lines, of other content"


def agent_change(before: Path, after: Path) -> str:
    """Describes the difference between two agents' folders. Returns "" if the agents are equal.

    The text has the numbers of training steps if they differ. It also has the values of the first
    training step (loss, loss terms and gradient norm) and the largest difference between the
    weights.
    """
    weights = [{file.name: file_hash(file) for file in folder.glob("*.safetensors")}
               for folder in (before, after)]
    logs = [read_jsonl(file) if file.is_file() else []
            for file in (before / "train.jsonl", after / "train.jsonl")]
    if weights[0] == weights[1] and logs[0] == logs[1]:
        return ""
    parts = []
    if len(logs[0]) != len(logs[1]):
        parts.append(f"{len(logs[0])} -> {len(logs[1])} steps")
    steps = [log[0] if log else {} for log in logs]
    for name in "loss", "dpo", "sft", "norm":
        if name in steps[0] and name in steps[1]:
            parts.append(f"first {name} {steps[0][name]:.4g} -> {steps[1][name]:.4g}")
    parts.append("the same weights" if weights[0] == weights[1] else weight_change(before, after))
    return "; ".join(parts)


def weight_change(before: Path, after: Path) -> str:
    """Returns a text with the largest absolute difference between the weights of two agents.
    Rounding alone causes a difference of about 1e-8."""
    largest = 0.0
    for file in before.glob("*.safetensors"):
        if not (after / file.name).exists():
            return "other files of weights"
        with safe_open(file, "pt") as weights, safe_open(after / file.name, "pt") as others:
            shapes = [{name: opened.get_slice(name).get_shape() for name in opened.keys()}
                      for opened in (weights, others)]
            if shapes[0] != shapes[1]:
                return "other names or shapes of weights"
            for name in weights.keys():
                difference = weights.get_tensor(name) - others.get_tensor(name)
                largest = max(largest, difference.abs().max().item())
    return f"weights differ by at most {largest:.2g}"


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
    outputs = []  # one dict per run: evaluation file -> iteration
    for run in before, after:
        rows = phases_with(phases_of(run), "split", "name", "episodes")
        outputs.append({row["output"]: row["i"] for row in rows
                        if (run / row["output"]).is_file()})
    common = outputs[0].keys() & outputs[1].keys()
    if not common:
        return "none that both have"
    i = max(outputs[0][output] for output in common)
    episodes, others = {}, {}
    for output in common:
        if outputs[0][output] == i:
            episodes |= episodes_in(read_jsonl(before / output))
            others |= episodes_in(read_jsonl(after / output))
    count = count_changed(episodes, others)
    if not count:
        return f"all {len(episodes)} are identical, iteration {i}"
    return f"{count} have other text, iteration {i}"
