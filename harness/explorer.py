"""Who goes back into the environment for new tasks: the agent itself, or a model at an endpoint.

What an endpoint says is data: its actions go through the environment's own reader, its proposals
are JSON that is read strictly and played before it counts; what cannot be read is counted.
"""

import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import envs
from dpo import Trajectory
from harness.endpoint import USAGE, ContextFull, Endpoint, explorer_of
from harness.kept import Kept
from harness.play import before_stops, play
from harness.settings import is_endpoint
from program.run import Run

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


def explore(run: Run, episodes: list[Trajectory], picks: list[dict], known: list[str],
            folder: Path) -> tuple[list[Trajectory], dict]:
    """Plays `episodes` as the explorer; them, and an endpoint's usage and unreadable answers.

    picks: the signals that lead it; known: texts of tasks; folder: the agent, as its own explorer.
    """
    s = run.settings
    if is_endpoint(s.explorer) and picks:
        inputs = run.folder.inputs()
        episodes = run.folder.on_main(lambda: ask_all(run, episodes, picks, known, inputs))
        run.log.dropped(run.folder.running, envs.LOST,
                        [t.task for t in episodes if t.ended == "lost"])
        return ([t for t in episodes if t.ended != "lost"],
                {name: sum(t.usage[name] for t in episodes) for name in TAKEN})
    return play(run, folder, episodes, s.explorer_temperature), {}


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


def abstract(smith, t: Trajectory, rng: random.Random) -> list[dict]:
    """The proposals {text, task, solution} that an explored episode becomes.

    Of an endpoint's those that cannot be read have no task: they are counted, never mended.
    """
    if t.usage is None:
        return smith.finds(t.task, replies(t), rng)
    rows = []
    for proposal in t.usage["proposals"]:
        found = proposal and smith.written(t.task, proposal)
        rows.append(found or dict(text=proposal["query"] if proposal else "", task=None,
                                  solution=[]))
    return rows


# -------------------------------------------------------------------------------- an endpoint

TAKEN = (*USAGE, "unreadable")


def ask_all(run: Run, episodes: list[Trajectory], picks: list[dict], known: list[str],
            inputs: str) -> list[Trajectory]:
    """Reflects on each pick, explores, and abstracts; in `usage` what it took and proposed.

    known: the texts of tasks that were made already. inputs: `Run.inputs`. An episode that the
    endpoint refuses for good ends "lost"; EnvError where too many are.
    """
    s, smith, known = run.settings, run.tasks.task_generator(), "\n".join(known)[-LONGEST:]
    endpoint = explorer_of(s)
    kept = Kept(run.folder.path / "playing/explorer.jsonl", [inputs])  # nothing is paid for twice
    episodes = kept.fill(episodes, 1, run.tasks.make_env)
    losses, lock = envs.Losses(len(episodes)), threading.Lock()

    def work(pick):
        context = None
        for t in (t for t in episodes if t.task == pick["task"]):
            if t.ended:  # in an earlier process
                context = t.usage["context"]
            else:
                t.usage = dict.fromkeys(TAKEN, 0) | dict(context=context, proposals=[])
                try:
                    if context is None:  # what it takes is counted with this episode
                        context, used = reflect(endpoint, pick)
                        t.usage |= dict(used, context=context)
                    ask(run, endpoint, smith, t, known)
                    with lock:
                        losses.answered()
                        kept.add(t)
                except envs.EnvError as error:
                    t.ended = "lost"
                    with lock:
                        losses.add(error)
            progress.update()

    with run.log.bar(run.folder.running, len(episodes), "episode") as progress, \
            ThreadPoolExecutor(min(s.slots, 8)) as threads:
        list(threads.map(work, picks))
    return episodes


def reflect(endpoint: Endpoint, pick: dict) -> tuple[dict | str, dict]:
    """What the endpoint makes of a signal and its evidence, else the signal; and what it took."""
    won = pick.get("success") or pick.get("success_then")
    evidence = "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}" for name, messages in
                           (("success", won), ("failure", pick["failure"])) if messages)
    try:
        said, used = endpoint([user(REFLECT.format(signal=describe(pick), evidence=evidence))])
    except ContextFull:
        return describe(pick), dict.fromkeys(TAKEN, 0) | dict(unreadable=1)
    found = blocks(said)
    read = len(found) == 1 and isinstance(found[0], dict)
    used = {name: used.get(name, 0) for name in TAKEN} | dict(unreadable=int(not read))
    return found[0] if read else describe(pick), used


def ask(run: Run, endpoint: Endpoint, smith, t: Trajectory, known: str) -> None:
    """One episode of the endpoint: actions, then proposals, each answer of it only data."""
    env = run.tasks.make_env()

    def say(messages):
        reply, used = endpoint(messages)
        for name in USAGE:
            t.usage[name] += used[name]
        return reply

    try:
        t.messages = envs.opening(env, env.reset(t.task))
        form = "" if env.prompt else f" Answer with the action and nothing else: {smith.actions}."
        first = user(ACT.format(context=json.dumps(t.usage["context"]), form=form,
                                opening=t.messages[0]["content"]))
        while not t.ended:
            reply = before_stops(say([first, *t.messages[1:]]), envs.STOPS["ours"]).strip()
            t.messages.append({"role": "assistant", "content": reply})
            step = env.step(reply)
            t.reward, t.steps = step.reward, t.steps + 1
            t.messages.append(user(step.observation))
            t.ended = "done" if step.done else "budget" if t.steps == env.max_steps else ""
        said = say([user(ABSTRACT.format(conversation=told(t.messages, LONGEST), form=smith.form,
                                         known=known or "(none yet)"))])
        for value in blocks(said):  # a list, or objects in blocks of their own
            t.usage["unreadable"] += value is None
            found = value if isinstance(value, list) else [] if value is None else [value]
            t.usage["proposals"] += map(proposal_of, found)
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
