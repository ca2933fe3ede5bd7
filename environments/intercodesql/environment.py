"""InterCodeSQL: an agent answers a question by exploring a database with SQL."""

import re
import sys
from collections import Counter
from decimal import Decimal
from functools import cache
from importlib import import_module

import numpy as np

from environments import UsageError
from environments.intercodesql.databases import DENIED, INTERRUPTED, TOO_LARGE, MySQL, Sqlite
from environments.intercodesql.questions import sql_data, sql_expert
from environments.intercodesql.spider import spider_data
from envs import EnvError, Environment, Step

SHORT_ROWS = 8

EXPLANATION = """\
Your reply holds no action. Write "Action:" once, then the query on one line in a block of its own:
Action:
```sql
SELECT ...
```
or, once the last result is the answer: Action: submit"""

PROMPT = """\
You answer a question with a database in {dialect}. You do not see the database: find out which \
tables it has (SHOW TABLES), what their columns are (DESC table), and query them. Queries can only \
read.

Each turn answer with a thought and one action. An action is one query, on one line:
Thought: why you do it
Action:
```sql
SHOW TABLES
```
or, when the result of your last query is the answer:
Action: submit

Submit hands in the result of the last query, so make it hold the rows and columns asked for, in \
the order asked for, and nothing else. Results over 350 characters are shown cut. You have 10 \
turns; without a submission the answer counts as wrong."""


class InterCodeSQL(Environment):
    """Questions about databases that the agent explores with SQL, then submits its last result. A
    task is a question: query (in words), gold (SQL) and db, the database's name.

    view="short", for a very small model: replies are bare queries or "submit", and results come
    without brackets, DESC as names alone, at most SHORT_ROWS rows.
    """
    name = "intercodesql"
    max_turns = 10
    error_end = ""  # of most error texts

    def __init__(self, view: str = "full", intercode_data: str | None = None,
                 mysql_url: str | None = None):
        self.rules = PROMPT.format(dialect="MySQL" if mysql_url else "sqlite")
        super().__init__(view)
        self.mysql_url = mysql_url
        self.data = spider_data(intercode_data) if intercode_data else sql_data()
        self.splits = self.data.questions
        self.test_splits = tuple(split for split in ("test", "unseen") if split in self.splits)
        asked = {q["db"] for questions in self.splits.values() for q in questions.values()}
        if not mysql_url and (missing := asked - self.data.databases.keys()):
            raise UsageError(f"--intercode-data: the dump has no database {min(missing)}; give one "
                          "that has as FOLDER/ic_spider_dbs.sql")
        self._db = None

    def task_generator(self):
        if not self.data.tables:  # questions are generated for the generated databases alone
            return super().task_generator()
        return import_module("environments.intercodesql.tasks").TaskGenerator(self)

    def start(self, question: dict, script: str | None = None) -> str:
        """Also on a question of no split, over the database that `script` makes."""
        self.close()
        self._db = self.database(question["db"], script)
        self._question = question
        self.last_answer = None  # what `submit` hands in
        return question["query"]

    def database(self, name: str, script: str | None = None) -> MySQL | Sqlite:
        """One of the databases, opened anew."""
        if self.mysql_url:
            return MySQL(name, self.mysql_url)
        return Sqlite(name, script or self.data.databases[name])

    def step(self, reply: str) -> Step:
        sql = self.action(reply)
        if sql is None:  # the last answer stays the one to submit
            return Step(EXPLANATION, 0.0, False, idle=True)
        if sql != "submit":
            self.last_answer = answer = self._db.run(sql)
            if isinstance(answer, str) and "Unknown" not in answer:
                answer += self.error_end
            text = in_short(answer, sql) if self.view == "short" else in_full(answer)
            return Step(text, 0.0, False)
        raw = sql_reward(self.last_answer, gold_rows(self._db, self._question))
        return Step("submitted", min(max(raw, 0.0), 1.0), True, raw)

    def action(self, reply: str) -> str | None:
        if self.view == "full":
            return parse_sql_reply(reply)
        return reply.strip() or None

    def possible(self) -> tuple[list[str], str]:
        return [], "SHOW TABLES; DESC table; SELECT ...; submit"

    def reply(self, action: str) -> str:
        bare = self.view == "full" and "Action:" not in action and action != "submit"
        return f"Action:\n```sql\n{action}\n```" if bare else super().reply(action)

    def expert(self):
        return sql_expert(self._question["gold"], thoughts=self.view == "full")

    def close(self):
        if self._db is not None:
            self._db.close()


def gold_rows(database: MySQL | Sqlite, question: dict) -> list[tuple]:
    """What the gold query finds. One that the database refuses finds nothing, as in InterCode's
    code, and that is said; one that only rights or limits end is no measure: EnvError."""
    gold = database.ask(question["gold"])
    if isinstance(gold, list):
        return gold
    about = f"the gold query of {question['query']!r}: {gold}"
    if gold in (INTERRUPTED, TOO_LARGE) or str(gold).startswith(DENIED):
        raise EnvError(about)
    say_once(f"{about}; an empty result earns 1 there, as InterCode scores it")
    return []


@cache
def say_once(text: str) -> None:
    print(text, file=sys.stderr)


def in_full(answer) -> str:
    """An answer as InterCode's agents read it, cut behind 350 characters."""
    text = str(answer)
    return text[:350] + "..." if len(text) > 350 else text


def in_short(answer, sql: str) -> str:
    """An answer without brackets, at most SHORT_ROWS rows; DESC as names alone."""
    if not isinstance(answer, list):
        return in_full(answer)
    describes = re.match(r"\s*desc", sql, re.I)
    lines = []
    for row in answer[:SHORT_ROWS]:
        values = row[:1] if describes else row
        lines.append(" , ".join(map(_brief, values)))
    if describes or re.match(r"\s*show", sql, re.I):
        lines = [line.replace("'", "") for line in lines]
    if len(answer) > SHORT_ROWS:
        lines.append("...")
    return " | ".join(lines) or "empty"


def _brief(value) -> str:
    """A value as the short view shows it."""
    return repr(round(float(value), 2) if isinstance(value, (float, Decimal)) else value)


def parse_sql_reply(reply: str) -> str | None:
    """As InterCode's ReAct agents read it: after the first "Action:" the word submit anywhere, or
    the first line of the first fenced sql block; None where there is neither."""
    action = reply.partition("Action:")[2]
    if "submit" in action:
        return "submit"
    fence = re.search(r"```sql(.*?)```", action, re.S)
    return fence and fence[1].strip().split("\n")[0] or None


def sql_reward(agent_rows, gold_rows) -> float:
    """InterCode's reward for the last result, in [-1, 1]: of two lists of rows, else 0.

    Rows are compared as text, so 1 and 1.0 differ. With rows in common
        round(tau * |common| / |union|, 2)
    over multisets, where tau is Kendall's tau-b between the common rows in the two orders; where
    it is undefined (fewer than two distinct common rows) the share itself. Two empty lists: 1.
    """
    if not isinstance(agent_rows, list) or not isinstance(gold_rows, list):
        return 0.0
    agent, gold = ([str(tuple(row)) for row in rows] for rows in (agent_rows, gold_rows))
    common, union = Counter(agent) & Counter(gold), (Counter(agent) | Counter(gold)).total()
    if not union:
        return 1.0
    share = common.total() / union
    if len(common) < 2:
        return share
    tau = kendall_tau(_first_of(common, agent), _first_of(common, gold))
    return float(np.round(tau * share, 2))


def _first_of(common: Counter, rows: list[str]) -> list[str]:
    """As many of the rows as `common` counts, the first ones, in their order."""
    seen = Counter()
    return [row for row in rows if seen.update([row]) or seen[row] <= common[row]]


def kendall_tau(a: list[str], b: list[str]) -> float:
    """Kendall's tau-b between two orders of the same texts; O(n^2) time, O(n) memory."""
    x, y = (np.unique(texts, return_inverse=True)[1] for texts in (a, b))
    concordant = ties = 0  # concordant: minus the discordant pairs
    for i in range(len(x) - 1):
        dx, dy = np.sign(x[i + 1:] - x[i]), np.sign(y[i + 1:] - y[i])
        concordant += int(dx @ dy)
        ties += int((dx == 0).sum())  # as many in y
    untied = np.sqrt(len(x) * (len(x) - 1) // 2 - ties)
    # In this order the last bit, and so the rounding of a half, is scipy's.
    return float(np.clip(concordant / untied / untied, -1, 1))
