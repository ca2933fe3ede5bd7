"""InterCode's own questions and databases (Spider's): into sqlite, or from its dump into a server.

    bash run.sh load-intercode DUMP ...     into a server, with users that only read
    bash run.sh compare-intercode DATA ...  how far sqlite answers as that server
"""

import argparse
import json
import re
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from worlds import EnvError, Refused
from worlds.intercodesql import databases
from worlds.intercodesql.questions import SQLWorld


@lru_cache(maxsize=2)
def spider_world(folder: str) -> SQLWorld:
    """InterCode's questions and, as sqlite scripts, its databases.

    The questions are FOLDER/ic_spider_dev.json, dealt to splits by whole databases (every fifth in
    alphabetical order to test, the ones before these to validation); or IPR's, one file a split,
    ic_spider_train.json and ic_spider_test.json, of which train_indices.json and
    test_indices.json, where they are, say which to take in which order. The dump
    FOLDER/ic_spider_dbs.sql is needed for sqlite only.
    """
    folder, questions, split_by = Path(folder), {}, "by rule"
    if (folder / "ic_spider_train.json").exists():
        split_by = str(folder)
        for split in ("train", "test"):
            found = _read_questions(folder / f"ic_spider_{split}.json")
            taken = folder / f"{split}_indices.json"
            try:
                questions[split] = ({i: found[i] for i in json.loads(taken.read_bytes().decode())}
                                    if taken.exists() else found)
            except (ValueError, KeyError, TypeError) as error:
                raise Refused(f"--intercode-data: {taken}: {type(error).__name__} {error}; it must "
                              f"list numbers of ic_spider_{split}.json") from None
    else:
        found = _read_questions(folder / "ic_spider_dev.json")
        order = sorted({q["db"] for q in found.values()})
        split_of = {db: {4: "test", 3: "validation"}.get(i % 5, "train")
                    for i, db in enumerate(order)}
        for split in ("train", "validation", "test"):
            dealt = [q for q in found.values() if split_of[q["db"]] == split]
            questions[split] = dict(enumerate(dealt))
    dump = folder / "ic_spider_dbs.sql"
    try:
        scripts = sqlite_scripts(dump.read_text(encoding="utf-8")) if dump.exists() else {}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Refused(f"--intercode-data: {dump}: {type(error).__name__} {error}; it must be "
                      "InterCode's dump") from None
    return SQLWorld(scripts, questions, split_by)


def _read_questions(path: Path) -> dict[int, dict]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        # IPR keeps the database's name one level deeper than InterCode.
        return {i: dict(query=r["query"], gold=" ".join(r["gold"].split()),
                        db=r["db"] if "db" in r else r["extra"]["db"])
                for i, r in enumerate(records)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"--intercode-data: {path}: {type(error).__name__} {error}; it must be "
                      "InterCode's list of records with query, gold and db") from None


def sqlite_scripts(dump: str) -> dict[str, str]:
    """A MySQL dump as one sqlite script per database; text compares without case."""
    scripts, name = {}, None
    for statement in re.findall(r"^(?:USE|CREATE TABLE|INSERT INTO) (?:'(?:\\.|[^'\\])*'|[^;'])*;",
                                dump, re.M):
        if statement.startswith("USE"):
            name = statement.split("`")[1]
            scripts[name] = "PRAGMA foreign_keys = OFF; BEGIN;\n"
            continue
        if statement.startswith("CREATE"):
            lines = [re.sub(r" COLLATE \w+", " COLLATE NOCASE", line.rstrip(","))
                     for line in statement.split("\n")[1:-1]]
            lines = [re.sub(r" AUTO_INCREMENT| CHARACTER SET \w+|(?<=`)\(\d+\)", "", line)
                     for line in lines if not re.match(r"\s*(UNIQUE |FULLTEXT )?KEY ", line)]
            statement = statement.split("\n")[0] + "\n" + ",\n".join(lines) + "\n);"
        else:  # 'it\'s' is 'it''s' in sqlite
            escapes = {"n": "\n", "r": "\r", "t": "\t", "0": "", "'": "''"}
            statement = re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), statement, flags=re.S)
        scripts[name] += statement + "\n"
    return {name: script + "COMMIT;\n" for name, script in scripts.items()}


def load_intercode(dump: Path, admin_url: str, mysql_url: str) -> list[str]:
    """Loads InterCode's dump and makes, per database, the user that may read it and nothing else.

    admin_url: a user that may create databases and users; mysql_url: the name that these users'
    names start with, and their password, as later given to --mysql-url. The dump's own CREATE USER
    (an all-powerful admin/admin) and its GRANT are left out; its tables replace those of the same
    names. Returns the databases' names.
    """
    text = re.sub(r"^(CREATE USER|GRANT|FLUSH)\b.*?;", "", dump.read_text(encoding="utf-8"),
                  flags=re.M)
    names = re.findall(r"^USE `(\w+)`;", text, re.M)
    if not names:
        raise Refused(f"{dump}: no database in it; give InterCode's ic_spider_dbs.sql")
    where = databases.server_of(admin_url)
    try:
        with databases.connect(admin_url, client_flag=1 << 16, read_timeout=600) as server, \
                server.cursor() as cursor:  # the flag is MULTI_STATEMENTS
            cursor.execute("SELECT @@lower_case_table_names")
            if cursor.fetchone() == (0,):
                raise EnvError(f"{where} tells upper from lower case in table names, on which 169 "
                               "of the gold queries fail; set the server up anew with "
                               "--lower-case-table-names=1 from its first start")
            cursor.execute(text)
            while cursor.nextset():
                pass
            for name in names:
                user = server.escape(databases.database_user(mysql_url, name))
                pattern = name.replace("_", r"\_")  # in a GRANT _ stands for any character
                secret = server.escape(databases.password_of(urlsplit(mysql_url)))
                for statement in (f"DROP USER IF EXISTS {user}@'%'",
                                  f"CREATE USER {user}@'%' IDENTIFIED BY {secret}",
                                  f"GRANT SELECT ON `{pattern}`.* TO {user}@'%'"):
                    cursor.execute(statement)
    except databases.driver().MySQLError as error:
        raise EnvError(f"{where}: {error.args[-1]}; --admin-url needs a user that may create "
                       "databases and users") from None
    return names


def compare_intercode(folder: str, mysql_url: str) -> dict:
    """Runs every gold query on the server and in sqlite; counts of what ran and what was equal.

    same_text: equal as InterCode's reward sees it, order aside; same_values: numbers, dates and
    text as text without case and trailing zeros, order aside. failed: (query, error) on the server.
    """
    def plain(value):
        try:
            return f"{float(value):.4g}"
        except (TypeError, ValueError):
            return str(value).lower()

    world = spider_world(folder)
    counts, failed = dict(questions=0, ran=0, same_text=0, same_values=0), []
    server = {db: databases.MySQL(db, mysql_url) for db in world.databases}
    embedded = {db: databases.Sqlite(db, script) for db, script in world.databases.items()}
    for question in (q for split in world.questions.values() for q in split.values()):
        a, b = (dbs[question["db"]].run(question["gold"]) for dbs in (server, embedded))
        counts["questions"] += 1
        if not isinstance(a, list):
            failed.append((question["gold"], a))
            continue
        counts["ran"] += 1
        if isinstance(b, list):
            counts["same_text"] += Counter(map(str, a)) == Counter(map(str, b))
            counts["same_values"] += (Counter(tuple(map(plain, row)) for row in a)
                                      == Counter(tuple(map(plain, row)) for row in b))
    for db in (*server.values(), *embedded.values()):
        db.close()
    return dict(**counts, failed=failed)


def main(argv: list[str]) -> None:
    def refuse(message):  # without a password in it
        raise Refused(re.sub(r"(://[^:@/\s]*):(?!password@)\S*@", r"\1:***@", message))

    parser = argparse.ArgumentParser(prog="run.sh", description="InterCode's databases")
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser("load-intercode", help=load_intercode.__doc__.split("\n")[0])
    load.add_argument("dump", type=Path, help="ic_spider_dbs.sql")
    load.add_argument("--admin-url", required=True, help="mysql://user:password@host:port")
    compare = commands.add_parser("compare-intercode",
                                  help=compare_intercode.__doc__.split("\n")[0])
    compare.add_argument("data", help="the folder of ic_spider_dev.json and ic_spider_dbs.sql")
    for command in (load, compare):
        command.add_argument("--mysql-url", required=True, help="as later given for training")
    parser.error = load.error = compare.error = refuse
    asked = parser.parse_args(argv)
    for flag in ("admin_url", "mysql_url"):
        address = re.fullmatch(r"mysql://[^:@/\s]+(?::[^@/\s]*)?@[^:@/\s]+(?::([0-9]{1,5}))?/?",
                               getattr(asked, flag, asked.mysql_url))
        if not address or not 0 < int(address[1] or 3306) < 65536:
            refuse(f"--{flag.replace('_', '-')} must be mysql://user:password@host:port, with / "
                   "and @ in a password as %2F and %40")
    if asked.command == "load-intercode":
        names = load_intercode(asked.dump, asked.admin_url, asked.mysql_url)
        return print(f"{len(names)} databases, each with a user that may only read it")
    found = compare_intercode(asked.data, asked.mysql_url)
    for query, error in found.pop("failed"):
        print(f"{error}\n    {query}")
    print(", ".join(f"{name} {count:,}" for name, count in found.items()))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Refused, EnvError, OSError) as error:
        print(f"run.sh: {error}", file=sys.stderr)
        sys.exit(2)
