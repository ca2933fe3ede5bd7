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
import threading
import time
from collections import Counter
from contextlib import closing, suppress

import pytest
from conftest import DATA, ROOT, Again, folder_of, wait_until

import coevolve
import worlds
from worlds import make
from worlds.expert_files import published_task
from worlds.intercodesql import databases, questions, spider
from worlds.intercodesql.world import EXPLANATION, InterCodeSQL, parse_sql_reply, sql_reward


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


@pytest.mark.parametrize("agent, gold, reward", [
    ([], [], 1.0),
    ("Error executing query: x", [], 0.0),           # a text is never an answer
    ([(1,)], [(1,), (2,), (3,)], 1 / 3),              # one common row has no order: not rounded
    ([(2,), (1,)], [(1,), (2,)], -1.0),               # the order counts, whatever was asked
    ([(1,), (2,), (3,)], [(1,), (3,), (2,)], 0.33),   # tau = (2 - 1) / 3
    ([(9,), (10,)], [(10,), (9,)], -1.0),             # as text '(10,' is before '(9,'
    ([(1,), (1,)], [(1,)], 1 / 2),                    # multisets
    ([(1.0,)], [(1,)], 0.0),                          # 1.0 and 1 are different texts
    ([(1, "a")], [("a", 1)], 0.0),                    # columns in order
    ([(1,), (2,), (3,), (4,)], [(1,), (2,)], 0.5),    # tau 1 over the two common rows, 2/4
    ([(1,), (1,), (2,)], [(1,), (2,), (1,)], -0.5),   # -1 of 3 pairs, two untied on either side
])
def test_reward_on_hand_worked_cases(agent, gold, reward):
    assert sql_reward(agent, gold) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize("reply, sql", [
    ("Thought: x\nAction: \n```sql\nSELECT 1\nFROM t\n```", "SELECT 1"),  # the first line alone
    ("Action:\n```sql\nSELECT 1\n```\nAction:\n```sql\nSELECT 2\n```", "SELECT 1"),
    ("```sql\nSELECT 2\n```\nAction:\n```sql\nSELECT 1\n```", "SELECT 1"),  # before Action: nothing
    ("Action:submit.", "submit"),
    ("Thought: I submit.\nAction:\n```sql\nSELECT 1\n```", "SELECT 1"),
    ("Action:\n```sql\nSELECT submit_date FROM t\n```", "submit"),    # as officially
    ("Action: Submit", None),                                          # and so is this
    ("Action:\n```SQL\nSELECT 1\n```", None),
    ("Action:\n```sql\nSELECT 1", None),                               # not closed
    ("Action:\n```sql\n```", None),
    ("```sql\nSELECT 1\n```", None), ("submit", None), ("", None),
])
def test_replies_are_read_as_the_official_agents_read_them(reply, sql):
    assert parse_sql_reply(reply) == sql


def act(sql):
    return f"Thought: t\nAction: {sql}" if sql == "submit" else f"Action:\n```sql\n{sql}\n```"


SCRIPT = ("CREATE TABLE town (town_id int PRIMARY KEY, site varchar(20), area int);"
          "INSERT INTO town VALUES (1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10);"
          "CREATE TABLE baker (name varchar(20), town_id int);"
          "INSERT INTO baker VALUES ('Ann', 1);")
TOWNS = "[(1, 'Avon', 30), (2, 'Brill', 20), (3, 'Crewe', 10)]"


@pytest.fixture
def small():
    """start(gold) -> an environment over the two small tables of SCRIPT."""
    env = make("intercodesql")

    def start(gold="SELECT site FROM town"):
        env.start(dict(query="which towns?", gold=gold, db="d"), SCRIPT)
        return env

    yield start
    env.close()


def test_sqlite_describes_tables_as_mysql():
    with closing(databases.Sqlite("d", (
            "CREATE TABLE town (town_id int PRIMARY KEY, site varchar(20) NOT NULL);"
            "CREATE TABLE Baker (name text DEFAULT 'Bo', town_id int, pay decimal(10,2),"
            " FOREIGN KEY (town_id) REFERENCES town (town_id));"))) as db:
        assert db.run("show tables;") == [("Baker",), ("town",)]
        assert db.run("DESC town") == [("town_id", "int", "NO", "PRI", None, ""),
                                       ("site", "varchar(20)", "NO", "", None, "")]
        assert db.run("SHOW COLUMNS FROM `baker`") == [
            ("name", "text", "YES", "", "'Bo'", ""), ("town_id", "int", "YES", "MUL", None, ""),
            ("pay", "decimal(10,2)", "YES", "", None, "")]


NEAR = ("Error executing query: You have an error in your SQL syntax; check the manual that "
        "corresponds to your MySQL server version for the right syntax to use near '{}' at line 1")


def test_sqlite_shows_tables_and_columns_by_whatever_name():
    with closing(databases.Sqlite("d", SCRIPT)) as db:
        columns = db.run("DESC town")
        assert [name for name, *_ in columns] == ["town_id", "site", "area"]
        for sql in ("DESC d.town -- x", "DESC `D` . `Town` ; # x", "SHOW FIELDS IN d.town",
                    "SHOW COLUMNS FROM town FROM d", "EXPLAIN town"):
            assert db.run(sql) == columns, sql
        for sql in ("SHOW TABLES FROM d", "show tables in `D`;", "SHOW TABLES LIKE '%'"):
            assert db.run(sql) == [("baker",), ("town",)], sql
        assert db.run("SHOW TABLES FROM d LIKE 'B%'; -- x") == [("baker",)]
        assert db.run("SHOW TABLES FROM e") == f"{databases.ERROR}Unknown database 'e'"
        for sql in ("DESC e.town", "SHOW COLUMNS FROM town FROM e"):
            assert db.run(sql) == f"{databases.ERROR}Table 'e.town' doesn't exist"
        for sql in ("SHOW FULL TABLES", "SHOW INDEX FROM town", "EXPLAIN SELECT 1"):
            assert db.run(sql) == (databases.ERROR + "Only SHOW TABLES, SHOW COLUMNS and DESC of a "
                                   "table are answered here"), sql


@pytest.mark.parametrize("sql, text", [
    ("SELECT site FROM town WHERE x = 1", "Unknown column 'x' in 'where clause'"),
    ("SELECT site FROM town ORDER BY x", "Unknown column 'x' in 'order clause'"),
    ("DESC towns", "Table 'd.towns' doesn't exist"),
    ("SELECT town_id FROM town JOIN baker ON area > 1",
     "Column 'town_id' in field list is ambiguous"),
    ("SELECT f(area) FROM town", "FUNCTION d.f does not exist"),
    ("SELECT site FROM FROM town", "You have an error in your SQL syntax; check the manual that "
     "corresponds to your MySQL server version for the right syntax to use near 'FROM town' at "
     "line 1"),
    ("SELECT site FROM town WHERE MAX(area) > 1", "Invalid use of group function"),
    # As MariaDB 10.11, but for the names of clauses and the functions that are lacking.
    ("SELECT NTILE(3) OVER (ORDER BY area) FROM town", "FUNCTION d.NTILE does not exist"),
    ("SELECT Exp(1)", "FUNCTION d.Exp does not exist"),
    ("SELECT sqlite_version()", "FUNCTION d.sqlite_version does not exist"),
    ("SELECT ROUND() FROM town", "Incorrect parameter count in the call to native function 'ROUND'"),
    ("SELECT length(site, 2) FROM town",
     "Incorrect parameter count in the call to native function 'length'"),
    ("SELECT Left(site) FROM town",
     "Incorrect parameter count in the call to native function 'Left'"),
    ("SELECT site FROM town ORDER BY 1, 3", "Unknown column '3' in 'order clause'"),
    ("SELECT site FROM town GROUP BY 2", "Unknown column '2' in 'group statement'"),
    ("SELECT site FROM town ORDER BY area COLLATE foo", "Unknown collation: 'foo'"),
    ("SELECT site FROM town WHERE area IN (SELECT area, site FROM town)",
     "Operand should contain 1 column(s)"),
    ("SELECT site FROM town UNION SELECT site, area FROM town",
     "The used SELECT statements have a different number of columns"),
    ("SELECT site FROM town LIMIT 2 UNION SELECT site FROM town",
     NEAR[len(databases.ERROR):].format("UNION SELECT site FROM town")),
    ("SELECT POW(10, area * 99) FROM town", "DOUBLE value is out of range"),
    ("SELECT POW(0, -area) FROM town", "DOUBLE value is out of range"),
    ("WITH a(x, y) AS (SELECT 1) SELECT * FROM a", NEAR[len(databases.ERROR):].format("")),
])
def test_sqlite_tells_errors_as_mysql(small, sql, text):
    assert small().step(act(sql)).observation == f"Error executing query: {text}"


ANSWERS = json.loads((DATA / "intercode/mysql_answers.json").read_text())
# What docs/environments.md says of MySQL that the built-in databases lack.
LACKING = re.compile(r"REGEXP|RLIKE|XOR|WHERE \w+ = 0$|SQRT|AS FLOAT|OVER \(\) FROM|SHOW COLUMNS")


def by_value(answer):
    """Rows whose numbers are of one type; of errors that they are."""
    if isinstance(answer, str):
        return "error"
    numbers = (int, float, decimal.Decimal)
    return [tuple(float(value) if isinstance(value, numbers) else value for value in row)
            for row in answer]


@pytest.mark.parametrize("name", ANSWERS)
def test_built_in_databases_answer_as_mariadb_10_11_did(name):
    """600 queries of the kinds that models write, on three of the databases."""
    unlike = []
    with closing(databases.Sqlite(name, ANSWERS[name]["script"])) as db:
        for sql, answer in ANSWERS[name]["answers"]:
            if by_value(db.run(sql)) != by_value(rows(answer)):
                unlike.append(sql)
    assert unlike == [sql for sql, _ in ANSWERS[name]["answers"] if LACKING.search(sql)]


TWO = ("CREATE TABLE writer (name varchar(20), country text, years int);"
       "INSERT INTO writer VALUES ('Carl', 'Egypt', 20), ('Max', 'egypt', 98), ('Ann', 'Spain', 37);")
MANY_ROWS = "Error executing query: Subquery returns more than 1 row"


@pytest.mark.parametrize("sql, answer", [  # worked out by MySQL's manual
    ("SELECT name FROM writer WHERE country = 'EGYPT'", [("Carl",), ("Max",)]),
    ("SELECT DISTINCT country FROM writer", [("Egypt",), ("Spain",)]),
    ("SELECT name FROM writer WHERE CONCAT(name, country) = 'carlEGYPT'", [("Carl",)]),
    ("SELECT SUM(years) / COUNT(*) FROM writer", [(decimal.Decimal("51.6667"),)]),
    ("SELECT AVG(years) FROM writer", [(decimal.Decimal("51.6667"),)]),
    ("SELECT SUM(1), COUNT(*) FROM writer", [(decimal.Decimal("3"), 3)]),
    ("SELECT name, MAX(years) FROM writer", [("Carl", 98)]),
    ("SELECT name, MIN(years) FROM writer WHERE years > 20", [("Max", 37)]),
    ('SELECT "name" FROM writer LIMIT 1', [("name",)]),
    ("SELECT name FROM writer WHERE name = 'ann' || years = 20", [("Carl",), ("Ann",)]),
    ("SELECT name FROM writer WHERE years > 30 UNION SELECT name FROM writer WHERE years < 90",
     [("Max",), ("Ann",), ("Carl",)]),
    ("SELECT name FROM writer WHERE years >= ALL (SELECT years FROM writer)", [("Max",)]),
    ("SELECT name FROM writer WHERE country == 'Egypt'", NEAR.format("= 'Egypt'")),
    ("SELECT COUNT (*) FROM writer", NEAR.format("*) FROM writer")),
    ("SELECT MAX (years) FROM writer", "Error executing query: FUNCTION d.MAX does not exist. Check "
     "the 'Function Name Parsing and Resolution' section in the Reference Manual"),
    ("SELECT name FROM (SELECT * FROM writer)",
     "Error executing query: Every derived table must have its own alias"),
    ("SELECT name FROM writer JOIN (SELECT 1 AS a) ON a = 1",
     "Error executing query: Every derived table must have its own alias"),
    ("SELECT name AS who FROM writer WHERE who = 'Max'",
     "Error executing query: Unknown column 'who' in 'where clause'"),
    ("SELECT iif(1, 2, 3)", "Error executing query: FUNCTION d.iif does not exist"),
    ("SELECT name, * FROM writer", NEAR.format("* FROM writer")),
    ("SELECT name FROM 'writer'", NEAR.format("'writer'")),
    # Asked of MariaDB 10.11, which calls the clause of the third and fourth 'HAVING'.
    ("SELECT name FROM writer WHERE years > (SELECT years FROM writer)", MANY_ROWS),
    ("SELECT (SELECT w.name FROM writer w WHERE w.country = o.country) FROM writer o", MANY_ROWS),
    ("SELECT name FROM writer HAVING years > 30",
     "Error executing query: Unknown column 'years' in 'having clause'"),
    ("SELECT country, COUNT(*) FROM writer GROUP BY country HAVING years > 30",
     "Error executing query: Unknown column 'years' in 'having clause'"),
    ("SELECT name FROM writer o WHERE years = (SELECT MAX(years) FROM writer w WHERE "
     "w.country = o.country)", [("Max",), ("Ann",)]),
    ("SELECT name FROM writer WHERE country = (SELECT country FROM writer WHERE years = 98)",
     [("Carl",), ("Max",)]),
    ("SELECT * FROM writer HAVING years > 90", [("Max", "egypt", 98)]),
    ("SELECT name, years AS age FROM writer WHERE years > 90 OR name = 'ann' HAVING age < 90",
     [("Ann", 37)]),
    ("SELECT name FROM writer HAVING COUNT(*) = 3", [("Carl",)]),
    ("SELECT name FROM writer WHERE country = 'Egypt  '", [("Carl",), ("Max",)]),
    ("SELECT name FROM writer WHERE country IN ('spain ')", [("Ann",)]),
    ("SELECT name FROM writer WHERE country LIKE 'spain '", []),
    ("SELECT CONCAT('avg ', AVG(years)), CONCAT(SUM(years)), CONCAT(ROUND(AVG(years), 1), '%'), "
     "CONCAT_WS(' ', ROUND(AVG(years)), 20 / 3) FROM writer",
     [("avg 51.6667", "155", "51.7%", "52 6.6667")]),
    ("SELECT years MOD 7, CONVERT(years, CHAR), CAST('2.7' AS SIGNED) FROM writer LIMIT 1",
     [(6, "20", 2)]),
    ("SELECT name AS key FROM writer", NEAR.format("key FROM writer")),
    ("SELECT name desc FROM writer", NEAR.format("desc FROM writer")),
    ("SELECT name AS `key`, years AS 'index', 1 AS number FROM writer LIMIT 1", [("Carl", 20, 1)]),
    ("SELECT k.name FROM writer AS key", NEAR.format("key")),
    ("SELECT name FROM writer WHERE years NOT NULL", NEAR.format("NULL")),
    ("SELECT name FROM writer LIMIT 1 + 1", NEAR.format("+ 1")),
    ("SELECT name FROM writer LIMIT 2.0", NEAR.format("2.0")),
    ("SELECT COUNT() FROM writer", NEAR.format(") FROM writer")),
    ("SELECT MAX(, years) FROM writer", NEAR.format(" years) FROM writer")),
    ("SELECT MIN(,) FROM writer", NEAR.format(") FROM writer")),
    ("SELECT CONCAT(ROUND(years, ), '%') FROM writer", NEAR.format("), '%') FROM writer")),
    ("SELECT CAST() FROM writer", NEAR.format(") FROM writer")),
])
def test_sqlite_answers_as_mysql(sql, answer):
    with closing(databases.Sqlite("d", TWO)) as db:
        assert db.run(sql) == answer


ALL_THREE = [("Carl",), ("Max",), ("Ann",)]
ASKED = [  # of MariaDB 10.11, which is asked again where it is installed
    # A number in quotes, beside what is a number and beside what is a text.
    ("SELECT country FROM writer GROUP BY country HAVING COUNT(*) >= '2'", [("Egypt",)]),
    ("SELECT country, COUNT(*) AS c FROM writer GROUP BY country HAVING c >= '2'", [("Egypt", 2)]),
    ("SELECT country FROM writer GROUP BY country HAVING AVG(years) > '50'", [("Egypt",)]),
    ("SELECT name FROM writer WHERE NOT years * 2 > '150' AND '7' < LENGTH(name) + 4", [("Carl",)]),
    ("SELECT name FROM writer WHERE ROUND(years) > '80' AND name <> '5'", [("Max",)]),
    ("SELECT name FROM writer WHERE LENGTH(name) = '4'", [("Carl",)]),
    ("SELECT '5' > 10, '10' > '9', 10 > '9', '5' <= 5.0, 5 <=> '5', NULL <=> '5', NULL = '5'",
     [(0, 0, 1, 1, 1, 0, None)]),
    ("SELECT name FROM writer WHERE name > '5' AND LEFT(name, 1) > '5'", ALL_THREE),
    ("SELECT name FROM writer WHERE CAST(years AS CHAR) > '9'", [("Max",)]),
    ("SELECT name FROM writer WHERE '5' < CASE WHEN years > 50 THEN years ELSE '0' END",
     [("Max",)]),
    ("SELECT CASE WHEN years + 0 = '20' THEN 'a' ELSE 'b' END FROM writer", [("a",), ("b",), ("b",)]),
    ("SELECT name FROM writer WHERE '9' < (SELECT years FROM writer)", MANY_ROWS),
    ("SELECT t.c FROM (SELECT COUNT(*) AS c FROM writer GROUP BY country) t WHERE t.c > '1'", [(2,)]),
    ("SELECT name FROM writer WHERE (years) > '9' AND -years < '-30'", [("Max",), ("Ann",)]),
    ("SELECT name FROM writer WHERE years = '20' + 0", [("Carl",)]),
    ("SELECT name FROM writer WHERE LENGTH(name) IN ('4') AND years NOT IN ('37')", [("Carl",)]),
    ("SELECT name FROM writer WHERE NOT years + 1 BETWEEN '9' AND '50'", [("Max",)]),
    ("SELECT name FROM writer WHERE years + 1 NOT BETWEEN '9' AND '50' AND 1 = 1", [("Max",)]),
    ("SELECT name FROM writer WHERE 1 = 1 AND years * 2 NOT IN ('40', '74') OR name IN ('5')",
     [("Max",)]),
    ("SELECT name FROM writer WHERE LEFT(name, 1) BETWEEN '1' AND '5' OR LEFT(name, 1) IN ('2')", []),
    # The name of the database, and what stands behind a query.
    ("SELECT name FROM d.writer", ALL_THREE),
    ("SELECT d.writer.name FROM `D`.`writer` LIMIT 1", [("Carl",)]),
    ("SELECT w.name FROM writer w JOIN d.writer USING (name)", ALL_THREE),
    ("SELECT d.name FROM writer d", ALL_THREE),
    ("SELECT name FROM writer WHERE years = (SELECT MAX(d.writer.years) FROM d.writer)", [("Max",)]),
    ("SELECT name FROM e.writer", "Error executing query: Table 'e.writer' doesn't exist"),
    ("SELECT name FROM writer LIMIT 1; -- done", [("Carl",)]),
    ("SELECT 'a -- b; # c' ; # d", [("a -- b; # c",)]),
    ("SELECT 1; SELECT 2", NEAR.format("SELECT 2")),
    # ANY and ALL of no rows or with NULL, NATURAL and FULL joins.
    ("SELECT name FROM writer WHERE years > ALL (SELECT years FROM writer WHERE years > 100)",
     ALL_THREE),
    ("SELECT name FROM writer WHERE name >= ALL (SELECT name FROM writer WHERE years > 100)",
     ALL_THREE),
    ("SELECT name FROM writer WHERE name < ALL (SELECT name FROM writer WHERE years > 100)",
     ALL_THREE),
    ("SELECT name FROM writer WHERE years < SOME (SELECT years FROM writer WHERE years > 100)", []),
    ("SELECT name FROM writer WHERE NOT years > ANY (SELECT years FROM writer WHERE years > 100)",
     ALL_THREE),
    ("SELECT name FROM writer WHERE NOT years < ANY (SELECT years FROM writer WHERE years > 100)",
     ALL_THREE),
    ("SELECT name FROM writer WHERE years >= ALL (SELECT years FROM writer UNION SELECT NULL)", []),
    ("SELECT name FROM writer WHERE years > ANY (SELECT years FROM writer UNION SELECT NULL)",
     [("Max",), ("Ann",)]),
    ("SELECT name FROM writer WHERE years <> ANY (SELECT years FROM writer)", ALL_THREE),
    ("SELECT name FROM writer WHERE years != ANY (SELECT 20 UNION SELECT NULL)",
     [("Max",), ("Ann",)]),
    ("SELECT name FROM writer WHERE years <> SOME (SELECT years FROM writer WHERE years > 100)",
     []),
    ("SELECT name FROM writer WHERE name <> ANY (SELECT name FROM writer WHERE years > 90)",
     [("Carl",), ("Ann",)]),
    ("SELECT name FROM writer NATURAL LEFT OUTER JOIN (SELECT 20 AS years, 'x' AS z) t WHERE z IS NULL",
     [("Max",), ("Ann",)]),
    ("SELECT name FROM writer NATURAL RIGHT JOIN (SELECT 20 AS years UNION SELECT 21) t",
     [("Carl",), (None,)]),
    ("SELECT COUNT(*) FROM writer FULL JOIN (SELECT 20 AS years UNION SELECT 21) t USING (years)",
     [(1,)]),
    ("SELECT COUNT(*) FROM writer FULL JOIN (SELECT 20 AS years UNION SELECT 21) t ON full.years = t.years",
     [(1,)]),
    ("SELECT COUNT(*) FROM writer w FULL JOIN (SELECT 20 AS years UNION SELECT 21) t ON w.years = t.years",
     NEAR.format("FULL JOIN (SELECT 20 AS years UNION SELECT 21) t ON w.years = t.years")),
    # Texts that functions read as numbers.
    ("SELECT FLOOR(name), CEIL('2.5'), MOD('7', 3), SIGN('-2x'), TRUNCATE('2.789', '1') FROM writer "
     "LIMIT 1", [(0, 3, 1, -1, 2.7)]),
    ("SELECT ROUND('-'), ROUND('x'), ROUND(' 2.567', '1'), ROUND(2.5, NULL), SQRT('4x')",
     [(0, 0, 2.6, None, 2)]),
    ("SELECT LEFT(name, '2'), RIGHT(name, 'x'), SUBSTRING_INDEX('a5b', 5, '1'), MOD('7', 0) FROM "
     "writer LIMIT 1", [("Ca", "", "a", None)]),
    # The size and the digits of a CAST.
    ("SELECT CAST(AVG(years) AS DECIMAL(10,1)), CAST(AVG(years) AS DECIMAL), CAST(AVG(years) AS "
     "DECIMAL(10)), CAST(AVG(years) AS CHAR) FROM writer", [(51.7, 52, 52, "51.6667")]),
    ("SELECT CAST(years / 7 AS DECIMAL(5, 2)), CAST(years AS CHAR(1)), CAST(name AS CHAR(2)) FROM "
     "writer LIMIT 1", [(2.86, "2", "Ca")]),
    ("SELECT CAST('2.755x' AS DECIMAL(5, 2)), CAST(NULL AS DECIMAL(5, 2)), CAST(NULL AS CHAR(3)), "
     "CAST(2.5 AS DECIMAL)", [(2.76, None, None, 3)]),
    ("SELECT CONCAT(CAST(AVG(years) AS DECIMAL(6,2)), '%'), CONCAT(CAST(MAX(years) AS CHAR(10)), 'x')"
     " FROM writer", [("51.67%", "98x")]),
    ("SELECT CONCAT(CAST(years AS DECIMAL(5,)), 'a') FROM writer", NEAR.format("")),
]


@pytest.mark.parametrize("sql, answer", ASKED)
def test_sqlite_answers_as_mariadb_did(sql, answer):
    with closing(databases.Sqlite("d", TWO)) as db:
        assert by_value(db.run(sql)) == by_value(answer)


MYSQLS_ERRORS = re.compile(databases.ERROR + "(" + "|".join((
    "You have an error in your SQL syntax", "Unknown (column|table|collation)", "Table '.*' doesn't",
    "Column '.*' in .* is ambiguous", "FUNCTION .* does not exist", "Incorrect parameter count",
    "Invalid use of group function", "Operand should contain", "Subquery returns more than 1 row",
    "The used SELECT statements", "Every derived table", "Query execution was interrupted",
    "The result has more", "Only SELECT", "SELECT command denied", "DOUBLE value is out",
    "This version of MySQL doesn't")) + ")")


def test_whatever_a_model_writes_has_rows_or_an_error_text():
    """4,000 of the recorded queries with tokens removed, added or replaced; seed 0."""
    name, recorded = next(iter(ANSWERS.items()))
    token = re.compile(r"\s+|\w+|'[^']*'|[^\w\s]")
    called = [sql for sql, _ in recorded["answers"] if re.search(r"\w\(", sql)]
    queries = [token.findall(sql) for sql in called]
    some = [",", "(", ")", ".", "ROUND(", "MAX(", "MIN(", "CONCAT(", "CAST(", "IN (", "'5'"]
    pool = [part for query in queries for part in query] + some * 2000
    rng = random.Random(0)
    with closing(databases.Sqlite(name, recorded["script"])) as db:
        for _ in range(4000):
            query = list(rng.choice(queries))
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(query) + 1)
                query[at:at + rng.randint(0, 1)] = rng.choice([[], [rng.choice(pool)]])
            answer = db.run("".join(query))
            assert isinstance(answer, list) or MYSQLS_ERRORS.match(answer), (query, answer)


def test_the_short_view_joins_what_the_small_models_tokenizer_parts():
    with closing(make("intercodesql", "short")) as env:
        env.start(dict(query="q", gold="SELECT COUNT(*), MAX(years) FROM writer", db="d"), TWO)
        assert env.step("SELECT COUNT ( * ) , MAX ( years ) FROM writer").observation == "3 , 98"
        assert env.step("submit").reward == 1


def test_the_last_result_is_what_is_submitted(small):
    env = small()
    assert env.step(act("SELECT site, area FROM town WHERE area > 15")).observation == (
        "[('Avon', 30), ('Brill', 20)]")
    env.step(act("SELECT site FROM town"))
    assert env.step("no action").observation == EXPLANATION  # changes nothing
    assert env.step(act("submit")) == worlds.Step("submitted", 1.0, True, 1.0)
    env = small()
    env.step(act("SELECT site FROM town"))
    env.step(act("DESC town"))  # a look after the right query loses
    assert env.step(act("submit")).reward == 0
    env = small(gold="SELECT nothing FROM town")  # a gold that fails is an empty result
    env.step(act("SELECT site FROM town WHERE area > 90"))
    assert env.step(act("submit")).reward == 1
    assert small().step(act("submit")).reward == 0  # nothing was asked
    env = small()
    env.step(act("SELECT site FROM town ORDER BY site DESC"))  # clipped, and kept
    assert env.step(act("submit")) == worlds.Step("submitted", 0.0, True, -1.0)
    env = small(gold="SELECT a.site, b.site, c.site FROM town a, town b, town c")
    shown = env.step(act("SELECT a.site, b.site, c.site FROM town a, town b, town c")).observation
    assert len(shown) == 353 and shown.endswith("...")  # the result is not cut
    assert env.step(act("submit")).reward == 1


def play(env, task):
    """The reward of the expert."""
    return worlds.converse(env, env.reset(task), env.expert())[1]


@pytest.mark.parametrize("view", ["full", "short"])
def test_expert_replays_to_1(view):
    with closing(make("intercodesql", view)) as env:
        for split in ("train", "validation", "test", "unseen"):
            assert all(play(env, task) == 1 for task in env.tasks(split)[::4])


def test_splits_share_no_database_and_unseen_shares_no_noun():
    world = questions.sql_world()
    assert {k: len(v) for k, v in world.questions.items()} == {
        "train": 1000, "validation": 300, "test": 300, "unseen": 200}
    names = {s: {q["db"] for q in qs.values()} for s, qs in world.questions.items()}
    keys = {s: {questions.schema_key(world.databases[n]) for n in names[s]} for s in names}
    for a in names:
        assert len(keys[a]) == len(names[a])
        assert not any(names[a] & names[b] or keys[a] & keys[b] for b in names if b != a)
    held_out = {f"{noun}s" for noun in questions.HELD_OUT}
    for split, asked in world.questions.items():
        words = set(re.findall(r"\w+", " ".join(q["query"] for q in asked.values())))
        assert words & held_out == (held_out if split == "unseen" else set())
    assert len({(q["db"], q["query"]) for qs in world.questions.values()
                for q in qs.values()}) == 1800


SECRET = "orchard7"  # in another database; no observation may ever show it
HOLD = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) "
MANY = ", ".join(f"town t{i}" for i in range(30))
DOUBLED = ("WITH RECURSIVE r(x, n) AS (SELECT 'a', 1 UNION ALL SELECT CONCAT(x, x), n + 1 FROM r "
           "WHERE n < 14) SELECT ")
TIMES_TOWNS = " FROM r, " + ", ".join(f"town t{i}" for i in range(12)) + " WHERE n = 14"
ATTACKS = [  # one a class
    # writing, openly and inside what reads
    "INSERT INTO town VALUES (9, 'x', 1)", "CREATE TEMP TABLE z AS SELECT 1",
    "WITH z AS (SELECT 1) DELETE FROM town", "EXPLAIN ANALYZE DELETE FROM town",
    "SELECT * INTO z FROM town", "SELECT 1 INTO @a",
    # several statements
    "SELECT 1; DROP TABLE town", "SELECT 1 /* */ ; /* */ DELETE FROM town",
    "SELECT '1'; UPDATE town SET area = 0; --",
    # transactions, sessions, accounts, locks
    "BEGIN", "SET SESSION max_statement_time = 0", "USE mysql", "GRANT ALL ON *.* TO z", "KILL 1",
    "SET STATEMENT max_statement_time = 1000 FOR SELECT 1", "CALL z()", "SHUTDOWN",
    "EXECUTE IMMEDIATE 'DROP TABLE town'", "SELECT 1 FROM town FOR/**/UPDATE",
    "SELECT GET_LOCK('a', 1000)",
    # other databases and what the server knows
    "SELECT * FROM `other`.`secret`", "SHOW TABLES FROM other", "DESC other.secret",
    "SELECT (SELECT word FROM other . secret LIMIT 1)", "SELECT * FROM `mysql`.`user`",
    "SELECT * FROM INFORMATION_SCHEMA . PROCESSLIST", "SHOW GRANTS", "SELECT @@datadir",
    # sqlite's own
    "ATTACH DATABASE 'other.db' AS other", "PRAGMA query_only = OFF", "VACUUM INTO 'x.db'",
    "SELECT * FROM sqlite_master", "SELECT * FROM pragma_table_info('town')",
    "SELECT * FROM json_each('[1]')", "SELECT load_extension('x')",
    # files
    "SELECT load_file /**/ ('/etc/passwd')", "SELECT 1 INTO --\nOUTFILE '/tmp/x'",
    "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town",
    # comments that are code, odd characters
    "SELECT 1 /*! INTO OUTFILE '/tmp/x' */", "/*M! DROP TABLE town */", "# x\nDROP TABLE town",
    "SELECT /*+ MAX_EXECUTION_TIME(99999) */ 1", "SELECT 1\0; DROP TABLE town", "SELECT '\ud800'",
    "\0", "", ";", "SELECT '", "SELECT " + "(" * 3000 + "1" + ")" * 3000,
    "SELECT " + "1+" * 2400 + "1",
    # holding the server: with time, rows, text
    "SELECT sleep-- a\n(100)", "SELECT BENCHMARK(1000000000, MD5('a'))",
    HOLD + "SELECT a.x FROM r a, r b, r c, r d", f"SELECT COUNT(*) FROM {MANY}",
    f"SELECT * FROM {MANY} LIMIT 1000000", f"SELECT t0.site FROM {MANY} ORDER BY t9.site",
    "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM r) SELECT COUNT(*) FROM r",
    "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT CONCAT(x, x) FROM r) SELECT MAX(x) FROM r",
    "SELECT zeroblob(900000000)", "SELECT printf('%900000000d', 1)",
    "SELECT RPAD('a', 900000000, 'b')",
    "SELECT LENGTH(REGEXP_REPLACE(REPEAT('a', 9999), '(a+)+b', ''))",
    "SELECT LENGTH(GROUP_CONCAT(a.site)) FROM " + ", ".join(f"town {c}" for c in "abcdefghijklmn"),
    "WITH RECURSIVE r(x, n) AS (SELECT 'a', 0 UNION ALL SELECT x || 'a', n + 1 FROM r WHERE n < "
    "19000) SELECT COUNT(*) FROM r WHERE x LIKE '%a%a%a%a%a%a%b'",
    "SELECT TRUNCATE(MAX(area), 999999999) FROM town", "SHOW TABLES LIKE '\ud800'",
    DOUBLED + "SUM(LENGTH(SUBSTRING_INDEX(r.x, 'a', 9000)))" + TIMES_TOWNS,
    DOUBLED + "MAX(CONCAT(r.x, t0.site))" + TIMES_TOWNS,
]
# Of these the database shows nothing but what is the agent's own or harmless.
HARMLESS = re.compile(r"\[\]|\[\((None|\d{1,7}),\)\]|None")


def assert_harmless(db, sql, clock, seconds):
    started = clock()
    text = str(db.run(sql))
    assert clock() - started < seconds, sql[:80]
    assert SECRET not in text and "root:" not in text
    assert text.startswith("Error") or HARMLESS.fullmatch(text), (sql[:80], text[:200])


@pytest.mark.parametrize("first_look", [True, False])
def test_attacks_on_sqlite_do_nothing(first_look, tmp_path, monkeypatch):
    """Without the first look too: the allow-list of first words is not what keeps it safe."""
    monkeypatch.chdir(tmp_path)
    if not first_look:
        monkeypatch.setattr(databases, "refusal", lambda sql: None)
    for sql in ATTACKS:
        with closing(databases.Sqlite("d", SCRIPT)) as db:
            # Seconds of CPU, so that a busy machine does not matter.
            if first_look or sql not in ("", ";", "\0"):
                assert_harmless(db, sql, time.process_time, 3)
            assert str(db.run("SELECT * FROM town")) == TOWNS, sql[:80]
            assert db.run("SHOW TABLES") == [("baker",), ("town",)]
    assert list(tmp_path.iterdir()) == []


def test_a_result_too_large_is_an_error_text_on_sqlite():
    with closing(databases.Sqlite("d", SCRIPT)) as db:
        many = "SELECT 1 FROM " + ", ".join(f"town t{i}" for i in range(9))  # 19,683 rows
        assert db.run(many) == databases.TOO_LARGE
        assert len(db.run(many + " LIMIT 9999")) == 9999


def test_text_handed_to_functions_is_limited_query_by_query(monkeypatch):
    monkeypatch.setattr(databases, "CHARACTERS", 30)
    with closing(databases.Sqlite("d", SCRIPT)) as db:
        for _ in range(3):
            assert db.run("SELECT MAX(site), COUNT(*) FROM town") == [("Crewe", 3)]  # 14 characters
            assert db.run("SELECT MAX(REVERSE(site)) FROM town") == [("novA",)]  # 28
            assert db.run("SELECT MAX(REVERSE(REVERSE(site))) FROM town") == databases.INTERRUPTED
            assert db.run("SELECT MAX(ROUND(area * 2)) FROM town") == [(60,)]


@pytest.mark.parametrize("gap", ["/**/", "/* a */", " ", "--\n", "-- a\n", "#\n", "/*"])
def test_the_first_look_ends_whatever_is_hidden_from_it(gap):
    """A pattern that tries all ways to share out the gaps would not: 2 to the power of 1,000."""
    for sql in ("select 1 into{}x", "select 1 into{}outfile 'x'", "select sleep{}(1)"):
        found = databases.refusal(sql.format(gap * (4900 // len(gap))))
        assert (found is None) == (sql.endswith("x") or gap == "/*")


def test_attacks_leave_room_for_honest_queries():
    for sql in ("SELECT title FROM film WHERE title = 'Into the Wild'", "SELECT mysql FROM t",
                "(SELECT 1) UNION (SELECT 2)", "WITH a AS (SELECT 1) SELECT * FROM a",
                "SHOW FULL COLUMNS FROM t", "SHOW CREATE TABLE t", "explain select 1",
                "SELECT sleep, lock FROM t"):
        assert databases.refusal(sql) is None, sql


def test_questions_of_intercodes_form_are_split_by_database_and_their_experts_replay_to_1(own):
    env = make("intercodesql", intercode_data=str(own))
    assert env.test_splits == ("test",) and len(env.world.databases) == 10
    tasks = [task for split in ("train", "validation", "test") for task in env.tasks(split)]
    assert len(tasks) == 50 and all(play(env, task) == 1 for task in tasks[::4])
    names = [{q["db"] for q in asked.values()} for asked in env.splits.values()]
    assert [len(found) for found in names] == [6, 2, 2] and len(set.union(*names)) == 10
    env.close()


def test_intercodes_own_questions_are_split_and_their_experts_replay_to_1():
    env = make("intercodesql", intercode_data=str(folder_of("INTERCODE_DATA")))
    assert env.test_splits == ("test",) and len(env.world.databases) == 20
    tasks = [task for split in ("train", "validation", "test") for task in env.tasks(split)]
    assert len(tasks) == 1034
    failed = {env.find(task)["gold"] for task in tasks[::4] if play(env, task) != 1}
    assert all("COUNT (*)" in gold or "FROM (SELECT" in gold for gold in failed)  # as on MariaDB
    assert len(failed) <= 3
    names = [{q["db"] for q in asked.values()} for asked in env.splits.values()]
    assert sum(map(len, names)) == 20 == len(set.union(*names))
    env.close()


def test_iprs_records_are_read(tmp_path):
    record = {"query": "q", "gold": "SELECT\n1", "extra": {"db": "d"}}
    for split in ("train", "test"):
        (tmp_path / f"ic_spider_{split}.json").write_text(json.dumps([record] * 4))
    (tmp_path / "train_indices.json").write_text("[3, 1]")
    with pytest.raises(worlds.Refused, match="ic_spider_dbs.sql"):
        InterCodeSQL(intercode_data=str(tmp_path))  # there is no dump
    env = InterCodeSQL(intercode_data=str(tmp_path), mysql_url="mysql://a@h")
    assert env.tasks("train") == ["intercodesql-train-3", "intercodesql-train-1"]
    assert env.find(published_task(env, "intercode_sql_3")) == dict(query="q", gold="SELECT 1", db="d")


@pytest.mark.parametrize("change, told", [
    ({"query": 3}, "3 is no text"), ({"gold": None}, "null is no text"),
    ({"db": ["d"]}, r'\["d"\] is no text'), ({"query": "\ud800"}, "half of a surrogate pair")])
def test_a_record_with_what_is_no_text_is_refused(tmp_path, change, told):
    record = dict(query="q", gold="SELECT 1", db="d") | change
    (tmp_path / "ic_spider_dev.json").write_text(json.dumps([record]))
    with pytest.raises(worlds.Refused, match=f"--intercode-data.*{told}") as error:
        InterCodeSQL(intercode_data=str(tmp_path), mysql_url="mysql://a@h")
    assert "\n" not in str(error.value)


def test_a_dump_that_sqlite_cannot_read_is_refused(tmp_path):
    (tmp_path / "ic_spider_dev.json").write_text(
        json.dumps([dict(query="q", gold="SELECT 1", db="d1")]))
    (tmp_path / "ic_spider_dbs.sql").write_text(
        "USE `d1`;\nCREATE TABLE `t` (\n  `a` enum('x','y') DEFAULT NULL\n) ENGINE=InnoDB;\n")
    env = InterCodeSQL(intercode_data=str(tmp_path))
    with pytest.raises(worlds.Refused, match="--intercode-data: .* database d1 .*--mysql-url$") as error:
        env.reset(next(task for split in env.splits for task in env.tasks(split)))
    assert "\n" not in str(error.value)


ROOT_URL, URL = "mysql://root:@127.0.0.1:{}", "mysql://agent:s3cret@127.0.0.1:{}"
RUNNING, START = {}, {}  # port -> its process, what starts it again


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
    folder, world = tmp_path_factory.mktemp("intercode"), questions.sql_world()
    names = [name for name, script in world.databases.items() if " load " not in script][:10]
    asked = [q for split in world.questions.values() for q in split.values() if q["db"] in names]
    (folder / "ic_spider_dev.json").write_text(json.dumps(asked))
    (folder / "ic_spider_dbs.sql").write_text(
        "".join(as_dump(name, world.databases[name]) for name in names))
    return folder


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory, own):
    """The port of a MariaDB with the databases of `own`, d, other and world_1."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    server, install = (shutil.which(f"mariadb{name}", path=path) for name in ("d", "-install-db"))
    if not server or not install:
        pytest.skip("mariadbd is not installed (Debian: apt-get install mariadb-server)")
    pymysql = pytest.importorskip("pymysql", reason="PyMySQL is not installed")
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
            with suppress(pymysql.MySQLError):
                databases.connect(ROOT_URL.format(port)).close()
                break
            time.sleep(0.2)
        else:
            pytest.fail((folder / "log").read_text()[-2000:])
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
        RUNNING[port].terminate()
        RUNNING[port].wait(60)


def root_query(port, sql, **options):
    with databases.connect(ROOT_URL.format(port), **options) as root, root.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@pytest.fixture
def server(mariadb):
    """Database d, as an agent has it."""
    with closing(databases.MySQL("d", URL.format(mariadb))) as db:
        yield db


def plain(row):
    """Numbers, dates and text as text without case and trailing zeros."""
    values = []
    for value in row:
        try:
            values.append(f"{float(value):.4g}")
        except (TypeError, ValueError):
            values.append(str(value).lower())
    return tuple(values)


def test_gold_queries_score_1_on_mariadb_and_are_answered_alike_by_sqlite(mariadb, own):
    env = make("intercodesql", intercode_data=str(own), mysql_url=URL.format(mariadb))
    for task in (task for split in env.splits for task in env.tasks(split)):
        question = env.find(task)
        env.reset(task)
        env.step(act(question["gold"]))
        result = env.last_answer
        assert env.step(act("submit")).reward == 1.0, question["gold"]
        with closing(databases.Sqlite("d", env.world.databases[question["db"]])) as embedded:
            other = embedded.run(question["gold"])
        assert Counter(map(plain, result)) == Counter(map(plain, other))
    env.close()


def test_intercodes_gold_queries_score_1_on_mariadb_and_most_are_answered_alike(mariadb):
    folder = folder_of("INTERCODE_DATA")
    spider.load_intercode(folder / "ic_spider_dbs.sql", ROOT_URL.format(mariadb),
                          URL.format(mariadb))
    env = make("intercodesql", intercode_data=str(folder), mysql_url=URL.format(mariadb))
    failed, below, same, ran = Counter(), [], 0, 0
    for task in (task for split in env.splits for task in env.tasks(split)):
        question = env.find(task)
        env.reset(task)
        shown, result = env.step(act(question["gold"])).observation, env.last_answer
        if shown.startswith("Error"):  # syntax that MariaDB refuses
            failed[question["gold"]] += 1
            continue
        if env.step(act("submit")).reward != 1.0:  # its LIMIT chooses among rows of equal order
            below.append((question["db"], question["gold"]))
        with closing(databases.Sqlite("d", env.world.databases[question["db"]])) as embedded:
            other = embedded.run(question["gold"])
        ran += 1
        same += Counter(map(plain, result)) == Counter(map(plain, other))
    env.close()
    assert [*failed.values()] == [2, 2, 2] and ran == 1028
    assert len(below) <= 4 and same >= 980


@pytest.mark.parametrize("name", ANSWERS)
def test_mariadb_answers_as_recorded(mariadb, name):
    """The oracle of what the built-in databases answer, asked again."""
    database = f"answers_{name}"
    dump = as_dump(database, ANSWERS[name]["script"])
    for statement in dump.split(";\n")[:-1]:
        root_query(mariadb, statement, **{} if "DATABASE" in statement else {"database": database})
    for sql, answer in ANSWERS[name]["answers"]:
        try:
            found = root_query(mariadb, sql, database=database)
        except Exception as error:
            found = f"Error executing query: {error.args[1]}"
        assert by_value(found) == by_value(rows(answer)), sql


def test_mariadb_answers_what_was_asked(mariadb):
    for statement in ("DROP TABLE IF EXISTS writer", *TWO.split(";")[:2]):
        root_query(mariadb, statement, database="d")
    try:
        for sql, answer in ASKED:
            try:
                found = root_query(mariadb, sql, database="d")
            except Exception as error:
                found = f"Error executing query: {error.args[1]}"
            assert by_value(found) == by_value(answer), sql
    finally:
        root_query(mariadb, "DROP TABLE writer", database="d")


def test_mariadb_shows_what_sqlite_shows(server):
    with closing(databases.Sqlite("d", SCRIPT)) as embedded:
        for sql in ("SHOW TABLES", "SELECT * FROM town", "SELECT x FROM town", "DESC towns",
                    "SELECT site FROM town WHERE x = 1", "SELECT site FROM town ORDER BY x",
                    "SELECT town_id FROM town, baker", "DROP TABLE town",
                    "SELECT site FROM town WHERE MAX(area) > 1"):
            result = server.run(sql)
            if isinstance(result, str):  # newer versions of MariaDB name clauses in their own way
                for own, mysql in (("'SELECT'", "'field list'"), ("in SELECT", "in field list"),
                                   ("'WHERE'", "'where clause'"), ("'ORDER BY'", "'order clause'")):
                    result = result.replace(own, mysql)
            assert result == embedded.run(sql), sql
        for db in (server, embedded):
            assert db.run("SELECT site FROM FROM town").endswith("near 'FROM town' at line 1")
    assert [row[0] for row in server.run("DESC town")] == ["town_id", "site", "area"]


def test_attacks_on_mariadb_do_nothing_and_nothing_runs_on(mariadb):
    asked = ("SELECT info FROM information_schema.processlist WHERE command = 'Query' AND user = "
             f"'{databases.database_user(URL, 'd')}'")
    for sql in ATTACKS:
        with closing(databases.MySQL("d", URL.format(mariadb))) as db:
            assert_harmless(db, sql, time.monotonic, 20)
            assert str(db.run("SELECT * FROM town")) == TOWNS, sql[:80]
            assert db.run("SHOW TABLES") == [("baker",), ("town",)]
        wait_until(lambda: not root_query(mariadb, asked), 20)


def test_without_the_first_look_mariadb_still_refuses(mariadb, monkeypatch):
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    count = "SELECT COUNT(*) FROM information_schema.tables"
    before = root_query(mariadb, count)
    for sql in ("UPDATE town SET area = 0", "WITH z AS (SELECT 1) DELETE FROM town",
                "CREATE TABLE z (a int)", "DROP DATABASE d", "SELECT 1; DELETE FROM town",
                "SELECT * FROM other.secret", "SHOW CREATE TABLE other.secret", "USE other", "KILL 1",
                "SELECT 1 INTO OUTFILE '/tmp/x'", "CREATE USER z", "SHUTDOWN",
                "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE town",
                "SET GLOBAL max_connections = 1"):
        with closing(databases.MySQL("d", URL.format(mariadb))) as db:
            assert str(db.run(sql)).startswith("Error"), sql
            assert str(db.run("SELECT * FROM town")) == TOWNS
            assert db.run("SELECT LOAD_FILE('/etc/passwd')") == [(None,)]
    assert root_query(mariadb, count) == before


def test_a_grant_covers_its_database_only(mariadb):
    """In a GRANT an underscore stands for any character."""
    user = databases.database_user(URL, "world_1")
    grants = root_query(mariadb, f"SHOW GRANTS FOR {user}@'%'")
    assert [g for g, in grants if "SELECT" in g] == [
        f"GRANT SELECT ON `world\\_1`.* TO `{user}`@`%`"]


def test_a_server_without_a_time_limit_does_not_hold_the_agent(mariadb, server, monkeypatch):
    """The second line: the client's read timeout, then KILL from another connection."""
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    server.run("SET SESSION max_statement_time = 0")
    assert server.run("SELECT SLEEP(60)") == databases.INTERRUPTED
    time.sleep(0.5)
    assert not root_query(mariadb, "SELECT 1 FROM information_schema.processlist "
                          "WHERE info LIKE 'SELECT SLEEP%'")
    assert server.run("SELECT 1") == [(1,)]


def test_the_server_itself_limits_time_and_rows(server, monkeypatch):
    """Not only the client: what is asked past all looks at the query ends on the server."""
    monkeypatch.setattr(databases, "refusal", lambda sql: None)
    assert server.run("SELECT @@max_statement_time, @@sql_select_limit") == [
        (float(databases.SECONDS), databases.MAX_ROWS + 1)]
    million = "SELECT t0.site FROM " + ", ".join(f"town t{i}" for i in range(13))  # 3^13 rows
    with server._connection.cursor() as cursor:  # a cursor that would take all there are
        assert cursor.execute(million) == databases.MAX_ROWS + 1
        with pytest.raises(Exception, match="max_statement_time exceeded"):
            cursor.execute(HOLD + "SELECT COUNT(*) FROM r a, r b, r c")
    assert server.run(million) == databases.TOO_LARGE
    assert str(server.run("SELECT * FROM town")) == TOWNS  # and the next query is answered


@pytest.mark.parametrize("where", ["sqlite", "mariadb"])
def test_no_state_leaks_into_the_next_episode(where, request, own, monkeypatch):
    monkeypatch.setattr(databases, "refusal", lambda sql: None)  # to leave as much as can be left
    env = InterCodeSQL(**{} if where == "sqlite" else dict(
        intercode_data=str(own), mysql_url=URL.format(request.getfixturevalue("mariadb"))))
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
def repaired(mariadb, own):
    """An episode on MariaDB that goes on when its connection is lost; it has seen the tables."""
    env = Again(InterCodeSQL(intercode_data=str(own), mysql_url=URL.format(mariadb)), times=3)
    env.reset(env.tasks("test")[0])
    env.shown = env.step(act("SHOW TABLES"))
    yield env
    env.close()


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
    with pytest.raises(worlds.EnvError, match="database .*: gone; see that the server runs.*[^?]$"):
        repaired.step(act("SHOW TABLES"))
    assert len(failures) == 2 + 4  # it is not asked again within


def test_an_episode_goes_on_when_its_server_is_killed_and_started_again(mariadb, repaired,
                                                                        monkeypatch):
    repaired.times, repaired.wait = 20, 2.0
    RUNNING[mariadb].kill()
    RUNNING[mariadb].wait()
    again = threading.Timer(1, START[mariadb])
    again.start()
    assert repaired.step(act("SHOW TABLES")) == repaired.shown
    again.join()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x04\0\0\0\x0a5.5", None])
def test_what_is_no_database_voids_the_episode(says):
    """None: nobody listens."""
    pytest.importorskip("pymysql", reason="PyMySQL is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer():
            with server.accept()[0] as connection:
                connection.sendall(says)

        where = f"127.0.0.1:{server.getsockname()[1]}"
        server.close() if says is None else threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(worlds.EnvError, match=f"mysql://{where}, database d") as error:
            databases.MySQL("d", f"mysql://agent:s3cret@{where}")
        assert "s3cret" not in str(error.value) and "\n" not in str(error.value)


def test_a_database_that_is_not_loaded_is_named_with_the_remedy(mariadb):
    for name, url in (("elsewhere", URL), ("d", URL.replace("s3cret", "s3cretx"))):
        with pytest.raises(worlds.Refused, match=f"database {name}: .*denied.*load-intercode") as error:
            databases.MySQL(name, url.format(mariadb))
        assert "s3cret" not in str(error.value) and "\n" not in str(error.value)


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


def test_who_may_only_read_loads_nothing(mariadb, tmp_path):
    dump, url = tmp_path / "dump.sql", URL.format(mariadb)
    dump.write_text("USE `d`;\nSELECT 1;\n")
    reader = url.replace("agent", databases.database_user(url, "other"))
    with pytest.raises(worlds.EnvError, match="denied.*may create databases and users"):
        spider.load_intercode(dump, reader, url)


def test_a_run_on_the_server_holds_no_password(mariadb, own, small_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MYSQL_PWD", "")
    flags = ["--env", "intercodesql", "--model", small_model, "--intercode-data", own, "--view", "short",
             "--method", "eto", "--train-tasks", 3, "--eval-tasks", 2, "--iterations", 1,
             "--max-tokens", 512, "--max-new-tokens", 8, "--out", tmp_path / "run"]
    coevolve.main([*map(str, flags), "--mysql-url", URL.format(mariadb)])
    files = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    said = capsys.readouterr()
    assert "target" in said.out and len(files) > 10
    for text in (said.out.encode(), said.err.encode(), *files):
        assert b"s3cret" not in text


@pytest.mark.parametrize("dump, agent, told", [
    ("x", "b", "--mysql-url must be"), ("README.md", "mysql://b@h", "README.md: no database in it")])
def test_load_intercode_refuses_in_one_line(dump, agent, told):
    with pytest.raises(worlds.Refused, match=told) as error:
        spider.main([str(ROOT / dump), "--admin-url", "mysql://a:s3cret@h", "--mysql-url", agent])
    assert "s3cret" not in str(error.value) and "\n" not in str(error.value)
