"""A sum over microbatches that has the same bits whoever computes which of them."""

# Microbatches are the leaves of a binary tree, in the order of their numbers. A holder adds up the
# nodes that it has all leaves of, and sends the others as they are; the owner of a shard goes on
# with the nodes of all holders. So the additions are those of the tree, in whatever order they are
# made.

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Node(NamedTuple):
    """The sum of 2**level microbatches, `place` x 2**level being the first of them."""

    level: int
    place: int


Kept = list[tuple[tuple[int, int], list[Tensor]]]  # (level, place) and tensors, as they travel


class GradientTree:
    """The nodes of a tree that are known, none of which is below another one."""

    def __init__(self) -> None:
        self._nodes: dict[Node, list[Tensor]] = {}

    def add(self, node: Node, tensors: Sequence[Tensor]) -> None:
        """Take in a node, whose tensors are this tree's to write to."""
        if node in self._nodes:
            raise ValueError(f"{node} is in the tree; expected each microbatch once")
        found = list(tensors)
        while other := self._nodes.pop(Node(node.level, node.place ^ 1), None):
            # A sum of two has the same bits in either order.
            found = [mine.add_(its) for mine, its in zip(found, other, strict=True)]
            node = Node(node.level + 1, node.place // 2)
        self._nodes[node] = found

    def kept(self) -> Kept:
        """The nodes, each with its tensors."""
        return [((level, place), found) for (level, place), found in self._nodes.items()]

    def total(self) -> list[Tensor]:
        """The sum of all leaves; a node whose neighbour has no leaves is its parent as it stands.

        Every leaf that there is must have been added; the tree is empty then.
        """
        while len(self._nodes) > 1:
            lowest = min(self._nodes)
            self.add(Node(lowest.level + 1, lowest.place // 2), self._nodes.pop(lowest))
        _, found = self._nodes.popitem()
        return found
