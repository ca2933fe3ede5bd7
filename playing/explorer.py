"""Who goes back into the environment for new tasks: the agent itself, or a model at an endpoint.

What an endpoint says is data: its actions go through the environment's own reader, its proposals
are JSON that is read strictly and played before it counts; what cannot be read is counted.
"""

import json
import random
import re
import threading
from pathlib import Path

from dpo import Trajectory
from harness.settings import is_endpoint
from playing import conversation
from playing.conversation import ContextFull
from playing.endpoint import explorer_of
from playing.episodes import play, play_at_endpoint

LONGEST = 6000  # characters of a conversation that the endpoint is shown [ours]
OPENING, TURN = 1500, 1000  # of them at most of its first message, and of another one

REFLECT = """\
An agent works in an environment. Here is where it is weak: {signal}.

{evidence}

Answer with one JSON object in a ```json block: "where" (the page, table or place that matters), \
"what" (what was done), "how" (how it failed or varied, and what the success did differently) and \
"try" (what somebody who goes back there should look into)."""

ACT = """\
You explore: you need not solve the task below, but find out what can be done around it, above all:
{context}

Do something that was not done there yet, one action a turn.{form}

{opening}"""

ABSTRACT = """\
Somebody explored an environment. This is what happened:

{conversation}

Write new tasks that a user could have had in mind for what was done, each concrete enough to be \
checked, without steps that only explore. {form} Do not repeat any of these:
{known}

Answer with a JSON list of objects in a ```json block, each with "intent" (the aim in a sentence), \
"query" (the text of the task), "confidence" (0 to 1) and "action_sequence" (the list of all \
actions, exactly as they have to be written, that solve it from the start)."""


def explore(run, episodes: list[Trajectory], picks: list[dict], known: list[str],
            folder: Path) -> tuple[list[Trajectory], dict]:
    """Plays `episodes` as the explorer; them, and an endpoint's usage and unreadable answers.

    picks: the signals that lead it; known: texts of tasks; folder: the agent, as its own explorer.
    """
    s = run.settings
    if not (is_endpoint(s.explorer) and picks):
        return play(run, folder, episodes, s.explorer_temperature), {}
    generator, known = run.tasks.task_generator(), "\n".join(known)[-LONGEST:]
    picks = {pick["task"]: pick for pick in picks}
    locks = {task: threading.Lock() for task in picks}

    def play_one(env, t, ask):
        t.usage |= dict(unreadable=0, context=None, proposals=[])
        with locks[t.task]:  # a signal is reflected on once, in the first of its episodes
            contexts = (e.usage["context"] for e in episodes if e.task == t.task and e.usage)
            t.usage["context"] = next(filter(None, contexts), None) or reflect(
                ask, t, picks[t.task])
        act_and_abstract(env, t, ask, generator, known)

    played, spent = play_at_endpoint(run, explorer_of(s), episodes, play_one)
    return played, spent | dict(unreadable=sum(t.usage["unreadable"] for t in played))


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


def abstract(generator, t: Trajectory, rng: random.Random) -> list[dict]:
    """The proposals {text, task, solution} that an explored episode becomes.

    Of an endpoint's those that cannot be read have no task: they are counted, never mended.
    """
    if t.usage is None:
        return generator.finds(t.task, replies(t), rng)
    rows = []
    for proposal in t.usage["proposals"]:
        found = proposal and generator.written(t.task, proposal)
        rows.append(found or dict(text=proposal["query"] if proposal else "", task=None,
                                  solution=[]))
    return rows


# -------------------------------------------------------------------------------- an endpoint

def reflect(ask, t: Trajectory, pick: dict) -> dict | str:
    """What the endpoint makes of a signal and its evidence, else the signal."""
    won = pick.get("success") or pick.get("success_then")
    evidence = "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}" for name, messages in
                           (("success", won), ("failure", pick["failure"])) if messages)
    try:
        said, _ = ask([user(REFLECT.format(signal=describe(pick), evidence=evidence))])
        found = blocks(said)
        if len(found) == 1 and isinstance(found[0], dict):
            return found[0]
    except ContextFull:
        pass
    t.usage["unreadable"] += 1
    return describe(pick)


def act_and_abstract(env, t: Trajectory, ask, generator, known: str) -> None:
    """One episode of the endpoint: actions, then proposals, each answer of it only data.

    known: the texts of tasks that were made already.
    """
    form = "" if env.prompt else f" Answer with the action and nothing else: {generator.actions}."

    def act(messages):
        opening, *rest = messages
        return ask([user(ACT.format(context=json.dumps(t.usage["context"]), form=form,
                                    opening=opening["content"])), *rest])[0]

    seen = conversation.play(env, t, act)
    if t.ended == "context":
        return
    try:
        said, _ = ask([user(ABSTRACT.format(
            conversation=told([*t.messages, user(seen)], LONGEST), form=generator.form,
            known=known or "(none yet)"))])
    except ContextFull:
        t.ended = "context"
        return
    for value in blocks(said):  # a list, or objects in blocks of their own
        t.usage["unreadable"] += value is None
        found = value if isinstance(value, list) else [] if value is None else [value]
        t.usage["proposals"] += map(proposal_of, found)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def describe(pick: dict) -> str:
    """The signal in words."""
    return {"forgetting": "it solved this task before and no longer does",
            "boundary": "of several tries of one policy some succeed and some fail",
            "rare": f"it hardly ever does this: {pick.get('pattern')}"}[pick["signal"]]


def told(messages: list[dict], most: int) -> str:
    """A conversation in at most so many characters: of its opening the end, which holds the task,
    and of the rest the end too."""
    opening, *rest = messages
    first = f"user: {opening['content'][-OPENING:]}"
    later = "".join(f"\n{m['role']}: {m['content'][:TURN]}" for m in rest)
    return first + later[-(most - len(first)):]


def blocks(reply: str) -> list:
    """The JSON values of a reply's fenced blocks; None for what cannot be read, or for no block.

    A fence that ends a block ends its line: in a JSON text, a line's end within is written as \\n.
    """
    return [json_of(text) for text in re.findall(r"^```(?:json)?(.*?)```[ \t]*$", reply,
                                                 re.S | re.M)] or [None]


def json_of(text: str):
    """An object or list of JSON that can be written again; else None."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # nor half a surrogate pair
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def proposal_of(value) -> dict | None:
    """A proposal's query and its actions as texts; None where it is of another form."""
    query = value.get("query") if isinstance(value, dict) else None
    actions = value.get("action_sequence") if isinstance(value, dict) else None
    if not (isinstance(query, str) and query.strip() and len(query) < 1000
            and isinstance(actions, list)):
        return None
    try:
        return dict(query=query, action_sequence=[
            action if isinstance(action, str) else json.dumps(action) for action in actions])
    except RecursionError:
        return None
