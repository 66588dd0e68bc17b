"""One way to check what comes from outside: the error names the thing, what would do, and what was given instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor  # of autograd.grad(…, is_grads_batched=True)
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized

P = ParamSpec("P")
T = TypeVar("T")


LARGEST = 2**63 - 1  # that torch can count to


def whole(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Integral)


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer in a range. Neither True nor 2.0 is one."""
    if whole(value) and least <= int(value) <= (LARGEST if most is None else most):
        return int(value)
    if most is None and whole(value) and value > LARGEST:
        most = LARGEST
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} must be an integer {wanted}, not {value!r}")


def number(
    name: str, value: Any, wanted: str, least: float = 0.0, most: float = math.inf, *, above: bool = False
) -> float:
    """A finite number in [least, most], or in (least, most] if `above`; `wanted` says so in words."""
    found = math.nan
    if type(value) is not bool and isinstance(value, (int, float, np.integer, np.floating)):  # torch knows no fractions
        with suppress(OverflowError):  # 10**400
            found = float(value)
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


def able(name: str, value: Any, method: str, wanted: str) -> None:
    """An object with that method. A class is none: its parentheses were forgotten."""
    if isinstance(value, type) or not hasattr(value, method):
        raise TypeError(f"{name} must be {wanted}, not {value!r}")


def device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be one of torch's, such as 'cpu' or 'cuda', not {value!r}") from None


def precision(dtype: Any) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float32 or torch.float64, not {dtype!r}")


def weights(name: str, value: Any, dimensions: int, wanted: str) -> None:
    """A dense tensor of real numbers, with so many dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {wanted}, not {value!r}")
    if not (value.is_floating_point() and value.ndim == dimensions and value.layout == torch.strided):
        kind = "" if value.layout == torch.strided else f" and layout {value.layout}"
        raise TypeError(f"{name} must be {wanted}, not a tensor {tuple(value.shape)} of {value.dtype}{kind}")


def ordinary(*tensors: Tensor) -> None:
    """No tensor of torch.func's transforms or of forward-mode differentiation: what they carry along would be lost."""
    for t in tensors:
        if torch.func.debug_unwrap(t, recurse=False) is not t or is_legacy_batchedtensor(t):
            raise RuntimeError("solve does not support torch.func and vmap: give it a batch, and use .backward()")
        if forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise RuntimeError("solve does not support forward-mode differentiation: use .backward()")


def own_weights(net: Any) -> None:
    """No weight that torch makes of others (a parametrization, prune's hook, DataParallel): its gradient would be lost.

    So would that by a parameter of an activation, or of the network's besides the links' and the biases.
    """
    for part in net.links.modules():
        if is_parametrized(part) or part._forward_pre_hooks or "_is_replica" in vars(part):
            kind = type(part).__name__
            raise TypeError(f"the weights of a {kind} are made of others: only ThroughTime() differentiates that")
    besides = [*net._parameters.values(), *(part for name, part in net._modules.items() if name not in ("links", "b"))]
    rhos = {id(rho): rho for rho in map(net.rho.at, range(len(net.layers)))}.values()
    for owner, parts in [*((rho, [rho, *vars(rho).values()]) for rho in rhos), (net, besides)]:
        inside = [t for part in parts for t in (part.parameters() if isinstance(part, nn.Module) else [part])]
        if any(isinstance(t, Tensor) and t.requires_grad for t in inside):
            raise TypeError(f"{type(owner).__name__} has parameters of its own: only ThroughTime() differentiates that")


def inherit(cls: type, base: type, *what: str, those: Iterable[str]) -> None:
    """A class that writes one of `what` anew has of `those` only what it says itself, or what the base class says.

    What its parent says about its own `what` would be wrong, in silence.
    """
    for name in those if vars(cls).keys() & {*what} else ():
        if name not in vars(cls):
            setattr(cls, name, getattr(base, name))


def autocast(t: Tensor) -> bool:
    """Is torch.autocast on for the device of t?"""
    return not t.is_meta and torch.is_autocast_enabled(t.device.type)


def full_precision(t: Tensor) -> AbstractContextManager[Any]:
    """Without torch.autocast, whose products in half precision would end every iteration at a residual of 1e-3."""
    return torch.autocast(t.device.type, enabled=False) if autocast(t) else nullcontext()


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Inside a model that torch.compile compiles, the function runs as it is: its loops depend on their numbers.

    So there is nothing to trace or to export.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if exporting or torch._C._get_tracing_state():
            raise RuntimeError("a solve cannot be traced or exported: how long it goes on depends on the numbers")
        if torch.compiler.is_compiling():  # torch.compiler.disable would import the compiler: seconds, for everyone
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return run
