"""The playground computes what hoplib computes, in node and in the browser, and its page does what it says."""

import json
import shutil
import subprocess

import pytest
import torch

import hoplib as hop
from playground import build, ways

NETS, KNOWN = ways.load()
MAX_ITER, SAMPLES, GAINS = 200, (0, 5, 20), (1.0, 2.5)
CASES = [(depth, gain) for depth in NETS for gain in GAINS]
# The same lines for node and for the browser; P holds the functions and the networks.
SETTLE = """([depth, gain, samples, omega, maxIter]) => Object.fromEntries(Object.entries(P.WAYS).map(([name, way]) => [
  name,
  samples.map((i) => {
    const net = P.scaled(P.data.networks[depth], gain), x = P.data.samples[i].image;
    const { states, residuals, energies, iterations, status } = P.settle(net, x, way, { omega, maxIter });
    return { states: states.map((s) => s.slice(1).flatMap((l) => [...l])), residuals, energies, iterations, status };
  }),
]))"""


def arguments(depth, gain):
    return [depth, gain, list(SAMPLES), KNOWN["networks"][depth]["omega"], MAX_ITER]


@pytest.fixture(scope="module")
def in_node(tmp_path_factory):
    """Run a function of JavaScript with these arguments."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(build.HERE / "settle.js", folder / "settle.mjs")  # so that older versions take it for a module
    shutil.copy(ways.FILE, folder)

    def run(function, *args):
        (folder / "run.mjs").write_text(f"""
            import {{ readFileSync, writeFileSync }} from "node:fs";
            import * as settle from "./settle.mjs";
            const file = readFileSync("{ways.FILE.name}");
            const buffer = file.buffer.slice(file.byteOffset, file.byteOffset + file.length);
            const P = {{ ...settle, data: settle.readNetworks(buffer) }};
            writeFileSync("out.json", JSON.stringify(({function})({json.dumps(args)})));
        """)
        done = subprocess.run(["node", "run.mjs"], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "out.json").read_text())

    return run


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    return build.build(tmp_path_factory.mktemp("page") / "playground.html")


@pytest.fixture
def visit(browser, html):
    """Open the page from its file; what it complains of, or asks the network for, must be nothing."""
    contexts, complaints = [], []

    def open_page(**options):
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: complaints.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url))
        page.goto(html.as_uri())
        page.wait_for_selector(".backwards[data-label]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(visit):
    """With no motion, it shows where everything ends."""
    return visit(reduced_motion="reduce")


# -- the same numbers --------------------------------------------------------------------------------------------


def compare(found, depth, gain):
    """States, energies, residuals, counts and statuses of every way against hoplib's; the largest difference."""
    net = ways.scaled(NETS[depth], gain)
    x, omega, worst = KNOWN["samples"][list(SAMPLES)], KNOWN["networks"][depth]["omega"], 0.0
    for name, sol in ways.settle(net, x, omega, MAX_ITER).items():
        for i, run in enumerate(found[name]):
            n = len(run["residuals"])
            f, solver = ways.ways(net, x[i : i + 1], omega)[name]
            z = hop.trajectory(f, f.start(), solver, iterations=n + 1)
            states = torch.cat([net.zeros(1), *(f.join(value) for value in z)])
            energies = net.energy(states, x[i : i + 1].expand(len(states), -1))
            assert run["status"] == hop.Status(int(sol.status[i])).name.lower().replace("_", " "), name
            assert run["iterations"] == int(sol.iterations[i]), name
            pairs = (run["states"], states), (run["energies"], energies), (run["residuals"], sol.residuals[:n, i])
            for ours, theirs in pairs:
                worst = max(worst, (torch.tensor(ours, dtype=torch.float64) - theirs).abs().max().item())
    return worst


@pytest.mark.parametrize(("depth", "gain"), CASES)
def test_node_computes_what_hoplib_computes(in_node, depth, gain, record_property):
    worst = compare(in_node(SETTLE, *arguments(depth, gain)), depth, gain)
    record_property("difference", worst)
    assert worst < 1e-5


@pytest.mark.parametrize(("depth", "gain"), CASES)
def test_the_browser_computes_what_hoplib_computes(page, depth, gain):
    found = page.evaluate(f"(args) => {{ const P = playground; return ({SETTLE})(args); }}", arguments(depth, gain))
    assert compare(found, depth, gain) < 1e-5


def test_neither_even_odd_nor_the_clipped_overshoot_ever_raises_the_energy(in_node):
    for omega in (1.4, 1.95):
        found = in_node(SETTLE, 7, 2.5, [0, 7, 20, 23], omega, 60)
        for name in ("even-odd", "over-relaxed even-odd"):
            for run in found[name]:
                E = torch.tensor(run["energies"], dtype=torch.float64)
                assert (E.diff() <= 1e-12 * (1 + E[1:].abs())).all(), (name, omega)


def test_a_nudge_stays_on_its_chain(in_node):
    ripple = "([at, when]) => P.ripple(P.data.networks[7], P.data.samples[3].image, at, when, 12)"
    for at, when in ((1, 0), (2, 0), (3, 4)):
        change = torch.tensor(in_node(ripple, at, when)[1:], dtype=torch.float64)  # (layers, times)
        l, n = torch.meshgrid(torch.arange(1, 7), torch.arange(13), indexing="ij")
        own = (l + n - at - when) % 2 == 0
        assert not change[~own].any()
        assert (change[own & (n >= when + 6)] > 0).all()  # and reaches all of it


def test_the_gap_of_a_label_and_its_gradient(in_node):
    """What hoplib's energy says, and what autograd makes of it."""
    run = "([depth, label]) => P.gap(P.data.networks[depth], P.data.mean, label)"
    for depth, label in ((3, 3), (5, 0), (7, 8)):
        found = in_node(run, depth, label)
        x = KNOWN["mean"][None].clone().requires_grad_()
        ours = gap(NETS[depth], x, label)
        (by_x,) = torch.autograd.grad(ours, x)
        down = torch.tensor([found["down"][str(i)] for i in range(784)], dtype=torch.float64)
        assert abs(ours.item() - found["gap"]) < 1e-5
        assert (by_x[0] + down).abs().max() < 1e-5


@pytest.mark.parametrize(("depth", "labels"), [(3, [1, 6]), (5, [*range(10)]), (7, [0])])
def test_backwards_the_network_reads_what_it_recalls(in_node, depth, labels):
    run = """([depth, labels]) => labels.map((label) => {
      const frames = [...P.recall(P.data.networks[depth], P.data.mean, label)];
      return { gaps: frames.map((f) => f.gap), x: [...frames.at(-1).x] };
    })"""
    found = in_node(run, depth, labels)
    gaps = torch.tensor([f["gaps"] for f in found], dtype=torch.float64)
    assert (gaps[:, -20:].mean(1) < gaps[:, :3].mean(1) / 2).all()
    x = torch.tensor([f["x"] for f in found], dtype=torch.float64)
    read = hop.solve(NETS[depth], x, even_odd=True, max_iter=MAX_ITER).output.argmax(1)
    assert read.tolist() == labels


def gap(net, x, label):
    """E at rest with the label held, less E at rest without it: hoplib's, layer by layer."""
    free = hop.solve(net, x, even_odd=True, tol=1e-12, max_iter=2000).state.detach()
    held = free.clone()
    one = torch.nn.functional.one_hot(torch.tensor([label]), 10).double()
    with torch.no_grad():
        for _ in range(500):
            net.layer(held, -1).copy_(one)
            held = torch.cat([*(net.layer(net.step(held, x), l) for l in net.hidden[:-1]), one], 1)
    return (net.energy(held, x) - net.energy(free, x)).sum()


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_is_one_small_file_and_always_the_same(html):
    text = html.read_text()
    assert text == build.page()
    assert len(text) < 900_000
    assert ways.FILE.stat().st_size < 700_000
    assert "src=" not in text.replace("default-src=", "")


def test_what_the_page_says_of_its_networks_is_so():
    data = hop.load_data("mnist", device="cpu", dtype=torch.float64)
    for depth, net in NETS.items():
        known = KNOWN["networks"][depth]
        assert list(net.layers) == known["layers"]
        sol = hop.solve(net, data.test.x, even_odd=True, max_iter=MAX_ITER)
        accuracy = (sol.output.argmax(1) == data.test.label).double().mean().item()
        assert abs(accuracy - known["test_accuracy"]) < 5e-4


def draw_a_one(page):
    box = page.locator(".pad").bounding_box()
    x, top, bottom = box["x"] + box["width"] / 2, box["y"] + 0.2 * box["height"], box["y"] + 0.8 * box["height"]
    page.mouse.move(x + 6, top)
    page.mouse.down()
    page.mouse.move(x - 6, bottom, steps=20)
    page.mouse.up()


def cards(page):
    return {c.get_attribute("data-way"): c for c in page.locator(".card").all()}


def test_a_drawn_digit_settles_and_the_over_relaxed_way_ends_first(page):
    draw_a_one(page)
    found = cards(page)
    assert [c.get_attribute("data-status") for c in found.values()] == ["converged"] * 4
    assert [c.get_attribute("data-answer") for c in found.values()] == ["1"] * 4
    counts = {name: int(c.get_attribute("data-iterations")) for name, c in found.items()}
    assert list(counts) == list(ways.COLOURS)
    assert min(counts, key=counts.get) == "over-relaxed even-odd"
    assert max(counts, key=counts.get) == "synchronous"
    x = torch.tensor(page.evaluate("playground.values.image"), dtype=torch.float64)[None]
    solved = ways.settle(NETS[7], x, KNOWN["networks"][7]["omega"], MAX_ITER)
    assert counts == {name: int(sol.iterations) + 2 for name, sol in solved.items()}


def test_play_pause_and_step(visit):
    page = visit(reduced_motion="no-preference")  # it plays by itself
    page.wait_for_selector(".playground:not([data-t='0'], [data-t='1'], [data-t='2'])")
    page.get_by_role("button", name="Pause").click()
    t = int(page.locator(".playground").get_attribute("data-t"))
    page.get_by_role("button", name="Step").click()
    assert int(page.locator(".playground").get_attribute("data-t")) == t + 1
    page.get_by_role("button", name="To start").click()
    assert {c.get_attribute("data-iterations") for c in cards(page).values()} == {"0"}


def test_noise_hiding_gain_and_depth(page):
    before = page.evaluate("playground.values.image")
    page.get_by_label("noise").press("ArrowRight")
    assert page.evaluate("playground.values.image") != before
    page.get_by_label("hide from below").press("End")
    assert sum(page.evaluate("playground.values.image.slice(-28)")) < 28 * 0.2
    for depth, net in NETS.items():
        page.get_by_role("group", name="layers").get_by_role("button", name=str(depth), exact=True).click()
        known = KNOWN["networks"][depth]
        assert f"{100 * known['test_accuracy']:.1f} %" in page.locator(".facts").inner_text()
        assert page.locator(".card").first.locator(".layer").count() == len(net.layers) - 2
        assert page.get_by_label("ω, over-relaxation").input_value() == f"{known['omega']:g}"


def test_a_digit_that_only_synchronous_updates_cannot_settle(page):
    page.locator(".sample").nth(20).click()
    sync, *others = (c.get_attribute("data-status") for c in cards(page).values())
    assert (sync, others) == ("cycling", ["converged"] * 3)
    page.locator(".chains .verdict", has_text="different places").wait_for()


def test_the_two_chains_are_seen(page):
    figure = page.locator(".chains figure").first
    assert (int(figure.get_attribute("data-circles")) > 20, figure.get_attribute("data-squares")) == (True, "0")
    page.get_by_role("slider", name="at time").press("ArrowRight")
    assert (figure.get_attribute("data-circles"), int(figure.get_attribute("data-squares")) > 20) == ("0", True)


def test_backwards_it_remembers_the_label(page):
    page.get_by_role("group", name="label").get_by_role("button", name="0", exact=True).click()
    page.wait_for_selector(".backwards[data-done][data-label='0']")
    assert page.locator(".backwards").get_attribute("data-answer") == "0"


def test_it_can_be_used_by_keyboard_alone(page):
    pad = page.locator(".pad")
    pad.focus()
    for key in ["ArrowUp"] * 10 + [" "] + ["ArrowDown"] * 20 + [" "]:
        page.keyboard.press(key)
    assert cards(page)["even-odd"].get_attribute("data-answer") == "1"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Wipe"


def test_it_can_be_rendered_before_it_is_in_the_page(page):
    """As JupyterLab may do it: nothing is lost, and its ink takes the theme's colour once it is there."""
    page.evaluate("void playground.render({ model: playground.model, el: detached = document.createElement('div') })")
    counts = page.evaluate("[...detached.querySelectorAll('.card')].map((card) => +card.dataset.iterations)")
    assert len(counts) == 4
    assert min(counts) > 0
    page.evaluate("document.body.append(detached)")
    page.wait_for_function("""() => {
      const seen = detached.querySelector(".seen canvas"), { data } = seen.getContext("2d").getImageData(0, 0, 28, 28);
      const theme = getComputedStyle(seen).color.match(/\\d+/g), ink = data.findIndex((v, i) => i % 4 == 3 && v > 250);
      return ink >= 0 && theme.every((v, i) => Math.abs(v - data[ink - 3 + i]) < 3);
    }""")


def test_its_keys_stay_in_it(page):
    """Only commands go on to the page around it: those with Control or Alt, and Shift Enter."""
    page.evaluate("heard = []; document.addEventListener('keydown', (e) => { heard.push(e.key) })")
    slider = page.get_by_label("noise")
    for key in ("ArrowRight", "ArrowDown", "d", "Escape", "Enter"):
        slider.press(key)
    page.locator(".pad").press("ArrowLeft")
    assert page.evaluate("heard") == []
    slider.press("Shift+Enter")
    assert page.evaluate("heard") == ["Enter"]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_it_fits_its_window(page, width, scheme, tmp_path_factory):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_selector(".backwards[data-done]")
    page.screenshot(path=tmp_path_factory.getbasetemp() / f"playground-{width}-{scheme}.png", full_page=True)


# -- the widget ----------------------------------------------------------------------------------------------------


def test_the_widget_carries_the_same_component():
    pytest.importorskip("anywidget")
    from playground.widget import Playground

    widget = Playground(depth=5)
    assert widget.networks == ways.FILE.read_bytes()
    assert "export default { render }" in widget._esm
    assert str(build.css()) == str(widget._css)
