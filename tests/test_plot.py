"""The plot functions draw on the axes that they are given and return them."""

import base64
import io

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image

import hoplib as hop
from hoplib import plot
from playground.ways import COLOURS as ways_of_the_playground


@pytest.fixture
def ax():
    with plt.rc_context():
        plot.use_style()
        fig, ax = plt.subplots()
        yield ax
        plt.close(fig)


def test_the_style_is_seaborns_with_ours_on_top(ax):
    first = plt.rcParams["axes.prop_cycle"].by_key()["color"][0]
    assert to_hex(first) == plot.COLOURS["synchronous"].lower()
    assert plt.rcParams["axes.titlelocation"] == "left"


def test_one_colour_has_one_meaning():
    """But for a way to settle that has a long and a short name."""
    ways = {name.replace("even-odd + ", "").removesuffix(" even-odd"): c for name, c in plot.COLOURS.items()}
    colours = [*ways.values(), plot.EVEN, plot.ODD, plot.REST, plot.WRONG]
    assert len(set(colours)) == len(colours)
    assert {c.lower() for c in ways_of_the_playground.values()} <= {c.lower() for c in plot.COLOURS.values()}


def test_digit_and_matrix(ax):
    assert plot.digit(ax, torch.rand(784), "7") is ax
    assert ax.images[0].get_array().shape == (28, 28)
    W = hop.dense(hop.HAM([4, 3, 2], device="cpu")).W
    assert plot.matrix(ax, W, ([3], [3])) is ax
    assert len(ax.lines) == 2


def test_gif_is_one_image_of_all_frames(ax):
    (line,) = ax.plot([0, 1], [0, 1])
    html = plot.gif(ax.figure, lambda n: line.set_ydata([0, n]), range(3), "a line that turns")
    data = html.partition("base64,")[2].removesuffix('">')
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (image.format, image.n_frames) == ("GIF", 3)
    assert 'alt="a line that turns"' in html
