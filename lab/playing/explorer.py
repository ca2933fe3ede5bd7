"""Who goes back into the environment for new tasks: the agent itself, or a model at an endpoint.

What an endpoint says is data: its actions go through the environment's own reader, its proposals
are JSON that is read strictly and played before it counts; what cannot be read is counted.
"""

import json
import random
import re
import threading
from pathlib import Path

from lab.harness.settings import is_endpoint
from lab.playing import conversation
from lab.playing.conversation import ContextFull
from lab.playing.endpoint import explorer_of
from lab.playing.episodes import play, play_at_endpoint
from lab.tokens import Trajectory

LONGEST = 6000  # characters of a conversation that the endpoint is shown [ours]
OPENING, TURN = 1500, 1000  # of them at most of its first message, and of another one

REFLECT = """\
An agent works in an environment. Here is where it is weak: {signal}.

{evidence}

Answer with one JSON object in a ```json block: "where" (the page, table or place that matters), \
"what" (what was done), "how" (how it failed or varied, and what the success did differently) and \
"try" (what somebody who goes back there should look into)."""

ACT = """\
You explore: you need not solve the task below, but find out what can be done around it{context}.

Do something that was not done there yet, one action a turn.{form}

{opening}"""

ABSTRACT = """\
Somebody explored an environment. This is what happened:

{conversation}

Write new tasks that a user could have had in mind for what was done, each concrete enough to be \
checked, without steps that only explore. {form} Do not repeat any of these:
{known}

Answer with a JSON list of objects in a ```json block, each with "intent" (the aim in a sentence), \
"query" (the text of the task) and "action_sequence" (the list of all actions, exactly as they \
have to be written, that solve it from the start)."""

OBJECT = re.compile(r'\{\s*"')  # where one begins; one of a proposal's, not of an action in it:
PROPOSAL = re.compile(r'\{\s*"(intent|query|action_sequence)"')


def explore(run, episodes: list[Trajectory], picks: list[dict], known: list[str],
            folder: Path) -> tuple[list[Trajectory], dict]:
    """Plays `episodes` as the explorer; them, and an endpoint's usage and unreadable answers.

    picks: the signals that lead it, or none; known: texts of tasks; folder: the agent, if it is it.
    """
    s = run.settings
    if not is_endpoint(s.explorer):
        return play(run, folder, episodes, s.explorer_temperature), {}
    generator, known = run.tasks.task_generator(), "\n".join(known)[-LONGEST:]
    picks = {pick["task"]: pick for pick in picks}
    locks = {task: threading.Lock() for task in picks}

    def play_one(env, t, ask):
        t.usage |= dict(unreadable=0, context=None, proposals=[])
        if t.task in picks:
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
    return [proposal and generator.written(t.task, proposal) or dict(
        text=proposal["query"] if proposal else "", task=None, solution=[])
        for proposal in t.usage["proposals"]]


# -------------------------------------------------------------------------------- an endpoint

def reflect(ask, t: Trajectory, pick: dict) -> dict | str:
    """What the endpoint makes of a signal and its evidence, else the signal."""
    won = pick.get("success") or pick.get("success_then")
    evidence = "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}" for name, messages in
                           (("success", won), ("failure", pick["failure"])) if messages)
    try:
        said, _ = ask([user(REFLECT.format(signal=describe(pick), evidence=evidence))])
        if found := next(filter(None, objects(said)), None):
            return found
    except ContextFull:
        pass
    t.usage["unreadable"] += 1
    return describe(pick)


def act_and_abstract(env, t: Trajectory, ask, generator, known: str) -> None:
    """One episode of the endpoint: actions, then proposals; known: texts of tasks so far."""
    form = "" if env.prompt else f" Answer with the action and nothing else: {generator.actions}."
    led = f", above all:\n{json.dumps(t.usage['context'])}" if t.usage["context"] else ""

    def act(messages):
        opening, *rest = messages
        return ask([user(ACT.format(context=led, form=form, opening=opening["content"])),
                    *rest])[0]

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
    found = objects(said)
    t.usage["unreadable"] += found.count(None)
    t.usage["proposals"] += [proposal_of(value) for value in found if value is not None]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def describe(pick: dict) -> str:
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


def objects(reply: str) -> list[dict | None]:
    """The JSON objects in a reply; None for each that is broken or cut, or where nothing is said.

    After such a one the next begins as a proposal does: what stands in it is not another.
    """
    found, at = [], 0
    while start := (PROPOSAL if found[-1:] == [None] else OBJECT).search(reply, at):
        try:
            value, at = json.JSONDecoder().raw_decode(reply, start.start())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # half a surrogate pair
        except (ValueError, RecursionError):
            value, at = None, max(at, start.end())
        found.append(value)
    return found or [None] * ("[]" not in reply)


def proposal_of(value: dict) -> dict | None:
    """A proposal's query and its actions as texts; None where it is of another form."""
    query, actions = value.get("query"), value.get("action_sequence")
    if not (isinstance(query, str) and query.strip() and len(query) < 1000
            and isinstance(actions, list)):
        return None
    return dict(query=query, action_sequence=[
        action if isinstance(action, str) else json.dumps(action) for action in actions])
