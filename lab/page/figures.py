"""The figures of runs and studies, drawn by matplotlib as SVG."""

import base64
import io
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.files import read_jsonl
from lab.page.report import evaluations
from lab.runfiles import agents_of, phases_of, visible

# Text stays text in an SVG, and is no formula; equal runs give equal bytes. Okabe and Ito's
# colours, told apart by colour-blind readers too, the target's and the failure agent's first, as in
# page.css.
COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00", "#8B5A2B", "#999999")
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "", "text.parse_math": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "axes.titlesize": "medium",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": "small", "axes.prop_cycle": matplotlib.cycler(color=COLOURS)})
LINES = ("-", "--", ":")
# Of a step of training, what is drawn over steps, and its title; all but the loss are GRPO's.
OF_STEPS = dict(loss="Loss", reward="Reward of its episodes", success="Success", kl="KL",
                D="Tasks in D")
# The same of a step's pairs, a curve for each kind.
OF_PAIRS = dict(margin="Margin, nats", accuracy="Chosen above rejected")


def figure(panels: int, width: float = 4.0, height: float = 3.6):
    """A figure and its panels, side by side; sizes of one in inches."""
    made = Figure((width * panels, height), layout="constrained")
    return made, made.subplots(1, panels, squeeze=False)[0]


def write(made: Figure, file) -> None:
    made.draw_without_rendering()  # the layout finds room for ticks as the drawing before had them
    made.savefig(file, format="svg", metadata={"Date": None})


def address(made: Figure) -> str:
    """A figure as an address that stands in a page."""
    drawn = io.BytesIO()
    write(made, drawn)
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def curve(ax, points: list[tuple], **style) -> None:
    """A line through points (x, y); with dots, unless they are many."""
    ax.plot(*zip(*points), marker="o" if len(points) <= 40 else "", markersize=3.5, **style)


def label(ax, title: str, x: str = "", y: str = "") -> None:
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend(ax) -> None:
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2)


def run_figure(run: Path) -> Figure | None:
    """Reward and success by iteration; None where nothing was evaluated yet."""
    phases = phases_of(run)
    curves = defaultdict(list)  # (agent, split) -> evaluations, in order
    for e in evaluations(run, phases):
        curves[e["name"], e["split"]].append(e)
    if not curves:
        return None
    agents = agents_of(phases)
    splits = list(dict.fromkeys(split for _, split in curves))
    made, (reward, success) = figure(2)
    for (agent, split), found in curves.items():
        colour = f"C{agents.index(agent)}"
        style = dict(color=colour, label=visible(f"{agent} agent, {split}"),
                     linestyle=LINES[splits.index(split) % len(LINES)])
        curve(reward, [(e["i"], e["reward"]) for e in found], **style)
        curve(success, [(e["i"], e["success"]) for e in found], **style)
        reward.fill_between([e["i"] for e in found], [e["low"] for e in found],
                            [e["high"] for e in found], color=colour, alpha=0.12)
    label(reward, "Reward, 95% interval over tasks", "iteration (0: the start)", "mean reward")
    label(success, "Success rate", "iteration (0: the start)", "share of tasks with reward 1")
    legend(reward)
    legend(success)
    return made


def training_figures(run: Path) -> list[tuple[str, Figure]]:
    """For each finished training phase its curves over steps."""
    found = []
    for phase in phases_of(run):
        log = run / phase / "train.jsonl"
        panels = panels_of(read_jsonl(log)) if log.is_file() else {}
        if not panels:
            continue
        made, axes = figure(len(panels), width=3.6, height=2.6)
        for ax, (title, curves) in zip(axes, panels.items()):
            for name, points in sorted(curves.items()):
                curve(ax, points, label=visible(name))
            label(ax, title, "step")
        if "" not in curves:  # the last panel's have names, of kinds of pairs
            axes[-1].legend()
        found.append((phase, made))
    return found


def panels_of(steps: list[dict]) -> dict[str, dict[str, list]]:
    """title -> name of a curve -> its points (step, y), of what a log of training has."""
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
