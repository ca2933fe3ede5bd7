"""Compares several runs. Prints a report, and writes it to a folder with its numbers and figures.

    bash run.sh compare RUN RUN ...       Compare any runs, finished or not. Runs of the same method
                                          (or the same arm of a study) are grouped as its seeds.
    bash run.sh compare NAME=RUN ...      Compare runs under names that you choose. Runs with the
                                          same name are grouped as its seeds, for example
                                          base=A0 base=A1 ipo=B0 ipo=B1.
    bash run.sh study webshop --report    Compare the finished runs of a study.
    bash run.sh compare STUDY STUDY ...   Compare the finished runs of studies in several
                                          environments.

Each environment has its own tables. With several environments, the report also contains the average
over them. The report folder contains report.txt, report.json and the figures (SVG).
"""

import argparse
import itertools
import json
import os
import textwrap
from collections import defaultdict
from pathlib import Path

from common.settings import UsageError
from lab.page import figures
from lab.page.report import SAMPLES, Table
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
    grouped,
    setting_differences,
)

NOTE = f"""Each number is a mean over seeds. ± is half the width of its 95% t interval over seeds,
which describes the randomness of training, with these tasks. [low, high] is a 95% bootstrap
interval over seeds and tasks, which also describes the choice of the tasks ({SAMPLES:,}
samples; with one seed, it is over tasks alone). A difference also has the number of seeds on which
the first arm is ahead. The intervals are not corrected for multiple comparisons: without any real
difference, about one interval in 20 excludes 0."""


def write_report(
    title: str,
    envs: dict[str, Runs],
    out: Path,
    compared: list[tuple[str, str]] | None = None,
) -> None:
    """Prints a report on runs, and writes it to a folder.

    `compared` contains pairs of arms (a, b). The report contains the differences a - b of each
    pair. If `compared` is None, all arms are compared with each other, and the report begins with
    the differences in settings, code and outputs.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables = []
    last = {}  # environment -> the last evaluations of its runs
    for env, runs in envs.items():
        evals = numbers.evaluation_rows(runs)
        last[env] = numbers.after_the_last(evals)
        pairs = compared or pairs_of(runs)
        of_shares = [("coevolve", "eto")] if compared else pairs  # the pair in the paper's Table 2
        of_env = [
            states(runs),
            last_table(last[env], pairs),
            table("What it took after the first SFT", numbers.costs(runs), [], [], numbers.COSTS),
            table("Table 2: explored trajectories, all agents and iterations of a method",
                  numbers.shares(runs), of_shares, ["threshold"], numbers.SHARES),
            table("Figure 3: distance between the failures of an instruction, 1 - cos, embedded by "
                  "the SFT agent", numbers.distances_of(runs), [("coevolve: failure", "eto")], [],
                  ["distance"]),
            table("Over iterations", evals, [], ["agent", "iteration", "split"], numbers.MEASURES)]
        if compared is None:
            differing = ("Settings in which they differ", ["setting", "method", "value"],
                         setting_differences(runs))
            of_env = [differing, changes(runs, last[env]), *of_env]
        tables += [(f"{env}: {name}", columns, rows) for name, columns, rows in of_env]
        draw_rewards(env, evals, runs, out / f"curves-{env}.svg")
    if len(envs) > 1:
        arms = dict.fromkeys(itertools.chain(*envs.values()))
        averaged = numbers.average([*last.values()])
        name, *table_of_means = last_table(averaged, compared or pairs_of(arms))
        tables.append((f"average of {', '.join(envs)}: {name}", *table_of_means))
    tables.append(primary(last))

    texts = [title]
    as_json = {}
    for name, columns, rows in tables:
        if rows:
            texts.append(as_text(name, columns, rows))
            as_json[name] = [dict(zip(columns, row)) for row in rows]
    text = "\n\n".join([*texts, textwrap.fill(NOTE, 100)]) + "\n"
    (out / "report.txt").write_text(text, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(as_json, indent=1))
    print(text)
    print(f"{visible(str(out))} contains this report, its numbers and its figures")


def pairs_of(arms) -> list[tuple[str, str]]:
    """Returns all pairs (later arm, earlier arm)."""
    return [(later, first) for first, later in itertools.combinations(arms, 2)]


# ------------------------------------------------------------------------------------ as text


def as_text(title: str, columns: list[str], rows: list[tuple]) -> str:
    """Returns a table as text with aligned columns."""
    cells = [columns]
    for row in rows:  # `visible` escapes control characters in names and settings
        cells.append([visible(cell(x)).replace("\n", " ") for x in row])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [title]
    for row in cells:
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return "\n".join(lines)


def cell(x) -> str:
    """Formats a table cell. `x` is a text, a number, or a result of `numbers.interval`."""
    if not isinstance(x, dict):
        return f"{x:.3g}" if isinstance(x, float) else str(x)
    digits = ",.3f" if abs(x["mean"]) < 10 else ",.0f"
    style = f"+{digits}" if "ahead" in x else digits
    text = f"{x['mean']:{style}}"
    if x["half"] is not None:  # there are several seeds
        text += f" ± {x['half']:{digits}}"
    if "low" in x:
        text += f" [{x['low']:{style}}, {x['high']:{style}}]"
    if "ahead" in x and x["n"] > 1:
        text += f" ({x['ahead']} of {x['n']})"
    return text


# ------------------------------------------------------------------------------------- tables


def table(
    title: str,
    rows: list[dict],
    compared: list[tuple[str, str]],
    keys: list[str],
    measures: list[str],
    facts: tuple[str, ...] = (),
) -> Table:
    """Returns a table with the means of measures over seeds, and the differences between the arms
    in `compared`. There is one row for each combination of an arm, or a pair of arms, and values of
    the `keys`. For each key in `facts`, a column lists its values in the runs of the row."""
    cells = []
    for name, values, group in numbers.single(rows, keys) + numbers.paired(rows, compared, keys):
        texts = [numbers.text_of(fact, group) for fact in facts]
        results = [numbers.interval(group, measure) for measure in measures]
        cells.append((name, *values, *texts, *results))
    return title, ["method", *keys, *facts, *measures], cells


def last_table(last: list[dict], compared: list[tuple[str, str]]) -> Table:
    """Returns the main table of a report, on the last evaluation of each agent."""
    return table("Evaluation after the last iteration, and differences on the same seeds", last,
                 compared, ["agent", "split"], numbers.MEASURES, ("sampling", "seed", "iteration"))


def states(runs: Runs) -> Table:
    """Returns a table of the runs that need attention: unfinished runs, and runs whose output
    files were edited by the user."""
    rows = []
    for arm, seed, run in each(runs):
        phases = phases_of(run)
        notes = [f"{output} was edited" for output, row in phases.items() if "edited" in row]
        if not is_finished(run):
            i = max((row["i"] for row in phases.values()), default=0)
            notes.append(f"unfinished, iteration {i}")
        if notes:
            rows.append((arm, seed, "; ".join(notes)))
    return "Runs to note", ["method", "seed", "note"], rows


def primary(last: dict[str, list[dict]]) -> Table:
    """Returns a table of the `PRIMARY` comparisons. `last` contains the last evaluations in each
    environment."""
    rows = []
    for env, evals in last.items():
        tests = [e for e in evals if (e["agent"], e["split"]) == ("target", "test")]
        for name, _, group in numbers.paired(tests, PRIMARY, []):
            if len(group) > 1:
                lead = numbers.interval(group, "reward")
                rows.append((env, name, lead, numbers.p_value(lead)))
    corrected = numbers.holm([p for *_, p in rows])
    return (f"Primary comparisons: reward on test, p of a paired t test over seeds, and p "
            f"corrected for {len(rows)} tests (Holm)",
            ["environment", "difference", "reward", "p", "corrected p"],
            [(*row, p) for row, p in zip(rows, corrected)])


def draw_rewards(env: str, evals: list[dict], runs: Runs, file: Path) -> None:
    """Draws the rewards of the target agents over iterations, with one panel per split."""
    evals = [e for e in evals if e["agent"] == "target"]
    curves = defaultdict(list)  # (split, arm) -> points
    for arm, (split, i), group in numbers.single(evals, ["split", "iteration"]):
        reward = numbers.interval(group, "reward")
        curves[split, arm].append((i, reward["mean"], reward["half"] or 0))
    if not curves:
        return
    splits = [*dict.fromkeys(e["split"] for e in evals)]
    drawing, axes = figures.figure(len(splits), height=5)
    models = {config_of(run)["settings"]["model"] for *_, run in each(runs)}
    drawing.suptitle(visible(f"Target agent on {env}, model {', '.join(sorted(models))}"))
    y = "reward"
    for (split, arm), points in curves.items():
        n = [*runs].index(arm)
        i, reward, half = zip(*figures.shifted(points, n, len(runs)))
        if any(half):
            y = "reward, 95% t interval over seeds"
        axes[splits.index(split)].errorbar(
            i, reward, half if any(half) else None, marker="o", capsize=3, color=f"C{n}",
            linestyle=figures.LINES[n // len(figures.COLOURS) % len(figures.LINES)],
            label=visible(f"{arm}, seed {' '.join(map(str, runs[arm]))}"))
    for ax, split in zip(axes, splits):
        figures.label(ax, split, figures.ITERATION, y)
    figures.legend(drawing, axes[0])
    figures.write_svg(drawing, file)


# ------------------------------------------------------------------------------------ command


def split_name(word: str) -> tuple[str, Path]:
    """Parses an argument NAME=RUN or RUN. Without NAME, the name is the run's arm or method. An
    existing path is always parsed as RUN."""
    name, _, path = word.partition("=")
    if Path(word).exists() or not path:
        return arm_of(Path(word)), Path(word)
    return name, Path(path)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, NAME=FOLDER, or of studies")
    parser.add_argument("--out", type=Path,
                        help="folder of the report [`report`, next to the first run]")
    args = parser.parse_args(argv)
    studies = [finished(Path(word)) for word in args.runs]  # {} if the folder is no study
    if all(studies):
        given = [("", Path(word)) for word in args.runs]
        envs = {}
        for study in studies:
            envs |= study
        if len(envs) < len(studies):
            raise UsageError("several of these studies are in the same environment; name the runs "
                             "to compare: NAME=RUN NAME=RUN")
    else:
        given = [split_name(word) for word in args.runs]
        envs = grouped(given)
    parent = os.path.commonpath([path.resolve().parent for _, path in given])
    out = args.out or Path(parent, "report")
    write_report("Comparison of runs", envs, out, COMPARED if all(studies) else None)


if __name__ == "__main__":
    command("compare", main)
