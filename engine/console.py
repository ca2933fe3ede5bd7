"""Words: what is said of a finished phase, and of a run when it ends. `Run` and `main` say it."""

from collections import defaultdict

# What shares of episodes are called for a person.
SHARES = {"success": "success", "hard_negative": "hard negatives", "other_failure": "other failures",
          "idle": "idle replies", "turn_limit": "at the turn limit"}
# What is recorded of a phase beside what it found.
RECORDS = {"i", "seconds", "edited"}


def sentence(output: str, row: dict) -> str:
    """What is said of a phase, such as
    "iter1/target.jsonl  400 episodes, reward 0.512, 35% solved, 40% hard failures, ...  1:12"."""
    parts = []
    for name, value in row.items():
        shown = name not in RECORDS and not name.startswith("first_")
        if shown and isinstance(value, (int, float, dict)):
            parts.append(phrase(name, value, row))
    minutes, seconds = divmod(round(row["seconds"]), 60)
    edited = "  edited since" if "edited" in row else ""
    return f"{output:28}  {', '.join(parts)}  {minutes}:{seconds:02}{edited}"


def phrase(name: str, value, row: dict) -> str:
    """A number in words, or some numbers by name with their sum; row: what stands beside it."""
    if isinstance(value, dict):
        each = ", ".join(f"{count:,} {kind}" for kind, count in value.items())
        total = counted(sum(value.values()), name)
        return f"{total} ({each})" if each else total
    if name in SHARES:
        return f"{value:.0%} {SHARES[name]}"
    if name == "turns":
        return f"{value:.1f} turns each"
    if f"first_{name}" in row:
        return f"{name} {row[f'first_{name}']:.3f} -> {value:.3f}"
    if isinstance(value, float):
        return f"{name} {value:.3f}"
    return counted(value, name)


def counted(n: int, name: str) -> str:
    """Returns a number with its noun, such as "2 replies" and "1 reply"."""
    if n == 1:
        name = f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
    return f"{n:,} {name.replace('_', ' ')}"


def headline(s: dict) -> str:
    """Which run one of these settings is."""
    return f"{s['method']} on {s['env']}, model {s['model']}, seed {s['seed']}"


def closing(done: dict[str, dict]) -> list[str]:
    """What became of each agent that was evaluated, a line each, such as
    "target, test: reward 0.762 -> 0.791, solved 32% -> 45%; unseen: reward ..."."""
    evaluations = defaultdict(list)  # (agent, split) -> rows, in order
    for row in done.values():
        if "split" in row and row.get("episodes"):
            evaluations[row["name"], row["split"]].append(row)
    said = defaultdict(list)  # agent -> what is said of each split
    for (agent, split), rows in evaluations.items():
        rewards = " -> ".join(f"{row['reward']:.3f}" for row in ends_of(rows))
        solved = " -> ".join(f"{row['success']:.0%}" for row in ends_of(rows))
        edited = ", edited since" if any("edited" in row for row in rows) else ""
        said[agent].append(f"{split}: reward {rewards}, solved {solved}{edited}")
    return [f"{agent}, {'; '.join(splits)}" for agent, splits in said.items()]


def ends_of(rows: list) -> list:
    """The first one and the last, if there are two."""
    return rows if len(rows) == 1 else [rows[0], rows[-1]]


def visible(text: str) -> str:
    """`text` with control characters and others that a terminal may obey escaped, by number."""
    shown = ""
    for c in text.replace("\r\n", "\n"):
        if c == "\t":
            c = " "
        shown += c if c.isprintable() or c == "\n" else f"<{ord(c):02X}>"
    return shown
