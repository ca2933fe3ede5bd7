"""Reads the multi-turn tasks of BFCL v3 from the package bfcl-eval, and divides them into splits.
"""

import ast
import json
import random
import sys
from collections import Counter, defaultdict
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files

from common.files import read_jsonl
from common.settings import UsageError

PACKAGE = "bfcl-eval==2026.3.23"  # pinned, because the ground truths differ between versions

try:
    if version("bfcl-eval") != PACKAGE.partition("==")[2]:
        raise ImportError
    from bfcl_eval.constants import executable_backend_config as backend
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker  # noqa: F401
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import (  # noqa: F401
        trading_bot,
        travel_booking,
    )
except ImportError:
    raise UsageError(f"bfcl: the package {PACKAGE} is missing; install it with {sys.executable} "
                     f"-m pip install --no-deps {PACKAGE}") from None

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
SIZES = {"train": 100, "validation": 20, "test": 80}  # number of tasks, of 200 per category [ours]
# The user's message in a turn that makes new functions available [BFCL]
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"


def simulator_class(name: str) -> type:
    return getattr(import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)


@cache
def documents(name: str) -> dict[str, dict]:
    """Returns {function name: document} for a simulator.

    A document is a dict with "name", "description", "parameters" and "response".
    """
    rows = _rows(f"multi_turn_func_doc/{backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]}")
    return {row["name"]: row for row in rows}


@cache
def _entries(category: str) -> dict[str, dict]:
    rows = _rows(f"BFCL_v4_multi_turn_{category}.json")
    return {row["id"].removeprefix("multi_turn_").replace("_", "-"): row for row in rows}


def start_state(key: str) -> dict:
    """Returns the start state of the task CATEGORY-NUMBER.

    The start state is a dict with these keys:

        classes       the names of the simulators
        config        the initial states of the simulators, which a caller must copy to change them
        long_context  True for a task of the category "long_context"
    """
    category = key.rpartition("-")[0].replace("-", "_")
    entry = _entries(category)[key]
    return dict(classes=entry["involved_classes"], config=entry["initial_config"],
                long_context=category == "long_context")


def functions(start: str) -> dict[str, dict]:
    """Returns {function name: document} for all simulators of a start state."""
    documented = {}
    for simulator in start_state(start)["classes"]:
        documented |= documents(simulator)
    return documented


def prose(document: dict) -> str:
    """Returns a function's description without the simulator's description at its start."""
    return document["description"].rpartition("Tool description: ")[2].strip()


@cache
def tasks(category: str) -> dict[str, dict]:
    """Returns the tasks of a category, as a dict {CATEGORY-NUMBER: task}.

    A task is a dict with these keys:

        start   the key of the start state, for `start_state`
        turns   the user's messages, one for each turn
        calls   the ground truth, a list of calls {name, arguments} for each turn. A turn without
                calls in the ground truth is not checked.
        hidden  {turn: names of the functions that are hidden from the agent until this turn}
    """
    truths = _rows(f"possible_answer/BFCL_v4_multi_turn_{category}.json")
    tasks_by_key = {}
    for (key, entry), truth in zip(_entries(category).items(), truths):
        documented = functions(key)
        tasks_by_key[key] = dict(
            start=key,
            turns=[messages[0]["content"] if messages else MORE_FUNCTIONS
                   for messages in entry["question"]],
            calls=[[as_json(call, documented) for call in turn] for turn in truth["ground_truth"]],
            hidden=entry.get("missed_function", {}))
    return tasks_by_key


def as_json(call: str, documented: dict[str, dict]) -> dict:
    """Converts a ground-truth call from Python source code to a dict {name, arguments}."""
    node = ast.parse(call, mode="eval").body
    names = documented[node.func.id]["parameters"]["properties"]
    arguments = [*zip(names, node.args), *((k.arg, k.value) for k in node.keywords)]
    return dict(name=node.func.id,
                arguments={name: ast.literal_eval(value) for name, value in arguments})


@cache
def splits(category: str, published: bool) -> dict[str, dict[str, dict]]:
    """Returns the splits, as a dict {split: {key: task}}.

    The tasks are in a fixed random order, so that the first tasks of a split cover all domains,
    such as files, messages, trading and travel.
    """
    order = [(c, n) for c in (CATEGORIES if category == "all" else (category,))
             for n in range(200)]
    random.Random("the order of BFCL's tasks").shuffle(order)
    split_of, by_split = _split_of_numbers(), {split: {} for split in SIZES}
    for c, n in order:
        key = f"{c.replace('_', '-')}-{n}"
        for split in {split_of[n], "test"} if published else {split_of[n]}:
            by_split[split][key] = tasks(c)[key]
    return by_split


def _split_of_numbers() -> dict[int, str]:
    """Returns {task number: split} for the 200 tasks of a category. Tasks with identical start
    states are in the same split."""
    base, rng = list(_entries("base").values()), random.Random("BFCL's splits")
    same_start = defaultdict(list)
    for n, entry in enumerate(base):
        same_start[json.dumps(entry["initial_config"], sort_keys=True)].append(n)
    groups = sorted(rng.sample(list(same_start.values()), len(same_start)),
                    key=lambda group: base[group[0]]["involved_classes"])
    split_of = {}
    for group in groups:
        counts, total = Counter(split_of.values()), len(split_of) + len(group)
        split = max(SIZES, key=lambda split: SIZES[split] / 200 * total - counts[split])
        split_of |= dict.fromkeys(group, split)
    return split_of


def _rows(path: str) -> list[dict]:
    return read_jsonl(files("bfcl_eval") / "data" / path)
