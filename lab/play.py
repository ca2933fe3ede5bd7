"""Play a task in the terminal: `python -m lab.play ENV [TASK]` (run.sh play), in the one episode
that agents play too. TASK is an id such as webshop-test-3, or a split, of which one is drawn. With
--agent see a trained agent play, and take over where you like. Other flags are those of run.sh ENV.
"""

import argparse
import itertools
import math
import os
import random
import shutil
import sys
import textwrap
from dataclasses import asdict, fields
from pathlib import Path

import torch
import transformers

import coevolve
import dpo
import envs
from lab.runfiles import command, config_of, phases_of, visible
from worlds import flags
from worlds.files import read_jsonl
from worlds.flags import Refused


class Encoder(dpo.Encoder):
    """An agent's, for episodes in which a person may answer in words that it cannot write."""
    said = None  # what the person said

    def close(self, ids, stops):
        text, self.said = self.said, None
        return super().close(ids, stops) if text is None else (ids, [], text)


def say(text: str, indent: str = "") -> None:
    """Prints lines wrapped to the terminal; control characters in them are escaped."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 100), 20)
    for line in visible(text).split("\n"):
        print(textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent,
                            replace_whitespace=False, break_on_hyphens=False), flush=True)


def ask(prompt: str) -> str:
    """A line from the person; EOFError for q, as at the end of the input."""
    line = input(prompt).strip()
    if not sys.stdin.isatty():
        print(line)  # so that what was played can be read afterwards
    if line in ("q", "quit"):
        raise EOFError
    return line


def play(env, encoder: Encoder, task: str, most: float, propose=None) -> str:
    """One episode by the person, or by propose(t) -> (ids, text, how sure) until the person takes
    over; how it ended. most: tokens of the episode."""
    t, mine, shown, told = dpo.Trajectory(task), propose is None, 0, []
    running = envs.episode(env, encoder, t, most)
    say(f"{task}; " + ("? explains" if mine else "Enter plays a reply, t takes over") + ", q quits")
    if mine and env.rules and not env.prompt:
        say(f"\nThe rules, which this view does not tell the agent:\n{env.rules}")
    try:
        running.send(None)
        while True:
            say("\n" + "\n\n".join(m["content"] for m in t.messages[shown:]))
            shown = len(t.messages) + 1  # the reply has been seen
            say(f"\n--- turn {t.steps + 1} of {env.max_steps}")
            if not mine:
                ids, text, sure = propose(t)
                say(f"{sure}\n\n    " + text.replace("\n", "\n    "))
                mine = ask("Enter plays it, t takes over, q quits: ") == "t"
            if mine:
                encoder.said = typed(env, told)
                ids = encoder.reply(encoder.said)
            running.send((ids, [0.0] * len(ids)))
    except StopIteration:
        how = dict(budget="out of turns", context="out of context", done="done")[t.ended]
    except EOFError:
        how = "left"
    return (f"{how} after {t.steps} turn{'s' * (t.steps != 1)}: reward {t.reward:.3f}, "
            f"{'a' if t.reward >= env.success else 'no'} success")


def typed(env, told: list[str]) -> str:
    """The person's reply. told: the forms of actions of the turn before, not said again."""
    actions, forms = env.possible()
    news = [line for line in forms.splitlines() if line not in told]
    told[:] = forms.splitlines()
    if actions or news:
        say("possible:")  # an action is not broken over lines
        numbered = "   ".join(f"{n} {a}".replace(" ", "\0") for n, a in enumerate(actions, 1))
        say("\n".join([*textwrap.wrap(numbered, 96), *news]).replace("\0", " "), "  ")
    while True:
        line = ask(f"your action{', or its number' * bool(actions)}: ")
        if line == "?":
            say(env.rules or "This environment has no rules to tell.", "  ")
        elif line.isdecimal() and actions and not 0 < int(line) <= len(actions):
            say(f"there are {len(actions)} of them")
        elif line:
            return env.reply(actions[int(line) - 1] if line.isdecimal() and actions else line)


def agent_of(path: Path) -> tuple[Path, Path]:
    """(run, its last target agent's folder), or of an agent's folder in a run itself."""
    run = next((folder for folder in (path, *path.resolve().parents[:2])
                if (folder / "phases.json").is_file()), None)
    if run is None:
        raise Refused(f"--agent {path}: neither a run nor an agent in one; name a folder like "
                      "runs/webshop-coevolve-s0")
    made = [output for output in phases_of(run)
            if output == "sft-target" or output.endswith("/target-agent")]
    if run == path and not made:
        raise Refused(f"--agent {run}: no target agent is trained in it (yet); name another run")
    return run, run / made[-1] if run == path else path


def proposer(folder: Path, config: dict, encoder: Encoder, stops):
    """propose(t) -> (ids, text, how sure) of the greedy replies of the agent in a folder."""
    s, gpu = config["settings"], torch.cuda.is_available()
    bf16 = s["bf16"] == "on" or s["bf16"] == "auto" and gpu and s["model"] != "tiny"
    model = dpo.read_model(folder, torch.bfloat16 if bf16 else torch.float32,
                           "cuda" if gpu else "cpu").eval()
    never = encoder.never(model.config.get_text_config().vocab_size)

    @torch.inference_mode()
    def propose(t):
        (ids, _), = dpo.replies(model, encoder, dpo.Sampler(0.0, never), s["max_new_tokens"], stops,
                                [(t.ids, random.Random())], *config["ways"][1:])
        read = dpo.Trajectory(ids=t.ids + ids, action_mask=[0] * len(t.ids) + [1] * len(ids))
        p = dpo.token_log_probs(model, [read], dpo.Sampler(never=never)).exp()        # (A,)
        doubt = p.argmin().item()
        return ids, encoder.close(ids, stops)[2], (
            f"The agent gives this reply a probability of {p.prod().item():.1%}; it is least sure "
            f"of {encoder.tokenizer.decode(ids[doubt])!r}, {p[doubt].item():.1%}:")

    return propose


def settings_for(env: str, more: list[str], folder: Path | None, before: dict):
    """(settings, the environment's own), from flags as for training; of an agent's run `before`,
    where no flag says more."""
    stated = envs.environment(env)
    if before and before["env"] != env:
        raise Refused(f"--agent: it was trained on {before['env']}, not on {env}")
    real = {flags.flag(f.name) for f in fields(stated)
            if flags.REAL in flags.limits_of(stated, f.name)}
    tiny = "tiny" in stated.presets and not real & {word.split("=")[0] for word in more}
    kept = [f"{flags.flag(name)}={before[name]}" for name in (
        "view", "max_tokens", *(f.name for f in fields(stated))) if before.get(name) is not None]
    model = str(folder or ("tiny" if tiny else "a person"))
    return flags.parse(["--env", env, "--method", "sft", "--model", model, *kept, *more],
                       coevolve.Settings, coevolve.METHODS, envs.environment)


def chosen(env, asked: str) -> str:
    """The task asked for, or any of the split asked for; Refused if there is none."""
    try:
        return asked if "-" in asked and env.find(asked) else random.choice(env.tasks(asked))
    except ValueError as error:
        raise Refused(f"{error} (such as {env.tasks(env.test_splits[0])[0]})") from None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh play ENV [TASK]", allow_abbrev=False,
                                     description=__doc__)
    parser.add_argument("--agent", type=Path, help="a run, whose last target agent plays, or an "
                        "agent's folder in it, such as RUN/iter1/failure-agent")
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:2]))
    asked, more = parser.parse_known_args(argv[len(words):])
    if not words:
        raise Refused("name an environment: play webshop; --help says more")
    run, folder = agent_of(asked.agent) if asked.agent else (None, None)
    config = config_of(run) if run else dict(settings={})
    s, options = settings_for(words[0], more, folder, config["settings"])
    transformers.utils.logging.disable_progress_bar()
    env = envs.make(s.env, s.view, **asdict(options))
    encoder = Encoder(dpo.read(transformers.AutoTokenizer, folder or coevolve.MODELS["tiny"]))
    made = [run / output for output in (phases_of(run) if run else ())
            if output.endswith("tasks.jsonl")]  # the last has all
    try:
        for row in read_jsonl(made[-1]) if made else ():
            if "definition" in row:  # else it is a training task
                env.add(row["definition"])
        task = chosen(env, words[1] if len(words) > 1 else env.test_splits[0])
        propose = proposer(folder, config, encoder, env.stops) if run else None
        say(play(env, encoder, task, s.max_tokens if run else math.inf, propose))
    finally:
        env.close()


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):  # whatever is typed or shown, it goes on
        stream.reconfigure(errors="replace")
    try:
        command("play", main)
    except KeyboardInterrupt:
        os._exit(130)  # waits for no environment that hangs
