"""The generated databases and questions of InterCodeSQL, and its scripted expert.

The data are the same in every run.
"""

import random
import re
import sqlite3
from dataclasses import dataclass, replace
from functools import cache

from environments import saying

DATA_SEED = 20251123  # the data do not depend on the seed of a run [ours]

# A database has a table of sites, and one or two tables of people or things. Each person or thing
# is at a site. Names of tables and columns are one word each and unique in the database, so that a
# small model can copy them. A concept has several names. A question and a database may use
# different ones, so the agent has to describe the table.
PEOPLE = "doctor teacher driver singer farmer painter lawyer pilot nurse baker actor writer".split()
THINGS = "car book phone boat lamp guitar camera kite bike clock radio sofa".split()
SITES = "town school museum farm harbor hotel island valley market castle station park".split()
HELD_OUT = {"baker", "actor", "writer", "clock", "radio", "sofa", "castle", "station", "park"}

# kind -> (name of the label column, numeric concepts, text concepts)
CONCEPTS = {
    "people": ("name", [["age", "years"], ["salary", "pay", "wage"], ["score", "points", "marks"]],
               [["country", "nation", "homeland"], ["grade", "rank", "level"]]),
    "things": ("model", [["price", "cost", "fee"], ["weight", "mass", "load"],
                         ["speed", "pace", "tempo"]],
               [["color", "shade", "tint"], ["brand", "maker", "label"]]),
    "sites": ("site", [["area", "size", "extent"], ["seats", "rooms", "places"]],
              [["region", "zone", "district"]]),
}
VALUES = {  # first name of a text concept -> its values
    "country": ["France", "Spain", "Japan", "Brazil", "Egypt", "India"],
    "grade": ["junior", "senior", "expert", "novice"],
    "color": ["red", "blue", "green", "black", "white"],
    "brand": ["Acme", "Zenith", "Orion", "Delta", "Vega"],
    "region": ["north", "south", "east", "west"],
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
    concept: list[str]  # its possible names in questions, or [] for a label or a key
    name: str           # its name in this database
    values: list        # its value in each row


@dataclass(frozen=True)
class Table:
    name: str
    noun: str              # its name in questions, in the plural
    key: str               # name of the key column
    label: Column          # the name of a person, thing or site
    numbers: list[Column]
    texts: list[Column]    # text columns and, last, the key of the site, except in a table of sites

    @property
    def columns(self) -> list[Column]:
        """All columns but the key, in the order of the table."""
        return [self.label, *self.texts, *self.numbers]

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, eq=False)
class SQLData:
    databases: dict[str, str]              # name -> SQL script that makes it in sqlite
    questions: dict[str, dict[str, dict]]  # split -> number -> query (in words), gold (SQL), db
    # name of a generated database -> its tables, the table of sites first
    tables: dict[str, list[Table]] | None = None


def draw_database(rng: random.Random, nouns: set) -> list[Table]:
    """Draws the tables of a database over some of the nouns. The first is the table of sites."""
    style = rng.choice(["{}", "{}s", "{}_info"])
    people, things = ([n for n in pool if n in nouns] for pool in (PEOPLE, THINGS))
    kinds = [("sites", rng.choice([n for n in SITES if n in nouns]))]
    kinds += rng.sample([("people", rng.choice(people)), ("things", rng.choice(things))],
                        rng.choice([1, 2]))
    tables = []
    for kind, noun in kinds:
        label, numeric, textual = CONCEPTS[kind]
        rows = rng.randint(12, 16)
        numbers = [Column(names, rng.choice(names), rng.sample(range(10, 100), rows))
                   for names in rng.sample(numeric, 2)]
        texts = [Column(names, rng.choice(names), rng.choices(VALUES[names[0]], k=rows))
                 for names in rng.sample(textual, min(2, len(textual)))]
        if tables:  # each row is at a site, whose key the column holds
            sites = range(1, len(tables[0].label.values) + 1)
            texts.append(Column([], tables[0].key, rng.choices(sites, k=rows)))
        tables.append(Table(style.format(noun), f"{noun}s", f"{noun}_id",
                            Column([], label, rng.sample(NAMES[kind], rows)), numbers, texts))
    return tables


def redraw(rng: random.Random, tables: list[Table]) -> list[Table]:
    """Draws other rows for the same tables.

    They have many rows, so that different queries find different rows, and no two tables have the
    same number of rows.
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
    """Returns the SQL script that makes the tables in sqlite."""
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


# Question families: (weight, question, gold query). A family is drawn in proportion to its weight.
# Placeholders: {t} is a table and {n} its label; {a} and {b} are numeric columns; {c} is a text
# column with the values {v} and {v2}; {x}, {y} and {z} are numbers; {p} is the table of sites, {k}
# its key and {e} its text column with the value {u}. Families whose near misses earn part of the
# reward have large weights. Compound and long questions are most of the tasks, but the tiny model's
# pretraining text has few of them, so combining conditions is learnt from expert trajectories and
# failures.
def lists(weight: int, words: str, condition: str) -> tuple[int, str, str]:
    return weight, "list the {n} of {t} " + words, "SELECT {n} FROM {t} " + condition


SIMPLE = [
    (1, "how many {t} are there", "SELECT COUNT(*) FROM {t}"),
    (1, "how many {t} have {c} {v}", "SELECT COUNT(*) FROM {t} WHERE {c} = {v}"),
    (1, "what is the average {a} of {t}", "SELECT AVG({a}) FROM {t}"),
    (1, "what is the highest {a} of {t} with {c} {v}", "SELECT MAX({a}) FROM {t} WHERE {c} = {v}"),
    (1, "what are the different values of {c} of {t}", "SELECT DISTINCT {c} FROM {t}"),
    (1, "how many {t} are there for each {c}", "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}"),
    lists(2, "with {c} {v}", "WHERE {c} = {v}"),
    lists(3, "with {a} above {x}", "WHERE {a} > {x}"),
    lists(3, "with {a} below {x}", "WHERE {a} < {x}"),
    (2, "list the {n} and {b} of {t} with {a} above {x}",
     "SELECT {n}, {b} FROM {t} WHERE {a} > {x}"),
    (3, "list the {n} of the {z} {t} with the highest {a}",
     "SELECT {n} FROM {t} ORDER BY {a} DESC LIMIT {z}"),
    (2, "list the {n} of the {z} {t} with the lowest {a}",
     "SELECT {n} FROM {t} ORDER BY {a} LIMIT {z}"),
    lists(2, "from the highest {a} to the lowest", "ORDER BY {a} DESC"),
    lists(2, "with {a} above the average", "WHERE {a} > (SELECT AVG({a}) FROM {t})"),
    lists(2, "in {p} with {e} {u}", "JOIN {p} USING ({k}) WHERE {e} = {u}"),
]
COMPOUND = [
    lists(3, "with {a} above {x} and {b} below {y}", "WHERE {a} > {x} AND {b} < {y}"),
    lists(3, "with {a} above {x} or {b} below {y}", "WHERE {a} > {x} OR {b} < {y}"),
    lists(3, "with {c} {v} or {v2}", "WHERE {c} = {v} OR {c} = {v2}"),
    lists(3, "with {c} {v} or {a} above {x}", "WHERE {c} = {v} OR {a} > {x}"),
    lists(3, "with {c} {v} or {a} above {x} or {b} below {y}",
          "WHERE {c} = {v} OR {a} > {x} OR {b} < {y}"),
    lists(3, "with {c} {v} or {v2} or {a} above {x}", "WHERE {c} = {v} OR {c} = {v2} OR {a} > {x}"),
    (3, "list the {n} of the {z} {t} with the highest {a} and {b} above {x}",
     "SELECT {n} FROM {t} WHERE {b} > {x} ORDER BY {a} DESC LIMIT {z}"),
    lists(3, "with {a} above {x} from the lowest {b} to the highest",
          "WHERE {a} > {x} ORDER BY {b}"),
    lists(3, "with {c} {v} or {a} above {x} from the highest {b} to the lowest",
          "WHERE {c} = {v} OR {a} > {x} ORDER BY {b} DESC"),
    lists(2, "in {p} with {e} {u} or {a} above {x}",
          "JOIN {p} USING ({k}) WHERE {e} = {u} OR {a} > {x}"),
]
# Without the last condition these queries mostly find more than half of the answer, so a failure
# can be a near miss. The pretraining text has none of them.
LONG = [
    lists(1, "with {a} above {x} or {c} {v} or {v2}", "WHERE {a} > {x} OR {c} = {v} OR {c} = {v2}"),
    lists(1, "with {a} below {x} or {c} {v} or {v2}", "WHERE {a} < {x} OR {c} = {v} OR {c} = {v2}"),
    lists(1, "with {a} above {x} or {b} below {y} or {c} {v} or {v2}",
          "WHERE {a} > {x} OR {b} < {y} OR {c} = {v} OR {c} = {v2}"),
]


def draw_question(rng: random.Random, tables: list[Table], compound: float,
                  long: float = 0.0) -> dict:
    """Draws a question.

    Args:
        rng: Random number generator.
        tables: Tables of the database.
        compound: Probability of a compound question.
        long: Probability of a long question.

    Returns:
        `query`, the question in words, and `gold`, its query in SQL.
    """
    number = rng.random()
    families = COMPOUND if number < compound else LONG if number < compound + long else SIMPLE
    _, query, gold = rng.choices(families, [family[0] for family in families])[0]
    table = rng.choice(tables[1:] if "{p}" in gold else tables)
    a, b = rng.sample(table.numbers, 2)
    c, site = rng.choice([c for c in table.texts if c.concept]), tables[0]
    e = site.texts[0]
    v, v2 = rng.sample(VALUES[c.concept[0]], 2)
    parts = dict(n=table.label.name, v=f"'{v}'", v2=f"'{v2}'", u=f"'{rng.choice(e.values)}'",
                 x=rng.randint(20, 80), y=rng.randint(20, 80), z=rng.randint(2, 5), k=site.key)
    # Two thirds of the time, a question uses the database's name of a column.
    names = {hole: rng.choice((*column.concept, *[column.name] * 3))
             for hole, column in zip("abce", (a, b, c, e))}
    return dict(query=query.format(**parts, **names, t=table.noun, p=site.noun),
                gold=gold.format(**parts, a=a.name, b=b.name, c=c.name, e=e.name, t=table.name,
                                 p=site.name))


@cache
def sql_data() -> SQLData:
    """Returns the generated data: 360 databases with 5 questions each.

    The split `test` has databases that are not in `train`, and `unseen` has databases over nouns
    that no training task names. Every gold query is `worth_asking`.
    """
    rng = random.Random(DATA_SEED)
    all_nouns = {*PEOPLE, *THINGS, *SITES}
    databases, tables_of_db, questions, schemas = {}, {}, {}, set()
    for split, count in (("train", 200), ("validation", 60), ("test", 60), ("unseen", 40)):
        questions[split] = []
        nouns = HELD_OUT if split == "unseen" else all_nouns - HELD_OUT
        while len(questions[split]) < 5 * count:
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
                question = draw_question(rng, tables, 0.2, long=0.65)
                if worth_asking(lambda sql: con.execute(sql).fetchall(), question["gold"]):
                    by_query[question["query"]] = dict(question, db=name)
            con.close()
            questions[split] += by_query.values()
        rng.shuffle(questions[split])
    return SQLData(databases, {split: numbered(rows) for split, rows in questions.items()},
                   tables_of_db)


def numbered(questions: list[dict]) -> dict[str, dict]:
    """Returns questions by their number, as text."""
    return {str(n): question for n, question in enumerate(questions)}


def schema_key(script: str) -> frozenset:
    """Returns the tables and columns of a script, so that equal schemas have equal keys."""
    return frozenset(frozenset(re.findall(r"\w+", line))
                     for line in re.findall(r"CREATE TABLE .*", script))


def worth_asking(run, gold: str) -> bool:
    """Returns True if a gold query finds rows, but not too many, and its WHERE clause matters.

    Without that clause the query must find other rows. If it finds several rows, these must be at
    most 70% of the rows without the clause.

    Args:
        run: Function that runs a query.
        gold: Gold query.
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
    """Returns the names of the tables that a query reads, in order."""
    return list(dict.fromkeys(re.findall(r"\b(?:from|join)\s+`?(\w+)", gold, re.I)))


def sql_expert(gold: str, thoughts: bool):
    """Returns the scripted expert: it lists the tables, describes those in the gold query, runs the
    query and submits.

    Args:
        gold: Gold query.
        thoughts: True for replies of the full view, with a thought and a label.
    """
    needed = tables_of(gold)[:7]  # so that the query and the submission fit into 10 turns
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
