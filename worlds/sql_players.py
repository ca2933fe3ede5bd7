"""Who plays the databases: the scripted expert, and noisy analysts for practice text."""

import random
import re

from worlds import practised
from worlds.sql_questions import (PEOPLE, SITES, THINGS, database_script, draw_database,
                                  draw_question, schema_key)


def tables_of(gold: str) -> list[str]:
    """The tables a query reads from, in order."""
    return list(dict.fromkeys(re.findall(r"\b(?:from|join)\s+`?(\w+)", gold, re.I)))


def sql_expert(gold: str, thoughts: bool):
    """An expert that knows the gold query: looks at the tables, describes those it needs, submits.

    thoughts: in ReAct form, else bare queries.
    """
    needed = tables_of(gold)[:7]  # so that query and submission fit into 10 turns
    turns = [("I should see which tables there are.", "SHOW TABLES")]
    turns += [(f"I need to know the columns of {table}.", f"DESC {table}") for table in needed]
    turns += [(f"I can answer from {' and '.join(needed)}.", gold),
              ("The result answers the question.", "submit")]
    script = iter(turns)

    def reply(observation: str) -> str:
        thought, action = next(script)
        if not thoughts:
            return action
        block = action if action == "submit" else f"\n```sql\n{action}\n```"
        return f"Thought: {thought}\nAction: {block}"
    return reply


# ------------------------------------------------------------------------------ noisy analysts

# Habits, as the shoppers have. `looks`: asks for the tables first; `describes`: the table it needs
# (else it takes a column to be called as the question says); `right`: writes the query as asked
# (else with one mistake); `recovers`: after an error looks at what is there and tries again;
# `checks`: looks at something else once more after its query, so that it submits the wrong thing.
ANALYSTS = [
    dict(share=0.40, looks=0.95, describes=0.98, right=0.8, recovers=0.9, checks=0.05),
    dict(share=0.40, looks=0.8, describes=0.85, right=0.5, recovers=0.8, checks=0.15),
    dict(share=0.20, looks=0.5, describes=0.5, right=0.3, recovers=0.6, checks=0.3),
]


def analysts(env, seed: int, n: int) -> list[list[dict]]:
    """n conversations of analysts of mixed competence with `env` (an InterCodeSQL in sqlite).

    A conversation is a list of {"role", "content"} that ends with the analyst's last action. The
    databases are new ones, over all nouns (so a small model has seen every word), none with the
    tables and columns of a split's; the analysts make mistakes, recover, and often submit a wrong
    result.
    """
    rng, nouns = random.Random(f"analysts-{seed}"), {*PEOPLE, *THINGS, *SITES}
    taken = {schema_key(script) for script in env.world.databases.values()}
    conversations = []
    while len(conversations) < n:
        tables = draw_database(rng, nouns)
        script = database_script(tables)
        if schema_key(script) in taken:
            continue
        for _ in range(min(4, n - len(conversations))):
            question = dict(draw_question(rng, tables, 0.02), db=f"{tables[0].key[:-3]}_0")
            habits = rng.choices(ANALYSTS, [a["share"] for a in ANALYSTS])[0]
            actions = _analyst_script(rng, tables, question, habits)
            conversations.append(practised(env, env.start(question, script), actions))
    return conversations


def _analyst_script(rng, tables, question, habits):
    gold = question["gold"]
    needed = [t for t in tables if t.name in tables_of(gold)]
    if rng.random() < habits["looks"]:
        yield "SHOW TABLES"
    described = rng.random() < habits["describes"]
    if described:
        for table in needed:
            if rng.random() < 0.1:  # the wrong table first
                yield f"DESC {rng.choice(tables).name}"
            yield f"DESC {table.name}"
    query = gold if described else _guess(rng, gold, needed)
    if rng.random() > habits["right"]:
        query = _mistake(rng, query, needed)
    for _ in range(3):
        page = yield query
        if not page.startswith("Error"):
            break
        if rng.random() > habits["recovers"]:
            yield "submit"
        if "doesn't exist" in page:
            yield "SHOW TABLES"
        if "Unknown column" in page or "doesn't exist" in page:
            for table in needed:
                yield f"DESC {table.name}"
        query = gold
    if rng.random() < habits["checks"]:
        yield rng.choice([f"DESC {needed[0].name}", "SHOW TABLES",
                          f"SELECT * FROM {rng.choice(tables).name} LIMIT 2"])
    while True:
        yield "submit"


def _guess(rng, gold, needed):
    """The query of one who has not looked: table and columns as the words come to mind."""
    for table in needed:
        if rng.random() < 0.3:
            gold = re.sub(rf"\b{table.name}\b", rng.choice([table.noun, table.noun[:-1]]), gold)
        for column in (*table.numbers, *(t for t in table.texts if t.concept)):
            gold = re.sub(rf"\b{column.name}\b", rng.choice(column.concept), gold)
    return gold


def _mistake(rng, query, needed):
    """The query with one mistake: of those that this query can have."""
    table = needed[0]
    columns = [c.name for c in (*table.numbers, *table.texts)]
    edits = [
        lambda q: re.sub(r" WHERE .*", "", q),
        lambda q: re.sub(r" (AND|OR) .*", "", q),
        lambda q: q.replace(" AND ", " OR ") if " AND " in q else q.replace(" OR ", " AND "),
        lambda q: q.replace(">", "<", 1) if ">" in q else q.replace("<", ">", 1),
        lambda q: q.replace(" DESC", ""),
        lambda q: re.sub(r"LIMIT \d", f"LIMIT {rng.randint(1, 6)}", q),
        lambda q: re.sub(r"([<>]) \d+", rf"\1 {rng.randint(20, 80)}", q, count=1),
        lambda q: re.sub("|".join(rf"\b{c}\b" for c in columns), rng.choice(columns), q, count=1),
        lambda q: re.sub(r"SELECT \w+", f"SELECT {rng.choice(columns)}", q, count=1),
        lambda q: re.sub(rf" FROM {table.name}", "", q, count=1),
        lambda q: q.replace("SELECT", "SELECT *" if rng.random() < 0.5 else "SELECT FROM", 1),
    ]
    changed = [edit(query) for edit in edits]
    changed = [q for q in changed if q != query]
    return rng.choice(changed)
