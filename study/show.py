"""Trajectories of a run side by side: `python -m study.show RUN [TASK ...]` (run.sh show)."""

import argparse
import re
import shutil
import signal
import textwrap
from itertools import zip_longest
from pathlib import Path

from envs import SUCCESS, first_reply
from harness.files import RunError, command, read_jsonl
from harness.report import AGENTS, reading, result, visible

LONGEST = 300  # letters of an observation
ENDINGS = {"done": "done", "budget": "out of steps", "context": "out of context"}


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
    with reading(run_dir):
        return "\n".join(_side_by_side(task, by_task[task], width, told) for task in tasks)


def _trajectories(run_dir: Path) -> dict:
    """{task: {agent: trajectory}} of the experts and of the last iteration; of GRPO's tasks the
    last time that they were played."""
    paths = [path for path in [run_dir / "experts.jsonl"] if path.exists()]  # chat has none
    for agent in AGENTS[1:]:
        explored = list(run_dir.glob(f"iter[0-9]*/{agent}.jsonl"))
        paths += sorted(explored, key=lambda path: _number(path.parent.name))[-1:]
        steps = list(run_dir.glob(f"iter[0-9]*/{agent}-agent/episodes.jsonl"))
        paths += sorted(steps, key=lambda path: -_number(path.parts[-3]))
        evaluated = list(run_dir.glob(f"eval-[0-9]*-{agent}-*.jsonl"))
        last = max((_number(path.name) for path in evaluated), default=0)
        paths += sorted(path for path in evaluated if _number(path.name) == last)
    by_task = {}
    for path in paths:
        rows = read_jsonl(path)
        for each in rows[::-1] if path.name == "episodes.jsonl" else rows:
            with reading(path):
                agent, reward = each["agent"], each["reward"]
                agents = by_task.setdefault(each["task"], {})
                # Of several rollouts: the failure agent's best failure, else the first.
                rank = (reward < SUCCESS, reward) if agent == "failure" else ()
                if agent not in agents or rank > agents[agent][0]:
                    agents[agent] = (rank, each)
    return {task: {agent: agents[agent][1] for agent in AGENTS if agent in agents}
            for task, agents in by_task.items()}


def _number(name: str) -> int:
    return int(re.search(r"\d+", name).group())


def _interest(agents: dict) -> tuple:
    """Sort key, most telling first: all columns, a failure above the target's, its reward."""
    target = agents.get("target")
    shown = agents.get("failure") or target
    if shown is None or shown["reward"] >= SUCCESS:
        return (-len(agents), 2, 0.0)
    lower = shown is target or target is None or target["reward"] < shown["reward"]
    return (-len(agents), not lower, -shown["reward"])


def _side_by_side(task: str, agents: dict, width: int, told: set) -> str:
    """One task: what every agent reads first, then a column per agent, turns aligned.

    Lines of the opening that are in `told`, such as an environment's rules, are not repeated.
    """
    column = max((width - 3 * (len(agents) - 1)) // len(agents), 20)
    opening = []
    shown = next(iter(agents.values()))
    for message in shown["messages"][:first_reply(shown["messages"], shown["steps"])]:
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
        first = first_reply(each["messages"], each["steps"])
        turns.append(_turns(each["messages"][first:], column, known))
    lines = ["=" * width, task, *(part for line in opening for part in _wrap(line, width)), ""]
    for cells in [heads, *zip_longest(*turns, fillvalue=())]:
        lines += [" | ".join(text.ljust(column) for text in row).rstrip()
                  for row in zip_longest(*cells, fillvalue="")]
    return "\n".join(lines) + "\n"


def _turns(messages, width: int, known: list[str]) -> list[list[str]]:
    """Per reply its lines and those of the observation that followed, cut at LONGEST letters.

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
            if len(text) > LONGEST:
                text = f"{text[:LONGEST]} ... ({len(text) - LONGEST} more letters)"
            turns[-1] += [*_wrap(text, width, indent="    "), ""]
    return turns


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return [line for paragraph in visible(text).splitlines()
            for line in textwrap.wrap(paragraph, width, initial_indent=indent,
                                      subsequent_indent=indent)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh show", description=show.__doc__)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("tasks", nargs="*", help="task ids; none: the hardest negatives")
    parser.add_argument("--count", type=int, default=3, help="how many, where none is named")
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet when a pager closes early
    print(show(asked.run, asked.tasks or None, asked.count))


if __name__ == "__main__":
    command("show", main)
