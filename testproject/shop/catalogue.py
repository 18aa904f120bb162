"""What the shop sells."""

from typing import NamedTuple


class Product(NamedTuple):
    name: str
    cents: int


CATALOGUE = {
    "tea": Product("Green tea, 100 g", 950),
    "pot": Product("Tea pot", 3_400),
    "cup": Product("Cup", 725),
}
"""By article code."""
