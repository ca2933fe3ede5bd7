"""InterCodeSQL: reward, replies, databases in sqlite and on a real MariaDB, hostile queries."""

import datetime
import decimal
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
import torch
from conftest import make_model, make_tokenizer

import coevolve
import dpo
import envs
from harness import settings, start, tiny
from harness.play import rollout
from worlds.intercodesql import databases
from worlds.intercodesql import questions as sql_questions
from worlds.intercodesql import spider as sql_spider
from worlds.intercodesql.world import (
    EXPLANATION,
    InterCodeSQL,
    kendall_tau,
    parse_sql_reply,
    sql_reward,
)

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "intercode"


@pytest.fixture(scope="module")
def intercode():
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent: the project does not ship it")
    return DATA


@pytest.fixture(scope="module", params=["full", "short"])
def env(request):
    env = envs.make("intercodesql", request.param)
    yield env
    env.close()


# ------------------------------------------------------------------------------ reward

def cell(value):
    if not isinstance(value, dict):
        return value
    [(kind, text)] = value.items()
    return {"float": float, "decimal": decimal.Decimal, "bytes": bytes.fromhex,
            "datetime": datetime.datetime.fromisoformat, "date": datetime.date.fromisoformat,
            "timedelta": lambda arguments: datetime.timedelta(**arguments)}[kind](text)


def rows(value):
    if isinstance(value, dict):  # {"text": ...} or {"none": true}
        return value.get("text")
    return [tuple(map(cell, row)) for row in value]


def test_reward_agrees_with_the_official_reward_on_all_vectors(intercode):
    vectors = json.loads((intercode / "reward_vectors.json").read_text())
    assert len(vectors) == 150
    for v in vectors:
        assert sql_reward(rows(v["agent"]), rows(v["gold"])) == v["reward"], v


@pytest.mark.parametrize("agent, gold, reward", [
    ([], [], 1.0),
    ([], [(1,)], 0.0),
    ("Error executing query: x", [], 0.0),           # a text is never an answer
    (None, [], 0.0),
    ([(1,)], [(1,), (2,), (3,)], 1 / 3),              # one common row has no order: not rounded
    ([(1,), (2,)], [(1,), (2,)], 1.0),
    ([(2,), (1,)], [(1,), (2,)], -1.0),               # the order counts, whatever was asked
    ([(1,), (2,), (3,)], [(1,), (3,), (2,)], 0.33),   # tau = (2 - 1) / 3
    ([(9,), (10,)], [(10,), (9,)], -1.0),             # as text '(10,' is before '(9,'
    ([(1,), (1,)], [(1,)], 1 / 2),                    # multisets
    ([(1.0,)], [(1,)], 0.0),                          # 1.0 and 1 are different texts
    ([(1, "a")], [("a", 1)], 0.0),                    # columns in order
    ([(1,), (2,), (3,), (4,)], [(1,), (2,)], 0.5),    # tau 1 over the two common rows, 2/4
])
def test_reward_on_hand_worked_cases(agent, gold, reward):
    assert sql_reward(agent, gold) == pytest.approx(reward, abs=1e-12)


def test_tau_b_agrees_with_its_definition():
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randint(2, 12)
        a, b = ([rng.choice("abcde") for _ in range(n)] for _ in range(2))
        pairs = [(i, j) for i in range(n) for j in range(i)]
        sign = lambda t, i, j: (t[i] > t[j]) - (t[i] < t[j])
        up = sum(sign(a, i, j) * sign(b, i, j) for i, j in pairs)
        na, nb = (sum(sign(t, i, j) != 0 for i, j in pairs) for t in (a, b))
        if na and nb:
            assert kendall_tau(a, b) == pytest.approx(up / (na * nb) ** 0.5, abs=1e-12)


# ------------------------------------------------------------------------------ replies

@pytest.mark.parametrize("reply, sql", [
    ("Thought: x\nAction: \n```sql\nSELECT 1\n```", "SELECT 1"),
    ("Action: ```sql SELECT 1 ```", "SELECT 1"),
    ("Action:\n```sql\nSELECT 1\nFROM t\n```", "SELECT 1"),           # the first line alone
    ("Action:\n```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", "SELECT 1"),
    ("Action:\n```sql\nSELECT 1\n```\nAction:\n```sql\nSELECT 2\n```", "SELECT 1"),
    ("```sql\nSELECT 2\n```\nAction:\n```sql\nSELECT 1\n```", "SELECT 1"),  # before Action: nothing
    ("Action: submit", "submit"),
    ("Action:submit.", "submit"),
    ("Thought: I submit.\nAction:\n```sql\nSELECT 1\n```", "SELECT 1"),
    ("Action:\n```sql\nSELECT submit_date FROM t\n```", "submit"),    # as officially
    ("Action:\n```sql\nSELECT 1\n```\nAction: submit", "submit"),
    ("Action: Submit", None),                                          # and so is this
    ("Action:\n```SQL\nSELECT 1\n```", None),
    ("Action:\n```\nSELECT 1\n```", None),
    ("Action:\n```sql\nSELECT 1", None),                               # not closed
    ("Action:\n```sql\n```", None),
    ("Action: SELECT 1", None),
    ("SELECT 1", None), ("```sql\nSELECT 1\n```", None), ("submit", None), ("", None),
])
def test_replies_are_read_as_the_official_agents_read_them(reply, sql):
    assert parse_sql_reply(reply) == sql


def act(sql):
    return f"Thought: t\nAction: {sql}" if sql == "submit" else f"Action:\n```sql\n{sql}\n```"


@pytest.fixture
def small():
    """start(query's gold) -> an environment over two small tables."""
    env = envs.make("intercodesql")
    script = ("CREATE TABLE town (town_id int PRIMARY KEY, site varchar(20) NOT NULL, area int);\n"
              "INSERT INTO town VALUES (1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10);\n"
              "CREATE TABLE baker (name text DEFAULT 'Bo', town_id int, pay decimal(10,2),"
              " FOREIGN KEY (town_id) REFERENCES town (town_id));\n"
              "INSERT INTO baker VALUES ('Ann', 1, 5), ('Bob', 2, 7);\n")

    def start(gold="SELECT site FROM town"):
        env.start(dict(query="which towns?", gold=gold, db="d"), script)
        return env

    yield start
    env.close()


@pytest.mark.parametrize("sql, observation", [
    ("SHOW TABLES", "[('baker',), ('town',)]"),
    ("show tables;", "[('baker',), ('town',)]"),
    ("DESC town", "[('town_id', 'int', 'NO', 'PRI', None, ''), ('site', 'varchar(20)', 'NO', '', "
                  "None, ''), ('area', 'int', 'YES', '', None, '')]"),
    ("DESCRIBE `baker`", "[('name', 'text', 'YES', '', \"'Bo'\", ''), ('town_id', 'int', 'YES', "
                         "'MUL', None, ''), ('pay', 'decimal(10,2)', 'YES', '', None, '')]"),
    ("SELECT site, area FROM town WHERE area > 15", "[('Avon', 30), ('Brill', 20)]"),
    ("SELECT site FROM town WHERE area > 90", "[]"),
    ("SELECT x FROM town", "Error executing query: Unknown column 'x' in 'field list'"),
    ("SELECT site FROM town WHERE x = 1", "Error executing query: Unknown column 'x' in "
                                          "'where clause'"),
    ("SELECT site FROM town ORDER BY x", "Error executing query: Unknown column 'x' in "
                                         "'order clause'"),
    ("SELECT * FROM towns", "Error executing query: Table 'd.towns' doesn't exist"),
    ("DESC towns", "Error executing query: Table 'd.towns' doesn't exist"),
    ("SELECT town_id FROM town JOIN baker ON area > pay",
     "Error executing query: Column 'town_id' in field list is ambiguous"),
    ("SELECT f(area) FROM town", "Error executing query: FUNCTION d.f does not exist"),
    ("SELECT site FROM FROM town", "Error executing query: You have an error in your SQL syntax; "
     "check the manual that corresponds to your MySQL server version for the right syntax to use "
     "near 'FROM town' at line 1"),
    ("SELECT site FROM town WHERE MAX(area) > 1", "Error executing query: Invalid use of group "
                                                  "function"),
])
def test_sqlite_answers_as_mysql(small, sql, observation):
    assert small().step(act(sql)).observation == observation


def test_observations_are_cut_at_350_characters_and_the_result_is_not(small):
    env = small(gold="SELECT a.site, b.site, c.site FROM town a, town b, town c")
    step = env.step(act("SELECT a.site, b.site, c.site FROM town a, town b, town c"))
    assert len(step.observation) == 353 and step.observation.endswith("...")
    assert env.step(act("submit")).reward == 1


def test_the_last_result_is_what_is_submitted(small):
    env = small()
    env.step(act("SELECT site FROM town"))
    assert env.step("no action").observation == EXPLANATION  # changes nothing
    assert env.step(act("submit")) == envs.Step("submitted", 1.0, True, 1.0)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(act("submit"))
    env = small()
    env.step(act("SELECT site FROM town"))
    env.step(act("DESC town"))  # a look after the right query loses
    assert env.step(act("submit")).reward == 0
    env = small(gold="SELECT nothing FROM town")  # a gold that fails is an empty result
    env.step(act("SELECT site FROM town WHERE area > 90"))
    assert env.step(act("submit")).reward == 1
    assert small().step(act("submit")).reward == 0  # nothing was asked


def test_a_negative_reward_is_clipped_and_kept(small):
    env = small()
    env.step(act("SELECT site FROM town ORDER BY site DESC"))
    assert env.step(act("submit")) == envs.Step("submitted", 0.0, True, -1.0)


# ------------------------------------------------------------------------------ the embedded world

def play(env, task):
    observation, expert, texts = env.reset(task), env.expert(), []
    for _ in range(env.max_steps):
        reply = expert(observation)
        step = env.step(reply)
        texts += [observation, reply]
        observation = step.observation
        if step.done:
            break
    return step.reward, texts


@pytest.mark.parametrize("split", ["train", "validation", "test", "unseen"])
def test_expert_replays_to_1(env, split):
    assert all(play(env, task)[0] == 1 for task in env.tasks(split))


def test_splits_share_no_database_and_unseen_shares_no_noun():
    world = sql_questions.sql_world()
    assert {k: len(v) for k, v in world.questions.items()} == {
        "train": 1000, "validation": 300, "test": 300, "unseen": 200}
    names = {s: {q["db"] for q in qs.values()} for s, qs in world.questions.items()}
    keys = {s: {sql_questions.schema_key(world.databases[n]) for n in names[s]} for s in names}
    for a in names:
        assert len(keys[a]) == len(names[a])
        assert not any(names[a] & names[b] or keys[a] & keys[b] for b in names if b != a)
    for split, questions in world.questions.items():
        words = set(re.findall(r"\w+", " ".join(q["query"] for q in questions.values())))
        held_out = {f"{noun}s" for noun in sql_questions.HELD_OUT}
        assert words & held_out == (held_out if split == "unseen" else set())
    assert len({(q["db"], q["query"]) for qs in world.questions.values()
                for q in qs.values()}) == 1800


def test_doing_without_the_condition_earns_little():
    env = envs.make("intercodesql")
    for task in env.tasks("train"):
        env.reset(task)
        gold = env._question["gold"]
        if " WHERE " in gold and "(" not in gold.split(" FROM ")[0]:
            env.step(act(re.sub(" WHERE .*", "", gold)))
            assert env.step(act("submit")).reward <= 0.7, gold
    env.close()


def test_mistakes_often_earn_a_share_of_the_reward():
    """What preference pairs need: failures of different worth."""
    rng, env, rewards = random.Random(0), envs.make("intercodesql", "short"), []
    for task in env.tasks("train")[:300]:
        env.reset(task)
        gold = env._question["gold"]
        columns = re.findall(r"\((\w+_id .*?)\);", env.world.databases[env._question["db"]])
        table = sql_questions.Table(sql_questions.tables_of(gold)[0], "", "", None, tuple(
            sql_questions.Column((), line.split()[0], ()) for line in columns[0].split(", ")), ())
        env.step(sql_questions._mistake(rng, gold, [table]))
        rewards.append(env.step("submit").reward)
    assert mean(0 < r < 1 for r in rewards) > 0.2
    assert mean(r == 0 for r in rewards) > 0.3


def test_episodes_are_short_in_the_short_view():
    env = envs.make("intercodesql", "short")
    lengths = [len(re.findall(r"\w+|[^\w\s]", " ".join(play(env, task)[1])))
               for task in env.tasks("validation")]
    assert sorted(lengths)[len(lengths) // 2] < 75 and max(lengths) < 140


def test_the_world_is_the_same_in_every_process():
    code = ("import hashlib, json; from worlds.intercodesql import world as sql, questions as sql_questions;"
            "w = sql_questions.sql_world(); e = sql.InterCodeSQL('short');"
            "text = json.dumps([w.databases, w.questions, sql_questions.analysts(e, 3, 50)]);"
            "print(hashlib.sha256(text.encode()).hexdigest())")
    seen = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, check=True,
                           capture_output=True, env={"PYTHONHASHSEED": seed}).stdout
            for seed in ("0", "1", "2")}
    assert len(seen) == 1


def test_analysts_know_every_word_make_mistakes_and_ask_nothing_held_out():
    env = envs.make("intercodesql", "short")
    talks = sql_questions.analysts(env, seed=0, n=1500)
    assert talks[:100] == sql_questions.analysts(env, seed=0, n=100)
    assert talks[:50] != sql_questions.analysts(env, seed=1, n=50)
    for talk in talks:
        assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2)
        assert len(talk) <= 2 * env.max_steps
    pieces = lambda text: set(re.findall(r"'\w+'|\w+(?:\.\w+)?|[^\w\s]", text))
    known = set().union(*(pieces(m["content"]) for talk in talks for m in talk))
    for questions in env.world.questions.values():
        for q in questions.values():
            assert pieces(f"{q['query']} {q['gold']}") <= known, q
    held_out = re.compile(rf"\b({'|'.join(sql_questions.HELD_OUT)})")  # also as a part of a word
    for talk in talks:  # they list and describe such tables, but ask and query nothing of them
        assert not held_out.search(talk[0]["content"])
        assert not any(held_out.search(m["content"]) for m in talk[1::2]
                       if "select" in m["content"].lower())
    errors = mean(any(m["content"].startswith("Error") for m in talk) for talk in talks)
    submitted = mean(talk[-1]["content"] == "submit" for talk in talks)
    assert 0.2 < errors < 0.6 and submitted > 0.98


def test_what_the_tiny_model_writes_keeps_its_meaning():
    """Ids that are sampled are decoded with blanks between the tokens; SQL must not mind."""
    env = envs.make("intercodesql", "short")
    texts = [m["content"] for talk in sql_questions.analysts(env, 0, 400) for m in talk]
    encoder = dpo.Encoder(tiny.make_tokenizer(texts))
    for task in env.tasks("validation"):
        env.reset(task)
        gold = env._question["gold"]
        spoken = encoder.decode(encoder.reply(gold))
        assert encoder.reply(spoken) == encoder.reply(gold)
        env.step(spoken)
        assert env.step(encoder.decode(encoder.reply("submit"))).reward == 1


# ------------------------------------------------------------------------------ hostile queries

SECRET = "orchard7"  # in another database; no observation may ever show it
HOLD = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) "
ATTACKS = [
    # writing
    "INSERT INTO town VALUES (9, 'x', 1)", "UPDATE town SET area = 0", "DELETE FROM town",
    "REPLACE INTO town VALUES (1, 'x', 1)", "TRUNCATE TABLE town", "DROP TABLE town",
    "DROP DATABASE d", "CREATE TABLE z (a int)", "CREATE DATABASE z", "ALTER TABLE town ADD z int",
    "CREATE TEMPORARY TABLE z AS SELECT 1", "CREATE TEMP TABLE z AS SELECT 1",
    "CREATE VIEW z AS SELECT 1", "CREATE INDEX z ON town (area)", "RENAME TABLE town TO z",
    "CREATE TRIGGER z AFTER INSERT ON town BEGIN SELECT 1; END", "REINDEX", "VACUUM", "ANALYZE",
    "WITH z AS (SELECT 1) DELETE FROM town", "WITH z AS (SELECT 1) UPDATE town SET area = 0",
    "WITH z AS (SELECT 9) INSERT INTO town SELECT *, 'x', 1 FROM z",
    "EXPLAIN DELETE FROM town", "EXPLAIN ANALYZE DELETE FROM town", "ANALYZE DELETE FROM town",
    "LOCK TABLES town WRITE", "OPTIMIZE TABLE town", "REPAIR TABLE town", "FLUSH TABLES",
    "MERGE INTO town USING baker ON 1=1", "SELECT * INTO z FROM town", "SELECT 1 INTO @a",
    # several statements
    "SELECT 1; DROP TABLE town", "SELECT 1; SELECT 2", "SELECT 1;; DELETE FROM town",
    "SELECT 1 /* */ ; /* */ DELETE FROM town", "SELECT '1'; UPDATE town SET area = 0; --",
    "SHOW TABLES; DROP TABLE town", "DESC town; DROP TABLE town", "SELECT 1;\tDELETE FROM baker;",
    # transactions, sessions, accounts
    "BEGIN", "START TRANSACTION", "COMMIT", "ROLLBACK", "SAVEPOINT a", "SET autocommit = 0",
    "SET SESSION max_statement_time = 0", "SET GLOBAL max_connections = 1", "SET ROLE ALL",
    "SET STATEMENT max_statement_time = 1000 FOR SELECT 1", "USE other", "USE mysql",
    "CREATE USER z", "DROP USER root", "GRANT ALL ON *.* TO z", "SET PASSWORD = ''", "SHUTDOWN",
    "KILL 1", "RESET MASTER", "PREPARE z FROM 'DROP TABLE town'", "EXECUTE z", "CALL z()", "DO 1",
    "EXECUTE IMMEDIATE 'DROP TABLE town'", "HANDLER town OPEN", "INSTALL SONAME 'x'",
    "SELECT 1 FROM town FOR UPDATE", "SELECT 1 FROM town LOCK IN SHARE MODE",
    "SELECT 1 FROM town FOR/**/UPDATE", "SELECT GET_LOCK('a', 1000)", "SELECT RELEASE_ALL_LOCKS()",
    # other databases and what the server knows
    "SELECT * FROM other.secret", "SELECT * FROM `other`.`secret`", "SHOW TABLES FROM other",
    "DESC other.secret", "SHOW CREATE TABLE other.secret", "SELECT word FROM other . secret",
    "SELECT (SELECT word FROM other.secret LIMIT 1)", "SELECT * FROM town, other.secret",
    "SELECT * FROM mysql.user", "SELECT * FROM `mysql`.`user`", "SELECT * FROM sys.config",
    "SELECT * FROM information_schema.tables", "SELECT * FROM INFORMATION_SCHEMA . PROCESSLIST",
    "SELECT * FROM performance_schema.threads", "SHOW GRANTS", "SHOW VARIABLES",
    "SHOW PROCESSLIST", "SHOW STATUS", "SHOW MASTER STATUS", "SHOW CREATE USER root",
    "SELECT @@datadir", "SELECT @@global.version",
    # sqlite's own
    "ATTACH DATABASE 'other.db' AS other", "ATTACH ':memory:' AS z", "DETACH DATABASE main",
    "PRAGMA query_only = OFF", "PRAGMA writable_schema = 1", "PRAGMA table_info(town)",
    "SELECT * FROM sqlite_master", "SELECT * FROM sqlite_schema",
    "SELECT * FROM main.sqlite_master",
    "SELECT * FROM pragma_table_info('town')", "SELECT * FROM pragma_database_list",
    "SELECT * FROM dbstat", "SELECT * FROM json_each('[1]')", "SELECT * FROM generate_series(1, 9)",
    "SELECT load_extension('x')", "SELECT writefile('x', 'y')", "SELECT readfile('/etc/passwd')",
    "SELECT fts3_tokenizer('x')", "SELECT sqlite_version()", "VACUUM INTO 'x.db'",
    # files
    "SELECT LOAD_FILE('/etc/passwd')", "SELECT 1 INTO OUTFILE '/tmp/x'", "SELECT `load_file`('x')",
    "SELECT 1 INTO/**/DUMPFILE '/tmp/x'", "SELECT 1 INTO --\nOUTFILE '/tmp/x'", "LOAD DATA INFILE '/etc/passwd' INTO TABLE town",
    "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town", "SELECT load_file /**/ ('/etc/passwd')",
    # comments that are code, odd characters
    "SELECT 1 /*! INTO OUTFILE '/tmp/x' */", "/*!50000 DROP TABLE town */",
    "/*M! DROP TABLE town */",
    "SELECT /*+ MAX_EXECUTION_TIME(99999) */ 1", "-- x\nDROP TABLE town", "# x\nDROP TABLE town",
    "SELECT 1\0; DROP TABLE town", "SELECT '\ud800'", "\0", "", ";", "(", "SELECT", "SELECT '",
    "SELECT " + "(" * 3000 + "1" + ")" * 3000, "SELECT " + "1+" * 2400 + "1",
    # holding the server
    "SELECT SLEEP(100)", "SELECT sleep/**/(100)", "SELECT sleep--\n(100)", "SELECT sleep-- a\n(100)", "SELECT `sleep`(100)",
    "SELECT BENCHMARK(1000000000, MD5('a'))",
    HOLD + "SELECT COUNT(*) FROM r", HOLD + "SELECT a.x FROM r a, r b, r c, r d",
    HOLD + "SELECT MAX(x) FROM r",
    "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM r) SELECT COUNT(*) FROM r",
    "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT CONCAT(x, x) FROM r) SELECT MAX(x) FROM r",
    "SELECT COUNT(*) FROM " + ", ".join(f"town t{i}" for i in range(30)),
    "SELECT * FROM " + ", ".join(f"town t{i}" for i in range(30)),
    "SELECT * FROM " + ", ".join(f"town t{i}" for i in range(12)) + " LIMIT 1000000",
    "SELECT t0.site FROM " + ", ".join(f"town t{i}" for i in range(20)) + " ORDER BY t9.site",
    "SELECT zeroblob(900000000)", "SELECT randomblob(900000000)", "SELECT printf('%900000000d', 1)",
    "SELECT REPEAT('a', 900000000)", "SELECT RPAD('a', 900000000, 'b')", "SELECT SPACE(900000000)",
    "SELECT LENGTH(REGEXP_REPLACE(REPEAT('a', 9999), '(a+)+b', ''))",
    "SELECT LENGTH(GROUP_CONCAT(a.site)) FROM " + ", ".join(f"town {c}" for c in "abcdefghijklmn"),
    "WITH RECURSIVE r(x, n) AS (SELECT 'a', 0 UNION ALL SELECT x || 'a', n + 1 FROM r WHERE n < "
    "19000) SELECT COUNT(*) FROM r WHERE x LIKE '%a%a%a%a%a%a%b'",
]
# Of these the database shows nothing but what is the agent's own or harmless.
HARMLESS = re.compile(r"\[\]|\[\((None|\d{1,7}),\)\]|None")


def assert_harmless(db, sql, seconds):
    started = time.monotonic()
    result = db.run(sql)
    took = time.monotonic() - started
    assert took < seconds, (sql[:80], took)
    text = str(result)
    assert SECRET not in text and "root:" not in text
    assert text.startswith("Error") or HARMLESS.fullmatch(text), (sql[:80], text[:200])


SCRIPT = ("CREATE TABLE town (town_id int PRIMARY KEY, site varchar(20), area int);"
          "INSERT INTO town VALUES (1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10);"
          "CREATE TABLE baker (name varchar(20), town_id int);"
          "INSERT INTO baker VALUES ('Ann', 1);")
TOWNS = "[(1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10)]"


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_attack_on_sqlite_does_nothing(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    db = databases.Sqlite("d", SCRIPT)
    # Seconds of CPU, so that a busy machine does not matter.
    started = time.process_time()
    assert_harmless(db, ATTACKS[number], seconds=600)
    assert time.process_time() - started < 3
    assert str(db.run("SELECT * FROM town")) == TOWNS
    assert db.run("SHOW TABLES") == [("baker",), ("town",)]
    db.close()
    assert list(tmp_path.iterdir()) == []


def test_without_the_first_look_sqlite_still_refuses(monkeypatch):
    """The allow-list of first words is not what keeps the database safe."""
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    db = databases.Sqlite("d", SCRIPT)
    for sql in ATTACKS:
        if sql not in ("", ";", "COMMIT", "ROLLBACK", "\0") and "UPDATE" not in sql[:20]:
            assert_harmless(db, sql, seconds=600)
    db.run("UPDATE town SET area = 0")
    assert str(db.run("SELECT * FROM town")) == TOWNS
    db.close()


def test_a_result_too_large_is_an_error_text_on_sqlite():
    db = databases.Sqlite("d", SCRIPT)
    many = "SELECT 1 FROM " + ", ".join(f"town t{i}" for i in range(9))  # 19,683 rows
    assert db.run(many) == databases.TOO_LARGE
    assert len(db.run(many + " LIMIT 9999")) == 9999
    db.close()


@pytest.mark.parametrize("gap", ["/**/", "/* a */", " ", "--\n", "-- a\n", "#\n", "/*"])
def test_the_first_look_ends_whatever_is_hidden_from_it(gap):
    """A pattern that tries all ways to share out the gaps would not: 2 to the power of 1,000."""
    for sql in ("select 1 into{}x", "select 1 into{}outfile 'x'", "select sleep{}(1)"):
        found = databases.refusal(sql.format(gap * (4900 // len(gap))))
        assert (found is None) == (sql.endswith("x") or gap == "/*")
    assert databases.naming(["other"]).search(f"select 1 from other{gap}.t") or gap == "/*"


def test_attacks_leave_room_for_honest_queries():
    for sql in ("SELECT title FROM film WHERE title = 'Into the Wild'",
                "SELECT a FROM t WHERE b = 'for update'", "(SELECT 1) UNION (SELECT 2)",
                "select mysql FROM t", "WITH a AS (SELECT 1) SELECT * FROM a",
                "SHOW FULL COLUMNS FROM t", "SHOW CREATE TABLE t", "explain select 1",
                "SELECT sleep, lock FROM t", "SELECT sleep FROM nights"):
        found = databases.refusal(sql)
        assert found is None or "for update" in sql, (sql, found)


# ------------------------------------------------------------------------------ settings

def test_the_password_is_in_no_setting(monkeypatch):
    monkeypatch.setenv("MYSQL_PWD", "")  # so that it is put back
    flags = ["--env", "intercodesql", "--intercode-data", "d", "--model", "m"]
    s = settings.parse([*flags, "--mysql-url", "mysql://u:to%40p@h:3306"])
    assert s.mysql_url == "mysql://u@h:3306" and os.environ["MYSQL_PWD"] == "to@p"
    for wrong in (["--mysql-url", "postgres://u:topsecret@h"],
                  ["--mysql-url", "mysql://u:topsecret@h/db"],
                  ["--mysq-url", "mysql://u:topsecret@h"],
                  ["--env", "webshop", "--mysql-url", "mysql://u:topsecret@h:1"]):
        with pytest.raises(settings.SettingsError) as error:
            settings.parse([*flags, *wrong])
        assert "topsecret" not in str(error.value) and "\n" not in str(error.value)


def test_presets_are_the_papers():
    s = settings.parse(["--env", "intercodesql", "--model", "some/model"])
    assert (s.iterations, s.expert_min_reward) == (5, 1.0)
    assert settings.parse(["--env", "intercodesql", "--iterations", "2"]).iterations == 2


# ------------------------------------------------------------------------------ Spider in sqlite

def test_spider_questions_are_split_by_database(intercode):
    env = envs.make("intercodesql", intercode_data=str(intercode))
    world = env.world
    assert env.test_splits == ("test",)
    assert sum(map(len, world.questions.values())) == 1034 and len(world.databases) == 20
    names = [{q["db"] for q in questions.values()} for questions in world.questions.values()]
    assert sum(map(len, names)) == 20 == len(set.union(*names))


def test_expert_replays_to_1_on_spider_in_sqlite(intercode):
    env = envs.make("intercodesql", intercode_data=str(intercode))
    for split in ("train", "validation", "test"):
        for task in env.tasks(split):
            assert play(env, task)[0] == 1, task
    env.close()


def test_iprs_records_are_read(tmp_path):
    record = {"query": "q", "gold": "SELECT 1", "extra": {"db": "d"}}
    for split in ("train", "test"):
        (tmp_path / f"ic_spider_{split}.json").write_text(json.dumps([record] * 4))
    (tmp_path / "train_indices.json").write_text("[3, 1]")
    env = InterCodeSQL(intercode_data=str(tmp_path))
    assert env.tasks("train") == ["intercodesql-train-3", "intercodesql-train-1"]
    assert env.tasks("test") == [f"intercodesql-test-{i}" for i in range(4)]
    assert env.published_task("intercode_sql_3") == "intercodesql-train-3"
    assert env.world.questions["train"][3] == dict(query="q", gold="SELECT 1", db="d")
    with pytest.raises(envs.Refused, match="ic_spider_dbs.sql"):
        env.reset("intercodesql-train-3")  # there is no dump
    with pytest.raises(envs.Refused, match="unknown split 'validation'"):
        env.tasks("validation")
    (tmp_path / "ic_spider_train.json").write_text("{")
    sql_spider.spider_world.cache_clear()
    with pytest.raises(envs.Refused, match="ic_spider_train.json"):
        sql_spider.spider_world(str(tmp_path))


# ------------------------------------------------------------------------------ a real MariaDB

ROOT_URL, URL = "mysql://root:@127.0.0.1:{}", "mysql://agent:s3cret@127.0.0.1:{}"


RUNNING, START = {}, {}  # port -> its process, what starts it again


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory):
    """The port of a MariaDB of our own with InterCode's databases, d and other."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    server, install = (shutil.which(f"mariadb{name}", path=path) for name in ("d", "-install-db"))
    if not server or not install:
        pytest.skip("mariadbd is not installed (Debian: apt-get install mariadb-server)")
    pymysql = pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent: the project does not ship it")
    folder, user = tmp_path_factory.mktemp("mariadb"), subprocess.check_output(
        ["id", "-un"], text=True).strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    subprocess.run([install, "--no-defaults", f"--user={user}", f"--datadir={folder}/data",
                    "--auth-root-authentication-method=normal", "--skip-test-db"],
                   check=True, capture_output=True)

    def start():
        with open(folder / "log", "a") as log:
            RUNNING[port] = subprocess.Popen(
                [server, "--no-defaults", f"--user={user}", f"--datadir={folder}/data",
                 f"--socket={folder}/s", f"--pid-file={folder}/pid", "--bind-address=127.0.0.1",
                 f"--port={port}", "--lower-case-table-names=1", "--skip-log-bin",
                 "--max-statement-time=2"], stdout=log, stderr=log)

    start()
    START[port] = start
    try:
        for _ in range(300):
            try:
                root = databases.connect(ROOT_URL.format(port))
                break
            except pymysql.MySQLError:
                time.sleep(0.2)
        else:
            pytest.fail((folder / "log").read_text()[-2000:])
        names = sql_spider.load_intercode(DATA / "ic_spider_dbs.sql", ROOT_URL.format(port),
                                    URL.format(port))
        assert len(names) == 20
        dump = folder / "more.sql"
        dump.write_text("CREATE DATABASE d;\nUSE `d`;\n" + SCRIPT.replace(";", ";\n") +
                        "CREATE DATABASE other;\nUSE `other`;\nCREATE TABLE secret (word text);\n"
                        f"INSERT INTO secret VALUES ('{SECRET}');\n")
        sql_spider.load_intercode(dump, ROOT_URL.format(port), URL.format(port))
        yield port
        root.close()
    finally:
        RUNNING[port].terminate()
        RUNNING[port].wait(60)


def root_query(port, sql):
    with databases.connect(ROOT_URL.format(port)) as root, root.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


# Syntax that MariaDB refuses; one of the questions on each is asked in two wordings.
NOT_ON_MARIADB = {
    "SELECT avg(Attendance) FROM SHOW": "near 'SHOW' at line 1",  # a reserved word
    'SELECT COUNT(*) FROM (SELECT T1.Name FROM country AS T1 JOIN countrylanguage AS T2 ON T1.Code '
    '= T2.CountryCode WHERE T2.Language = "English" INTERSECT SELECT T1.Name FROM country AS T1 '
    'JOIN countrylanguage AS T2 ON T1.Code = T2.CountryCode WHERE T2.Language = "Dutch")':
    "near '' at line 1",                                          # a derived table has no name
    'SELECT T2.Language FROM country AS T1 JOIN countrylanguage AS T2 ON T1.Code = T2.CountryCode '
    'WHERE T1.Continent = "Asia" GROUP BY T2.Language ORDER BY COUNT (*) DESC LIMIT 1':
    "near '*) DESC LIMIT 1' at line 1",                           # a blank before (*)
}


def tied(port, db, gold):
    """Whether its LIMIT chooses among rows that are equal in its order: 36 golds do that."""
    results = set()
    with databases.connect(ROOT_URL.format(port), database=db) as root, root.cursor() as cursor:
        for _ in range(30):
            cursor.execute(re.sub(r"\s+limit\b", ", RAND() LIMIT", gold, flags=re.I))
            results.add(cursor.fetchall())
    return len(results) > 1


def test_every_gold_query_scores_1_on_mariadb(mariadb, intercode):
    env = envs.make("intercodesql", intercode_data=str(intercode), mysql_url=URL.format(mariadb))
    failed, below = Counter(), []
    for split, questions in env.world.questions.items():
        for task, question in zip(env.tasks(split), questions.values()):
            env.reset(task)
            result = env.step(act(question["gold"])).observation
            if result.startswith("Error"):
                assert result.endswith(NOT_ON_MARIADB[question["gold"]]), result
                failed[question["gold"]] += 1
            elif env.step(act("submit")).reward != 1.0:
                below.append((question["db"], question["gold"]))
    env.close()
    assert failed == dict.fromkeys(NOT_ON_MARIADB, 2)
    assert len(below) <= 4 and all(tied(mariadb, db, gold) for db, gold in below), below


def test_a_tie_is_told_from_a_wrong_answer(mariadb):
    query = "SELECT grade FROM Highschooler GROUP BY grade ORDER BY {} DESC LIMIT 1"
    assert tied(mariadb, "network_1", query.format("count(*)"))
    assert not tied(mariadb, "network_1", query.format("grade"))


def test_sqlite_answers_most_gold_queries_as_mariadb(mariadb, intercode):
    found = sql_spider.compare_intercode(str(intercode), URL.format(mariadb))
    assert found["ran"] == 1028 == found["questions"] - len(found["failed"])
    assert found["same_values"] >= 980 and found["same_text"] >= 915


def test_mariadb_shows_what_sqlite_shows(mariadb):
    server, embedded = databases.MySQL("d", URL.format(mariadb)), databases.Sqlite("d", SCRIPT)
    for sql in ("SHOW TABLES", "SELECT * FROM town", "SELECT x FROM town", "SELECT * FROM towns",
                "SELECT site FROM town WHERE x = 1", "SELECT site FROM town ORDER BY x",
                "SELECT town_id FROM town, baker", "DESC towns",
                "SELECT site FROM town WHERE MAX(area) > 1", "DROP TABLE town"):
        result = server.run(sql)
        if isinstance(result, str):  # newer versions of MariaDB name clauses in their own way
            for own, mysql in (("'SELECT'", "'field list'"), ("in SELECT", "in field list"),
                               ("'WHERE'", "'where clause'"), ("'ORDER BY'", "'order clause'")):
                result = result.replace(own, mysql)
        assert result == embedded.run(sql), sql
    near = "near 'FROM town' at line 1"
    for db in (server, embedded):
        assert db.run("SELECT site FROM FROM town").endswith(near)
    assert [row[0] for row in server.run("DESC town")] == ["town_id", "site", "area"]
    server.close(), embedded.close()


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_attack_on_mariadb_does_nothing(mariadb, number):
    db = databases.MySQL("d", URL.format(mariadb))
    assert_harmless(db, ATTACKS[number], seconds=20)
    assert str(db.run("SELECT * FROM town")) == TOWNS
    assert db.run("SHOW TABLES") == [("baker",), ("town",)]
    user = databases.database_user(URL, "d")
    db.close()
    for _ in range(50):  # nothing runs on after the client has gone
        running = root_query(mariadb, "SELECT info FROM information_schema.processlist WHERE "
                             f"user = '{user}' AND command = 'Query'")
        if not running:
            break
        time.sleep(0.1)
    assert running == []


def test_without_the_first_look_mariadb_still_refuses(mariadb, monkeypatch):
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    before = root_query(mariadb, "SELECT COUNT(*) FROM information_schema.tables")
    for sql in ("INSERT INTO town VALUES (9, 'x', 1)", "UPDATE town SET area = 0",
                "DELETE FROM town", "DROP TABLE town", "CREATE TABLE z (a int)", "DROP DATABASE d",
                "CREATE DATABASE z", "SELECT 1; DELETE FROM town", "TRUNCATE TABLE town",
                "SELECT * FROM other.secret", "SHOW CREATE TABLE other.secret",
                "SHOW TABLES FROM other", "SELECT * FROM mysql.user", "USE other", "KILL 1",
                "SELECT 1 INTO OUTFILE '/tmp/x'", "CREATE USER z", "SHUTDOWN",
                "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town",
                "WITH z AS (SELECT 1) DELETE FROM town", "SET GLOBAL max_connections = 1"):
        db = databases.MySQL("d", URL.format(mariadb))
        assert str(db.run(sql)).startswith("Error"), sql
        db.close()
    db = databases.MySQL("d", URL.format(mariadb))
    assert str(db.run("SELECT * FROM town")) == TOWNS
    assert db.run("SELECT LOAD_FILE('/etc/passwd')") == [(None,)]
    assert db.run("SELECT SLEEP(100)") in (databases.INTERRUPTED, [(1,)])
    assert root_query(mariadb, "SELECT COUNT(*) FROM information_schema.tables") == before
    db.close()


def test_a_grant_covers_its_database_only(mariadb):
    """In a GRANT an underscore stands for any character."""
    grants = root_query(mariadb, f"SHOW GRANTS FOR {databases.database_user(URL, 'world_1')}@'%'")
    assert [g for g, in grants if "SELECT" in g] == [
        f"GRANT SELECT ON `world\\_1`.* TO `{databases.database_user(URL, 'world_1')}`@`%`"]


def test_a_server_without_a_time_limit_does_not_hold_the_agent(mariadb, monkeypatch):
    """The second line: the client's read timeout, then KILL from another connection."""
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    db = databases.MySQL("d", URL.format(mariadb))
    db.run("SET SESSION max_statement_time = 0")
    started = time.monotonic()
    assert db.run("SELECT SLEEP(60)") == databases.INTERRUPTED
    assert time.monotonic() - started < 20
    time.sleep(0.5)
    assert not root_query(mariadb, "SELECT 1 FROM information_schema.processlist "
                          "WHERE info LIKE 'SELECT SLEEP%'")
    assert db.run("SELECT 1") == [(1,)]
    db.close()


def test_the_server_itself_limits_time_and_rows(mariadb, monkeypatch):
    """Not only the client: what is asked past all looks at the query ends on the server."""
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    db = databases.MySQL("d", URL.format(mariadb))
    assert db.run("SELECT @@max_statement_time, @@sql_select_limit") == [
        (float(databases.SECONDS), databases.MAX_ROWS + 1)]
    million = "SELECT t0.site FROM " + ", ".join(f"town t{i}" for i in range(13))  # 3^13 rows
    with db._connection.cursor() as cursor:  # a cursor that would take all there are
        assert cursor.execute(million) == databases.MAX_ROWS + 1
        with pytest.raises(Exception, match="max_statement_time exceeded"):
            cursor.execute(HOLD + "SELECT COUNT(*) FROM r a, r b, r c")
    assert db.run(million) == databases.TOO_LARGE
    assert str(db.run("SELECT * FROM town")) == TOWNS  # and the next query is answered
    db.close()


@pytest.mark.parametrize("where", ["sqlite", "mariadb"])
def test_no_state_leaks_into_the_next_episode(where, request, monkeypatch):
    monkeypatch.setattr(databases, "refusal", lambda sql: None)  # to leave as much as can be left
    on_server = where == "mariadb"
    url = URL.format(request.getfixturevalue("mariadb")) if on_server else None
    env = InterCodeSQL(intercode_data=str(DATA) if on_server else None, mysql_url=url)
    question = dict(query="q", gold="SELECT 1", db="d")
    env.start(question, SCRIPT)
    for sql in ("SELECT @a := 5", "SET @a = 5", "USE world_1", "BEGIN", "SET autocommit = 0",
                "CREATE TEMPORARY TABLE z (a int)", "SELECT 1"):
        env.step(act(sql))
    env.start(question, SCRIPT)
    assert env.step(act("SHOW TABLES")).observation == "[('baker',), ('town',)]"
    assert "5" not in env.step(act("SELECT @a")).observation
    assert env.step(act("submit")).reward == 0  # the last episode's result is gone
    env.close()


@pytest.fixture
def repaired(mariadb, monkeypatch):
    """An episode on MariaDB that goes on when its connection is lost; it has seen the tables."""
    monkeypatch.setattr(envs.Repaired, "waits", (0.0, 0.0, 0.0))
    env = envs.Repaired(InterCodeSQL(intercode_data=str(DATA), mysql_url=URL.format(mariadb)))
    env.reset(env.tasks("test")[0])
    env.shown = env.step(act("SHOW TABLES"))
    assert len(env.shown.observation) > 10
    yield env
    env.close()


def test_a_lost_connection_is_opened_again(mariadb, repaired):
    for _ in range(2):  # before a query, and before the gold query
        root_query(mariadb, f"KILL {repaired._db._connection.thread_id()}")
        assert repaired.step(act("SHOW TABLES")) == repaired.shown
    repaired.step(act(repaired._question["gold"]))
    root_query(mariadb, f"KILL {repaired._db._connection.thread_id()}")
    assert repaired.step(act("submit")).reward == 1


@pytest.mark.parametrize("code", [0, 1317, 1927, 2006, 2013])  # 0: PyMySQL's socket is gone
def test_a_connection_lost_within_a_query_is_no_answer_of_the_agents(repaired, monkeypatch, code):
    import pymysql
    fetch, failures = databases._fetch, []

    def lost(cursor):
        if len(failures) < times:
            failures.append(code)
            raise pymysql.err.OperationalError(code, "gone")
        return fetch(cursor)

    monkeypatch.setattr(databases, "_fetch", lost)
    times = 2
    assert repaired.step(act("SHOW TABLES")) == repaired.shown
    times = 99
    with pytest.raises(envs.EnvError, match="database .*: gone; is the server running"):
        repaired.step(act("SHOW TABLES"))
    assert len(failures) == 2 + 4  # it is not asked again within


def test_an_episode_goes_on_when_its_server_is_killed_and_started_again(mariadb, monkeypatch):
    monkeypatch.setattr(envs.Repaired, "waits", (2.0,) * 20)
    env = envs.Repaired(InterCodeSQL(intercode_data=str(DATA), mysql_url=URL.format(mariadb)))
    task = env.tasks("test")[0]
    env.reset(task)
    shown = env.step(act("SHOW TABLES"))
    RUNNING[mariadb].kill()
    RUNNING[mariadb].wait()
    with pytest.raises(envs.EnvError, match="is the server running"):
        InterCodeSQL(intercode_data=str(DATA), mysql_url=URL.format(mariadb)).reset(task)
    again = threading.Timer(1, START[mariadb])
    again.start()
    assert env.step(act("SHOW TABLES")) == shown
    env.step(act(env._question["gold"]))
    assert env.step(act("submit")).reward == 1
    again.join()
    env.close()


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\0\0\0\x0a5.5",
                                  b"\x00\0\0\0", b"\xff" * 50, b"\x4a\0\0\0\x0a" + b"5" * 73])
def test_what_is_no_database_voids_the_episode(says):
    pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer():
            with suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(says)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(envs.EnvError, match="is the server running") as error:
            databases.MySQL("d", URL.format(server.getsockname()[1]))
        assert "s3cret" not in str(error.value) and "\n" not in str(error.value)
        server.shutdown(socket.SHUT_RDWR)


def test_a_server_that_is_gone_voids_the_episode():
    pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    with pytest.raises(envs.EnvError, match="mysql://127.0.0.1:9, database d") as error:
        databases.MySQL("d", "mysql://agent:s3cret@127.0.0.1:9")
    assert "s3cret" not in str(error.value)


# Servers that somebody else set up

def user_url(port, name, *grants):
    """The URL of a new user with these rights."""
    root_query(port, f"CREATE OR REPLACE USER {name}@'%' IDENTIFIED BY 's3cret'")
    for grant in grants:
        root_query(port, f"GRANT {grant} TO {name}@'%'")
    databases.reader.cache_clear()
    return f"mysql://{name}:s3cret@127.0.0.1:{port}"


@pytest.mark.parametrize("grants, excess", [
    (["SELECT, INSERT ON d.*"], "INSERT on `d`.*"),
    (["SELECT ON d.*", "UPDATE (area) ON d.town"], "UPDATE"),
    (["SELECT ON *.*"], "SELECT on all databases"),
    (["SELECT ON d.*", "FILE ON *.*"], "FILE on *.*"),
    (["SELECT ON d.* "], None),
])
def test_a_user_who_may_do_more_than_read_is_refused(mariadb, grants, excess):
    url = user_url(mariadb, "somebody", *grants)
    if excess is None:
        return databases.MySQL("d", url).close()
    with pytest.raises(envs.Refused, match="load-intercode") as error:
        databases.MySQL("d", url)
    assert excess in str(error.value) and "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("grant, excess", [  # as MySQL 8 and 9 show them
    ("GRANT USAGE ON *.* TO `a`@`%`", None),
    ("GRANT SELECT, SHOW VIEW ON `world\\_1`.* TO `a`@`%`", None),
    ("GRANT SHOW DATABASES ON *.* TO `a`@`%`", None),
    ("GRANT USAGE ON *.* TO `a`@`%` IDENTIFIED BY PASSWORD '*ABC'", None),
    ("GRANT SELECT ON `d`.* TO `a`@`%` WITH GRANT OPTION", "GRANT OPTION"),
    ("GRANT `writer`@`%` TO `a`@`%`", "a role"),
    ("GRANT AUDIT_ABORT_EXEMPT,SYSTEM_USER ON *.* TO `a`@`%`", "AUDIT_ABORT_EXEMPT on *.*"),
    ("GRANT ALL PRIVILEGES ON *.* TO `root`@`%` WITH GRANT OPTION", "ALL PRIVILEGES"),
    ("GRANT PROXY ON ``@`` TO `root`@`localhost` WITH GRANT OPTION", "PROXY"),
    ("GRANT EXECUTE ON PROCEDURE `d`.`p` TO `a`@`%`", "EXECUTE"),
])
def test_rights_beyond_reading_are_found(grant, excess):
    found = databases.excess_of(grant)
    assert found is None if excess is None else excess in found


def test_a_user_of_several_databases_reads_those_of_its_task_only(mariadb):
    db = databases.MySQL("d", user_url(mariadb, "plain", "SELECT ON d.*", "SELECT ON other.*"))
    attacks = [sql for sql in ATTACKS if "other" in sql] + [
        "SELECT word FROM other/**/./**/secret", "SELECT word FROM OTHER.secret",
        "SELECT word FROM `other`/* */.secret", "SELECT word FROM other -- x\n.secret",
        "SELECT word FROM other# x\n.`secret`", "SHOW COLUMNS FROM secret IN other",
        "SHOW FULL COLUMNS FROM secret FROM `other`", "SHOW INDEX FROM secret IN/**/other",
        "SHOW TABLE STATUS FROM other", "EXPLAIN SELECT * FROM other.secret",
        "WITH a AS (SELECT * FROM other.secret) SELECT * FROM a"]
    for sql in attacks:
        assert db.run(sql).startswith("Error"), sql
    assert str(db.run("SELECT town.* FROM town AS town")) == TOWNS
    assert "other" in db.run("SELECT 'other' FROM town")[0]  # the word itself is not refused
    db.close()


def test_a_wrong_password_is_told_without_it(mariadb):
    with pytest.raises(envs.Refused, match="load-intercode") as error:
        databases.MySQL("d", f"mysql://agent:wr0ng@127.0.0.1:{mariadb}")
    assert "wr0ng" not in str(error.value) and "Access denied" in str(error.value)


# Side by side

@pytest.mark.parametrize("where", ["sqlite", "mariadb"])
def test_sixteen_episodes_side_by_side_are_as_one_at_a_time(where, request):
    options = {}
    if where == "mariadb":
        options = dict(intercode_data=str(DATA),
                       mysql_url=URL.format(request.getfixturevalue("mariadb")))
    tasks = InterCodeSQL(**options).tasks("test")[:16]

    def one(task):
        with closing(InterCodeSQL(**options)) as env:
            return play(env, task)

    alone = [one(task) for task in tasks]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, tasks)) == alone
    assert Counter(reward for reward, _ in alone) == {1.0: 16}


def test_sixteen_slots_play_the_episodes_of_one():
    """What the model says does not matter here: the expert's query is run in its place."""
    class Scripted(InterCodeSQL):
        def reset(self, task):
            self._observation = super().reset(task)
            self._act = self.expert()
            return self._observation

        def step(self, reply):
            step = super().step(self._act(self._observation))
            self._observation = step.observation
            return step

    tokenizer = make_tokenizer("chatml")
    model, encoder = make_model(len(tokenizer), seed=1), dpo.Encoder(tokenizer)
    records = []
    for slots in (1, 16):
        episodes = [dpo.Trajectory(task, "target", 1, 0, seed=n)
                    for n, task in enumerate(Scripted("short").tasks("train")[:24])]
        records.append([e.record() for e in rollout(
            model, encoder, partial(Scripted, "short"), episodes, temperature=1.0, slots=slots,
            max_tokens=512, max_new_tokens=4, tokens_per_forward=4096)])
    assert records[0] == records[1]
    assert all(r["reward"] == r["raw_reward"] == 1.0 and r["ended"] == "done" for r in records[0])


# The commands

def test_a_run_on_the_server_holds_no_password(mariadb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MYSQL_PWD", "")
    model = tmp_path / "model"
    tokenizer = make_tokenizer("chatml")
    make_model(len(tokenizer), dtype=torch.float32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    flags = ["--env", "intercodesql", "--model", model, "--intercode-data", DATA, "--view", "short",
             "--method", "eto", "--train-tasks", 3, "--eval-tasks", 2, "--iterations", 1,
             "--max-tokens", 512, "--max-new-tokens", 8, "--threads", 1, "--out", tmp_path / "run"]
    start.main(coevolve.coevolve, [*map(str, flags), "--mysql-url", URL.format(mariadb)])
    files = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    said = capsys.readouterr()
    assert "Evaluation" in said.out and len(files) > 10
    for text in (said.out.encode(), said.err.encode(), *files):
        assert b"s3cret" not in text
    rows = [json.loads(line) for line in open(tmp_path / "run" / "experts.jsonl")]
    assert {r["reward"] for r in rows} == {1.0}


@pytest.mark.parametrize("arguments, told", [
    (["load-intercode", "DUMP", "--admin-url", "mysql://a:s3cret@127.0.0.1:9", "--mysql-url",
      "agent"], "--mysql-url must be mysql://"),
    (["load-intercode", "nowhere.sql", "--admin-url", "mysql://a:s3cret@127.0.0.1:9",
      "--mysql-url", "mysql://b@h"], "nowhere.sql"),
    (["load-intercode", "README.md", "--admin-url", "mysql://a:s3cret@127.0.0.1:9",
      "--mysql-url", "mysql://b@h"], "README.md: no database in it"),
    (["load-intercode", "DUMP", "--admin-url", "mysql://a:s3cret@127.0.0.1:9", "--mysql-url",
      "mysql://b@h"], "mysql://127.0.0.1:9: "),
    (["load-intercode", "DUMP", "--admin-urll", "mysql://a:s3cret@h"], "--admin-url"),
    (["compare-intercode", "DUMP", "mysql://a:s3cret@h", "--mysql-url", "mysql://b@h"],
     "unrecognized arguments: mysql://a:***@h"),
    (["compare-intercode", "nowhere", "--mysql-url", "mysql://b:s3cret@h"], "ic_spider_dev.json"),
])
def test_commands_refuse_in_one_line(intercode, arguments, told):
    pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    arguments = [str(intercode / "ic_spider_dbs.sql") if a == "DUMP" else a for a in arguments]
    done = subprocess.run([sys.executable, "-m", "worlds.intercodesql.spider", *arguments], cwd=ROOT,
                          text=True, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert told in done.stderr and "s3cret" not in done.stderr
