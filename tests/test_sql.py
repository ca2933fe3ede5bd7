"""InterCodeSQL: rewards, replies, databases in sqlite and on a MariaDB server, hostile queries."""

import datetime
import decimal
import getpass
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from ast import literal_eval
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from unittest.mock import Mock

import pytest
from conftest import DATA, ROOT, folder_of, program, refusal, refused, table, wait_until

import envs
from common.settings import UsageError
from environments import make
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
            "datetime": datetime.datetime.fromisoformat}[kind](text)


def rows(value):
    if isinstance(value, dict):  # {"text": ...} or {"none": true}
        return value.get("text")
    return [tuple(map(cell, row)) for row in value]


def test_reward_agrees_with_the_official_reward_on_all_vectors():
    vectors = json.loads((DATA / "intercode/reward_vectors.json").read_text())
    assert len(vectors) == 150
    for v in vectors:
        assert sql_reward(rows(v["agent"]), rows(v["gold"])) == v["reward"], v


def lines(text):
    """Returns the lines of a text. In a line, ⏎ is a line break."""
    return [line.strip().replace("⏎", "\n") for line in text.strip().splitlines()]


@pytest.mark.parametrize("reply, sql", table("""
    Thought: x⏎Action: ⏎```sql⏎SELECT 1⏎FROM t⏎``` -> SELECT 1
    Action:⏎```sql⏎SELECT 1⏎```⏎Action:⏎```sql⏎SELECT 2⏎``` -> SELECT 1
    ```sql⏎SELECT 2⏎```⏎Action:⏎```sql⏎SELECT 1⏎``` -> SELECT 1
    Thought: I submit.⏎Action:⏎```sql⏎SELECT 1⏎``` -> SELECT 1
    Action:submit. -> submit
    Action:⏎```sql⏎SELECT submit_date FROM t⏎``` -> submit
    Action: Submit -> None
    Action:⏎```SQL⏎SELECT 1⏎``` -> None
    Action:⏎```sql⏎SELECT 1 -> None
    Action:⏎```sql⏎``` -> None
    ```sql⏎SELECT 1⏎``` -> None
    submit -> None
"""))
def test_replies_are_read_as_the_official_agents_read_them(reply, sql):
    """Only the first line of a query counts, and nothing before "Action:"."""
    assert str(parse_sql_reply(reply.replace("⏎", "\n"))) == sql


def act(sql):
    return f"Thought: t\nAction: {sql}" if sql == "submit" else f"Action:\n```sql\n{sql}\n```"


def submitted(env, *queries):
    """Returns the last step of an episode with these queries and a submission."""
    for sql in queries:
        env.step(act(sql))
    return env.step(act("submit"))


SCRIPT = """\
CREATE TABLE town (town_id int PRIMARY KEY, site varchar(20), area int);
INSERT INTO town VALUES (1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10);
CREATE TABLE baker (name varchar(20), town_id int);
INSERT INTO baker VALUES ('Ann', 1);
"""
TOWNS = "[(1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10)]"


def starting(env):
    """Returns start(gold), which starts an episode in database d and returns the environment."""
    def start(gold="SELECT site FROM town"):
        env.start(dict(query="which towns?", gold=gold, db="d"))
        return env
    return start


@pytest.fixture
def small():
    """start(gold) -> an environment over the two small tables of SCRIPT."""
    with closing(make("intercodesql")) as env:
        env.database = lambda name: databases.Sqlite(name, SCRIPT)
        yield starting(env)


@pytest.fixture
def town():
    """Database d of SCRIPT in sqlite."""
    with closing(databases.Sqlite("d", SCRIPT)) as db:
        yield db


NEAR = ("You have an error in your SQL syntax; check the manual that corresponds to your MySQL server "
        "version for the right syntax to use near")


@pytest.mark.parametrize("sql, text", table(f"""
    SELECT site FROM town WHERE x = 1 -> Unknown column 'x' in 'where clause'
    SELECT site FROM town GROUP BY x -> Unknown column 'x' in 'group statement'
    DESC towns -> Table 'd.towns' doesn't exist
    SELECT 1 FROM towns -> Table 'd.towns' doesn't exist
    SELECT town_id FROM town JOIN baker ON area > 1 -> Column 'town_id' in field list is ambiguous
    SELECT f ( area ) FROM town -> FUNCTION d.f does not exist
    SELECT site FROM FROM town -> {NEAR} 'FROM town' at line 1
    SELECT site FROM town WHERE -> {NEAR} '' at line 1
    SELECT site FROM town, 'a -> {NEAR} ''a' at line 1
    SELECT site FROM town WHERE MAX(area) > 1 -> Invalid use of group function
    check the site -> Only SELECT, WITH, SHOW (of tables, columns, indexes), DESC, DESCRIBE and EXPLAIN are allowed
    SHOW CREATE TABLE town -> Only SHOW TABLES, SHOW COLUMNS and DESC of a table are answered here
"""))
def test_sqlite_returns_the_error_messages_of_mysql(town, sql, text):
    """The shipped tiny model was trained on these messages."""
    assert town.run(sql) == f"Error executing query: {text}"


LISTED = ("CREATE TABLE Writer (name text NOT NULL, country varchar(20) DEFAULT 'Bo', years int, id int PRIMARY KEY,"
          " FOREIGN KEY (years) REFERENCES Writer (id));"
          "INSERT INTO Writer VALUES ('Carl', 'Egypt', 20, 1), ('Max', 'egypt', 98, 2), ('Ann', 'Spain', 37, 3);")
COLUMNS = """[('name', 'text', 'NO', '', None, ''), ('country', 'varchar(20)', 'YES', '', "'Bo'", ''), \
('years', 'int', 'YES', 'MUL', None, ''), ('id', 'int', 'NO', 'PRI', None, '')]"""


@pytest.mark.parametrize("sql, answer", table(f"""
    show tables; -> [('Writer',)]
    SHOW COLUMNS FROM `writer` -> {COLUMNS}
    describe WRITER ; -> {COLUMNS}
    /* all */ DESC Writer -- all -> {COLUMNS}
    SELECT DISTINCT country FROM writer -> [('Egypt',), ('Spain',)]
    SELECT 9 / 2 / 3, '7/2', 1/0 -- a / b -> [(1.5, '7/2', None)]
    WITH a AS (SELECT 1 AS x) SELECT `x` FROM a LEFT JOIN writer ON 0 -> [(1,)]
"""))
def test_sqlite_returns_the_rows_of_mysql(sql, answer):
    """DISTINCT compares without case, and a slash in a text or a comment is no division."""
    with closing(databases.Sqlite("d", LISTED)) as db:
        assert str(db.run(sql)) == answer


# Results of MariaDB 10.11 for unusual arguments, which a test below compares with a server's
CALLS = table("""
    YEAR(NULL) -> None
    YEAR('abc') -> None
    YEAR('2020-05') -> None
    YEAR('2020-02-30') -> None
    YEAR('12:30:00') -> None
    YEAR(2020) -> None
    YEAR(1.5) -> None
    YEAR(1e30) -> None
    YEAR('now') -> None
    YEAR('2020-1-2') -> 2020
    YEAR('20-01-02') -> 2020
    YEAR('70-01-02') -> 1970
    YEAR(' 2020.01.02 10:11:12') -> 2020
    YEAR('2020-01-02x') -> 2020
    YEAR(200102) -> 2020
    YEAR(20200102.7) -> 2020
    YEAR('2020-00-00') -> 2020
    YEAR(x'323032302d30312d3032') -> 2020
    YEAR(0) -> 0
    YEAR(101) -> 2000
    MONTH(1231) -> 12
    DAY('2020-02-29') -> 29
    LEFT('abcdef', 5/2) -> 'abc'
    LEFT('abcdef', '2.7') -> 'ab'
    LEFT('abcdef', ' 3x') -> 'abc'
    LEFT('abcdef', 'x') -> ''
    LEFT('abcdef', -1) -> ''
    LEFT('abcdef', 1e30) -> 'abcdef'
    LEFT(12345, 2) -> '12'
    LEFT('abc', NULL) -> None
    RIGHT('abcdef', 2.5) -> 'def'
    RIGHT('abcdef', 0) -> ''
    RIGHT('abcdef', 99) -> 'abcdef'
    IF('abc', 1, 2) -> 2
    IF('1abc', 1, 2) -> 1
    IF('0.5', 1, 2) -> 1
    IF(0.4, 1, 2) -> 1
    IF(NULL, 1, 2) -> 2
    GREATEST('a', 'B') -> 'B'
    GREATEST('2', '10') -> '2'
    GREATEST(1, NULL) -> None
    LEAST(2, 10) -> 2
    CONCAT(1, NULL) -> None
    CONCAT(1, 2.5, 'a') -> '12.5a'
    CONCAT_WS(NULL, 'a', 'b') -> None
    CONCAT_WS(',', 'a', NULL, 'b') -> 'a,b'
    CHAR_LENGTH(12.5) -> 4
    CHAR_LENGTH(x'414243') -> 3
""")
# sqlite's functions of time that read the clock or the time zone
ON_A_FIXED_DAY = table("""
    date() -> '2024-09-01'
    datetime('NOW', 'localtime') -> '2024-09-01 12:00:00'
    time('now', 'UTC') -> '12:00:00'
    datetime('2020-01-02', 'localtime') -> '2020-01-02 00:00:00'
    date(CAST(x'6e6f770041' AS text)) -> '2024-09-01'
    julianday() -> 2460555.0
    strftime('%Y-%m-%d %H') -> '2024-09-01 12'
    strftime('%Y', 'now', '-1 year') -> '2023'
    date('2020-02-29', '+1 year') -> '2021-03-01'
    date(NULL) -> None
    date(2459000.5) -> '2020-05-31'
""")


def test_sqlite_functions_return_the_values_of_mysql_on_a_fixed_day(town):
    for call, value in CALLS + ON_A_FIXED_DAY:
        assert town.run(f"SELECT {call}") == [(literal_eval(value),)], call


def test_the_values_of_these_calls_are_mariadbs(server):
    for call, value in CALLS:
        assert server.run(f"SELECT {call}") == [(literal_eval(value),)], call


FARM = json.loads((DATA / "intercode/mysql_answers.json").read_text())["farm_1"]


def by_value(answer):
    """Returns rows with numbers of three digits and all other values as texts, or "error"."""
    def rounded(value):
        numbers = (int, float, decimal.Decimal)
        return round(float(value), 3) if isinstance(value, numbers) else str(value)
    return "error" if isinstance(answer, str) else [tuple(map(rounded, row)) for row in answer]


def test_built_in_databases_answer_as_mariadb_10_11_did():
    """The queries are of the kinds that models send."""
    with closing(databases.Sqlite("farm_1", FARM["script"])) as farm:
        for sql, answer in FARM["answers"]:
            assert by_value(farm.run(sql)) == by_value(rows(answer)), sql


def test_the_short_view_shows_two_digits_and_names_alone():
    with closing(make("intercodesql", "short")) as env:
        env.database = lambda name: databases.Sqlite(name, LISTED)
        env.start(dict(query="q", gold="SELECT COUNT(*), AVG(years) FROM writer", db="d"))
        assert env.step("DESC writer").observation == "name | country | years | id"
        # As the small model's tokenizer writes it.
        shown = env.step("SELECT COUNT ( * ) , AVG ( years ) FROM writer").observation
        assert shown == "3 , 51.67"


@pytest.mark.parametrize("queries, reward", table("""
    SELECT site, area FROM town; SELECT site FROM town -> 1
    SELECT site FROM town; DESC town -> 0
    SELECT site FROM town ORDER BY site DESC -> -1
    SELECT -> 0
    -> 0
"""))
def test_the_last_result_is_what_is_submitted(small, queries, reward):
    """A reply without an action changes nothing. Rewards below 0 are clipped."""
    env = small()
    for sql in queries.split("; "):
        env.step(act(sql))
    assert env.step("no action").observation == EXPLANATION
    assert submitted(env) == envs.Step("submitted", max(int(reward), 0), True, int(reward))


def test_a_long_result_is_shown_cut_and_submitted_whole(small):
    many = "SELECT a.site, b.site, c.site FROM town a, town b, town c"
    env = small(gold=many)
    shown = env.step(act(many)).observation
    assert shown.startswith("[('Avon', 'Avon', 'Avon'), ") and len(shown) == 353 and shown.endswith("...")
    assert submitted(env).reward == 1


def test_an_answer_to_a_failing_gold_query_is_scored_as_by_intercode(small):
    assert submitted(small("SELECT nowhere FROM town"), "SELECT site FROM town WHERE area > 90").reward == 1
    for gold, told in (("SELECT * FROM sqlite_master", "denied"),
                       ("SELECT 1 FROM " + ", ".join(f"town t{i}" for i in range(9)), "more than 10,000 rows")):
        with pytest.raises(envs.EnvError, match=f"the gold query of 'which towns.*{told}"):
            submitted(small(gold), "SELECT site FROM town")


@pytest.mark.parametrize("one, other, same", table("""
    SELECT MAX(marks) FROM farmers -> select max(marks)  from farmers; -- all -> True
    SELECT MAX(marks) FROM farmers -> SELECT marks FROM farmers ORDER BY 1 DESC LIMIT 1 -> True
    SELECT MAX(marks) FROM farmers -> SELECT 75 -> False
    SELECT 1 UNION ALL SELECT 2 -> SELECT 2 UNION ALL SELECT 1 -> True
    SELECT name FROM farmers ORDER BY marks -> SELECT name FROM farmers ORDER BY marks DESC -> False
"""))
def test_questions_whose_queries_always_return_the_same_rows_have_one_key(one, other, same):
    """The order of rows counts only after ORDER BY. In this database the maximum is 75."""
    generator = make("intercodesql").task_generator()
    first, second = (generator.key(dict(db="farm_1", gold=sql)) for sql in (one, other))
    assert str(first == second) == same


def test_only_unseen_questions_have_held_out_nouns_and_no_question_repeats():
    for split, rows in questions.sql_data().questions.items():
        text = " ".join(q["query"] for q in rows.values())
        held_out = {noun for noun in questions.HELD_OUT if f" {noun}s" in text}
        assert held_out == (questions.HELD_OUT if split == "unseen" else set())
        assert len({(q["db"], q["query"]) for q in rows.values()}) == len(rows)


SECRET = "orchard7"  # in another database; no observation may ever show it
MANY = ", ".join(f"town t{i}" for i in range(30))
R = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)"
TEXT_R = "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT"
DOUBLED = ("WITH RECURSIVE r(x, n) AS (SELECT 'a', 1 UNION ALL SELECT CONCAT(x, x), n + 1 FROM r "
           "WHERE n < 14) SELECT SUM(LENGTH(")
TIMES_TOWNS = ")) FROM r, " + ", ".join(f"town t{i}" for i in range(12)) + " WHERE n = 14"
ATTACKS = {  # purpose -> queries, one of each kind
    "write": """
        INSERT INTO town VALUES (9, 'x', 1)
        CREATE TEMP TABLE z AS SELECT 1
        EXPLAIN ANALYZE DELETE FROM town
        WITH z AS (SELECT 1) DELETE FROM town
        SELECT * INTO z FROM town
        SELECT 1 INTO @a
        SELECT 1 /* */ ; /* */ DELETE FROM town
        SELECT '1'; UPDATE town SET area = 0; --""",
    "change the session or hold a lock": """
        BEGIN
        SET STATEMENT max_statement_time = 1000 FOR SELECT 1
        EXECUTE IMMEDIATE 'DROP TABLE town'
        SELECT 1 FROM town FOR/**/UPDATE
        SELECT GET_LOCK('a', 1000)""",
    "read another database or what the server knows": """
        SELECT * FROM `other`.`secret`
        SELECT (SELECT word FROM other . secret LIMIT 1)
        SHOW TABLES FROM other
        DESC other.secret
        SHOW GRANTS
        SELECT @@datadir
        SELECT * FROM INFORMATION_SCHEMA . PROCESSLIST""",
    "use what only sqlite has": """
        ATTACH DATABASE 'other.db' AS other
        PRAGMA query_only = OFF
        VACUUM INTO 'x.db'
        SELECT * FROM sqlite_master
        SELECT * FROM pragma_table_info('town')
        SELECT * FROM json_each('[1]')
        SELECT load_extension('x')""",
    "use files": """
        SELECT load_file /**/ ('/etc/passwd')
        SELECT 1 INTO --⏎OUTFILE '/tmp/x'
        SELECT readfile('/etc/passwd')
        LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town""",
    "hide in comments or odd characters": f"""
        SELECT 1 /*! INTO OUTFILE '/tmp/x' */
        /*M! DROP TABLE town */
        # x⏎DROP TABLE town
        SELECT '
        SELECT '\ud800'
        SHOW TABLES LIKE '\ud800'
        SELECT /*+ MAX_EXECUTION_TIME(99999) */ 1
        SELECT 1\0; DROP TABLE town
        ;
        SELECT {"(" * 3000}1{")" * 3000}
        SELECT {"1+" * 2400}1""",
    "hold the server with time, rows or text": f"""
        SELECT sleep-- a⏎(100)
        SELECT BENCHMARK(1000000000, MD5('a'))
        {R} SELECT a.x FROM r a, r b, r c, r d
        SELECT COUNT(*) FROM {MANY}
        SELECT * FROM {MANY} LIMIT 1000000
        SELECT t0.site FROM {MANY} ORDER BY t9.site
        {TEXT_R} x || x FROM r) SELECT COUNT(*) FROM r
        {TEXT_R} CONCAT(x, x) FROM r) SELECT MAX(x) FROM r
        SELECT zeroblob(900000000)
        SELECT printf('%900000000d', 1)
        SELECT RPAD('a', 900000000, 'b')
        SELECT LENGTH(REGEXP_REPLACE(REPEAT('a', 9999), '(a+)+b', ''))
        SELECT LENGTH(GROUP_CONCAT(t0.site)) FROM {MANY}
        {DOUBLED}LOWER(r.x){TIMES_TOWNS}
        {DOUBLED}CONCAT(r.x, t0.site){TIMES_TOWNS}
        {DOUBLED}REPLACE(r.x, CONCAT(SUBSTR(r.x, 4000), 'b'), 'c'){TIMES_TOWNS}
        {DOUBLED}INSTR(r.x, CONCAT(SUBSTR(r.x, 4000), 'b')){TIMES_TOWNS}
        {DOUBLED}r.x LIKE CONCAT(REPLACE(SUBSTR(r.x, 1, 4000), 'a', '%a'), 'b'){TIMES_TOWNS}""",
}
QUERIES = ["", *lines("\n".join(ATTACKS.values()))]
# Of these the database shows nothing but what is the agent's own or harmless.
HARMLESS = re.compile(r"\[\]|\[\((None|\d{1,7}|Decimal\('\d{1,7}'\)|'a'),\)\]|None")


def assert_harmless(db, ask, sql):
    text = str(ask(sql))
    assert SECRET not in text and "root:" not in text
    assert text.startswith("Error") or HARMLESS.fullmatch(text), (sql[:80], text[:200])
    assert str(db.run("SELECT * FROM town")) == TOWNS, sql[:80]
    assert db.run("SHOW TABLES") == [("baker",), ("town",)]


def test_attacks_on_sqlite_do_nothing(tmp_path, monkeypatch):
    """`execute` skips the check of the first word, and must be safe without it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(databases, "SECONDS", 0.3)
    for sql in QUERIES:
        with closing(databases.Sqlite("d", SCRIPT)) as db:
            started = time.process_time()
            assert_harmless(db, db.execute, sql)
            # Seconds of CPU, and a hundred times the limit: one step may take longer than it.
            assert time.process_time() - started < 30, sql[:80]
    assert list(tmp_path.iterdir()) == []


def test_rows_and_steps_are_limited_query_by_query(town, monkeypatch):
    some = [", ".join(f"town t{i}" for i in range(n)) for n in range(10)]  # 3^n rows
    assert town.run(f"SELECT 1 FROM {some[9]}") == databases.TOO_LARGE
    assert len(town.run(f"SELECT 1 FROM {some[9]} LIMIT 9999")) == 9999
    monkeypatch.setattr(databases, "VM_STEPS", 20 * databases.CHECK_STEPS)
    for _ in range(3):
        assert town.run(f"SELECT COUNT(t0.site || t1.site) FROM {some[7]}") == [(3 ** 7,)]
        assert town.run(f"SELECT COUNT(t0.site || t1.site) FROM {some[9]}") == databases.INTERRUPTED


LEGAL = lines("""
    SELECT site FROM town WHERE site <> 'Sleep (Live)'
    SELECT site FROM town WHERE site <> 'Open for Update' AND site <> "into outfile"
    SELECT site FROM town WHERE site <> 'it''s /*! @@a */ get_lock(1)'
    SELECT sys.site FROM town AS sys
    SELECT mysql.site FROM town mysql
    /* the sites */ SELECT site FROM town
    -- the sites⏎SELECT site FROM town
    SELECT site -- sleep(1) for update⏎FROM town /* lock in share mode */
    WITH a AS (SELECT site FROM town) SELECT site FROM a
""")  # their texts, names and comments have words that are refused in code
MARIADBS = lines("""
    (SELECT site FROM town)
    # the sites⏎SELECT site FROM town
    SELECT site FROM town WHERE site <> 'it\\'s sleep(1)'
""")
HIDDEN = lines("""
    SELECT '\\'', SLEEP(1)
    SELECT '', sleep(1) -- '
    SELECT `sleep`(1)
    SELECT sleep/*x*/(1)
    SELECT 1 /*!, sleep(9) */
    SELECT 1 /*M!, sleep(9) */
    SELECT "'", sleep(1), "'"
    SELECT `'`, sleep(1), `'` FROM t
    SELECT 1 # '⏎, sleep(1) # '
    SELECT 1 -- '⏎, sleep(1) -- '
    SELECT 1 --\x01'⏎, sleep(1) -- '
    SELECT 1--', sleep(1)
    SELECT /* ' */ sleep(1) /* ' */
    SELECT 1 LOCK IN SHARE MODE
    SELECT is_free_lock('a')
    SELECT master_pos_wait('a', 1)
""")  # code beside strings, names and comments that hide it


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


def test_real_questions_are_split_by_database(own):
    env = make("intercodesql", intercode_data=str(own))
    assert env.test_splits == ("test",) and sum(map(len, env.splits.values())) == 50
    names = [{q["db"] for q in asked.values()} for asked in env.splits.values()]
    assert [*map(len, names)] == [6, 2, 2] and len(set.union(*names)) == 10


def test_iprs_records_are_read(tmp_path):
    record = {"query": "q", "gold": "SELECT\n1", "extra": {"db": "d"}}
    for split in ("train", "test"):
        (tmp_path / f"ic_spider_{split}.json").write_text(json.dumps([record] * 4))
    (tmp_path / "train_indices.json").write_text("[3, 1]")
    assert "ic_spider_dbs.sql" in refusal(InterCodeSQL, "full", str(tmp_path))  # there is no dump
    env = InterCodeSQL(intercode_data=str(tmp_path), mysql_url="mysql://a@h")
    assert env.tasks("train") == ["intercodesql-train-3", "intercodesql-train-1"]
    assert env.find(published_task(env, "intercode_sql_3")) == dict(query="q", gold="SELECT 1", db="d")


@pytest.mark.parametrize("gold, dump, told", [
    (None, "", "null is not a string"),
    ("SELECT 1", "USE `d`;\nCREATE TABLE `t` (\n  `a` enum('x','y') DEFAULT NULL\n) ENGINE=InnoDB;\n",
     "sqlite cannot read database d .*--mysql-url$")])
def test_data_that_cannot_be_read_is_refused(tmp_path, gold, dump, told):
    (tmp_path / "ic_spider_dev.json").write_text(json.dumps([dict(query="q", gold=gold, db="d")]))
    (tmp_path / "ic_spider_dbs.sql").write_text(dump)
    with pytest.raises(UsageError, match=f"^--intercode-data[^\n]*{told}"):
        InterCodeSQL(intercode_data=str(tmp_path)).reset("intercodesql-train-0")


def as_dump(name, script):
    """Returns a database's script as a dump writes it, a column a line."""
    def create(match):
        columns = match[2].replace(", ", ",\n")
        return f"DROP TABLE IF EXISTS {match[1]};\nCREATE TABLE {match[1]} (\n{columns}\n);"

    script = re.sub(r"(\(\w+\)) REFERENCES \w+", r"\g<0> \1", script)
    script = re.sub(r"CREATE TABLE (\w+) \((.*)\);", create, script)
    return f"CREATE DATABASE IF NOT EXISTS `{name}`;\nUSE `{name}`;\nSET foreign_key_checks = 0;\n{script}"


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


def test_failing_gold_queries_are_counted_before_a_run(own):
    """More than 2 % are refused."""
    env = make("intercodesql", intercode_data=str(own))
    env.splits = env.splits | {"wrong": {}}
    assert env.check([*env.splits]) == ""
    wrong = dict(query="q", gold="SELECT x FROM nowhere", db="farm_1")
    env.splits["wrong"]["0"] = wrong
    assert env.check([*env.splits]).startswith("1 of 51 gold queries fail, such as 'SELECT x")
    env.splits["wrong"]["1"] = wrong
    assert refusal(env.check, env.splits).startswith("--intercode-data: 2 of 52 gold queries fail")


class OtherSqlite(sqlite3.Connection):
    """A build of sqlite without double-quoted strings or mathematical functions."""

    def execute(self, sql):
        if '"a string"' in sql:
            raise sqlite3.OperationalError('no such column: "a string"')
        if "pragma_function_list" in sql:
            return [("abs",), ("lower",)]
        return super().execute(sql)


def test_another_build_of_sqlite_is_refused_or_completed(own, town, monkeypatch):
    query = """SELECT ceil(2.5), ceiling(-2.5), ceil(3), floor(-2.5), sqrt(2.5), sqrt(-2.5), sqrt('abc'),
        sign(-2.5), sign(0), sign(NULL), power(2.5, -2), pow(2, 0), mod(-7, 2), mod(2, 0), mod(NULL, 2)"""
    expected = town.run(query)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=OtherSqlite))
    with closing(databases.Sqlite("d", SCRIPT)) as other:
        assert other.run(query) == expected
    with pytest.raises(UsageError, match="built without double-quoted strings.*or give --mysql-url"):
        make("intercodesql", intercode_data=str(own))


@pytest.fixture(scope="module", autouse=True)
def password():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYSQL_PWD", "s3cret")
        yield


def load(url, dump):
    return spider.load_intercode(dump, url.replace("agent", "root"), url)


def root_query(url, sql):
    root = databases.connect(url.replace("agent", "root"), password="")
    with root, root.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory, own):
    """The address of a MariaDB with the databases of `own`, d, other and world_1."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    server, install = (shutil.which(f"mariadb{name}", path=path) for name in ("d", "-install-db"))
    if not server or not install:
        pytest.skip("mariadbd is not installed (Debian: apt-get install mariadb-server)")
    pymysql = pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    folder = tmp_path_factory.mktemp("mariadb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"mysql://agent@127.0.0.1:{free.getsockname()[1]}"
    common = ["--no-defaults", f"--user={getpass.getuser()}", f"--datadir={folder}/data"]
    subprocess.run([install, *common, "--auth-root-authentication-method=normal", "--skip-test-db"],
                   check=True, capture_output=True)

    def answers():
        with suppress(pymysql.MySQLError):
            return root_query(url, "SELECT 1")

    running = subprocess.Popen(
        [server, *common, f"--socket={folder}/s", f"--pid-file={folder}/pid", "--bind-address=127.0.0.1",
         f"--port={url.split(':')[-1]}", "--lower-case-table-names=1", "--skip-log-bin", "--max-statement-time=2"],
        stderr=subprocess.DEVNULL)
    try:
        wait_until(answers, "MariaDB to answer")
        more, secret = folder / "more.sql", f"CREATE TABLE secret (word text);\nINSERT INTO secret VALUES ('{SECRET}');\n"
        more.write_text(as_dump("d", SCRIPT) + as_dump("other", secret) + as_dump("world_1", ""))
        assert len(load(url, own / "ic_spider_dbs.sql")) == 10
        load(url, more)
        yield url
    finally:
        running.terminate()
        running.wait()


@pytest.fixture
def server(mariadb):
    """Database d, as an agent has it."""
    with closing(databases.MySQL("d", mariadb)) as db:
        yield db


@pytest.fixture
def served(mariadb, own):
    """start(gold) -> an environment over database d of the server."""
    with closing(InterCodeSQL(intercode_data=str(own), mysql_url=mariadb)) as env:
        yield starting(env)


@pytest.mark.parametrize("real, failing, unlike", [(False, "$", 0), (True, "6 of 1034 gold queries fail", 41)])
def test_most_gold_queries_are_answered_alike_by_mariadb_and_sqlite(mariadb, own, real, failing, unlike):
    """MariaDB refuses the syntax of 6 of InterCode's gold queries."""
    if real:
        own = folder_of("INTERCODE_DATA")
        load(mariadb, own / "ic_spider_dbs.sql")
    env = make("intercodesql", intercode_data=str(own), mysql_url=mariadb)
    assert re.match(failing, env.check([*env.splits]))
    found = 0
    for question in (env.find(task) for split in env.splits for task in env.tasks(split)):
        db, gold = question["db"], question["gold"]
        with closing(env.database(db)) as server, closing(databases.Sqlite(db, env.data.databases[db])) as embedded:
            answer = server.run(gold)
            found += isinstance(answer, list) and Counter(by_value(answer)) != Counter(by_value(embedded.run(gold)))
    assert found <= unlike


def test_the_mode_of_a_server_and_the_case_of_names_make_no_difference(mariadb):
    root_query(mariadb, "SET GLOBAL sql_mode = 'ONLY_FULL_GROUP_BY,ANSI_QUOTES,TRADITIONAL'")
    with closing(databases.MySQL("D", mariadb)) as db:
        assert db.run('SELECT site, MAX(area) FROM Town WHERE site = "Avon"') == [("Avon", 30)]
    root_query(mariadb, "SET GLOBAL sql_mode = ''")


def test_legal_golds_and_answers_score_1_whatever_their_texts_say(small, served):
    for start, golds in ((small, LEGAL), (served, [*LEGAL, *MARIADBS, "SELECT site FROM town FOR UPDATE"])):
        for gold in golds:
            assert submitted(start(gold), "SELECT site FROM town").reward == 1, gold
    with pytest.raises(envs.EnvError, match="the gold query of 'which towns.': .*denied"):
        submitted(served("SELECT word FROM other.secret"))


def test_attacks_on_mariadb_do_nothing_and_nothing_runs_on(mariadb):
    running = ("SELECT info FROM information_schema.processlist WHERE command = 'Query' AND user = "
               f"'{databases.database_user(mariadb, 'd')}'")
    for sql in QUERIES:
        with closing(databases.MySQL("d", mariadb)) as db:
            assert_harmless(db, db.run, sql)
        wait_until(lambda: not root_query(mariadb, running), f"this query to end: {sql[:80]}")


def test_mariadb_refuses_attacks_without_the_check(mariadb):
    for sql in lines("""
            UPDATE town SET area = 0
            WITH z AS (SELECT 1) DELETE FROM town
            CREATE TABLE z (a int)
            DROP DATABASE d
            SELECT 1; DELETE FROM town
            SELECT * FROM other.secret
            SHOW CREATE TABLE other.secret
            USE other
            KILL 1
            SELECT 1 INTO OUTFILE '/tmp/x'
            CREATE USER z
            GRANT ALL ON *.* TO z
            SHUTDOWN
            LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town
            SET GLOBAL max_connections = 1"""):
        with closing(databases.MySQL("d", mariadb)) as db:
            assert str(db.execute(sql)).startswith("Error"), sql
            assert_harmless(db, db.execute, "SELECT LOAD_FILE('/etc/passwd')")
    user = databases.database_user(mariadb, "world_1")  # in a GRANT an underscore stands for any character
    grants = root_query(mariadb, f"SHOW GRANTS FOR {user}@'%'")
    assert f"GRANT SELECT ON `world\\_1`.* TO `{user}`@`%`" == grants[-1][0] and len(grants) == 2


def test_the_server_and_then_the_client_limit_time_and_rows(server):
    """The server stops a query that passed the checks. If the server has no limit, the client's
    read timeout ends the episode."""
    assert server.execute("SELECT @@max_statement_time, @@sql_select_limit") == [
        (float(databases.SECONDS), databases.MAX_ROWS + 1)]
    million = "SELECT t0.site FROM " + ", ".join(f"town t{i}" for i in range(13))  # 3^13 rows
    assert server.run(million) == databases.TOO_LARGE
    assert str(server.run("SELECT * FROM town")) == TOWNS  # and the next query is answered
    assert server.execute(f"{R} SELECT COUNT(*) FROM r a, r b, r c") == databases.INTERRUPTED
    assert server.run("SELECT 1") == [(1,)]
    server.execute("SET SESSION max_statement_time = 0")
    with pytest.raises(envs.EnvError, match="timed out"):
        server.execute("SELECT SLEEP(8)")


def test_no_state_leaks_into_the_next_episode(served, monkeypatch):
    monkeypatch.setattr(databases, "refusal", lambda sql: None)  # to leave as much as can be left
    submitted(served(), "SELECT @a := 5", "SET @a = 5", "USE world_1", "BEGIN", "SET autocommit = 0",
              "CREATE TEMPORARY TABLE z (a int)", "SELECT site FROM d.town")
    assert submitted(served()).reward == 0
    assert served().step(act("SHOW TABLES")).observation == "[('baker',), ('town',)]"
    assert "5" not in served().step(act("SELECT @a")).observation


@pytest.mark.parametrize("code", [0, 1927, 2013])  # 0: PyMySQL's socket is gone
def test_a_lost_connection_ends_the_episode_and_the_next_one_connects(served, monkeypatch, code):
    import pymysql
    lost = Mock(side_effect=pymysql.err.OperationalError(code, "gone"))
    with monkeypatch.context() as patch, pytest.raises(
            envs.EnvError, match="d: gone; check that the server runs.*[^?]$"):
        patch.setattr(databases, "_fetch", lost)
        served().step(act("SHOW TABLES"))
    lost.assert_called_once()  # the connection itself does not retry
    assert served().step(act("SHOW TABLES")).observation == "[('baker',), ('town',)]"


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
    for name, password in (("d", "s3cretx"), ("elsewhere", "s3cret")):
        monkeypatch.setenv("MYSQL_PWD", password)
        said = refusal(databases.MySQL, name, mariadb)
        assert re.search(f"database {name}: .*denied.*intercodesql.spider", said) and "s3cret" not in said
    monkeypatch.setenv("MYSQL_ADMIN_PWD", "s3cret")
    (tmp_path / "dump.sql").write_text("USE `d`;\nSELECT 1;\n")
    reader = mariadb.replace("agent", databases.database_user(mariadb, "other"))
    with pytest.raises(envs.EnvError, match="denied.*may create databases and users"):
        spider.load_intercode(tmp_path / "dump.sql", reader, mariadb)


def test_a_dump_is_loaded_again_over_what_is_there(mariadb, own, tmp_path):
    """The load before it ended between a parent table and the rows of its child."""
    whole = (own / "ic_spider_dbs.sql").read_text(encoding="utf-8")
    (tmp_path / "cut.sql").write_text(whole[:whole.index("INSERT INTO farmers")])
    counts = "SELECT (SELECT COUNT(*) FROM farm_1.farmers), (SELECT COUNT(*) FROM farm_1.farms)"
    [(farmers, farms)] = root_query(mariadb, counts)
    load(mariadb, tmp_path / "cut.sql")
    assert root_query(mariadb, counts) == [(0, farms)]
    load(mariadb, own / "ic_spider_dbs.sql")
    assert root_query(mariadb, counts) == [(farmers, farms)]


def test_a_run_on_the_server_holds_no_password(mariadb, own, small_model, tmp_path, capsys):
    """Neither its files nor its output contain the password."""
    program(*f"""--env intercodesql --model {small_model} --intercode-data {own} --view short --method eto
                 --train-tasks 3 --eval-tasks 2 --iterations 1 --max-tokens 512 --max-new-tokens 8
                 --mysql-url {mariadb} --out {tmp_path}""".split())
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    said = capsys.readouterr()
    assert "target" in said.out and len(files) > 10
    for text in (said.out.encode(), said.err.encode(), *files):
        assert b"s3cret" not in text


def test_an_address_with_a_password_or_a_dump_without_a_database_is_refused():
    """The files of a run would contain the password."""
    for url in "mysql://agent:s3cret@h:3306", "mysql://agent:@h":
        refused(program, [(f"--env intercodesql --model m --intercode-data {ROOT} --mysql-url {url}",
                           "with the password in MYSQL_PWD")])
    line = refusal(spider.main, [f"{ROOT}/README.md", "--admin-url", "mysql://a@h", "--mysql-url", "mysql://b@h"])
    assert "README.md: it has no database" in line
