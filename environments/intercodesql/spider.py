"""InterCode's own questions and databases (Spider's): into sqlite, or from its dump into a server.

    python -m environments.intercodesql.spider DUMP --admin-url URL --mysql-url URL
"""

import argparse
import os
import re
import sys
from functools import lru_cache
from pathlib import Path

from environments import UsageError
from environments.intercodesql import MYSQL_ADDRESS, databases, is_mysql_address
from environments.intercodesql.questions import SQLData, numbered
from environments.user_files import read_json, reading, text_in
from envs import EnvError


@lru_cache(maxsize=2)
def spider_data(folder: str) -> SQLData:
    """InterCode's questions, dealt to splits by whole databases, or IPR's; and the dump, if any."""
    where, questions, scripts = Path(folder), {}, {}
    with reading(f"--intercode-data {folder}", "InterCode's or IPR's: JSON lists of records with "
                 "query, gold and db, lists of numbers, the dump"):
        for split in ("train", "test") if (where / "ic_spider_train.json").exists() else ():
            questions[split] = found = numbered(_records(where / f"ic_spider_{split}.json"))
            if (taken := where / f"{split}_indices.json").exists():
                questions[split] = {str(i): found[str(i)] for i in read_json(taken)}
        if not questions:
            found = _records(where / "ic_spider_dev.json")
            side = {db: {4: "test", 3: "validation"}.get(i % 5, "train")
                    for i, db in enumerate(sorted({q["db"] for q in found}))}
            questions = {split: numbered([q for q in found if side[q["db"]] == split])
                         for split in ("train", "validation", "test")}
        if (dump := where / "ic_spider_dbs.sql").exists():
            scripts = sqlite_scripts(dump.read_text(encoding="utf-8"))
    return SQLData(scripts, questions)


def _records(path: Path) -> list[dict]:
    records = []
    for record in read_json(path):
        # IPR keeps the database's name one level deeper than InterCode.
        db = record["db"] if "db" in record else record["extra"]["db"]
        records.append(dict(query=text_in(record["query"]), db=text_in(db),
                            gold=" ".join(text_in(record["gold"]).split())))
    return records


# In a line of a CREATE TABLE; also how much of a text a key holds.
_MYSQLS_OWN = re.compile(r" AUTO_INCREMENT| (?:CHARACTER SET|COLLATE) \w+|(?<=`)\(\d+\)")


def sqlite_scripts(dump: str) -> dict[str, str]:
    """A MySQL dump as one sqlite script per database."""
    scripts, name = {}, None
    for statement in re.findall(r"^(?:USE|CREATE TABLE|INSERT INTO) (?:'(?:\\.|[^'\\])*'|[^;'])*;",
                                dump, re.M):
        if statement.startswith("USE"):
            name = statement.split("`")[1]
            scripts[name] = "PRAGMA foreign_keys = OFF; BEGIN;\n"
            continue
        if statement.startswith("CREATE"):
            head, *lines, _ = statement.split("\n")
            lines = [_MYSQLS_OWN.sub("", line).rstrip(",")
                     for line in lines if not re.match(r"\s*(UNIQUE |FULLTEXT )?KEY ", line)]
            statement = head + "\n" + ",\n".join(lines) + "\n);"
        else:  # 'it\'s' is 'it''s' in sqlite
            escapes = {"n": "\n", "r": "\r", "t": "\t", "0": "", "'": "''"}
            statement = re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), statement, flags=re.S)
        scripts[name] += statement + "\n"
    return {name: script + "COMMIT;\n" for name, script in scripts.items()}


def load_intercode(dump: Path, admin_url: str, mysql_url: str) -> list[str]:
    """Loads InterCode's dump and makes, per database, the user that may read it and nothing else,
    by the name in mysql_url and the password in MYSQL_PWD; returns the databases. The dump's own
    CREATE USER (an all-powerful admin/admin) is left out; its tables replace those of the same
    names."""
    text = re.sub(r"^(CREATE USER|GRANT|FLUSH)\b.*?;", "", dump.read_text(encoding="utf-8"),
                  flags=re.M)
    names = re.findall(r"^USE `(\w+)`;", text, re.M)
    if not names:
        raise UsageError(f"{dump}: no database in it; give InterCode's ic_spider_dbs.sql")
    where = databases.server_of(admin_url)
    try:
        with databases.connect(admin_url, password=os.environ.get("MYSQL_ADMIN_PWD", ""),
                               client_flag=1 << 16, read_timeout=600) as server, \
                server.cursor() as cursor:  # the flag is MULTI_STATEMENTS
            cursor.execute("SELECT @@lower_case_table_names")
            if cursor.fetchone() == (0,):
                raise EnvError(f"{where} tells upper from lower case in table names, on which 169 "
                               "of the gold queries fail; set the server up anew with "
                               "--lower-case-table-names=1 from its first start")
            # The dump sets this too, but not in each of its databases.
            cursor.execute(f"SET foreign_key_checks = 0;\n{text}")
            while cursor.nextset():
                pass
            secret = server.escape(os.environ.get("MYSQL_PWD", ""))
            for name in names:
                user = server.escape(databases.database_user(mysql_url, name))
                pattern = name.replace("_", r"\_")  # in a GRANT _ stands for any character
                cursor.execute(f"DROP USER IF EXISTS {user}@'%'")
                cursor.execute(f"CREATE USER {user}@'%' IDENTIFIED BY {secret}")
                cursor.execute(f"GRANT SELECT ON `{pattern}`.* TO {user}@'%'")
    except databases.driver().MySQLError as error:
        remedy = "; --admin-url needs a user that may create databases and users"
        raise EnvError(f"{where}: {error.args[-1]}{remedy * ('denied' in str(error))}") from None
    return names


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("spider", description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="ic_spider_dbs.sql")
    parser.add_argument("--admin-url", required=True, help="mysql://user@host:port, with the "
                        "password in MYSQL_ADMIN_PWD")
    parser.add_argument("--mysql-url", required=True, help="as later given for training, with the "
                        "password in MYSQL_PWD")
    asked = parser.parse_args(argv)
    if not (is_mysql_address(asked.admin_url) and is_mysql_address(asked.mysql_url)):
        raise UsageError(f"--admin-url and --mysql-url must be {MYSQL_ADDRESS}")
    names = load_intercode(asked.dump, asked.admin_url, asked.mysql_url)
    print(f"{len(names)} databases, each with a user that may only read it")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UsageError, EnvError, OSError) as error:
        print(f"spider: {error}", file=sys.stderr)
        sys.exit(2)
