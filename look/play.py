"""Play an environment in the terminal: `python -m look.play ENV [TASK]` (run.sh play).

You read what the agent reads and reply as it does. With --agent RUN the trained agent plays, turn
by turn, and shows what it had in mind; t takes over.
"""

import argparse
import os
import random
import shutil
import sys
import textwrap
from pathlib import Path

import envs
from harness.files import RunError, made_tasks, read_object
from harness.report import visible
from harness.settings import Settings, SettingsError, options_of, parse, without_passwords
from harness.tasks import settings_of

# Of a run's settings, those that its agent plays with.
PLAYED_WITH = ("view", "max_tokens", "max_new_tokens", "examples")
# Settings that name a real environment, which the tiny model's presets are not for.
REAL = ("webshop_url", "intercode_data", "mysql_url")


class Quit(Exception):
    """The person has had enough."""


# ------------------------------------------------------------------------------ the terminal


def say(text: str = "", indent: str = "") -> None:
    """Prints lines wrapped to the terminal; what is no text in them is named, not obeyed."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 100), 20)
    for line in visible(text).split("\n"):
        print("\n".join(textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent,
                                      replace_whitespace=False, break_on_hyphens=False) or [""]))
    sys.stdout.flush()


def rows(items: list[str]) -> list[str]:
    """The items in as few lines as the terminal has room for."""
    found, width = [""] if items else [], shutil.get_terminal_size((100, 24)).columns
    for item in items:
        if found[-1] and len(found[-1]) + len(item) + 5 > min(width, 100):
            found.append("")
        found[-1] += "   " * bool(found[-1]) + item
    return found


def ask(prompt: str) -> str | None:
    """A line from the person, or None at the end of the input; Quit for q."""
    try:
        line = input(prompt).strip()
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        print(line)  # so that what was played can be read afterwards
    if line in ("q", "quit"):
        raise Quit
    return line


# ---------------------------------------------------------------------------------- an episode


def play(env, task: str, agent=None) -> str:
    """One episode, by the person, or by `agent` until the person takes over; how it ended."""
    observation, step, mine, told = env.reset(task), None, agent is None, []
    say(f"{task}, at most {env.max_steps} turns; "
        + ("? explains, q quits" if mine else "t takes over, Enter goes on, q quits"))
    rules = getattr(env, "rules", "")
    if rules and not env.prompt and mine:
        say("\nThe rules, which this view does not tell the agent:")
        say(rules, "  ")
    say("\n" + "\n\n".join(m["content"] for m in envs.opening(env, observation, playing=True)))
    if agent:
        agent.begin(env, task, observation)
    for turn in range(1, env.max_steps + 1):
        if agent and agent.full:
            return ending("out of context", step, turn - 1)
        say(f"\n--- turn {turn} of {env.max_steps}")
        try:
            reply, mine = choose(env, agent, mine, told)
        except Quit:
            return ending("left", step, turn - 1)
        if reply is None:
            return ending("out of context", step, turn - 1)
        step = env.step(reply)
        if agent:
            agent.take(reply, step)
        say("\n" + step.observation)
        if step.done:
            return ending("done", step, turn)
    return ending("out of turns", step, turn)


def choose(env, agent, mine: bool, told: list) -> tuple[str | None, bool]:
    """The reply of a turn, None where the agent has no room for one, and whose the next turn is."""
    proposed = None
    while True:
        if mine:
            reply = act(env, agent is not None, told)
            if reply is not None:
                return reply, True
            mine = False
        if proposed is None:
            proposed, thoughts = agent.propose()
            if proposed is None:
                return None, mine
            say(thoughts)
            say(proposed, "    ")
        answer = ask("Enter plays it, t takes over, q quits: ")
        if answer == "t":
            mine = True
        elif not answer:
            return proposed, False


def act(env, agent: bool, told: list) -> str | None:
    """The person's reply; None gives the turn to the agent. Quit where there is none to give to.

    told: the forms of actions as they were said in the turn before, which are not said again.
    """
    actions, forms = env.actions(), env.forms().splitlines()
    news = [line for line in forms if line not in told]
    told[:] = forms
    if actions or news:
        say("possible:")
        say("\n".join([*rows([f"{n} {a}" for n, a in enumerate(actions, 1)]), *news]), "  ")
    while True:
        line = ask("your action, or its number" * bool(actions) + "your action" * (not actions)
                   + ", Enter gives back to the agent" * agent + ": ")
        if line is None and not agent:
            raise Quit
        if not line and agent:
            return None
        if line == "?":
            say(getattr(env, "rules", "") or "This environment has no rules to tell.", "  ")
        elif line and line.isdecimal() and actions:
            if 0 < int(line) <= len(actions):
                return env.reply(actions[int(line) - 1])
            say(f"there are {len(actions)} of them")
        elif line:
            return env.reply(line)


def ending(how: str, step, turns: int) -> str:
    reward = step.reward if step else 0.0
    worth = "a success" if reward >= envs.SUCCESS else "no success"
    return f"{how} after {turns} turn{'s' * (turns != 1)}: reward {reward:.3f}, {worth}"


# ------------------------------------------------------------------------------------ the start


def agent_of(path: Path) -> tuple[Path, Path | str, str]:
    """(run, its last target agent's folder, its name), or of an agent's folder in a run itself."""
    runs = [folder for folder in (path, *path.resolve().parents[:2])
            if (folder / "phases.json").is_file()]
    if not runs:
        raise RunError(f"--agent {path}: neither a run nor an agent in one; name a folder like "
                       "runs/webshop-coevolve-s0")
    run = runs[0]
    if run != path:
        return run, path, f"{path.parent.name}/{path.name}"
    settings = settings_of(run)
    if settings["method"] == "evaluate":
        model = settings["model"]
        if model == "tiny":
            raise RunError(f"--agent {run}: it evaluates the tiny model as it is before training; "
                           "name a run that trains")
        if model == "smollm2":
            from harness import smollm2  # with torch
            return run, smollm2.base(), model
        return run, model, model
    done = [name for name in read_object(run / "phases.json")
            if name == "sft-target" or name.endswith("/target-agent")]
    if not done:
        raise RunError(f"--agent {run}: no target agent is trained in it yet")
    return run, run / done[-1], done[-1]


def settings_for(env: str, more: list[str], run: Path | None, folder) -> Settings:
    """From the same flags as for training; with an agent its run's, where no flag says more."""
    flags, names = ["--env", env, "--method", "evaluate"], {
        flag.split("=")[0].lstrip("-").replace("-", "_") for flag in more if flag.startswith("-")}
    if run is None:
        real = env == "bfcl" or names & {*REAL}
        return parse([*flags, *(["--model", "none"] if real else []), *more])
    config = read_object(run / "config.json", settings=dict)
    before = config["settings"]
    if before["env"] != env:
        raise RunError(f"--agent {run}: it was trained on {before['env']}, not on {env}")
    for name in (*PLAYED_WITH, *options_of(Settings(env=env))):
        if before.get(name) is not None:
            flags += [f"--{name}", str(before[name])]
    flags += ["--bf16", "on" if config.get("precision") == "bf16" else "off"]
    return parse([*flags, "--model", str(folder), *more])


def choose_task(env, asked: str | None) -> str:
    """The task asked for; of a split, or without a wish of the first test split, any."""
    if asked and "-" in asked:
        env.find(asked)
        return asked
    return random.choice(env.tasks(asked or env.test_splits[0]))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="run.sh play ENV [TASK]", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="ENV: webshop, scienceworld, intercodesql or bfcl. TASK: an id such as "
        "webshop-test-3, or a split,\nof which one is drawn. Other flags: as for run.sh ENV, such "
        "as --webshop-url.")
    parser.add_argument("--agent", type=Path, help="a run, whose last target agent plays, or an "
                        "agent's folder in it, such as RUN/iter1/failure-agent")
    words = [word for word in argv[:2] if not word.startswith("-")]
    words = words if argv[:1] == words[:1] else []
    asked, more = parser.parse_known_args(argv[len(words):])
    if not words:
        raise SettingsError("name an environment: play webshop; --help says more")
    run = folder = name = None
    if asked.agent:
        run, folder, name = agent_of(asked.agent)
    s = settings_for(words[0], more, run, folder)
    env = envs.make(s.env, s.view, **options_of(s))
    try:
        for row in made_tasks(run, read_object(run / "phases.json")) if run else ():
            env.add(row["task"])
        try:
            task = choose_task(env, words[1] if len(words) > 1 else None)
        except ValueError as error:
            examples = ", ".join(env.tasks(env.test_splits[0])[:3])
            raise SettingsError(f"{error} (such as {examples})") from None
        agent = None
        if run:
            from look.agent import Agent  # with torch, which takes seconds
            agent = Agent(folder, s)
            say(f"{name} of {run} plays, greedily.")
        say(play(env, task, agent))
    finally:
        env.close()


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):  # whatever is typed or shown, it goes on
        stream.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
    except (SettingsError, RunError, envs.Refused, envs.EnvError) as error:
        print(f"play: {without_passwords(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nplay: stopped", file=sys.stderr)
        os._exit(130)  # waits for no environment that hangs
