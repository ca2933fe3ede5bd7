"""InterCodeSQL: an agent answers a question by exploring a database with SQL."""

import re
from collections import Counter
from contextlib import closing
from decimal import Decimal

import numpy as np

from environments import UsageError
from environments.intercodesql.databases import (
    DENIED,
    INTERRUPTED,
    TOO_LARGE,
    MySQL,
    Sqlite,
    check_sqlite,
)
from environments.intercodesql.questions import sql_data, sql_expert
from environments.intercodesql.spider import spider_data
from environments.intercodesql.tasks import TaskGenerator
from envs import EnvError, Environment, Step

SHORT_ROWS = 8
MOST_FAILURES = 0.02  # maximum share of gold queries that may fail [ours; MySQL 9.7: 0.018]

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
    """The environment InterCodeSQL. Each task is a question about a database.

    The agent explores the database with SQL queries, and submits the result of its last query as
    the answer. The value of a task is a question (see `questions.SQLData`).

    Args:
        view: "full", or "short" for a very small model. In the short view, a reply consists of a
            query or the word "submit", and results are shorter (see `in_short`).
        intercode_data: Path of the folder with InterCode's data, or None for generated databases.
        mysql_url: Address of the server with InterCode's databases, or None to use sqlite.
    """
    name = "intercodesql"
    max_turns = 10
    error_end = ""  # the end of most error texts; "\n" with --protocol eto, as in IPR's code

    def __init__(self, view: str = "full", intercode_data: str | None = None,
                 mysql_url: str | None = None):
        self.rules = PROMPT.format(dialect="MySQL" if mysql_url else "sqlite")
        super().__init__(view)
        self.mysql_url = mysql_url
        self.data = spider_data(intercode_data) if intercode_data else sql_data()
        self.splits = self.data.questions
        self.test_splits = tuple(split for split in ("test", "unseen") if split in self.splits)
        needed = {q["db"] for questions in self.splits.values() for q in questions.values()}
        if intercode_data and not mysql_url:
            check_sqlite()
        if not mysql_url and (missing := needed - self.data.databases.keys()):
            raise UsageError(f"--intercode-data: the dump has no database {min(missing)}; give one "
                             "that has it, as FOLDER/ic_spider_dbs.sql")
        self._db = None

    def check(self, splits: list[str]) -> str:
        """Runs all gold queries of some splits of InterCode's data, and counts those that fail.

        If a gold query fails, its result counts as empty, so an answer without rows earns reward 1.
        Raises UsageError if more than MOST_FAILURES of the gold queries fail.
        """
        if self.data.tables:  # the databases are generated
            return ""
        questions = [q for split in splits for q in self.splits[split].values()]
        failures = []
        for name in dict.fromkeys(q["db"] for q in questions):
            with closing(self.database(name)) as database:
                for question in questions:
                    if question["db"] == name:
                        result = database.execute(question["gold"])
                        if not isinstance(result, list):
                            failures.append(f"{question['gold']!r}: {result}")
        if not failures:
            return ""
        line = f"{len(failures)} of {len(questions)} gold queries fail, such as {failures[0]}"
        if len(failures) > MOST_FAILURES * len(questions):
            raise UsageError(f"--intercode-data: {line}; use sqlite, or a server "
                             "with --lower-case-table-names=1 from its first start")
        return f"{line}; an empty result earns 1 there, as InterCode scores it"

    def task_generator(self):
        # InterCode's data does not contain the `tables` that the generator needs.
        if not self.data.tables:
            return super().task_generator()
        return TaskGenerator(self)

    def start(self, question: dict) -> str:
        self.close()
        self._db = self.database(question["db"])
        self._question = question
        self.last_answer = None  # result of the last query; the action "submit" submits it
        return question["query"]

    def database(self, name: str) -> MySQL | Sqlite:
        if self.mysql_url:
            return MySQL(name, self.mysql_url)
        return Sqlite(name, self.data.databases[name])

    def step(self, reply: str) -> Step:
        sql = self.action(reply)
        if sql is None:  # self.last_answer does not change, so the agent can still submit it
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
        if self._db:
            self._db.close()


def gold_rows(database: MySQL | Sqlite, question: dict) -> list[tuple]:
    """Returns the rows of a gold query, or [] if the query is invalid, as in InterCode's code.

    Raises EnvError if the query exceeded a limit or lacked a privilege, because its correct result
    is then unknown.
    """
    gold = database.execute(question["gold"])
    if isinstance(gold, list):
        return gold
    message = f"the gold query of {question['query']!r}: {gold}"
    if gold in (INTERRUPTED, TOO_LARGE) or str(gold).startswith(DENIED):
        raise EnvError(message)
    return []


def in_full(answer) -> str:
    """Formats the result of a query as InterCode shows it, truncated to 350 characters."""
    text = str(answer)
    return text[:350] + "..." if len(text) > 350 else text


def in_short(answer, sql: str) -> str:
    """Formats the result of a query without brackets, and with at most SHORT_ROWS rows.

    For DESC, the text contains only the names of the columns.
    """
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
    return repr(round(float(value), 2) if isinstance(value, (float, Decimal)) else value)


def parse_sql_reply(reply: str) -> str | None:
    """Parses the action of a reply, as InterCode does for its ReAct agents.

    If the text after the first "Action:" contains the word "submit", the action is "submit".
    Otherwise, the action is the first line of the first ```sql block. Returns None if there is no
    such block, or if it is empty.
    """
    action = reply.partition("Action:")[2]
    if "submit" in action:
        return "submit"
    fence = re.search(r"```sql(.*?)```", action, re.S)
    return fence and fence[1].strip().split("\n")[0] or None


def sql_reward(agent_rows, gold_rows) -> float:
    """Returns InterCode's reward for a submitted result, in [-1, 1]. The reward is

        round(tau * |common| / |union|, 2)

    |common| and |union| are the sizes of the intersection and the union of two multisets: the
    agent's rows and the gold rows. Rows are compared as text, so 1 and 1.0 differ. tau is Kendall's
    tau-b between the orders of the common rows in the two results. If there are fewer than two
    distinct common rows, the reward is |common| / |union|.

    The reward is 1 if both lists are empty, and 0 if one of the arguments is not a list.
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
    """Returns the rows that are in `common`, in their order in `rows`, each as often as in
    `common`."""
    seen = Counter()
    return [row for row in rows if seen.update([row]) or seen[row] <= common[row]]


def kendall_tau(a: list[str], b: list[str]) -> float:
    """Returns Kendall's tau-b between two orderings of the same texts.

    For n texts, the function needs O(n^2) time and O(n) memory.
    """
    x, y = (np.unique(texts, return_inverse=True)[1] for texts in (a, b))
    concordant = 0  # number of concordant pairs minus number of discordant pairs
    ties = 0  # number of pairs of identical texts, the same in both orderings
    for i in range(len(x) - 1):
        dx, dy = np.sign(x[i + 1:] - x[i]), np.sign(y[i + 1:] - y[i])
        concordant += int(dx @ dy)
        ties += int((dx == 0).sum())
    untied = np.sqrt(len(x) * (len(x) - 1) // 2 - ties)
    # With this order of operations, tau is bitwise equal to scipy's. A different order can change
    # the reward after rounding to two digits, if tau * share is halfway between two multiples of
    # 0.01.
    return float(np.clip(concordant / untied / untied, -1, 1))
