"""Curves and bars as coordinates; `parts.html.j2` draws them as SVG, coloured by `page.css`."""

import math
import re

from harness.report import AGENTS, KINDS

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 10, 34  # margins of the plot
MOST_POINTS = 40  # of a curve; more are averaged


def kind_colour(kind: str, n: int) -> str:
    """A class for a kind of pair; n: its place among those that have no place of their own."""
    return f"kind{(KINDS.index(kind) if kind in KINDS else n) % 4}"


def evaluation_curves(evaluations: list[dict]) -> list[dict]:
    """Charts of reward, with its interval, and of success; none of a single iteration."""
    if len({e["iteration"] for e in evaluations}) < 2:
        return []
    splits = list(dict.fromkeys(e["split"] for e in evaluations))
    curves = {}
    for e in evaluations:
        curves.setdefault((e["agent"], e["split"]), []).append(e)
    made = []
    for title, key, percent in (("Reward", "reward", False), ("Success", "success", True)):
        series = [dict(name=f"{agent}, {split}", colour=agent if agent in AGENTS else "other",
                       dash=splits.index(split) % 3, points=[
                           (e["iteration"], e[key], e.get(f"{key}_low"), e.get(f"{key}_high"))
                           for e in found])
                  for (agent, split), found in curves.items()]
        made.append(lines(title, series, "iteration (0: the start)", percent))
    return [chart for chart in made if chart]


def grpo_curves(steps: list[dict]) -> list[dict]:
    """Charts over the steps of GRPO: what was played, how far it is from where it began."""
    return [chart for chart in (
        lines(title, [dict(name=title, colour="target", dash=0, points=[
            (e["step"], e[key], None, None) for e in steps if key in e])], "step", key == "success")
        for title, key in (("Reward of its episodes", "reward"), ("Success", "success"),
                           ("KL", "kl"), ("Tasks in D", "D"))) if chart]


def training_curves(events: list[dict], grpo: list[dict]) -> list[dict]:
    """For each training phase its name and charts of loss and, with pairs, margin and accuracy."""
    found, phases = [dict(phase="GRPO", charts=grpo_curves(grpo))] if grpo else [], {}
    for e in events:
        phases.setdefault(e["phase"], []).append(e)
    for phase, steps in phases.items():
        charts = [lines("Loss", [dict(name="loss", colour="other", dash=0, points=[
            (e["step"], e["loss"], None, None) for e in steps])], "step")]
        kinds = list(dict.fromkeys(kind for e in steps for kind in e["kinds"]))
        for title, key, percent in (("Margin, nats", "margin", False),
                                    ("Chosen above rejected", "accuracy", True)):
            charts.append(lines(title, [
                dict(name=kind, colour=kind_colour(kind, n), dash=0, points=[
                    (e["step"], e["kinds"][kind][key], None, None) for e in steps
                    if kind in e["kinds"]]) for n, kind in enumerate(kinds)], "step", percent))
        found.append(dict(phase=phase, charts=[chart for chart in charts if chart]))
    return found


def lines(title: str, series: list[dict], x_label: str, percent: bool = False) -> dict | None:
    """A chart of curves; None without points.

    series: of name, colour (a class), dash and points (x, y, low, high), the last two perhaps None.
    """
    n = math.ceil(max((len(s["points"]) for s in series), default=0) / MOST_POINTS)
    series = [dict(s, points=thin([p for p in s["points"] if math.isfinite(p[1])], n))
              for s in series]
    series = [s for s in series if s["points"]]
    if not series:
        return None
    xs = [p[0] for s in series for p in s["points"]]
    ys = [y for s in series for p in s["points"] for y in p[1:] if y is not None]
    x_ticks, y_ticks = ticks(min(xs), max(xs), whole=True), ticks(min(ys), max(ys))
    x = scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = scale(min(min(ys), y_ticks[0]), max(max(ys), y_ticks[-1]), HEIGHT - BOTTOM, TOP)
    drawn = []
    for s in series:
        points = [(x(p[0]), y(p[1])) for p in s["points"]]
        band = [(x(a), y(low), y(high)) for a, _, low, high in s["points"] if low is not None]
        drawn.append(dict(
            s, line=path(points), dots=[
                dict(x=at[0], y=at[1], says=f"{s['name']}, {x_label.split(' ')[0]} {p[0]:g}: "
                     + (f"{p[1]:.1%}" if percent else f"{p[1]:.4g}"))
                for at, p in zip(points, s["points"])] if len(points) <= 12 else [],
            band=path([(a, low) for a, low, _ in band]
                      + [(a, high) for a, _, high in reversed(band)]) if len(band) > 1 else ""))
    if n > 1:
        title += f", means of {n} {x_label}s"
    return dict(title=title, x_label=x_label, series=drawn, width=WIDTH, height=HEIGHT,
                left=LEFT, right=WIDTH - RIGHT, bottom=HEIGHT - BOTTOM,
                x_ticks=[dict(at=x(t), says=f"{t:,g}") for t in x_ticks],
                y_ticks=[dict(at=y(t), says=f"{100 * t:g}%" if percent else f"{t:g}")
                         for t in y_ticks])


def scale(low: float, high: float, first: float, last: float):
    """Where between two coordinates a value lies."""
    span = high - low or 1.0
    return lambda value: round(first + (value - low) / span * (last - first), 1)


def path(points: list[tuple]) -> str:
    return "M" + "L".join(f"{x},{y}" for x, y in points)


def thin(points: list[tuple], n: int) -> list[tuple]:
    """Means of n neighbours, where the last one is."""
    if n < 2:
        return points
    groups = [points[k:k + n] for k in range(0, len(points), n)]
    return [(g[-1][0], sum(p[1] for p in g) / len(g), None, None) for g in groups]


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers over a range, at most seven; whole: integers."""
    step = max((high - low) / 6, 1 if whole else 1e-9)
    power = 10.0 ** math.floor(math.log10(step))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * 0.999
                and not (whole and m * power % 1))
    first, last = (math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9))
    return [round(k * step, 10) for k in range(first, last + 1)] or [low]


def intervals(title: str, rows: list[tuple]) -> dict:
    """Differences with their intervals over a line at 0: (label, mean, half or None, sure)."""
    ends = [end for _, mean, half, _ in rows for end in (mean - (half or 0), mean + (half or 0))]
    low, high = min(0.0, *ends), max(0.0, *ends)
    x = scale(low, high, 1, 99)
    return dict(title=title, zero=x(0.0), low=f"{low:+.3f}" if low else "0",
                high=f"{high:+.3f}" if high else "0",
                rows=[dict(label=label, x=x(mean), low=x(mean - (half or 0)),
                           high=x(mean + (half or 0)), sure=sure,
                           says=f"{label}: {mean:+.3f}" + (f" \u00b1 {half:.3f}" if half else ""))
                      for label, mean, half, sure in rows])


# ---------------------------------------------------------------------------------- bars


def bars(rows: list[dict]) -> list[dict]:
    """Stacked bars of one length each: rows of label and parts (name, colour, value)."""
    made = []
    for row in rows:
        total, at, parts = sum(value for _, _, value in row["parts"]), 0.0, []
        for name, colour, value in row["parts"]:
            if value <= 0:
                continue
            parts.append(dict(x=round(at, 2), width=round(100 * value / total, 2), colour=colour,
                              says=f"{name}: {value:,g} of {total:,g}"))
            at += 100 * value / total
        if parts:
            made.append(dict(label=row["label"], parts=parts))
    return made


def exploration_bars(exploration: list[dict]) -> list[dict]:
    """Table 2 of each agent and iteration: success, hard negative, negative."""
    return bars([dict(label=f"{e['iteration']} {e['agent']}", parts=[
        (name.replace("_", " "), name, round(e[name] * e["trajectories"]))
        for name in ("success", "hard_negative", "negative")]) for e in exploration])


def pair_bars(pairs: list[dict]) -> tuple[list[dict], list[tuple[str, str]]]:
    """Kept pairs by kind and dropped comparisons by reason; and the legend (name, colour)."""
    kinds = sorted({kind for e in pairs for kind in e["kept"]},
                   key=lambda kind: (kind not in KINDS, KINDS.index(kind) if kind in KINDS else 0))
    reasons = list(dict.fromkeys(reason for e in pairs for reason in e["dropped"]))
    colours = {**{kind: kind_colour(kind, n) for n, kind in enumerate(kinds)},
               **{reason: f"none{n % 4}" for n, reason in enumerate(reasons)}}
    rows = bars([dict(label=f"{e['iteration']} {e['trains']}", parts=[
        (name.replace("_", " "), colours[name], value)
        for name, value in [*((kind, e["kept"].get(kind, 0)) for kind in kinds),
                            *e["dropped"].items()]]) for e in pairs])
    return rows, [(name.replace("_", " "), colours[name]) for name in [*kinds, *reasons]]


STAGES = (("experts", r"(.*/)?experts"), ("SFT", r"sft-.*"), ("pairs", r".*/pairs-.*"),
          ("training", r".*-agent"), ("evaluation", r"eval-.*"), ("exploration", r".*"))


def time_bars(phases: list[dict]) -> tuple[list[dict], list[tuple[str, str]]]:
    """Where the seconds went, by kind of phase; and the legend."""
    seconds = dict.fromkeys((name for name, _ in STAGES), 0.0)
    for e in phases:
        name = e["phase"].removesuffix(".jsonl")
        seconds[next(stage for stage, form in STAGES if re.fullmatch(form, name))] += e["seconds"]
    parts = [(name, f"stage{n}", round(value, 1)) for n, (name, value) in
             enumerate(seconds.items()) if value]
    return bars([dict(label="seconds", parts=parts)]), [(name, c) for name, c, _ in parts]
