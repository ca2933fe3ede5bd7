"""Finds the differences between runs: in settings, in code, in the first output that differs, and
in the episodes of the last evaluation.

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
from lab.runfiles import config_of, phases_of, rows_in
from lab.study.methods import Runs, setting_differences

PAIR = {"kind", "chosen", "rejected", "weight", "sft_weight"}  # keys of a pair
EPISODE = {"task", "messages", "reward"}                       # keys of an episode


def changes(runs: Runs, last: list[dict]) -> Table:
    """Returns a table of the differences between each arm and the first arm. `last` has the last
    evaluations of the runs."""
    first, *others = runs
    agents = dict.fromkeys(e["agent"] for e in last)
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
            before, after = runs[first][seed], runs[arm][seed]
            rows.append((arm, f"first output, seed {seed}", first_difference(before, after)))
            for name, run, other in (first, before, after), (arm, after, before):
                lacking = [output for output in phases_of(run) if output not in phases_of(other)]
                if lacking:
                    rows.append((arm, f"only in {name}, seed {seed}", listed(lacking)))
            for agent in agents:
                played = [e for e in last if (e["agent"], e["seed"]) == (agent, seed)]
                of_first = [e for e in played if e["arm"] == first]
                of_arm = [e for e in played if e["arm"] == arm]
                if of_first and of_arm:
                    rows.append((arm, f"episodes of {agent}, seed {seed}",
                                 episode_changes(of_first, of_arm)))
    return f"What differs from {first}", ["<method", "<what", "<difference"], rows


def listed(outputs: list[str]) -> str:
    """Returns the first four names in a list, and the number of the others."""
    more = f" and {len(outputs) - 4} more" if len(outputs) > 4 else ""
    return ", ".join(outputs[:4]) + more


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
    and a description of the difference."""
    others = phases_of(after)
    for output in phases_of(before):
        difference = output in others and output_change(before / output, after / output)
        if difference:
            return f"{output}: {difference}"
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
        weight, other_weight = (sum(row["weight"] for row in side) for side in (rows, others))
        return f"{changed} of {pairs} differ, weights {weight:.4g} -> {other_weight:.4g}"
    return f"{len(rows)} -> {len(others)} lines, of other content"


def pair_counts(rows: list[dict]) -> str:
    return phrase("pairs", Counter(row["kind"] for row in rows), {})


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
        if not other.exists() or file.stat().st_size != other.stat().st_size:
            return "weight files of other sizes"
        if file_hash(file) == file_hash(other):
            continue
        with safe_open(file, "pt") as weights, safe_open(other, "pt") as others:
            for name in weights.keys():
                difference = weights.get_tensor(name) - others.get_tensor(name)
                largest = max(largest or 0.0, difference.abs().max().item())
    return "" if largest is None else f"weights differ by at most {largest:.2g}"


def episodes_in(rows: list[dict]) -> dict[tuple, tuple]:
    """Returns a dict of episodes. The key (task, agent, iteration, rollout) identifies an episode.
    The value is (messages, reward)."""
    episodes = {}
    for row in rows:
        key = row["task"], row.get("agent"), row.get("iteration"), row.get("rollout")
        episodes[key] = row["messages"], row["reward"]
    return episodes


def count_changed(episodes: dict, others: dict) -> str:
    """Compares two dicts of episodes, as `episodes_in` returns them. Returns the text "N of M" if N
    of the M common episodes differ. The number of episodes that only one dict has is added in
    brackets. Returns "" if the dicts are equal."""
    common = episodes.keys() & others.keys()
    count = sum(episodes[name] != others[name] for name in common)
    lacking = len(episodes.keys() ^ others.keys())
    more = f" (and {lacking} that one of them lacks)" if lacking else ""
    return f"{count} of {len(common)}{more}" if count or lacking else ""


def episode_changes(evals: list[dict], others: list[dict]) -> str:
    """Compares the last evaluations of an agent in two runs, which may have been made after
    different iterations. Returns a text with the number of episodes that differ."""
    sampling = dict.fromkeys(e["sampling"] for e in [*evals, *others])
    if len(sampling) > 1:
        return f"not compared: {' - '.join(sampling)}"
    iterations = " - ".join(dict.fromkeys(str(e["i"]) for e in [*evals, *others]))
    episodes, other_episodes = played_in(evals), played_in(others)
    count = count_changed(episodes, other_episodes)
    if not count:
        return f"all {len(episodes)} are identical, iteration {iterations}"
    return f"{count} have other text, iteration {iterations}"


def played_in(evals: list[dict]) -> dict[tuple, tuple]:
    """Returns the episodes of an agent's evaluations on all splits. Agents of two runs may have
    other names and iterations, so these are left out of the keys."""
    rows = []
    for e in evals:
        rows += [row | dict(agent="", iteration=0) for row in rows_in(e["file"])]
    return episodes_in(rows)
