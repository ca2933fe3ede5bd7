"""Plays a task in the terminal: `bash run.sh play ENV [TASK]`. You see the same observations as an
agent. TASK is a task id such as webshop-test-3, or the name of a split, from which a random task is
chosen. With --agent, a trained agent proposes each reply: press Enter to accept the proposal, or
type your own reply instead. All other flags are the same as for `run.sh ENV`.
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import coevolve
import dpo
from common.files import run_of
from common.settings import UsageError, parse
from engine import chat, generation, models
from engine.console import counted, visible
from engine.machine import Machine
from engine.sampling import TokenSampler
from environments import environment, make
from envs import Environment, episode
from lab.runfiles import command, config_of, phases_of, way_of


class Encoder(chat.Encoder):
    """An encoder that does not change a reply typed by a person, even if the agent's tokens cannot
    represent it exactly."""
    typed = ""  # the person's reply in this turn, or "" for the agent's reply

    def close(self, ids, stops):
        return (ids, [], self.typed) if self.typed else super().close(ids, stops)


def proposer(folder: Path, config: dict, encoder: Encoder, stops: tuple[str, ...]) -> Callable:
    """Returns a function propose(trajectory), which generates the agent's greedy reply, and returns
    the reply's token ids and text. `config` is the content of the run's config.json."""
    s = SimpleNamespace(**config["settings"])
    machine = Machine(s)
    dtype = torch.bfloat16 if machine.bf16 else torch.float32
    model = models.read_model(folder, dtype, machine.device).eval()
    sampler = TokenSampler(encoder.sampler(0.0), encoder, stops)
    generate = generation.make_generator(config["backends"]["replies"], model, sampler, 1,
                                         s.max_tokens, s.max_new_tokens, s.max_tokens)

    @torch.inference_mode()
    def propose(t: dpo.Trajectory) -> tuple[list[int], str]:
        (ids, _), = generate([(t, random.Random())])
        encoder.typed = ""
        _, _, text = encoder.close(ids, stops)
        return ids, text

    return propose


def say(text: str) -> None:
    print(visible(text), flush=True)


def play(env: Environment, encoder: Encoder, task: str, max_tokens: float,
         propose: Callable | None) -> str:
    """Runs one episode of at most `max_tokens` tokens. In each turn the person types a reply, or
    accepts the agent's proposal, if there is an agent. Returns a line to print, with the reason why
    the episode ended, the number of turns and the reward."""
    t = dpo.Trajectory(task)
    shown = 0
    ids = []
    running = episode(env, encoder, t, max_tokens)
    say(f"{task}; ? prints the rules, q quits")
    try:
        running.send(None)
        while True:
            say("\n" + "\n\n".join(m["content"] for m in t.messages[shown:]))
            # The next message is the person's own reply, so it does not have to be printed.
            shown = len(t.messages) + 1
            say(f"\n--- turn {t.turns + 1} of {env.max_turns}")
            if propose:
                ids, text = propose(t)
                say("The agent's reply; Enter accepts it:\n    " + text.replace("\n", "\n    "))
            encoder.typed = typed(env, may_be_empty=propose is not None)
            if encoder.typed:
                ids = encoder.reply(encoder.typed)
            running.send((ids, [0.0] * len(ids)))
    except StopIteration:
        end = t.ended.replace("_", " ")
    except (EOFError, KeyboardInterrupt):
        end = "left"
    solved = "no" if t.is_failure else "a"
    return f"{end} after {counted(t.turns, 'turns')}: reward {t.reward:.3f}, {solved} success"


def typed(env: Environment, may_be_empty: bool) -> str:
    """Returns the person's reply. The person types an action, the number of a listed action, or
    nothing if `may_be_empty`. Raises EOFError if the person types q."""
    actions, forms = env.possible()
    numbered = {str(n): action for n, action in enumerate(actions, 1)}
    if numbered:
        say("possible actions:  " + "   ".join(map(" ".join, numbered.items())))
    while True:
        line = input("your action: ").strip()
        if not sys.stdin.isatty():
            print(line)  # input from a pipe is not echoed, so print it for the log
        if line in ("q", "quit"):
            raise EOFError
        if line == "?":
            say("\n".join(filter(None, [env.rules, forms])))
        elif line in numbered or not line.isdecimal() and (line or may_be_empty):
            return line and env.reply(numbered.get(line, line))


def agent_of(path: Path) -> tuple[Path, Path]:
    """Returns the folders of the run and of the agent. `path` is an agent's folder, or a run's
    folder. From a run, the last target agent that still exists is chosen."""
    run = run_of(path)
    agents = [path]
    if (path / "phases.json").exists():
        run = path
        agents = [path / output for output in phases_of(path)
                  if output.endswith(("sft-target", "/target-agent"))]
    existing = [agent for agent in agents if (agent / "config.json").is_file()]
    if run and existing:
        return run, existing[-1]
    raise UsageError(f"--agent {path}: neither a run with a target agent nor an agent in a run; "
                     "give a folder like runs/webshop-coevolve-s0")


def chosen(env: Environment, name: str) -> str:
    """Returns the id of the task to play. `name` is a task id, or a split from which a random task
    is chosen."""
    try:
        if "-" in name:
            env.find(name)
            return name
        return random.choice(env.tasks(name))
    except ValueError as error:
        raise UsageError(f"{error} (such as {env.tasks(env.test_splits[0])[0]})") from None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh play ENV [TASK]", allow_abbrev=False,
                                     description=__doc__)
    parser.add_argument("--agent", type=Path, help="a run, for its last target agent, or an "
                        "agent's folder in a run, such as RUN/iter1/failure-agent")
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:2]))
    arguments, flags = parser.parse_known_args(argv[len(words):])
    if not words:
        raise UsageError("name an environment, such as play webshop; see --help")
    run, folder = None, models.MODELS["tiny"]
    if arguments.agent:
        run, folder = agent_of(arguments.agent)
        trained_on = config_of(run)["settings"]["env"]
        if trained_on != words[0]:
            raise UsageError(f"--agent: this agent was trained on {trained_on}, not on {words[0]}")
        flags = [*way_of(run, trained_on), *flags]
    s, options = parse(["--env", words[0], "--method", "sft", "--model", "a person", *flags],
                       coevolve.Settings, coevolve.METHODS, environment)
    transformers.utils.logging.disable_progress_bar()
    env = make(s.env, s.view, **asdict(options))
    try:
        task = chosen(env, words[1] if len(words) > 1 else env.test_splits[0])
        with models.naming_flag("--agent"):
            encoder = models.read_encoder(folder, Encoder)
            propose = proposer(folder, config_of(run), encoder, env.stops) if run else None
        say(play(env, encoder, task, s.max_tokens if run else math.inf, propose))
    finally:
        env.close()


if __name__ == "__main__":
    sys.stdin.reconfigure(errors="replace")  # bytes that are invalid in the terminal's encoding
    command("play", main)
