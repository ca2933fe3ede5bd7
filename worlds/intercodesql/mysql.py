"""MySQL's language for sqlite: what a query means in MySQL, said so that sqlite answers alike.

`translate` reads a query's parts, refuses what MySQL refuses and writes the rest anew; `FUNCTIONS`
are those that sqlite lacks. What is left over stands in docs/environments.md.
"""

import math
import re
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from statistics import pstdev, pvariance

SYNTAX = ("You have an error in your SQL syntax; check the manual that corresponds to your MySQL "
          "server version for the right syntax to use near '{}' at line 1")
MANY_ROWS = "Subquery returns more than 1 row"
OTHER_COLUMNS = "The used SELECT statements have a different number of columns"
NO_FUNCTION = ("FUNCTION {} does not exist. Check the 'Function Name Parsing and Resolution' "
               "section in the Reference Manual")

_PART = re.compile(r"""
    (?P<gap>\s+ | /\*.*?\*/ | --(?=\s|$)[^\n]* | \#[^\n]*)
  | (?P<string>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
  | (?P<name>`[^`]*`)
  | (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?!\w) | \.\d+)
  | (?P<word>[^\W\d][\w$]*)
  | (?P<sign><=> | <> | != | >= | <= | == | \|\| | && | << | >> | .)
""", re.X | re.S)

# Words after which an operand stands, so that a text behind them is a value and no alias.
_BEFORE_OPERANDS = set(
    "select distinct all from join where and or xor not on having by when then else case between "
    "in like limit offset is div mod interval regexp rlike escape separator union except intersect "
    "values any some as over partition with recursive using natural cross inner left right full "
    "outer group order desc asc collate".split())
# Words before a parenthesis that are no function.
_NO_FUNCTIONS = _BEFORE_OPERANDS - {"left", "right", "mod"} | {"exists", "end", "null"}
# Words that end a list of selected columns, or the conditions of a WHERE.
_CLAUSES = set("from where group having order limit union except intersect window".split())
_SETS = {"union", "except", "intersect"}
# Functions whose name and parenthesis MySQL wants side by side.
GLUED = {"avg", "count", "group_concat", "max", "mid", "min", "now", "position", "std", "stddev",
         "substr", "substring", "sum", "trim", "variance", "cast"}
# Words that MySQL takes for no name, as of a selected column.
_RESERVED = set(
    "all and as asc between both by call case change char character check collate column "
    "condition constraint continue convert create cross cursor database databases decimal "
    "declare default delayed delete desc describe distinct div double drop dual each else "
    "enclosed escaped except exists exit explain false fetch float for force foreign from "
    "fulltext grant group having if ignore in index inner insert int integer intersect interval "
    "into is iterate join key keys kill leading leave left like limit linear lines lock long "
    "loop match maxvalue mod natural not null numeric on optimize option or order out outer over "
    "partition precision primary procedure purge range read reads real recursive references "
    "regexp release rename repeat replace require restrict return revoke right rlike rows schema "
    "schemas select sensitive separator set show signal smallint spatial specific sql starting "
    "straight_join table terminated then to trailing trigger true undo union unique unlock "
    "unsigned update usage use using values varchar varying when where while with write "
    "xor".split())
_COMPARISONS = {"=", "<>", "!=", "<", ">", "<=", ">=", "<=>"}
_QUOTED_NUMBER = re.compile(r"""(['"])-?\d+(\.\d+)?\1""")
# Between which an operand of a comparison stands.
_BORDERS = (_BEFORE_OPERANDS | _CLAUSES | {"is"}) - {"div", "mod", "over", "exists", "collate"}
_BORDER_SIGNS = _COMPARISONS | {",", "&&", "||", "!"}
_OPERATORS = _COMPARISONS | {"+", "-", "*", "/", "%"}
_AGGREGATES = {"avg", "count", "group_concat", "max", "min", "sum"}
_RENAMED = {"max": "mysql_max", "min": "mysql_min", "ucase": "upper", "lcase": "lower",
            "mid": "substr", "char_length": "length", "character_length": "length",
            "greatest": "max", "least": "min", "round": "mysql_round", "instr": "mysql_instr",
            "left": "mysql_left", "right": "mysql_right", "stddev": "std", "stddev_pop": "std",
            "isnull": "mysql_isnull", "var_pop": "variance"}
_TYPES = {"signed": "integer", "unsigned": "integer", "int": "integer", "integer": "integer",
          "char": "text", "varchar": "text", "decimal": "real", "double": "real", "float": "real"}
_DEPTH = 40  # of parentheses; sqlite itself refuses those of a deeper query


class MySQLError(Exception):
    """MySQL refuses the query with this text."""


@dataclass
class Part:
    """A word, name, number, text or sign of a query; or a group, what stands in parentheses."""
    kind: str
    text: str
    at: int               # where it begins in the query
    apart: bool           # whether something stands between it and the part before
    inside: list = field(default_factory=list)

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.lower() in words

    @property
    def is_select(self) -> bool:
        return self.kind == "group" and bool(self.inside) and (
            self.inside[0].is_word("select", "with") or self.inside[0].is_select)


END = Part("end", "", 0, False)  # stands before the first part and behind the last


def without_end(sql: str) -> str:
    """A query without the semicolons and comments behind it."""
    end = 0
    for match in _PART.finditer(sql):
        if match.lastgroup != "gap" and match[0] != ";":
            end = match.end()
    return sql[:end]


def translate(sql: str, database: str, tables: set[str], columns: set[str]) -> str:
    """The query for sqlite.

    Args:
        sql: what MySQL was asked.
        database: its name, for errors and before the names of its tables.
        tables: the names of its tables, in lower case.
        columns: the names of all their columns, in lower case.

    Raises:
        MySQLError: MySQL refuses this query, while sqlite would answer it.
    """
    parts = read_parts(sql)
    if parts is None:
        return sql
    parts = _without_database(parts, database.lower(), tables)
    return _Translation(sql, database, columns).level(parts)


def read_parts(sql: str) -> list[Part] | None:
    """The parts of a query, groups within groups; None if its parentheses do not match."""
    levels, apart = [[]], False
    for match in _PART.finditer(sql):
        part = Part(match.lastgroup, match[0], match.start(), apart)
        apart = part.kind == "gap"
        if part.text == "(":
            part.kind = "group"
            levels[-1].append(part)
            levels.append(part.inside)
        elif part.text == ")":
            levels.pop()
        elif not apart:
            levels[-1].append(part)
        if not 0 < len(levels) <= _DEPTH:
            return None
    return levels[0] if len(levels) == 1 else None


def _without_database(parts: list[Part], database: str, tables: set[str]) -> list[Part]:
    """The parts without the database's name before a table's, which sqlite takes for another's."""
    kept, n = [], 0
    while n < len(parts):
        part, dot, table, after = [*parts[n:n + 4], END, END, END][:4]
        named = _unquoted(part).lower() == database and part.kind in ("word", "name")
        if named and dot.text == "." and _unquoted(table).lower() in tables and (
                # Else it is a column of the table that has the database's name.
                database not in tables or after.text == "."
                or n and parts[n - 1].is_word("from", "join")):
            n += 2
            continue
        if part.kind == "group":
            part = replace(part, inside=_without_database(part.inside, database, tables))
        kept.append(part)
        n += 1
    return kept


class _Refusals:
    """What MySQL refuses of a query and sqlite doesn't, by what stands where: MySQLError."""

    def __init__(self, sql: str):
        self.sql = sql

    def level(self, parts: list[Part]) -> None:
        """In the parts at one depth of parentheses."""
        for n, part in enumerate(parts):
            before = parts[n - 1] if n else END
            after = parts[n + 1] if n + 1 < len(parts) else END
            if part.kind == "sign" and part.text in ("[", "]", "'", '"', "`"):
                raise self.syntax(part)
            if part.text == "==":
                raise self.syntax_at(part.at + 1)
            if part.is_word("glob", "match", "notnull", "indexed") and _is_operand(before):
                raise self.syntax(part)
            if part.is_word("isnull") and _is_operand(before) and after.kind != "group":
                raise self.syntax(after)
            if part.is_word("nulls") and after.is_word("first", "last"):
                raise self.syntax(part)
            if part.is_word("filter") and before.kind == "group" and after.kind == "group":
                raise self.syntax(after)
            natural = any(word.is_word("natural") for word in parts[max(n - 3, 0):n])
            if part.is_word("join") and before.is_word("left", "right", "outer") and not natural:
                self.unconditional(parts[n + 1:])
            if part.is_word("outer") and before.is_word("full"):
                raise self.syntax(part)
            if _is_alias_full(before, after, part):
                table = parts[n - 2] if n > 1 else END  # stands before the table's name
                if not (table.is_word("from", "join") or table.text in (".", ",")):
                    raise self.syntax(part)  # for the table has a name by now
            if part.is_word("collate") and after.is_word("nocase", "binary", "rtrim"):
                raise MySQLError(f"Unknown collation: '{after.text}'")
            if part.is_word("is") and not after.is_word("not", "null", "true", "false", "unknown"):
                raise self.syntax(after)
            if part.is_word("not") and after.is_word("null") and _is_operand(before):
                raise self.syntax(after)
            if part.is_word("as") and after.is_word(*_RESERVED):
                raise self.syntax(after)
            if part.is_word("limit"):
                self.limit(parts[n + 1:])
            if part.is_word("from", "join") and after.kind == "string":
                raise self.syntax(after)
            if part.is_word("in") and after.is_select and any(
                    inner.is_word("limit") for inner in after.inside):
                raise MySQLError("This version of MySQL doesn't yet support 'LIMIT & IN/ALL/ANY/"
                                 "SOME subquery'")
        self.derived(parts)

    def limit(self, parts: list[Part]) -> None:
        """Of what stands behind a LIMIT: it must be a whole number, and is not reckoned with."""
        count, after, *_ = *parts, END, END
        if not count.text.isdigit():
            raise self.syntax(count)
        if after.kind == "sign" and after.text != ",":
            raise self.syntax(after)

    def derived(self, parts: list[Part]) -> None:
        """A subquery that is read from and has no name."""
        reading = False
        for n, part in enumerate(parts):
            after = parts[n + 1] if n + 1 < len(parts) else END
            if part.is_word("from"):
                reading = True
            elif part.is_word(*_CLAUSES, "on", "using", "select"):
                reading = part.is_word("on", "using") and reading
            elif reading and part.is_select and not parts[n - 1].is_word("in", "exists", "and"):
                named = after.kind == "name" or after.kind == "word" and (
                    after.is_word("as") or not after.is_word(*_BEFORE_OPERANDS, *_CLAUSES))
                operand = parts[n - 1].kind == "sign" and parts[n - 1].text != ","
                if not (named or operand):
                    raise MySQLError("Every derived table must have its own alias")

    def unconditional(self, parts: list[Part]) -> None:
        """An outer join without ON or USING, of which these are the parts behind it."""
        for part in [*parts, END]:
            if part.is_word("on", "using"):
                return
            if part is END or part.is_word(*_CLAUSES):
                raise self.syntax(part)

    def aliases(self, parts: list[Part], aliases: set[str]) -> None:
        """The name of a selected column in the conditions of a WHERE."""
        for n, part in enumerate(parts):
            before = parts[n - 1] if n else END
            after = parts[n + 1] if n + 1 < len(parts) else END
            if part.kind == "group" and not part.is_select:
                self.aliases(part.inside, aliases)
            called = after.kind == "group" or after.text == "." or before.text == "."
            if part.kind in ("word", "name") and not called and _unquoted(part).lower() in aliases:
                raise MySQLError(f"Unknown column '{_unquoted(part)}' in 'where clause'")

    def having(self, parts: list[Part], unknown: set[str]) -> None:
        """In the parts of a HAVING: a column, of those `unknown` there, outside an aggregate."""
        for n, part in enumerate(parts):
            before = parts[n - 1] if n else END
            after = parts[n + 1] if n + 1 < len(parts) else END
            if part.kind == "group" and not part.is_select and not _aggregates(before):
                self.having(part.inside, unknown)
            named = part.kind in ("word", "name") and after.kind != "group" and after.text != "."
            if named and before.text != "." and _unquoted(part).lower() in unknown:
                raise MySQLError(f"Unknown column '{_unquoted(part)}' in 'having clause'")

    def syntax(self, part: Part) -> MySQLError:
        """MySQL's error at this part; at the end of the query if there is none."""
        return self.syntax_at(len(self.sql) if part is END else part.at)

    def syntax_at(self, place: int) -> MySQLError:
        return MySQLError(SYNTAX.format(self.sql[place:]))


class _Translation:
    """Of one query: `level` writes what stands at one depth of parentheses."""

    def __init__(self, sql: str, database: str, columns: set[str]):
        self.sql, self.database, self.columns = sql, database, columns
        self.refusals = _Refusals(sql)
        self.recursive = bool(re.search(r"\brecursive\b", sql, re.I))

    def level(self, parts: list[Part]) -> str:
        """sqlite's text of the parts of a query, a subquery, or the arguments of a function."""
        self.refusals.level(parts)
        if parts and parts[0].is_select and (len(parts) == 1 or parts[1].is_word(
                *_SETS, "order", "limit")):
            return self._compound(parts)
        starts = [n for n, part in enumerate(parts) if part.is_word("select")]
        if not starts:
            return self._write(parts)
        before, after = parts[:starts[0]], parts[starts[0]:]  # before: WITH name AS (...)
        return f"{self._write(before)} {self._compound(after)}"

    def _compound(self, parts: list[Part]) -> str:
        """Of SELECTs between UNION, EXCEPT or INTERSECT; sqlite would sort the rows of UNION."""
        sides, joints = [[]], []
        for part in parts:
            if part.is_word(*_SETS):
                sides.append([])
                joints.append([part.text.lower()])
            elif part.is_word("all", "distinct") and joints and not sides[-1]:
                joints[-1].append(part.text.lower())
            else:
                sides[-1].append(part)
        tail = []
        if joints:  # ORDER BY and LIMIT of the whole
            ends = [n for n, part in enumerate(sides[-1]) if part.is_word("order", "limit")]
            if ends:
                tail = sides[-1][ends[0]:]
                del sides[-1][ends[0]:]
        texts = [self._select(side) for side in sides]
        as_written = [" ".join(word for word in joint if word != "distinct") for joint in joints]
        if joints and set(as_written) == {"union"} and not self.recursive:
            return f"SELECT DISTINCT * FROM ({' union all '.join(texts)}) {self._write(tail)}"
        whole = texts[0]
        for joint, text in zip(as_written, texts[1:]):
            whole += f" {joint} {text}"
        return f"{whole} {self._write(tail)}"

    def _select(self, parts: list[Part]) -> str:
        """Of one SELECT, or of one in parentheses."""
        if parts and parts[0].is_select:
            return f"SELECT * FROM {self._write(parts)}"
        clauses = [[]]  # each begins with its word
        for part in parts:
            if part.is_word(*_CLAUSES):
                clauses.append([])
            clauses[-1].append(part)
        by_name = {clause[0].text.lower(): clause for clause in clauses if clause}
        if "having" in by_name:
            known = _known_in_having(by_name)
            self.refusals.having(by_name["having"], set() if "*" in known else self.columns - known)
        return self._clauses(clauses, by_name, grouped=any(map(_aggregates, parts)))

    def _clauses(self, clauses: list[list[Part]], by_name: dict, grouped: bool) -> str:
        """Of the clauses of one SELECT. sqlite has no HAVING without groups: MySQL's is there one
        more condition, or, where it counts the rows, about one group of them all."""
        aliases, texts = set(), []
        alone = "having" in by_name and "group" not in by_name
        for clause in clauses:
            head = clause[0] if clause else END
            if head.is_word("select"):
                texts.append(self._selected(clause, aliases))
            elif head.is_word("where"):
                self.refusals.aliases(clause, aliases - self.columns)
                condition = self._write(clause[1:])
                texts.append(f"WHERE ({condition})" if alone else f"WHERE {condition}")
            elif head.is_word("having") and alone and not grouped:
                word = "AND" if "where" in by_name else "WHERE"
                texts.append(f"{word} ({self._write(clause[1:])})")
            elif head.is_word("having") and alone:
                texts.append(f"GROUP BY NULL {self._write(clause)}")
            else:
                texts.append(self._write(clause))
        return " ".join(texts)

    def _selected(self, clause: list[Part], aliases: set[str]) -> str:
        """Of SELECT and its columns, the names of which are added to `aliases`."""
        start = 2 if len(clause) > 1 and clause[1].is_word("distinct", "all") else 1
        items = _split(clause[start:])
        texts = []
        for item in items:
            if item is not items[0] and item[:1] and item[0].text == "*":
                raise self.refusals.syntax(item[0])
            value, alias = _without_alias(item)
            alone = len(value) == 1 and value[0].is_select
            text = self._value_of(value[0]) if alone else self._write(value)
            digits = _digits(value)
            if digits and not (len(value) == 2 and value[0].is_word("round", "truncate", "cast")):
                text = f"mysql_decimal({text}, {digits})"
            if alias:
                if alias.is_word(*_RESERVED):
                    raise self.refusals.syntax(alias)
                name = _unquoted(alias)
                aliases.add(name.lower())
                text += ' AS "' + name.replace('"', '""') + '"'
            texts.append(text)
        return f"{self._write(clause[:start])} {', '.join(texts)}"

    def _write(self, parts: list[Part]) -> str:
        """The parts, each in sqlite's words."""
        texts, n = [], 0
        parts = _numbers_compared(parts, self.columns)
        while n < len(parts):
            part = parts[n]
            before = parts[n - 1] if n else END
            after = parts[n + 1] if n + 1 < len(parts) else END
            follows = parts[n + 2] if n + 2 < len(parts) else END
            called = part.kind == "word" and after.kind == "group" and not (
                before.is_word("as") or follows.is_word("as") and before.kind != "sign"
                and (before.is_word("with", "recursive"))
                or part.is_word("mod") and _is_operand(before))
            if called and part.text.lower() not in _NO_FUNCTIONS:
                texts.append(self._call(part, after, follows.is_word("over")))
                n += 1
            elif part.is_select and _is_compared(before, after):
                texts.append(self._value_of(part))
            elif part.kind == "group":
                inside = part.inside
                if before.is_word("in"):
                    inside = [_without_blanks(inner) for inner in inside]
                texts.append(f"({self.level(inside)})")
            elif part.kind == "string":
                compared = {before.text.lower(), after.text.lower()} & {*_COMPARISONS, "between"}
                texts.append(self._text(_without_blanks(part) if compared else part, before))
            elif part.is_word("any", "some", "all") and after.is_select:
                texts.append(self._quantified(part, after, texts))
                n += 1
            elif _is_alias_full(before, after, part):
                texts.append('AS "full"')
            elif part.is_word("div"):
                texts.append("/")
            elif part.is_word("mod"):
                texts.append("%")
            elif part.is_word("end"):
                texts.append("END COLLATE NOCASE")
            else:
                texts.append({"/": "* 1.0 /", "||": "OR", "&&": "AND", "!": "NOT", "<=>": "IS"
                              }.get(part.text, part.text))
            n += 1
        return " ".join(texts)

    def _value_of(self, subquery: Part) -> str:
        """Of a subquery that is compared: more than one row is an error."""
        rows = self.level(subquery.inside)
        if not _has_many_rows(subquery.inside):
            return f"({rows})"
        return f"(WITH only(value) AS ({rows}) SELECT mysql_only(value) FROM only)"

    def _quantified(self, part: Part, subquery: Part, texts: list[str]) -> str:
        """Of ANY or ALL of a subquery, without which sqlite does; takes = from before it."""
        sign, rows = texts[-1] if texts else "", self.level(subquery.inside)
        every, above = part.is_word("all"), "X''"  # a BLOB, which is above all texts and numbers
        if sign == "=" and not every or sign in ("<>", "!=") and every:
            texts.pop()
            return f"NOT IN ({rows})" if every else f"IN ({rows})"
        if sign not in ("<", "<=", ">", ">=", "<>", "!="):
            raise self.refusals.syntax(part)
        bound = "max" if every == (sign[0] == ">") else "min"
        # Of no rows: above or below all values, so that ALL is true and ANY is not.
        bound = f"coalesce({bound}(value), {'-1e999' if bound == 'max' else above})"
        if every:
            bound = f"CASE WHEN count(*) = count(value) THEN {bound} END"
        if sign in ("<>", "!="):  # if there are two values, any other than them
            bound = ("CASE WHEN min(value) = max(value) THEN min(value) "
                     f"WHEN count(value) THEN {above} END")
        return f"(WITH any_or_all(value) AS ({rows}) SELECT {bound} FROM any_or_all)"

    def _text(self, part: Part, before: Part) -> str:
        """A text, which compares without case; behind a column it names it."""
        text = _unquoted(part).replace("'", "''")
        if before.is_word("as") or _is_operand(before):
            return f'"{text}"'
        if before.is_word("like", "escape"):
            return f"'{text}'" + " ESCAPE '\\'" * ("\\" in text)
        return f"'{text}' COLLATE NOCASE"

    def _call(self, part: Part, group: Part, over: bool) -> str:
        """A function and its arguments."""
        name, arguments = part.text.lower(), self._arguments(group)
        if group.apart and name in GLUED:
            if name == "count" or name == "cast":
                raise self.refusals.syntax(group.inside[0] if group.inside else group)
            raise MySQLError(NO_FUNCTION.format(f"{self.database}.{part.text}"))
        if name in ("max", "min") and len(arguments) > 1:
            raise self.refusals.syntax_at(self.sql.index(",", arguments[0][-1].at) + 1)
        if name == "count" and not arguments:
            raise self.refusals.syntax_at(group.at + 1)
        if over:
            return f"{name}({self.level(group.inside)})"
        if name == "cast":
            return self._cast(group.inside)
        if name == "convert" and len(arguments) == 2:
            return self._cast([*arguments[0], Part("word", "AS", group.at, True), *arguments[1]])
        if name == "group_concat":
            separator = [n for n, a in enumerate(group.inside) if a.is_word("separator")]
            if separator:
                at = separator[0]
                value, text = group.inside[:at], group.inside[at + 1:]
                return f"group_concat({self._write(value)}, {self._write(text)})"
        if name == "count" and len(arguments) > 1 and group.inside[0].is_word("distinct"):
            arguments[0] = arguments[0][1:]
            texts = [f"({self._write(argument)})" for argument in arguments]
            together = " || ' ' || ".join(texts)  # NULL if one is, as what isn't counted
            return f"count(DISTINCT {together})"
        texts = []
        for argument in arguments:
            alone = len(argument) == 1 and argument[0].is_select
            texts.append(self._value_of(argument[0]) if alone else self._write(argument))
        if name in ("concat", "concat_ws"):
            texts = [f"mysql_text({text}, {_shown_digits(argument)})"
                     for text, argument in zip(texts, arguments)]
        if name == "concat" and texts:
            return f"(({') || ('.join(texts)}) || '' COLLATE NOCASE)"
        if name == "if" and len(texts) == 3:
            return f"(CASE WHEN {texts[0]} THEN {texts[1]} ELSE {texts[2]} END COLLATE NOCASE)"
        if name == "sum":  # a DECIMAL: never the same as an INTEGER
            return f"(sum({', '.join(texts)}) * 1.0)"
        if part.text.lower() in self.sqlite_only:
            raise MySQLError(f"FUNCTION {self.database}.{part.text} does not exist")
        return f"{_RENAMED.get(name, name)}({', '.join(texts)}) COLLATE NOCASE"

    def _arguments(self, group: Part) -> list[list[Part]]:
        """A function's arguments, none of them empty."""
        last = Part("sign", ",", group.at, False)
        for part in group.inside:
            if part.text == "," == last.text:
                raise self.refusals.syntax_at(part.at + 1)
            last = part
        if group.inside and last.text == ",":
            raise self.refusals.syntax_at(self.sql.index(")", last.at))
        return _split(group.inside)

    def _cast(self, parts: list[Part]) -> str:
        """Of a CAST, of which these are the parts in parentheses."""
        if len(parts) < 3:
            place = parts[-1].at + len(parts[-1].text) if parts else self.sql.lower().index("cast")
            raise self.refusals.syntax_at(self.sql.find(")", place))
        *value, kind = parts
        sizes = []
        if kind.kind == "group":
            sizes = ["".join(part.text for part in size) for size in self._arguments(kind) or [[]]]
            kind = value.pop()
        named = kind.text.lower() in _TYPES and value and value[-1].is_word("as")
        if not named or not all(map(str.isdigit, sizes)):
            raise self.refusals.syntax(kind)
        to = _TYPES[kind.text.lower()]
        if to == "integer":
            return f"mysql_integer({self._write(value[:-1])})"
        of = self._write(value[:-1])
        if to == "text":
            of = f"mysql_text({of}, {_shown_digits(value[:-1])})"
        text = f"CAST({of} AS {to})"
        if kind.is_word("decimal"):
            return f"mysql_round({text}, {sizes[1] if sizes[1:] else 0})"
        return f"substr({text}, 1, {sizes[0]})" if to == "text" and sizes else text

    sqlite_only = {"iif", "total", "strftime", "datetime", "julianday", "printf"}


def _split(parts: list[Part]) -> list[list[Part]]:
    """What stands between commas."""
    items = [[]]
    for part in parts:
        if part.kind == "sign" and part.text == ",":
            items.append([])
        else:
            items[-1].append(part)
    return items if parts else []


def _is_alias_full(before: Part, after: Part, part: Part) -> bool:
    """Whether this is FULL before JOIN: MySQL has no full join and takes it for a table's name."""
    return part.is_word("full") and after.is_word("join") and _is_operand(before)


def _is_operand(part: Part) -> bool:
    """Whether a value, a column or a subquery ends with this part."""
    if part.kind == "word":
        return part.text.lower() not in _BEFORE_OPERANDS
    return part.kind in ("name", "number", "string", "group") or part.text == "*"


def _without_alias(item: list[Part]) -> tuple[list[Part], Part | None]:
    """A selected value, and the part that names it."""
    if len(item) < 2 or item[-1].kind not in ("word", "name", "string"):
        return item, None
    *value, alias = item
    if value[-1].is_word("as"):
        return value[:-1], alias
    ends = _is_operand(value[-1]) and value[-1].text not in ("*", ".")
    if ends and not alias.is_word("end", "null", "true", "false"):
        return value, alias
    return item, None


def _unquoted(part: Part) -> str:
    """A name or text without its quotes, and with what its escapes stand for."""
    if part.kind not in ("string", "name"):
        return part.text
    quote, text = part.text[0], part.text[1:-1]
    if part.kind == "string":
        text = text.replace(2 * quote, quote)
        escapes = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "%": "\\%", "_": "\\_"}
        text = re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[1]), text, flags=re.S)
    return text


def _aggregates(part: Part) -> bool:
    """Whether the part is, or holds, the name of a function over many rows."""
    if part.kind == "group" and not part.is_select:
        return any(map(_aggregates, part.inside))
    return part.is_word(*_AGGREGATES)


def _is_compared(before: Part, after: Part) -> bool:
    """Whether what stands between these two is compared, or reckoned with."""
    if before.kind == "sign":
        return before.text in _OPERATORS
    among = before.is_word("in", "exists", "any", "some", "all")
    return after.text in _OPERATORS and not among


def _numbers_compared(parts: list[Part], columns: set[str]) -> list[Part]:
    """The parts, where a comparison with a number in quotes asks mysql_against: MySQL compares as
    numbers if the other side is one, sqlite only beside a column (and of those knows `columns`)."""
    n, parts = 0, _numbers_listed(parts, columns)
    while n < len(parts):
        part, sign, start, stop = parts[n], None, n, n + 1
        if part.kind == "string" and _QUOTED_NUMBER.fullmatch(part.text):
            begins, ends = _start_of(parts, n) == n, _stop_of(parts, n + 1) == n + 1
            if n and parts[n - 1].text in _COMPARISONS and ends:
                start, sign = _start_of(parts, n - 1), parts[n - 1]
                operand = parts[start:n - 1]
            elif parts[n + 1:] and parts[n + 1].text in _COMPARISONS and begins:
                stop, sign = _stop_of(parts, n + 2), parts[n + 1]
                operand = parts[n + 2:stop]
        if sign and not _compares_as_is(operand, columns):
            call = _call_of("mysql_against", operand, part)
            zero = [Part("number", "0", part.at, True)]
            turned = [*call, sign, *zero] if start < n else [*zero, sign, *call]
            parts = [*parts[:start], *turned, *parts[stop:]]
            stop = start + len(turned)
        n = stop
    return parts


def _numbers_listed(parts: list[Part], columns: set[str]) -> list[Part]:
    """The parts, where IN and BETWEEN of numbers in quotes ask mysql_in and mysql_between."""
    n = 0
    while n < len(parts):
        part, first, joint, last = [*parts[n:n + 4], END, END, END][:4]
        numbers, stop = [], n + 2
        if part.is_word("between") and joint.is_word("and") and _stop_of(parts, n + 4) == n + 4:
            numbers, stop = [first, last], n + 4
        elif part.is_word("in"):
            numbers = [number for number in first.inside if number.text != ","]
        quoted = [number for number in numbers if _QUOTED_NUMBER.fullmatch(number.text)]
        start, operand = n, []
        if numbers and len(quoted) == len(numbers):
            start -= n > 0 and parts[n - 1].is_word("not")
            operand = parts[_start_of(parts, start):start]
        if not _compares_as_is(operand, columns):
            call = _call_of(f"mysql_{part.text.lower()}", operand, *numbers)
            begin = start - len(operand)
            parts = [*parts[:begin], *parts[start:n], *call, *parts[stop:]]
            n = begin
        n += 1
    return parts


def _call_of(name: str, operand: list[Part], *values: Part) -> list[Part]:
    """A call of the function with an operand and more values."""
    at, inside = values[0].at, [*operand]
    for value in values:
        inside += [Part("sign", ",", at, False), value]
    return [Part("word", name, at, True), Part("group", "(", at, False, inside)]


def _compares_as_is(operand: list[Part], columns: set[str]) -> bool:
    """Whether sqlite compares this with a number in quotes as MySQL does: a column or a text."""
    if len(operand) < 2:
        return not operand or operand[0].kind == "string" or (
            _unquoted(operand[0]).lower() in columns)
    return operand[-2].text == "." and _unquoted(operand[-1]).lower() in columns


def _start_of(parts: list[Part], n: int) -> int:
    """Where the operand begins that ends before the n-th part."""
    cases = 0
    while n and (cases or not _is_border(parts, n - 1)):
        n -= 1
        cases += parts[n].is_word("end") - parts[n].is_word("case")
    return n


def _stop_of(parts: list[Part], n: int) -> int:
    """Behind the operand that begins with the n-th part."""
    cases = 0
    while n < len(parts) and (cases or parts[n].is_word("case") or not (
            parts[n].is_word("end") or _is_border(parts, n))):
        cases += parts[n].is_word("case") - parts[n].is_word("end")
        n += 1
    return n


def _is_border(parts: list[Part], n: int) -> bool:
    """Whether no operand of a comparison reaches over the n-th part."""
    if parts[n].kind == "sign":
        return parts[n].text in _BORDER_SIGNS
    is_function = parts[n].is_word("left", "right") and parts[n + 1:] and (
        parts[n + 1].kind == "group")
    return parts[n].kind == "word" and parts[n].text.lower() in _BORDERS and not is_function


def _has_many_rows(parts: list[Part]) -> bool:
    """Whether a subquery of one column may have more than one row."""
    names = [part.text.lower() for part in parts]
    if "from" not in names or len(_split(parts[:names.index("from")])) > 1:
        return False
    if names[1] == "*" or names[-2:] == ["limit", "1"]:
        return False
    return "group" in names or "union" in names or not any(map(_aggregates, parts))


def _without_blanks(part: Part) -> Part:
    """The part; a text without the blanks at its end, by which MySQL tells no texts apart."""
    if part.kind != "string":
        return part
    quote = part.text[0]
    return replace(part, text=part.text[:-1].rstrip(" ") + quote)


def _known_in_having(clauses: dict[str, list[Part]]) -> set[str]:
    """What a HAVING may name, in lower case: selected columns, also *, and those of groups."""
    parts = [*clauses.get("select", []), *clauses.get("group", [])]
    return {_unquoted(part).lower() for part in parts}


def _shown_digits(parts: list[Part]) -> int:
    """How many digits behind its point the text of a DECIMAL has; 0 also where it is as it is."""
    if len(parts) == 2 and parts[0].is_word("round", "truncate", "cast"):
        inside = parts[1].inside
        if parts[0].is_word("cast"):  # CAST(x AS DECIMAL(5, 2))
            inside = inside[-1].inside if inside else []
        *others, digits = _split(inside) or [[]]
        number = "".join(part.text for part in digits)
        return int(number) if number.isdigit() and others else 0
    return _digits(parts)


def _digits(parts: list[Part]) -> int:
    """How many digits behind its point MySQL gives a value: four more for each quotient and
    average in one of its terms, but for those of subqueries; 0 where there are none."""
    most = quotients = literals = 0
    for part in [*parts, Part("sign", "+", 0, False)]:
        if part.kind == "sign" and part.text in "+-,":  # the end of a term
            if quotients:
                most = max(most, min(4 * quotients + literals, 8))
            quotients = literals = 0
        if part.kind == "group" and not part.is_select:
            quotients += _digits(part.inside) // 4
        if part.kind == "number":
            literals += len(part.text.partition(".")[2])
        quotients += part.text == "/" or part.is_word("avg")
    return most


def _number(value):
    """A number; of a text the one that it begins with."""
    if not isinstance(value, str):
        return value
    found = re.match(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.I)
    return float(found[0]) if found else 0.0


def round_decimal(value, digits: int = 0):
    """As MySQL rounds a DECIMAL, halves away from zero; whole numbers stay whole."""
    if value is None or digits is None:
        return None
    value, digits = _number(value), int(_number(digits))
    rounded = Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return int(rounded) if isinstance(value, int) else float(rounded)


def _text_of(value, digits):
    """What CONCAT makes of a value, of a DECIMAL with its digits."""
    if not isinstance(value, float):
        return value
    if digits == 0 and value.is_integer():
        return str(int(value))
    return f"{round_decimal(value, digits):.{digits}f}" if digits else str(value)


def _against(value, text):
    """Below, at or above 0 as the value is against the text of a number; as texts if it is one."""
    if value is None:
        return None
    return _compared(value, text if isinstance(value, str) else float(text))


def _between(value, low, high):
    return None if value is None else int(_against(value, low) >= 0 >= _against(value, high))


def _in(value, *texts):
    return None if value is None else int(any(_against(value, text) == 0 for text in texts))


def _integer(value):
    """A number rounded; of a text what it begins with, cut."""
    if isinstance(value, str):
        return int(re.match(r"\s*([+-]?\d+)?", value)[1] or 0)
    rounded = round_decimal(value)
    return None if rounded is None else int(rounded)


def _decimal(value, digits):
    return round_decimal(value, digits) if isinstance(value, float) else value


def _truncate(value, digits):
    if value is None or digits is None:
        return None
    value, digits = _number(value), int(_number(digits))
    scale = 10 ** max(-30, min(digits, 30))
    cut = math.trunc(value * scale) / scale
    return int(cut) if isinstance(value, int) else cut


def _part_before(text, separator, count):
    """SUBSTRING_INDEX."""
    if text is None or separator is None or count is None:
        return None
    separator, count = str(separator), int(_number(count))
    pieces = str(text).split(separator) if separator else [""]
    return separator.join(pieces[:count] if count >= 0 else pieces[count:])


def _concat_ws(separator, *texts):
    return None if separator is None else separator.join(
        str(text) for text in texts if text is not None)


def _unless_none(function):
    """The function, of arguments that are not NULL; else NULL."""
    return lambda *values: None if None in values else function(*values)


def _of_numbers(function):
    """The function, of arguments that are no NULL, texts read as numbers; else NULL."""
    def of_numbers(*values):
        try:
            return function(*map(_number, values))
        except OverflowError as error:  # which sqlite would say of a text that is too long
            raise ValueError(error) from None
    return _unless_none(of_numbers)


# name in sqlite -> (how many arguments, or which numbers of them; what it does)
FUNCTIONS = {
    "mysql_decimal": (2, _decimal),
    "mysql_round": ((1, 2), round_decimal),
    "mysql_against": (2, _against),
    "mysql_between": (3, _between),
    "mysql_in": (-1, _in),
    "mysql_integer": (1, _integer),
    "mysql_text": (2, _text_of),
    "mysql_instr": (2, _unless_none(lambda text, part: str(text).lower().find(
        str(part).lower()) + 1)),
    "locate": (2, _unless_none(lambda part, text: str(text).lower().find(str(part).lower()) + 1)),
    "mysql_left": (2, _unless_none(lambda text, count: str(text)[:max(_integer(count), 0)])),
    "mysql_right": (2, _unless_none(
        lambda text, count: str(text)[-_integer(count):] if _integer(count) > 0 else "")),
    "reverse": (1, _unless_none(lambda text: str(text)[::-1])),
    "concat_ws": (-1, _concat_ws),
    "substring_index": (3, _part_before),
    "truncate": (2, _truncate),
    "floor": (1, _of_numbers(math.floor)),
    "ceil": (1, _of_numbers(math.ceil)),
    "ceiling": (1, _of_numbers(math.ceil)),
    "mod": (2, _of_numbers(lambda a, b: math.fmod(a, b) if b and float in (type(a), type(b))
                           else int(math.fmod(a, b)) if b else None)),
    "sign": (1, _of_numbers(lambda value: (value > 0) - (value < 0))),
    "pow": (2, _of_numbers(lambda a, b: float(a) ** b)),
    "power": (2, _of_numbers(lambda a, b: float(a) ** b)),
    "sqrt": (1, _of_numbers(lambda value: math.sqrt(value) if value >= 0 else None)),
    "mysql_isnull": (1, lambda value: int(value is None)),
}


class Largest:
    """MAX that leaves the other columns of its row alone: sqlite's own takes them from the row of
    the maximum, MySQL from the first."""
    sign = 1

    def __init__(self):
        self.best = None

    def step(self, value):
        if value is None:
            return
        if self.best is None or self.sign * _compared(value, self.best) > 0:
            self.best = value

    def finalize(self):
        return self.best


class Smallest(Largest):
    sign = -1


class Only:
    """The value of the one row of a subquery, NULL without a row."""

    def __init__(self):
        self.rows = 0
        self.value = None

    def step(self, value):
        self.rows += 1
        self.value = value

    def finalize(self):
        if self.rows > 1:
            raise ValueError(MANY_ROWS)
        return self.value


class Deviation:
    """STD, the standard deviation of all the rows."""
    spread = staticmethod(pstdev)

    def __init__(self):
        self.values = []

    def step(self, value):
        if value is not None:
            self.values.append(float(_number(value)))

    def finalize(self):
        return round(self.spread(self.values), 4) if self.values else None


class Variance(Deviation):
    """VARIANCE."""
    spread = staticmethod(pvariance)


def _compared(a, b) -> int:
    if isinstance(a, str) and isinstance(b, str):
        a, b = a.lower(), b.lower()
    elif isinstance(a, str) != isinstance(b, str):
        a, b = isinstance(a, str), isinstance(b, str)
    return (a > b) - (a < b)


AGGREGATES = {"mysql_max": Largest, "mysql_min": Smallest, "mysql_only": Only, "std": Deviation,
              "variance": Variance}
