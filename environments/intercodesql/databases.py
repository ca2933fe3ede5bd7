"""Defines the databases of InterCodeSQL, and checks and limits the SQL queries of a model.

`Sqlite` is a database in the memory of this process. `MySQL` is a database on a MySQL or MariaDB
server. Both classes have these methods:

    run(sql)      checks the text of an agent's query, and runs the query
    execute(sql)  runs a gold query without checking its text

Both methods return a list of row tuples, None if the query has no result set, or an error message
that starts with ERROR. A query must be a single statement that reads data. Its time and the size of
its result are limited.
"""

import calendar
import hashlib
import math
import os
import re
import sqlite3
import struct
import sys
import time
from contextlib import closing
from urllib.parse import unquote, urlsplit

from environments import UsageError
from envs import EnvError

ERROR = "Error executing query: "
MAX_ROWS, MAX_CHARACTERS = 10_000, 4_000_000  # maximum size of a query's result
SECONDS = 2  # time limit of a query: CPU time for sqlite, wall-clock time for a server
# Maximum number of steps of sqlite's virtual machine. Unlike the time limit, this limit gives the
# same result on every machine.
VM_STEPS = 10_000_000
CHECK_STEPS = 1_000  # sqlite's limits are checked after every 1,000 steps
INTERRUPTED = ERROR + "Query execution was interrupted (max_statement_time exceeded)"
TOO_LARGE = f"{ERROR}The result has more than {MAX_ROWS:,} rows or too much text; add a LIMIT"
# Start of the error text if sqlite's authorizer or the privileges on a server reject a query
DENIED = ERROR + "SELECT command denied to user"
REMEDY = "python -m environments.intercodesql.spider makes users that can only read"
SYNTAX = ("You have an error in your SQL syntax; check the manual that corresponds to your MySQL "
          "server version for the right syntax to use near '{rest}' at line 1")
INSTALL = f"{sys.executable} -m pip install 'PyMySQL[rsa]>=1.1,<2', or activate run.sh's .venv"

# String literals, names in backticks, and comments except /*! ... */, whose code MySQL executes
_BESIDE_CODE = re.compile(r"""
    (?P<text>'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*")
  | `(?P<name>[^`]*)`
  | /\*(?![!+]|M!).*?\*/ | --(?=[\s\x00-\x1f\x7f]|$)[^\n]* | \#[^\n]*
""", re.X | re.S)
_READS = re.compile(
    r"[\s(]*(?:select|with|desc|describe|explain|show\s+(?:full\s+)?(?:tables|columns|fields|index|"
    r"indexes|keys|databases|create\s+table))\b", re.I)
# Code that can wait, acquire locks, remove the time limit, or show the queries of other users. We
# reject such code, because a server allows it even for a read-only user.
_FORBIDDEN = re.compile(
    r"/\*|@@|\binto\s+(?:outfile|dumpfile)\b|\bfor\s+(?:update|share)\b|\block\s+in\s+share\b|"
    r"\b(?:information_schema|performance_schema)\s*\.|"
    r"\b(?:sleep|benchmark|load_file|(?:get|release|is_free|is_used)_lock|release_all_locks|"
    r"\w+_wait|wait_\w+)\s*\(", re.I)


def code_of(sql: str) -> str:
    """Returns a query without comments and backticks. Every string literal is replaced with ''."""
    def code(match):
        if match["name"] is not None:
            return match["name"] if match["name"].isidentifier() else "name"
        return "''" if match["text"] else " "
    return _BESIDE_CODE.sub(code, sql)


def read_only_error(sql: str) -> str | None:
    """Returns None if the text is a read-only query, and otherwise an error message."""
    if len(sql) > 5000:
        return ERROR + "The query is longer than 5,000 characters"
    if _READS.match(code_of(sql)):
        return None
    return ERROR + ("Only SELECT, WITH, SHOW (of tables, columns, indexes), DESC, DESCRIBE and "
                    "EXPLAIN are allowed")


def refusal(sql: str) -> str | None:
    """Returns None if an agent's query may be sent to a server, and otherwise an error message.

    The server's privileges and limits stop a harmful query that this check does not detect.
    """
    if error := read_only_error(sql):
        return error
    match = _FORBIDDEN.search(code_of(sql))
    return match and f"{ERROR}{match[0]!r} is not allowed"


def _or_null(function):
    """Wraps an SQL function so that it returns NULL if an argument is NULL."""
    return lambda *values: None if None in values else function(*values)


def _text(value) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _number(value) -> float:
    """Converts a value to a number as MySQL does: "12abc" becomes 12, and "abc" becomes 0."""
    if isinstance(value, (int, float)):
        return value
    number = re.match(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", _text(value), re.A | re.I)
    return float(number[0]) if number else 0


def _length(text: str, count) -> int:
    """Returns the number of characters that LEFT(text, count) and RIGHT(text, count) return.

    MySQL rounds `count` if it is a number, and drops its fraction if it is a string such as "2.7".
    """
    half = 0.5 if isinstance(count, (int, float)) else 0
    return int(min(max(_number(count), 0), len(text)) + half)


def _left(text, count) -> str:
    return _text(text)[:_length(_text(text), count)]


def _right(text, count) -> str:
    return _left(_text(text)[::-1], count)[::-1]


def _concat(first, *more) -> str:
    return "".join(map(_text, (first, *more)))


def _concat_ws(between, first, *more):
    texts = [_text(text) for text in (first, *more) if text is not None]
    return None if between is None else _text(between).join(texts)


def _extreme(choose):
    """Returns MySQL's function GREATEST if `choose` is max, or LEAST if `choose` is min.

    The function compares its arguments as strings, unless all of them are numbers.
    """
    def function(first, second, *more):
        values = [first, second, *more]
        if all(isinstance(value, (int, float)) for value in values):
            return choose(values)
        return choose(map(_text, values), key=str.lower)
    return _or_null(function)


_DATE = re.compile(r"\s*(?:(\d{4}|\d\d)(\d\d)(\d\d)(?:\d{6})?"
                   r"|(\d{1,4})[^\w\s]+(\d\d?)[^\w\s]+(\d\d?))(?!\d)", re.A)


def _part_of_date(part: int):
    """Returns MySQL's function YEAR (part 0), MONTH (part 1) or DAY (part 2)."""
    def function(value):
        if isinstance(value, (int, float)):  # the digits are YYMMDD or YYYYMMDD
            if not (value == 0 or 101 <= value < 10 ** 14):
                return None
            value = f"{int(value):0{6 if 0 < value < 10 ** 6 else 8}}"
        date = _DATE.match(_text(value))
        if not date:
            return None
        year, month, day = filter(None, date.groups())
        century = 0 if len(year) > 2 else 2000 if year < "70" else 1900
        year, month, day = int(year) + century, int(month), int(day)
        if month > 12 or day > (calendar.monthrange(year, month)[1] if month else 31):
            return None
        return (year, month, day)[part]
    return _or_null(function)


# The fixed time that queries see as the current time, so that their results are the same every day
TODAY = "2024-09-01 12:00:00"
_DATES = sqlite3.connect(":memory:", check_same_thread=False)  # runs sqlite's own time functions


def _at_today(name: str, before: int):
    """Returns sqlite's time function `name`, with TODAY as the current time, in UTC.

    Args:
        before: Number of arguments before the time: 1 for strftime, because of its format, and
            otherwise 0.
    """
    def function(*values):
        # sqlite ignores the part of a string after a NUL character.
        values = [value if isinstance(value, (int, float, type(None)))
                  else _text(value).partition("\0")[0] for value in values]
        modifiers = [value for value in values[before + 1:]
                     if str(value).lower() not in ("localtime", "utc")]
        if len(values) == before or str(values[before]).lower() in ("now", "subsec", "subsecond"):
            values[before:] = [TODAY]
        values[before + 1:] = modifiers
        marks = ", ".join("?" * len(values))
        return _DATES.execute(f"SELECT {name}({marks})", values).fetchone()[0]
    return function


# SQL functions that sqlite does not have, or whose implementation in sqlite reads the clock:
# {name: (number of arguments, or -1 for any number, implementation)}
FUNCTIONS = {
    "concat": (-1, _or_null(_concat)),
    "concat_ws": (-1, _concat_ws),
    "if": (3, lambda condition, yes, no: yes if _number(condition or 0) else no),
    "left": (2, _or_null(_left)),
    "right": (2, _or_null(_right)),
    "char_length": (1, _or_null(lambda text: len(_text(text)))),
    "greatest": (-1, _extreme(max)),
    "least": (-1, _extreme(min)),
    "year": (1, _part_of_date(0)),
    "month": (1, _part_of_date(1)),
    "day": (1, _part_of_date(2)),
    **{name: (-1, _at_today(name, 0)) for name in ("date", "time", "datetime", "julianday")},
    "strftime": (-1, _at_today("strftime", 1))}


def _of_number(function):
    """Wraps a function of numbers so that it returns NULL for other arguments, or if the result is
    undefined."""
    def wrapped(*values):
        if any(not isinstance(value, (int, float)) for value in values):
            return None
        try:
            return function(*values)
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
    return wrapped


def _rounding(function):
    return _of_number(lambda x: x if isinstance(x, int) else float(function(x)))


# Mathematical functions that some builds of sqlite lack. They are used only with such builds.
MATH_FUNCTIONS = {
    "ceil": (1, _rounding(math.ceil)), "ceiling": (1, _rounding(math.ceil)),
    "floor": (1, _rounding(math.floor)), "sqrt": (1, _of_number(math.sqrt)),
    "pow": (2, _of_number(math.pow)), "power": (2, _of_number(math.pow)),
    "mod": (2, _of_number(math.fmod)),
    "sign": (1, _of_number(lambda x: (x > 0) - (x < 0)))}
# A query may call only FUNCTIONS, and functions of sqlite that cannot read files or create long
# texts.
ALLOWED_FUNCTIONS = FUNCTIONS.keys() | set(
    "abs avg ceil ceiling coalesce count cume_dist dense_rank first_value floor "
    "group_concat ifnull iif instr lag last_value lead length like lower ltrim max min "
    "mod nth_value ntile nullif percent_rank pow power rank replace round row_number rtrim sign "
    "sqrt substr substring sum total trim typeof upper".split())


def check_sqlite() -> None:
    """Raises UsageError if sqlite was built without double-quoted strings, which MySQL allows."""
    with closing(sqlite3.connect(":memory:")) as db:
        try:
            db.execute('SELECT "a string"')
        except sqlite3.Error:
            raise UsageError(f"--intercode-data: sqlite {sqlite3.sqlite_version} was "
                             "built without double-quoted strings, which the gold queries have; "
                             "use another Python, or give --mysql-url") from None


class Sqlite:
    """An in-memory sqlite database. Queries can only read its tables and call ALLOWED_FUNCTIONS.

    Args:
        script: SQL script that creates the tables and inserts the rows.
    """

    def __init__(self, name: str, script: str):
        # Statements are not cached, because a cached statement would continue the step count of its
        # first execution, and a repeated query would reach VM_STEPS too early.
        self.name, self._db = name, sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, cached_statements=0)
        try:
            self._db.executescript(_without_case(script))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            self._db.close()
            raise UsageError(f"--intercode-data: sqlite cannot read database {name} of the dump: "
                             f"{error}; load it into a server and give --mysql-url") from None
        self._db.executescript("PRAGMA temp_store = MEMORY; PRAGMA query_only = ON;"
                               "PRAGMA hard_heap_limit = 500000000;")  # in bytes, for all databases
        if hasattr(self._db, "setlimit"):  # added in Python 3.11
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 20_000)
        self._tables = sorted(self._db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"))
        self._columns = {table.lower(): self._describe(table) for table, in self._tables}
        present = {name for name, in self._db.execute("SELECT name FROM pragma_function_list")}
        missing = MATH_FUNCTIONS.keys() - present
        functions = FUNCTIONS | {name: MATH_FUNCTIONS[name] for name in missing}
        for function, (count, body) in functions.items():
            self._db.create_function(function, count, body, deterministic=True)
        self._db.set_authorizer(self._authorize)
        self._db.set_progress_handler(self._exceeds_limits, CHECK_STEPS)

    def run(self, sql: str):
        return read_only_error(sql) or self.execute(sql)

    def execute(self, sql: str):
        self._steps, self._deadline = 0, time.thread_time() + SECONDS
        try:
            if _SHOWS.match(code := code_of(sql)):
                return self._show(code)
            return _fetch(self._db.execute(in_sqlite(sql)))
        except MemoryError:
            return INTERRUPTED
        # A query with two statements raises sqlite3.Warning before Python 3.12. A query with a NUL
        # character raises ValueError.
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return self._error(str(error), sql.strip())

    def close(self):
        self._db.close()

    def _exceeds_limits(self) -> bool:
        self._steps += CHECK_STEPS
        return self._steps >= VM_STEPS or time.thread_time() > self._deadline

    def _authorize(self, action, first, second, *_):
        allowed = (action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
                   or action == sqlite3.SQLITE_READ and first.lower() in self._columns
                   or action == sqlite3.SQLITE_FUNCTION and second.lower() in ALLOWED_FUNCTIONS)
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def _show(self, code: str) -> list[tuple] | str:
        if _SHOW_TABLES.fullmatch(code):
            return self._tables
        if not (match := _DESCRIBE.fullmatch(code)):
            return ERROR + "Only SHOW TABLES, SHOW COLUMNS and DESC of a table are answered here"
        unknown = f"{ERROR}Table '{self.name}.{match[1]}' doesn't exist"
        return self._columns.get(match[1].lower(), unknown)

    def _describe(self, table: str) -> list[tuple]:
        """Returns the rows of MySQL's DESC: Field, Type, Null, Key, Default, Extra."""
        foreign = {row[3].lower() for row in
                   self._db.execute(f'PRAGMA foreign_key_list("{table}")')}
        return [(name, kind.lower(), "NO" if required or key else "YES",
                 "PRI" if key else "MUL" if name.lower() in foreign else "", default, "")
                for _, name, kind, required, default, key in
                self._db.execute(f'PRAGMA table_info("{table}")')]

    def _error(self, message: str, sql: str) -> str:
        """Returns MySQL's text for an error message of sqlite, if _AS_MYSQL contains one.

        The tiny model was trained on MySQL's error texts.
        """
        for pattern, text in _AS_MYSQL:
            if match := re.fullmatch(pattern, message, re.S):
                name = "".join(filter(None, match.groups()))
                rest = sql[max(sql.rfind(name), 0):] if name else ""
                return ERROR + text.format(name=name, database=self.name, rest=rest,
                                           clause=_clause_of(name, sql))
        return ERROR + message


def _clause_of(name: str, sql: str) -> str:
    """Returns the clause in which a column's name first occurs in a query, such as "where clause".
    """
    clause = "field list"
    for word in re.finditer(r"\b(from|on|where|group|having|order)\b|(?<![\w.])"
                            + re.escape(name) + r"(?!\w)", sql, re.I):
        if not word[1]:
            break
        clause = word[1].lower() + (" statement" if word[1].lower() == "group" else " clause")
    return clause


# (pattern of sqlite's error message, MySQL's message for the same error)
_AS_MYSQL = [
    (r"no such table: (.*)", "Table '{database}.{name}' doesn't exist"),
    (r"no such column: (.*)", "Unknown column '{name}' in '{clause}'"),
    (r"ambiguous column name: (.*)", "Column '{name}' in {clause} is ambiguous"),
    (r"(?:no such function|not authorized to use function): (.*)",
     "FUNCTION {database}.{name} does not exist"),
    (r"misuse of aggregate.*", "Invalid use of group function"),
    (r'near "(.*)": syntax error|unrecognized token: "(.*)"|incomplete input', SYNTAX),
    (r"not authorized|access to .* is prohibited", DENIED[len(ERROR):]),
    (r"interrupted", INTERRUPTED[len(ERROR):]),
    (r"string or blob too big", TOO_LARGE[len(ERROR):]),
]

_SHOWS = re.compile(r"\s*(?:show|desc|describe|explain)\b", re.I)
_SHOW_TABLES = re.compile(r"\s*show\s+tables[\s;]*", re.I)
_DESCRIBE = re.compile(
    r"\s*(?:desc|describe|explain|show\s+columns\s+(?:from|in))\s+(\w+)[\s;]*", re.I)

# Group 1 is a string literal, a quoted name or a comment. Group 2 is the function LEFT or RIGHT. A
# match without a group is a division sign.
_SQLITE = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/)|/|"""
                     r"\b(left|right)(?=\s*\()", re.I | re.S)


def in_sqlite(sql: str) -> str:
    """Translates a MySQL query for sqlite.

    A division of integers returns a fraction in MySQL, but an integer in sqlite, so "a / b" becomes
    "a * 1.0 / b". The function names LEFT and RIGHT are put in double quotes, because they are also
    keywords in sqlite.
    """
    def replacement(match):
        if match[2]:
            return f'"{match[2]}"'
        return match[1] or "* 1.0 /"
    return _SQLITE.sub(replacement, sql)


_TEXT_COLUMN = re.compile(r"([\w`\"]\s+(?:(?:var)?char\s*\(\d+\)|\w*text\b))", re.I)


def _without_case(script: str) -> str:
    """Adds COLLATE NOCASE to the text columns, because MySQL ignores case when it compares texts.
    """
    def table(match):
        return _TEXT_COLUMN.sub(r"\1 COLLATE NOCASE", match[0])
    return re.sub(r"CREATE TABLE [^;]*", table, script, flags=re.I)


def _fetch(cursor) -> list[tuple] | str:
    """Returns all rows of a cursor, or TOO_LARGE if they exceed MAX_ROWS or MAX_CHARACTERS."""
    rows, characters = [], 0
    while row := cursor.fetchone():
        rows.append(row)
        characters += sum(len(v) for v in row if isinstance(v, (str, bytes)))
        if len(rows) > MAX_ROWS or characters > MAX_CHARACTERS:
            return TOO_LARGE
    return rows


class MySQL:
    """A database on a MySQL or MariaDB server.

    Each object opens its own connection, and logs in as the user that `load_intercode` created for
    the database. The server stops a query after SECONDS seconds.

    Args:
        url: Address of the server, mysql://user@host:port.
    """
    TIMED_OUT = {1969, 3024}  # error codes for a query that exceeds the time limit
    DENIED = {1044, 1045, 1049, 1698}  # error codes for a denied login or database
    # Error codes for too many connections, a shutdown, a broken network, or a killed query
    LOST = {1040, 1053, 1158, 1159, 1160, 1161, 1203, 1317, 1927}

    def __init__(self, name: str, url: str):
        self.name, self._url, self._connection = name, url, None
        self._checked(self._connect)

    def run(self, sql: str):
        return refusal(sql) or self.execute(sql)

    def execute(self, sql: str):
        return self._checked(lambda: self._run(sql))

    def close(self):
        connection, self._connection = self._connection, None
        # If `unbuffered_active` stayed True, PyMySQL would fetch all remaining rows before closing.
        if connection and connection._result:
            connection._result.unbuffered_active = False
        if connection and connection.open:
            connection.close()

    def _connect(self):
        self._connection = connect(self._url, user=database_user(self._url, self.name),
                                   database=self.name)
        limit = (f"max_statement_time = {SECONDS}"
                 if "MariaDB" in self._connection.get_server_info() else
                 f"max_execution_time = {1000 * SECONDS}")
        # In MySQL's default SQL mode, which includes ONLY_FULL_GROUP_BY, more than a tenth of the
        # gold queries fail.
        self._connection.query(f"SET SESSION {limit}, SESSION sql_select_limit = {MAX_ROWS + 1}, "
                               "SESSION sql_mode = 'NO_ENGINE_SUBSTITUTION'")

    def _run(self, sql):
        pymysql = driver()
        cursor = self._connection.cursor(pymysql.cursors.SSCursor)  # fetches rows one by one
        try:
            cursor.execute(sql)
            answer = None if cursor.description is None else _fetch(cursor)
        except pymysql.MySQLError as error:
            code, text = (*error.args, "", "")[:2]
            if code in self.TIMED_OUT:
                return INTERRUPTED
            if (isinstance(code, int) and (1000 <= code < 2000 or code >= 3000)
                    and code not in self.LOST):  # an error of the query, not of the connection
                return f"{ERROR}{text}"
            raise
        except ValueError as error:  # the query or its result is not valid UTF-8
            answer = f"{ERROR}{error}"
        # `cursor.close` fetches the remaining rows. The server's time limit also applies to this
        # step.
        cursor.close()
        return answer

    def _checked(self, action):
        """Returns the result of `action`.

        If the server or the connection fails, the method closes the connection. It then raises
        UsageError if the server has denied access to the user, and otherwise EnvError.
        """
        where = f"{server_of(self._url)}, database {self.name}"
        try:
            return action()
        except driver().MySQLError as error:
            code, text = (*error.args, "", "")[:2]
            self.close()
            if code in self.DENIED:
                raise UsageError(f"--mysql-url: {where}: {text}; {REMEDY}") from None
            raise EnvError(f"{where}: {text or error}; check that the server runs and is reachable"
                           ) from None


def driver():
    try:
        import pymysql
    except ImportError as error:
        raise UsageError(f"--mysql-url: {error}; {INSTALL}") from None
    return pymysql


def connect(url: str, **options):
    """Connects to a server. `options` override our default arguments for pymysql.connect."""
    parts, pymysql = urlsplit(url), driver()
    try:
        # The read timeout is 3 seconds longer than the server's time limit for a query. TLS is
        # disabled for a server on the same machine, because it costs 20 ms per episode.
        return pymysql.connect(**{**dict(
            host=parts.hostname, port=parts.port or 3306, user=unquote(parts.username),
            password=os.environ.get("MYSQL_PWD", ""), charset="utf8mb4", autocommit=True,
            local_infile=False, connect_timeout=5, read_timeout=SECONDS + 3,
            write_timeout=SECONDS + 3,
            ssl_disabled=parts.hostname in ("localhost", "127.0.0.1", "::1")), **options})
    except (IndexError, AssertionError, struct.error):  # the server did not send a MySQL handshake
        raise pymysql.err.OperationalError(2013, "the answer is not MySQL's") from None
    # MySQL 8 encrypts the password with RSA, for which PyMySQL needs its extra "rsa".
    except RuntimeError as error:
        raise UsageError(f"--mysql-url: {error}; {INSTALL}") from None


def server_of(url: str) -> str:
    """Returns the server's address without the user, mysql://host:port."""
    parts = urlsplit(url)
    return f"mysql://{parts.hostname}:{parts.port or 3306}"


def database_user(url: str, database: str) -> str:
    """Returns the name of the user that can read only `database`.

    A MySQL user name has at most 32 characters, so the name ends with a hash of the database's
    name.
    """
    name = unquote(urlsplit(url).username)[:21]
    return f"{name}_{hashlib.sha256(database.lower().encode()).hexdigest()[:10]}"
