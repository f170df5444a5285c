"""Room in pieces of a power of two, halved and joined again (Knowlton 1965): what Orca is modelled with."""

from __future__ import annotations


class BuddyAllocator:
    """``size`` units in as few pieces of a power of two as add up to it. A piece lies at a multiple of its own size, so
    the address of its buddy, the other half of what both were cut from, differs from its own in one bit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[dict[int, None]] = [{} for _ in range(size.bit_length())]  # addresses, by log2 of the size
        self._held: dict[int, int] = {}  # address -> log2 of the size
        address = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order][address] = None
                address += 1 << order

    @property
    def num_free(self) -> int:
        return sum(len(pieces) << order for order, pieces in enumerate(self._free))

    @property
    def largest(self) -> int:
        """Units in the largest piece that there can ever be."""
        return 1 << self.size.bit_length() - 1

    def allocate(self, count: int) -> range | None:
        """The piece that holds ``count`` units, whole; None if there is none."""
        wanted = order_of(count)
        order = next((order for order in range(wanted, len(self._free)) if self._free[order]), None)
        if order is None:
            return None
        address, _ = self._free[order].popitem()
        while order > wanted:
            order -= 1
            self._free[order][address + (1 << order)] = None
        self._held[address] = wanted
        return range(address, address + (1 << wanted))

    def free(self, address: int) -> None:
        """KeyError unless a held piece begins there."""
        order = self._held.pop(address)
        while (buddy := address ^ 1 << order) in self._free[order]:
            del self._free[order][buddy]
            address = min(address, buddy)
            order += 1
        self._free[order][address] = None

    def check_invariants(self) -> None:
        pieces = [(address, order) for order, free in enumerate(self._free) for address in free]
        everything = (*pieces, *self._held.items())
        units = [unit for address, order in everything for unit in range(address, address + 2**order)]
        assert sorted(units) == list(range(self.size)), "units lost, invented, or in two pieces"
        for address, order in pieces:
            assert address % 2**order == 0, "a piece does not lie at a multiple of its size"
            assert address ^ 2**order not in self._free[order], "two free halves that were not joined"


def order_of(count: int) -> int:
    """log2 of the smallest power of two that is at least ``count``."""
    return (count - 1).bit_length()
