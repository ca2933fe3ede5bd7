"""Generates the databases and questions of InterCodeSQL, and defines its scripted expert.

The data are the same in every run.
"""

import random
import re
import sqlite3
from dataclasses import dataclass, replace
from functools import cache

from environments import numbered, saying

DATA_SEED = 20251123  # fixed, so the data do not depend on the seed of a run [ours]

# Each database has a table of sites, such as schools, and one or two tables of people or things
# that belong to sites, such as teachers. The names of tables and columns are single words, so that
# a small model can copy them. A concept, such as the salary, has several names. If a question
# contains "wage" and the column is called "pay", the agent must look up the column with DESC.
PEOPLE = "doctor teacher driver singer farmer painter lawyer pilot nurse baker actor writer".split()
THINGS = "car book phone boat lamp guitar camera kite bike clock radio sofa".split()
SITES = "town school museum farm harbor hotel island valley market castle station park".split()
HELD_OUT = {"baker", "actor", "writer", "clock", "radio", "sofa", "castle", "station", "park"}

# {kind of table: (name of the label column, names of each numeric and of each text column)}
CONCEPTS = {
    "people": ("name", [["age", "years"], ["salary", "pay", "wage"], ["score", "points", "marks"]],
               [["country", "nation", "homeland"], ["grade", "rank", "level"]]),
    "things": ("model", [["price", "cost", "fee"], ["weight", "mass", "load"],
                         ["speed", "pace", "tempo"]],
               [["color", "shade", "tint"], ["brand", "maker", "label"]]),
    "sites": ("site", [["area", "size", "extent"], ["seats", "rooms", "places"]],
              [["region", "zone", "district"]]),
}
# {first of a text column's names: the column's possible values}
VALUES = {
    "country": "France Spain Japan Brazil Egypt India".split(),
    "grade": "junior senior expert novice".split(),
    "color": "red blue green black white".split(),
    "brand": "Acme Zenith Orion Delta Vega".split(),
    "region": "north south east west".split(),
}
NAMES = {
    "people": "Ann Bob Carl Dora Eva Finn Gina Hugo Ivan Jane Karl Lena Max Nora Otto Paul Rosa "
              "Sven Tina Uwe".split(),
    "things": "Alpha Beta Gamma Nova Astra Terra Luna Solar Turbo Prime Ultra Metro Polar Comet "
              "Pixel Spark Storm Blaze Ember Frost".split(),
    "sites": "Avon Brill Crewe Dover Esher Fowey Goole Hythe Ilam Jura Keld Leeds Masham Neath "
             "Otley Poole Ryde Settle Thame Ware".split(),
}


@dataclass(frozen=True)
class Column:
    # Names that questions use for the column, or [] for a label column or a foreign key
    concept: list[str]
    name: str           # name of the column in the database
    values: list        # one value per row

    def draw_name(self, rng: random.Random) -> str:
        """Draws the column's name for a question. The probability of the name in the database is at
        least two thirds."""
        return rng.choice([*(self.concept or [self.name]), *[self.name] * 3])


@dataclass(frozen=True)
class Table:
    name: str
    noun: str              # name of the table in questions, in the plural, such as "teachers"
    key: str               # name of the primary key column
    label: Column          # column with the name of each person, thing or site
    numbers: list[Column]  # numeric columns
    # Text columns. In all tables but the table of sites, the last text column is a foreign key to
    # the table of sites.
    texts: list[Column]

    @property
    def columns(self) -> list[Column]:
        """All columns except the primary key, in the order of the SQL table."""
        return [self.label, *self.texts, *self.numbers]

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, eq=False)
class SQLData:
    databases: dict[str, str]  # {name of a database: SQL script that creates it in sqlite}
    # {split: {number of a question: question}}. A question is a dict with `query` (the question in
    # words), `gold` (the gold query in SQL) and `db` (the name of the database).
    questions: dict[str, dict[str, dict]]
    # {name of a database: its tables, with the table of sites first}, or None for InterCode's data
    tables: dict[str, list[Table]] | None = None


def draw_database(rng: random.Random, nouns: set) -> list[Table]:
    """Generates the tables of a random database, named after some of the given nouns."""
    def pick(pool):
        return rng.choice([noun for noun in pool if noun in nouns])

    style = rng.choice(["{}", "{}s", "{}_info"])
    kinds = [("sites", pick(SITES))]
    kinds += rng.sample([("people", pick(PEOPLE)), ("things", pick(THINGS))], rng.choice([1, 2]))
    tables = []
    for kind, noun in kinds:
        label, numeric, textual = CONCEPTS[kind]
        rows = rng.randint(12, 16)
        numbers = [Column(names, rng.choice(names), rng.sample(range(10, 100), rows))
                   for names in rng.sample(numeric, 2)]
        texts = [Column(names, rng.choice(names), rng.choices(VALUES[names[0]], k=rows))
                 for names in rng.sample(textual, min(2, len(textual)))]
        if tables:  # add a foreign key to the table of sites, which is the first table
            sites = range(1, len(tables[0].label.values) + 1)
            texts.append(Column([], tables[0].key, rng.choices(sites, k=rows)))
        tables.append(Table(style.format(noun), f"{noun}s", f"{noun}_id",
                            Column([], label, rng.sample(NAMES[kind], rows)), numbers, texts))
    return tables


def redraw(rng: random.Random, tables: list[Table]) -> list[Table]:
    """Returns copies of the tables with new random rows.

    Each table gets 60 to 90 rows, so that queries with different meanings probably return different
    rows. All tables have different numbers of rows, so that COUNT(*) differs between tables.
    """
    counts = rng.sample(range(60, 91), len(tables))
    redrawn = []
    for table, rows in zip(tables, counts):
        numbers = [replace(column, values=rng.sample(range(10, 100), rows))
                   for column in table.numbers]
        texts = []
        for column in table.texts:
            pool = VALUES[column.concept[0]] if column.concept else range(1, counts[0] + 1)
            texts.append(replace(column, values=rng.choices(pool, k=rows)))
        label = replace(table.label, values=rng.choices(table.label.values, k=rows))
        redrawn.append(replace(table, label=label, numbers=numbers, texts=texts))
    return redrawn


def database_script(tables: list[Table]) -> str:
    """Returns an SQL script that creates the tables and their rows in sqlite."""
    script = []
    for i, table in enumerate(tables):
        lines = [f"{table.key} int PRIMARY KEY",
                 *(f"{c.name} {'int' if isinstance(c.values[0], int) else 'varchar(20)'}"
                   for c in table.columns)]
        if i:
            lines.append(f"FOREIGN KEY ({tables[0].key}) REFERENCES {tables[0].name}")
        rows = zip(range(1, len(table.label.values) + 1), *(c.values for c in table.columns))
        script.append(f"CREATE TABLE {table.name} ({', '.join(lines)});\n"
                      f"INSERT INTO {table.name} VALUES {', '.join(map(str, rows))};\n")
    return "".join(script)


def question_families(text: str) -> list[tuple[int, str, str]]:
    """Parses families into (weight, question, gold query)."""
    return [(int(weight), words, gold)
            for weight, words, gold in re.findall(r"(\d) (.+)\n  (.+)", text)]


# SIMPLE, COMPOUND and LONG are lists of question families. Within a list, families are drawn in
# proportion to their weights, the numbers at the start of the lines. The question of each family is
# followed by its gold query. The placeholders are:
#   {t}              table
#   {n}              label column of {t}
#   {a}, {b}         numeric columns of {t}
#   {c}              text column of {t}; {v} and {v2} are values in it
#   {x}, {y}, {z}    numbers
#   {p}              table of sites; {k} is its primary key
#   {e}              text column of {p}; {u} is a value in it
# A family has a large weight if an almost correct query earns partial reward. Most tasks are
# COMPOUND or LONG questions, which are rare in the tiny model's pretraining text. The model has to
# learn them from expert trajectories and from its own failures.
SIMPLE = question_families("""\
1 how many {t} are there
  SELECT COUNT(*) FROM {t}
1 how many {t} have {c} {v}
  SELECT COUNT(*) FROM {t} WHERE {c} = {v}
1 what is the average {a} of {t}
  SELECT AVG({a}) FROM {t}
1 what is the highest {a} of {t} with {c} {v}
  SELECT MAX({a}) FROM {t} WHERE {c} = {v}
1 what are the different values of {c} of {t}
  SELECT DISTINCT {c} FROM {t}
1 how many {t} are there for each {c}
  SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}
2 list the {n} of {t} with {c} {v}
  SELECT {n} FROM {t} WHERE {c} = {v}
3 list the {n} of {t} with {a} above {x}
  SELECT {n} FROM {t} WHERE {a} > {x}
3 list the {n} of {t} with {a} below {x}
  SELECT {n} FROM {t} WHERE {a} < {x}
2 list the {n} and {b} of {t} with {a} above {x}
  SELECT {n}, {b} FROM {t} WHERE {a} > {x}
3 list the {n} of the {z} {t} with the highest {a}
  SELECT {n} FROM {t} ORDER BY {a} DESC LIMIT {z}
2 list the {n} of the {z} {t} with the lowest {a}
  SELECT {n} FROM {t} ORDER BY {a} LIMIT {z}
2 list the {n} of {t} from the highest {a} to the lowest
  SELECT {n} FROM {t} ORDER BY {a} DESC
2 list the {n} of {t} with {a} above the average
  SELECT {n} FROM {t} WHERE {a} > (SELECT AVG({a}) FROM {t})
2 list the {n} of {t} in {p} with {e} {u}
  SELECT {n} FROM {t} JOIN {p} USING ({k}) WHERE {e} = {u}
""")
COMPOUND = question_families("""\
3 list the {n} of {t} with {a} above {x} and {b} below {y}
  SELECT {n} FROM {t} WHERE {a} > {x} AND {b} < {y}
3 list the {n} of {t} with {a} above {x} or {b} below {y}
  SELECT {n} FROM {t} WHERE {a} > {x} OR {b} < {y}
3 list the {n} of {t} with {c} {v} or {v2}
  SELECT {n} FROM {t} WHERE {c} = {v} OR {c} = {v2}
3 list the {n} of {t} with {c} {v} or {a} above {x}
  SELECT {n} FROM {t} WHERE {c} = {v} OR {a} > {x}
3 list the {n} of {t} with {c} {v} or {a} above {x} or {b} below {y}
  SELECT {n} FROM {t} WHERE {c} = {v} OR {a} > {x} OR {b} < {y}
3 list the {n} of {t} with {c} {v} or {v2} or {a} above {x}
  SELECT {n} FROM {t} WHERE {c} = {v} OR {c} = {v2} OR {a} > {x}
3 list the {n} of the {z} {t} with the highest {a} and {b} above {x}
  SELECT {n} FROM {t} WHERE {b} > {x} ORDER BY {a} DESC LIMIT {z}
3 list the {n} of {t} with {a} above {x} from the lowest {b} to the highest
  SELECT {n} FROM {t} WHERE {a} > {x} ORDER BY {b}
3 list the {n} of {t} with {c} {v} or {a} above {x} from the highest {b} to the lowest
  SELECT {n} FROM {t} WHERE {c} = {v} OR {a} > {x} ORDER BY {b} DESC
2 list the {n} of {t} in {p} with {e} {u} or {a} above {x}
  SELECT {n} FROM {t} JOIN {p} USING ({k}) WHERE {e} = {u} OR {a} > {x}
""")
# A query without the last condition usually still finds more than half of the correct rows, so it
# earns partial reward. The tiny model's pretraining text contains no LONG questions.
LONG = question_families("""\
1 list the {n} of {t} with {a} above {x} or {c} {v} or {v2}
  SELECT {n} FROM {t} WHERE {a} > {x} OR {c} = {v} OR {c} = {v2}
1 list the {n} of {t} with {a} below {x} or {c} {v} or {v2}
  SELECT {n} FROM {t} WHERE {a} < {x} OR {c} = {v} OR {c} = {v2}
1 list the {n} of {t} with {a} above {x} or {b} below {y} or {c} {v} or {v2}
  SELECT {n} FROM {t} WHERE {a} > {x} OR {b} < {y} OR {c} = {v} OR {c} = {v2}
""")


def draw_question(rng: random.Random, tables: list[Table]) -> dict:
    """Draws a random question about a database, a dict with `query` and `gold`."""
    number = rng.random()
    families = COMPOUND if number < 0.2 else LONG if number < 0.2 + 0.65 else SIMPLE
    _, query, gold = rng.choices(families, [family[0] for family in families])[0]
    table = rng.choice(tables[1:] if "{p}" in gold else tables)
    a, b = rng.sample(table.numbers, 2)
    c, site = rng.choice([c for c in table.texts if c.concept]), tables[0]
    e = site.texts[0]
    v, v2 = rng.sample(VALUES[c.concept[0]], 2)
    parts = dict(n=table.label.name, v=f"'{v}'", v2=f"'{v2}'", u=f"'{rng.choice(e.values)}'",
                 x=rng.randint(20, 80), y=rng.randint(20, 80), z=rng.randint(2, 5), k=site.key)
    names = {hole: column.draw_name(rng) for hole, column in zip("abce", (a, b, c, e))}
    return dict(query=query.format(**parts, **names, t=table.noun, p=site.noun),
                gold=gold.format(**parts, a=a.name, b=b.name, c=c.name, e=e.name, t=table.name,
                                 p=site.name))


@cache
def sql_data() -> SQLData:
    """Generates the data: 360 databases with 5 questions each.

    Each database belongs to a single split. The tables in `unseen` are named after nouns that no
    training task contains.
    """
    rng = random.Random(DATA_SEED)
    all_nouns = {*PEOPLE, *THINGS, *SITES}
    databases, tables_of_db, questions, schemas = {}, {}, {}, set()
    for split, count in (("train", 200), ("validation", 60), ("test", 60), ("unseen", 40)):
        rows = []
        nouns = HELD_OUT if split == "unseen" else all_nouns - HELD_OUT
        while len(rows) < 5 * count:
            tables = draw_database(rng, nouns)
            script = database_script(tables)
            if schema_key(script) in schemas:
                continue
            schemas.add(schema_key(script))
            name = f"{tables[0].key[:-3]}_{len(databases) + 1}"
            databases[name], tables_of_db[name] = script, tables
            con, by_query = sqlite3.connect(":memory:"), {}
            con.executescript(script)
            while len(by_query) < 5:
                question = draw_question(rng, tables)
                if worth_asking(lambda sql: con.execute(sql).fetchall(), question["gold"]):
                    by_query[question["query"]] = dict(question, db=name)
            con.close()
            rows += by_query.values()
        rng.shuffle(rows)
        questions[split] = numbered(rows)
    return SQLData(databases, questions, tables_of_db)


def schema_key(script: str) -> frozenset:
    """Returns a key of the schema that a script creates. The key does not depend on the order of
    tables and columns."""
    return frozenset(frozenset(re.findall(r"\w+", line))
                     for line in re.findall(r"CREATE TABLE .*", script))


def worth_asking(run, gold: str) -> bool:
    """Returns True if a gold query is suitable for a question.

    The result must have at least one row and at most 300 characters as text, and its first value
    must not be NULL. If the query has a WHERE clause, the result must differ from that of the query
    without this clause and all text after it. If the result has several rows, it must have at most
    70% as many rows as without the clause.

    Args:
        run: Function that runs a query and returns its rows.
    """
    rows = run(gold)
    if not isinstance(rows, list) or not rows or rows[0][0] is None or len(str(rows)) > 300:
        return False
    without_condition = re.sub(r"\sWHERE\s.*", "", gold, flags=re.I | re.S)
    if without_condition == gold:
        return True
    all_rows = run(without_condition)
    return (isinstance(all_rows, list) and rows != all_rows
            and (len(rows) == 1 or len(rows) <= 0.7 * len(all_rows)))


def tables_of(gold: str) -> list[str]:
    """Returns the names of the tables after FROM and JOIN in a query, in order, each name once."""
    return list(dict.fromkeys(re.findall(r"\b(?:from|join)\s+`?(\w+)", gold, re.I)))


def sql_expert(gold: str, thoughts: bool):
    """Returns the scripted expert of a question.

    The expert lists all tables, describes the tables in the gold query, runs the gold query and
    submits its result.

    Args:
        thoughts: True for replies in ReAct format, with a thought before each action.
    """
    # The expert describes at most 7 tables. The other 3 of an episode's 10 turns are SHOW TABLES,
    # the gold query and the submission.
    needed = tables_of(gold)[:7]
    turns = [("I should see which tables there are.", "SHOW TABLES")]
    for table in needed:
        turns.append((f"I need to know the columns of {table}.", f"DESC {table}"))
    turns.append((f"I can answer from {' and '.join(needed)}.", gold))
    turns.append(("The result answers the question.", "submit"))
    replies = []
    for thought, action in turns:
        if thoughts:
            block = action if action == "submit" else f"\n```sql\n{action}\n```"
            action = f"Thought: {thought}\nAction: {block}"
        replies.append(action)
    return saying(replies)
