"""Compares several runs. Prints a report, and writes it to a folder with its numbers and figures.

    bash run.sh compare RUN RUN ...       Compare any runs, finished or not. Runs of the same method
                                          (or the same arm of a study) are grouped as its seeds.
    bash run.sh compare NAME=RUN ...      Compare runs under names that you choose. Runs with the
                                          same name are grouped as its seeds, for example
                                          base=A0 base=A1 ipo=B0 ipo=B1.
    bash run.sh study webshop --report    Compare the finished runs of a study.
    bash run.sh compare STUDY STUDY ...   The same for studies in several environments.

Each environment has its own tables. With several environments, the report also has the average over
them. The report folder contains report.txt, report.json and the figures (SVG).
"""

import argparse
import itertools
import json
import os
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np

from common.settings import UsageError
from lab.page import figures
from lab.page.report import Table
from lab.runfiles import command, config_of, is_finished, phases_of, visible
from lab.study import numbers
from lab.study.changes import changes
from lab.study.methods import (
    COMPARED,
    PRIMARY,
    Runs,
    arm_of,
    each,
    finished,
    named,
    setting_differences,
)
from lab.study.numbers import MEASURES, grouped, interval, paired

NOTE = f"""Each number is the mean over seeds. ± is half the width of its 95% t interval over seeds,
which describes the randomness of training, on these tasks. [low, high] is a 95% bootstrap interval
over seeds and tasks, which describes the choice of the tasks as well ({numbers.SAMPLES:,} samples;
with one seed, it is over tasks alone). A difference also has the number of seeds on which the first
arm is ahead, and * if there are at least three seeds and its t interval excludes 0. Only p values
are corrected for multiple comparisons: without any real difference, about one difference in 20 has
a *."""


def write_report(
    title: str,
    envs: dict[str, Runs],
    out: Path,
    compared: list[tuple[str, str]] | None = None,
) -> None:
    """Prints the report on runs, and writes it into a folder.

    Args:
        title: The first line of the report.
        envs: The runs of each environment.
        out: The report folder.
        compared: Pairs of arms (a, b). The report has the differences a - b of each pair. If
            `compared` is None, all arms are compared with each other, and the report begins with
            the differences in settings, code and outputs.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables = []
    last = {}  # environment -> the last evaluations of its runs
    for env, runs in envs.items():
        evals = numbers.evaluations(runs)
        last[env] = numbers.after_the_last(evals)
        pairs = pairs_of(runs, compared)
        of_shares = pairs if compared is None else [("coevolve", "eto")]  # as in Table 2
        of_env = [states(runs), of_agents(last[env]), of_pairs(last[env], pairs), of_costs(runs),
                  table_2(runs, of_shares), figure_3(runs, out / f"figure3-{env}.svg"),
                  over_iterations(env, evals, runs, out)]
        if compared is None:
            of_env = [settings_of(runs), changes(runs, last[env]), *of_env]
        tables += [(f"{env}: {name}", columns, rows) for name, columns, rows in of_env]
    if len(envs) > 1:
        averaged = numbers.average([*last.values()])
        arms = dict.fromkeys(itertools.chain(*envs.values()))
        for name, columns, rows in of_agents(averaged), of_pairs(averaged, pairs_of(arms, compared)):
            tables.append((f"average of {', '.join(envs)}: {name}", columns, rows))
    tables.append(primary(last))

    texts = [title]
    as_json = {}
    for name, columns, rows in tables:
        if rows:
            texts.append(as_text(name, columns, rows))
            keys = [column.lstrip("<") for column in columns]
            as_json[name] = [dict(zip(keys, row)) for row in rows]
    texts.append(textwrap.fill(NOTE, 100))
    text = "\n\n".join(texts) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(as_json, indent=1))
    print(text)
    print(f"{visible(str(out))} contains this report, its numbers and its figures")


def pairs_of(arms, compared: list | None) -> list[tuple[str, str]]:
    """Returns the pairs of arms to compare: those in `compared`, or all pairs of `arms`."""
    if compared is None:
        return [(later, first) for first, later in itertools.combinations(arms, 2)]
    return [(a, b) for a, b in dict.fromkeys(compared) if a != b]


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
    """Formats a table cell. `x` is a text, a number, or a result of `interval` or `paired`."""
    if isinstance(x, str):
        return x
    if not isinstance(x, dict):
        return f"{x:,.4g}" if isinstance(x, float) and abs(x) < 1000 else f"{x:,.0f}"
    sign = "+" if "ahead" in x else ""
    text = f"{x['mean']:{sign}.3f}"
    if x["half"] is not None:  # there are several seeds
        text += f" ± {x['half']:.3f}"
    if "low" in x:
        text += f" [{x['low']:{sign}.3f}, {x['high']:{sign}.3f}]"
    if "ahead" in x and x["n"] > 1:
        text += f" ({x['ahead']} of {x['n']})" + " *" * x["sure"]
    return text


# ------------------------------------------------------------------------------------- tables


def means(rows: list[dict], keys: tuple[str, ...], measures: tuple[str, ...]) -> list[tuple]:
    """Groups rows by the values of `keys`, and averages each measure over the seeds of a group.

    Returns one tuple per group: the values of `keys`, and the `interval` of each measure.
    """
    result = []
    for group, by_seed in grouped(rows, *keys).items():
        values = [[row[measure] for row in by_seed.values()] for measure in measures]
        result.append((*group, *map(interval, values)))
    return result


def leads(
    rows: list[dict],
    compared: list[tuple[str, str]],
    keys: tuple[str, ...],
) -> list[tuple]:
    """Pairs the rows of two arms a and b that have the same seed, and the same values of `keys`.

    Returns one tuple per pair of arms and group: the text "a - b", the values of `keys`, and the
    list of pairs of rows.
    """
    groups = grouped(rows, "arm", *keys)
    values = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    result = []
    for (a, b), value in itertools.product(compared, values):
        of_a, of_b = groups[a, *value], groups[b, *value]
        pairs = [(of_a[seed], of_b[seed]) for seed in of_a if seed in of_b]
        if pairs:
            result.append((f"{a} - {b}", *value, pairs))
    return result


def differences(rows: list[dict], compared: list, keys: tuple, measures: tuple) -> list[tuple]:
    """Returns the rows of a table with the differences of some measures, see `leads`."""
    result = []
    for *names, pairs in leads(rows, compared, keys):
        result.append((*names, *(paired(pairs, measure) for measure in measures)))
    return result


def settings_of(runs: Runs) -> Table:
    return ("Settings in which they differ", ["<setting", "<method", "<value"],
            setting_differences(runs))


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


def of_agents(last: list[dict]) -> Table:
    """Returns a table of the results of each agent, with one row per arm, agent and split. `last`
    has the last evaluations, see `numbers.after_the_last`."""
    rows = []
    for names, by_seed in grouped(last, "arm", "agent", "split", "sampling").items():
        seeds = " ".join(map(str, by_seed))
        iterations = " ".join(str(e["i"]) for e in by_seed.values())
        values = [[e[measure] for e in by_seed.values()] for measure in MEASURES]
        rows.append((*names, seeds, iterations, *map(interval, values)))
    return ("Evaluation after the last iteration",
            ["<method", "<agent", "<split", "<sampling", "<seeds", "<iterations", "<reward",
             "<success"], rows)


def of_pairs(last: list[dict], compared: list[tuple[str, str]]) -> Table:
    """Returns a table of the differences a - b between pairs of arms (a, b) in reward and success,
    with one row per pair, agent and split."""
    rows = []
    for *names, pairs in leads(last, compared, ("agent", "split")):
        iterations = [" - ".join(dict.fromkeys([str(a["i"]), str(b["i"])])) for a, b in pairs]
        rows.append((*names, ", ".join(iterations),
                     *(paired(pairs, measure) for measure in MEASURES)))
    return ("Differences on the same seeds, after the last iteration",
            ["<difference", "<agent", "<split", "<iterations", "<reward", "<success"], rows)


def primary(last: dict[str, list[dict]]) -> Table:
    """Returns a table of the primary comparisons of a study. `last` has the last evaluations in
    each environment."""
    rows = []
    for env, evals in last.items():
        for name, agent, split, pairs in leads(evals, PRIMARY, ("agent", "split")):
            if (agent, split) == ("target", "test") and len(pairs) > 1:
                lead = paired(pairs, "reward")
                rows.append((env, name, lead, numbers.p_value(lead)))
    corrected = numbers.holm([p for *_, p in rows])
    return ("Primary comparisons: reward on test, p of a paired t test over seeds, and p corrected "
            "with Holm's method for all rows of this table",
            ["<environment", "<difference", "<reward", "p", "corrected p"],
            [(*row, p) for row, p in zip(rows, corrected)])


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
    rows += differences(shares, compared, ("threshold",), measures)
    return ("Table 2: explored trajectories, all agents and iterations of a method",
            ["<method", "threshold", *(f"<{measure}" for measure in measures)], rows)


def figure_3(runs: Runs, file: Path) -> Table:
    """Draws the paper's Figure 3, the distances between the failures of a task. Returns a table of
    the mean distances."""
    found = numbers.distances_of(runs)
    rows = means(found, ("arm",), ("distance",))
    rows += differences(found, [("coevolve: failure", "eto")], (), ("distance",))
    if found:
        boxes = defaultdict(list)  # label -> distances of the tasks of all seeds
        for row in found:
            boxes[row["arm"].replace(": ", ":\n")] += row["tasks"]
        drawing, (ax,) = figures.figure(1, width=6.0)
        ax.boxplot([*boxes.values()], showmeans=True)
        ax.set_xticks(range(1, len(boxes) + 1), [*boxes])
        figures.write(drawing, file)
    return ("Figure 3: distance between the failures of an instruction, 1 - cos, embedded by the "
            "SFT agent", ["<agent", "<distance"], rows)


def over_iterations(env: str, evals: list[dict], runs: Runs, out: Path) -> Table:
    """Returns a table of each agent's reward and success after each iteration, and draws the
    rewards of the targets as curves, with one panel per split."""
    rows = means(evals, ("arm", "agent", "i", "split"), MEASURES)
    curves = defaultdict(lambda: defaultdict(list))  # split -> arm -> points of its curve
    y = "reward"
    for arm, agent, i, split, reward, _ in rows:
        if agent == "target":
            half = reward["half"] or 0
            curves[split][arm].append((i, reward["mean"], min(half, reward["mean"]), half))
            if half:
                y = "reward, 95% t interval over seeds"
    if curves:
        drawing, axes = figures.figure(len(curves), height=5)
        models = {config_of(run)["settings"]["model"] for *_, run in each(runs)}
        drawing.suptitle(visible(f"Target agent on {env}, model {', '.join(sorted(models))}"))
        for ax, (split, of_split) in zip(axes, curves.items()):
            for n, (arm, points) in enumerate(of_split.items()):
                i, reward, below, above = zip(*figures.shifted(points, n, len(of_split)))
                style = figures.LINES[n // len(figures.COLOURS) % len(figures.LINES)]
                seeds = " ".join(map(str, runs[arm]))
                ax.errorbar(i, reward, (below, above), marker="o", color=f"C{n}", capsize=3,
                            label=visible(f"{arm}, seed {seeds}"), linestyle=style)
            figures.label(ax, split, "iteration (0: the start)", y)
        figures.legend(axes[0])
        figures.write(drawing, out / f"curves-{env}.svg")
    return ("Over iterations",
            ["<method", "<agent", "iteration", "<split", "<reward", "<success"], rows)


# ------------------------------------------------------------------------------------ command


def split_name(word: str) -> tuple[str, Path]:
    """Parses an argument NAME=RUN or RUN, and returns the name and the run's folder. Without NAME,
    the name is the run's arm or method. An argument that is an existing path is a RUN."""
    name, _, path = word.partition("=")
    if Path(word).exists() or not path:
        return arm_of(Path(word)), Path(word)
    return name, Path(path)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, or NAME=FOLDER, or studies")
    parser.add_argument("--out", type=Path,
                        help="folder of the report [`report`, next to the runs]")
    args = parser.parse_args(argv)
    studies = [finished(Path(word)) for word in args.runs]  # {} for a folder that is no study
    if all(studies):
        envs = dict(itertools.chain(*(study.items() for study in studies)))
        if len(envs) < len(studies):
            raise UsageError("several of these studies are in the same environment; name the runs "
                             "to compare: NAME=RUN NAME=RUN")
        paths = [Path(word) for word in args.runs]
    else:
        given = [split_name(word) for word in args.runs]
        envs = named(given)
        paths = [path for _, path in given]
    out = args.out or Path(os.path.commonpath([path.resolve().parent for path in paths]), "report")
    write_report("Comparison of runs", envs, out, COMPARED if all(studies) else None)


if __name__ == "__main__":
    command("compare", main)
