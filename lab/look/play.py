"""Play an environment in the terminal: `python -m lab.look.play ENV [TASK]` (run.sh play), or with
--agent RUN see a trained agent play and what it had in mind.
"""

import argparse
import itertools
import os
import random
import shutil
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from lab import play_env as envs
from lab.harness.files import RunError, command, made_tasks, read_object
from lab.harness.report import visible
from lab.harness.settings import Settings, SettingsError, flag, options_of, parse

# Of a run's settings, those that its agent plays with.
PLAYED_WITH = ("view", "max_tokens", "max_new_tokens", "examples")


class Quit(Exception):
    """The episode ends before its end, and how."""


def say(text: str = "", indent: str = "") -> None:
    """Prints lines wrapped to the terminal; control characters in them are escaped."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 100), 20)
    for line in visible(text).split("\n"):
        print(textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent,
                            replace_whitespace=False, break_on_hyphens=False), flush=True)


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
        raise Quit("left")
    return line


def play(env, task: str, agent=None) -> str:
    """One episode, by the person, or by `agent` until the person takes over; how it ended."""
    observation, step, played, mine, told = env.reset(task), None, 0, agent is None, []

    def reply(messages) -> str:
        nonlocal mine
        say(f"\n--- turn {played + 1} of {env.max_steps}")
        proposed = None
        while True:
            if mine and (typed := act(env, agent is not None, told)) is not None:
                return typed
            if proposed is None:
                proposed, thoughts = agent.propose(messages)
                if proposed is None:
                    raise Quit("out of context")
                say(thoughts)
                say(proposed, "    ")
            answer = ask("Enter plays it, t takes over, q quits: ")
            mine = answer == "t"
            if not answer:
                return proposed

    say(f"{task}, at most {env.max_steps} turns; "
        + ("? explains, q quits" if mine else "t takes over, Enter goes on, q quits"))
    if mine and env.rules and not env.prompt:
        say(f"\nThe rules, which this view does not tell the agent:\n{env.rules}")
    messages = envs.opening(env, observation, playing=True)
    say("\n" + "\n\n".join(m["content"] for m in messages))
    try:
        for step in envs.turns(env, messages, reply):
            played += 1
            say("\n" + step.observation)
        how = "done" if step.done else "out of turns"
    except Quit as quit:
        how = str(quit)
    reward = step.reward if step else 0.0
    return (f"{how} after {played} turn{'s' * (played != 1)}: reward {reward:.3f}, "
            f"{'a' if reward >= envs.SUCCESS else 'no'} success")


def act(env, agent: bool, told: list) -> str | None:
    """The person's reply; None gives the turn to the agent. told: the forms of actions as they were
    said in the turn before, which are not said again."""
    actions, forms = env.possible()
    news = [line for line in forms.splitlines() if line not in told]
    told[:] = forms.splitlines()
    if actions or news:
        say("possible:")  # an action is not broken over lines
        numbered = "   ".join(f"{n} {a}".replace(" ", "\0") for n, a in enumerate(actions, 1))
        say("\n".join([*textwrap.wrap(numbered, 96), *news]).replace("\0", " "), "  ")
    while True:
        line = ask("your action" + ", or its number" * bool(actions)
                   + ", Enter gives back to the agent" * agent + ": ")
        if not line and agent:
            return None
        if line is None:
            raise Quit("left")
        if line == "?":
            say(env.rules or "This environment has no rules to tell.", "  ")
        elif line and line.isdecimal() and actions:
            if 0 < int(line) <= len(actions):
                return env.reply(actions[int(line) - 1])
            say(f"there are {len(actions)} of them")
        elif line:
            return env.reply(line)


def agent_of(path: Path) -> tuple[Path, Path | str, str]:
    """(run, its last target agent's folder, its name), or of an agent's folder in a run itself."""
    run = next((folder for folder in (path, *path.resolve().parents[:2])
                if (folder / "phases.json").is_file()), None)
    if run is None:
        raise RunError(f"--agent {path}: neither a run nor an agent in one; name a folder like "
                       "runs/webshop-coevolve-s0")
    if run != path:
        return run, path, f"{path.parent.name}/{path.name}"
    settings = read_object(run / "config.json")["settings"]
    model = settings["model"]
    if settings["method"] == "evaluate" and model != "tiny":
        from lab.training import smollm2  # with torch
        return run, smollm2.base() if model == "smollm2" else model, model
    done = [name for name in read_object(run / "phases.json")
            if name == "sft-target" or name.endswith("/target-agent")]
    if not done:
        raise RunError(f"--agent {run}: no target agent is trained in it (yet); name another run")
    return run, run / done[-1], done[-1]


def settings_for(env: str, more: list[str], run: Path | None, folder) -> Settings:
    """From the same flags as for training; with an agent its run's, where no flag says more."""
    flags = ["--env", env, "--method", "evaluate"]
    if run is None:
        stated, names = envs.environment(env), {word.split("=")[0] for word in more}
        real = "tiny" not in stated.presets or names & {
            flag(f.name) for f in fields(stated) if f.metadata.get("real")}
        return parse([*flags, *(["--model", "none"] if real else []), *more])  # no preset for it
    config = read_object(run / "config.json")
    before = config["settings"]
    if before["env"] != env:
        raise RunError(f"--agent {run}: it was trained on {before['env']}, not on {env}")
    for name in (*PLAYED_WITH, *options_of(Settings(env=env))):
        if before.get(name) is not None:
            flags += [f"--{name}", str(before[name])]
    flags += ["--bf16", "on" if config.get("precision") == "bf16" else "off"]
    return parse([*flags, "--model", str(folder), *more])


def choose_task(env, asked: str) -> str:
    """The task asked for, or any of the split asked for; SettingsError if there is none."""
    try:
        if "-" not in asked:
            return random.choice(env.tasks(asked))
        env.find(asked)
        return asked
    except ValueError as error:
        examples = ", ".join(env.tasks(env.test_splits[0])[:3])
        raise SettingsError(f"{error} (such as {examples})") from None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="run.sh play ENV [TASK]", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="ENV: webshop, scienceworld, intercodesql or bfcl. TASK: an id such as "
        "webshop-test-3, or a split,\nof which one is drawn. Other flags: as for run.sh ENV, such "
        "as --webshop-url.")
    parser.add_argument("--agent", type=Path, help="a run, whose last target agent plays, or an "
                        "agent's folder in it, such as RUN/iter1/failure-agent")
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:2]))
    asked, more = parser.parse_known_args(argv[len(words):])
    if not words:
        raise SettingsError("name an environment: play webshop; --help says more")
    run, folder, name = agent_of(asked.agent) if asked.agent else (None, None, None)
    s = settings_for(words[0], more, run, folder)
    env, agent = envs.make(s.env, s.view, **options_of(s)), None
    try:
        for row in made_tasks(run, read_object(run / "phases.json")) if run else ():
            env.add(row["task"])
        task = choose_task(env, words[1] if len(words) > 1 else env.test_splits[0])
        if run:
            from lab.look.agent import Agent  # with torch, which takes seconds
            agent = Agent(folder, s)
            say(f"{name} of {run} plays, greedily.")
        say(play(env, task, agent))
    finally:
        env.close()


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):  # whatever is typed or shown, it goes on
        stream.reconfigure(errors="replace")
    try:
        command("play", main)
    except KeyboardInterrupt:
        print("\nplay: stopped", file=sys.stderr)
        os._exit(130)  # waits for no environment that hangs
