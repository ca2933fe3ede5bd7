"""A study's report: Markdown, a page, JSON, figures, the hardest negatives as conversations."""

import base64
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.files import RunError
from look import charts
from look.conversations import conversations
from look.page import render
from study import numbers
from study.figure3 import figure3
from study.methods import MEASURES, SECOND, equals, finished, method_of, name_of, refuse_unlike
from study.show import show


def write_report(env: str, folder: Path, encoder: str | None) -> str:
    """Writes folder/report from the finished runs; returns its Markdown. RunError without runs."""
    runs = finished(folder)
    if not runs:
        raise RunError(f"{folder}: no finished run in it (METHOD-sSEED with result.json)")
    refuse_unlike(runs)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    by_run, second = ({(m, s): numbers.scores(path, *agents) for m, found in runs.items()
                       for s, path in found.items()} for agents in (["target"], SECOND))
    splits = list(next(iter(by_run.values())))
    found = dict(environment=env, seeds={m: list(found) for m, found in runs.items()},
                 main=numbers.main_table(runs, by_run, splits),
                 second_agents=numbers.second_agents(runs, second, splits),
                 paired=numbers.paired_table(by_run, splits),
                 evolutions=numbers.evolutions(runs),
                 table2=numbers.table2(runs), course=numbers.course(runs),
                 curves=numbers.curves(runs, by_run, splits), figure3=figure3(runs, encoder),
                 figure4=numbers.figure4(runs, by_run, splits))
    (out / "report.json").write_text(json.dumps(found, indent=1))
    draw(found, splits, out)
    if "coevolve" in runs:
        first = next(iter(runs["coevolve"].values()))
        (out / "conversations.txt").write_text(show(first, None, 3))
    text = markdown(found, splits)
    (out / "report.md").write_text(text)
    (out / "report.html").write_text(html(found, splits, runs, out))
    return text


def text_of(x: dict | None, digits: int = 3) -> str:
    if x is None:
        return "-"
    half = "± ?" if x["half"] is None else f"± {x['half']:.{digits}f}"
    return f"{x['mean']:.{digits}f} {half}"


def scores_of(row: dict, splits: list[str]) -> list[str]:
    """Of `finals`, a cell for each split: reward and, in brackets, success rate."""
    return [f"{text_of(row[f'{s} reward'])} ({text_of(row[f'{s} success'])})" for s in splits]


@dataclass(frozen=True)
class Bold:
    """A cell, part of which stands out."""
    strong: str
    rest: str

    def __str__(self):
        return f"**{self.strong}**{self.rest}"


def markdown(n: dict, splits: list[str]) -> str:
    lines = [f"# Study on {n['environment']}", ""]
    for kind, *what in blocks(n, splits):
        if kind == "heading":
            lines += [f"## {what[0]}", ""]
        elif kind == "text":
            lines += [what[0], ""]
        elif kind == "list":
            lines += [*(f"- {line}" for line in what[0]), ""]
        elif kind == "figure":
            lines += [f"![]({what[0]})", ""]
        elif kind == "table":
            header, rows = what
            cells = [header, ["---"] * len(header), *([str(c) for c in row] for row in rows)]
            lines += ["| " + " | ".join(row) + " |" for row in cells] + [""]
    if "coevolve" in n["main"]:
        lines += ["The hardest negatives beside expert and target: conversations.txt.", ""]
    return "\n".join(lines)


def blocks(n: dict, splits: list[str]):
    """The report's parts in order: heading, text, list, figure, table (header, rows), intervals."""
    yield ("text", "Greedy evaluation of the target after its last iteration: mean over seeds ± "
           "half of the 95% t interval, reward and, in brackets, success rate.")
    yield ("table", ["method", "seeds", *splits, "steps of the target", "steps of all agents",
                     "M tokens in the target's training", "rollouts"],
           [(name_of(m), " ".join(map(str, n["seeds"][m])), *scores_of(row, splits),
             f"{row['target_steps']:,.0f}", f"{row['all_steps']:,.0f}",
             f"{row['target_tokens'] / 1e6:.2f}", f"{row['rollouts']:,.0f}")
            for m, row in n["main"].items()])
    if n["second_agents"]:
        yield "text", "The second agents, the failure agent or the second positive one:"
        yield ("table", ["method", *splits], [(name_of(m), *scores_of(row, splits))
                                              for m, row in n["second_agents"].items()])
    yield "heading", "Differences on the same seeds"
    yield ("text", "Mean ± half of the 95% interval, and on how many seeds the first is ahead. "
           "Bold: three seeds or more, and the interval does not hold 0. Intervals are not "
           f"corrected for their number: were there no differences, {len(n['paired']) / 20:.1f} "
           f"of these {len(n['paired'])} would still not hold it.")
    claims = {}
    for r in n["paired"]:
        ahead = f" ({r['ahead']} of {r['n']})"
        claims.setdefault((difference(r), r["source"]), {})[r["split"], r["measure"]] = (
            text_of(r) + ahead if r["verdict"] == "undecided" else Bold(text_of(r), ahead))
    columns = list(itertools.product(splits, MEASURES))
    yield ("table",
           ["difference", *(f"{split}: {key}" for split, key in columns), "claimed in"],
           [(name, *(cells.get(c, "-") for c in columns), source)
            for (name, source), cells in claims.items()])
    yield "intervals", n["paired"]
    if survivors := at_equal_cost(n["paired"]):
        yield "text", "What survives at equal cost:"
        yield "list", survivors
    if n["evolutions"]:
        yield "heading", "Agent and tasks: episodes; tasks and proposals after the start"
        names = list(next(iter(n["evolutions"].values())))
        yield ("table", ["method", *(name.replace("_", " ") for name in names), "verified"],
               [(name_of(m), *(f"{row[name]:,.0f}" for name in names),
                 f"{row['added'] / row['replayed']:.2f}" if row["replayed"] else "-")
                for m, row in n["evolutions"].items()])
    if n["table2"]:
        yield "heading", "Table 2: explored trajectories, all agents and iterations of a method"
        yield ("table", ["method", "threshold", "success", "negative", "hard negative"],
               [(" - ".join(map(name_of, m.split(" - "))), t, *(text_of(x) for x in row.values()))
                for m, by in n["table2"].items() for t, row in by.items()])
    if n["course"]:
        yield "heading", "Co-evolution, iteration by iteration"
        names = list(dict.fromkeys(name for row in n["course"] for name in row))
        yield ("table", names, [[f"{row[k]:.3g}" if k in row else "-" for k in names]
                                for row in n["course"]])
    if n["figure3"]:
        yield "heading", "Figure 3: distance between the failures of an instruction, 1 - cos"
        yield "text", f"Embedded by {n['figure3']['encoder']}."
        yield "figure", "figure3.png"
        yield ("table", ["agent", "mean of seeds ± 95%", "instructions"],
               [(name, text_of(x, 4), len(n["figure3"]["distances"][name]))
                for name, x in n["figure3"]["means"].items()])
        if pair := n["figure3"]["failure_agent_minus_eto"]:
            yield ("text", "Failure agent - ETO, where both failed at least twice: "
                   f"{text_of(pair, 4)}, {pair['verdict']}.")
    if len(n["figure4"]) > 1:
        yield "heading", "Figure 4: lambda_SFT"
        yield "figure", "figure4.png"
        yield ("table", ["lambda_SFT", *splits], [(w, *(text_of(row[s]) for s in splits))
                                                  for w, row in n["figure4"].items()])
    yield "heading", "Over iterations"
    yield "figure", "curves.png"


def difference(r: dict) -> str:
    return f"{name_of(r['a'])} - {name_of(r['b'])}"


def at_equal_cost(rows: list[dict]) -> list[str]:
    """Which differences survive: for each claim at equal cost the verdict at equal epochs, then."""
    verdict = {(r["a"], r["b"], r["measure"], r["split"]): r["verdict"] for r in rows}
    found = {}
    for (a, b, measure, split), then in verdict.items():
        if "coevolve" in equals(b):
            before = verdict.get((a, method_of(b), measure, split), "not compared")
            found.setdefault(difference(dict(a=a, b=b)), {}).setdefault(
                f"{before} at equal epochs, then {then}", []).append(f"{measure} on {split}")
    return [f"{name}: " + "; ".join(f"{change} in {', '.join(where)}"
                                    for change, where in changes.items())
            for name, changes in found.items()]


def html(n: dict, splits: list[str], runs: dict, out: Path) -> str:
    """The report as a page: the same parts, figures in it, intervals drawn, conversations."""
    # Of co-evolution's first run, as in conversations.txt.
    example = next(iter(runs["coevolve"].values())) if "coevolve" in runs else None
    data = conversations(example, letters=2e6, tasks=60) if example else dict(tasks=[])
    figures = {path.name: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
               for path in out.glob("*.png")}
    drawn = {}
    for r in n["paired"]:
        drawn.setdefault(f"{r['split']}: {r['measure']}", []).append(
            (difference(r), r["mean"], r["half"], r["verdict"] != "undecided"))
    return render("report.html.j2", data, title=f"Study on {n['environment']}",
                  left_first=lambda names: [(name, not k) for k, name in enumerate(names)],
                  blocks=list(blocks(n, splits)), figures=figures,
                  intervals=[charts.intervals(*column) for column in drawn.items()],
                  example=example and example.name, has_tasks=bool(data["tasks"]),
                  pages=[(f"{name_of(m)}, seed {seed}", f"../{path.name}/run.html")
                         for m, found in runs.items() for seed, path in found.items()
                         if (path / "run.html").exists()])


def draw(n: dict, splits: list[str], out: Path) -> None:
    """curves.png, figure3.png and figure4.png of the numbers `n`, as far as they are there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    def save(fig, name):
        fig.savefig(out / name, format="png", dpi=150, metadata={"Software": None})
        plt.close(fig)

    size = dict(figsize=(4.6 * len(splits), 4), layout="constrained", squeeze=False)
    fig, axes = plt.subplots(1, len(splits), **size)
    for ax, split in zip(axes[0], splits):
        for k, (m, by) in enumerate(n["curves"].items()):
            x = list(by[split])
            y = np.array([v["mean"] for v in by[split].values()])
            half = np.array([v["half"] or 0 for v in by[split].values()])
            style = dict(color=f"C{k % 10}", linestyle=("-", "--", ":")[k // 10])
            ax.plot(x, y, marker="o", markersize=4, label=name_of(m), **style)
            ax.fill_between(x, y - half, y + half, color=style["color"], alpha=0.1, lw=0)
        ax.set(title=split, xlabel="iteration (0: the start)", ylabel="reward, 95% over seeds")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
               frameon=False, fontsize=8)
    save(fig, "curves.png")

    if n["figure3"]:
        found = {name: d for name, d in n["figure3"]["distances"].items() if d}
        fig, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4), layout="constrained")
        edges = np.histogram_bin_edges(sum(found.values(), []), 30)
        for name, values in found.items():
            left.hist(values, edges, histtype="step", label=name)
        left.set(xlabel="mean pairwise distance, 1 - cos", ylabel="instructions x seeds",
                 yscale="log")
        left.legend(frameon=False, fontsize=8)
        right.boxplot(list(found.values()), showmeans=True)
        right.set_xticks(range(1, len(found) + 1), [name.replace(": ", ":\n") for name in found],
                         fontsize=8)
        save(fig, "figure3.png")

    if len(n["figure4"]) > 1:
        fig, ax = plt.subplots(figsize=(4.6, 4), layout="constrained")
        for split in splits:
            rows = [(float(w), row[split]) for w, row in n["figure4"].items() if split in row]
            ax.errorbar([w for w, _ in rows], [v["mean"] for _, v in rows],
                        [v["half"] or 0 for _, v in rows], marker="o", capsize=3, label=split)
        ax.set(xscale="log", xlabel="lambda_SFT", ylabel="reward, 95% over seeds")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
        save(fig, "figure4.png")
