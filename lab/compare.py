"""The report on several runs: tables in the terminal, and a folder with a page and its figures.

    bash run.sh compare RUN RUN ...       any finished runs of one environment and model
    bash run.sh study webshop --report    those of a study

The folder holds report.txt, report.json and the figures.
"""

import argparse
import itertools
import json
import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lab import figures
from lab import study_methods as methods
from lab import study_numbers as numbers
from lab.figure3 import distances_of
from lab.report import columns, section
from lab.runfiles import command, config_of
from lab.study_methods import COMPARED, FROZEN, name_of
from lab.study_numbers import MEASURES, explored, interval, last, means, paired
from worlds.flags import Refused


@dataclass
class Part:
    """Of a report: a table, its header and rows as `section` takes them, a text, figures by name.

    A cell is a text, a number, an `interval` or a `paired` difference; None if there is none.
    """
    title: str
    header: str
    rows: list[tuple]
    text: str = ""
    figures: dict = field(default_factory=dict)

    def __str__(self):
        cells = [[_cell(value) for value in row] for row in self.rows]
        return "\n".join(filter(None, [section(self.title, self.header, cells),
                                       textwrap.fill(self.text, 100)]))


def _cell(x) -> str:
    if x is None or isinstance(x, str):
        return x or "-"
    if not isinstance(x, dict):
        return f"{x:,.4g}" if isinstance(x, float) and abs(x) < 1000 else f"{x:,.0f}"
    half = "?" if x["half"] is None else f"{x['half']:.3f}"
    ahead = f" ({x['ahead']} of {x['n']})" if "ahead" in x else ""
    return f"{x['mean']:.3f} ± {half}{ahead}{' *' * (x.get('verdict', 'undecided') != 'undecided')}"


def _header(*names) -> str:
    return " ".join(str(name).replace(" ", "_") for name in names)


def write_report(title: str, runs: dict, out: Path) -> str:
    """Writes the report on finished runs (method -> seed -> folder) into `out`; it as text."""
    if not runs:
        raise Refused(f"{out.parent}: no finished run in it (METHOD-sSEED with result.json)")
    out.mkdir(parents=True, exist_ok=True)
    made = [part for part in parts(runs) if part.rows]
    for part in made:
        for name, drawn in part.figures.items():
            (out / f"{name}.svg").write_bytes(figures.svg(drawn))
    text = "\n\n".join([title, *map(str, made)]) + "\n"
    (out / "report.txt").write_text(text)
    (out / "report.json").write_text(json.dumps({part.title: [
        dict(zip((name for name, _ in columns(part.header)), row)) for row in part.rows]
        for part in made}, indent=1))
    return text


def parts(runs: dict):
    """The parts of a report in order; those without rows say nothing."""
    target, second = (numbers.evaluations(runs, second=which) for which in (False, True))
    splits = list(dict.fromkeys(split for by_split in target.values() for split in by_split))
    yield _finals("Greedy evaluation of the target after its last iteration", target, splits, runs)
    yield _finals("The second agents: the failure agent, or the second positive one", second,
                  splits, runs)
    costs = {m: means([numbers.cost(path) for path in runs[m].values()]) for m in runs}
    yield Part("What it took after the first SFT, means over seeds",
               _header("<method", *next(iter(costs.values()))),
               [(name_of(m), *row.values()) for m, row in costs.items()])
    pairs = [(a, b, split, [
        paired(last(target[a], split, key), last(target[b], split, key)) for key in MEASURES])
        for (a, b), split in itertools.product(dict.fromkeys(COMPARED), splits)
        if a != b and {a, b} <= target.keys()]
    yield Part("Differences on the same seeds",
               _header("<difference", "<split", *(f"<{key}" for key in MEASURES)),
               [(_difference(a, b), split, *found) for a, b, split, found in pairs if found[0]],
               "Mean ± half of the 95% interval, and on how many seeds the first is ahead. *: on "
               "three seeds or more the interval does not hold 0. Intervals are not corrected for "
               "their number: were there no differences, one in 20 would still not hold it.")
    yield Part("Table 2: explored trajectories, all agents and iterations of a method",
               "<method threshold <success <negative <hard_negative", _table2(runs))
    yield from _figure3(runs)
    yield from _figure4(runs, target, splits)
    yield from _dose(runs, target, splits)
    yield Part("Over iterations", "<agent <split <method iteration runs <reward <success",
               [(agent, split, name_of(m), i, len(row["reward"]),
                 *(interval(row[key].values()) for key in MEASURES))
                for agent, by_method in (("target", target), ("second", second))
                for split in splits for m, by_split in by_method.items()
                for i, row in by_split.get(split, {}).items()],
               figures=dict(curves=_draw_curves(target, splits)))


def _finals(title: str, by_method: dict, splits: list[str], runs: dict) -> Part:
    wanted = [*itertools.product(splits, MEASURES)]
    return Part(title, _header("<method", "<seeds", *(f"<{s} {key}" for s, key in wanted)),
                [(name_of(m), " ".join(map(str, runs[m])),
                  *(interval(found.values()) if (found := last(by_split, s, key)) else None
                    for s, key in wanted)) for m, by_split in by_method.items()],
                "Mean over seeds ± half of the 95% t interval.")


def _difference(a: str, b: str) -> str:
    return f"{name_of(a)} - {name_of(b)}"


def _table2(runs: dict) -> list[tuple]:
    """Shares at each threshold; also co-evolution's minus ETO's on the same seeds."""
    names = ("success", "negative", "hard_negative")
    rewards = {m: {seed: [t.reward for t in explored(path)] for seed, path in runs[m].items()}
               for m in ("eto", "positive", "coevolve")
               if m in runs and any(map(explored, runs[m].values()))}
    share = {(m, t): {key: {seed: numbers.table2(found, t)[key]
                            for seed, found in rewards[m].items()} for key in names}
             for m in rewards for t in numbers.THRESHOLDS}
    rows = [(name_of(m), t, *(interval(by_seed.values()) for by_seed in by_key.values()))
            for (m, t), by_key in share.items()]
    return rows + [(_difference("coevolve", "eto"), t, *(
        paired(share["coevolve", t][key], share["eto", t][key]) for key in names))
        for t in numbers.THRESHOLDS if {"eto", "coevolve"} <= rewards.keys()]


def _figure3(runs: dict):
    found, pair = distances_of(runs)
    if not found:
        return
    every = {name: [x for d in by_seed.values() for x in d.values()]
             for name, by_seed in found.items()}
    made, (ax,) = figures.figure(1, width=6.0)
    ax.boxplot(list(every.values()), showmeans=True)
    ax.set_xticks(range(1, len(every) + 1), [name.replace(": ", ":\n") for name in every])
    yield Part("Figure 3: distance between the failures of an instruction, 1 - cos",
               "<agent <mean_of_seeds instructions",
               [(name, interval(np.mean([*d.values()]) for d in by_seed.values()),
                 len(every[name])) for name, by_seed in found.items()]
               + [("failure agent - ETO, where both failed at least twice", pair, None)],
               "Embedded by the SFT agent.", dict(figure3=made))


def _figure4(runs: dict, target: dict, splits: list[str]):
    found = {config_of(next(iter(runs[m].values())))["settings"]["lambda_sft"]: m for m in target
             if m == "coevolve" or m.startswith("lambda-")}
    if len(found) < 2:
        return
    rows = [(weight, *(interval(last(target[m], split, "reward").values()) for split in splits))
            for weight, m in sorted(found.items())]
    made, (ax,) = figures.figure(1)
    for n, split in enumerate(splits, 1):
        ax.errorbar([row[0] for row in rows], [row[n]["mean"] for row in rows],
                    [row[n]["half"] or 0 for row in rows], marker="o", capsize=3, label=split)
    ax.set(xscale="log", xlabel="lambda_SFT", ylabel="reward, 95% over seeds")
    ax.legend()
    yield Part("Figure 4: lambda_SFT", _header("lambda", *(f"<{split}" for split in splits)), rows,
               figures=dict(figure4=made))


def _dose(runs: dict, target: dict, splits: list[str]):
    """Dose: hard negatives of a trained failure agent, less a frozen one's; response: reward."""
    rows = [(name_of(dose), *(paired(*by_seed) for by_seed in (
                [{seed: numbers.hard_negatives(path) for seed, path in runs[m].items()}
                 for m in (dose, frozen)],
                *([last(target[m], split, "reward") for m in (dose, frozen)] for split in splits))))
            for dose, frozen in FROZEN.items() if {dose, frozen} <= target.keys()]
    if not rows:
        return
    made, axes = figures.figure(len(splits))
    for n, (ax, split) in enumerate(zip(axes, splits), 2):
        for name, hard, reward in ((row[0], row[1], row[n]) for row in rows if row[n]):
            ax.errorbar(hard["mean"], reward["mean"], reward["half"] or 0, hard["half"] or 0,
                        marker="o", capsize=3, label=name)
        ax.set(title=split, xlabel="share of hard negatives, trained - frozen",
               ylabel="reward, trained - frozen")
    figures.legend(axes[0])
    yield Part("Dose and response: a trained failure agent less a frozen one, at equal steps",
               _header("<dose", "<hard_negatives", *(f"<{split} reward" for split in splits)), rows,
               figures=dict(dose=made))


def _draw_curves(target: dict, splits: list[str]):
    made, axes = figures.figure(len(splits), height=5)
    for ax, split in zip(axes, splits):
        for k, (m, by_split) in enumerate(target.items()):
            found = {i: interval(row["reward"].values())
                     for i, row in by_split.get(split, {}).items()}
            ax.errorbar([*found], [x["mean"] for x in found.values()],
                        [x["half"] or 0 for x in found.values()], color=f"C{k % 10}", marker="o",
                        capsize=3, label=name_of(m), linestyle=figures.LINES[k // 10 % 3])
        figures.label(ax, split, "iteration (0: the start)", "reward, 95% over seeds")
    figures.legend(axes[0])
    return made


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, help="folder of the report [`report`, beside the runs]")
    asked = parser.parse_args(argv)
    out = asked.out or Path(os.path.commonpath([p.resolve().parent for p in asked.runs]), "report")
    print(write_report("Comparison of runs", methods.chosen(asked.runs), out))
    print(f"compare: {out} holds this, the numbers and the figures")


if __name__ == "__main__":
    command("compare", main)
