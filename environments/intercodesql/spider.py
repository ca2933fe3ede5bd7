"""Loads InterCode's databases into a MySQL server.

InterCode's questions and databases are from the data set Spider. This module also reads the
questions, and converts the databases to sqlite. The following command loads the databases:

    python -m environments.intercodesql.spider DUMP --admin-url URL --mysql-url URL
"""

import argparse
import os
import re
import sys
from functools import lru_cache
from pathlib import Path

from environments import MYSQL_ADDRESS, UsageError, is_mysql_address, numbered
from environments.intercodesql import databases
from environments.intercodesql.questions import SQLData
from environments.user_files import read_json, reading, text_in
from envs import EnvError


@lru_cache(maxsize=2)
def spider_data(folder: str) -> SQLData:
    """Reads InterCode's or IPR's questions from a folder, and the dump if the folder contains one.

    IPR publishes splits. InterCode's questions are split by database. Of every five databases, in
    alphabetical order, the fourth is for validation, the fifth for testing, and the others are for
    training.
    """
    where, questions, scripts = Path(folder), {}, {}
    with reading(f"--intercode-data {folder}", "InterCode's or IPR's: JSON lists of records with "
                 "query, gold and db, lists of numbers, the dump"):
        for split in ("train", "test") if (where / "ic_spider_train.json").exists() else ():
            questions[split] = rows = numbered(_records(where / f"ic_spider_{split}.json"))
            if (indices := where / f"{split}_indices.json").exists():
                questions[split] = {str(i): rows[str(i)] for i in read_json(indices)}
        if not questions:
            records = _records(where / "ic_spider_dev.json")
            names = sorted({question["db"] for question in records})
            splits = ["train", "train", "train", "validation", "test"]
            for split in dict.fromkeys(splits):
                chosen = {db for i, db in enumerate(names) if splits[i % 5] == split}
                questions[split] = numbered([q for q in records if q["db"] in chosen])
        if (dump := where / "ic_spider_dbs.sql").exists():
            scripts = sqlite_scripts(dump.read_text(encoding="utf-8"))
    return SQLData(scripts, questions)


def _records(path: Path) -> list[dict]:
    records = []
    for record in read_json(path):
        # IPR's files store the database name in "extra".
        db = record["db"] if "db" in record else record["extra"]["db"]
        records.append(dict(query=text_in(record["query"]), db=text_in(db),
                            gold=" ".join(text_in(record["gold"]).split())))
    return records


# The parts of a CREATE TABLE statement that sqlite does not accept, such as (20) in `name`(20),
# which is the length of a key prefix
_MYSQL_SYNTAX = re.compile(r" AUTO_INCREMENT| (?:CHARACTER SET|COLLATE) \w+|(?<=`)\(\d+\)")


def sqlite_scripts(dump: str) -> dict[str, str]:
    """Converts a MySQL dump to sqlite scripts, {name of a database: its script}."""
    scripts, name = {}, None
    for statement in re.findall(r"^(?:USE|CREATE TABLE|INSERT INTO) (?:'(?:\\.|[^'\\])*'|[^;'])*;",
                                dump, re.M):
        if statement.startswith("USE"):
            name = statement.split("`")[1]
            scripts[name] = "PRAGMA foreign_keys = OFF; BEGIN;\n"
            continue
        if statement.startswith("CREATE"):
            head, *lines, _ = statement.split("\n")
            lines = [_MYSQL_SYNTAX.sub("", line).rstrip(",")
                     for line in lines if not re.match(r"\s*(UNIQUE |FULLTEXT )?KEY ", line)]
            statement = head + "\n" + ",\n".join(lines) + "\n);"
        else:  # in an INSERT, 'it\'s' becomes 'it''s', as sqlite has no backslash escapes
            escapes = {"n": "\n", "r": "\r", "t": "\t", "0": "", "'": "''"}
            statement = re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), statement, flags=re.S)
        scripts[name] += statement + "\n"
    return {name: script + "COMMIT;\n" for name, script in scripts.items()}


def load_intercode(dump: Path, admin_url: str, mysql_url: str) -> list[str]:
    """Loads InterCode's dump into a server, and creates a user for each database.

    Each user can read only its own database. Existing tables are replaced. The dump's CREATE USER
    statement is skipped, because it creates a user "admin" with the password "admin" and all
    privileges.

    Args:
        admin_url: The address with a user that can create databases and users. The password of this
            user is in MYSQL_ADMIN_PWD.
        mysql_url: The address with the prefix of the new users' names. Their password is in
            MYSQL_PWD.

    Returns:
        The names of the databases.
    """
    text = re.sub(r"^(CREATE USER|GRANT|FLUSH)\b.*?;", "", dump.read_text(encoding="utf-8"),
                  flags=re.M)
    names = re.findall(r"^USE `(\w+)`;", text, re.M)
    if not names:
        raise UsageError(f"{dump}: it has no database; give InterCode's ic_spider_dbs.sql")
    where = databases.server_of(admin_url)
    try:
        with databases.connect(admin_url, password=os.environ.get("MYSQL_ADMIN_PWD", ""),
                               client_flag=1 << 16, read_timeout=600) as server, \
                server.cursor() as cursor:  # client flag 1 << 16 is MULTI_STATEMENTS
            # Disable foreign key checks for all databases. The dump itself disables these checks
            # only for some of its databases.
            cursor.execute(f"SET foreign_key_checks = 0;\n{text}")
            while cursor.nextset():
                pass
            secret = server.escape(os.environ.get("MYSQL_PWD", ""))
            for name in names:
                user = server.escape(databases.database_user(mysql_url, name))
                # In the database name of a GRANT statement, an unescaped _ matches any character.
                pattern = name.replace("_", r"\_")
                cursor.execute(f"DROP USER IF EXISTS {user}@'%'")
                cursor.execute(f"CREATE USER {user}@'%' IDENTIFIED BY {secret}")
                cursor.execute(f"GRANT SELECT ON `{pattern}`.* TO {user}@'%'")
    except databases.driver().MySQLError as error:
        raise EnvError(f"{where}: {error.args[-1]}; check the server, and that the user of "
                       "--admin-url may create databases and users") from None
    return names


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("spider", description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="path of ic_spider_dbs.sql")
    parser.add_argument("--admin-url", required=True, help="mysql://user@host:port of a user that "
                        "may create databases and users, with the password in MYSQL_ADMIN_PWD")
    parser.add_argument("--mysql-url", required=True, help="mysql://user@host:port for the users "
                        "that are made, as later given to a run, with the password in MYSQL_PWD")
    args = parser.parse_args(argv)
    if not (is_mysql_address(args.admin_url) and is_mysql_address(args.mysql_url)):
        raise UsageError(f"--admin-url and --mysql-url must be {MYSQL_ADDRESS}")
    names = load_intercode(args.dump, args.admin_url, args.mysql_url)
    print(f"loaded {len(names)} databases, each with a user that can only read it")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UsageError, EnvError, OSError) as error:
        print(f"spider: {error}", file=sys.stderr)
        sys.exit(2)
