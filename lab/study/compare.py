"""The report on several runs: tables in the terminal, and a folder with them and its figures.

    bash run.sh compare RUN RUN ...       any runs, finished or not; those of a method, or an arm
                                          of a study, are its seeds
    bash run.sh compare NAME=RUN ...      under names of your own: base=A0 base=A1 ipo=B0 ipo=B1
    bash run.sh study webshop --report    those of a study

The folder holds report.txt, report.json and the figures.
"""

import argparse
import itertools
import json
import os
import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lab.page import figures
from lab.page.report import Table
from lab.runfiles import agents_of, command, is_finished, phases_of, visible
from lab.study import numbers
from lab.study.changes import changes
from lab.study.methods import Runs, arm_of, differences, named
from lab.study.numbers import interval, of_seeds, paired

MEASURES = ("reward", "success")
IDENTICAL = "all episodes identical"  # in place of a difference of 0
HOW = ("Mean over seeds ± half of its 95% t interval; of a difference also on how many seeds the "
       "first is ahead, and * where on three seeds or more the interval excludes 0. Intervals are "
       "not corrected for their number: of differences that are none, one in 20 has a *.")


def write_report(title: str, runs: Runs, out: Path, compared: list | None = None) -> str:
    """Writes the report on runs into a folder.

    Args:
        title: Its first line.
        runs: arm, or a name of the user's -> seed -> folder.
        out: The folder.
        compared: (a, b): how far a is ahead of b; if not given all with each other, and the report
            says in which settings they differ.

    Returns:
        The report as text.
    """
    out.mkdir(parents=True, exist_ok=True)
    made = []
    of_shares = [("coevolve", "eto")]
    if compared is None:
        compared = [(later, first) for first, later in itertools.combinations(runs, 2)]
        of_shares = compared
        made += [("Settings in which they differ", ["<setting", "<method", "<value"],
                  differences(runs)), changes(runs)]
    compared = [(a, b) for a, b in dict.fromkeys(compared) if a != b and {a, b} <= runs.keys()]
    made.append(states(runs))
    found, notes = numbers.on_common_tasks(numbers.evaluations(runs))
    best = numbers.after_the_best(found)
    for when, some, of_both in (
            ("after its last iteration", numbers.after_the_last(found),
             partial(numbers.last_of_both, found)),
            ("after the iteration that validation chooses", best, lambda a, b: best)):
        made.append(of_target(f"Greedy evaluation of the target {when}", some))
        made.append((f"Differences on the same seeds, {when}",
                     ["<difference", "<split", "<iterations", "<reward", "<success"],
                     greedy_leads(compared, of_both)))
    made += [of_costs(runs), table_2(runs, of_shares), figure_3(runs, out),
             over_iterations(found, out)]

    texts = [title, *notes]
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
    for row in rows:  # names and settings may hold what a terminal obeys
        cells.append([visible(cell(x)).replace("\n", " ") for x in row])
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
    if x is None:
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


def means(found: list[dict], by: tuple[str, ...], measures: tuple[str, ...]) -> list[tuple]:
    """A row for each group of those that agree in the names `by`: these, and the interval over
    seeds of each measure."""
    rows = []
    for group in dict.fromkeys(tuple(e[name] for name in by) for e in found):
        where = dict(zip(by, group))
        values = [of_seeds(found, measure, **where).values() for measure in measures]
        rows.append((*group, *map(interval, values)))
    return rows


def leads(
    found: list[dict],
    compared: list[tuple[str, str]],
    by: str,
    measures: tuple[str, ...],
) -> list[tuple]:
    """A row for each of those compared and each group: by how much the first is ahead on the seeds
    that both have."""
    rows = []
    for (a, b), group in itertools.product(compared, dict.fromkeys(e[by] for e in found)):
        ahead = []
        for measure in measures:
            first, other = (of_seeds(found, measure, arm=arm, **{by: group}) for arm in (a, b))
            ahead.append(paired(first, other))
        if ahead[0]:
            rows.append((f"{a} - {b}", group, *ahead))
    return rows


def greedy_leads(compared: list[tuple[str, str]], of_both: Callable) -> list[tuple]:
    """A row for each of those compared and each split: the iterations, and by how much the first is
    ahead, or that both played the same episodes. of_both(a, b) are the evaluations of both."""
    rows = []
    for a, b in compared:
        some = of_both(a, b)
        for name, split, *ahead in leads(some, [(a, b)], "split", MEASURES):
            of_a, of_b = (of_seeds(some, "i", arm=arm, split=split) for arm in (a, b))
            iterations = [f"{of_a[seed]}" if of_a[seed] == of_b[seed] else
                          f"{of_a[seed]} - {of_b[seed]}" for seed in of_a if seed in of_b]
            if numbers.identical(some, a, b, split):
                ahead = [IDENTICAL] * len(ahead)
            rows.append((name, split, ", ".join(iterations), *ahead))
    return rows


def states(runs: Runs) -> Table:
    """The runs that have not finished, have no agent called target, or whose files were edited."""
    rows = []
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            phases = phases_of(run)
            agents = agents_of(phases)
            notes = []
            if not is_finished(run):
                i = max((row["i"] for row in phases.values()), default=0)
                notes.append(f"unfinished, iteration {i}")
            if "target" not in agents:
                notes.append(f"no agent is called target, only: {', '.join(agents) or 'none'}")
            notes += [f"{output} was edited" for output, row in phases.items() if "edited" in row]
            if notes:
                rows.append((arm, str(seed), "; ".join(notes)))
    return "Runs to note", ["<method", "<seed", "<note"], rows


def of_target(title: str, found: list[dict]) -> Table:
    """What the target earns in some evaluations, of which each run has one for a split."""
    rows = []
    for arm, split, *earned in means(found, ("arm", "split"), MEASURES):
        iterations = of_seeds(found, "i", arm=arm)
        seeds = " ".join(map(str, iterations))
        rows.append((arm, seeds, " ".join(map(str, iterations.values())), split, *earned))
    return title, ["<method", "<seeds", "<iterations", "<split", "<reward", "<success"], rows


def of_costs(runs: Runs) -> Table:
    rows = []
    for arm, by_seed in runs.items():
        costs = [numbers.cost(run) for run in by_seed.values()]
        rows.append((arm, *(float(np.mean([cost[name] for cost in costs])) for name in costs[0])))
    return "What it took after the first SFT, means over seeds", ["<method", *costs[0]], rows


def table_2(runs: Runs, compared: list[tuple[str, str]]) -> Table:
    """The paper's Table 2: shares of what was explored."""
    measures = ("success", "negative", "hard negative")
    same = {f"{a} - {b}" for a, b in compared if numbers.explored_alike(runs, a, b)}
    rows = []
    for threshold in (0.6, 0.7, 0.8):
        found = numbers.shares(runs, threshold)
        rows += means(found, ("arm", "threshold"), measures)
        for name, value, *ahead in leads(found, compared, "threshold", measures):
            rows.append((name, value, *([IDENTICAL] * len(ahead) if name in same else ahead)))
    return ("Table 2: explored trajectories, all agents and iterations of a method",
            ["<method", "threshold", *(f"<{measure}" for measure in measures)], rows)


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
    rows = means(found, ("arm", "i", "split"), MEASURES)
    curves = defaultdict(lambda: defaultdict(list))  # split -> arm -> (i, mean, half)
    for arm, i, split, reward, _ in rows:
        curves[split][arm].append((i, reward["mean"], reward["half"] or 0))
    if rows:
        made, axes = figures.figure(len(curves), height=5)
        for ax, (split, of_split) in zip(axes, curves.items()):
            for n, (arm, points) in enumerate(of_split.items()):
                ax.errorbar(*zip(*points), marker="o", color=f"C{n % 10}", capsize=3,
                            label=visible(arm), linestyle=figures.LINES[n // 10 % 3])
            figures.label(ax, split, "iteration (0: the start)", "reward, 95% over seeds")
        figures.legend(axes[0])
        figures.write(made, out / "curves.svg")
    return "Over iterations", ["<method", "iteration", "<split", "<reward", "<success"], rows


# ------------------------------------------------------------------------------------ command


def split_name(word: str) -> tuple[str, Path]:
    """(name, run) of NAME=RUN, or of RUN, in whose path a = may stand, too."""
    name, sign, path = word.partition("=")
    if not sign or not name or not path or "/" in name or Path(word).exists():
        return arm_of(Path(word)), Path(word)
    return name, Path(path)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, or NAME=FOLDER")
    parser.add_argument("--out", type=Path, help="folder of the report [`report`, beside the runs]")
    asked = parser.parse_args(argv)
    given = [split_name(word) for word in asked.runs]
    beside = os.path.commonpath([path.resolve().parent for _, path in given])
    out = asked.out or Path(beside, "report")
    print(write_report("Comparison of runs", named(given), out))
    print(f"compare: {visible(str(out))} holds this, the numbers and the figures")


if __name__ == "__main__":
    command("compare", main)
