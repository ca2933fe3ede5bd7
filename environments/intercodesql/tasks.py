"""Makes new questions about the generated databases from the queries of an episode.

If a query matches a question family of questions.py, its question is generated from the family.
Otherwise, an explorer model has to write the question.
"""

import random
import re
from contextlib import closing
from functools import cache
from hashlib import sha256

from environments import replay, words_of
from environments.intercodesql import questions
from environments.intercodesql.databases import ERROR, Sqlite, code_of
from environments.intercodesql.questions import HELD_OUT, tables_of, worth_asking

COPIES = 4  # number of copies of a database with new random rows (see `effect`) [ours]
# {placeholder of a gold query: pattern of its possible values}
HOLES = {**dict.fromkeys("tnabceksp", r"\w+"), **dict.fromkeys(("v", "v2", "u"), r"'\w+'"),
         **dict.fromkeys("xyz", r"\d+")}

def _pattern(gold: str) -> re.Pattern:
    """Returns a pattern that matches every query of a question family (see `families`).

    A placeholder that occurs several times in `gold` must have the same value each time.
    """
    pattern = re.escape(" ".join(re.findall(r"\{\w+\}|\w+|[^\w\s]", gold)))
    for hole, kind in HOLES.items():
        mark = re.escape(f"{{{hole}}}")
        pattern = pattern.replace(mark, f"(?P<{hole}>{kind})", 1).replace(mark, f"(?P={hole})")
    return re.compile(pattern, re.I)


FAMILIES = [(words, gold, _pattern(gold)) for _, words, gold in
            questions.SIMPLE + questions.COMPOUND + questions.LONG]


def families(sql: str):
    """Yields (question, gold query, {placeholder: value}) for each family that matches the query.

    The question and the gold query of the family contain placeholders.
    """
    for words, gold, pattern in FAMILIES:
        if match := pattern.fullmatch(" ".join(parts_of(sql))):
            yield words, gold, match.groupdict()


class TaskGenerator:
    """Makes, checks and verifies new tasks.

    A task is a question (see `questions.SQLData`). A candidate is a dict with `text` (the question
    in words), `task` and `solution` (a list of replies that solve the task).
    """
    form = ("A task is a question about this database that one SELECT answers; it names the same "
            "things, columns, values and numbers, and no others. Its actions are queries, the "
            "answer's SELECT the last of them, and then: submit")
    actions = "SHOW TABLES, DESC table, a SELECT or, once the last result is the answer, submit"

    def __init__(self, env):
        self.env = env
        self.questions = {}     # {name of a database: its questions in all splits}
        self.evaluated = set()  # normalised questions of all splits except "train"
        for split in env.splits:
            for question in env.splits[split].values():
                self.questions.setdefault(question["db"], []).append(question)
                if split != "train":
                    self.evaluated.add(words_of(question["query"]))
        self.training = {question["db"] for question in env.splits["train"].values()}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Returns the families of all SELECT queries of an episode that returned rows."""
        return {self.family(sql) for sql in self._successful(self.env.find(task)["db"], replies)}

    def family(self, sql: str) -> str:
        """Returns the question of the family that matches a query, with placeholders.

        If no family matches, returns the query with "x" for each name, and "?" for each value.
        """
        for words, _, _ in families(sql):
            return words
        words = re.sub(r"'[^']*'|\b\d+\b", "?", " ".join(parts_of(sql)))
        return re.sub(r"\b(?!(?:select|from|where|and|or|order|by|desc|limit|group|join|using|"
                      r"count|avg|max|min|sum|distinct|show|tables)\b)[a-z_]\w*", "x", words,
                      flags=re.I)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Makes a candidate from each SELECT query that returned rows and that matches a family."""
        db = self.env.find(task)["db"]
        questions = [self.question(db, sql, rng) for sql in self._successful(db, replies)]
        return [self.proposal(*question, db) for question in questions if question]

    def proposal(self, text: str, sql: str, db: str) -> dict:
        actions = ["SHOW TABLES", *(f"DESC {table}" for table in tables_of(sql)), sql, "submit"]
        return dict(text=text, task=dict(query=text, gold=sql, db=db),
                    solution=[self.env.reply(action) for action in actions])

    def question(self, db: str, sql: str, rng: random.Random) -> tuple[str, str] | None:
        """Returns a question that the query answers, and the query in the form of its family.

        Spaces in `sql` are ignored, because some tokenizers decode MAX(age) as MAX ( age ). Returns
        None if no family matches, or if the query does not fit the tables of the database.
        """
        sites, *_ = self.env.data.tables[db]
        tables = {table.name: table for table in self.env.data.tables[db]}
        for words, gold, parts in families(sql):
            table, site = tables.get(parts["t"]), tables.get(parts.get("p"))
            if table is None or "p" in parts and (site is not sites or table is sites):
                continue
            columns = {}
            for hole in parts.keys() & {*"nabce"}:
                columns[hole] = (site if hole == "e" else table).column(parts[hole])
            numbers = [columns[hole] for hole in "ab" if hole in columns]
            if None in columns.values() or not all(
                    isinstance(column.values[0], int) for column in numbers):
                continue  # a column does not exist, or should be numeric but is not
            terms = {"t": table.noun, "p": site.noun if site else ""}
            for hole, column in sorted(columns.items()):
                terms[hole] = column.name if hole == "n" else column.draw_name(rng)
            return words.format(**parts | terms), gold.format(**parts)
        return None

    def written(self, task: str, proposal: dict) -> dict | None:
        """Makes a candidate from an explorer model's proposal, or returns None.

        The last SELECT query of `action_sequence` becomes the gold query.
        """
        solution = [self.env.action(reply) or reply for reply in proposal["action_sequence"]]
        answers = [sql for sql in solution if re.match(r"\s*select", sql, re.I)]
        if not answers:
            return None
        return dict(text=proposal["query"], solution=[*map(self.env.reply, solution)],
                    task=dict(query=proposal["query"], db=self.env.find(task)["db"],
                              gold=" ".join(answers[-1].split()).rstrip(" ;")))

    def key(self, task: dict) -> str:
        """Returns the database's name and the result of `effect` for the gold query."""
        return f"{task['db']}/{effect(self.env.data, task['db'], task['gold'])}"

    def refusal(self, task: dict) -> str | None:
        """Returns the reason why a question must not become a task, or None."""
        if task["db"] not in self.training:
            return "a database of no training task"
        words, key = words_of(task["query"]), self.key(task)
        if words in self.evaluated or any(
                words == words_of(question["query"]) or key == self.key(question)
                for question in self.questions[task["db"]]):
            return "a question of a split"
        if {*words.split()} & {*HELD_OUT, *(f"{noun}s" for noun in HELD_OUT)}:
            return "a held-out noun"
        values = re.findall(r"'\w+'", task["gold"])
        if len(values) != len(set(values)):
            return "a value that occurs twice"
        with closing(self.env.database(task["db"])) as database:
            worth = worth_asking(database.run, task["gold"])
        return None if worth else ("its query cannot be run, has no rows or too many, or a "
                                   "condition that changes little")

    def verify(self, candidate: dict) -> str | None:
        """Verifies a candidate, and returns None or the reason why it does not pass.

        Two episodes with the solution must have the same observations and reward 1.
        """
        task, solution = candidate["task"], candidate["solution"]
        if len(solution) > self.env.max_turns:
            return "its solution is longer than an episode"
        steps = replay(self.env, task, solution)
        if steps != replay(self.env, task, solution):
            return "its replays differ"
        if any(step.observation.startswith(ERROR) for step in steps):
            return "an action of its solution fails"
        last = steps[-1]
        if not last.done or len(steps) < len(solution):
            return "its solution does not end with a submission"
        return None if last.reward == 1.0 else f"its solution earns {last.reward:.2f}"

    def _successful(self, db: str, replies: list[str]):
        """Runs the queries in the replies, and yields each SELECT query that returned rows."""
        with closing(self.env.database(db)) as database:
            for sql in map(self.env.action, replies):
                if sql and re.match(r"\s*select", sql, re.I):
                    rows = database.run(sql)
                    if isinstance(rows, list) and rows:
                        yield sql


@cache
def effect(data: questions.SQLData, db: str, gold: str) -> str:
    """Returns a fingerprint of a query. Two queries with the same fingerprint count as equivalent.

    The fingerprint is a hash of the query's results on its database and on several copies of the
    database with new random rows. If the query fails, its text is the fingerprint.
    """
    rng, tables = random.Random(db), data.tables[db]
    scripts = [data.databases[db]]
    for _ in range(COPIES):
        scripts.append(questions.database_script(questions.redraw(rng, tables)))
    ordered = re.search(r"\border\s+by\b", code_of(gold), re.I)
    answers = []
    for script in scripts:
        with closing(Sqlite(db, script)) as database:
            rows = database.execute(gold)
        if not isinstance(rows, list):
            return " ".join(parts_of(gold)).lower()
        answers.append(rows if ordered else sorted(rows, key=str))
    return sha256(str(answers).encode()).hexdigest()


def parts_of(sql: str) -> list[str]:
    """Splits a query into words, quoted strings and punctuation, without comments and semicolons.
    """
    parts = re.findall(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|\w+|[^\w\s]", sql, re.S)
    return [part for part in parts if not part.startswith(("--", "/*")) and part != ";"]
