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
from pathlib import Path

import numpy as np

from common.settings import Refused
from lab.page import figures
from lab.page.report import columns, section
from lab.runfiles import command, success_of
from lab.study import numbers
from lab.study.methods import (
    COMPARED,
    chosen,
    differences,
    differences_of_code,
    name_of,
    named,
    split_name,
)
from lab.study.numbers import explored, interval, last, paired

MEASURES = ("reward", "success")
THRESHOLDS = (0.6, 0.7, 0.8)  # of Table 2
HOW = ("Mean over seeds ± half of its 95% t interval; of a difference also on how many seeds the "
       "first is ahead, and * where on three seeds or more the interval excludes 0. Intervals are "
       "not corrected for their number: of differences that are none, one in 20 has a *.")


def cell(x) -> str:
    """A text, a number, an `interval` or a `paired` difference as text; - for None."""
    if not isinstance(x, dict):
        return (x or "-" if x is None or isinstance(x, str) else
                f"{x:,.4g}" if isinstance(x, float) and abs(x) < 1000 else f"{x:,.0f}")
    half = "?" if x["half"] is None else f"{x['half']:.3f}"
    ahead = f" ({x['ahead']} of {x['n']})" + " *" * x["sure"] if "ahead" in x else ""
    return f"{x['mean']:.3f} ± {half}{ahead}"


def header(*names) -> str:
    return " ".join(str(name).replace(" ", "_") for name in names)


def write_report(title: str, runs: dict, out: Path, by_name: bool = False) -> str:
    """Writes the report on runs into a folder.

    Args:
        title: Its first line.
        runs: method -> seed -> folder; or a name of the user's in place of the method.
        out: The folder.
        by_name: Whether the names are the user's.

    Returns:
        The report as text.
    """
    if not runs:
        raise Refused(f"{out.parent}: no finished run in it (METHOD-sSEED with result.json)")
    out.mkdir(parents=True, exist_ok=True)
    target = numbers.evaluations(runs)
    splits = list(dict.fromkeys(e["split"] for e in target))
    if by_name:
        names = dict(zip(runs, runs))
        compared = [(later, first) for first, later in itertools.combinations(runs, 2)]
        made = [of_settings(runs), of_code(runs), *tables(runs, names, compared, target, splits),
                table_2(runs, names, compared)]
    else:
        names = {m: name_of(m) for m in runs}
        made = [*tables(runs, names, COMPARED, target, splits),
                *paper_figures(runs, target, splits, out)]
    if splits:
        made.append(over_iterations(target, names, splits, out))
    made = [part for part in made if part[2]]
    text = "\n\n".join([title, *(section(name, heads, [map(cell, row) for row in rows])
                                 for name, heads, rows in made), textwrap.fill(HOW, 100)]) + "\n"
    (out / "report.txt").write_text(text)
    (out / "report.json").write_text(json.dumps({name: [
        dict(zip((column for column, _ in columns(heads)), row)) for row in rows]
        for name, heads, rows in made}, indent=1))
    return text


def of_settings(runs: dict) -> tuple[str, str, list]:
    return "Settings in which they differ", "<setting <name <value", differences(runs)


def of_code(runs: dict) -> tuple[str, str, list]:
    return "Phases that different code made", "<phase <name <code", differences_of_code(runs)


def tables(
    runs: dict,
    names: dict[str, str],
    compared: list[tuple[str, str]],
    target: list[dict],
    splits: list[str],
):
    """Makes the tables on the runs themselves.

    Args:
        runs: method -> seed -> folder.
        names: method -> what the report calls it.
        compared: (a, b) where the report says by how much a is ahead of b.
        target: The evaluations of the target.
        splits: Those that it was evaluated on.

    Returns:
        (title, header, rows) of each.
    """
    wanted = [*itertools.product(splits, MEASURES)]
    yield ("Greedy evaluation of the target after its last iteration",
           header("<method", "<seeds", "<iterations", *(f"<{s} {key}" for s, key in wanted)),
           [(names[m], " ".join(map(str, runs[m])),
             " ".join(map(str, last(target, "i", method=m).values())), *(
               interval(last(target, key, method=m, split=s).values()) for s, key in wanted))
            for m in runs])
    costs = {m: [numbers.cost(path) for path in runs[m].values()] for m in runs}
    counts = [*next(iter(costs.values()))[0]]
    yield ("What it took after the first SFT, means over seeds", header("<method", *counts),
           [(names[m], *(mean_of([row[count] for row in rows]) for count in counts))
            for m, rows in costs.items()])
    both = [(a, b) for a, b in dict.fromkeys(compared) if a != b and {a, b} <= runs.keys()]
    pairs = [(f"{names[a]} - {names[b]}", split, *(paired(
        *(last(target, key, method=m, split=split) for m in (a, b))) for key in MEASURES))
        for (a, b), split in itertools.product(both, splits)]
    yield ("Differences on the same seeds", header("<difference", "<split", "<reward", "<success"),
           [row for row in pairs if row[2]])


def mean_of(values: list) -> float | None:
    """The mean; None where one of them is not known."""
    return None if None in values else float(np.mean(values))


def paper_figures(runs: dict, target: list[dict], splits: list[str], out: Path):
    """The same of the paper's Table 2 and Figure 3; drawn."""
    names = {m: name_of(m) for m in ("eto", "positive", "coevolve") if m in runs}
    yield table_2(runs, names, [("coevolve", "eto")])
    yield figure3(numbers.distances_of(runs), out)


def table_2(
    runs: dict,
    names: dict[str, str],
    compared: list[tuple[str, str]],
) -> tuple[str, str, list]:
    """The shares of what those in `names` explored, and the differences of those compared."""
    rewards = {}
    for m in names:
        found = {seed: [t["reward"] for t in explored(path)] for seed, path in runs[m].items()}
        found = {seed: of_seed for seed, of_seed in found.items() if of_seed}
        if found:
            rewards[m] = found

    success = success_of(next(iter(next(iter(runs.values())).values())))
    bands = {t: ((success, math.inf), (-math.inf, min(t, success)), (t, success))
             for t in THRESHOLDS}
    rows = []
    for m, t in itertools.product(rewards, THRESHOLDS):
        shares = [numbers.share(rewards[m], *band) for band in bands[t]]
        rows.append((names[m], t, *(interval(share.values()) for share in shares)))
    for (a, b), t in itertools.product(compared, THRESHOLDS):
        if {a, b} <= rewards.keys():
            shares = [[numbers.share(rewards[m], *band) for m in (a, b)] for band in bands[t]]
            rows.append((f"{names[a]} - {names[b]}", t, *(paired(*both) for both in shares)))
    return ("Table 2: explored trajectories, all agents and iterations of a method",
            "<method threshold <success <negative <hard_negative", rows)


def figure3(found: dict, out: Path) -> tuple[str, str, list]:
    every = {name: [x for d in by_seed.values() for x in d.values()]
             for name, by_seed in found.items()}
    rows = [(name, interval(np.mean([*d.values()]) for d in by_seed.values() if d),
             len(every[name])) for name, by_seed in found.items()]
    if rows:
        eto, failure = found["ETO"], found["co-evolution: failure agent"]
        both = {seed: [failure[seed][task] - eto[seed][task]
                       for task in eto[seed].keys() & failure[seed].keys()] for seed in eto}
        rows.append(("failure agent - ETO, where both failed at least twice",
                     interval(np.mean(each) for each in both.values() if each), None))
        made, (ax,) = figures.figure(1, width=6.0)
        ax.boxplot([*every.values()], showmeans=True)
        ax.set_xticks(range(1, len(every) + 1), [name.replace(": ", ":\n") for name in every])
        figures.write(made, out / "figure3.svg")
    return ("Figure 3: distance between the failures of an instruction, 1 - cos, embedded by the "
            "SFT agent", "<agent <mean_of_seeds instructions", rows)


def over_iterations(
    target: list[dict],
    names: dict[str, str],
    splits: list[str],
    out: Path,
) -> tuple[str, str, list]:
    """The target's reward and success by iteration; drawn."""
    points = dict.fromkeys((e["split"], e["method"], e["i"]) for e in target)
    rows = [(split, names[m], i, *(interval(last(
        target, key, split=split, method=m, i=i).values()) for key in MEASURES))
        for split, m, i in sorted(points, key=lambda point: splits.index(point[0]))]
    made, axes = figures.figure(len(splits), height=5)
    for ax, split in zip(axes, splits):
        for k, name in enumerate(dict.fromkeys(row[1] for row in rows if row[0] == split)):
            i, found = zip(*((row[2], row[3]) for row in rows if row[:2] == (split, name)))
            ax.errorbar(i, [x["mean"] for x in found], [x["half"] or 0 for x in found], marker="o",
                        color=f"C{k % 10}", capsize=3, label=name,
                        linestyle=figures.LINES[k // 10 % 3])
        figures.label(ax, split, "iteration (0: the start)", "reward, 95% over seeds")
    figures.legend(axes[0])
    figures.write(made, out / "curves.svg")
    return "Over iterations", "<split <method iteration <reward <success", rows


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
