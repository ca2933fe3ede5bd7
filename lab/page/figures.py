"""The figures of runs and studies, drawn by matplotlib as SVG."""

import base64
import io
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.files import headline, read_jsonl
from lab.page.report import evaluations
from lab.runfiles import agents_of, config_of, kinds_of, phases_of, success_of, visible

# Text stays text in an SVG, and equal runs give equal bytes. Okabe and Ito's colours, told apart by
# colour-blind readers too, the target's and the failure agent's first, as in page.css.
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "", "axes.grid": True, "axes.axisbelow": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": "medium", "legend.frameon": False, "legend.fontsize": "small",
    "axes.prop_cycle": matplotlib.cycler(color=(
        "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00", "#8B5A2B", "#999999"))})
LINES = ("-", "--", ":")
# Of a step of training, what is drawn over steps, and its title; all but the loss are GRPO's.
STEP_NUMBERS = dict(loss="Loss", reward="Reward of its episodes", success="Success", kl="KL",
                    D="Tasks in D")


def figure(panels: int, title: str = "", width: float = 4.0, height: float = 3.8):
    """A figure and its panels, side by side; sizes of one in inches."""
    made = Figure((width * panels, height), layout="constrained")
    if title:
        made.suptitle(visible(title), parse_math=False)  # what a run's files say is no formula
    return made, made.subplots(1, panels, squeeze=False)[0]


def write(made: Figure, file) -> None:
    made.savefig(file, format="svg", metadata={"Date": None})


def address(made: Figure) -> str:
    """A figure as an address that stands in a page."""
    write(made, drawn := io.BytesIO())
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
    phases, curves = phases_of(run), defaultdict(list)
    for e in evaluations(run, phases):
        curves[e["name"], e["split"]].append(e)
    if not curves:
        return None
    agents, splits = agents_of(phases), list(dict.fromkeys(split for _, split in curves))
    made, (reward, success) = figure(2, headline(config_of(run)["settings"]))
    for (agent, split), found in curves.items():
        colour = f"C{agents.index(agent)}"
        for ax, key in (reward, "reward"), (success, "success"):
            curve(ax, [(e["i"], e[key]) for e in found], color=colour,
                  label=f"{agent} agent, {split}", linestyle=LINES[splits.index(split) % 3])
        reward.fill_between(*zip(*((e["i"], e["low"], e["high"]) for e in found)), color=colour,
                            alpha=0.12)
    label(reward, "Reward, 95% interval over tasks", "iteration (0: the start)", "mean reward")
    least = success_of(run)
    solved = f"share of tasks with reward {least:g}" + " or more" * (least < 1)
    label(success, "Success rate", "iteration (0: the start)", solved)
    legend(reward)
    legend(success)
    return made


def training_figures(run: Path) -> list[tuple[str, Figure]]:
    """For each finished training phase its curves over steps."""
    phases, found = phases_of(run), []
    for phase in (name for name in phases if (run / name / "train.jsonl").is_file()):
        steps = read_jsonl(run / phase / "train.jsonl")
        panels = {title: {"": [(e["step"], e[name]) for e in steps if name in e]}
                  for name, title in STEP_NUMBERS.items()}
        for title, key in (("Margin, nats", "margin"), ("Chosen above rejected", "accuracy")):
            panels[title] = {kind: [(e["step"], e["kinds"][kind][key]) for e in steps
                                    if key in e.get("kinds", {}).get(kind, {})]
                             for kind in kinds_of(phases)}
        panels = {title: named for title, named in panels.items() if any(named.values())}
        made, axes = figure(len(panels), width=3.6, height=2.6)
        for ax, (title, named) in zip(axes, panels.items()):
            for name, points in ((name, points) for name, points in named.items() if points):
                curve(ax, points, label=name)
            label(ax, title, "step")
        if any(axes[-1].get_legend_handles_labels()[1]):
            axes[-1].legend()
        found.append((phase, made))
    return found
