"""Console output: formats the line that a run prints after each phase, and its final results."""

from collections import defaultdict

# Labels of metrics that are fractions of all episodes or replies, and are printed as percentages.
SHARES = {"success": "success", "hard_negative": "hard negatives",
          "other_failure": "other failures", "idle": "idle replies", "turn_limit": "turn limit"}
# Entries of a phase's record that are not printed as results. The share of other failures follows
# from the printed shares, because successes, hard negatives and other failures add up to 100 %.
RECORDS = {"i", "seconds", "edited", "other_failure"}


def sentence(output: str, row: dict) -> str:
    """Returns the line that is printed after a phase, with its results and its running time.

    For example: "iter1/target.jsonl  400 episodes, reward 0.512, success 35%, hard negatives 40%,
    5.4 turns each, idle replies 2%, turn limit 3%  1:12". The time is in minutes and seconds.
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
    """Formats one result of a phase, for example "success 35%".

    Args:
        value: A number, or a dict of counts by kind. For example, {"expert>target": 6,
            "target>target": 3} with the name "pairs" is printed as "9 pairs (6 expert>target,
            3 target>target)".
        row: The phase's record in phases.json. If it also contains the first value of the result,
            such as "first_loss", both values are printed, as in "loss 0.693 -> 0.512".
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
    """Returns a count with a noun, such as "1 reply" or "2 replies". `name` is the plural noun."""
    if n == 1:
        name = f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
    return f"{n:,} {name.replace('_', ' ')}"


def headline(s: dict) -> str:
    return f"{s['method']} on {s['env']}, model {s['model']}, seed {s['seed']}"


def closing(done: dict[str, dict]) -> list[str]:
    """Returns the final evaluation results of a run, one line per agent.

    Each line compares the agent's first evaluation, before preference training, with its last.
    For example: "target, test: reward 0.762 -> 0.791, success 32% -> 45%; unseen: reward ...".
    """
    evaluations = defaultdict(list)  # (agent, split) -> records of evaluations, in order
    for row in done.values():
        if "split" in row and row.get("episodes"):
            evaluations[row["name"], row["split"]].append(row)
    results = defaultdict(list)  # agent -> one text for each split
    for (agent, split), rows in evaluations.items():
        first_and_last = rows if len(rows) == 1 else [rows[0], rows[-1]]
        rewards = " -> ".join(f"{row['reward']:.3f}" for row in first_and_last)
        successes = " -> ".join(f"{row['success']:.0%}" for row in first_and_last)
        edited = ", edited since" if any("edited" in row for row in rows) else ""
        results[agent].append(f"{split}: reward {rewards}, success {successes}{edited}")
    return [f"{agent}, {'; '.join(splits)}" for agent, splits in results.items()]


def visible(text: str) -> str:
    """Escapes unprintable characters, which could move the cursor or change colours in a terminal.

    Each unprintable character is replaced with its code point in hexadecimal, for example "<1B>"
    for the escape character. Line breaks are not changed, and tabs are replaced with spaces.
    """
    escaped = ""
    for c in text.replace("\r\n", "\n").replace("\t", " "):
        escaped += c if c.isprintable() or c == "\n" else f"<{ord(c):02X}>"
    return escaped
