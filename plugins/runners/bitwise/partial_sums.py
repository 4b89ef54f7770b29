"""Sums in a fixed binary tree over the micro batches of a step."""

from torch import Tensor

Node = tuple[int, int]  # (level, index): the sum of the leaves index * 2**level to (index + 1) * 2**level - 1


class PartialSums:
    """Sums leaves in the order of a fixed binary tree, however ranks and rounds divide the leaves.

    Leaf m is the gradient of micro batch m of a step. Node (l, i) is node (l - 1, 2i) plus node (l - 1, 2i + 1), so a
    rank that has consecutive leaves can add them without the leaves of other ranks. At most two nodes of each level are
    kept. A leaf may be None: a gradient of zero.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[Node, Tensor | None]] = []

    def add(self, node: Node, value: Tensor | None) -> None:
        """Add the next leaf or node in ascending order of leaves. `value` may be overwritten."""
        level, index = node
        while index % 2 and self.nodes and self.nodes[-1][0] == (level, index - 1):
            value = _plus(self.nodes.pop()[1], value)
            level, index = level + 1, index // 2
        self.nodes.append(((level, index), value))

    def take(self) -> list[tuple[Node, Tensor | None]]:
        """Return all nodes, and remove them."""
        nodes, self.nodes = self.nodes, []
        return nodes

    def total(self) -> Tensor | None:
        """Return the sum of all nodes, and remove the nodes."""
        value = None
        while self.nodes:
            value = _plus(self.nodes.pop()[1], value)
        # Turn -0.0 into 0.0, because the sign of a zero could depend on the number of ranks.
        return None if value is None else value.add_(0.0)


def nodes_of(first: int, count: int) -> list[Node]:
    """Return the nodes that remain after `count` leaves, from leaf `first` on, are added."""
    sums = PartialSums()
    for leaf in range(first, first + count):
        sums.add((0, leaf), None)
    return [node for node, _ in sums.nodes]


def _plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
