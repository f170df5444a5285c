"""Blocks found in a radix tree over token runs (SGLang's RadixAttention, Zheng et al. 2024), cut at block borders."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from impls.kv_cache.sharing import sharing_reasons
from impls.seams import Arm, PrefixIndex


@dataclass(eq=False, slots=True)
class _Node:
    """An edge with the node at its end. ``tokens``: of the edge; ``blocks``: those that hold a copy of each of its
    blocks; ``depth``: blocks before it; ``children``: by the tokens of their first block, in which any two differ."""

    parent: _Node | None
    depth: int
    tokens: list[int]
    blocks: list[list[int]]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class RadixTree(PrefixIndex):
    """Runs of tokens that always occur together are one edge, compared as one slice; an edge is split where two
    sequences part. Tokens are compared, never hashes of them alone.

    Published blocks lengthen a leaf in place. Eviction takes the last block of a leaf; an inner node that is left with
    one child stays as it is until that goes as well.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._root = _Node(None, 0, [], [])
        self._places: dict[int, tuple[_Node, int]] = {}  # of a block: its node, and its number from the root

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        return sharing_reasons(arm)

    def match(self, token_ids: Seq[int], max_blocks: int) -> list[int]:
        size, node = self._block_size, self._root
        found: list[int] = []
        while len(found) < max_blocks:
            start = len(found) * size
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            length = min(len(child.blocks), max_blocks - len(found))
            wanted = list(token_ids[start : start + length * size])
            if child.tokens[: length * size] != wanted:
                length = next(
                    i for i in range(length) if child.tokens[i * size :][:size] != wanted[i * size : (i + 1) * size]
                )
            found += [copies[0] for copies in child.blocks[:length]]
            if length < len(child.blocks):
                break
            node = child
        return found

    def publish(self, token_ids: Seq[int], block: int, after: int | None) -> int | None:
        size, own = self._block_size, list(token_ids)
        node, at = self._root, 0  # the block goes behind the first ``at`` blocks of the node's edge
        if after is not None:
            node, number = self._places[after]
            at = number - node.depth + 1
        depth = node.depth + at
        if at < len(node.blocks) and node.tokens[at * size : (at + 1) * size] != own:
            self._split(node, at)
        if at == len(node.blocks):
            key = tuple(own)
            child = node.children.get(key)
            if child is not None:
                node, at = child, 0
            elif node.children or node is self._root:
                node.children[key] = child = _Node(node, depth, own, [[]])
                node, at = child, 0
            else:
                node.tokens += own
                node.blocks.append([])
        copies = node.blocks[at]
        copies.append(block)
        self._places[block] = (node, depth)
        return copies[0] if len(copies) > 1 else None

    def _split(self, node: _Node, at: int) -> None:
        """The edge's first ``at`` blocks stay with the node, the rest moves to a child of its own."""
        size = self._block_size
        lower = _Node(node, node.depth + at, node.tokens[at * size :], node.blocks[at:], node.children)
        for child in lower.children.values():
            child.parent = lower
        for number, copies in enumerate(lower.blocks, lower.depth):
            self._places.update((block, (lower, number)) for block in copies)
        del node.tokens[at * size :], node.blocks[at:]
        node.children = {tuple(lower.tokens[:size]): lower}

    def keep(self, block: int) -> bool:
        if block not in self._places:
            return False
        node, number = self._places[block]
        copies = node.blocks[number - node.depth]
        if len(copies) == 1:
            return True
        copies.remove(block)
        del self._places[block]
        return False

    def evict(self, block: int) -> None:
        size = self._block_size
        node, number = self._places[block]
        if node.children or number != node.depth + len(node.blocks) - 1:
            raise ValueError(f"block {block} is followed by others: it cannot be evicted before them")
        del self._places[block]
        key = tuple(node.tokens[-size:])
        del node.tokens[-size:], node.blocks[-1]
        if not node.blocks and node.parent is not None:
            del node.parent.children[key]

    def clear(self) -> None:
        self._root.children.clear()
        self._places.clear()

    def contents(self) -> dict[int, tuple[int, ...]]:
        size = self._block_size
        found: dict[int, tuple[int, ...]] = {}
        pending: list[tuple[_Node, tuple[int, ...]]] = [(self._root, ())]
        while pending:
            node, before = pending.pop()
            assert len(node.tokens) == len(node.blocks) * size, "an edge's tokens do not fill its blocks"
            assert node.depth * size == len(before), "an edge does not begin where the one before it ends"
            for i, copies in enumerate(node.blocks):
                assert copies, "a block of an edge that nobody holds a copy of"
                for block in copies:
                    assert self._places[block] == (node, node.depth + i), f"block {block} is not where it is said to be"
                    found[block] = before + tuple(node.tokens[: (i + 1) * size])
            for key, child in node.children.items():
                assert child.blocks, "an edge without blocks"
                assert child.parent is node and key == tuple(child.tokens[:size]), "a child under another's name"
                pending.append((child, before + tuple(node.tokens)))
        assert found.keys() == self._places.keys(), "a block that the tree does not hold"
        return found
