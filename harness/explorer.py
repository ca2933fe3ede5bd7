"""Who goes back into the environment for new tasks: the agent itself, or a model at an endpoint.

What an endpoint says is data: its actions go through the environment's own reader, its proposals
are JSON that is read strictly and played before it counts; what cannot be read is counted.
"""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import envs
from dpo import Trajectory
from harness.endpoint import USAGE, ContextFull, Endpoint
from harness.play import play
from harness.run import Run
from harness.settings import is_endpoint

LONGEST = 6000  # characters of evidence, or of a conversation, that the endpoint is shown [ours]

REFLECT = """\
An agent works in an environment. Here is where it is weak: {signal}.

{evidence}

Answer with one JSON object in a ```json block: "where" (the page, table or place that matters), \
"what" (what was done), "how" (how it failed or varied, and what the success did differently) and \
"try" (what somebody who goes back there should look into)."""

ACT = """\
{rules}

You explore: you need not solve the task below, but find out what can be done around it, above all:
{context}

Do something that was not done there yet, one action a turn."""

ABSTRACT = """\
Somebody explored an environment. This is what happened:

{conversation}

Write new tasks that a user could have had in mind for what was done, each concrete enough to be \
checked, without steps that only explore. {form} Do not repeat any of these:
{known}

Answer with a JSON list of objects in a ```json block, each with "intent" (the aim in a sentence), \
"query" (the text of the task), "confidence" (0 to 1) and "action_sequence" (the list of all \
actions, exactly as they have to be written, that solve it from the start)."""


def explore(run: Run, episodes: list[Trajectory], picks: list[dict], known: list[str],
            folder: Path) -> tuple[list[Trajectory], dict]:
    """Plays `episodes` as the explorer; what an endpoint took beside it.

    picks: the signals that lead it; known: texts of tasks; folder: the agent, as its own explorer.
    """
    s = run.settings
    if is_endpoint(s.explorer) and picks:
        by_task = {pick["task"]: pick for pick in picks}
        played = run.first_says(lambda: ask_all(run, episodes, by_task, known))
        return played, {name: sum(t.usage[name] for t in played) for name in USAGE}
    return play(run, folder, episodes, s.explorer_temperature), {}


def abstract(smith, t: Trajectory, rng: random.Random) -> list[dict]:
    """The proposals {text, task, solution} that an explored episode becomes.

    Of an endpoint's those that cannot be read have no task: they are counted, never mended.
    """
    if t.usage is None:
        replies = [m["content"] for m in t.messages if m["role"] == "assistant"]
        return smith.finds(t.task, replies, rng)
    rows = []
    for proposal in t.usage["proposals"]:
        text = proposal.get("query") if isinstance(proposal, dict) else None
        whole = (isinstance(text, str) and text.strip() and len(text) < 1000
                 and isinstance(proposal.get("action_sequence"), list))
        found = smith.written(t.task, proposal, rng) if whole else None
        rows.append(found or dict(text=str(text)[:200], task=None, solution=[]))
    return rows


# -------------------------------------------------------------------------------- an endpoint


def ask_all(run: Run, episodes: list[Trajectory], picks: dict[str, dict],
            known: list[str]) -> list[Trajectory]:
    """Reflects on each pick, explores, and abstracts; in `usage` what it took and proposed.

    known: the texts of tasks that were made already.
    """
    s = run.settings
    endpoint = Endpoint(s, url=s.explorer, name=s.explorer_model, max_tokens=1024,
                        temperature=s.explorer_temperature)
    with run.bar(run.running, len(episodes), "episode") as progress, \
            ThreadPoolExecutor(min(s.slots, 8)) as threads:
        def work(t):
            ask(run, endpoint, t, picks[t.task], "\n".join(known)[-LONGEST:])
            progress.update()

        list(threads.map(work, episodes))
    return episodes


def ask(run: Run, endpoint: Endpoint, t: Trajectory, pick: dict, known: str) -> None:
    """One episode of the endpoint: three kinds of calls, each answer of them only data."""
    t.usage, env = {**dict.fromkeys(USAGE, 0), "unreadable": 0, "proposals": []}, run.make_env()

    def say(messages):
        reply, used = endpoint(messages)
        for name in USAGE:
            t.usage[name] += used[name]
        return reply

    try:
        evidence = json.dumps({name: pick.get(name) for name in ("success", "failure")})
        context = block(say([user(REFLECT.format(signal=describe(pick),
                                                 evidence=evidence[:LONGEST]))]), dict)
        t.usage["unreadable"] += context is None
        t.messages = envs.opening(env, env.reset(t.task))
        rules = ACT.format(rules=env.prompt or "Answer with one action and nothing else.",
                           context=json.dumps(context or describe(pick)))
        while not t.ended:
            reply = say([user(f"{rules}\n\n{t.messages[0]['content']}"), *t.messages[1:]])
            t.messages.append({"role": "assistant", "content": reply})
            step = env.step(reply)
            t.reward, t.steps = step.reward, t.steps + 1
            t.messages.append(user(step.observation))
            t.ended = "done" if step.done else "budget" if t.steps == env.max_steps else ""
        found = block(say([user(ABSTRACT.format(
            conversation=json.dumps(t.messages)[:LONGEST], form=env.smith().form,
            known=known or "(none yet)"))]), list)
        t.usage["unreadable"] += found is None
        t.usage["proposals"] = found or []
    except ContextFull:
        t.ended = "context"
    finally:
        env.close()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def describe(pick: dict) -> str:
    """The signal in words."""
    return {"forgetting": "it solved this task before and no longer does",
            "boundary": "of several tries of one policy some succeed and some fail",
            "rare": f"it hardly ever does this: {pick.get('pattern')}"}[pick["signal"]]


def block(reply: str, kind: type):
    """The one JSON value of a reply's fenced block, of this kind; None if there is none."""
    found = re.findall(r"```(?:json)?\s*(.*?)```", reply, re.S)
    try:
        value = json.loads(found[0]) if len(found) == 1 else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, kind) else None
