"""Of 200 proposals, 60 of them wrong, how many join with and without --solve-check 8.

    python lab/bench/planted.py webshop RUN/sft-target       # or intercodesql

Proposals vary training tasks. A wrong one has another text: another's, its own turned round, "?".
"""

import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from accelerate import Accelerator

from lab import mutual
from lab.harness.settings import parse
from lab.program.start import open_run

KINDS = ("another's", "turned round", "?")
TURNS = {"lower": "higher", "above": "below", "below": "above", "highest": "lowest",
         "lowest": "highest", "list": "count", "many": "few"}
env, agent = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    s = parse(f"--env {env} --method evolve --warm-start none --start-tasks 200 --verify false "
              f"--solve-check 8 --threads 1 --out {folder}".split())
    run = open_run(replace(s, model=agent), Accelerator())
    generator, rng, rows = run.tasks.task_generator(), random.Random(0), []
    field = "instruction" if env == "webshop" else "query"
    while len(rows) < 200:
        for row in generator.vary(rng.choice(run.tasks.training), None, rng):
            kind, text = "right", row["text"]
            if len(rows) % 10 < 3:
                kind = KINDS[len(rows) % 10]
                turned = " ".join(TURNS.get(word, word) for word in text.split())
                text = dict(zip(KINDS, (rows[-1]["text"] if rows else "any", turned,
                                      f"? {len(rows)}")))[kind]
            rows.append(row | dict(text=text, task=row["task"] | {field: text}, kind=kind))
    run.folder.running = "planted"
    mutual.judge(run, generator, rows, 0)
    run.folder.close()
replayed = [row for row in rows if "solved" in row and not generator.verify(row)]
for name, joined in (("as they come", [row for row in rows if "solved" in row]),
                     ("solve-check", [row for row in rows if row["verdict"] == "added"]),
                     ("replayed", replayed),
                     ("both", [row for row in replayed if row["verdict"] == "added"])):
    print(f"{name:13}", *(f"{kind}: {n}," for kind, n in Counter(
        row["kind"] for row in joined).items()))
