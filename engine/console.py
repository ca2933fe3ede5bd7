"""The text that a run prints about a finished phase, and about its results when it ends."""

from collections import defaultdict

# Labels of the shares of episodes, and of replies, that a phase records.
SHARES = {"success": "success", "hard_negative": "hard negatives",
          "other_failure": "other failures", "idle": "idle replies", "turn_limit": "turn limit"}
# Entries of a phase's record that its line does not print as results. The share of other failures
# is the rest of success and hard negatives.
RECORDS = {"i", "seconds", "edited", "other_failure"}


def sentence(output: str, row: dict) -> str:
    """Returns the line about a finished phase, with its results and its time in minutes.

    For example: "iter1/target.jsonl  400 episodes, reward 0.512, success 35%, hard negatives 40%,
    5.4 turns each, idle replies 2%, turn limit 3%  1:12".

    Args:
        output: The phase's output.
        row: The phase's record in phases.json.
    """
    parts = []
    for name, value in row.items():
        printed = name not in RECORDS and not name.startswith("first_")
        if printed and isinstance(value, (int, float, dict)):
            parts.append(phrase(name, value, row))
    minutes, seconds = divmod(round(row["seconds"]), 60)
    edited = "  edited since" if "edited" in row else ""
    return f"{output:28}  {', '.join(parts)}  {minutes}:{seconds:02}{edited}"


def phrase(name: str, value, row: dict) -> str:
    """Returns the text of one result of a phase.

    Args:
        name: Name of the result.
        value: A number, or a dictionary of counts, which are printed with their sum.
        row: The phase's record, which may have the result's first value.
    """
    if isinstance(value, dict):
        counts = ", ".join(f"{count:,} {kind}" for kind, count in value.items())
        total = counted(sum(value.values()), name)
        return f"{total} ({counts})" if counts else total
    if name in SHARES:
        return f"{SHARES[name]} {value:.0%}"
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
    """Returns the method, environment, model and seed of a run with these settings."""
    return f"{s['method']} on {s['env']}, model {s['model']}, seed {s['seed']}"


def closing(done: dict[str, dict]) -> list[str]:
    """Returns a line per evaluated agent, with its results before and after preference training.

    For example: "target, test: reward 0.762 -> 0.791, success 32% -> 45%; unseen: reward ...".

    Args:
        done: The records of all finished phases, by output.
    """
    evaluations = defaultdict(list)  # (agent, split) -> records, in order
    for row in done.values():
        if "split" in row and row.get("episodes"):
            evaluations[row["name"], row["split"]].append(row)
    results = defaultdict(list)  # agent -> text about each split
    for (agent, split), rows in evaluations.items():
        rewards = " -> ".join(f"{row['reward']:.3f}" for row in first_and_last(rows))
        successes = " -> ".join(f"{row['success']:.0%}" for row in first_and_last(rows))
        edited = ", edited since" if any("edited" in row for row in rows) else ""
        results[agent].append(f"{split}: reward {rewards}, success {successes}{edited}")
    return [f"{agent}, {'; '.join(splits)}" for agent, splits in results.items()]


def first_and_last(rows: list) -> list:
    """Returns the first and the last row, or the only one."""
    return rows if len(rows) == 1 else [rows[0], rows[-1]]


def visible(text: str) -> str:
    """Returns a text with its control characters escaped as hexadecimal code points.

    A terminal could obey these and other unprintable characters. Line breaks stay, and a tab
    becomes a space.
    """
    escaped = ""
    for c in text.replace("\r\n", "\n"):
        if c == "\t":
            c = " "
        escaped += c if c.isprintable() or c == "\n" else f"<{ord(c):02X}>"
    return escaped
