"""A number with its noun, as a sentence takes both: 1 microbatch, 12,573 tokens."""

_ES = ("s", "x", "ch", "sh")


def plural(number: int, noun: str) -> str:
    """Give the number, its thousands apart, and the noun, which is in the plural unless it is one.

    Args:
        number: how many, from 0.
        noun: an English noun in the singular, whose plural is regular.
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(_ES) else 's'}"
