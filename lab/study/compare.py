"""Compares several runs. Prints a report, and writes it to a folder with its numbers and figures.

    bash run.sh compare RUN RUN ...       Compare any runs, finished or not. Runs of the same method
                                          (or the same arm of a study) are grouped as its seeds.
    bash run.sh compare NAME=RUN ...      Compare runs under names that you choose. Runs with the
                                          same name are grouped as its seeds, for example
                                          base=A0 base=A1 ipo=B0 ipo=B1.
    bash run.sh study webshop --report    Compare the finished runs of a study.

The report folder contains report.txt, report.json and the figures (SVG).
"""

import argparse
import itertools
import json
import os
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np

from lab.page import figures
from lab.page.report import Table
from lab.runfiles import command, is_finished, phases_of, visible
from lab.study import numbers
from lab.study.changes import changes
from lab.study.methods import Runs, arm_of, each, named, setting_differences
from lab.study.numbers import interval, paired, values_by_seed

MEASURES = ("reward", "success")
NOTE = ("Each number is the mean over seeds ± half the width of its 95% t interval. A difference "
        "also has the number of seeds on which the first arm is ahead, and * if there are at least "
        "three seeds and the interval excludes 0. The intervals are not corrected for multiple "
        "comparisons: without any real difference, about one difference in 20 has a *.")


def write_report(title: str, runs: Runs, out: Path, compared: list | None = None) -> None:
    """Prints the report on runs, and writes it into a folder.

    Args:
        title: The first line of the report.
        runs: The folders of the runs, as runs[arm][seed]. The arm may be a name that the user
            chose.
        out: The report folder.
        compared: Pairs of arms (a, b). The report has the differences a - b of each pair. If
            `compared` is None, all arms are compared with each other, and the report begins with
            the differences in settings, code and outputs.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables = []
    of_shares = [("coevolve", "eto")]  # the paper compares these in Table 2
    if compared is None:
        compared = [(later, first) for first, later in itertools.combinations(runs, 2)]
        of_shares = compared
        tables += [("Settings in which they differ", ["<setting", "<method", "<value"],
                    setting_differences(runs)), changes(runs)]
    compared = [(a, b) for a, b in dict.fromkeys(compared) if a != b]
    tables.append(states(runs))
    evals, notes = numbers.on_common_tasks(numbers.evaluations(runs))
    tables += [of_target(numbers.after_the_last(evals)), of_pairs(evals, compared), of_costs(runs),
               table_2(runs, of_shares), figure_3(runs, out), over_iterations(evals, out)]

    texts = [title, *notes]
    as_json = {}
    for name, columns, rows in tables:
        if rows:
            texts.append(as_text(name, columns, rows))
            keys = [column.lstrip("<") for column in columns]
            as_json[name] = [dict(zip(keys, row)) for row in rows]
    if any(len(by_seed) > 1 for by_seed in runs.values()):
        texts.append(textwrap.fill(NOTE, 100))
    text = "\n\n".join(texts) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(as_json, indent=1))
    print(text)
    print(f"{visible(str(out))} contains this report, its numbers and its figures")


# ------------------------------------------------------------------------------------ as text


def as_text(title: str, columns: list[str], rows: list[tuple]) -> str:
    """Returns a table as text with aligned columns. A column name that begins with < aligns its
    column to the left."""
    cells = [[column.lstrip("<") for column in columns]]
    for row in rows:  # `visible` escapes control characters in names and settings
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
    """Formats a table cell. `x` is a text, a number, a result of `interval` or `paired`, or None,
    which is printed as "-"."""
    if x is None:
        return "-"
    if isinstance(x, str):
        return x
    if not isinstance(x, dict):
        return f"{x:,.4g}" if isinstance(x, float) and abs(x) < 1000 else f"{x:,.0f}"
    text = f"{x['mean']:+.3f}" if "ahead" in x else f"{x['mean']:.3f}"
    if x["half"] is None:  # there is only one seed, so there is no interval
        return text
    text += f" ± {x['half']:.3f}"
    if "ahead" in x:
        text += f" ({x['ahead']} of {x['n']})" + " *" * x["sure"]
    return text


# ------------------------------------------------------------------------------------- tables


def means(rows: list[dict], keys: tuple[str, ...], measures: tuple[str, ...]) -> list[tuple]:
    """Groups rows by the values of `keys`, and averages each measure over the seeds of a group.

    Returns one tuple per group: the values of `keys`, and the `interval` of each measure.
    """
    result = []
    for group in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        where = dict(zip(keys, group))
        values = [values_by_seed(rows, measure, **where).values() for measure in measures]
        result.append((*group, *map(interval, values)))
    return result


def leads(
    rows: list[dict],
    compared: list[tuple[str, str]],
    key: str,
    measures: tuple[str, ...],
) -> list[tuple]:
    """Computes the differences a - b between pairs of arms, on the seeds that both arms have.

    If `key` is "split", for example, there is one difference per split. Returns one tuple per pair
    of arms and value of `key`: the text "a - b", the value, and for each measure the difference
    (see `paired`).
    """
    result = []
    for (a, b), group in itertools.product(compared, dict.fromkeys(row[key] for row in rows)):
        differences = []
        for measure in measures:
            values = (values_by_seed(rows, measure, arm=arm, **{key: group}) for arm in (a, b))
            differences.append(paired(*values))
        if differences[0]:
            result.append((f"{a} - {b}", group, *differences))
    return result


def of_pairs(evals: list[dict], compared: list[tuple[str, str]]) -> Table:
    """Returns a table of the differences a - b between pairs of arms (a, b) in reward and success,
    with one row per pair and split. It is computed after the last iterations of both arms (see
    `numbers.last_of_both`)."""
    rows = []
    for a, b in compared:
        last = numbers.last_of_both(evals, a, b)
        for name, split, *differences in leads(last, [(a, b)], "split", MEASURES):
            of_a, of_b = (values_by_seed(last, "i", arm=arm, split=split) for arm in (a, b))
            iterations = [f"{of_a[seed]}" if of_a[seed] == of_b[seed] else
                          f"{of_a[seed]} - {of_b[seed]}" for seed in of_a if seed in of_b]
            rows.append((name, split, ", ".join(iterations), *differences))
    return ("Differences on the same seeds, after the last iteration",
            ["<difference", "<split", "<iterations", "<reward", "<success"], rows)


def states(runs: Runs) -> Table:
    """Returns a table of the runs that need attention: unfinished runs, and runs whose output
    files were edited by the user."""
    rows = []
    for arm, seed, run in each(runs):
        phases = phases_of(run)
        notes = []
        if not is_finished(run):
            i = max((row["i"] for row in phases.values()), default=0)
            notes.append(f"unfinished, iteration {i}")
        notes += [f"{output} was edited" for output, row in phases.items() if "edited" in row]
        if notes:
            rows.append((arm, str(seed), "; ".join(notes)))
    return "Runs to note", ["<method", "<seed", "<note"], rows


def of_target(last: list[dict]) -> Table:
    """Returns a table of the target agent's results, with one row per arm and split. `last` has the
    last evaluation of each run on each split."""
    rows = []
    for arm, split, *results in means(last, ("arm", "split"), MEASURES):
        iterations = values_by_seed(last, "i", arm=arm)
        seeds = " ".join(map(str, iterations))
        rows.append((arm, seeds, " ".join(map(str, iterations.values())), split, *results))
    return ("Greedy evaluation of the target after its last iteration",
            ["<method", "<seeds", "<iterations", "<split", "<reward", "<success"], rows)


def of_costs(runs: Runs) -> Table:
    """Returns a table of the costs of each arm, such as training steps and rollouts. Each cost is
    averaged over the arm's runs."""
    rows = []
    for arm, by_seed in runs.items():
        costs = [numbers.cost(run) for run in by_seed.values()]
        rows.append((arm, *(float(np.mean([cost[name] for cost in costs])) for name in costs[0])))
    return "What it took after the first SFT, means over seeds", ["<method", *costs[0]], rows


def table_2(runs: Runs, compared: list[tuple[str, str]]) -> Table:
    """Returns the paper's Table 2: the shares of successes, negatives and hard negatives among the
    explored trajectories. The shares are computed for three reward thresholds. Negatives are below
    the threshold, and hard negatives are failures at or above it."""
    measures = ("success", "negative", "hard negative")
    shares = numbers.shares(runs)
    rows = means(shares, ("arm", "threshold"), measures)
    rows += leads(shares, compared, "threshold", measures)
    return ("Table 2: explored trajectories, all agents and iterations of a method",
            ["<method", "threshold", *(f"<{measure}" for measure in measures)], rows)


def figure_3(runs: Runs, out: Path) -> Table:
    """Draws the paper's Figure 3, the distances between the failures of a task. Returns a table of
    the mean distances."""
    found = numbers.distances_of(runs)
    rows = []
    distances = {}  # for each agent, the mean distances between the failures of a task, all seeds
    for name, by_seed in found.items():
        distances[name] = list(itertools.chain(*(of_seed.values() for of_seed in by_seed.values())))
        of_seeds = [np.mean([*of_seed.values()]) for of_seed in by_seed.values() if of_seed]
        rows.append((name, interval(of_seeds), len(distances[name])))
    if rows:
        differences = []
        for eto, failure in zip(found["eto"].values(), found["coevolve: failure"].values()):
            both = [failure[task] - eto[task] for task in eto.keys() & failure.keys()]
            if both:
                differences.append(np.mean(both))
        rows.append(("coevolve: failure - eto, where both failed at least twice",
                     interval(differences), None))
        drawing, (ax,) = figures.figure(1, width=6.0)
        ax.boxplot([*distances.values()], showmeans=True)
        ax.set_xticks(range(1, len(distances) + 1),
                      [name.replace(": ", ":\n") for name in distances])
        figures.write(drawing, out / "figure3.svg")
    return ("Figure 3: distance between the failures of an instruction, 1 - cos, embedded by the "
            "SFT agent", ["<agent", "<mean of seeds", "instructions"], rows)


def over_iterations(evals: list[dict], out: Path) -> Table:
    """Returns a table of the target agent's reward and success after each iteration, and draws the
    rewards as curves."""
    rows = means(evals, ("arm", "i", "split"), MEASURES)
    curves = defaultdict(lambda: defaultdict(list))  # split -> arm -> [(i, mean, half), ...]
    for arm, i, split, reward, _ in rows:
        curves[split][arm].append((i, reward["mean"], reward["half"] or 0))
    if rows:
        drawing, axes = figures.figure(len(curves), height=5)
        for ax, (split, of_split) in zip(axes, curves.items()):
            for n, (arm, points) in enumerate(of_split.items()):
                ax.errorbar(*zip(*points), marker="o", color=f"C{n % 10}", capsize=3,
                            label=visible(arm), linestyle=figures.LINES[n // 10 % 3])
            figures.label(ax, split, "iteration (0: the start)", "reward, 95% over seeds")
        figures.legend(axes[0])
        figures.write(drawing, out / "curves.svg")
    return "Over iterations", ["<method", "iteration", "<split", "<reward", "<success"], rows


# ------------------------------------------------------------------------------------ command


def split_name(word: str) -> tuple[str, Path]:
    """Parses an argument NAME=RUN or RUN, and returns the name and the run's folder. Without NAME,
    the name is the run's arm or method. An argument that contains "=" and is an existing path is a
    RUN."""
    name, sign, path = word.partition("=")
    if not sign or not name or not path or "/" in name or Path(word).exists():
        return arm_of(Path(word)), Path(word)
    return name, Path(path)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, or NAME=FOLDER")
    parser.add_argument("--out", type=Path,
                        help="folder of the report [`report`, next to the runs]")
    args = parser.parse_args(argv)
    given = [split_name(word) for word in args.runs]
    parent = os.path.commonpath([path.resolve().parent for _, path in given])
    out = args.out or Path(parent, "report")
    write_report("Comparison of runs", named(given), out)


if __name__ == "__main__":
    command("compare", main)
