"""The names behind the numbers of operations and element types in the recorder's slots."""

from __future__ import annotations

__all__ = ["COLLECTIVES", "ELEMENTS", "OPERATIONS", "element_name", "operation_name"]

OPERATIONS = {
    1: "all_reduce",
    2: "reduce",
    3: "broadcast",
    4: "all_gather",
    5: "reduce_scatter",
    6: "all_to_all",
    7: "gather",
    8: "scatter",
    9: "barrier",
    10: "send",
    11: "recv",
}
COLLECTIVES = range(1, 10)
"""Numbers of the operations that all members of a group take part in."""

ELEMENTS = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
    "complex64",
    "complex128",
)


def operation_name(number: int) -> str:
    """The name of an operation; a number that is none is named as such."""
    return OPERATIONS.get(number, f"operation {number}")


def element_name(number: int) -> str:
    """The name of an element type."""
    return ELEMENTS[number] if 0 <= number < len(ELEMENTS) else f"element {number}"
