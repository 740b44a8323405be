"""Rows of numbers, such as coords, sorted and told apart; a million of them at once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.columns import Box, U32s


class Order(NamedTuple):
    """Rows of numbers in their order, the later of two equal ones after the earlier."""

    rows: NDArray[np.int64]
    """Which row comes at each place."""
    first: NDArray[np.bool_]
    """Whether it differs from the one before it."""


def sort_columns(columns: U32s) -> Order:
    """Sort rows, whose first numbers are the first of *columns*, which decides before others."""
    width, count = columns.shape
    first = np.ones(count, np.bool_)
    if not width or not count:
        first[1:] = False
        return Order(np.arange(count), first)
    if (box := Box.around(columns)) is None:
        order = np.lexsort(columns[::-1])
        ordered = columns[:, order]
        first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
        return Order(order, first)
    keys = box.keys(columns)
    if (keys[1:] > keys[:-1]).all():
        return Order(np.arange(count), first)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first[1:] = keys[1:] != keys[:-1]
    return Order(order, first)


def distinct_rows(rows: U32s) -> U32s:
    """Sort *rows*, and give each once."""
    order, first = sort_columns(np.ascontiguousarray(rows.T))
    distinct: U32s = rows[order[first]]
    return distinct


def number_rows(rows: U32s) -> tuple[list[tuple[int, ...]], NDArray[np.int64]]:
    """Give the distinct ones of *rows*, in order, and the number of each row among them."""
    if not len(rows):
        return [], np.empty(0, np.int64)
    if not any(column.min() < column.max() for column in rows.T):
        return [tuple(rows[0].tolist())], np.zeros(len(rows), np.int64)
    order, first = sort_columns(np.ascontiguousarray(rows.T))
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(first) - 1
    return list(map(tuple, rows[order[first]].tolist())), numbers
