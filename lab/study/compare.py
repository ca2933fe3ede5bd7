"""The report on several runs: tables in the terminal, and a folder with them and its figures.

    bash run.sh compare RUN RUN ...       finished runs that differ in method and seed alone
    bash run.sh compare NAME=RUN ...      any runs, finished or not, under names of your own; those
                                          of one name are its seeds:
                                          base=A0 base=A1 ipo=B0 ipo=B1
    bash run.sh study webshop --report    those of a study

The folder holds report.txt, report.json and the figures.
"""

import argparse
import itertools
import json
import math
import os
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np

from common.settings import Refused
from lab.page import figures
from lab.page.report import Table
from lab.runfiles import SOLVED, command
from lab.study import numbers
from lab.study.methods import COMPARED, Runs, chosen, differences, named
from lab.study.numbers import interval, of_seeds, paired

MEASURES = ("reward", "success")
THRESHOLDS = (0.6, 0.7, 0.8)  # of Table 2
HOW = ("Mean over seeds ± half of its 95% t interval; of a difference also on how many seeds the "
       "first is ahead, and * where on three seeds or more the interval excludes 0. Intervals are "
       "not corrected for their number: of differences that are none, one in 20 has a *.")


def write_report(title: str, runs: Runs, out: Path, by_name: bool = False) -> str:
    """Writes the report on runs into a folder.

    Args:
        title: Its first line.
        runs: arm, or a name of the user's -> seed -> folder.
        out: The folder.
        by_name: Whether the names are the user's. Then all are compared with each other.

    Returns:
        The report as text.
    """
    if not runs:
        raise Refused(f"{out.parent}: no finished run in it (METHOD-sSEED with result.json)")
    out.mkdir(parents=True, exist_ok=True)
    made = []
    compared = COMPARED
    of_shares = [("coevolve", "eto")]
    if by_name:
        compared = [(later, first) for first, later in itertools.combinations(runs, 2)]
        of_shares = compared
        made.append(("Settings in which they differ", ["<setting", "<method", "<value"],
                     differences(runs)))
    compared = [(a, b) for a, b in dict.fromkeys(compared) if a != b and {a, b} <= runs.keys()]
    found = numbers.evaluations(runs)
    for when, some in (("after its last iteration", numbers.after_the_last(found)),
                       ("after the iteration that validation chooses",
                        numbers.after_the_best(found))):
        made.append(of_target(f"Greedy evaluation of the target {when}", runs, some))
        made.append(of_differences(f"Differences on the same seeds, {when}", compared, some))
    made += [of_costs(runs), table_2(runs, of_shares), figure_3(runs, out),
             over_iterations(found, out)]

    texts = [title]
    read_by_programs = {}
    for name, columns, rows in made:
        if rows:
            texts.append(as_text(name, columns, rows))
            keys = [column.lstrip("<") for column in columns]
            read_by_programs[name] = [dict(zip(keys, row)) for row in rows]
    if any(len(by_seed) > 1 for by_seed in runs.values()):
        texts.append(textwrap.fill(HOW, 100))
    text = "\n\n".join(texts) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(read_by_programs, indent=1))
    return text


# ------------------------------------------------------------------------------------ as text


def as_text(title: str, columns: list[str], rows: list[tuple]) -> str:
    cells = [[column.lstrip("<") for column in columns]]
    for row in rows:
        cells.append([cell(x) for x in row])
    lines = [title]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        parts = []
        for text, width, column in zip(row, widths, columns):
            parts.append(text.ljust(width) if column.startswith("<") else text.rjust(width))
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def cell(x) -> str:
    """A text, a number, an `interval` or a `paired` difference as text; - for None."""
    if x is None or x == "":
        return "-"
    if isinstance(x, str):
        return x
    if not isinstance(x, dict):
        return f"{x:,.4g}" if isinstance(x, float) and abs(x) < 1000 else f"{x:,.0f}"
    text = f"{x['mean']:+.3f}" if "ahead" in x else f"{x['mean']:.3f}"
    if x["half"] is None:  # one seed has no interval
        return text
    text += f" ± {x['half']:.3f}"
    if "ahead" in x:
        text += f" ({x['ahead']} of {x['n']})" + " *" * x["sure"]
    return text


# ------------------------------------------------------------------------------------- tables


def of_target(title: str, runs: Runs, found: list[dict]) -> Table:
    """What the target earns in some evaluations, of which each run has one for a split."""
    rows = []
    for arm in dict.fromkeys(e["arm"] for e in found):
        iterations = of_seeds(found, "i", arm=arm)
        seeds = " ".join(map(str, iterations))
        rows += measured(found, (arm, seeds, " ".join(map(str, iterations.values()))), arm=arm)
    return title, ["<method", "<seeds", "<iterations", "<split", "<reward", "<success"], rows


def measured(found: list[dict], names: tuple, **where) -> list[tuple]:
    """A row for each split of the evaluations where all of this is so; it begins with names."""
    rows = []
    for split in dict.fromkeys(e["split"] for e in found):
        of_split = [of_seeds(found, key, split=split, **where) for key in MEASURES]
        rows.append((*names, split, *(interval(values.values()) for values in of_split)))
    return [row for row in rows if row[-1]]


def of_differences(title: str, compared: list[tuple[str, str]], found: list[dict]) -> Table:
    rows = []
    splits = dict.fromkeys(e["split"] for e in found)
    for (a, b), split in itertools.product(compared, splits):
        ahead = [paired(of_seeds(found, key, arm=a, split=split),
                        of_seeds(found, key, arm=b, split=split)) for key in MEASURES]
        if ahead[0]:
            rows.append((f"{a} - {b}", split, *ahead))
    return title, ["<difference", "<split", "<reward", "<success"], rows


def of_costs(runs: Runs) -> Table:
    rows = []
    for arm, by_seed in runs.items():
        costs = [numbers.cost(run) for run in by_seed.values()]
        rows.append((arm, *(float(np.mean([cost[name] for cost in costs])) for name in costs[0])))
    return "What it took after the first SFT, means over seeds", ["<method", *costs[0]], rows


def table_2(runs: Runs, compared: list[tuple[str, str]]) -> Table:
    """The paper's Table 2: shares of what was explored."""
    rewards = defaultdict(dict)  # arm -> seed -> rewards
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            found = [t["reward"] for t in numbers.explored(run)]
            if found:
                rewards[arm][seed] = found

    rows = []
    for t in THRESHOLDS:
        shares = {}  # arm -> of success, negative, hard negative: seed -> share
        for arm, of_arm in rewards.items():
            shares[arm] = [numbers.share(of_arm, *band)
                           for band in ((SOLVED, math.inf), (-math.inf, t), (t, SOLVED))]
            rows.append((arm, t, *(interval(of_band.values()) for of_band in shares[arm])))
        for a, b in compared:
            if {a, b} <= shares.keys():
                rows.append((f"{a} - {b}", t, *map(paired, shares[a], shares[b])))
    return ("Table 2: explored trajectories, all agents and iterations of a method",
            ["<method", "threshold", "<success", "<negative", "<hard negative"], rows)


def figure_3(runs: Runs, out: Path) -> Table:
    """The paper's Figure 3, which is drawn, too."""
    found = numbers.distances_of(runs)
    rows = []
    every = {}  # agent -> the distances of all seeds' tasks
    for name, by_seed in found.items():
        every[name] = [x for of_seed in by_seed.values() for x in of_seed.values()]
        means = [np.mean([*of_seed.values()]) for of_seed in by_seed.values() if of_seed]
        rows.append((name, interval(means), len(every[name])))
    if rows:
        apart = []
        for eto, failure in zip(found["eto"].values(), found["coevolve: failure"].values()):
            both = [failure[task] - eto[task] for task in eto.keys() & failure.keys()]
            if both:
                apart.append(np.mean(both))
        rows.append(("coevolve: failure - eto, where both failed at least twice", interval(apart),
                     None))
        made, (ax,) = figures.figure(1, width=6.0)
        ax.boxplot([*every.values()], showmeans=True)
        ax.set_xticks(range(1, len(every) + 1), [name.replace(": ", ":\n") for name in every])
        figures.write(made, out / "figure3.svg")
    return ("Figure 3: distance between the failures of an instruction, 1 - cos, embedded by the "
            "SFT agent", ["<agent", "<mean of seeds", "instructions"], rows)


def over_iterations(found: list[dict], out: Path) -> Table:
    """The target's reward and success by iteration, which are drawn, too."""
    rows = []
    for arm, i in dict.fromkeys((e["arm"], e["i"]) for e in found):
        rows += measured(found, (arm, i), arm=arm, i=i)
    curves = defaultdict(lambda: defaultdict(list))  # split -> arm -> (i, mean, half)
    for arm, i, split, reward, _ in rows:
        curves[split][arm].append((i, reward["mean"], reward["half"] or 0))
    if rows:
        made, axes = figures.figure(len(curves), height=5)
        for ax, (split, of_split) in zip(axes, curves.items()):
            for n, (arm, points) in enumerate(of_split.items()):
                ax.errorbar(*zip(*points), marker="o", color=f"C{n % 10}", capsize=3, label=arm,
                            linestyle=figures.LINES[n // 10 % 3])
            figures.label(ax, split, "iteration (0: the start)", "reward, 95% over seeds")
        figures.legend(axes[0])
        figures.write(made, out / "curves.svg")
    return "Over iterations", ["<method", "iteration", "<split", "<reward", "<success"], rows


# ------------------------------------------------------------------------------------ command


def split_name(word: str) -> tuple[str, Path]:
    """(NAME, RUN) of NAME=RUN. A path may have a = in it too; without a name it is empty."""
    name, sign, path = word.partition("=")
    if not sign or not name or not path or "/" in name or Path(word).exists():
        return "", Path(word)
    return name, Path(path)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, or NAME=FOLDER")
    parser.add_argument("--out", type=Path, help="folder of the report [`report`, beside the runs]")
    asked = parser.parse_args(argv)
    given = [split_name(word) for word in asked.runs]
    paths = [path for _, path in given]
    by_name = any(name for name, _ in given)
    runs = named(given) if by_name else chosen(paths)
    out = asked.out or Path(os.path.commonpath([p.resolve().parent for p in paths]), "report")
    print(write_report("Comparison of runs", runs, out, by_name))
    print(f"compare: {out} holds this, the numbers and the figures")


if __name__ == "__main__":
    command("compare", main)
