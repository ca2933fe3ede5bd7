"""New questions about the generated databases, made of queries that somebody ran there. The family
of such a query in `questions` is read back, and the family's words say what it asks for."""

import random
import re
from contextlib import closing
from functools import cache
from hashlib import sha256

from environments import converse, saying, words_of
from environments.intercodesql import questions
from environments.intercodesql.databases import ERROR, Sqlite, code_of
from environments.intercodesql.questions import HELD_OUT, tables_of, worth_asking

COPIES = 4  # of a database with other rows, on which queries are told apart [ours]
# Words of a query that returns something else another time.
VARYING = set("now date time datetime julianday strftime unixepoch timediff current_date "
              "current_time current_timestamp random randomblob".split())
# What a placeholder of a gold query stands for; one that comes twice is the same both times.
HOLES = {**dict.fromkeys("tnabceksp", r"\w+"), **dict.fromkeys(("v", "v2", "u"), r"'\w+'"),
         **dict.fromkeys("xyz", r"\d+")}

# What a query does, and how a question says so.
OPERATIONS = ((r"\bcount\b", r"\b(how many|number of|count)\b"),
              (r"\bavg\b", r"\b(average|mean)\b"), (r"\b(or|in)\b", r"\bor\b"))

# What tells SQL from English that selects something from somewhere.
SIGNS = re.compile(r"[`*=<>]|\(.*\bfrom\b|\bfrom\s*\(|\bwhere\b.*(?:[(\"]|\s')"
                   r"|\b(?:order|group)\s+by\b|\blimit\s+\d|\bjoin\b|(?-i:SELECT\b.*\bFROM\b)",
                   re.I | re.S)


def _pattern(gold: str) -> re.Pattern:
    """Of the family's queries, their `parts_of` a space apart."""
    pattern = re.escape(" ".join(re.findall(r"\{\w+\}|\w+|[^\w\s]", gold)))
    for hole, kind in HOLES.items():
        mark = re.escape(f"{{{hole}}}")
        pattern = pattern.replace(mark, f"(?P<{hole}>{kind})", 1).replace(mark, f"(?P={hole})")
    return re.compile(pattern, re.I)


FAMILIES = [(words, gold, _pattern(gold)) for _, words, gold in
            questions.SIMPLE + questions.COMPOUND + questions.LONG]


def families(sql: str):
    """(words, gold, parts) of the families whose query it is; parts: placeholder -> its text."""
    for words, gold, pattern in FAMILIES:
        if match := pattern.fullmatch(" ".join(parts_of(sql))):
            yield words, gold, match.groupdict()


class TaskGenerator:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is a question about this database that one SELECT answers; it names the same "
            "things, columns, values and numbers, and no others. Its actions are queries, the "
            "answer's SELECT the last of them, and then: submit")
    # And about those that it plays, where the rules are not said.
    actions = "SHOW TABLES, DESC table, a SELECT or, once the last result is the answer, submit"

    def __init__(self, env):
        self.env = env
        self.asked = {}         # database -> the questions of all splits about it
        self.evaluated = set()  # what is evaluated, in words: it is asked about no other database
        for split in env.splits:
            for question in env.splits[split].values():
                self.asked.setdefault(question["db"], []).append(question)
                if split != "train":
                    self.evaluated.add(words_of(question["query"]))
        self.training = {question["db"] for question in env.splits["train"].values()}

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Families of the queries that ran and returned something; of others the skeleton."""
        return {self.family(sql) for sql in self._ran(self.env.find(task)["db"], replies)}

    def family(self, sql: str) -> str:
        """The words of the query's family; of none, the query without its names and values."""
        for words, _, _ in families(sql):
            return words
        words = re.sub(r"'[^']*'|\b\d+\b", "?", " ".join(parts_of(sql)))
        return re.sub(r"\b(?!(?:select|from|where|and|or|order|by|desc|limit|group|join|using|"
                      r"count|avg|max|min|sum|distinct|show|tables)\b)[a-z_]\w*", "x", words,
                      flags=re.I)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution}: of each query of an episode that ran and has rows."""
        db = self.env.find(task)["db"]
        asked = [self.question(db, sql, rng) for sql in self._ran(db, replies)]
        return [self.proposal(*found, db) for found in asked if found]

    def proposal(self, text: str, sql: str, db: str) -> dict:
        actions = ["SHOW TABLES", *(f"DESC {table}" for table in tables_of(sql)), sql, "submit"]
        return dict(text=text, task=dict(query=text, gold=sql, db=db),
                    solution=[self.env.reply(action) for action in actions])

    def question(self, db: str, sql: str, rng: random.Random) -> tuple[str, str] | None:
        """What the query asks for, in words, and the query as the generator writes it; None if it
        is of no family over this database. Spaces do not matter: tokenizers write MAX ( age )."""
        first, *_ = self.env.data.tables[db]  # the place of the others
        tables = {table.name: table for table in self.env.data.tables[db]}
        for words, gold, parts in families(sql):
            table, place = tables.get(parts["t"]), tables.get(parts.get("p"))
            if table is None or "p" in parts and (place is not first or table is first):
                continue
            columns = {}
            for hole in parts.keys() & {*"nabce"}:
                columns[hole] = (place if hole == "e" else table).column(parts[hole])
            numbers = [columns[hole] for hole in "ab" if hole in columns]
            if None in columns.values() or not all(
                    isinstance(column.values[0], int) for column in numbers):
                continue  # the average of names, or names above 20
            said = {"t": table.noun, "p": place.noun if place else ""}
            for hole, column in sorted(columns.items()):
                # Two thirds of the time, a question calls a column as the database does.
                names = *(column.concept or [column.name]), *[column.name] * 3
                said[hole] = column.name if hole == "n" else rng.choice(names)
            return words.format(**parts | said), gold.format(**parts)
        return None

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's proposal: its words and actions, with the last query as gold."""
        solution = [self.env.action(reply) or reply for reply in proposal["action_sequence"]]
        answers = [sql for sql in solution if re.match(r"\s*select", sql, re.I)]
        if not answers:
            return None
        return dict(text=proposal["query"], solution=[*map(self.env.reply, solution)],
                    task=dict(query=proposal["query"], db=self.env.find(task)["db"],
                              gold=" ".join(answers[-1].split()).rstrip(" ;")))

    def agree(self, task: dict) -> bool:
        """Whether question and query are about the same: tables, columns, values and numbers. The
        query reads a table; it may ask for names, and for the first row, without being told."""
        tables, question = self.env.data.tables[task["db"]], task["query"]
        sql = re.sub(r"\blimit 1$", "", task["gold"], flags=re.I)
        quoted = {*re.findall("'(.*?)'", sql)}
        said = named(tables, question, quoted)
        asked = named(tables, sql, quoted) | quoted
        reads = {table.name for table in tables} & {*tables_of(sql.lower())}
        labels = {table.label.name for table in tables}
        if not reads or not said <= asked or not asked - said <= labels:
            return False
        for does, says in OPERATIONS:
            if bool(re.search(does, sql, re.I)) != bool(re.search(says, question, re.I)):
                return False
        return True

    def key(self, task: dict) -> str:
        """What makes two questions one: the effect of their queries."""
        return f"{task['db']}/{effect(self.env.data, task['db'], task['gold'])}"

    def refusal(self, task: dict) -> str | None:
        """Why no run may have this question; None if one may."""
        if task["db"] not in self.training:
            return "a database of no training task"
        words, key = words_of(task["query"]), self.key(task)
        if words in self.evaluated:
            return "a question of a split"
        for question in self.asked[task["db"]]:
            if words == words_of(question["query"]) or key == self.key(question):
                return "a question of a split"
        if {*words.split()} & {*HELD_OUT, *(f"{noun}s" for noun in HELD_OUT)}:
            return "a held-out noun"
        if VARYING & {*re.findall(r"\w+", code_of(task["gold"]).lower())}:
            return "a query that returns something else another time"
        values = re.findall(r"'\w+'", task["gold"])
        if len(values) != len(set(values)):
            return "one value twice"
        with closing(self.env.database(task["db"])) as database:
            worth = worth_asking(database.run, task["gold"])
        return None if worth else ("its query cannot be asked, has no rows or too many, or a "
                                   "condition that changes little")

    def tells(self, text: str, solution: list[str]) -> bool:
        """Whether a task's text holds what solves it: an action of its solution, of more than one
        word, or a SELECT that reads a table: one of the solution's, or with signs of SQL."""
        said = f" {_plain(text)} "
        tables = []
        for reply in solution:
            action = _plain(self.env.action(reply) or reply)
            if " " in action and f" {action} " in said:
                return True
            tables += tables_of(action)
        select = re.search(r"\bselect\b.*\bfrom\b.*", text, re.I | re.S)
        if select is None:
            return False
        known = any(f" from {table} " in said for table in tables)
        return known or bool(SIGNS.search(select[0]))

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution twice; why it does not prove the question, or None."""
        task, solution = proposal["task"], proposal["solution"]
        if not self.agree(task):
            return "its text does not ask for what its query reads"
        if len(solution) > self.env.max_turns:
            return "its solution is longer than an episode"
        first, second = (converse(self.env, self.env.start(task), saying(solution))
                         for _ in range(2))
        if first != second:
            return "its replays differ"
        messages, reward = first
        if any(turn["content"].startswith(ERROR) for turn in messages):
            return "an action of its solution fails"
        if len(messages) != 2 * len(solution):
            return "its solution does not end with a submission"
        return None if reward == 1.0 else f"its solution earns {reward:.2f}"

    def _ran(self, db: str, replies: list[str]):
        """The replies' queries that ran and returned something."""
        with closing(self.env.database(db)) as database:
            for sql in map(self.env.action, replies):
                rows = database.run(sql) if sql and sql != "submit" else None
                if isinstance(rows, list) and rows and re.match(r"\s*select", sql, re.I):
                    yield sql


@cache
def effect(data: questions.SQLData, db: str, gold: str) -> str:
    """What tells a query from others: the rows that it finds in its database, and in COPIES of that
    with other rows; of a query that fails there its text."""
    rng, tables = random.Random(db), data.tables[db]
    scripts = [data.databases[db]]
    for _ in range(COPIES):
        scripts.append(questions.database_script(questions.redraw(rng, tables)))
    ordered = re.search(r"\border\s+by\b", code_of(gold), re.I)
    answers = []
    for script in scripts:
        with closing(Sqlite(db, script)) as database:
            rows = database.ask(gold)
        if not isinstance(rows, list):
            return " ".join(parts_of(gold)).lower()
        answers.append(rows if ordered else sorted(rows, key=str))
    return sha256(str(answers).encode()).hexdigest()


def named(tables: list, text: str, values: set[str]) -> set[str]:
    """What a question or a query names of a database, by its own names: and which of `values`."""
    names = {}  # a word -> the database's own name for it
    for table in tables:
        for word in (table.name, table.noun, table.noun[:-1]):
            names[word] = table.name
        for column in table.columns:
            if column.concept or column is table.label:
                for word in (column.name, *column.concept):
                    names[word] = names[f"{word}s"] = column.name
                values = values | {*map(str, column.values)}
    found = set()
    for word in re.findall(r"\w+", text):
        if word.lower() in names:
            found.add(names[word.lower()])
        elif word in values or word.isdigit():
            found.add(word)
    return found


def parts_of(sql: str) -> list[str]:
    """The query's words, signs and quoted values, without comments and semicolons."""
    parts = re.findall(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|\w+|[^\w\s]", sql, re.S)
    return [part for part in parts if not part.startswith(("--", "/*")) and part != ";"]


def _plain(text: str) -> str:
    """Words and signs a space apart, in lower case, without quotes and semicolons."""
    return " ".join(re.findall(r"\w+|[^\w\s'\"`;]", text.lower()))
