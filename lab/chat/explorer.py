"""An explorer at a chat endpoint, which replaces the agent in the second system's exploration.

    --explorer https://host/v1 --explorer-model NAME

It interprets the signals, explores, and proposes tasks. Its output is data: the environment parses
its actions as it parses an agent's, its proposals are strict JSON, and a proposal counts only after
its solution has been played.
"""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import evolve
from coevolve import summarise
from common.files import read_jsonl
from common.settings import Stated, limited
from engine.records import write
from engine.run import Run
from environments import is_web_address
from evolve import by_one_rank, env_with, rows_of
from lab.chat.endpoint import ContextFull, Endpoint, NotAnswered
from lab.chat.evaluate import Paid, is_endpoint

LONGEST = 6000  # maximum characters of a conversation in a request [ours]
OPENING, TURN = 1500, 1000  # maximum characters of its first message, and of each other one
REPLY = 1024  # maximum tokens of a reply [ours]
LONGEST_REPLY = 20_000  # maximum characters of a reply that are parsed [ours]

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

WEAK = {"forgetting": "it solved this task before and no longer does",
        "boundary": "of several tries of one policy some succeed and some fail"}
OBJECT = re.compile(r'\{\s*"')  # start of an object; start of a proposal, not of an action in it:
PROPOSAL = re.compile(r'\{\s*"(intent|query|action_sequence)"')


def find_tasks(run: Run, i: int, agent: Path, task_set: list[Path], signals: list[Path]) -> Path:
    """Returns the file of proposals without verdicts, as `evolve.find_tasks` does. The explorer is
    the agent or an endpoint."""
    if not is_endpoint(run.settings.explorer):
        return evolve.find_tasks(run, i, agent, task_set, signals)
    contexts = []
    if signals and run.settings.guide == "signals":
        contexts = [run.once(f"iter{i}/contexts.jsonl", reflect, *signals, i=i)]
    explored = run.once(f"iter{i}/explored.jsonl", explore_there, task_set, signals, contexts, i=i)
    return run.once(f"iter{i}/finds.jsonl", write_tasks, task_set, explored, i=i)


# ---------------------------------------------------------------------------------- the phases


@by_one_rank
def reflect(run: Run, out: Path, signals: Path, i: int) -> dict:
    """Writes the endpoint's interpretation of each picked signal and its evidence. If the reply
    cannot be parsed, the name of the signal is written."""
    picks = evolve.picks_of([signals])
    prompts = [REFLECT.format(signal=weakness(pick), evidence=evidence(pick)) for pick in picks]
    replies, usage = ask_all(run, prompts)
    rows = []
    unreadable = 0
    for pick, reply in zip(picks, replies):
        contexts = [value for value in objects(reply or "") if value]
        unreadable += not contexts
        rows.append(dict(task=pick["task"], context=contexts[0] if contexts else weakness(pick)))
    write(run, out, rows)
    return usage | dict(unreadable=unreadable)


@by_one_rank
def explore_there(run: Run, out: Path, task_set: list[Path], signals: list[Path],
                  contexts: list[Path], i: int) -> dict:
    """Runs the episodes of `begin_exploring` at the endpoint. Refused episodes are dropped."""
    explorer = Player(run, {row["task"]: row["context"] for row in rows_of(contexts)})
    begun = evolve.begin_exploring(run, signals, 1, i)
    make_env = partial(env_with, run, rows_of(task_set))
    explorer.paid.play(begun, make_env, explorer.answer)
    kept = [t for t in begun if t.ended != "context_limit"]
    write(run, out, kept)
    numbers = summarise(kept, run.settings.hard_threshold) if kept else dict(episodes=0)
    return numbers | explorer.paid.spent() | dict(refused=len(begun) - len(kept))


@by_one_rank
def write_tasks(run: Run, out: Path, task_set: list[Path], explored: Path, i: int) -> dict:
    """Writes the tasks that the endpoint proposes after each episode, in random order, as rows
    {signal, source, text, task, solution}. A malformed proposal has no task. It is counted and
    never repaired."""
    d = rows_of(task_set)
    episodes = [evolve.Explored(**row) for row in read_jsonl(explored)]
    generator = env_with(run, d).task_generator()
    known = "\n".join(row["text"] for row in d if "text" in row)[-LONGEST:] or "(none yet)"
    prompt = partial(ABSTRACT.format, form=generator.form, known=known)
    prompts = [prompt(conversation=told(t.messages, LONGEST)) for t in episodes]
    replies, usage = ask_all(run, prompts)
    rows = []
    unreadable = 0
    for n in evolve.rng_of(run, "propose", i).sample(range(len(episodes)), len(episodes)):
        t = episodes[n]
        for value in objects(replies[n]) if replies[n] else []:
            if value is None:
                unreadable += 1
            else:
                proposal = written(generator, t.task, value)
                rows.append(dict(signal=t.signal, source=t.task, **proposal))
    write(run, out, rows)
    return usage | dict(finds=len(rows), unreadable=unreadable)


def endpoint_of(run: Run) -> Paid:
    s = run.settings
    return Paid(run, Endpoint(s.explorer, s.explorer_model, evolve.EXPLORER_TEMPERATURE, REPLY))


def reply_to(paid: Paid, what: tuple, prompt: str, rest: list[dict]) -> str | None:
    """Returns the reply to a conversation, which is a prompt and the turns after it, or None if the
    endpoint refuses it."""
    try:
        return paid.ask(what, [dict(role="user", content=prompt), *rest])["reply"]
    except (ContextFull, NotAnswered):
        return None


def ask_all(run: Run, prompts: list[str]) -> tuple[list[str | None], dict]:
    """Returns the replies to some prompts, and the usage of all requests."""
    paid = endpoint_of(run)
    works = [partial(reply_to, paid, (run.name, n), prompt, [])
             for n, prompt in enumerate(prompts)]
    return paid.side_by_side(works), paid.spent()


class Player:
    """Answers exploring episodes by the endpoint.

    Args:
        run: The run.
        contexts: What to look into, by task. A task without one is explored freely.
    """

    def __init__(self, run: Run, contexts: dict[str, dict | str]):
        self.paid = endpoint_of(run)
        self.contexts = contexts
        self.form = ""
        if not run.env.prompt:
            actions = run.env.task_generator().actions
            self.form = f" Answer with the action and nothing else: {actions}."

    def answer(self, asked: list) -> list:
        """Returns the next reply of one episode, or None if the endpoint refuses it."""
        (t, _), = asked
        opening, *rest = t.messages
        context = ""
        if t.task in self.contexts:
            context = f", above all:\n{json.dumps(self.contexts[t.task])}"
        prompt = ACT.format(context=context, form=self.form, opening=opening["content"])
        reply = reply_to(self.paid, (t.agent, t.iteration, t.task, t.rollout), prompt, rest)
        return [None if reply is None else (reply, [])]


# ------------------------------------------------------------------------- prompts and replies


def weakness(pick: dict) -> str:
    if "pattern" in pick:
        return f"it hardly ever does this: {pick['pattern']}"
    return WEAK.get(pick["signal"], pick["signal"])


def evidence(pick: dict) -> str:
    conversations = dict(success=pick.get("success") or pick.get("success_then"),
                         failure=pick["failure"])
    return "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}"
                       for name, messages in conversations.items() if messages)


def told(messages: list[dict], size: int) -> str:
    """Returns a conversation in at most `size` characters: the end of its first message, and the
    end of the rest."""
    opening, *rest = messages
    first = f"user: {opening['content'][-OPENING:]}"
    later = "".join(f"\n{m['role']}: {m['content'][:TURN]}" for m in rest)
    return first + later[-(size - len(first)):]


def objects(reply: str) -> list[dict | None]:
    """Returns the JSON objects in a reply, with None for each malformed or truncated one, and for a
    reply without any. After a malformed object only the start of a proposal counts, because an
    object inside the malformed one is not another proposal."""
    reply = reply[:LONGEST_REPLY]
    values = []
    position = 0
    opening = OBJECT
    while start := opening.search(reply, position):
        try:
            value, position = json.JSONDecoder().raw_decode(reply, start.start())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate
        except (ValueError, RecursionError):
            value = None
            position = max(position, start.end())
        values.append(value)
        opening = PROPOSAL if value is None else OBJECT
    return values or [None] * ("[]" not in reply)


def written(generator, task: str, value: dict) -> dict:
    """Returns the proposal {text, task, solution} of an object. The task of a malformed one is
    None."""
    query = value.get("query")
    actions = value.get("action_sequence")
    is_text = isinstance(query, str) and query.strip() and len(query) <= evolve.LONGEST_TEXT
    if not is_text or not isinstance(actions, list):
        return dict(text="", task=None, solution=[])
    actions = [action if isinstance(action, str) else json.dumps(action) for action in actions]
    proposal = generator.written(task, dict(query=query, action_sequence=actions))
    return proposal or dict(text=query, task=None, solution=[])


# ------------------------------------------------------------------------------------ settings

Who = limited(str, "must be policy, http://host:port/v1 or https://host/v1",
              lambda text: text == "policy" or is_web_address(text))


@dataclass(frozen=True)
class Explorer(evolve.Evolution, Stated):
    """The explorer"""
    # Explorer: "policy" (the agent itself) or a chat endpoint, https://host/v1 [ours; D: Qwen3-Max]
    explorer: Who = "policy"
    # Name of the explorer's model at its endpoint [none]
    explorer_model: Optional[str] = None

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (is_endpoint(s.explorer) and not s.explorer_model, "--explorer-model",
                 "give the explorer's name at its endpoint")]


METHODS = {name: method._replace(loop=partial(method.loop, find=find_tasks),
                                 reads=(*method.reads, "explorer", "explorer_model"))
           for name, method in evolve.METHODS.items()}  # the second system, with any explorer
