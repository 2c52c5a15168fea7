"""Who everyone waits for: the ranks of a job as a graph of who owes whom."""

from collections.abc import Mapping, Sequence

from .inspection import Answer

_LONG_S = 2.0  # of a wait that no answer of another moment explains


def verdicts(answers: Mapping[int, Answer], size: int) -> list[str]:
    """Sentences about where chains of waits end, and about circles; [] where nobody waits.

    Args:
        answers: answers by rank; a missing rank has given none.
    """
    ends: dict[int, list[int]] = {}
    circles: dict[frozenset[int], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if answer.state == "waits":
            chain = _chain(rank, answers)
            if chain[-1] in chain[:-1]:
                circle = chain[chain.index(chain[-1]) :]
                circles.setdefault(frozenset(circle), circle)
            else:
                ends.setdefault(chain[-1], []).append(rank)
    told = [
        f"a circle: {' -> '.join(map(str, circle))}"
        for circle in circles.values()
        # Answers are not of one moment: ranks that pass work on look as if they waited in turn.
        if min(answers[rank].since_s for rank in circle) >= _LONG_S
    ]
    for end, ranks in sorted(ends.items()):
        others = [rank for rank in ranks if rank != end]
        whom = f"{_named(others, size)} in the end for " if others else ""
        told.append(f"{whom}rank {end}{', which' * bool(others)} {_of(end, answers)}")
    return told


def _chain(rank: int, answers: Mapping[int, Answer]) -> list[int]:
    """The ranks from one to the first that waits for nobody, or that is in the chain already."""
    chain = [rank]
    while True:
        answer = answers.get(chain[-1])
        if answer is None or answer.state != "waits" or not answer.owing:
            return chain
        following = _worst(answer.owing, answers)
        chain.append(following)
        if following in chain[:-1]:
            return chain


def _worst(ranks: Sequence[int], answers: Mapping[int, Answer]) -> int:
    """Of the ranks that owe something the one that holds it up: one without an answer, one outside
    the engine, one that computes, or the first that waits."""
    order = {"outside": 1, "computes": 2, "waits": 3}
    return min(ranks, key=lambda one: (order[answers[one].state] if one in answers else 0, one))


def _of(rank: int, answers: Mapping[int, Answer]) -> str:
    answer = answers.get(rank)
    if answer is None:
        return "has given no answer: it is stopped, or its Python is held by one call"
    since = f"for {answer.since_s:.1f} s"
    if answer.state == "computes":
        return f"has computed {answer.task} {since}"
    if answer.state == "outside":
        return f"is outside the engine {since}; its last task was {answer.task or 'none'}"
    return f"waits {since} for {answer.lacks or 'nothing that it knows of'}"


def _named(ranks: Sequence[int], size: int) -> str:
    """ "ranks 0 and 2 wait", or "rank 1 waits"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    if len(ranks) == size - 1:
        return "all others wait"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait"
