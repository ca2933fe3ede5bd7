"""The figures of runs and studies: drawn once by matplotlib, saved as SVG, and as PNG beside it."""

import base64
import io
import itertools
import math
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lab.report import evaluations, headline
from lab.runfiles import (
    agents_of,
    config_of,
    explorations,
    kinds_of,
    of,
    phases_of,
    visible,
)
from worlds.files import read_jsonl

# Text stays text in an SVG, and equal runs give equal bytes.
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "", "axes.grid": True, "axes.axisbelow": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": "medium", "legend.frameon": False, "legend.fontsize": "small"})
# Okabe and Ito's colours, told apart by colour-blind readers too; as in page.css. Agents of other
# names, and kinds of pairs, take the next of OTHERS.
AGENT_COLOURS = {"target": "#0072B2", "failure": "#D55E00", "positive": "#CC79A7"}
SHARES = {"success": "#009E73", "hard negative": "#F0E442", "negative": "#999999"}
OTHERS = ("#7566B8", "#56B4E9", "#8B5A2B")
LINES = ("-", "--", ":")
MOST_POINTS = 40  # of a curve; more are averaged
# Of a step of training, what is drawn over steps, and its title; all but the loss are GRPO's.
STEP_NUMBERS = dict(loss="Loss", reward="Reward of its episodes", success="Success", kl="KL",
                    D="Tasks in D")


def figure(panels: int, title: str = "", width: float = 4.0, height: float = 3.8):
    """A figure and its panels, side by side; sizes of one in inches."""
    made = Figure((width * panels, height), layout="constrained")
    if title:
        made.suptitle(visible(title), parse_math=False)  # what a run's files say is no formula
    return made, made.subplots(1, panels, squeeze=False)[0]


def svg(made: Figure, path: Path | None = None) -> str:
    """A figure as the address of an SVG that a page can hold; also writes path.svg and path.png."""
    drawn = io.BytesIO()
    made.savefig(drawn, format="svg", metadata={"Date": None})
    if path:
        path.with_suffix(".svg").write_bytes(drawn.getvalue())
        made.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def curve(ax, points: list[tuple], **style) -> None:
    """A line through points (x, y, low, high); the band between the last two, where not None."""
    n = math.ceil(len(points) / MOST_POINTS)
    if n > 1:  # means of n neighbours, where the last one is
        groups = [points[k:k + n] for k in range(0, len(points), n)]
        points = [(g[-1][0], sum(p[1] for p in g) / len(g), None, None) for g in groups]
    x, y, low, high = zip(*points)
    ax.plot(x, y, marker="o", markersize=3.5, **style)
    if len(points) == 1 and low[0] is not None:  # a band of one point has no width
        ax.vlines(x, low, high, color=style["color"], alpha=0.4)
    elif None not in low:
        ax.fill_between(x, low, high, color=style["color"], alpha=0.12, lw=0)


def label(ax, title: str, x: str = "", y: str = "") -> None:
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def coloured(names: list[str]) -> dict[str, str]:
    """name -> colour, of agents or of kinds of pairs; `expert>failure` has the failure agent's."""
    others = itertools.cycle(OTHERS)
    return {name: AGENT_COLOURS.get(name.removeprefix("expert>")) or next(others)
            for name in names}


def stacked(ax, names: list[str], parts: dict[str, list[float]], colours: dict) -> None:
    """A bar for each name, made of parts: name of the part -> its height in each bar."""
    bottom = [0.0] * len(names)
    for part, heights in parts.items():
        ax.bar(names, heights, 0.8, bottom, color=colours.get(part, "#999999"), label=part)
        bottom = [low + height for low, height in zip(bottom, heights)]
    ax.grid(axis="x", visible=False)
    ax.tick_params(axis="x", rotation=90 if len(names) > 4 else 0)
    legend(ax)


def legend(ax) -> None:
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2)


def run_figure(run: Path) -> Figure | None:
    """Reward and success by iteration; what exploration and pairs were made of; None where the run
    has none of these yet."""
    phases = phases_of(run)
    evaluated, explored, pairs = (evaluations(run, phases), explorations(phases),
                                  of(phases, "make_pairs"))
    panels = 2 * bool(evaluated) + bool(explored) + bool(pairs)
    if not panels:
        return None
    made, axes = figure(panels, headline(config_of(run)["settings"]))
    if evaluated:
        draw_evaluations(*axes[:2], evaluated, coloured(agents_of(phases)))
    if explored:
        ax = axes[2 * bool(evaluated)]
        stacked(ax, [f"{row['i']} {row['name']}" for row in explored], {
            "success": [row["success"] for row in explored],
            "hard negative": [row["hard"] for row in explored],
            "negative": [1 - row["success"] - row["hard"] for row in explored]}, SHARES)
        ax.set(title="Exploration on the training tasks", ylabel="share of trajectories")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    if pairs:
        kinds = kinds_of(phases)
        stacked(axes[-1], [f"{row['i']} {row['trains']}" for row in pairs],
                {**{kind: [row["pairs"].get(kind, 0) for row in pairs] for kind in kinds},
                 "made no pair": [sum(row["dropped"].values()) for row in pairs]}, coloured(kinds))
        axes[-1].set(title="Pairs, by iteration and agent", ylabel="comparisons")
    return made


def draw_evaluations(reward, success, rows: list[dict], colours: dict) -> None:
    splits, curves = list(dict.fromkeys(e["split"] for e in rows)), defaultdict(list)
    for e in rows:
        curves[e["name"], e["split"]].append(e)
    for (agent, split), found in curves.items():
        style = dict(color=colours[agent], label=f"{agent} agent, {split}",
                     linestyle=LINES[splits.index(split) % 3])
        curve(reward, [(e["i"], e["reward"], e["low"], e["high"]) for e in found], **style)
        curve(success, [(e["i"], e["success"], None, None) for e in found], **style)
    label(reward, "Reward, 95% interval over tasks", "iteration (0: the start)", "mean reward")
    label(success, "Success rate", "iteration (0: the start)", "tasks with reward 1")
    legend(reward)
    legend(success)
    success.yaxis.set_major_formatter(PercentFormatter(1))
    success.set_ylim(bottom=0)


def steps_of(run: Path) -> dict[str, list[dict]]:
    """Agent -> its optimiser steps, as in train.jsonl; of the phase that is running those of the
    log, in which a step that was made again stands again."""
    phases, log = phases_of(run), run / "metrics.jsonl"
    found = {name: read_jsonl(run / name / "train.jsonl") for name in phases
             if (run / name / "train.jsonl").is_file()}
    for event in read_jsonl(log, growing=True) if log.is_file() else ():
        if event["event"] == "train" and event["phase"] not in phases:
            found.setdefault(event["phase"], {})[event["step"]] = event
    return {name: [*(rows.values() if isinstance(rows, dict) else rows)]
            for name, rows in found.items() if rows}


def training_figures(run: Path) -> list[tuple[str, Figure]]:
    """For each training phase its curves over steps."""
    found, colours = [], coloured(kinds_of(phases_of(run)))
    for phase, steps in steps_of(run).items():
        names = [name for name in STEP_NUMBERS if any(name in e for e in steps)]
        panels = {STEP_NUMBERS[name]: {"": ("#555555", [(e["step"], e[name]) for e in steps
                                                        if name in e])} for name in names}
        for title, key in (("Margin, nats", "margin"), ("Chosen above rejected", "accuracy")):
            panels[title] = {kind: (colour, [
                (e["step"], e["kinds"][kind][key]) for e in steps
                if key in e.get("kinds", {}).get(kind, {})])
                             for kind, colour in colours.items()}
        found.append((phase, over_steps(panels)))
    return found


def over_steps(panels: dict) -> Figure:
    """panels: title -> name -> (colour, points), without those that have no points."""
    panels = {title: named for title, named in panels.items() if any(p for _, p in named.values())}
    made, axes = figure(len(panels), width=3.6, height=2.6)
    for ax, (title, named) in zip(axes, panels.items()):
        for name, (colour, points) in ((name, x) for name, x in named.items() if x[1]):
            curve(ax, [(*point, None, None) for point in points], color=colour, label=name)
        label(ax, title, "step")
    if len(named) > 1:
        axes[-1].legend()
    return made
