"""The tasks of BFCL v3 multi-turn, as the package bfcl-eval brings them, and how they are split."""

import ast
import json
import random
import sys
from collections import Counter, defaultdict
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files

from environments import UsageError

PACKAGE = "bfcl-eval==2026.3.23"  # others hold other ground truths

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
    raise UsageError(f"bfcl: the package {PACKAGE} is not here; {sys.executable} -m pip install "
                  f"--no-deps {PACKAGE}") from None

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
SIZES = {"train": 100, "validation": 20, "test": 80}  # of a category's 200 tasks [ours]
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"  # BFCL's


def simulator_class(name: str) -> type:
    return getattr(import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)


@lru_cache(None)
def documents(name: str) -> dict[str, dict]:
    """The functions of a simulator, by name: description, parameters, response."""
    rows = _rows(f"multi_turn_func_doc/{backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]}")
    return {row["name"]: row for row in rows}


@lru_cache(None)
def _entries(category: str) -> dict[str, dict]:
    rows = _rows(f"BFCL_v4_multi_turn_{category}.json")
    return {row["id"].removeprefix("multi_turn_").replace("_", "-"): row for row in rows}


def start_state(key: str) -> dict:
    """Where the episodes of CATEGORY-NUMBER start; the config is everybody's: copy it."""
    category = key.rpartition("-")[0].replace("-", "_")
    entry = _entries(category)[key]
    return dict(classes=entry["involved_classes"], config=entry["initial_config"],
                long_context=category == "long_context")


def functions(start: str) -> dict[str, dict]:
    """Name -> document of the functions of a start state's simulators."""
    return {name: row for simulator in start_state(start)["classes"]
            for name, row in documents(simulator).items()}


def prose(document: dict) -> str:
    """What a function does, without what its simulator is."""
    return document["description"].rpartition("Tool description: ")[2].strip()


@lru_cache(None)
def tasks(category: str) -> dict[str, dict]:
    """CATEGORY-NUMBER -> task. start: a key for `start_state`. turns: what the user says. calls:
    the ground truth, for each turn a list of calls {name, arguments}; nothing is checked where it
    is empty. hidden: turn -> functions that are documented from that turn on."""
    truths = _rows(f"possible_answer/BFCL_v4_multi_turn_{category}.json")
    found = {}
    for (key, entry), truth in zip(_entries(category).items(), truths):
        known = functions(key)
        found[key] = dict(
            start=key,
            turns=[said[0]["content"] if said else MORE_FUNCTIONS for said in entry["question"]],
            calls=[[as_json(call, known) for call in turn] for turn in truth["ground_truth"]],
            hidden=entry.get("missed_function", {}))
    return found


def as_json(call: str, known: dict[str, dict]) -> dict:
    """A call of a ground truth, written in Python, as {name, arguments}; of literals alone."""
    node = ast.parse(call, mode="eval").body
    names = known[node.func.id]["parameters"]["properties"]
    given = [*zip(names, node.args), *((k.arg, k.value) for k in node.keywords)]
    return dict(name=node.func.id,
                arguments={name: ast.literal_eval(value) for name, value in given})


@lru_cache(None)
def splits(category: str, published: bool) -> dict[str, dict[str, dict]]:
    """Split -> key -> task, in an order that mixes the domains; `test` is all 200 if published."""
    wanted = [(c, n) for c in (CATEGORIES if category == "all" else (category,))
              for n in range(200)]
    random.Random("the order of BFCL's tasks").shuffle(wanted)
    sides, found = _sides(), {side: {} for side in SIZES}
    for c, n in wanted:
        key = f"{c.replace('_', '-')}-{n}"
        for side in {sides[n], "test"} if published else {sides[n]}:
            found[side][key] = tasks(c)[key]
    return found


def _sides() -> dict[int, str]:
    """The side of each of the 200 numbers; SIZES of each, equal start states on one."""
    base, rng = list(_entries("base").values()), random.Random("BFCL's splits")
    alike = defaultdict(list)
    for n, entry in enumerate(base):
        alike[json.dumps(entry["initial_config"], sort_keys=True)].append(n)
    groups = sorted(rng.sample(list(alike.values()), len(alike)),
                    key=lambda group: base[group[0]]["involved_classes"])
    sides = {}
    for group in groups:
        placed, done = Counter(sides.values()), len(sides) + len(group)
        side = max(SIZES, key=lambda side: SIZES[side] / 200 * done - placed[side])
        sides |= dict.fromkeys(group, side)
    return sides


def _rows(path: str) -> list[dict]:
    text = files("bfcl_eval").joinpath("data", path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
