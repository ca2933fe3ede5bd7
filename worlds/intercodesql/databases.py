"""The databases behind InterCodeSQL, and everything that keeps model-written SQL harmless.

`Sqlite` is embedded, `MySQL` on a MySQL or MariaDB server. `run(sql)` gives a list of row tuples,
None where there is no result set, or an error text that starts with ERROR; it only reads, one
statement at a time, within limits of time and size.
"""

import hashlib
import os
import re
import sqlite3
import struct
import time
from decimal import Decimal
from urllib.parse import unquote, urlsplit

from worlds import EnvError, Refused
from worlds.intercodesql import mysql

ERROR = "Error executing query: "
MAX_ROWS, MAX_CHARACTERS = 10_000, 4_000_000  # of one result
SECONDS = 2                                   # a query may run on a server
VM_STEPS = 10_000_000                         # and in sqlite, where a count is reproducible
CHARACTERS = 50_000_000  # of text that a query may hand to our functions, whose steps none counts
INTERRUPTED = ERROR + "Query execution was interrupted (max_statement_time exceeded)"
TOO_LARGE = f"{ERROR}The result has more than {MAX_ROWS:,} rows or too much text; add a LIMIT"
REMEDY = "bash run.sh load-intercode makes users that may only read"
INSTALL = "pip install 'PyMySQL[rsa]>=1.1,<2', or activate run.sh's .venv"

# The first look at a query, before it reaches a database. What a query hides from it (in a comment
# inside a name, say) is left to the database: read-only user or authorizer, limits.
_READS = re.compile(r"[\s(]*(select|with|show|desc|describe|explain)\b", re.I)
_SHOWS = re.compile(r"\s*show\s+(?!(full\s+)?(tables|columns|fields|index|indexes|keys|databases|"
                    r"schemas|create\s+table|table\s+status|warnings)\b)", re.I)
_GAP = r"(?:\s|/\*(?:[^*]|\*(?!/))*\*/|--(?:(?!\n)[\s\x00-\x1f][^\n]*)?\n|#[^\n]*\n)*"
_REFUSED = re.compile(
    rf"/\*[!+]|/\*M!|@@|:=|\binto{_GAP}(?:outfile|dumpfile|@)|\bfor{_GAP}(?:update|share)\b|"
    rf"\block{_GAP}in{_GAP}share\b|"
    rf"\b(?:information_schema|performance_schema|mysql|sys)[`\"]?{_GAP}\.|"
    r"\b(?:sleep|benchmark|\w+_lock|\w+_all_locks|is_\w+_lock|load_file|\w+_wait|"
    rf"wait_for_executed_gtid_set|sys_\w+|lib_mysqludf\w*)`?{_GAP}\(", re.I | re.S)

_SHOW_TABLES = re.compile(r"show\s+tables(?:\s+(?:from|in)\s+`?(?P<database>\w+)`?)?"
                          r"(?:\s+like\s+(?P<quote>['\"])(?P<like>.*)(?P=quote))?", re.I)
_SHOW_COLUMNS = re.compile(
    r"(?:desc|describe|explain|show\s+(?:columns|fields)\s+(?:from|in))\s+"
    r"(?:`?(?P<before>\w+)`?\s*\.\s*)?`?(?P<table>\w+)`?"
    r"(?:\s+(?:from|in)\s+`?(?P<behind>\w+)`?)?", re.I)


def refusal(sql: str) -> str | None:
    """Why a query is not passed on to a database, as an error text; None if it is."""
    if len(sql) > 5000:
        return ERROR + "The query is longer than 5,000 characters"
    if not _READS.match(sql) or _SHOWS.match(sql):
        return ERROR + ("Only SELECT, WITH, SHOW (of tables, columns, indexes), DESC, DESCRIBE and "
                        "EXPLAIN are allowed")
    found = _REFUSED.search(sql)
    return f"{ERROR}{found[0]!r} is not allowed" if found else None


class Sqlite:
    """A database in memory, made by an SQL script, that answers as MySQL would."""

    # Without any that reads files, makes long texts or draws random numbers.
    FUNCTIONS = set("abs avg coalesce count date dense_rank first_value group_concat ifnull lag "
                    "last_value lead length like lower ltrim max min nullif rank replace "
                    "row_number rtrim substr substring sum time trim upper".split())
    FUNCTIONS |= {*mysql.FUNCTIONS, *mysql.AGGREGATES}

    def __init__(self, name: str, script: str):
        # Without cached statements, whose steps would count on from one time to the next.
        self.name, self._db = name, sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0)
        try:
            self._db.executescript(_without_case(script))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            self._db.close()
            raise Refused(f"--intercode-data: sqlite cannot read database {name} of the dump: "
                          f"{error}; play it on a server, --mysql-url") from None
        self._db.executescript("PRAGMA temp_store = MEMORY; PRAGMA query_only = ON;"
                               "PRAGMA hard_heap_limit = 500000000;")  # of the whole process
        if hasattr(self._db, "setlimit"):  # from Python 3.11
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 20_000)
        self._tables = sorted(self._db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"))
        self._columns = {t.lower(): self._describe(t) for t, in self._tables}
        self._names = {row[0].lower() for table in self._columns.values() for row in table}
        # Sums and quotients are DECIMAL, unless a column may be a number with a floating point.
        self._decimal = not any(row[1].startswith(("double", "float", "real"))
                                for table in self._columns.values() for row in table)
        for name, (counts, function) in mysql.FUNCTIONS.items():
            for count in counts if isinstance(counts, tuple) else (counts,):
                self._db.create_function(name, count, self._counted(function), deterministic=True)
        for name, aggregate in mysql.AGGREGATES.items():
            step = {"step": self._counted(aggregate.step)}
            self._db.create_aggregate(name, 1, type(name, (aggregate,), step))
        self._db.set_authorizer(self._authorize)
        self._db.set_progress_handler(lambda: True, VM_STEPS)

    def run(self, sql: str):
        sql = sql.strip()
        if error := refusal(sql):
            return error
        sql, self._characters = mysql.without_end(sql), 0
        try:
            if re.match(r"(show|desc|describe|explain)\b", sql, re.I):
                return self._show(sql)
            translated = mysql.translate(sql, self.name, {*self._columns}, self._names)
            return self._typed(_fetch(self._db.execute(translated)))
        except mysql.MySQLError as error:
            return f"{ERROR}{error}"
        except MemoryError:
            return INTERRUPTED
        # Two statements are an sqlite3.Warning before Python 3.12; a NUL is a ValueError.
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if self._characters > CHARACTERS:
                return INTERRUPTED
            return ERROR + self._as_mysql(str(error), sql)

    def close(self):
        self._db.close()

    def _counted(self, function):
        """The function, which fails once this query has handed over more than CHARACTERS."""
        def counted(*values):
            for value in values:
                if isinstance(value, str):
                    self._characters += len(value)
            if self._characters > CHARACTERS:
                raise ValueError("too much text")
            return function(*values)
        return counted

    def _typed(self, rows: list[tuple] | str) -> list[tuple] | str:
        """Rows with MySQL's types of numbers."""
        if not self._decimal or isinstance(rows, str):
            return rows
        typed = []
        for row in rows:
            values = [_as_decimal(v) if isinstance(v, float) else v for v in row]
            typed.append(tuple(values))
        return typed

    def _authorize(self, action, first, second, *_):
        allowed = (action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
                   or action == sqlite3.SQLITE_READ and first.lower() in self._columns
                   or action == sqlite3.SQLITE_FUNCTION and second.lower() in self.FUNCTIONS)
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def _show(self, sql):
        tables, columns = _SHOW_TABLES.fullmatch(sql), _SHOW_COLUMNS.fullmatch(sql)
        if not tables and not columns:
            return ERROR + "Only SHOW TABLES, SHOW COLUMNS and DESC of a table are answered here"
        database = tables["database"] if tables else columns["before"] or columns["behind"]
        own = not database or database.lower() == self.name.lower()
        if tables and not own:
            return f"{ERROR}Unknown database '{database}'"
        if tables:
            like = "SELECT ? LIKE ? ESCAPE '\\'"
            return [(name,) for name, in self._tables if self._db.execute(
                like, (name, tables["like"] or "%")).fetchone()[0]]
        if not own or columns["table"].lower() not in self._columns:
            return f"{ERROR}Table '{database or self.name}.{columns['table']}' doesn't exist"
        return self._columns[columns["table"].lower()]

    def _describe(self, table):
        """MySQL's six columns: Field, Type, Null, Key, Default, Extra."""
        foreign = {row[3].lower() for row in
                   self._db.execute(f'PRAGMA foreign_key_list("{table}")')}
        return [(name, kind.lower(), "NO" if required or key else "YES",
                 "PRI" if key else "MUL" if name.lower() in foreign else "", default, "")
                for _, name, kind, required, default, key in
                self._db.execute(f'PRAGMA table_info("{table}")')]

    def _as_mysql(self, error, sql):
        """MySQL's text for sqlite's."""
        for pattern, text in _SAID_BY_SQLITE:
            if match := re.match(pattern, error):
                return _named_as_in(sql, match.expand(text.format(self.name)))
        match = re.match(r"(no such table|no such column|ambiguous column name|near|"
                         r"unrecognized token|access to|misuse of aggregate)"
                         r'(?:: |:? ?)"?(.*?)(?:" ?:? ?syntax error|"| is prohibited)?$', error)
        kind, name = match.groups() if match else ("", "")
        if kind == "access to" or error.startswith(("not authorized", "unsafe use")):
            return f"SELECT command denied to user for '{name or sql[:40]}'"
        if error == "interrupted":
            return INTERRUPTED[len(ERROR):]
        if match := re.match(r"\d+.. (ORDER|GROUP) BY term out of range .* (\d+)$", error):
            kind, last = "no such column", int(match[2])
            behind = re.split(rf"{match[1]}\s+by", sql, flags=re.I)[-1]
            name = next((n for n in re.findall(r"\d+", behind) if not 0 < int(n) <= last), "")
        if match := re.match(r"(ORDER BY|LIMIT) clause should come after (\w+)", error):
            name = re.search(match[2] + "|$", sql, re.I)[0]
        if kind in ("near", "unrecognized token", ""):  # whatever else sqlite or Python may say
            return mysql.SYNTAX.format(sql[sql.rfind(name) if name else len(sql):])
        clause = "field list"  # in which the name comes first
        for word in re.finditer(r"\b(from|on|where|group|having|order)\b|(?<![\w.])"
                                + re.escape(name) + r"(?!\w)", sql, re.I):
            if not word[1]:
                break
            clause = word[1].lower() + (" statement" if word[1].lower() == "group" else " clause")
        table = name if "." in name else f"{self.name}.{name}"
        return {"no such table": f"Table '{table}' doesn't exist",
                "no such column": f"Unknown column '{name}' in '{clause}'",
                "ambiguous column name": f"Column '{name}' in {clause} is ambiguous",
                "misuse of aggregate": "Invalid use of group function"}[kind]


# How sqlite's texts begin, and MySQL's; {} is the database. Functions raise where a number is too
# large, and mysql_only where a subquery has many rows.
_SAID_BY_SQLITE = [
    (r"(?:no such function|not authorized to use function): (?:mysql_)?(\w+)",
     r"FUNCTION {}.\1 does not exist"),
    (r"wrong number of arguments to function (?:mysql_)?(\w+)",
     r"Incorrect parameter count in the call to native function '\1'"),
    (r"no such collation sequence: (\w+)", r"Unknown collation: '\1'"),
    (r"sub-select returns \d+ columns - expected (\d+)", r"Operand should contain \1 column(s)"),
    (r"row value misused", r"Operand should contain 1 column(s)"),
    (r"SELECTs to the left and right", mysql.OTHER_COLUMNS),
    (r".* 'finalize' method raised error", mysql.MANY_ROWS),
    (r"user-defined ", r"DOUBLE value is out of range"),
    (r"integer overflow", r"BIGINT value is out of range"),
    (r"string or blob too big", TOO_LARGE[len(ERROR):]),
]


def _named_as_in(sql: str, text: str) -> str:
    """The text, with a function's name as the query writes it; sqlite is told it in lower case."""
    def as_written(name):
        found = re.search(rf"\b{name[0]}\b(?=\s*\()", sql, re.I)
        return found[0] if found else name[0]
    return re.sub(r"\w+(?= does not exist)|(?<=native function ')\w+", as_written, text)


# A column of text in a CREATE TABLE, unless it says how it compares.
_TEXT_COLUMN = re.compile(r"([\w`\"]\s+(?:(?:var)?char\s*\(\d+\)|\w*text\b))"
                          r"(?!\s+(?:character|collate))", re.I)


def _without_case(script: str) -> str:
    """A script whose columns of text compare as MySQL's do, without case."""
    parts = re.split(r"(CREATE TABLE [^;]*)", script, flags=re.I)
    for n in range(1, len(parts), 2):  # those that were split at
        parts[n] = _TEXT_COLUMN.sub(r"\1 COLLATE NOCASE", parts[n])
    return "".join(parts)


def _as_decimal(value: float) -> Decimal:
    """A number as DECIMAL, without what binary fractions add to it."""
    return Decimal(int(value)) if value.is_integer() else Decimal(repr(round(value, 8)))


def _fetch(cursor) -> list[tuple] | str:
    """All rows of a cursor that yields them one by one, or TOO_LARGE."""
    rows, characters = [], 0
    while row := cursor.fetchone():
        rows.append(row)
        characters += sum(len(v) for v in row if isinstance(v, (str, bytes)))
        if len(rows) > MAX_ROWS or characters > MAX_CHARACTERS:
            return TOO_LARGE
    return rows


class MySQL:
    """A database of a MySQL or MariaDB server, with a connection of its own, as the user that
    `load_intercode` made for it. The server ends a query after SECONDS; should it not, the client
    stops listening soon after and kills the query from another connection."""
    TIMED_OUT = {1969, 3024}  # MariaDB's and MySQL's limit
    DENIED = {1044, 1045, 1049, 1698}
    # What the server says when it is full, ends, or lost the client, or on a KILL not ours.
    LOST = {1040, 1053, 1158, 1159, 1160, 1161, 1203, 1317, 1927}

    def __init__(self, name: str, url: str):
        self.name, self._url, self._connection = name, url, None
        self._ask(self._connect)

    def run(self, sql: str):
        if error := refusal(sql):
            return error
        return self._ask(lambda: self._run(sql))

    def close(self):
        if self._connection and self._connection.open:
            self._connection.close()
        self._connection = None

    def _connect(self):
        self._connection = connect(self._url, user=database_user(self._url, self.name),
                                   database=self.name)
        limit = (f"max_statement_time = {SECONDS}"
                 if "MariaDB" in self._connection.get_server_info() else
                 f"max_execution_time = {1000 * SECONDS}")
        self._connection.query(f"SET SESSION {limit}, SESSION sql_select_limit = {MAX_ROWS + 1}")

    def _run(self, sql):
        pymysql, started = driver(), time.monotonic()
        cursor = self._connection.cursor(pymysql.cursors.SSCursor)  # rows stay on the server
        try:
            cursor.execute(sql)
            if cursor.description is None:
                return None
            answer = _fetch(cursor)
        except pymysql.MySQLError as error:
            (code, text), took = (*error.args, "", "")[:2], time.monotonic() - started
            if code in self.TIMED_OUT or code == 1317 and took > 0.9 * SECONDS:
                return INTERRUPTED
            if code == 2013 and took > SECONDS + 2.5:  # the client's own limit, see `connect`
                answer = INTERRUPTED
            elif (isinstance(code, int) and (1000 <= code < 2000 or code >= 3000)
                    and code not in self.LOST):  # else it is the connection's
                return f"{ERROR}{text}"
            else:
                raise
        except ValueError as error:  # text that is no UTF-8, in the query or in the result
            answer = f"{ERROR}{error}"
        if not isinstance(answer, list):
            self._kill()
        return answer

    def _kill(self):
        """Ends what runs on this connection, from another one, which takes its place."""
        thread = self._connection.thread_id()
        self._abandon()
        self._connect()
        try:
            self._connection.query(f"KILL {thread}")
        except driver().MySQLError as error:
            if error.args[:1] != (1094,):  # it has ended by itself
                raise

    def _abandon(self):
        """Closes the socket without a word to the server."""
        if self._connection:
            if self._connection._result:  # or PyMySQL would go on reading it
                self._connection._result.unbuffered_active = False
            self._connection._force_close()
            self._connection = None

    def _ask(self, work):
        """work(), where an error beside the query is Refused for a user's rights, else EnvError."""
        where = f"{server_of(self._url)}, database {self.name}"
        try:
            return work()
        except driver().MySQLError as error:
            code, text = (*error.args, "", "")[:2]
            self._abandon()
            if code in self.DENIED:
                raise Refused(f"--mysql-url: {where}: {text}; {REMEDY}") from None
            raise EnvError(f"{where}: {text or error}; see that the server runs and is within reach"
                           ) from None


def driver():
    """PyMySQL, which only a server needs."""
    try:
        import pymysql
    except ImportError as error:
        raise Refused(f"--mysql-url: {error}; {INSTALL}") from None
    return pymysql


def connect(url: str, **options):
    """A connection to mysql://user:password@host:port; the password may be in MYSQL_PWD instead."""
    parts, pymysql = urlsplit(url), driver()
    try:
        # Silent for longer than a query may run, the server is taken for lost. TLS would cost an
        # episode 20 ms; within one machine it protects nothing.
        return pymysql.connect(**{**dict(
            host=parts.hostname, port=parts.port or 3306, user=unquote(parts.username),
            password=password_of(parts), charset="utf8mb4", autocommit=True, local_infile=False,
            connect_timeout=5, read_timeout=SECONDS + 3, write_timeout=SECONDS + 3,
            ssl_disabled=parts.hostname in ("localhost", "127.0.0.1", "::1")), **options})
    except (IndexError, AssertionError, struct.error):  # PyMySQL on what is no handshake
        raise pymysql.err.OperationalError(2013, "something else than MySQL answers") from None
    except RuntimeError as error:  # a PyMySQL that cannot take MySQL 8's passwords
        raise Refused(f"--mysql-url: {error}; {INSTALL}") from None


def password_of(parts) -> str:
    return os.environ.get("MYSQL_PWD", "") if parts.password is None else unquote(parts.password)


def server_of(url: str) -> str:
    """The server's address without user and password, for messages."""
    parts = urlsplit(url)
    return f"mysql://{parts.hostname}:{parts.port or 3306}"


def database_user(url: str, database: str) -> str:
    """The user that may read `database` and nothing else; MySQL allows 32 characters."""
    name = unquote(urlsplit(url).username)[:21]
    return f"{name}_{hashlib.sha256(database.lower().encode()).hexdigest()[:10]}"
