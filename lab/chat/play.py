"""Play a task in the terminal: `bash run.sh play ENV [TASK]`, in the one episode that agents play
too. TASK is an id such as webshop-test-3, or a split, of which one is drawn. With
--agent a trained agent plays: Enter plays what it is about to do, your own words replace it. Other
flags are those of run.sh ENV.
"""

import argparse
import itertools
import math
import random
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import coevolve
import dpo
from common.files import run_of
from common.settings import Refused, parse
from engine import chat, models, trial
from engine.machine import Machine
from engine.sampling import Draw
from environments import environment, make
from envs import Environment, episode
from lab.runfiles import command, config_of, phases_of, visible, way_of

ENDS = dict(budget="out of turns", context="out of context", done="done")


class Encoder(chat.Encoder):
    """Of a folder's model; the person's words stay as they are, the agent may not have them."""

    def __init__(self, folder: Path):
        rows = models.read_config(folder).get_text_config().vocab_size
        super().__init__(models.read_tokenizer(folder), rows)
        self.said = ""  # by the person in this turn, if anything

    def close(self, ids, stops):
        return (ids, [], self.said) if self.said else super().close(ids, stops)


class Agent:
    """The agent in a folder, as it plays in its run; config: config.json of that."""

    def __init__(self, folder: Path, config: dict, encoder: Encoder, stops: tuple[str, ...]):
        s = SimpleNamespace(**config["settings"])
        machine = Machine(s)
        dtype = torch.bfloat16 if machine.bf16 else torch.float32
        self.model = models.read_model(folder, dtype, machine.device).eval()
        self.encoder = encoder
        self.stops = stops
        draw = Draw(encoder.sampler(0.0), encoder, stops)
        self.answer = trial.answer_of(config["ways"]["replies"], self.model, draw, 1,
                                      s.max_tokens, s.max_new_tokens, s.max_tokens)

    @torch.inference_mode()
    def propose(self, t: dpo.Trajectory) -> tuple[list[int], str, float]:
        """The greedy reply to an episode so far: ids, text, probability."""
        (ids, _), = self.answer([(t, random.Random())])
        read = dpo.Trajectory(ids=t.ids + ids, action_mask=[0] * len(t.ids) + [1] * len(ids))
        log_p = dpo.token_log_probs(self.model, [read], self.encoder.sampler().scores).sum()
        self.encoder.said = ""
        _, _, text = self.encoder.close(ids, self.stops)
        return ids, text, log_p.exp().item()


def say(text: str) -> None:
    print(visible(text), flush=True)


def play(env: Environment, encoder: Encoder, task: str, most: float, agent: Agent | None) -> str:
    """One episode by the person, or by the agent where that one says nothing.

    Args:
        env: The environment.
        encoder: The agent's, or any.
        task: The task's id.
        most: Tokens of the episode.
        agent: Who plays beside the person.

    Returns:
        How it ended.
    """
    t = dpo.Trajectory(task)
    shown = 0
    ids = []
    running = episode(env, encoder, t, most)
    say(f"{task}; ? explains, q quits")
    try:
        running.send(None)
        while True:
            say("\n" + "\n\n".join(m["content"] for m in t.messages[shown:]))
            shown = len(t.messages) + 1  # the reply has been seen
            say(f"\n--- turn {t.steps + 1} of {env.max_steps}")
            if agent:
                ids, text, p = agent.propose(t)
                say(f"The agent's reply, of probability {p:.1%}; Enter plays it:\n    "
                    + text.replace("\n", "\n    "))
            encoder.said = typed(env, may_be_empty=agent is not None)
            ids = encoder.reply(encoder.said) if encoder.said else ids
            running.send((ids, [0.0] * len(ids)))
    except StopIteration:
        how = ENDS[t.ended]
    except (EOFError, KeyboardInterrupt):
        how = "left"
    solved = "no" if t.is_failure else "a"
    turns = "1 turn" if t.steps == 1 else f"{t.steps} turns"
    return f"{how} after {turns}: reward {t.reward:.3f}, {solved} success"


def typed(env: Environment, may_be_empty: bool) -> str:
    """The person's reply: an action, the number of one, or nothing; EOFError for q."""
    actions, forms = env.possible()
    numbered = {str(n): action for n, action in enumerate(actions, 1)}
    if numbered:
        say("possible:  " + "   ".join(map(" ".join, numbered.items())))
    while True:
        line = input("your action: ").strip()
        if not sys.stdin.isatty():
            print(line)  # so that what was played can be read afterwards
        if line in ("q", "quit"):
            raise EOFError
        if line == "?":
            say("\n".join(filter(None, [env.rules, forms])))
        elif line in numbered or not line.isdecimal() and (line or may_be_empty):
            return line and env.reply(numbered.get(line, line))


def agent_of(path: Path) -> tuple[Path, Path]:
    """(run, an agent's folder in it) of that folder, or of the run: its last target agent that is
    there."""
    run = run_of(path)
    agents = [path]
    if (path / "phases.json").exists():
        run = path
        agents = [path / output for output in phases_of(path)
                  if output == "sft-target" or output.endswith("/target-agent")]
    there = [agent for agent in agents if (agent / "config.json").is_file()]
    if run and there:
        return run, there[-1]
    raise Refused(f"--agent {path}: neither a run with a target agent nor an agent in one; name a "
                  "folder like runs/webshop-coevolve-s0")


def chosen(env: Environment, asked: str) -> str:
    """The task asked for, or any of the split asked for; Refused if there is none."""
    try:
        if "-" in asked:
            env.find(asked)
            return asked
        return random.choice(env.tasks(asked))
    except ValueError as error:
        raise Refused(f"{error} (such as {env.tasks(env.test_splits[0])[0]})") from None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh play ENV [TASK]", allow_abbrev=False,
                                     description=__doc__)
    parser.add_argument("--agent", type=Path, help="a run, whose last target agent plays, or an "
                        "agent's folder in it, such as RUN/iter1/failure-agent")
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:2]))
    asked, flags = parser.parse_known_args(argv[len(words):])
    if not words:
        raise Refused("name an environment: play webshop; --help says more")
    run, folder = None, models.MODELS["tiny"]
    if asked.agent:
        run, folder = agent_of(asked.agent)
        trained_on = config_of(run)["settings"]["env"]
        if trained_on != words[0]:
            raise Refused(f"--agent: it was trained on {trained_on}, not on {words[0]}")
        flags = [*way_of(run, trained_on), *flags]
    s, options = parse(["--env", words[0], "--method", "sft", "--model", "a person", *flags],
                       coevolve.Settings, coevolve.METHODS, environment)
    transformers.utils.logging.disable_progress_bar()
    env = make(s.env, s.view, **asdict(options))
    with models.named("--agent"):
        encoder = Encoder(folder)
    try:
        task = chosen(env, words[1] if len(words) > 1 else env.test_splits[0])
        with models.named("--agent"):
            agent = Agent(folder, config_of(run), encoder, env.stops) if run else None
        say(play(env, encoder, task, s.max_tokens if run else math.inf, agent))
    finally:
        env.close()


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):  # whatever is typed or shown, it goes on
        stream.reconfigure(errors="replace")
    command("play", main)
