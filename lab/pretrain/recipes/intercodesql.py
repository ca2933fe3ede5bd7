"""Practice text of the generated databases: noisy analysts, and tables of other things."""

import random
import re

from lab.pretrain.practice import Words, play
from worlds.intercodesql import questions
from worlds.intercodesql.questions import HELD_OUT, NAMES, PEOPLE, SITES, THINGS, VALUES, tables_of
from worlds.intercodesql.world import InterCodeSQL

# What tables are also about here; those of the held-out table are in no practice text.
NOUNS = """\
apple anchor arrow badge banner barrel basket beacon bell bench blanket blossom bottle bracket
branch brush bucket button cabin cable candle canvas carpet cellar chain chalk channel charter
chest circle cliff cloak closet cloud coin collar copper corner cotton couch crane crate creek
crown curtain cushion dealer desert diamond dinner dragon drawer eagle engine falcon feather fence
fiddle filter flag flower folder forest fountain frame fridge galaxy garage garden garlic gate
ghost giant glove goblet grape guard guest hammer helmet hermit hero hunter iron jacket jewel
jungle keeper kettle knight ladder lantern leader lemon letter lever lizard locker magnet manor
marble mason mayor meadow medal mentor miller mirror monk mountain napkin needle neighbor notebook
novel oasis ocean officer orchard oven owner paddle palace panel parrot patient pepper pigeon
pillar planet platter player pocket poet porter potter prince prison puppet quarry rabbit racket
ranger ribbon river robot rocket runner saddle sailor scholar scooter sculptor shelter shepherd
shield""".split()
FRESH_NOUNS = """\
shovel signal smith socket soldier spider spoon stable statue stove stream student surgeon tailor
tanker temple tent thread ticket tiger toaster tower tractor trader trumpet tunnel turbine umbrella
valve vessel village violin wagon waiter walker wallet warden warrior weaver whistle widow window
wizard worker yard zebra""".split()
FRESH_VALUES = """\
Abel Boris Clara Diego Elsa Felix Greta Henry Igor Julia Knut Laura Mario Nina Oscar Petra Quinn
Ruth Simon Theo Ursula Vera Wanda Xenia York Zoe Amber Birch Cedar Dune Echo Flint Glade Heath Iris
Jade Kelp Lark Moss Nadir Onyx Pearl Quartz Reef Slate Thorn Umber Vale Willow Zephyr""".split()


def exchanged() -> list[Words]:
    """Nouns, for those of a larger pool, and names and values for each other."""
    nouns = tuple(noun for noun in (*PEOPLE, *THINGS, *SITES) if noun not in HELD_OUT)
    values = tuple(sorted({v for pool in (*NAMES.values(), *VALUES.values()) for v in pool}))
    return [Words(nouns, (*nouns, *NOUNS), tuple(FRESH_NOUNS)),
            Words(values, values, tuple(FRESH_VALUES))]


# The mixture of competence: chances of each habit. `share`: of all analysts; `looks`: asks for the
# tables first; `describes`: the table it needs (else it takes a column to be called as the
# question says); `right`: writes the query as asked (else with one mistake); `recovers`: after an
# error looks at what is there and tries again; `checks`: looks at something else once more after
# its query, so that it submits the wrong thing.
ANALYSTS = [
    dict(share=0.40, looks=0.95, describes=0.98, right=0.8, recovers=0.9, checks=0.05),
    dict(share=0.40, looks=0.8, describes=0.85, right=0.5, recovers=0.8, checks=0.15),
    dict(share=0.20, looks=0.5, describes=0.5, right=0.3, recovers=0.6, checks=0.3),
]


def conversations(seed: int, n: int) -> list[list[dict]]:
    """n conversations of analysts of mixed competence, who often submit a wrong result. Databases
    are new ones, over all nouns, but nobody asks about a held-out noun or queries its table."""
    env = InterCodeSQL("short")
    rng, nouns = random.Random(f"analysts-{seed}"), {*PEOPLE, *THINGS, *SITES}
    taken = {questions.schema_key(script) for script in env.world.databases.values()}
    texts = []
    while len(texts) < n:
        tables = questions.draw_database(rng, nouns)
        script = questions.database_script(tables)
        if questions.schema_key(script) in taken or all(held_out(table) for table in tables):
            continue
        for _ in range(min(4, n - len(texts))):
            question = questions.draw_question(rng, tables, 0.02)
            question["db"] = f"{tables[0].key[:-3]}_0"
            while any(held_out(t) for t in tables if t.name in tables_of(question["gold"])):
                question |= questions.draw_question(rng, tables, 0.02)
            habits = rng.choices(ANALYSTS, [a["share"] for a in ANALYSTS])[0]
            actions = _analyst_script(rng, tables, question, habits)
            texts.append(play(env, env.start(question, script), actions))
    env.close()
    return texts


def held_out(table: questions.Table) -> bool:
    return table.noun[:-1] in HELD_OUT


def _analyst_script(rng, tables, question, habits):
    gold = question["gold"]
    needed = [t for t in tables if t.name in tables_of(gold)]
    if rng.random() < habits["looks"]:
        yield "SHOW TABLES"
    described = rng.random() < habits["describes"]
    if described:
        for table in needed:
            if rng.random() < 0.3:  # another table first
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
                          f"SELECT * FROM {rng.choice(needed).name} LIMIT 2"])
    while True:
        yield "submit"


def _guess(rng, gold, needed):
    """The query of one who has not looked."""
    for table in needed:
        if rng.random() < 0.3:
            gold = re.sub(rf"\b{table.name}\b", rng.choice([table.noun, table.noun[:-1]]), gold)
        for column in (*table.numbers, *(t for t in table.texts if t.concept)):
            gold = re.sub(rf"\b{column.name}\b", rng.choice(column.concept), gold)
    return gold


def _mistake(rng, q, needed):
    """The query with one mistake."""
    table = needed[0]
    columns = [c.name for c in (*table.numbers, *table.texts) if not c.name.endswith("_id")]
    edits = [
        re.sub(r" WHERE .*", "", q),
        re.sub(r" (AND|OR) .*", "", q),
        q.replace(" AND ", " OR ") if " AND " in q else q.replace(" OR ", " AND "),
        q.replace(">", "<", 1) if ">" in q else q.replace("<", ">", 1),
        q.replace(" DESC", ""),
        re.sub(r"LIMIT \d", f"LIMIT {rng.randint(1, 6)}", q),
        re.sub(r"([<>]) \d+", rf"\1 {rng.randint(20, 80)}", q, count=1),
        re.sub("|".join(rf"\b{c}\b" for c in columns), rng.choice(columns), q, count=1),
        re.sub(r"SELECT \w+", f"SELECT {rng.choice(columns)}", q, count=1),
        re.sub(rf" FROM {table.name}", "", q, count=1),
        q.replace("SELECT", "SELECT *" if rng.random() < 0.5 else "SELECT FROM", 1),
    ]
    return rng.choice([edited for edited in edits if edited != q])
