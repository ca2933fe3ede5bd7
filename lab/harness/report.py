"""What a run's log says, and the closing table of any run, finished or not."""

import textwrap
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

from lab.harness.files import RunError, read_jsonl, read_object

AGENTS = ("expert", "target", "failure", "positive")  # the order of columns
KINDS = ("expert>target", "expert>failure", "expert>positive", "failure>failure")


def visible(text: str) -> str:
    """`text` with control characters and others that a terminal may obey escaped, by number."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else f"<{ord(c):02X}>"
                   for c in text.replace("\r\n", "\n"))


def config_of(run_dir) -> dict:
    """config.json of a run; RunError if the folder is not one."""
    config = Path(run_dir) / "config.json"
    if not config.is_file():
        raise RunError(f"{run_dir}: not a run, it has no config.json; name a folder like "
                       "runs/webshop-coevolve-s0")
    return read_object(config)


def events(run_dir, growing: bool = False) -> dict[str, list[dict]]:
    """The events of metrics.jsonl by name, in order. growing: the run may be going on."""
    found = defaultdict(list)
    for event in read_jsonl(Path(run_dir) / "metrics.jsonl", growing):
        found[event.pop("event", None)].append(event)
    return found


def result(run_dir) -> dict:
    """`settings`, `evaluations`, `exploration`, `pairs` and `dropped` of a run, in order; no times,
    --out and --reuse, so that equal runs give equal bytes."""
    settings, of = config_of(run_dir)["settings"], events(run_dir)
    return {"settings": {n: v for n, v in settings.items() if n not in ("out", "reuse")},
            "evaluations": of["evaluation"], "exploration": of["exploration"],
            "pairs": of["pairs"], "dropped": of["dropped"]}


def table(run_dir) -> str:
    """Evaluations, exploration (the paper's Table 2), pairs, time and tokens, as plain text."""
    config = config_of(run_dir)
    s, about = config["settings"], config["tasks"]
    both = (f"\n{about['overlap']} evaluated tasks were also trained on (--overlap keep)"
            if about["overlap"] else "")
    return "\n\n".join([f"{run_dir}: {headline(s)}, split {about['split_by']}{both}",
                        *(section(*part) for part in sections(s, events(run_dir)))]) + "\n"


def headline(s: dict) -> str:
    return f"{s['method']} on {s['env']}, model {s['model']}, seed {s['seed']}"


def sections(settings: dict, of: dict) -> list[tuple[str, str, list]]:
    """(title, header, rows) of each part of the table that has rows, of a run's `events`."""
    threshold, pairs = settings["hard_threshold"], of["pairs"]
    kinds = [kind for kind in KINDS if any(kind in e["kept"] for e in pairs)]
    parts = [
        ("Evaluation, greedy; reward with its 95% bootstrap interval over tasks",
         "iteration <agent <split tasks reward interval success steps",
         [(e["iteration"], e["agent"], e["split"], _tasks(e), f"{e['reward']:.3f}",
           f"[{e['reward_low']:.3f}, {e['reward_high']:.3f}]", _percent(e["success"]),
           f"{e['steps']:.1f}") for e in of["evaluation"]]),
        ("What the endpoint took",
         "<split requests retries without_usage tokens_read tokens_written dollars",
         [(e["split"], f"{e['requests']:,}", f"{e['retries']:,}", f"{e['unreported']:,}",
           f"{e['prompt_tokens']:,}", f"{e['completion_tokens']:,}",
           f"{e['dollars']:.2f}" if "dollars" in e else "-")
          for e in of["evaluation"] if "requests" in e]),
        (f"Exploration; a negative has a reward below {threshold}, a hard one from {threshold} "
         "to 1", "iteration <agent trajectories success negative hard_negative reward",
         [(e["iteration"], e["agent"], e["trajectories"], _percent(e["success"]),
           _percent(e["negative"]), _percent(e["hard_negative"]), f"{e['reward']:.3f}")
          for e in _with_sum(of["exploration"])]),
        ("Pairs kept, by kind, and dropped, by reason",
         f"iteration <trains {' '.join(kinds)} dropped <reasons",
         [(e["iteration"], e["trains"], *(e["kept"].get(kind, 0) for kind in kinds),
           sum(e["dropped"].values()), ", ".join(f"{why} {n}" for why, n in e["dropped"].items()))
          for e in pairs]),
        _signals(of),
        ("Proposals refused", "<reason count",
         sum((Counter(e["refused"]) for e in of["proposals"]), Counter()).most_common()),
        ("Trajectories dropped", "<phase <reason count",
         [(e["phase"], e["reason"], e["count"]) for e in of["dropped"]]),
        _phases(of)]
    return [part for part in parts if part[2]]


def _signals(of):
    by = {name: {e["iteration"]: e for e in of[name]} for name in ("signals", "explored")}
    joined = {int(e["phase"][4:].split("/")[0]): e["tasks"] - e.get("left", 0) for e in of["phase"]
              if e["phase"].endswith("/tasks.jsonl")}
    return ("Signals, and what became of what the explorer found; tasks are those of D then",
            "iteration forgetting boundary rare picked episodes proposals added tasks",
            [(i := e["iteration"], *(by["signals"].get(i, {}).get(name, "-")
                                     for name in ("forgetting", "boundary", "rare", "picked")),
              by["explored"].get(i, {}).get("episodes", "-"), e["proposals"], e["added"],
              sum(n for j, n in joined.items() if j <= i)) for e in of["proposals"]])


def _phases(of):
    phases = [{"tokens": 0, "episodes": 0, "resident_mb": 0, **e} for e in of["phase"]]
    reused = [p for p in phases if "reused" in p]
    sums = [{"phase": name, "resident_mb": max(p["resident_mb"] for p in part),
             **{key: sum(p[key] for p in part) for key in ("seconds", "tokens", "episodes")}}
            for name, part in (("total", phases), ("of these reused (*)", reused)) if part]
    return ("Wall time and tokens", "<phase h:mm:ss tokens tokens/s episodes memory_MB",
            [(p["phase"] + " *" * ("reused" in p), timedelta(seconds=round(p["seconds"])),
              f"{p['tokens']:,}",
              f"{p['tokens'] / p['seconds']:,.0f}" if p["tokens"] and p["seconds"] else "-",
              f"{p['episodes']:,}" if p["episodes"] else "-", f"{p['resident_mb']:,.0f}")
             for p in phases + sums])


def _with_sum(exploration):
    """Each iteration's events, followed by all together where there are several."""
    for iteration in sorted({e["iteration"] for e in exploration}):
        agents = [e for e in exploration if e["iteration"] == iteration]
        yield from agents
        if len(agents) < 2:
            continue
        n = sum(e["trajectories"] for e in agents)
        yield {"iteration": iteration, "agent": "all", "trajectories": n,
               **{key: sum(e[key] * e["trajectories"] for e in agents) / max(n, 1)
                  for key in ("success", "negative", "hard_negative", "reward")}}


def columns(header: str) -> list[tuple[str, bool]]:
    """The names in a header, and whether a column is aligned to the left, which `<` marks."""
    return [(name.lstrip("<").replace("_", " "), name.startswith("<")) for name in header.split()]


def section(title: str, header: str, rows: list[tuple], width: int = 100) -> str:
    """A table as text: title and aligned rows. A last column of text is wrapped within `width`."""
    names, left = zip(*columns(header))
    cells = [names, *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines = [title]
    for row in cells:
        text = "  ".join(cell.ljust(w) if to_left else cell.rjust(w)
                         for cell, w, to_left in zip(row[:-1], widths, left))
        if left[-1]:
            wrapped = textwrap.wrap(row[-1], max(width - before, 12)) or [""]
            lines += [f"{text}  {wrapped[0]}".rstrip(), *(" " * before + w for w in wrapped[1:])]
        else:
            lines.append(f"{text}  {row[-1].rjust(widths[-1])}")
    return "\n".join(lines)


def _tasks(e: dict) -> str:
    """How many, and of these, or beside them (lost), how many did not go well."""
    notes = [f"{e[key]} {key.replace('_', ' ')}"
             for key in ("lost", "out_of_context", "with_cut_replies") if key in e]
    return f"{e['tasks']} ({', '.join(notes)})" if notes else str(e["tasks"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
