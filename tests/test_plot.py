"""The plot functions draw on the axes that they are given and return them."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch

import hoplib as hop
from hoplib import plot


@pytest.fixture
def ax():
    with plt.rc_context():
        plot.use_style()
        fig, ax = plt.subplots()
        yield ax
        plt.close(fig)


def test_band_draws_the_median(ax):
    values = torch.arange(12.0).view(4, 3)
    values[0, 2] = torch.nan  # a sample that has left
    assert plot.band(ax, values, "sync") is ax
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert ax.lines[0].get_ydata().tolist() == [0.5, 4, 7, 10]
    assert len(ax.collections) == 1


def test_digit_and_matrix(ax):
    assert plot.digit(ax, torch.rand(784), "7") is ax
    assert ax.images[0].get_array().shape == (28, 28)
    W = hop.dense(hop.HAM([4, 3, 2], device="cpu")).W
    assert plot.matrix(ax, W, ([3], [3])) is ax
    assert len(ax.lines) == 2
