"""What a person sees of a run: the closing table, the curves, and trajectories side by side.

Everything is read back from the run's files, so it works on any finished or interrupted run.
"""

import json
import re
import shutil
import textwrap
from itertools import zip_longest
from pathlib import Path

import numpy as np

AGENTS = ("expert", "target", "failure", "positive")  # the order of columns
KINDS = ("expert>target", "expert>failure", "expert>positive", "failure>failure")
ENDINGS = {"done": "done", "budget": "out of steps", "context": "out of context"}


NUMBER = (int, float)
EVENTS = {  # what the tables read of an event, and its type
    "evaluation": dict(iteration=int, agent=str, split=str, tasks=int, reward=NUMBER,
                       reward_low=NUMBER, reward_high=NUMBER, success=NUMBER, steps=NUMBER),
    "exploration": dict(iteration=int, agent=str, trajectories=int, reward=NUMBER, success=NUMBER,
                        negative=NUMBER, hard_negative=NUMBER),
    "pairs": dict(iteration=int, trains=str, kept=dict, dropped=dict),
    "dropped": dict(phase=str, reason=str, count=int),
    "phase": dict(phase=str, seconds=NUMBER),
}


class RunError(ValueError):
    """A folder or file that is not what a run writes; the text is one line for the user."""


# ---------------------------------------------------------------- numbers


def bootstrap_interval(values, seed: int = 0, samples: int = 1000) -> tuple[float, float]:
    """(low, high): 95% percentile bootstrap interval of the mean of `values`, one per task.

    The same values in the same order give the same interval. RunError if there are none.
    """
    values = np.asarray(values, dtype=float)  # (N,)
    if values.size == 0:
        raise RunError("bootstrap_interval: no values; evaluate at least one task")
    drawn = np.random.default_rng(seed).integers(values.size, size=(samples, values.size))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


# ---------------------------------------------------------------- reading


def read_jsonl(path) -> list[dict]:
    """The objects of a JSON-lines file; RunError naming file and line where one is not whole."""
    path = Path(path)
    if not path.is_file():
        raise RunError(f"{path}: no such file; is {path.parent} a run, and has it come that far?")
    objects = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line.decode())
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                start = textwrap.shorten(line[:200].decode(errors="replace"), 40)
                raise RunError(f"{path}, line {number}: not a whole JSON object: {start!r}; delete "
                               "the line or the file")
            objects.append(value)
    return objects


def read_object(path: Path, **needed: type) -> dict:
    """The JSON object in a file; RunError unless it is whole and its `needed` fields are there."""
    try:
        value = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError):
        value = None
    return need(path, value, **needed)


def need(where, value, **fields: type) -> dict:
    """`value`, a dict whose fields are of these types; else RunError, which names `where`."""
    wrong = ["it"] if not isinstance(value, dict) else [
        name for name, kind in fields.items() if not isinstance(value.get(name), kind)]
    if wrong:
        raise RunError(f"{where}: damaged ({', '.join(wrong)} is not what a run writes); restore "
                       "it, or give another --out")
    return value


def result(run_dir) -> dict:
    """`settings`, `evaluations`, `exploration`, `pairs` and `dropped` of a run, in order.

    No times and no --out in it: equal runs give equal bytes. RunError if it is not a run.
    """
    config = Path(run_dir) / "config.json"
    if not config.is_file():
        raise RunError(f"{run_dir}: not a run, it has no config.json; name a folder like "
                         "runs/webshop-coevolve-s0")
    settings = need(config, read_object(config, settings=dict)["settings"], env=str, method=str,
                    model=str, seed=int, hard_threshold=NUMBER)
    events = _events(run_dir)
    return {"settings": {name: value for name, value in settings.items() if name != "out"},
            "evaluations": events("evaluation"), "exploration": events("exploration"),
            "pairs": events("pairs"), "dropped": events("dropped")}


def _events(run_dir):
    """A function from an event's name to its objects in metrics.jsonl, the name left out."""
    path = Path(run_dir) / "metrics.jsonl"
    objects = read_jsonl(path)

    def events(name):
        return [need(f"{path}, event {name}", {key: value for key, value in each.items()
                                               if key != "event"}, **EVENTS[name])
                for each in objects if each.get("event") == name]

    return events


# ---------------------------------------------------------------- the closing table


def table(run_dir) -> str:
    """Evaluations, exploration (the paper's Table 2), pairs, time and tokens, as plain text.

    At most 100 columns, unless a name is very long. A part that the run has no events of is left
    out. RunError if `run_dir` is not a run.
    """
    found = result(run_dir)
    settings = found["settings"]
    parts = [f"{run_dir}: {settings['method']} on {settings['env']}, model {settings['model']}, "
             f"seed {settings['seed']}"]

    rows = [(e["iteration"], e["agent"], e["split"],
             _tasks(e), f"{e['reward']:.3f}",
             f"[{e['reward_low']:.3f}, {e['reward_high']:.3f}]", _percent(e["success"]),
             f"{e['steps']:.1f}") for e in found["evaluations"]]
    parts += _section("Evaluation, greedy; reward with its 95% bootstrap interval over tasks",
                      "iteration <agent <split tasks reward interval success steps", rows)

    rows = [(e["split"], f"{e['requests']:,}", f"{e['retries']:,}", f"{e['unreported']:,}",
             f"{e['prompt_tokens']:,}", f"{e['completion_tokens']:,}",
             f"{e['dollars']:.2f}" if "dollars" in e else "-")
            for e in found["evaluations"] if "requests" in e]
    parts += _section("What the endpoint took", "<split requests retries "
                      "without_usage tokens_read tokens_written dollars", rows)

    threshold = settings["hard_threshold"]
    rows = [(e["iteration"], e["agent"], e["trajectories"], _percent(e["success"]),
             _percent(e["negative"]), _percent(e["hard_negative"]), f"{e['reward']:.3f}")
            for e in _with_sum(found["exploration"])]
    parts += _section(
        f"Exploration; a negative has a reward below {threshold}, a hard one from {threshold} to 1",
        "iteration <agent trajectories success negative hard_negative reward", rows)

    kinds = [kind for kind in KINDS if any(kind in e["kept"] for e in found["pairs"])]
    rows = [(e["iteration"], e["trains"], *(e["kept"].get(kind, 0) for kind in kinds),
             sum(e["dropped"].values()), _counts(e["dropped"]))
            for e in found["pairs"]]
    parts += _section("Pairs kept, by kind, and dropped, by reason",
                      f"iteration <trains {' '.join(kinds)} dropped <reasons", rows)

    rows = [(e["phase"], e["reason"], e["count"]) for e in found["dropped"]]
    parts += _section("Trajectories dropped", "<phase <reason count", rows)

    phases = [{"tokens": 0, "episodes": 0, "resident_mb": 0, **p}
              for p in _events(run_dir)("phase")]
    total = {"phase": "total", "resident_mb": max((p["resident_mb"] for p in phases), default=0),
             **{key: sum(p[key] for p in phases) for key in ("seconds", "tokens", "episodes")}}
    rows = [(p["phase"], _clock(p["seconds"]), f"{p['tokens']:,}",
             f"{p['tokens'] / p['seconds']:,.0f}" if p["tokens"] and p["seconds"] else "-",
             f"{p['episodes']:,}" if p["episodes"] else "-", f"{p['resident_mb']:,.0f}")
            for p in (phases + [total] if phases else [])]
    parts += _section("Wall time and tokens", "<phase h:mm:ss tokens tokens/s episodes memory_MB",
                      rows)
    return "\n\n".join(parts) + "\n"


# Between the seeds of a method: what changes nothing, or rounding only.
MAY_DIFFER = {"seed", "threads", "slots", "tokens_per_forward", "shard", "gradient_checkpointing",
              "checkpoint_minutes", "track"}


def compare(run_dirs) -> str:
    """Mean and standard deviation over runs of reward and success, by method, split, iteration.

    One row per method, agent, split and iteration; `runs` counts the runs (seeds) in it. RunError
    if a folder is not a run, if two runs share method and seed, which would count one twice, or if
    they differ in a setting of both their methods, of which a mean would say nothing.
    """
    if not run_dirs:
        raise RunError("compare: name the folders of two runs or more")
    values, seen, first = {}, {}, {}
    for run_dir in run_dirs:
        found = result(run_dir)
        key = tuple(found["settings"][name] for name in ("env", "method", "seed"))
        if key in seen:
            raise RunError(f"{run_dir} and {seen[key]} are both {key}; compare one of them")
        seen[key] = run_dir
        for like in ("", key[1]):  # any run; the first of its method
            names = ("env", "model", "quick") if not like else found["settings"].keys() - MAY_DIFFER
            other, settings = first.setdefault(like, (run_dir, found["settings"]))
            for name in sorted(names):
                if settings.get(name) != found["settings"].get(name):
                    raise RunError(
                        f"{run_dir} and {other} differ in {name} ({found['settings'].get(name)}, "
                        f"{settings.get(name)}); compare runs that differ in method and seed")
        for e in found["evaluations"]:
            row = (e["agent"], e["split"], key[1], e["iteration"])
            values.setdefault(row, []).append((e["reward"], e["success"]))
    rows = []
    for (agent, split, method, iteration), pairs in sorted(values.items()):
        cells = []
        for column in np.array(pairs).T:  # (2, runs): rewards, success rates
            spread = column.std(ddof=1) if len(column) > 1 else 0.0
            cells.append(f"{column.mean():.3f} ± {spread:.3f}")
        rows.append((agent, split, method, iteration, len(pairs), *cells))
    return "\n".join(_section("Mean ± standard deviation over runs",
                              "<agent <split <method iteration runs reward success", rows))


def _with_sum(exploration):
    """Each iteration's events, followed by all together where there are several."""
    for iteration in sorted({e["iteration"] for e in exploration}):
        events = [e for e in exploration if e["iteration"] == iteration]
        yield from events
        if len(events) < 2:
            continue
        n = sum(e["trajectories"] for e in events)
        yield {"iteration": iteration, "agent": "all", "trajectories": n,
               **{key: sum(e[key] * e["trajectories"] for e in events) / max(n, 1)
                  for key in ("success", "negative", "hard_negative", "reward")}}


def _section(title: str, header: str, rows: list[tuple], width: int = 100) -> list[str]:
    """[title and aligned rows], or [] without rows; `<` marks a left-aligned column of `header`.

    A last column of text is wrapped within `width`.
    """
    if not rows:
        return []
    names = header.split()
    left = [name.startswith("<") for name in names]
    cells = [[name.lstrip("<").replace("_", " ") for name in names],
             *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines = [title]
    for row in cells:
        text = "  ".join(cell.ljust(w) if l else cell.rjust(w)
                         for cell, w, l in zip(row[:-1], widths, left))
        if left[-1]:
            wrapped = textwrap.wrap(row[-1], max(width - before, 12)) or [""]
            lines += [f"{text}  {wrapped[0]}".rstrip(), *(" " * before + w for w in wrapped[1:])]
        else:
            lines.append(f"{text}  {row[-1].rjust(widths[-1])}")
    return ["\n".join(lines)]


def _tasks(e: dict) -> str:
    """How many, and of these, or beside them (lost), how many did not go well."""
    notes = [f"{e[key]} {key.replace('_', ' ')}"
             for key in ("lost", "out_of_context", "with_cut_replies") if key in e]
    return f"{e['tasks']} ({', '.join(notes)})" if notes else str(e["tasks"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _counts(counts: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in counts.items() if n)


# ---------------------------------------------------------------- the figure

# Okabe and Ito's colours, told apart by colour-blind readers too.
AGENT_COLOURS = {"target": "#0072B2", "failure": "#D55E00", "positive": "#CC79A7"}
SHARES = {"success": ("success", "#009E73"), "hard_negative": ("hard negative", "#F0E442"),
          "negative": ("negative", "#999999")}
LINES = (("-", "o"), ("--", "s"), (":", "^"))  # one per split


def figure(run_dir, path) -> None:
    """Writes a PNG: reward and success per iteration, and what exploration was made of.

    Bands are the 95% intervals over tasks. RunError if the run has no evaluation yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    found = result(run_dir)
    evaluations, exploration = found["evaluations"], found["exploration"]
    if not evaluations:
        raise RunError(f"{run_dir}: no evaluation in metrics.jsonl yet; let the run go on")
    panels = 3 if exploration else 2
    fig, axes = plt.subplots(1, panels, figsize=(4.4 * panels, 4), layout="constrained")
    reward, success = axes[:2]

    splits = list(dict.fromkeys(e["split"] for e in evaluations))
    agents = list(dict.fromkeys(e["agent"] for e in evaluations))
    for agent in agents:
        for split, (line, marker) in zip(splits, LINES):
            curve = [e for e in evaluations if (e["agent"], e["split"]) == (agent, split)]
            x = [e["iteration"] for e in curve]
            style = dict(color=AGENT_COLOURS[agent], linestyle=line, marker=marker, markersize=5,
                         label=f"{agent} agent, {split}")
            reward.plot(x, [e["reward"] for e in curve], **style)
            low, high = ([e[f"reward_{end}"] for e in curve] for end in ("low", "high"))
            if len(curve) == 1:  # a band of one point has no width
                reward.vlines(x, low, high, color=AGENT_COLOURS[agent], alpha=0.4)
            else:
                reward.fill_between(x, low, high, color=AGENT_COLOURS[agent], alpha=0.12, lw=0)
            success.plot(x, [e["success"] for e in curve], **style)
    reward.set(title="Reward, 95% interval over tasks", ylabel="mean reward")
    success.set(title="Success rate", ylabel="share of tasks with reward 1")
    success.yaxis.set_major_formatter(PercentFormatter(1))
    for ax in (reward, success):
        ax.set_xlabel("iteration (0: after SFT)")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)

    if exploration:
        _bars(axes[2], exploration)
    handles, labels = reward.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    settings = found["settings"]
    fig.suptitle(f"{settings['method']} on {settings['env']}, model {settings['model']}, "
                 f"seed {settings['seed']}")
    fig.savefig(path, format="png", dpi=150, metadata={"Software": None})
    plt.close(fig)


def _bars(ax, exploration):
    """Stacked bars of Table 2's shares, one per iteration and agent."""
    from matplotlib.ticker import PercentFormatter

    bottom = np.zeros(len(exploration))
    iterations = [e["iteration"] for e in exploration]
    agents = list(dict.fromkeys(e["agent"] for e in exploration))
    width = 0.8 / len(agents)
    x = np.array([e["iteration"] + width * (agents.index(e["agent"]) - (len(agents) - 1) / 2)
                  for e in exploration])
    for key, (label, colour) in SHARES.items():
        heights = np.array([e[key] for e in exploration])
        ax.bar(x, heights, 0.9 * width, bottom=bottom, color=colour, label=label)
        for at, height, base in zip(x, heights, bottom):
            if height > 0.06 and len(x) <= 10:  # a lower bar has no room for a number
                ax.text(at, base + height / 2, f"{100 * height:.0f}", ha="center", va="center",
                        fontsize=8)
        bottom += heights
    for at, event in zip(x, exploration):
        ax.text(at, 1.01, event["agent"], ha="center", va="bottom", fontsize=7,
                rotation=90 if len(x) > 6 else 0)
    ax.set(title="Exploration on the training tasks\n", xlabel="iteration",
           ylabel="share of trajectories", xticks=sorted(set(iterations)), ylim=(0, 1))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False,
              handlelength=1, columnspacing=1)


# ---------------------------------------------------------------- trajectories side by side


def show(run_dir, tasks=None, count: int = 3) -> str:
    """Trajectories of `tasks` side by side, as the paper's Appendix C: expert, target, failure.

    From the last iteration's exploration, and its evaluations where a test task is named. Without
    `tasks`: `count` of those on which the failure agent came closest to success while the target
    did worse, then otherwise. Columns fill the terminal. RunError if a task or the run is
    unknown.
    """
    result(run_dir)  # refuses a folder that is not a run
    by_task = _trajectories(Path(run_dir))
    if tasks is None:
        tasks = sorted(by_task, key=lambda task: _interest(by_task[task]))[:count]
    unknown = [task for task in tasks if task not in by_task]
    if unknown:
        raise RunError(f"{', '.join(unknown)}: no trajectory in {run_dir}; it has "
                         f"{len(by_task)} tasks, such as {', '.join(list(by_task)[:3])}")
    width = shutil.get_terminal_size((100, 24)).columns
    told = set()
    return "\n".join(_side_by_side(task, by_task[task], width, told) for task in tasks)


def _trajectories(run_dir: Path) -> dict:
    """{task: {agent: trajectory}} of the experts and of the last iteration."""
    paths = [path for path in [run_dir / "experts.jsonl"] if path.exists()]  # chat has none
    for agent in AGENTS[1:]:
        explored = list(run_dir.glob(f"iter[0-9]*/{agent}.jsonl"))
        paths += sorted(explored, key=lambda path: _number(path.parent.name))[-1:]
        evaluated = list(run_dir.glob(f"eval-[0-9]*-{agent}-*.jsonl"))
        last = max((_number(path.name) for path in evaluated), default=0)
        paths += sorted(path for path in evaluated if _number(path.name) == last)
    by_task = {}
    for path in paths:
        for each in read_jsonl(path):
            need(path, each, task=str, agent=str, iteration=int, reward=NUMBER, steps=int,
                 ended=str, messages=list)
            agents = by_task.setdefault(each["task"], {})
            # Of several rollouts: the failure agent's best failure, else the first.
            rank = (each["reward"] < 1, each["reward"]) if each["agent"] == "failure" else ()
            if each["agent"] not in agents or rank > agents[each["agent"]][0]:
                agents[each["agent"]] = (rank, each)
    return {task: {agent: agents[agent][1] for agent in AGENTS if agent in agents}
            for task, agents in by_task.items()}


def _number(name: str) -> int:
    return int(re.search(r"\d+", name).group())


def _interest(agents: dict) -> tuple:
    """Sort key, most telling first: all columns, a failure above the target's, its reward."""
    target = agents.get("target")
    shown = agents.get("failure") or target
    if shown is None or shown["reward"] >= 1:
        return (-len(agents), 2, 0.0)
    lower = shown is target or target is None or target["reward"] < shown["reward"]
    return (-len(agents), not lower, -shown["reward"])


def _side_by_side(task: str, agents: dict, width: int, told: set) -> str:
    """One task: what every agent reads first, then a column per agent, turns aligned.

    Lines of the opening that are in `told`, such as an environment's rules, are not repeated.
    """
    column = max((width - 3 * (len(agents) - 1)) // len(agents), 20)
    opening = []
    for message in next(iter(agents.values()))["messages"]:
        if message["role"] == "assistant":
            break
        opening += [line for line in message["content"].splitlines() if line not in told]
    told.update(opening)
    # The instruction stands on top; environments repeat it on every page.
    known = [piece for line in opening for piece in re.split(r" \[SEP\] | \| ", line)
             if len(piece) > 40]
    heads, turns = [], []
    for agent, each in agents.items():
        where = "" if agent == "expert" else f", iteration {each['iteration']}"
        steps = f"{each['steps']} step" + "s" * (each["steps"] != 1)
        heads.append([*_wrap(f"{agent.upper()}{where}", column),
                      *_wrap(f"reward {each['reward']:.3f}, {steps}, "
                             f"{ENDINGS.get(each['ended'], each['ended'])}", column),
                      "-" * column])
        turns.append(_turns(each["messages"], column, known))
    lines = ["=" * width, task, *(part for line in opening for part in _wrap(line, width)), ""]
    for cells in [heads, *zip_longest(*turns, fillvalue=())]:
        lines += [" | ".join(text.ljust(column) for text in row).rstrip()
                  for row in zip_longest(*cells, fillvalue="")]
    return "\n".join(lines) + "\n"


def _turns(messages, width: int, known: list[str], longest: int = 300) -> list[list[str]]:
    """Per reply its lines and those of the observation that followed, cut at `longest` letters.

    A piece of text in `known` is shown as "..." in observations.
    """
    turns = []
    for message in messages:
        text = message["content"]
        if message["role"] == "assistant":
            turns.append([f"[{len(turns) + 1}]", *_wrap(text, width)])
        elif turns:
            for piece in known:
                text = text.replace(piece, "...")
            if len(text) > longest:
                text = f"{text[:longest]} ... ({len(text) - longest} more letters)"
            turns[-1] += [*_wrap(text, width, indent="    "), ""]
    return turns


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return [line for paragraph in text.splitlines()
            for line in textwrap.wrap(paragraph, width, initial_indent=indent,
                                      subsequent_indent=indent)]
