"""New questions about the generated databases, made of queries that somebody ran there.

A find is a SELECT that ran and has rows. Its family of `questions` is read back, and the
family's words say what it asks for. The smith shares the generator's grammar, so text and query
agree by construction; whoever writes questions another way has to show it.
"""

import random
import re
from contextlib import closing

from worlds import words_of
from worlds.intercodesql.databases import Sqlite
from worlds.intercodesql.questions import (
    COMPOUND,
    CONCEPTS,
    HELD_OUT,
    SIMPLE,
    tables_of,
    worth_asking,
)

FAMILIES = SIMPLE + COMPOUND
# Words of a query that returns something else another time.
VARYING = set("now date time datetime julianday strftime unixepoch timediff current_date "
              "current_time current_timestamp random randomblob".split())
# What a placeholder of a gold query stands for; one that comes twice is the same both times.
HOLES = {**dict.fromkeys("tnabceksp", r"\w+"), **dict.fromkeys(("v", "v2", "u"), r"'\w+'"),
         **dict.fromkeys("xyz", r"\d+")}


def _pattern(gold: str) -> re.Pattern:
    """Of the family's queries as `spaced` writes them."""
    seen, parts = set(), []
    for hole, text in re.findall(r"\{(\w+)\}|(\w+|[^\w\s])", gold):
        parts.append(re.escape(text) or (f"(?P={hole})" if hole in seen else
                                         f"(?P<{hole}>{HOLES[hole]})"))
        seen.add(hole)
    return re.compile(" ".join(parts), re.I)


PATTERNS = [_pattern(gold) for _, _, gold in FAMILIES]


class Schema:
    """The tables of a generated database, read back from the script that makes it."""

    def __init__(self, script: str):
        self.columns, self.noun = {}, {}  # table -> its columns -> possible names; its noun
        self.numbers = {}  # table -> its numeric columns
        for table, body in re.findall(r"CREATE TABLE (\w+) \((.*)\);", script):
            key = re.match(r"(\w+)_id int PRIMARY KEY", body)[1]
            self.noun[table] = f"{key}s"
            kinds = dict(line.split()[:2] for line in body.split(", ")[1:])
            self.columns[table] = {name: concept_of(name) for name in kinds if name != "FOREIGN"}
            self.numbers[table] = {name for name, kind in kinds.items() if kind == "int"}
        self.place = next(iter(self.columns))  # where the rows of the others are


def concept_of(name: str) -> tuple[str, ...]:
    """The names of the concept that a column's name is one of; of a label or a key, its own."""
    return next((tuple(names) for _, numeric, textual in CONCEPTS.values()
                 for names in numeric + textual if name in names), (name,))


class SQLSmith:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is a question about this database that one SELECT answers. Its actions are "
            "queries, the answer's SELECT the last of them, and then: submit")
    # And about those that it plays, where the rules are not said.
    actions = "SHOW TABLES, DESC table, a SELECT or, once the last result is the answer, submit"

    def __init__(self, env):
        """env: an InterCodeSQL of the smith's own, which it plays."""
        self.env, world = env, env.world
        self.training = {q["db"] for q in world.questions["train"].values()}
        self.known = {(q["db"], text) for questions in world.questions.values()
                      for q in questions.values()
                      for text in (words_of(q["query"]), alike(q["gold"]))}
        # What is evaluated is asked about no other database either.
        self.evaluated = {words_of(q["query"]) for split, questions in world.questions.items()
                          if split != "train" for q in questions.values()}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Families of the queries that ran and returned something; of others the skeleton."""
        return {self.family(sql) for sql in self._ran(self.env.find(task)["db"], replies)}

    def family(self, sql: str) -> str:
        """The words of the query's family; of none, the query without its names and values."""
        sql = spaced(sql)
        for (_, words, _), pattern in zip(FAMILIES, PATTERNS):
            if pattern.fullmatch(sql):
                return words
        words = re.sub(r"'[^']*'|\b\d+\b", "?", sql)
        return re.sub(r"\b(?!(?:select|from|where|and|or|order|by|desc|limit|group|join|using|"
                      r"count|avg|max|min|sum|distinct|show|tables)\b)[a-z_]\w*", "x", words,
                      flags=re.I)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution}: of each query of an episode that ran and has rows."""
        db, found = self.env.find(task)["db"], []
        for sql in self._ran(db, replies):
            if asked := self.question(db, sql, rng):
                found.append(self.proposal(*asked, db))
        return found

    def proposal(self, text: str, sql: str, db: str) -> dict:
        steps = ["SHOW TABLES", *(f"DESC {table}" for table in tables_of(sql)), sql]
        if self.env.view == "full":
            steps = [f"Action:\n```sql\n{step}\n```" for step in steps]
        submit = "submit" if self.env.view == "short" else "Action: submit"
        return dict(text=text, task=dict(query=text, gold=sql, db=db), solution=[*steps, submit])

    def question(self, db: str, sql: str, rng: random.Random) -> tuple[str, str] | None:
        """What the query asks for, in words, and the query as the generator writes it.

        None if it is of no family over this database. Spaces and case do not matter: a tokenizer
        may decode MAX ( age ).
        """
        schema, sql = Schema(self.env.world.databases[db]), spaced(sql)
        for (_, words, gold), pattern in zip(FAMILIES, PATTERNS):
            match = pattern.fullmatch(sql)
            parts = match.groupdict() if match else {}
            table, place = parts.get("t"), parts.get("p")
            if table not in schema.columns or place and not table != place == schema.place:
                continue
            names = {hole: parts[hole] for hole in "nabce" if hole in parts}
            home = {hole: schema.columns[place if hole == "e" else table] for hole in names}
            if any(name not in home[hole] for hole, name in names.items()):
                continue
            if not {names[hole] for hole in "ab" if hole in names} <= schema.numbers[table]:
                continue  # the average of names, or names above 20
            # Two thirds of the time, a question calls a column as the database does.
            said = {hole: name if hole == "n" else rng.choice((*home[hole][name], *[name] * 3))
                    for hole, name in names.items()}
            return (words.format(**{**parts, **said, "t": schema.noun[table],
                                    "p": schema.noun.get(place, "")}), gold.format(**parts))
        return None

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's proposal: its words, and the last query of its actions as gold."""
        queries = [self.env.query_of(action) or action for action in proposal["action_sequence"]]
        answers = [sql for sql in queries if re.match(r"\s*select", sql, re.I)]
        if not answers:
            return None
        return self.proposal(proposal["query"], squeezed(answers[-1]), self.env.find(task)["db"])

    def key(self, task: dict) -> str:
        """What makes two questions one: the query on its database."""
        return f"{task['db']}/{alike(task['gold'])}"

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this question; None if one may."""
        if task["db"] not in self.training:
            return "a database of no training task"
        words = words_of(task["query"])
        if ({(task["db"], words), (task["db"], alike(task["gold"]))} & self.known
                or words in self.evaluated):
            return "a question of a split"
        if {*words.split()} & {*HELD_OUT, *(f"{noun}s" for noun in HELD_OUT)}:
            return "a held-out noun"
        if VARYING & {*re.findall(r"\w+", task["gold"].lower())}:
            return "a query that returns something else another time"
        values = re.findall(r"'\w+'", task["gold"])
        if len(values) != len(set(values)):
            return "one value twice"
        try:
            self.env.check(task)
        except ValueError as error:
            return str(error)
        rows = self._ask(task, lambda run: run(task["gold"]))
        return None if isinstance(rows, list) else "its query does not run"

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution twice; why it does not prove the question, or None."""
        task, played = proposal["task"], []
        if len(proposal["solution"]) > self.env.max_steps:
            return "its solution is longer than an episode"
        if not self._ask(task, lambda run: worth_asking(run, task["gold"])):
            return "no rows, too many, or a condition that changes little"
        for _ in range(2):
            pages = [self.env.start(task, self.env.world.databases[task["db"]])]
            for n, reply in enumerate(proposal["solution"], 1):
                step = self.env.step(reply)
                pages.append(step.observation)
                if step.done:
                    break
            played.append((pages, step.reward, step.done and n == len(proposal["solution"])))
        self.env.close()
        if played[0] != played[1]:
            return "its replays differ"
        if not played[0][2]:
            return "its solution does not end with a submission"
        return None if played[0][1] == 1.0 else f"its solution earns {played[0][1]:.2f}"

    def _ask(self, task: dict, question):
        """question(run) of the task's database, within the limits that any query has there."""
        with closing(Sqlite(task["db"], self.env.world.databases[task["db"]])) as database:
            return question(database.run)

    def _ran(self, db: str, replies: list[str]):
        """The replies' queries that ran and returned something, squeezed."""
        database = Sqlite(db, self.env.world.databases[db])
        for reply in replies:
            sql = self.env.query_of(reply)
            rows = database.run(sql) if sql and sql != "submit" else None
            if isinstance(rows, list) and rows and re.match(r"\s*select", sql, re.I):
                yield squeezed(sql)
        database.close()


def squeezed(sql: str) -> str:
    """The query with single spaces and without its semicolon."""
    return " ".join(sql.split()).rstrip(" ;")


def parts_of(sql: str) -> list[str]:
    """The query's words, signs and quoted values, without comments and semicolons."""
    parts = re.findall(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|\w+|[^\w\s]", sql, re.S)
    return [part for part in parts if not part.startswith(("--", "/*")) and part != ";"]


def spaced(sql: str) -> str:
    return " ".join(parts_of(sql))


def alike(sql: str) -> str:
    """The same text for queries that differ in spaces, comments or the case of their words."""
    return " ".join(part if part[0] in "'\"" else part.lower() for part in parts_of(sql))
