"""Finds the differences between runs: in settings, in code, in the first output that differs, and
in the episodes of the last evaluation.

`run.sh compare` prints these differences first. They reveal mistakes, such as two arms that were
meant to differ but are identical. An arm is a method with some settings (see `methods.py`), and it
has one run per seed.
"""

import itertools
from pathlib import Path

from safetensors import safe_open

from common.files import file_hash
from engine.code import code_differences
from engine.console import phrase
from lab.page.report import RECORDS, Table
from lab.runfiles import config_of, phases_of, rows_in
from lab.study.methods import Runs, setting_differences
from lab.study.numbers import paired, text_of


def changes(runs: Runs, last: list[dict]) -> Table:
    """Returns a table of the differences between each other arm and the first arm. `last` contains
    the last evaluations of the runs."""
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
            before, after = runs[first][seed], runs[arm][seed]
            rows.append((arm, f"first output, seed {seed}", first_difference(before, after)))
            for name, run, other in (first, before, after), (arm, after, before):
                of_other = phases_of(other)
                lacking = [output for output in phases_of(run) if output not in of_other]
                if lacking:
                    rows.append((arm, f"only in {name}, seed {seed}", listed(lacking)))
        for _, (agent, split), pairs in paired(last, [(arm, first)], ["agent", "split"]):
            rows.append((arm, f"episodes of {agent}, {split}", episode_changes(pairs)))
    return f"What differs from {first}", ["method", "what", "difference"], rows


def listed(outputs: list[str]) -> str:
    """Returns the first four names in a list, and the number of the others."""
    more = f" and {len(outputs) - 4} more" if len(outputs) > 4 else ""
    return ", ".join(outputs[:4]) + more


def code_changes(run: Path, others) -> list[str]:
    """Compares the recorded code of a run with that of each other run. Returns the names of all
    code files that differ."""
    code = config_of(run).get("code")
    names = {}
    for other in others:
        names |= dict.fromkeys(code_differences(code, config_of(other).get("code")))
    return [*names]


def first_difference(before: Path, after: Path) -> str:
    """Returns the name of the first output that differs between two runs, and the difference.

    Outputs of only one run are ignored. Evaluations are also ignored, because `--method evaluate`
    saves the evaluation of any agent under the name that other runs use for their first evaluation.
    """
    others = phases_of(after)
    for output, record in phases_of(before).items():
        if output in others and "split" not in record:
            differences = content_change(before / output, after / output)
            differences += number_changes(record, others[output])
            if differences:
                return f"{output}: {listed(differences)}"
    return "no output of both differs"


def content_change(before: Path, after: Path) -> list[str]:
    """Describes the difference between an output (a file, or an agent's folder) and the same output
    of another run, or returns []. The log-probabilities in trajectories are not compared, because
    rounding changes them."""
    if not before.exists() or not after.exists():  # the user has deleted it
        return []
    if before.is_dir():
        return weight_change(before, after)
    rows = [row | dict(log_probs=[]) for row in rows_in(before)]
    others = [row | dict(log_probs=[]) for row in rows_in(after)]
    return [f"{changed(rows, others)} lines differ"] if rows != others else []


def changed(rows: list, others: list) -> str:
    count = sum(row != other for row, other in itertools.zip_longest(rows, others))
    return f"{count} of {max(len(rows), len(others))}"


def number_changes(record: dict, other: dict) -> list[str]:
    """Returns the numbers that differ between two records of phases.json, such as the loss."""
    changes = []
    for name, value in record.items():
        new = other.get(name)
        if name in ("seconds", *RECORDS) or value == new:
            continue
        if isinstance(value, dict) and isinstance(new, dict):
            changes.append(f"{phrase(name, value, {})} -> {phrase(name, new, {})}")
        else:
            texts = [f"{x:.8g}" if isinstance(x, float) else str(x) for x in (value, new)]
            changes.append(f"{name} {' -> '.join(texts)}")
    return changes


def weight_change(before: Path, after: Path) -> list[str]:
    """Describes the largest absolute difference between the weights of two agents, or returns [] if
    their weight files are identical. Rounding alone causes a difference of about 1e-8."""
    largest = None
    for file in before.glob("*.safetensors"):
        other = after / file.name
        if not other.exists() or file_hash(file) == file_hash(other):
            continue
        if file.stat().st_size != other.stat().st_size:
            return ["other sizes of weight files"]
        with safe_open(file, "pt") as weights, safe_open(other, "pt") as others:
            for name in weights.keys():
                difference = weights.get_tensor(name) - others.get_tensor(name)
                largest = max(largest or 0.0, difference.abs().max().item())
    return [] if largest is None else [f"weights differ by at most {largest:.2g}"]


def episode_changes(pairs: list[tuple[dict, dict]]) -> str:
    """Returns the number of episodes that differ in messages or reward, as a text. `pairs` contains
    two evaluations for each seed, which may be from different iterations."""
    sampling = text_of("sampling", pairs)
    if " - " in sampling:
        return f"not compared: {sampling}"
    texts, others = [], []
    for e, other in pairs:
        texts += texts_of(e)
        others += texts_of(other)
    iteration = text_of("iteration", pairs)
    if texts == others:
        return f"all {len(texts)} are identical, iteration {iteration}"
    return f"{changed(texts, others)} have other text, iteration {iteration}"


def texts_of(e: dict) -> list[tuple]:
    return [(row["messages"], row["reward"]) for row in rows_in(e["file"])]
