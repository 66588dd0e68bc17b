"""One way to check what comes from outside: the error names the thing, what would do, and what was given instead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def integer(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """An integer in a range. Neither True nor 2.0 is one."""
    if type(value) is not bool and isinstance(value, Integral) and least <= int(value) <= most:
        return int(value)
    wanted = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise ValueError(f"{name} must be an integer {wanted}, not {value!r}")


def number(
    name: str, value: Any, wanted: str, least: float = 0.0, most: float = math.inf, *, above: bool = False
) -> float:
    """A finite number in [least, most], or in (least, most] if `above`; `wanted` says so in words."""
    found = float(value) if type(value) is not bool and isinstance(value, Real) else math.nan
    if math.isfinite(found) and (least < found or (found == least and not above)) and found <= most:
        return found
    raise ValueError(f"{name} must be {wanted}, not {value!r}")


def flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, not {value!r}")


def choice(name: str, value: Any, choices: Iterable[str]) -> str:
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(known)}")
