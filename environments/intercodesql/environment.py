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
    """Questions about databases. The agent explores a database with SQL, then submits its last
    result.

    A task is a question with `query` (in words), `gold` (SQL) and `db`, the name of the database.

    Args:
        view: "full", or "short" for a very small model. In the short view a reply is a bare query
            or "submit". Results have no brackets and at most SHORT_ROWS rows, and DESC shows only
            the names of columns.
        intercode_data: The folder of InterCode's data, or None for the generated databases.
        mysql_url: The server of InterCode's databases, or None for sqlite.
    """
    name = "intercodesql"
    max_turns = 10
    error_end = ""  # the end of most error texts; IPR's code has a line break

    def __init__(self, view: str = "full", intercode_data: str | None = None,
                 mysql_url: str | None = None):
        self.rules = PROMPT.format(dialect="MySQL" if mysql_url else "sqlite")
        super().__init__(view)
        self.mysql_url = mysql_url
        self.data = spider_data(intercode_data) if intercode_data else sql_data()
        self.splits = self.data.questions
        self.test_splits = tuple(split for split in ("test", "unseen") if split in self.splits)
        needed = {q["db"] for questions in self.splits.values() for q in questions.values()}
        if not mysql_url and (missing := needed - self.data.databases.keys()):
            raise UsageError(f"--intercode-data: the dump has no database {min(missing)}; give one "
                             "that has it, as FOLDER/ic_spider_dbs.sql")
        self._db = None

    def task_generator(self):
        if not self.data.tables:  # it makes questions about generated databases only
            return super().task_generator()
        return import_module("environments.intercodesql.tasks").TaskGenerator(self)

    def start(self, question: dict, script: str | None = None) -> str:
        """Begins an episode, and returns the question.

        Args:
            question: A question, which may be in no split.
            script: SQL script that makes the database, or None for the one of that name.
        """
        self.close()
        self._db = self.database(question["db"], script)
        self._question = question
        self.last_answer = None  # the result that `submit` submits
        return question["query"]

    def database(self, name: str, script: str | None = None) -> MySQL | Sqlite:
        """Opens the database of this name, or the one that `script` makes."""
        if self.mysql_url:
            return MySQL(name, self.mysql_url)
        return Sqlite(name, script or self.data.databases[name])

    def step(self, reply: str) -> Step:
        sql = self.action(reply)
        if sql is None:  # the last answer can still be submitted
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
    """Returns the rows of the gold query.

    If the database rejects the query, it prints a warning and returns no rows, like InterCode's
    code. Raises EnvError if only privileges or limits end the query, since its result is unknown.
    """
    gold = database.execute(question["gold"])
    if isinstance(gold, list):
        return gold
    message = f"the gold query of {question['query']!r}: {gold}"
    if gold in (INTERRUPTED, TOO_LARGE) or str(gold).startswith(DENIED):
        raise EnvError(message)
    print_once(f"{message}; an empty result earns 1 there, as InterCode scores it")
    return []


@cache
def print_once(text: str) -> None:
    print(text, file=sys.stderr)


def in_full(answer) -> str:
    """Returns an answer as InterCode shows it, cut after 350 characters."""
    text = str(answer)
    return text[:350] + "..." if len(text) > 350 else text


def in_short(answer, sql: str) -> str:
    """Returns an answer as the short view shows it: at most SHORT_ROWS rows without brackets, and
    of DESC only the names."""
    if not isinstance(answer, list):
        return in_full(answer)
    describes = re.match(r"\s*desc", sql, re.I)
    lines = []
    for row in answer[:SHORT_ROWS]:
        values = row[:1] if describes else row
        lines.append(" , ".join(map(_rounded, values)))
    if describes or re.match(r"\s*show", sql, re.I):
        lines = [line.replace("'", "") for line in lines]
    if len(answer) > SHORT_ROWS:
        lines.append("...")
    return " | ".join(lines) or "empty"


def _rounded(value) -> str:
    """Returns the repr of a value, with fractions rounded to two digits."""
    return repr(round(float(value), 2) if isinstance(value, (float, Decimal)) else value)


def parse_sql_reply(reply: str) -> str | None:
    """Returns the action in a reply as InterCode's ReAct agents parse it.

    After the first "Action:" this is "submit" if that word occurs anywhere, and otherwise the first
    line of the first fenced sql block. It is None if there is neither.
    """
    action = reply.partition("Action:")[2]
    if "submit" in action:
        return "submit"
    fence = re.search(r"```sql(.*?)```", action, re.S)
    return fence and fence[1].strip().split("\n")[0] or None


def sql_reward(agent_rows, gold_rows) -> float:
    """Returns InterCode's reward for the last result, in [-1, 1].

    Rows are compared as text, so 1 and 1.0 differ. With |common| and |union| as the sizes of the
    intersection and union of the two multisets of rows, the reward is

        round(tau * |common| / |union|, 2)

    where tau is Kendall's tau-b between the common rows in the two orders. If tau is undefined
    (fewer than two distinct common rows), the reward is |common| / |union|. Two empty lists earn 1,
    and an argument that is no list earns 0.

    Args:
        agent_rows: Rows of the agent's last result, or an error text, or None.
        gold_rows: Rows of the gold query.
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
    """Returns the first occurrences of each row, as many as `common` counts, in order."""
    seen = Counter()
    return [row for row in rows if seen.update([row]) or seen[row] <= common[row]]


def kendall_tau(a: list[str], b: list[str]) -> float:
    """Returns Kendall's tau-b between two orders of the same texts, in O(n^2) time and O(n)
    memory."""
    x, y = (np.unique(texts, return_inverse=True)[1] for texts in (a, b))
    concordant = 0  # number of concordant pairs minus number of discordant pairs
    ties = 0        # number of tied pairs, which is the same in x and y
    for i in range(len(x) - 1):
        dx, dy = np.sign(x[i + 1:] - x[i]), np.sign(y[i + 1:] - y[i])
        concordant += int(dx @ dy)
        ties += int((dx == 0).sum())
    untied = np.sqrt(len(x) * (len(x) - 1) // 2 - ties)
    # This order of operations gives the same last bit as scipy, and so the same rounding of a half.
    return float(np.clip(concordant / untied / untied, -1, 1))
