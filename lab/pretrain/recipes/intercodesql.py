"""Practice text of the generated databases: noisy analysts, and tables of other things."""

import random
import re

from environments.intercodesql import questions
from environments.intercodesql.environment import InterCodeSQL
from environments.intercodesql.questions import (
    HELD_OUT,
    NAMES,
    PEOPLE,
    SITES,
    THINGS,
    VALUES,
    tables_of,
)
from lab.pretrain.practice import Words, play

# What tables and values are also called here.
NOUNS = """\
apple anchor arrow badge banner barrel basket beacon bell bench blanket blossom bottle bracket
branch brush bucket button cabin cable candle canvas carpet cellar chain chalk channel charter chest
circle cliff cloak closet cloud coin collar copper corner cotton couch crane crate creek crown
curtain cushion dealer desert diamond dinner dragon drawer eagle engine falcon feather fence fiddle
filter flag flower folder forest fountain frame fridge galaxy garage garden garlic gate ghost giant
glove goblet grape guard guest hammer helmet hermit hero hunter iron jacket jewel jungle keeper
kettle knight ladder lantern leader lemon letter lever lizard locker magnet manor marble mason mayor
meadow medal mentor miller mirror monk mountain napkin needle neighbor notebook novel oasis ocean
officer orchard oven owner paddle palace panel parrot patient pepper pigeon pillar planet platter
player pocket poet porter potter prince prison puppet quarry rabbit racket ranger ribbon river robot
rocket runner saddle sailor scholar scooter sculptor shelter shepherd shield shovel signal smith
socket soldier spider spoon stable statue stove stream student surgeon tailor tanker temple tent
thread ticket tiger toaster tower tractor trader trumpet tunnel turbine umbrella valve vessel
village violin wagon waiter walker wallet warden warrior weaver whistle widow window wizard worker
yard zebra""".split()
OTHERS = """\
Abel Boris Clara Diego Elsa Felix Greta Henry Igor Julia Knut Laura Mario Nina Oscar Petra Quinn
Ruth Simon Theo Ursula Vera Wanda Xenia York Zoe Amber Birch Cedar Dune Echo Flint Glade Heath Iris
Jade Kelp Lark Moss Nadir Onyx Pearl Quartz Reef Slate Thorn Umber Vale Willow Zephyr""".split()
COMPOUND = 0.02   # of questions, the share with several conditions: they are to be learnt later
MISTAKEN = 0.3    # of analysts, who mean another query
OF_DATABASE = 4   # analysts


def exchanged() -> list[Words]:
    """Nouns, for those of a larger pool, and names and values for each other."""
    nouns = tuple(noun for noun in (*PEOPLE, *THINGS, *SITES) if noun not in HELD_OUT)
    values = set()
    for pool in (*NAMES.values(), *VALUES.values()):
        values.update(pool)
    values = tuple(sorted(values))
    return [Words(nouns, (*nouns, *NOUNS)), Words(values, (*values, *OTHERS))]


def conversations(seed: int, n: int) -> list[list[dict]]:
    """n conversations of analysts, who often submit a wrong result. Databases are new ones, over
    all nouns, but nobody asks about a held-out noun or queries its table."""
    env = InterCodeSQL("short")
    rng = random.Random(f"analysts-{seed}")
    taken = {questions.schema_key(script) for script in env.data.databases.values()}
    texts = []
    while len(texts) < n:
        tables = questions.draw_database(rng, {*PEOPLE, *THINGS, *SITES})
        script = questions.database_script(tables)
        asked = [table for table in tables if table.noun[:-1] not in HELD_OUT]
        if questions.schema_key(script) not in taken and asked:
            for _ in range(OF_DATABASE):
                texts.append(analyst(env, rng, tables, script, asked))
    env.close()
    return texts[:n]


def analyst(env, rng, tables, script, asked) -> list[dict]:
    """The conversation of an analyst, whose question is about the tables `asked`."""
    names = {table.name for table in asked}
    while True:
        question = questions.draw_question(rng, tables, COMPOUND)
        if names.issuperset(tables_of(question["gold"])):
            break
    question["db"] = f"{tables[0].key[:-3]}_0"
    page = env.start(question, script)
    gold = question["gold"]
    meant = mistaken(rng, gold, asked) if rng.random() < MISTAKEN else gold
    expert = env.expert()

    def slips(page):
        """Looks at something else, or makes a mistake."""
        return [rng.choice([f"DESC {rng.choice(tables).name}", mistaken(rng, gold, asked)])]

    def means(page):
        action = expert(page)
        return meant if action == gold else action

    return play(env, page, means, slips, rng)


def mistaken(rng: random.Random, gold: str, tables: list) -> str:
    """The query with one mistake: a part that lacks, or another word or number in place of one."""
    columns = []  # without those that name another table, which may be held out
    for table in tables:
        columns += [column.name for column in table.columns if not column.name.endswith("_id")]
    edits = [
        re.sub(r" (WHERE|AND|OR|ORDER|LIMIT) .*", "", gold),
        re.sub(r"<|>", lambda sign: "<" if sign[0] == ">" else ">", gold),
        re.sub(r"\b\d+\b", str(rng.randint(1, 80)), gold),
        re.sub("|".join(columns), rng.choice(columns), gold, count=1),
        re.sub(r"SELECT \w+", f"SELECT {rng.choice(columns)}", gold),
        re.sub(r" FROM \w+", "", gold),
        re.sub(r"(?<=FROM )\w+", lambda name: f"the_{name[0]}", gold)]
    return rng.choice([edited for edited in edits if edited != gold])
