"""The figures of runs and studies: drawn once by matplotlib, saved as SVG, and as PNG beside it."""

import base64
import io
import math
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lab.harness.report import KINDS, headline, visible

# Text stays text in an SVG, and equal runs give equal bytes.
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "", "axes.grid": True, "axes.axisbelow": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": "medium", "legend.frameon": False, "legend.fontsize": "small"})
# Okabe and Ito's colours, told apart by colour-blind readers too; as in page.css.
AGENT_COLOURS = {"target": "#0072B2", "failure": "#D55E00", "positive": "#CC79A7"}
SHARES = {"success": "#009E73", "hard_negative": "#F0E442", "negative": "#999999"}
KIND_COLOURS = dict(zip(KINDS, ("#0072B2", "#D55E00", "#CC79A7", "#7566B8")))
LINES = ("-", "--", ":")
MOST_POINTS = 40  # of a curve; more are averaged


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


def stacked(ax, names: list[str], parts: dict[str, list[float]], colours: dict) -> None:
    """A bar for each name, made of parts: name of the part -> its height in each bar."""
    bottom = [0.0] * len(names)
    for part, heights in parts.items():
        ax.bar(names, heights, 0.8, bottom, color=colours.get(part, "#999999"),
               label=part.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights)]
    ax.grid(axis="x", visible=False)
    ax.tick_params(axis="x", rotation=90 if len(names) > 4 else 0)
    legend(ax)


def legend(ax) -> None:
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2)


def run_figure(settings: dict, of: dict) -> Figure | None:
    """Reward and success by iteration; what exploration and pairs were made of. of: the run's
    `events`; None where it has none of these yet."""
    evaluations, exploration, pairs = of["evaluation"], of["exploration"], of["pairs"]
    panels = 2 * bool(evaluations) + bool(exploration) + bool(pairs)
    if not panels:
        return None
    made, axes = figure(panels, headline(settings))
    if evaluations:
        _evaluations(*axes[:2], evaluations)
    if exploration:
        ax = axes[2 * bool(evaluations)]
        stacked(ax, [f"{e['iteration']} {e['agent']}" for e in exploration],
                {share: [e[share] for e in exploration] for share in SHARES}, SHARES)
        ax.set(title="Exploration on the training tasks", ylabel="share of trajectories")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    if pairs:
        kinds = [kind for kind in KINDS if any(kind in e["kept"] for e in pairs)]
        stacked(axes[-1], [f"{e['iteration']} {e['trains']}" for e in pairs],
                {**{kind: [e["kept"].get(kind, 0) for e in pairs] for kind in kinds},
                 "made no pair": [sum(e["dropped"].values()) for e in pairs]}, KIND_COLOURS)
        axes[-1].set(title="Pairs, by iteration and agent", ylabel="comparisons")
    return made


def _evaluations(reward, success, evaluations: list[dict]) -> None:
    splits, curves = list(dict.fromkeys(e["split"] for e in evaluations)), defaultdict(list)
    for e in evaluations:
        curves[e["agent"], e["split"]].append(e)
    for (agent, split), found in curves.items():
        style = dict(color=AGENT_COLOURS.get(agent, "#555555"), label=f"{agent} agent, {split}",
                     linestyle=LINES[splits.index(split) % 3])
        curve(reward, [(e["iteration"], e["reward"], e["reward_low"], e["reward_high"])
                       for e in found], **style)
        curve(success, [(e["iteration"], e["success"], None, None) for e in found], **style)
    label(reward, "Reward, 95% interval over tasks", "iteration (0: the start)", "mean reward")
    label(success, "Success rate", "iteration (0: the start)", "tasks with reward 1")
    legend(reward)
    legend(success)
    success.yaxis.set_major_formatter(PercentFormatter(1))
    success.set_ylim(bottom=0)


def training_figures(of: dict) -> list[tuple[str, Figure]]:
    """For GRPO and each training phase its curves over steps, of the run's `events`."""
    found, phases = [], defaultdict(list)
    if of["grpo"]:
        found.append(("GRPO", _over_steps({
            title: {"": ("#0072B2", [(e["step"], e[key]) for e in of["grpo"]])}
            for title, key in (("Reward of its episodes", "reward"), ("Success", "success"),
                               ("KL", "kl"), ("Tasks in D", "D"))})))
    for e in of["train"]:
        phases[e["phase"]].append(e)
    for phase, steps in phases.items():
        panels = {"Loss": {"": ("#555555", [(e["step"], e["loss"]) for e in steps])}}
        for title, key in (("Margin, nats", "margin"), ("Chosen above rejected", "accuracy")):
            panels[title] = {kind: (colour, [(e["step"], e["kinds"][kind][key]) for e in steps
                                             if key in e["kinds"].get(kind, {})])
                             for kind, colour in KIND_COLOURS.items()}
        found.append((phase, _over_steps(panels)))
    return found


def _over_steps(panels: dict) -> Figure:
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
