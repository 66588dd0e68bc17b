"""Links: undirected couplings of two layers. A link pushes activations up, pulls them down, and gives its gradients.

For a link W of a lower layer a and an upper layer b the fields gain h_b += W r_a and h_a += Wᵀ r_b: one W serves both
directions. A new coupling is a new class: what it needs is `push`, `pull`, `gradients` and its cost.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from . import checks

NARROW = 32  # a product with so few columns is twice as fast the other way round, with MKL
MOST = 1_000_000  # neurons in a layer: more is a slip of the pen
ENOUGH = 2**20  # multiply-adds of a product that repay the longer call of oneDNN
ROWS = 8  # of a batch that repay another order of a matrix in memory
LARGE = 2**19  # numbers in the largest matrix of a product that repay it on Zen 4, whose AVX-512 has half the width

Product = Callable[..., Tensor]  # (r, h=None, out=None) ↦ h + W r, into `out` where that is given


class Link(nn.Module):
    """A coupling of two layers of `sizes` (n_a, n_b). A subclass writes the four methods.

    One that derives from another link and pushes or pulls in another way needs gradients of its own, too.
    """

    sizes: tuple[int, int]

    def __init_subclass__(cls) -> None:
        checks.inherit(cls, Link, "push", "pull", those=("products", "gradients"))

    def push(self, r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """h_b = h + W r_a, into `out` where that is given."""
        raise NotImplementedError

    def pull(self, r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """h_a = h + Wᵀ r_b."""
        raise NotImplementedError

    def products(self) -> tuple[Product, Product]:
        """Push and pull for many products with the same W: a link may prepare something."""
        return self.push, self.pull

    def gradients(self, r_a: Tensor, mu_b: Tensor, r_b: Tensor | None, mu_a: Tensor | None) -> list[Tensor]:
        """By each parameter: those of the push, μ_b and r_a, plus those of the pull, μ_a and r_b, if there was one."""
        raise NotImplementedError

    @property
    def multiply_adds(self) -> int:
        """Those of a product in one direction, per sample."""
        raise NotImplementedError


class Dense(Link):
    """All to all: h_b += W r_a with a matrix W (n_b × n_a); ∂/∂W = μ_b r_aᵀ + r_b μ_aᵀ."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        checks.weights("a dense link's W", W, 2, "a matrix (n_b × n_a)")
        self.W = nn.Parameter(W)
        self.sizes = (W.shape[1], W.shape[0])

    @classmethod
    def xavier(cls, n: int, m: int, **options: Any) -> Dense:
        """From n to m neurons, uniform in ±√(6/(n + m)); the options are torch.rand's."""
        return cls((2 * torch.rand(m, n, **options) - 1) * math.sqrt(6 / (n + m)))

    def push(self, r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return multiply(r, self.W.T, h, out)

    def pull(self, r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return multiply(r, self.W, h, out)

    def products(self) -> tuple[Product, Product]:
        M = self.W.T
        if not torch.is_grad_enabled() and min(self.sizes) >= 2 * NARROW and not suits_onednn(ROWS, M):
            M = M.contiguous()  # multiplies some 5 % faster, and one copy serves all iterations of a solve
        return product(M), product(self.W)

    def gradients(self, r_a: Tensor, mu_b: Tensor, r_b: Tensor | None, mu_a: Tensor | None) -> list[Tensor]:
        by_W = multiply(mu_b.T, r_a)
        return [by_W if r_b is None or mu_a is None else multiply(r_b.T, mu_a, by_W)]

    @property
    def multiply_adds(self) -> int:
        return self.sizes[0] * self.sizes[1]


def product(M: Tensor) -> Product:
    """h + r M. Once a batch of some rows has come, a large M stays in oneDNN's own order, the fastest."""
    packed: Tensor | None = None

    def times(r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        nonlocal packed
        if packed is None and r.shape[0] >= ROWS and suits_onednn(r.shape[0], M):
            packed = pack(M.T)
        return multiply(r, M, h, out, packed)

    return times


def multiply(
    a: Tensor, b: Tensor, h: Tensor | None = None, out: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """h + a b, into `out` where that is given (and no gradient wanted); h has the shape of the product or of a row."""
    if suits_onednn(a.shape[0], b):
        found = by_onednn(a, b.T if packed is None else packed, h)
        return found if out is None else out.copy_(found)
    if out is not None and b.shape[1] < NARROW:
        turned = torch.mm(b.T, a.T).T
        return out.copy_(turned) if h is None else torch.add(h, turned, out=out)
    return torch.mm(a, b, out=out) if h is None else torch.addmm(h, a, b, out=out)


def suits_onednn(rows: int, b: Tensor) -> bool:
    """Whether so many rows times b are for oneDNN: large, not narrow, of float32, where that is faster."""
    n, m = b.shape
    large = n >= NARROW <= m and rows * n * m >= ENOUGH and b.dtype == torch.float32 and b.is_cpu
    if not large or torch.is_grad_enabled() or not onednn():
        return False
    return full_width() or max(n * m, rows * n, rows * m) >= LARGE


@cache
def onednn() -> bool:
    """Whether oneDNN multiplies faster here than MKL. Torch has both, and its own products take MKL.

    On AMD's processors MKL leaves AVX-512 unused. At full width (Zen 5) oneDNN is twice as fast; at half of it (Zen 4)
    large matrices gain, most of all in its own order. It is reached by the operators that torch.compile uses, which are
    not public ones: unless they give the right answers, MKL remains.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or "AuthenticAMD" not in _processor():
        return False
    numbers = torch.arange(12, dtype=torch.float32, device="cpu")
    a, W, h = (numbers[: n * m].view(n, m) for n, m in ((2, 3), (4, 3), (2, 4)))
    try:
        cases = itertools.product((W, pack(W)), (None, h[1], h))
        return all(torch.equal(by_onednn(a, M, t), a @ W.T + (0 if t is None else t)) for M, t in cases)
    except (AttributeError, RuntimeError, TypeError):
        return False


@cache
def full_width() -> bool:
    """Whether AVX-512 runs at full width, as since AMD's family 26 (Zen 5)."""
    family = re.search(r"family\s*:?\s*(\d+)", _processor(), re.IGNORECASE)
    return family is not None and int(family[1]) >= 26


def by_onednn(a: Tensor, W: Tensor, h: Tensor | None = None) -> Tensor:
    """h + a Wᵀ; W may be packed."""
    linear = torch.ops.mkldnn._linear_pointwise
    whole = h is not None and h.ndim == 2
    found: Tensor = linear.binary(a, h, W, None, "add") if whole else linear(a, W, h, "none", [], "")
    return found


def pack(W: Tensor) -> Tensor:
    """W in the order in which oneDNN multiplies fastest."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(W)
    return packed


def _processor() -> str:
    """What the system says of it."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()


class Conv(Link):
    """A convolution between layers of images (channels, height, width), and its transpose on the way down."""

    def __init__(self, W: Tensor, image: tuple[int, int], stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        checks.weights("a convolution's W", W, 4, "of shape (channels of b, channels of a, height, width)")
        for name, value, least in (("stride", stride, 1), ("padding", padding, 0)):
            checks.integer(name, value, least)
        if not (isinstance(image, (list, tuple)) and len(image) == 2):
            raise TypeError(f"image must be a pair (height, width), not {image!r}")
        for side, n, k in zip(("height", "width"), image, W.shape[2:], strict=True):
            checks.integer(f"the kernel's {side}", k, 1)
            checks.integer(f"the image's {side}", n, max(1, k - 2 * padding), MOST)
        self.W = nn.Parameter(W)
        self.options: dict[str, Any] = {"stride": stride, "padding": padding}
        self.a = (W.shape[1], *image)
        self.b = (W.shape[0], *((n + 2 * padding - k) // stride + 1 for n, k in zip(image, W.shape[2:], strict=True)))
        self.sizes = math.prod(self.a), math.prod(self.b)

    def push(self, r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return _add(h, functional.conv2d(r.reshape(-1, *self.a), self.W, **self.options), out)

    def pull(self, r: Tensor, h: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        images = conv2d_input((len(r), *self.a), self.W, r.reshape(-1, *self.b), **self.options)  # type: ignore[no-untyped-call]
        return _add(h, images, out)

    def gradients(self, r_a: Tensor, mu_b: Tensor, r_b: Tensor | None, mu_a: Tensor | None) -> list[Tensor]:
        def by_W(low: Tensor, high: Tensor) -> Tensor:
            low, high = low.reshape(-1, *self.a), high.reshape(-1, *self.b)
            found: Tensor = conv2d_weight(low, self.W.shape, high, **self.options)  # type: ignore[no-untyped-call]
            return found

        found = by_W(r_a, mu_b)
        return [found if r_b is None or mu_a is None else found + by_W(mu_a, r_b)]

    @property
    def multiply_adds(self) -> int:
        return self.sizes[1] * math.prod(self.W.shape[1:])


def _add(h: Tensor | None, images: Tensor, out: Tensor | None) -> Tensor:
    found = images.flatten(1) if h is None else h + images.flatten(1)
    return found if out is None else out.copy_(found)
