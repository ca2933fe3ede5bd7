"""What ETO and IPR published, as it lies in their repositories: experts, lists of tasks, prompts.

    Yifan-Song793/ETO   WebShop and ScienceWorld      (Song et al. 2024)
    WeiminXiong/IPR     WebShop and InterCodeSQL      (Xiong et al. 2024)

Their texts stay in the user's copy. `Theirs` is how their code talks to an agent (--protocol eto).
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from textwrap import shorten
from typing import Literal

from common.settings import OldFile
from worlds import Options, Refused, World, converse, environment, opening


@dataclass(frozen=True)
class Published(Options):
    """The settings of an environment that ETO or IPR published something for."""
    # how an episode is told to an agent: by this project, or as ETO's code does (IPR's on
    # InterCodeSQL), with its lengths, stops, rates and rewards [ours]
    protocol: Literal["ours", "eto"] = "ours"
    # eto: folder of ETO's or IPR's prompts, eval_agent/prompt of their repository [-]
    prompts: OldFile = None

    def conflicts(self, s):
        eto = self.protocol == "eto"
        return [
            (eto != bool(self.prompts), "--protocol eto --prompts FOLDER",
             "give both; the folder is eval_agent/prompt of ETO's or IPR's repository"),
            (eto and (s.model == "tiny" or s.view == "short"), "--protocol eto",
             "the tiny model and --view short know this project's texts only; give --view full "
             "and another --model"),
            (eto and s.method in ("grpo", "evolve"), f"--protocol eto --method {s.method}",
             "its explorers know this project's texts only; leave out one of them")]


STEMS = {"webshop": "webshop", "scienceworld": "sciworld", "intercodesql": "intercode_sql"}
# A reply ends before one of these [ETO's agents; ours].
STOPS = {"eto": ("\nObservation:", "\nTask:", "\n---"), "ours": ("Observation:",)}
NO_ACTION = "Invalid format. The input must contains 'Action: '"  # as their environments answer
NO_SQL_ACTION = (
    "I don't understand your input.\n Your input shoud include the key world \"Action:\".\n If you "
    "want to perform a query operation, please use the following format:\n Action: \n```sql\nthe "
    "mysql code\n```. And the action should be executable and should not contain natural "
    "language.\n If you have got the final answer, please use the following format:\n Action: "
    "submit. Remember your output should contain only one \"Action:\" part.")


@dataclass(frozen=True)
class Theirs:
    """How ETO's code (IPR's, on InterCodeSQL) talks to an agent; the table in the docs has all."""
    env: str
    instruction: str
    examples: list[list[dict]]  # conversations that an agent is shown which plays

    def opening(self, observation: str, playing: bool) -> list[dict]:
        """The instruction and "OK", the examples (which nobody is trained on), then the task."""
        turns = [{"role": "user", "content": self.instruction},
                 {"role": "assistant", "content": "OK"}]
        turns += [dict(turn) for example in self.examples for turn in example] if playing else []
        return [*turns, {"role": "user",
                         "content": observation if playing else self.bare(observation)}]

    def action(self, reply: str) -> str | None:
        """All that follows the first "Action: ", so the first of several actions; None without."""
        found = re.search(r"Action: (.*)", reply.strip(), re.S)
        return found and found[1]

    def observation(self, text: str) -> str:
        return ("Observation:\n" if self.env == "webshop" else "Observation: ") + text

    @property
    def no_action(self) -> str:
        return "Observation: " + (NO_SQL_ACTION if self.env == "intercodesql" else NO_ACTION)

    @staticmethod
    def bare(observation: str) -> str:
        """Without what their code writes before it."""
        return re.sub(r"^(Observation|Task Description):\s*", "", observation)


def read_prompts(folder: str, env: str, examples: int) -> Theirs:
    """The instruction and the first examples for an environment in a copy of their `prompt/`."""
    inst, icl = f"instructions/{STEMS[env]}_inst.txt", f"icl_examples/{STEMS[env]}_icl.json"
    with reading(f"--prompts {folder}", "ETO's or IPR's eval_agent/prompt, with a text in "
                 f"{inst} and a JSON list of {examples} conversations or more in {icl}"):
        instruction = Path(folder, inst).read_text(encoding="utf-8")
        kept = read_json(Path(folder, icl))[:examples] if examples else []
        [kept[n][0]["content"] for n in range(examples)]  # IndexError: there are fewer
    return Theirs(env, instruction, kept)


@contextmanager
def reading(where: str, must: str):
    """Whatever is wrong with a user's file is Refused in a line, with what it must be."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} "
        raise Refused(f"{where}: {kind}{shorten(str(error), 200)}; it must be {must}") from None


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_experts(path: str, env) -> list[tuple[str, list[dict], float]]:
    """(task, messages, reward) of each trajectory in a file, a run's experts.jsonl or a list that
    ETO or IPR published; Refused naming the entry."""
    where, found = f"--experts {path}", {}
    must = "ETO's JSON list or a run's experts.jsonl, of this environment's tasks"
    with reading(where, must):
        text = Path(path).read_text(encoding="utf-8")
        listed = text.lstrip().startswith("[")
        rows = json.loads(text) if listed else text.strip().split("\n")
    for n, row in enumerate(rows):
        with reading(f"{where}, {f'entry {n}' if listed else f'line {n + 1}'}", must):
            row = row if listed else json.loads(row)
            task, messages, reward = (published(row, env) if "conversations" in row else
                                      (row["task"], row["messages"], row["reward"]))
            while messages[-1]["role"] == "user":  # what followed the last action
                messages.pop()
            messages[len(opening(env, ""))]["content"]  # IndexError: there is no reply
            env.find(task)
            if [m["role"] for m in messages] != ["user", "assistant"] * (len(messages) // 2):
                raise ValueError("its turns are not user and assistant in turn")
            if not 0 <= reward <= 1:
                raise ValueError(f"reward {reward} is not in [0, 1]")
            if task in found:
                raise ValueError(f"{task} is there twice")
            found[task] = task, messages, float(reward)
    return list(found.values())


def published(row: dict, env) -> tuple[str, list[dict], float]:
    """Task, messages and reward (1 where it is not known) of an entry of ETO's or IPR's list. It
    opens as rollouts do: by our own protocol the environment's prompt replaces its rules."""
    task, roles = published_task(env, str(row["id"])), {"human": "user", "gpt": "assistant"}
    messages = [{"role": roles[turn["from"]], "content": turn["value"]}
                for turn in row["conversations"]]
    has_rules = "Action:" not in messages[1]["content"]
    rules, (first, *rest) = messages[:2 * has_rules], messages[2 * has_rules:]
    begins = opening(env, Theirs.bare(first["content"]))
    if env.theirs:
        begins = [*(rules or begins[:-1]), begins[-1]]
    else:
        rest = [{**m, "content": Theirs.bare(m["content"])} if m["role"] == "user" else m
                for m in rest]
    return task, [*begins, *rest], row.get("reward", 1.0)


def published_task(env, id: str) -> str:
    """The training task that an id ends in: its number, or those of its type and its variation."""
    *_, kind, number = ["", *re.findall("[0-9]+", id)]
    kind = f"{env.published_types[int(kind)]}-" if env.published_types else ""
    return f"{env.name}-train-{kind}{int(number)}"


def opens_otherwise(env, messages: list[dict], shown: str) -> tuple[str, str] | None:
    """What an expert and the environment show of a task, from where they part, if they do; but for
    rules, the words before an observation and what a server draws at each start."""
    def said(text):
        return " ".join(re.sub(env.drawn_anew, "", Theirs.bare(text.strip())).lower().split())

    told = messages[len(opening(env, "")) - 1]["content"]
    told, here = told.removeprefix(f"{env.prompt}\n\n"), said(shown)
    parts = told.split("\n\n")
    if any(said("\n\n".join(parts[n:])) == here for n in range(len(parts))):
        return None
    there = said(told)
    start = max(0, len(commonprefix([there, here])) - 40)
    return there[start:start + 160], here[start:start + 160]


def make(name: str, view: str = "full", examples: int = 1, **options) -> World:
    """The environment called `name`. view: "full", the official text, or "short". examples: that an
    agent is shown by ETO's protocol. options: the fields of the environment's `Options`."""
    chosen = environment(name)(**options)
    env = chosen.make(view)
    if chosen.protocol == "eto":
        env.theirs = read_prompts(chosen.prompts, name, examples)
    env.stops = STOPS[chosen.protocol]  # a reply ends before one of these texts
    return env


def experts(env: World, file: str | None, count: int) -> Iterator[tuple[str, list[dict], float]]:
    """(task, messages, reward) of `count` experts (0: all) of a file, else the scripted ones.
    Refused, naming the entry, where it is none, or its task opens otherwise here."""
    if not file:
        for task in env.tasks("train")[:count or None]:
            yield task, *converse(env, env.reset(task), env.expert())
        return
    for task, messages, reward in read_experts(file, env)[:count or None]:
        if apart := opens_otherwise(env, messages, env.reset(task)):
            raise Refused(f"--experts {file}: {task} is another task here. It opens there | here: "
                          f"{apart[0]!r} | {apart[1]!r}; give the environment and the --view that "
                          "these experts were made in, or experts of this one")
        yield task, messages, reward


def read_lists(folder: str | None, rule: dict, names: dict[str, str], read: Callable,
               must: str) -> dict[str, list]:
    """split -> tasks: those of `rule`, or of the published NAME_indices.json in a folder; names:
    split -> NAME. read(entry) is a task, or None for one that is left out. The validation tasks
    stay the rule's, without the listed ones."""
    found = {}
    for split, name in names.items() if folder else ():
        file = Path(folder, f"{name}_indices.json")
        with reading(f"--split-file {file}", must):
            entries = dict.fromkeys(map(read, read_json(file)))
            found[split] = [task for task in entries if task is not None]
            if not found[split]:
                raise ValueError("it has no task for these settings")
    listed = {task for tasks in found.values() for task in tasks}
    return rule | dict(validation=[t for t in rule["validation"] if t not in listed]) | found
