"""InterCodeSQL: rewards, replies, databases in sqlite and on a MariaDB server, hostile queries."""

import datetime
import decimal
import json
import os
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
from conftest import DATA, ROOT, folder_of, program, wait_until

import coevolve
import environments
import envs
from common import settings
from common.settings import UsageError
from environments import environment, make
from environments.expert_files import published_task
from environments.intercodesql import databases, questions, spider
from environments.intercodesql.environment import (
    EXPLANATION,
    InterCodeSQL,
    parse_sql_reply,
    sql_reward,
)


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


def test_reward_agrees_with_the_official_reward_on_all_vectors():
    vectors = json.loads((DATA / "intercode/reward_vectors.json").read_text())
    assert len(vectors) == 150
    for v in vectors:
        assert sql_reward(rows(v["agent"]), rows(v["gold"])) == v["reward"], v
    assert sql_reward([(1.0,)], [(1,)]) == 0  # rows are compared as text


def test_replies_are_read_as_the_official_agents_read_them():
    for reply, sql in (
            ("Thought: x\nAction: \n```sql\nSELECT 1\nFROM t\n```", "SELECT 1"),  # the first line alone
            ("Action:\n```sql\nSELECT 1\n```\nAction:\n```sql\nSELECT 2\n```", "SELECT 1"),
            ("```sql\nSELECT 2\n```\nAction:\n```sql\nSELECT 1\n```", "SELECT 1"),  # before Action: nothing
            ("Action:submit.", "submit"), ("Thought: I submit.\nAction:\n```sql\nSELECT 1\n```", "SELECT 1"),
            ("Action:\n```sql\nSELECT submit_date FROM t\n```", "submit"),           # as officially
            ("Action: Submit", None), ("Action:\n```SQL\nSELECT 1\n```", None),        # and so are these
            ("Action:\n```sql\nSELECT 1", None), ("Action:\n```sql\n```", None),       # not closed, empty
            ("```sql\nSELECT 1\n```", None), ("submit", None), ("", None)):
        assert parse_sql_reply(reply) == sql, reply


def act(sql):
    return f"Thought: t\nAction: {sql}" if sql == "submit" else f"Action:\n```sql\n{sql}\n```"


def submitted(env, sql):
    """The reward for the rows of a query."""
    env.step(act(sql))
    return env.step(act("submit")).reward


SCRIPT = ("CREATE TABLE town (town_id int PRIMARY KEY, site varchar(20), area int);"
          "INSERT INTO town VALUES (1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10);"
          "CREATE TABLE baker (name varchar(20), town_id int);"
          "INSERT INTO baker VALUES ('Ann', 1);")
TOWNS = "[(1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10)]"


@pytest.fixture
def small():
    """start(gold) -> an environment over the two small tables of SCRIPT."""
    env = make("intercodesql")
    env.database = lambda name, script=None: databases.Sqlite(name, SCRIPT)

    def start(gold="SELECT site FROM town"):
        env.start(dict(query="which towns?", gold=gold, db="d"))
        return env

    yield start
    env.close()


@pytest.fixture
def town():
    """Database d of SCRIPT in sqlite."""
    with closing(databases.Sqlite("d", SCRIPT)) as db:
        yield db


NEAR = ("You have an error in your SQL syntax; check the manual that corresponds to your MySQL server "
        "version for the right syntax to use near '{}' at line 1")


def test_sqlite_returns_the_error_messages_of_mysql(town):
    for sql, text in (  # the shipped tiny model was trained on these messages
            ("SELECT site FROM town WHERE x = 1", "Unknown column 'x' in 'where clause'"),
            ("SELECT site FROM town GROUP BY x", "Unknown column 'x' in 'group statement'"),
            ("DESC towns", "Table 'd.towns' doesn't exist"), ("SELECT 1 FROM towns", "Table 'd.towns' doesn't exist"),
            ("SELECT town_id FROM town JOIN baker ON area > 1", "Column 'town_id' in field list is ambiguous"),
            ("SELECT f ( area ) FROM town", "FUNCTION d.f does not exist"),
            ("SELECT site FROM FROM town", NEAR.format("FROM town")),
            ("SELECT site FROM town WHERE", NEAR.format("")), ("SELECT site FROM town, 'a", NEAR.format("'a")),
            ("SELECT site FROM town WHERE MAX(area) > 1", "Invalid use of group function"),
            ("check the site", "Only SELECT, WITH, SHOW (of tables, columns, indexes), DESC, DESCRIBE and EXPLAIN are allowed"),
            ("SHOW CREATE TABLE town", "Only SHOW TABLES, SHOW COLUMNS and DESC of a table are answered here")):
        assert town.run(sql) == f"Error executing query: {text}", sql


LISTED = ("CREATE TABLE Writer (name text NOT NULL, country varchar(20) DEFAULT 'Bo', years int, id int PRIMARY KEY,"
          " FOREIGN KEY (years) REFERENCES Writer (id));"
          "INSERT INTO Writer VALUES ('Carl', 'Egypt', 20, 1), ('Max', 'egypt', 98, 2), ('Ann', 'Spain', 37, 3);")
COLUMNS = [("name", "text", "NO", "", None, ""), ("country", "varchar(20)", "YES", "", "'Bo'", ""),
           ("years", "int", "YES", "MUL", None, ""), ("id", "int", "NO", "PRI", None, "")]


def test_sqlite_returns_the_rows_of_mysql():
    with closing(databases.Sqlite("d", LISTED)) as db:
        for sql, answer in (
                ("show tables;", [("Writer",)]), ("SHOW COLUMNS FROM `writer`", COLUMNS), ("describe WRITER ;", COLUMNS),
                ("/* all */ DESC Writer -- all", COLUMNS),
                ("SELECT name FROM writer WHERE country = 'EGYPT'", [("Carl",), ("Max",)]),  # without case
                ("SELECT DISTINCT country FROM writer", [("Egypt",), ("Spain",)]),
                ("SELECT SUM(years) / COUNT(*), 7 / 2, '7/2', 1/0 FROM writer", [(155 / 3, 3.5, "7/2", None)]),
                ("SELECT 9 / 2 / 3 -- a / b\n", [(1.5,)]), ('SELECT name FROM writer WHERE country = "Spain"', [("Ann",)]),
                ("SELECT Left(name, 2), right (name, 1) FROM writer LIMIT 1", [("Ca", "l")]),
                ("SELECT CONCAT('a', NULL), CONCAT_WS('-', 'a', NULL, 1), LEAST(1, NULL)", [(None, "a-1", None)]),
                ("SELECT YEAR(d), MONTH(d), DAY(d) FROM (SELECT '2021-03-04 05:06:07' AS d)", [(2021, 3, 4)]),
                ("WITH a AS (SELECT 1 AS x) SELECT `x` FROM a LEFT JOIN writer ON 0", [(1,)])):
            assert db.run(sql) == answer, sql


# Results of MariaDB 10.11 for unusual arguments, which a test below compares with a server's
CALLS = {
    **{f"{part}({value})": None for part in ("YEAR", "MONTH", "DAY") for value in (
        "NULL", "'abc'", "'2020-05'", "'2020-02-30'", "'12:30:00'", "2020", "1.5", "1e30", "'now'")},
    **{f"YEAR({value})": 2020 for value in (
        "'2020-1-2'", "'20-01-02'", "' 2020.01.02 10:11:12'", "'2020-01-02x'", "200102", "20200102.7",
        "'2020-00-00'", "x'323032302d30312d3032'")},
    "YEAR('70-01-02')": 1970, "YEAR(0)": 0, "YEAR(101)": 2000, "MONTH(1231)": 12, "DAY('2020-02-29')": 29,
    "LEFT('abcdef', 5/2)": "abc", "LEFT('abcdef', '2.7')": "ab", "LEFT('abcdef', ' 3x')": "abc", "LEFT('abcdef', 'x')": "",
    "LEFT('abcdef', -1)": "", "LEFT('abcdef', 1e30)": "abcdef", "LEFT(12345, 2)": "12", "LEFT('abc', NULL)": None,
    "RIGHT('abcdef', 2.5)": "def", "RIGHT('abcdef', 0)": "", "RIGHT('abcdef', 99)": "abcdef",
    "IF('abc', 1, 2)": 2, "IF('1abc', 1, 2)": 1, "IF('0.5', 1, 2)": 1, "IF(0.4, 1, 2)": 1, "IF(NULL, 1, 2)": 2,
    "GREATEST('a', 'B')": "B", "GREATEST('2', '10')": "2", "GREATEST(1, NULL)": None, "LEAST(2, 10)": 2,
    "CONCAT(1, NULL)": None, "CONCAT(1, 2.5, 'a')": "12.5a", "CONCAT_WS(NULL, 'a', 'b')": None,
    "CONCAT_WS(',', 'a', NULL, 'b')": "a,b", "CHAR_LENGTH(12.5)": 4, "CHAR_LENGTH(x'414243')": 3}
# sqlite's functions of time that read the clock or the time zone
ON_A_FIXED_DAY = {
    "date()": "2024-09-01", "datetime('NOW', 'localtime')": "2024-09-01 12:00:00", "time('now', 'UTC')": "12:00:00",
    "datetime('2020-01-02', 'localtime')": "2020-01-02 00:00:00", "date(CAST(x'6e6f770041' AS text))": "2024-09-01",
    "julianday()": 2460555.0, "strftime('%Y-%m-%d %H')": "2024-09-01 12", "strftime('%Y', 'now', '-1 year')": "2023",
    "date('2020-02-29', '+1 year')": "2021-03-01", "date(NULL)": None, "date(2459000.5)": "2020-05-31"}


def test_sqlite_functions_return_the_values_of_mysql_on_a_fixed_day(town):
    for call, value in (CALLS | ON_A_FIXED_DAY).items():
        assert town.run(f"SELECT {call}") == [(value,)], call
    for call in ("GREATEST(2, 'a')", "LEAST('x', 3)"):  # MySQL compares texts, MariaDB numbers
        assert isinstance(town.run(f"SELECT {call}"), list)


def test_the_values_of_these_calls_are_mariadbs(server):
    for call, value in CALLS.items():
        (answer,), = server.run(f"SELECT {call}")
        assert answer == value, call


FARM = json.loads((DATA / "intercode/mysql_answers.json").read_text())["farm_1"]


@pytest.fixture
def farm():
    """One of the built-in databases, of which MariaDB was asked what models ask."""
    with closing(databases.Sqlite("farm_1", FARM["script"])) as db:
        yield db


def by_value(answer):
    """Returns rows with all numbers as floats of three digits, or "error"."""
    if isinstance(answer, str):
        return "error"
    numbers = (int, float, decimal.Decimal)
    return [tuple(round(float(value), 3) if isinstance(value, numbers) else value for value in row)
            for row in answer]


def test_built_in_databases_answer_as_mariadb_10_11_did(farm):
    for sql, answer in FARM["answers"]:
        assert by_value(farm.run(sql)) == by_value(rows(answer)), sql


def test_any_query_returns_rows_or_an_error_text(farm):
    """Runs 2,000 of the recorded queries with parts removed, added or replaced."""
    queries = [re.findall(r"\s+|\w+|'[^']*'|[^\w\s]", sql) for sql, _ in FARM["answers"]]
    some = [",", "(", ")", ".", "/", "LEFT(", "MAX(", "CONCAT(", "YEAR(", "IN (", "'5'", "'", "{"]
    pool = [part for query in queries for part in query] + some * 1000
    rng = random.Random(0)
    for _ in range(2000):
        query = list(rng.choice(queries))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(query) + 1)
            query[at:at + rng.randint(0, 1)] = rng.choice([[], [rng.choice(pool)]])
        answer = farm.run("".join(query))
        assert isinstance(answer, list) or answer.startswith(databases.ERROR), query


def test_the_short_view_shows_two_digits_and_names_alone():
    with closing(make("intercodesql", "short")) as env:
        env.database = lambda name, script=None: databases.Sqlite(name, LISTED)
        env.start(dict(query="q", gold="SELECT COUNT(*), AVG(years) FROM writer", db="d"))
        assert env.step("DESC writer").observation == "name | country | years | id"
        # As the small model's tokenizer writes it.
        shown = env.step("SELECT COUNT ( * ) , AVG ( years ) FROM writer").observation
        assert shown == "3 , 51.67"
        assert env.step("submit").reward == 1


def test_the_last_result_is_what_is_submitted(small):
    env = small()
    shown = env.step(act("SELECT site, area FROM town WHERE area > 15")).observation
    assert shown == "[('Avon', 30), ('Brill', 20)]"
    env.step(act("SELECT site FROM town"))
    assert env.step("no action").observation == EXPLANATION  # changes nothing
    assert env.step(act("submit")) == envs.Step("submitted", 1.0, True, 1.0)
    env = small()
    env.step(act("SELECT site FROM town"))
    assert submitted(env, "DESC town") == 0  # a look after the right query loses
    assert small().step(act("submit")).reward == 0  # nothing was asked
    env = small()
    env.step(act("SELECT site FROM town ORDER BY site DESC"))  # clipped, and kept
    assert env.step(act("submit")) == envs.Step("submitted", 0.0, True, -1.0)
    many = "SELECT a.site, b.site, c.site FROM town a, town b, town c"
    env = small(gold=many)
    shown = env.step(act(many)).observation
    assert len(shown) == 353 and shown.endswith("...")  # the result is not cut
    assert env.step(act("submit")).reward == 1


def test_an_answer_to_a_failing_gold_query_is_scored_as_by_intercode(small):
    assert submitted(small("SELECT nowhere FROM town"), "SELECT site FROM town WHERE area > 90") == 1
    for gold, told in (("SELECT * FROM sqlite_master", "denied"),
                       ("SELECT 1 FROM " + ", ".join(f"town t{i}" for i in range(9)), "more than 10,000 rows")):
        with pytest.raises(envs.EnvError, match=f"the gold query of 'which towns.*{told}"):
            submitted(small(gold), "SELECT site FROM town")


def play(env, task):
    """The reward of the expert."""
    return environments.converse(env, env.reset(task), env.expert())[1]


@pytest.mark.parametrize("view", ["full", "short"])
def test_expert_replays_to_1(view):
    with closing(make("intercodesql", view)) as env:
        for split in ("train", "validation", "test", "unseen"):
            assert all(play(env, task) == 1 for task in env.tasks(split)[::6])


def test_questions_whose_queries_always_return_the_same_rows_have_one_key():
    env = make("intercodesql")
    generator = env.task_generator()
    db = env.find(env.tasks("train")[0])["db"]
    table, rows = env.data.tables[db][1], env.database(db)
    number, name = table.numbers[0].name, table.label.name
    most = f"SELECT MAX({number}) FROM {table.name}"
    value = rows.execute(most)[0][0]
    rows.close()

    def key(sql):
        return generator.key(dict(db=db, gold=sql))

    up = f"SELECT {name} FROM {table.name} ORDER BY {number}"
    assert key(most) == key(f"{most} -- all".lower()) == key(f"SELECT {number} FROM {table.name} ORDER BY 1 DESC LIMIT 1")
    halves = [f"SELECT {name} FROM {table.name} WHERE {number} {half} {value // 2}" for half in ("<", ">=")]
    assert key(" UNION ALL ".join(halves)) == key(" UNION ALL ".join(halves[::-1]))  # no order was asked for
    assert len({*map(key, (most, f"SELECT {value}", up, f"{up} DESC"))}) == 4


def test_splits_share_no_database_and_unseen_shares_no_noun():
    data = questions.sql_data()
    assert {k: len(v) for k, v in data.questions.items()} == {
        "train": 1000, "validation": 300, "test": 300, "unseen": 200}
    names = {s: {q["db"] for q in qs.values()} for s, qs in data.questions.items()}
    keys = {s: {questions.schema_key(data.databases[n]) for n in names[s]} for s in names}
    for a in names:
        assert len(keys[a]) == len(names[a])
        assert not any(names[a] & names[b] or keys[a] & keys[b] for b in names if b != a)
    held_out = {f"{noun}s" for noun in questions.HELD_OUT}
    for split, asked in data.questions.items():
        words = set(re.findall(r"\w+", " ".join(q["query"] for q in asked.values())))
        assert words & held_out == (held_out if split == "unseen" else set())
    assert len({(q["db"], q["query"]) for qs in data.questions.values()
                for q in qs.values()}) == 1800


SECRET = "orchard7"  # in another database; no observation may ever show it
HOLD = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) "
MANY = ", ".join(f"town t{i}" for i in range(30))
DOUBLED = ("WITH RECURSIVE r(x, n) AS (SELECT 'a', 1 UNION ALL SELECT CONCAT(x, x), n + 1 FROM r "
           "WHERE n < 14) SELECT ")
TIMES_TOWNS = " FROM r, " + ", ".join(f"town t{i}" for i in range(12)) + " WHERE n = 14"
ATTACKS = [  # one a class
    # writing, openly and inside what reads; several statements
    "INSERT INTO town VALUES (9, 'x', 1)", "CREATE TEMP TABLE z AS SELECT 1", "EXPLAIN ANALYZE DELETE FROM town",
    "WITH z AS (SELECT 1) DELETE FROM town", "SELECT * INTO z FROM town", "SELECT 1 INTO @a", "SELECT 1; DROP TABLE town",
    "SELECT 1 /* */ ; /* */ DELETE FROM town", "SELECT '1'; UPDATE town SET area = 0; --",
    # transactions, sessions, accounts, locks
    "BEGIN", "SET SESSION max_statement_time = 0", "USE mysql", "GRANT ALL ON *.* TO z", "KILL 1", "CALL z()", "SHUTDOWN",
    "SET STATEMENT max_statement_time = 1000 FOR SELECT 1", "EXECUTE IMMEDIATE 'DROP TABLE town'",
    "SELECT 1 FROM town FOR/**/UPDATE", "SELECT GET_LOCK('a', 1000)",
    # other databases and what the server knows
    "SELECT * FROM `other`.`secret`", "SHOW TABLES FROM other", "DESC other.secret", "SHOW GRANTS", "SELECT @@datadir",
    "SELECT (SELECT word FROM other . secret LIMIT 1)", "SELECT * FROM `mysql`.`user`",
    "SELECT * FROM INFORMATION_SCHEMA . PROCESSLIST",
    # sqlite's own
    "ATTACH DATABASE 'other.db' AS other", "PRAGMA query_only = OFF", "VACUUM INTO 'x.db'", "SELECT * FROM sqlite_master",
    "SELECT * FROM pragma_table_info('town')", "SELECT * FROM json_each('[1]')", "SELECT load_extension('x')",
    # files
    "SELECT load_file /**/ ('/etc/passwd')", "SELECT 1 INTO --\nOUTFILE '/tmp/x'", "SELECT readfile('/etc/passwd')",
    "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town",
    # comments that are code, odd characters
    "SELECT 1 /*! INTO OUTFILE '/tmp/x' */", "/*M! DROP TABLE town */", "# x\nDROP TABLE town", "SELECT '\ud800'", "SELECT '",
    "SELECT /*+ MAX_EXECUTION_TIME(99999) */ 1", "SELECT 1\0; DROP TABLE town", "\0", "", ";", "SHOW TABLES LIKE '\ud800'",
    "SELECT " + "(" * 3000 + "1" + ")" * 3000, "SELECT " + "1+" * 2400 + "1",
    # holding the server: with time, rows, text
    "SELECT sleep-- a\n(100)", "SELECT BENCHMARK(1000000000, MD5('a'))", HOLD + "SELECT a.x FROM r a, r b, r c, r d",
    f"SELECT COUNT(*) FROM {MANY}", f"SELECT * FROM {MANY} LIMIT 1000000", f"SELECT t0.site FROM {MANY} ORDER BY t9.site",
    "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM r) SELECT COUNT(*) FROM r",
    "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT CONCAT(x, x) FROM r) SELECT MAX(x) FROM r",
    "SELECT zeroblob(900000000)", "SELECT printf('%900000000d', 1)", "SELECT RPAD('a', 900000000, 'b')",
    "SELECT LENGTH(REGEXP_REPLACE(REPEAT('a', 9999), '(a+)+b', ''))",
    "SELECT LENGTH(GROUP_CONCAT(a.site)) FROM " + ", ".join(f"town {c}" for c in "abcdefghijklmn"),
    "WITH RECURSIVE r(x, n) AS (SELECT 'a', 0 UNION ALL SELECT x || 'a', n + 1 FROM r WHERE n < 19000) "
    "SELECT COUNT(*) FROM r WHERE x LIKE '%a%a%a%a%a%a%b'",
    *(DOUBLED + f"SUM(LENGTH({text}))" + TIMES_TOWNS for text in (
        "LOWER(r.x)", "CONCAT(r.x, t0.site)", "REPLACE(r.x, CONCAT(SUBSTR(r.x, 4000), 'b'), 'c')",
        "INSTR(r.x, CONCAT(SUBSTR(r.x, 4000), 'b'))", "r.x LIKE CONCAT(REPLACE(SUBSTR(r.x, 1, 4000), 'a', '%a'), 'b')")),
]
# Of these the database shows nothing but what is the agent's own or harmless.
HARMLESS = re.compile(r"\[\]|\[\((None|\d{1,7}|Decimal\('\d{1,7}'\)|'a'),\)\]|None")


def assert_harmless(ask, sql):
    text = str(ask(sql))
    assert SECRET not in text and "root:" not in text
    assert text.startswith("Error") or HARMLESS.fullmatch(text), (sql[:80], text[:200])


def test_attacks_on_sqlite_do_nothing(tmp_path, monkeypatch):
    """`execute` skips the check of the first word, and must be safe without it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(databases, "SECONDS", 0.3)
    for sql in ATTACKS:
        for asked in ("run", "execute")[not databases.read_only_error(sql):]:  # else they are one
            with closing(databases.Sqlite("d", SCRIPT)) as db:
                started = time.process_time()
                assert_harmless(getattr(db, asked), sql)
                # Seconds of CPU, and a hundred times the limit: one step may take longer than it.
                assert time.process_time() - started < 30, sql[:80]
                assert str(db.run("SELECT * FROM town")) == TOWNS, sql[:80]
                assert db.run("SHOW TABLES") == [("baker",), ("town",)]
    assert list(tmp_path.iterdir()) == []


def test_rows_and_steps_are_limited_query_by_query(town, monkeypatch):
    some = [", ".join(f"town t{i}" for i in range(n)) for n in range(10)]  # 3^n rows
    assert town.run(f"SELECT 1 FROM {some[9]}") == databases.TOO_LARGE
    assert len(town.run(f"SELECT 1 FROM {some[9]} LIMIT 9999")) == 9999
    monkeypatch.setattr(databases, "VM_STEPS", 20 * databases.CHECK_STEPS)
    for _ in range(3):
        assert town.run(f"SELECT COUNT(t0.site || t1.site) FROM {some[7]}") == [(3 ** 7,)]
        assert town.run(f"SELECT COUNT(t0.site || t1.site) FROM {some[9]}") == databases.INTERRUPTED


LEGAL = [  # of which the words would be none in code
    "SELECT site FROM town WHERE site <> 'Sleep (Live)'",
    "SELECT site FROM town WHERE site <> 'Open for Update' AND site <> \"into outfile\"",
    "SELECT site FROM town WHERE site <> 'it''s /*! @@a */ get_lock(1)'",
    "SELECT sys.site FROM town AS sys", "SELECT mysql.site FROM town mysql",
    "/* the sites */ SELECT site FROM town", "-- the sites\nSELECT site FROM town",
    "SELECT site -- sleep(1) for update\nFROM town /* lock in share mode */",
    "WITH a AS (SELECT site FROM town) SELECT site FROM a",
]
MARIADBS = ["(SELECT site FROM town)", "# the sites\nSELECT site FROM town", "SELECT site FROM town WHERE site <> 'it\\'s sleep(1)'"]
HIDDEN = [  # code beside strings, names and comments that hide it
    "SELECT '\\'', SLEEP(1)", "SELECT '', sleep(1) -- '", "SELECT `sleep`(1)", "SELECT sleep/*x*/(1)",
    "SELECT 1 /*!, sleep(9) */", "SELECT 1 /*M!, sleep(9) */", "SELECT \"'\", sleep(1), \"'\"",
    "SELECT `'`, sleep(1), `'` FROM t", "SELECT 1 # '\n, sleep(1) # '", "SELECT 1 -- '\n, sleep(1) -- '",
    "SELECT 1 --\x01'\n, sleep(1) -- '", "SELECT 1--', sleep(1)", "SELECT /* ' */ sleep(1) /* ' */",
    "SELECT 1 LOCK IN SHARE MODE", "SELECT is_free_lock('a')", "SELECT master_pos_wait('a', 1)",
]


def test_a_servers_query_is_checked_without_its_strings_and_comments():
    for sql in LEGAL + MARIADBS:
        assert databases.refusal(sql) is None, sql
    for sql in HIDDEN:
        assert databases.refusal(sql), sql


def test_the_check_of_a_query_does_not_backtrack_exponentially():
    """A pattern with exponential backtracking never returns."""
    for part in ("/**/", "/* a */", "--\n", "#\n", "/*", "'", "'\\", "''", "`", "\\'"):
        for sql in ("select 1 into{}x", "select sleep{}(1)", "select '{}"):
            databases.refusal(sql.format(part * (4900 // len(part))))


@pytest.mark.parametrize("whose, count, dealt", [("own", 50, [6, 2, 2]), ("InterCode's", 1034, [12, 4, 4])])
def test_real_questions_are_split_by_database_and_their_experts_replay_to_1(own, whose, count, dealt):
    env = make("intercodesql", intercode_data=str(own if whose == "own" else folder_of("INTERCODE_DATA")))
    tasks = [task for split in ("train", "validation", "test") for task in env.tasks(split)]
    assert env.test_splits == ("test",) and len(tasks) == count
    assert all(play(env, task) == 1 for task in tasks[::4])
    names = [{q["db"] for q in asked.values()} for asked in env.splits.values()]
    assert [len(found) for found in names] == dealt
    assert len(set.union(*names)) == sum(dealt) == len(env.data.databases)
    env.close()


def test_iprs_records_are_read(tmp_path):
    record = {"query": "q", "gold": "SELECT\n1", "extra": {"db": "d"}}
    for split in ("train", "test"):
        (tmp_path / f"ic_spider_{split}.json").write_text(json.dumps([record] * 4))
    (tmp_path / "train_indices.json").write_text("[3, 1]")
    with pytest.raises(environments.UsageError, match="ic_spider_dbs.sql"):
        InterCodeSQL(intercode_data=str(tmp_path))  # there is no dump
    env = InterCodeSQL(intercode_data=str(tmp_path), mysql_url="mysql://a@h")
    assert env.tasks("train") == ["intercodesql-train-3", "intercodesql-train-1"]
    assert env.find(published_task(env, "intercode_sql_3")) == dict(query="q", gold="SELECT 1", db="d")


@pytest.mark.parametrize("change, dump, told", [
    ({"gold": None}, "", "null is not a string"),
    ({}, "USE `d`;\nCREATE TABLE `t` (\n  `a` enum('x','y') DEFAULT NULL\n) ENGINE=InnoDB;\n",
     "sqlite cannot read database d .*--mysql-url$")])
def test_data_that_cannot_be_read_is_refused(tmp_path, change, dump, told):
    (tmp_path / "ic_spider_dev.json").write_text(json.dumps([dict(query="q", gold="SELECT 1", db="d") | change]))
    (tmp_path / "ic_spider_dbs.sql").write_text(dump)
    with pytest.raises(environments.UsageError, match=f"--intercode-data.*{told}") as error:
        env = InterCodeSQL(intercode_data=str(tmp_path))
        env.reset(next(task for split in env.splits for task in env.tasks(split)))
    assert "\n" not in str(error.value)


ROOT_URL, URL = "mysql://root@127.0.0.1:{}", "mysql://agent@127.0.0.1:{}"


def as_dump(name, script):
    """A database's script as a dump writes it, a column a line."""
    key = re.search(r"(\w+) int PRIMARY KEY", script)[1]
    lines = [f"CREATE DATABASE IF NOT EXISTS `{name}`;", f"USE `{name}`;"]
    for statement in filter(str.strip, re.split(r";\s*(?=CREATE|INSERT|$)", script)):
        if statement.startswith("CREATE"):
            statement = re.sub(r"REFERENCES (\w+)(?! ?\()", rf"REFERENCES \1 ({key})", statement)
            head, columns = statement.split(" (", 1)
            lines += ["SET foreign_key_checks = 0;", f"DROP TABLE IF EXISTS {head.split()[-1]};",
                      f"{head} (", re.sub(r", (?=\w+ |FOREIGN)", ",\n", columns[:-1]), ");"]
        else:
            lines.append(f"{statement};")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder of InterCode's form with ten of the generated databases."""
    folder, data = tmp_path_factory.mktemp("intercode"), questions.sql_data()
    names = [name for name, script in data.databases.items() if " load " not in script][:10]
    asked = [q for split in data.questions.values() for q in split.values() if q["db"] in names]
    (folder / "ic_spider_dev.json").write_text(json.dumps(asked))
    (folder / "ic_spider_dbs.sql").write_text(
        "".join(as_dump(name, data.databases[name]) for name in names))
    return folder


@pytest.mark.parametrize("wrong, said", [(0, ""), (1, "1 of 50 gold queries fail, such as 'SELECT x"),
                                         (2, "--intercode-data: 2 of 50 gold queries fail, such as")])
def test_failing_gold_queries_are_counted_before_a_run(own, tmp_path, wrong, said):
    """More than 2 % are refused."""
    folder = shutil.copytree(own, tmp_path / "data")
    asked = json.loads((folder / "ic_spider_dev.json").read_text())[:50]
    for question in asked[:wrong]:
        question["gold"] = "SELECT x FROM nowhere"
    (folder / "ic_spider_dev.json").write_text(json.dumps(asked))
    env = make("intercodesql", intercode_data=str(folder))
    if wrong < 2:
        assert env.check([*env.splits]).startswith(said)
    else:
        with pytest.raises(UsageError, match=re.escape(said)):
            env.check([*env.splits])
    assert make("intercodesql").check(["train"]) == ""  # generated databases


class OtherSqlite:
    """A build of sqlite without mathematical functions."""

    def __init__(self, *arguments, **options):
        self.db = sqlite3.connect(*arguments, **options)

    def execute(self, sql):
        if "pragma_function_list" in sql:
            return [("abs",), ("lower",)]
        return self.db.execute(sql)

    def __getattr__(self, name):
        return getattr(self.db, name)


def test_another_build_of_sqlite_is_completed(town, monkeypatch):
    values = [f"{function}({number})" for number in ("2.5", "-2.5", "3", "0", "NULL", "'abc'")
              for function in ("ceil", "ceiling", "floor", "sqrt", "sign")]
    values += [f"{function}({x}, {y})" for x, y in ((7, 3), (2.5, -2), (-7, 2), (2, 0), ("NULL", 2))
               for function in ("pow", "power", "mod")]
    query = f"SELECT {', '.join(values)}"
    expected = town.run(query)
    monkeypatch.setattr(databases, "sqlite3", SimpleNamespace(**vars(sqlite3) | dict(connect=OtherSqlite)))
    with closing(databases.Sqlite("d", SCRIPT)) as other:
        assert other.run(query) == expected


@pytest.fixture(scope="module", autouse=True)
def password():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYSQL_PWD", "s3cret")
        yield


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory, own):
    """The port of a MariaDB with the databases of `own`, d, other and world_1."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    server, install = (shutil.which(f"mariadb{name}", path=path) for name in ("d", "-install-db"))
    if not server or not install:
        pytest.skip("mariadbd is not installed (Debian: apt-get install mariadb-server)")
    pymysql = pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    folder = tmp_path_factory.mktemp("mariadb")
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--no-defaults", f"--user={user}", f"--datadir={folder}/data"]
    subprocess.run([install, *common, "--auth-root-authentication-method=normal", "--skip-test-db"],
                   check=True, capture_output=True)

    def answers():
        with suppress(pymysql.MySQLError):
            databases.connect(ROOT_URL.format(port), password="").close()
            return True

    with open(folder / "log", "a") as log:
        running = subprocess.Popen(
            [server, *common, f"--socket={folder}/s", f"--pid-file={folder}/pid",
             "--bind-address=127.0.0.1", f"--port={port}", "--lower-case-table-names=1",
             "--skip-log-bin", "--max-statement-time=2"], stdout=log, stderr=log)
    try:
        wait_until(answers, "MariaDB to answer")
        dump = folder / "more.sql"  # world_1's name has a character that stands for any
        dump.write_text("CREATE DATABASE d;\nUSE `d`;\n" + SCRIPT.replace(";", ";\n") +
                        "CREATE DATABASE other;\nUSE `other`;\nCREATE TABLE secret (word text);\n"
                        f"INSERT INTO secret VALUES ('{SECRET}');\n"
                        "CREATE DATABASE world_1;\nUSE `world_1`;\n")
        for path, count in ((own / "ic_spider_dbs.sql", 10), (dump, 3)):
            names = spider.load_intercode(path, ROOT_URL.format(port), URL.format(port))
            assert len(names) == count
        yield port
    finally:
        running.terminate()
        running.wait()


def root_query(port, sql, **options):
    with databases.connect(ROOT_URL.format(port), password="", **options) as root, root.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@pytest.fixture
def server(mariadb):
    """Database d, as an agent has it."""
    with closing(databases.MySQL("d", URL.format(mariadb))) as db:
        yield db


def plain(rows):
    """How often there is which row: numbers, dates and text as text without case and zeros."""
    def as_text(value):
        try:
            return f"{float(value):.4g}"
        except (TypeError, ValueError):
            return str(value).lower()
    return Counter(tuple(map(as_text, row)) for row in rows)


@pytest.mark.parametrize("whose, refused, unlike", [("own", [], 0), ("InterCode's", [2, 2, 2], 41)])
def test_gold_queries_score_1_on_mariadb_and_most_are_answered_alike_by_sqlite(mariadb, own, whose, refused, unlike):
    if whose != "own":
        own = folder_of("INTERCODE_DATA")
        spider.load_intercode(own / "ic_spider_dbs.sql", ROOT_URL.format(mariadb), URL.format(mariadb))
    env = make("intercodesql", intercode_data=str(own), mysql_url=URL.format(mariadb))
    failed, below, other = Counter(), [], 0
    for task in (task for split in env.splits for task in env.tasks(split)):
        question = env.find(task)
        env.reset(task)
        if env.step(act(question["gold"])).observation.startswith("Error"):
            failed[question["gold"]] += 1  # syntax that MariaDB refuses
            continue
        result = env.last_answer
        if env.step(act("submit")).reward != 1.0:  # its LIMIT chooses among rows of equal order
            below.append((question["db"], question["gold"]))
        with closing(databases.Sqlite("d", env.data.databases[question["db"]])) as embedded:
            other += plain(result) != plain(embedded.run(question["gold"]))
    env.close()
    assert [*failed.values()] == refused and len(below) <= 4 * (whose != "own") and other <= unlike


@pytest.mark.parametrize("mode", ["", "ONLY_FULL_GROUP_BY", "ANSI_QUOTES", "TRADITIONAL"])
def test_the_mode_of_a_server_makes_no_difference(mariadb, mode):
    root_query(mariadb, f"SET GLOBAL sql_mode = '{mode}'")
    with closing(databases.MySQL("d", URL.format(mariadb))) as db:
        rows = db.run('SELECT site, MAX(area) FROM town WHERE site = "Avon"')
    assert rows == [("Avon", 30)]


def test_legal_golds_and_answers_score_1_whatever_their_texts_say(mariadb, own, small):
    for gold in LEGAL:
        assert submitted(small(gold), "SELECT site FROM town") == 1, gold
    env = InterCodeSQL(intercode_data=str(own), mysql_url=URL.format(mariadb))
    for gold in [*LEGAL, *MARIADBS, "SELECT site FROM town LIMIT 3 FOR UPDATE"]:
        env.start(dict(query="q", gold=gold, db="d"))
        assert submitted(env, "SELECT site FROM town") == 1, gold
    env.start(dict(query="q", gold="SELECT word FROM other.secret", db="d"))
    with pytest.raises(envs.EnvError, match="the gold query of 'q': .*denied"):
        env.step(act("submit"))
    env.close()


def test_attacks_on_mariadb_do_nothing_and_nothing_runs_on(mariadb):
    asked = ("SELECT info FROM information_schema.processlist WHERE command = 'Query' AND user = "
             f"'{databases.database_user(URL, 'd')}'")
    for sql in ATTACKS:
        with closing(databases.MySQL("d", URL.format(mariadb))) as db:
            assert_harmless(db.run, sql)
            assert str(db.run("SELECT * FROM town")) == TOWNS, sql[:80]
            assert db.run("SHOW TABLES") == [("baker",), ("town",)]
        wait_until(lambda: not root_query(mariadb, asked), f"this query to end: {sql[:80]}")


def test_mariadb_refuses_attacks_without_the_check(mariadb):
    count = "SELECT COUNT(*) FROM information_schema.tables"
    before = root_query(mariadb, count)
    for sql in ("UPDATE town SET area = 0", "WITH z AS (SELECT 1) DELETE FROM town",
                "CREATE TABLE z (a int)", "DROP DATABASE d", "SELECT 1; DELETE FROM town",
                "SELECT * FROM other.secret", "SHOW CREATE TABLE other.secret", "USE other", "KILL 1",
                "SELECT 1 INTO OUTFILE '/tmp/x'", "CREATE USER z", "SHUTDOWN",
                "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town",
                "SET GLOBAL max_connections = 1"):
        with closing(databases.MySQL("d", URL.format(mariadb))) as db:
            assert str(db.execute(sql)).startswith("Error"), sql
            assert str(db.run("SELECT * FROM town")) == TOWNS
            assert db.execute("SELECT LOAD_FILE('/etc/passwd')") == [(None,)]
    assert root_query(mariadb, count) == before
    user = databases.database_user(URL, "world_1")  # in a GRANT an underscore stands for any character
    grants = root_query(mariadb, f"SHOW GRANTS FOR {user}@'%'")
    assert [grant for grant, in grants if "SELECT" in grant] == [
        f"GRANT SELECT ON `world\\_1`.* TO `{user}`@`%`"]


def test_the_server_and_then_the_client_limit_time_and_rows(mariadb, server):
    """The server stops a query that passed the checks. If the server has no limit, the client's
    read timeout ends the episode."""
    assert server.execute("SELECT @@max_statement_time, @@sql_select_limit") == [
        (float(databases.SECONDS), databases.MAX_ROWS + 1)]
    million = "SELECT t0.site FROM " + ", ".join(f"town t{i}" for i in range(13))  # 3^13 rows
    with server._connection.cursor() as cursor:  # a cursor that would take all there are
        assert cursor.execute(million) == databases.MAX_ROWS + 1
        with pytest.raises(Exception, match="max_statement_time exceeded"):
            cursor.execute(HOLD + "SELECT COUNT(*) FROM r a, r b, r c")
    assert server.run(million) == databases.TOO_LARGE
    assert str(server.run("SELECT * FROM town")) == TOWNS  # and the next query is answered
    assert server.execute(f"{HOLD}SELECT COUNT(*) FROM r a, r b, r c") == databases.INTERRUPTED
    assert server.run("SELECT 1") == [(1,)]
    server.execute("SET SESSION max_statement_time = 0")
    with pytest.raises(envs.EnvError, match="timed out"):
        server.execute("SELECT SLEEP(8)")


def test_no_state_leaks_into_the_next_episode(mariadb, own, monkeypatch):
    monkeypatch.setattr(databases, "refusal", lambda sql: None)  # to leave as much as can be left
    env = InterCodeSQL(intercode_data=str(own), mysql_url=URL.format(mariadb))
    question = dict(query="q", gold="SELECT 1", db="d")
    env.start(question)
    for sql in ("SELECT @a := 5", "SET @a = 5", "USE world_1", "BEGIN", "SET autocommit = 0",
                "CREATE TEMPORARY TABLE z (a int)", "SELECT 1"):
        env.step(act(sql))
    env.start(question)
    assert env.step(act("SHOW TABLES")).observation == "[('baker',), ('town',)]"
    assert "5" not in env.step(act("SELECT @a")).observation
    assert env.step(act("submit")).reward == 0  # the last episode's result is gone
    env.close()


@pytest.mark.parametrize("code", [0, 1927, 2013])  # 0: PyMySQL's socket is gone
def test_a_lost_connection_ends_the_episode_and_the_next_one_connects(mariadb, monkeypatch, code):
    import pymysql
    env, failures = make("intercodesql", mysql_url=URL.format(mariadb)), []

    def shown():
        env.start(dict(query="q", gold="SELECT 1", db="d"))
        return env.step(act("SHOW TABLES")).observation

    def lost(cursor):
        failures.append(code)
        raise pymysql.err.OperationalError(code, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(databases, "_fetch", lost)
        with pytest.raises(envs.EnvError, match="d: gone; check that the server runs.*[^?]$"):
            shown()
    assert len(failures) == 1  # the connection itself does not retry
    assert shown() == "[('baker',), ('town',)]"
    env.close()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x04\0\0\0\x0a5.5", None])
def test_a_server_that_is_no_database_ends_the_episode(says):
    """None: no server listens."""
    pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer():
            with server.accept()[0] as connection:
                connection.sendall(says)

        where = f"127.0.0.1:{server.getsockname()[1]}"
        server.close() if says is None else threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(envs.EnvError, match=f"mysql://{where}, database d") as error:
            databases.MySQL("d", f"mysql://agent@{where}")
        assert "s3cret" not in str(error.value) and "\n" not in str(error.value)


def test_a_user_without_privileges_gets_the_remedy(mariadb, tmp_path, monkeypatch):
    """The database is not loaded, the password is wrong, or the user may only read."""
    for name, password in (("elsewhere", "s3cret"), ("d", "s3cretx")):
        monkeypatch.setenv("MYSQL_PWD", password)
        with pytest.raises(environments.UsageError, match=f"database {name}: .*denied.*intercodesql.spider") as error:
            databases.MySQL(name, URL.format(mariadb))
        assert "s3cret" not in str(error.value) and "\n" not in str(error.value)
    for name in "MYSQL_PWD", "MYSQL_ADMIN_PWD":
        monkeypatch.setenv(name, "s3cret")
    dump, url = tmp_path / "dump.sql", URL.format(mariadb)
    dump.write_text("USE `d`;\nSELECT 1;\n")
    with pytest.raises(envs.EnvError, match="denied.*may create databases and users"):
        spider.load_intercode(dump, url.replace("agent", databases.database_user(url, "other")), url)


def test_a_dump_is_loaded_again_over_what_is_there(mariadb, own, tmp_path):
    """Over a whole load, which ends between a parent table and its child's rows, and over that."""
    whole = (own / "ic_spider_dbs.sql").read_text(encoding="utf-8")
    (tmp_path / "cut.sql").write_text(whole[:whole.index("INSERT INTO farmers")])

    def counts():
        return [root_query(mariadb, f"SELECT COUNT(*) FROM farm_1.{table}")[0][0]
                for table in ("farmers", "farms")]

    before = counts()
    root_query(mariadb, "DELETE FROM farm_1.farmers LIMIT 5")
    for dump in (tmp_path / "cut.sql", own / "ic_spider_dbs.sql"):
        spider.load_intercode(dump, ROOT_URL.format(mariadb), URL.format(mariadb))
        assert counts()[1:] == before[1:] and counts()[0] in (0, before[0])
    assert counts() == before and min(before) > 0
    with closing(databases.MySQL("Farm_1", URL.format(mariadb))) as db:
        assert db.run("SELECT COUNT(*) FROM Farms") == [(before[1],)]


def test_a_run_on_the_server_holds_no_password(mariadb, own, small_model, tmp_path, monkeypatch, capsys):
    flags = ["--env", "intercodesql", "--model", small_model, "--intercode-data", own, "--view", "short",
             "--method", "eto", "--train-tasks", 3, "--eval-tasks", 2, "--iterations", 1,
             "--max-tokens", 512, "--max-new-tokens", 8, "--out", tmp_path / "run"]
    program(*flags, "--mysql-url", URL.format(mariadb).replace(":s3cret", ""))
    files = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    said = capsys.readouterr()
    assert "target" in said.out and len(files) > 10
    for text in (said.out.encode(), said.err.encode(), *files):
        assert b"s3cret" not in text


def test_an_address_with_a_password_is_refused():
    """The files of a run would contain it."""
    flags = ["--env", "intercodesql", "--model", "m", "--intercode-data", str(ROOT), "--mysql-url"]
    for url in "mysql://agent@h:3306", "mysql://agent@h":
        settings.parse([*flags, url], coevolve.Settings, coevolve.METHODS, environment)
    for url in "mysql://agent:s3cret@h:3306", "mysql://agent:@h":
        with pytest.raises(environments.UsageError, match="with the password in MYSQL_PWD"):
            settings.parse([*flags, url], coevolve.Settings, coevolve.METHODS, environment)


def test_a_dump_without_a_database_is_refused():
    with pytest.raises(environments.UsageError, match="README.md: it has no database"):
        spider.main([str(ROOT / "README.md"), "--admin-url", "mysql://a@h", "--mysql-url", "mysql://b@h"])
