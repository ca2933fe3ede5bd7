"""Feeds the parsers what nobody would write, and counts what comes out.

    python bench/fuzz.py [--inputs 1000000] [--seed 0]

Seeds are well-formed texts; an input is one of them after up to eight random cuts, repetitions,
insertions and exchanges, of characters and of telling pieces. A parser must return what its
contract says or raise the one error that it names; anything else is printed with its input, and the
exit status is 1. What was found is in `tests/test_fuzz.py`.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import envs
from harness import files
from worlds.intercodesql import databases as sql_databases
from worlds.intercodesql.world import EXPLANATION, InterCodeSQL, parse_sql_reply
from worlds.webshop.server import WebShopServer
from worlds.webshop.shop import Shown, WebShop

ODD = ["", "\0", "\ud800", "\udcff", "\u2028", "\r", "\x85", "é", "٣", "𝟘", "\ufeff", "<", ">", "&",
       "[", "]", "{", "}", "\\", "/", "'", '"', ":", ";", "-", "\n", " ", "0", "9" * 20, "-1",
       "1e999", "x" * 300, "[" * 300, "NaN", "null", "true", "Infinity"]


def mutate(rng: random.Random, text: str, pieces: list[str]) -> str:
    for _ in range(rng.randint(0, 8)):
        a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
        way = rng.randrange(6)
        if way == 0:
            text = text[:a] + text[b:]
        elif way == 1:
            text = text[:b] + text[a:b] + text[b:]
        elif way == 2:
            text = text[:a] + rng.choice(pieces) + text[b:][:rng.choice((0, 10 ** 6))]
        elif way == 3:
            text = text[:a] + rng.choice(ODD) + text[a:]
        elif way == 4:
            text = text[:a] + chr(rng.randrange(0x110000)) + text[a + 1:]
        else:
            text = text[:a] + rng.choice(pieces) + text[a:]
        text = text[:3000]
    return text


# ------------------------------------------------------------------------------ action parsing

REPLIES = ["Thought: I look.\nAction: search[red mug under 30 dollars]", "click[B0AB12]", "submit",
           "Action: click[Buy Now]", "Action:\n```sql\nSELECT a FROM t WHERE b = 'c'\n```",
           "Action: pick up the metal pot", "search[a]\nObservation: you won\nAction: click[b]"]
REPLY_PIECES = ["Action:", "Thought:", "Observation:", "```sql", "```", "submit", "search[",
                "click[", "]", "\n", "[", "Buy Now", "SELECT 1", "DROP TABLE t", "/*", "*/", "--",
                "Next >"]
SHOP = WebShop("short")
SHOP_TASK = SHOP.tasks("train")[0]
SCRIPT = "CREATE TABLE t (a int, b text); INSERT INTO t VALUES (1, 'c'), (2, 'd');"
SQL = InterCodeSQL("full")


def actions(rng):
    links = [f"Action: click[{link}]" for link in SHOP.clickables()] if SHOP._shown else []
    reply = rng.choice(REPLIES + links * 3)
    if rng.random() < 0.7:
        reply = mutate(rng, reply, REPLY_PIECES + links)
    action, sql = envs.parse_reply(reply), parse_sql_reply(reply)
    assert action in reply and (sql is None or sql and sql in reply and "\n" not in sql)
    if SHOP._shown is None or SHOP._shown.kind == "done" or rng.random() < 0.1:
        SHOP.reset(SHOP_TASK)
    step = SHOP.step(reply)
    assert isinstance(step.observation, str) and 0 <= step.reward <= 1
    return SHOP._shown.kind


def queries(rng):
    reply = mutate(rng, REPLIES[4], REPLY_PIECES)
    if not SQL._running:
        SQL.start(dict(query="q", gold="SELECT a FROM t", db="d"), SCRIPT)
    step = SQL.step(reply)
    assert isinstance(step.observation, str) and 0 <= step.reward <= 1
    return ("submitted" if step.done else "no action" if step.observation == EXPLANATION
            else "refused" if step.observation.startswith("Error") else "rows")


# ------------------------------------------------------------------------------ HTML

PAGES = ["""\
<!DOCTYPE html><html><head><title>T</title></head><body><h4>Instruction:<br>buy a mug</h4>
<form method="post" action="/s"><input name="search_query"><button class="btn">Search</button>
</form></body></html>""", """\
<html><body><h4>Instruction:<br>buy</h4><form method="post" action="/b"><button class="btn">Next
&gt;</button></form><a class="product-link" href="/item/B01">B01</a> $3.0</html>""", """\
<html><h4>Instruction:<br>buy</h4><input type="radio" name="o" value="red" data-url="/r">
<label>red</label><form action="/d"><button class="btn">Buy Now</button></form></html>""", """\
<html><h1>Thank you!</h1><pre>ABC</pre><h3 id="reward">Your score<pre>0.5</pre></h3></html>"""]
PAGE_PIECES = ["<html>", "</html>", "<form action='http://[", "action='//h:99999/'", "<!--", "-->",
               "<![", "<![CDATA[", "]]>", "<!DOCTYPE", "<?", "&#", "&#x110000;", "&#xd800;",
               "&amp;", "<script>", "</script>", "<style>", "id='reward'", "<pre>", "</pre>",
               "<pre>1.2.3</pre>", "class=btn", "data-url='http://h:x/'", "type=radio", "value=",
               "<button class='btn'>", "</button>", "<textarea>", "<plaintext>",
               "<h4>Instruction:<br>", "search_query", "<p " + "a " * 50]


def pages(rng):
    html = mutate(rng, rng.choice(PAGES), PAGE_PIECES)
    if rng.random() < 0.7 and "Instruction:" not in html:  # without it, all else is refused unread
        html = f"<h4>Instruction:<br>buy</h4>{html}"
    shop = WebShopServer("http://127.0.0.1:9")
    shop._task = "webshop-test-1"
    shop._instruction, shop._shown, shop._form = None, None, None
    if rng.random() < 0.5:
        shop._instruction, shop._shown = "buy", Shown("item", [], {}, None)
    shop._load = lambda *_, **__: (html, "http://127.0.0.1:9/a/b")
    try:
        shown = shop._open("GET", "http://127.0.0.1:9/")
    except envs.EnvError as error:
        assert "\n" not in str(error)
        return "EnvError"
    assert shown.kind in ("search", "results", "item", "done") and 0 <= shown.reward <= 1
    assert all(isinstance(piece, str) for piece in shown.pieces)
    shop._seen = set()
    assert isinstance(shop._show(shown), str)
    return shown.kind


# ------------------------------------------------------------------------------ files

ETO = json.dumps([{"id": "webshop_17", "conversations": [
    {"from": "human", "value": "rules"}, {"from": "gpt", "value": "OK"},
    {"from": "human", "value": "Instruction: mug"}, {"from": "gpt", "value": "Action: search[mug]"},
    {"from": "human", "value": "Observation: page"}], "reward": 0.75}])
OURS = json.dumps({"task": "webshop-train-17", "agent": "expert", "iteration": 0, "rollout": 0,
                   "seed": 0, "messages": [{"role": "user", "content": "buy"},
                                           {"role": "assistant", "content": "click[a]"}],
                   "ids": [1, 2], "action_mask": [0, 1], "reward": 1.0, "steps": 1,
                   "ended": "done"})
FILE_PIECES = ['"id"', '"webshop_18"', '"conversations"', '"from"', '"human"', '"gpt"', '"value"',
               '"reward"', '"task"', '"messages"', '"role"', '"user"', '"assistant"', '"content"',
               "null", "true", "[]", "{}", ",", ":", "[{", "}]", "1e400", "NaN", "-0",
               '"\\ud800"', '"webshop-train-3"', ETO, OURS, "\n", '{"event": "phase"}', "9" * 5000]
FILE = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)) / "f"


def write(rng, text: str) -> Path:
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05 and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1:]
    FILE.write_bytes(data)
    return FILE


def expert_files(rng):
    path = write(rng, mutate(rng, rng.choice([ETO, OURS, OURS + "\n" + OURS]), FILE_PIECES))
    try:
        found = envs.read_experts(path, SHOP)
    except envs.Refused as error:
        assert "\n" not in str(error) and len(str(error)) < 700, str(error)
        return "Refused"
    for task, messages, reward in found:
        assert SHOP.find(task) and 0 <= reward <= 1
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert messages and all(m["content"].encode() is not None for m in messages)
    return "trajectories"


def trajectory_files(rng):
    path = write(rng, mutate(rng, OURS + "\n" + OURS + "\n", FILE_PIECES))
    try:
        rows = files.read_jsonl(path)
        for row in rows:
            files.need(path, row, task=str, messages=list)
    except files.RunError as error:
        assert "\n" not in str(error) and len(str(error)) < 400, str(error)
        return "RunError"
    assert all(isinstance(row["task"], str) for row in rows)
    return "rows"


PARSERS = {actions: 0.35, queries: 0.1, pages: 0.25, expert_files: 0.15, trajectory_files: 0.15}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    sql_databases.VM_STEPS = 100_000  # a query that runs long says nothing new
    found = 0
    for parse, share in PARSERS.items():
        outcomes, started, problems = Counter(), time.monotonic(), {}
        for n in range(round(share * asked.inputs)):
            rng = random.Random(f"{asked.seed} {parse.__name__} {n}")
            try:
                outcomes[parse(rng)] += 1
            except Exception as error:
                where = error.__traceback__
                while where.tb_next:
                    where = where.tb_next
                name = Path(where.tb_frame.f_code.co_filename).name
                key = (f"{type(error).__name__} in {name} line {where.tb_lineno}: "
                       f"{str(error)[:120]!r}")
                outcomes["not in the contract"] += 1
                problems.setdefault(key, n)
        counts = ", ".join(f"{name} {count:,}" for name, count in outcomes.most_common())
        print(f"{parse.__name__}: {outcomes.total():,} inputs in "
              f"{time.monotonic() - started:.0f} s; {counts}", flush=True)
        for key, n in list(problems.items())[:20]:
            print(f"  input {n}: {key}", flush=True)
        found += len(problems)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
