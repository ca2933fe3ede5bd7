"""The report on several runs: a table in the terminal, and a folder with a page and its figures.

    bash run.sh compare RUN RUN ...       any finished runs of one environment and model
    bash run.sh study webshop --report    those of a study

The folder holds report.txt, report.html, report.json and the figures. The page also has the
hardest negatives of co-evolution's first run as conversations.
"""

import argparse
import json
import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.files import RunError, command
from harness.report import columns, section
from look import figures
from look.conversations import conversations
from look.page import render
from study import numbers
from study.figure3 import figure3
from study.methods import MEASURES, chosen, equals, method_of, name_of


@dataclass
class Part:
    """Of a report: a title with a text, a table (as `section` takes it), figures by their names."""
    title: str
    text: str = ""
    header: str = ""
    rows: list = field(default_factory=list)
    figures: dict = field(default_factory=dict)

    def __str__(self):
        text = textwrap.fill(self.text, 100)
        return "\n".join(filter(None, [section(self.title, self.header, self.rows) if self.rows
                                       else self.title, text]))


def write_report(title: str, runs: dict, out: Path, encoder: str | None = None) -> str:
    """Writes the report on finished runs into the folder `out`; returns it as text.

    runs: method -> seed -> folder. encoder: what embeds the trajectories of Figure 3, "sft" for
    the SFT agent or a hub name; without it the figure is left out. RunError without runs.
    """
    if not runs:
        raise RunError(f"{out.parent}: no finished run in it (METHOD-sSEED with result.json)")
    out.mkdir(parents=True, exist_ok=True)
    found = numbers.numbers(runs)
    found["figure3"] = figure3(runs, encoder) if encoder else {}
    (out / "report.json").write_text(json.dumps(dict(title=title, **found), indent=1))
    made = list(parts(found))
    shown = {name: figures.save(drawn, out / name)
             for part in made for name, drawn in part.figures.items()}
    text = "\n\n".join([title, *map(str, made)]) + "\n"
    (out / "report.txt").write_text(text)
    example = next(iter(runs.get("coevolve", {}).values()), None)
    data = conversations(example, tasks=60) if example else dict(tasks=[])
    (out / "report.html").write_text(render(
        "report.html.j2", data, title=title, parts_of=made, columns=columns, drawn=shown,
        note=f"Of {example}, the tasks with the hardest negatives.", has_tasks=bool(data["tasks"]),
        pages=[(f"{name_of(m)}, seed {seed}", os.path.relpath(path / "run.html", out))
               for m, by_seed in runs.items() for seed, path in by_seed.items()
               if (path / "run.html").exists()]))
    return text


# ---------------------------------------------------------------------------------- its parts


def parts(n: dict):
    """The parts of a report on `numbers.numbers`, in order."""
    splits = n["splits"]
    yield Part(
        "Greedy evaluation of the target after its last iteration",
        "Mean over seeds ± half of the 95% t interval; reward and, in brackets, success rate.",
        _header("<method <seeds", [f"<{split}" for split in splits]),
        [(name_of(m), " ".join(map(str, n["seeds"][m])), *_scores(row, splits))
         for m, row in n["main"].items()])
    if n["second_agents"]:
        yield Part("The second agents: the failure agent, or the second positive one", "",
                   _header("<method", [f"<{split}" for split in splits]),
                   [(name_of(m), *_scores(row, splits)) for m, row in n["second_agents"].items()])
    yield Part("What it took after the first SFT, mean over seeds", "",
               "<method steps_of_the_target steps_of_all_agents M_tokens_of_the_target rollouts",
               [(name_of(m), f"{row['target_steps']:,.0f}", f"{row['all_steps']:,.0f}",
                 f"{row['target_tokens'] / 1e6:.2f}", f"{row['rollouts']:,.0f}")
                for m, row in n["main"].items()])
    if n["paired"]:
        yield from _differences(n["paired"])
    if n["evolutions"]:
        names = list(next(iter(n["evolutions"].values())))
        yield Part("Agent and tasks: episodes; tasks and proposals after the start", "",
                   _header("<method", names, "verified"),
                   [(name_of(m), *(f"{row[name]:,.0f}" for name in names),
                     f"{row['added'] / row['replayed']:.2f}" if row["replayed"] else "-")
                    for m, row in n["evolutions"].items()])
    if n["table2"]:
        yield Part("Table 2: explored trajectories, all agents and iterations of a method", "",
                   "<method threshold <success <negative <hard_negative",
                   [(" - ".join(map(name_of, m.split(" - "))), t, *map(_text, row.values()))
                    for m, by in n["table2"].items() for t, row in by.items()])
    if n["course"]:
        names = list(dict.fromkeys(name for row in n["course"] for name in row))
        yield Part("Co-evolution, iteration by iteration", "",
                   _header("<mean_over_seeds", [str(row["iteration"]) for row in n["course"]]),
                   [(name, *(f"{row[name]:.3g}" if name in row else "-" for row in n["course"]))
                    for name in names[1:]])
    if n["figure3"]:
        yield _figure3(n["figure3"])
    if len(n["figure4"]) > 1:
        yield Part("Figure 4: lambda_SFT", "",
                   _header("lambda_SFT", [f"<{split}" for split in splits]),
                   [(w, *(_text(row.get(s)) for s in splits)) for w, row in n["figure4"].items()],
                   dict(figure4=_draw_figure4(n["figure4"], splits)))
    yield Part("Over iterations", "", "<agent <split <method iteration runs <reward <success",
               [(agent, split, name_of(m), i, row["reward"]["n"], _text(row["reward"]),
                 _text(row["success"]))
                for agent, by in n["curves"].items() for split in splits
                for m, of_splits in by.items() for i, row in of_splits.get(split, {}).items()],
               dict(curves=_draw_curves(n["curves"]["target"], splits)))


def _header(first: str, names: list[str], last: str = "") -> str:
    return " ".join([first, *(name.replace(" ", "_") for name in names), last])


def _text(x: dict | None, digits: int = 3) -> str:
    if x is None:
        return "-"
    half = "± ?" if x["half"] is None else f"± {x['half']:.{digits}f}"
    return f"{x['mean']:.{digits}f} {half}"


def _scores(row: dict, splits: list[str]) -> list[str]:
    """A cell for each split: reward and, in brackets, success rate."""
    return [f"{_text(row[s]['reward'])} ({_text(row[s]['success'])})" if s in row else "-"
            for s in splits]


def difference(r: dict) -> str:
    return f"{name_of(r['a'])} - {name_of(r['b'])}"


def _differences(paired: list[dict]):
    claims = {}
    for r in paired:
        claims.setdefault((difference(r), r["split"], r["source"]), {})[r["measure"]] = (
            f"{_text(r)} ({r['ahead']} of {r['n']}){' *' * (r['verdict'] != 'undecided')}")
    yield Part(
        "Differences on the same seeds",
        "Mean ± half of the 95% interval, and on how many seeds the first is ahead. *: three seeds "
        "or more, and the interval does not hold 0. Intervals are not corrected for their number: "
        f"were there no differences, {len(paired) / 20:.1f} of these {len(paired)} would still "
        "not hold it.", _header("<difference <split", [f"<{key}" for key in MEASURES],
                                "<claimed_in"),
        [(name, split, *(cells.get(key, "-") for key in MEASURES), source)
         for (name, split, source), cells in claims.items()],
        dict(differences=_draw_differences(paired)))
    if survivors := at_equal_cost(paired):
        yield Part("What survives at equal cost", "", "<difference <verdicts", survivors)


def at_equal_cost(rows: list[dict]) -> list[tuple[str, str]]:
    """For each claim at equal cost its name, and the verdict at equal epochs, then at this cost."""
    verdict = {(r["a"], r["b"], r["measure"], r["split"]): r["verdict"] for r in rows}
    found = {}
    for (a, b, measure, split), then in verdict.items():
        if "coevolve" in equals(b):
            before = verdict.get((a, method_of(b), measure, split), "not compared")
            found.setdefault(difference(dict(a=a, b=b)), {}).setdefault(
                f"{before} at equal epochs, then {then}", []).append(f"{measure} on {split}")
    return [(name, "; ".join(f"{change} in {', '.join(where)}"
                             for change, where in changes.items()))
            for name, changes in found.items()]


def _figure3(n: dict) -> Part:
    pair, found = n["failure_agent_minus_eto"], {k: d for k, d in n["distances"].items() if d}
    made, (left, right) = figures.figure(2)
    edges = np.histogram_bin_edges(sum(found.values(), []), 30)
    for name, values in found.items():
        left.hist(values, edges, histtype="step", label=name)
    left.set(xlabel="mean pairwise distance, 1 - cos", ylabel="instructions x seeds", yscale="log")
    left.legend()
    right.boxplot(list(found.values()), showmeans=True)
    right.set_xticks(range(1, len(found) + 1), [name.replace(": ", ":\n") for name in found])
    return Part("Figure 3: distance between the failures of an instruction, 1 - cos",
                f"Embedded by {n['encoder']}." + (
                    " Failure agent - ETO, where both failed at least twice: "
                    f"{_text(pair, 4)}, {pair['verdict']}." if pair else ""),
                "<agent <mean_of_seeds_±_95% instructions",
                [(name, _text(x, 4), len(n["distances"][name])) for name, x in n["means"].items()],
                dict(figure3=made))


def _draw_curves(by_method: dict, splits: list[str]):
    made, axes = figures.figure(len(splits), height=5)
    for ax, split in zip(axes, splits):
        for k, (m, of_splits) in enumerate(by_method.items()):
            points = [(i, x["mean"], x["mean"] - (x["half"] or 0), x["mean"] + (x["half"] or 0))
                      for i, x in ((i, row["reward"]) for i, row in
                                   of_splits.get(split, {}).items())]
            if points:
                figures.curve(ax, points, color=f"C{k % 10}", label=name_of(m),
                              linestyle=figures.LINES[k // 10 % 3])
        figures.label(ax, split, "iteration (0: the start)", "reward, 95% over seeds")
    figures.legend(axes[0])
    return made


def _draw_differences(paired: list[dict]):
    """A panel for each split and measure: the differences with their intervals."""
    names, panels = list(dict.fromkeys(map(difference, paired)))[::-1], {}
    for r in paired:
        panels.setdefault(f"{r['measure']}, {r['split']}", []).append(r)
    made, axes = figures.figure(len(panels), height=1.2 + 0.2 * len(names))
    for ax, (title, rows) in zip(axes, panels.items()):
        for r in rows:
            ax.errorbar(r["mean"], names.index(difference(r)), xerr=r["half"] or 0, marker="|",
                        color="#999999" if r["verdict"] == "undecided" else "#0072B2")
        ax.set_yticks(range(len(names)), names if ax is axes[0] else [""] * len(names))
        ax.axvline(0, color="#555555", linestyle=":", lw=1)
        ax.set(title=title, ylim=(-0.6, len(names) - 0.4))
    return made


def _draw_figure4(by_weight: dict, splits: list[str]):
    made, (ax,) = figures.figure(1)
    for split in splits:
        rows = [(float(w), row[split]) for w, row in by_weight.items() if split in row]
        ax.errorbar([w for w, _ in rows], [x["mean"] for _, x in rows],
                    [x["half"] or 0 for _, x in rows], marker="o", capsize=3, label=split)
    ax.set(xscale="log", xlabel="lambda_SFT", ylabel="reward, 95% over seeds")
    ax.legend()
    return made


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, help="folder of the report [`report`, beside the runs]")
    parser.add_argument("--encoder", help="also Figure 3, of ETO and "
                        "co-evolution; sft: by the SFT agent, else by an encoder's hub name")
    asked = parser.parse_args(argv)
    out = asked.out or Path(os.path.commonpath([p.resolve().parent for p in asked.runs]), "report")
    print(write_report("Comparison of runs", chosen(asked.runs), out, asked.encoder))
    print(f"compare: {out} holds this, the numbers and the figures")


if __name__ == "__main__":
    command("compare", main)
