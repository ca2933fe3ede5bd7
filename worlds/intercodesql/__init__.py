"""InterCodeSQL: generated databases, or those of InterCode."""

import re

MYSQL_ADDRESS = "mysql://user:password@host:port, with / and @ in a password as %2F and %40"


def is_mysql_address(text: str) -> bool:
    """Whether it is mysql://user[:password]@host[:port], with nothing else in it."""
    match = re.fullmatch(r"mysql://[^:@/\s]+(?::[^@/\s]*)?@[^:@/\s]+(?::([0-9]{1,5}))?/?", text)
    return bool(match) and 0 < int(match[1] or 3306) < 65536


def without_passwords(text: str) -> str:
    """`text`, the passwords of addresses in it replaced by ***."""
    return re.sub(r"(://[^:@/\s]*):(?!password@)\S*@", r"\1:***@", text)
