"""Draws the figures of runs and studies with matplotlib, as SVG."""

import base64
import io
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lab.page.report import evaluation_records
from lab.runfiles import agents_of, phases_of, rows_in, visible

# The Okabe-Ito palette, which colour-blind readers can distinguish. The first colour is for the
# target agent, the second for the failure agent. page.css uses the same two colours.
COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00", "#8B5A2B", "#999999")
# Ignore the user's own matplotlib settings. For example, text.usetex would require LaTeX.
matplotlib.rcdefaults()
# "svg.fonttype" keeps text as text in the SVG, and "text.parse_math" shows $ signs literally. The
# fixed "svg.hashsalt" makes the SVG files of equal figures identical.
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "", "text.parse_math": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "axes.titlesize": "medium",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": "small", "axes.prop_cycle": matplotlib.cycler(color=COLOURS)})
LINES = ("-", "--", ":")
ITERATION = "iteration (curves are shifted apart)"
POINTS = 40  # maximum number of points of a training curve
# Training metrics that are drawn, with their panel titles. All methods log the loss. Only GRPO logs
# the other metrics.
OF_STEPS = dict(loss="Loss", reward="Reward of its episodes", success="Success", kl="KL",
                D="Tasks in D")
# Metrics of preference training that are drawn, with their panel titles. Each kind of preference
# pair has its own curve.
OF_PAIRS = dict(margin="Margin, nats", accuracy="Chosen above rejected")


def figure(panels: int, width: float = 4.0, height: float = 3.6):
    """Returns a figure with `panels` panels side by side, and the list of its panels. `width` and
    `height` are the size of a panel, in inches."""
    drawing = Figure((width * panels, height), layout="constrained")
    return drawing, drawing.subplots(1, panels, squeeze=False)[0]


def write_svg(drawing: Figure, file) -> None:
    # The constrained layout uses the tick labels of the previous drawing, so the figure has to be
    # drawn once before it is saved.
    drawing.draw_without_rendering()
    drawing.savefig(file, format="svg", metadata={"Date": None})


def address(drawing: Figure) -> str:
    """Returns a figure as a data URL."""
    svg = io.BytesIO()
    write_svg(drawing, svg)
    return "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode()


def curve(ax, x, y, **style) -> None:
    ax.plot(x, y, marker="o", markersize=3.5, **style)


def means(points: list[tuple]) -> np.ndarray:
    """Averages consecutive points to n <= POINTS points, and returns their x and y, (2, n)."""
    groups = np.array_split(np.array(points, dtype=float), min(len(points), POINTS))
    return np.array([group.mean(0) for group in groups]).T


def shifted(points: list[tuple], n: int, count: int) -> list[tuple]:
    """Shifts curve n of `count` curves to the right, so that identical curves do not hide each
    other. Points are (x, y, ...)."""
    return [(x + n * min(0.1, 0.6 / count), *rest) for x, *rest in points]


def label(ax, title: str, x: str = "", y: str = "") -> None:
    """Writes the labels of a panel. Unless a curve goes below 0, the y axis starts at 0 or above,
    so that intervals do not suggest negative rewards or rates."""
    ax.set(title=title, xlabel=x, ylabel=y)
    # The caps of error bars are lines without a line style.
    curves = [line for line in ax.lines if line.get_linestyle() != "None"]
    if curves and min(min(line.get_ydata()) for line in curves) >= 0:
        ax.set_ylim(bottom=max(0, ax.get_ylim()[0]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend(drawing: Figure, ax) -> None:
    """Adds a legend below all panels, with the curves of the panel `ax`."""
    drawing.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def run_figure(run: Path) -> Figure | None:
    """Draws reward and success rate over iterations, with one curve per agent and split. Returns
    None if the run has no evaluation yet."""
    phases = phases_of(run)
    curves = defaultdict(list)  # (agent, split) -> evaluations, in order
    for e in evaluation_records(run, phases):
        curves[e["name"], e["split"]].append(e)
    if not curves:
        return None
    agents = agents_of(phases)
    splits = list(dict.fromkeys(split for _, split in curves))
    drawing, (reward, success) = figure(2)
    for n, ((agent, split), evals) in enumerate(curves.items()):
        colour = f"C{agents.index(agent)}"
        style = dict(color=colour, label=visible(f"{agent} agent, {split}"),
                     linestyle=LINES[splits.index(split) % len(LINES)])
        points = [(e["i"], e["reward"], e["success"], e["low"], e["high"]) for e in evals]
        i, rewards, successes, low, high = zip(*shifted(points, n, len(curves)))
        curve(reward, i, rewards, **style)
        curve(success, i, successes, **style)
        reward.fill_between(i, low, high, color=colour, alpha=0.12)
    label(reward, "Reward, 95% interval over tasks", ITERATION, "mean reward")
    label(success, "Success rate", ITERATION, "share of tasks with reward 1")
    legend(drawing, reward)
    return drawing


def training_figures(run: Path) -> list[tuple[str, Figure]]:
    """Returns (name of the phase's output, figure) of each finished training phase, with its curves
    over steps. In a long phase, a curve consists of means over consecutive steps, because the
    curves of single steps would hide each other."""
    drawings = []
    for phase in phases_of(run):
        panels = panels_of(rows_in(run / phase / "train.jsonl"))
        if not panels:
            continue
        drawing, axes = figure(len(panels), width=3.6, height=2.6)
        for ax, (title, curves) in zip(axes, panels.items()):
            for n, (name, points) in enumerate(sorted(curves.items())):
                # The later of two identical curves is dashed, so both are visible.
                curve(ax, *means(points), label=visible(name), linestyle=LINES[n % len(LINES)])
            label(ax, title, "step")
        if "" not in curves:  # the last panel contains one named curve per kind of pair
            legend(drawing, axes[-1])
        drawings.append((phase, drawing))
    return drawings


def panels_of(steps: list[dict]) -> dict[str, dict[str, list]]:
    """Returns the curves of a training log, {panel title: {curve name: [(step, y)]}}. Curves of
    preference pairs are named after the kind of pair. All others have the name ""."""
    panels = defaultdict(lambda: defaultdict(list))
    for step in steps:
        for name, title in OF_STEPS.items():
            if name in step:
                panels[title][""].append((step["step"], step[name]))
        for kind, numbers in step.get("kinds", {}).items():
            for name, title in OF_PAIRS.items():
                if name in numbers:
                    panels[title][kind].append((step["step"], numbers[name]))
    return panels
