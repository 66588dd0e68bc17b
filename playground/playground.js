// The playground: a digit, the network that settles on it four ways, its two chains, and the network run backwards.
//
// `export default { render }` is what anywidget asks for; the page calls the same. What moves is only a clock t: all
// states up to the criterion are computed at once (a few milliseconds), and the pictures show those at t.
import {
  TOL,
  WAYS,
  argmax,
  disturb,
  drive,
  energy,
  output,
  readNetworks,
  recall,
  rest,
  rho,
  ripple,
  scaled,
  settle,
  zeros,
} from "./settle.js";

const MAX_ITER = 200;
const COLOURS = {
  // seaborn's "colorblind"
  synchronous: "#0173b2",
  "even-odd": "#de8f05",
  "even-odd + Anderson": "#029e73",
  "over-relaxed even-odd": "#cc78bc",
};
const MEANING = {
  synchronous: "all layers at once",
  "even-odd": "odd layers, then even layers",
  "even-odd + Anderson": "the same, mixing the last four results",
  "over-relaxed even-odd": "the same, each step ω times as far",
};
const CHAINS = ["#858c96", COLOURS["even-odd"]]; // the one that even-odd updates leave out, and the one they compute

// -- digits -----------------------------------------------------------------------------------------------------

/** Strokes, lists of points [x, y] in a unit square, as MNIST would have them: 20 pixels tall or wide, centred by mass. */
export function raster(strokes) {
  const points = strokes.flat(),
    image = new Float64Array(784);
  if (!points.length) return image;
  const [x0, x1, y0, y1] = [0, 1].flatMap((k) => [
    Math.min(...points.map((p) => p[k])),
    Math.max(...points.map((p) => p[k])),
  ]);
  const scale = 17.6 / Math.max(x1 - x0, y1 - y0, 0.3),
    pen = 1.15;
  const draw = (dx, dy) =>
    image.forEach((_, i) => {
      const x = (i % 28) + 0.5 - dx,
        y = Math.floor(i / 28) + 0.5 - dy;
      let d = Infinity;
      for (const stroke of strokes) {
        for (let j = 0; j < stroke.length; j++) {
          const [[ax, ay], [bx, by]] = [stroke[Math.max(j - 1, 0)], stroke[j]].map(([u, v]) => [scale * u, scale * v]);
          const ux = bx - ax,
            uy = by - ay;
          const along = Math.max(0, Math.min(1, ((x - ax) * ux + (y - ay) * uy) / (ux * ux + uy * uy || 1)));
          d = Math.min(d, Math.hypot(x - ax - along * ux, y - ay - along * uy));
        }
      }
      image[i] = Math.max(0, Math.min(1, pen + 0.5 - d));
    });
  const middle = [14 - (scale * (x0 + x1)) / 2, 14 - (scale * (y0 + y1)) / 2];
  draw(...middle);
  const mass = image.reduce((a, b) => a + b, 0),
    mean = (of) => image.reduce((sum, v, i) => sum + v * of(i), 0) / mass;
  draw(middle[0] + 13.5 - mean((i) => i % 28), middle[1] + 13.5 - mean((i) => Math.floor(i / 28)));
  return image;
}

// -- pieces of a page -------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function element(node, attributes = {}, children = []) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...[children].flat());
  return node;
}
const h = (tag, attributes, children) => element(document.createElement(tag), attributes, children);
const g = (tag, attributes, children) => element(document.createElementNS(SVG, tag), attributes, children);

/** A labelled slider that shows its value. */
function slider(label, { min, max, step, value, text = String, title = "" }, change) {
  const shown = h("output", {}, text(value));
  const input = h("input", { type: "range", min, max, step, value, "aria-label": label });
  input.addEventListener("input", () => {
    shown.textContent = text(+input.value);
    change(+input.value);
  });
  const set = (v) => {
    input.value = v;
    shown.textContent = text(v);
  };
  return { el: h("label", { class: "slider", title }, [h("span", {}, label), input, shown]), input, set };
}

/** Buttons of which one is pressed. */
function choice(label, options, value, change) {
  const buttons = options.map(([key, text]) =>
    h(
      "button",
      {
        type: "button",
        onclick: () => {
          set(key);
          change(key);
        },
      },
      text,
    ),
  );
  const set = (key) => buttons.forEach((b, i) => b.setAttribute("aria-pressed", options[i][0] === key));
  set(value);
  return {
    el: h("div", { class: "choice", role: "group", "aria-label": label }, [h("span", {}, label), ...buttons]),
    set,
  };
}

/** Values from 0 to 1 as pixels of one colour, on whatever ground the theme has. */
function paint(canvas, values, colour) {
  const [r, gr, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const image = new ImageData(canvas.width, canvas.height);
  values.forEach((v, i) => image.data.set([r, gr, b, Math.round(255 * Math.max(0, Math.min(1, v)))], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}
const pixels = (width, height, label) =>
  h("canvas", { class: "pixels", width, height, role: "img", "aria-label": label });

const inkOf = (el) => {
  // the theme's colour of text, as #rrggbb; what is not in a page yet has none
  const [r, gr, b] = getComputedStyle(el).color.match(/\d+/g) ?? [128, 128, 128];
  return "#" + [r, gr, b].map((v) => (+v).toString(16).padStart(2, "0")).join("");
};

/** Keys pressed here are meant for what is here: JupyterLab would move to another cell, or delete this one. */
const keep = (e) => {
  const command = e.ctrlKey || e.metaKey || e.altKey || (e.shiftKey && e.key === "Enter");
  if (!command) e.stopPropagation();
};

const power = (e) => "10" + [...String(e)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[+c])).join("");

/**
 * A chart whose axis is logarithmic from 10^low up, or linear where low is null: update(series, t, end) draws each
 * series [colour, points [k, value]] up to t.
 */
function chart(title, low, { line = null, height = 190 } = {}) {
  const svg = g("svg", { class: "chart", role: "img", height }),
    el = h("figure", {}, [h("figcaption", {}, title), svg]);
  let last = null;
  const draw = () => {
    if (!last || !svg.clientWidth) return;
    const [series, t, end] = last,
      width = svg.clientWidth,
      [left, right, top, bottom] = [42, 10, 8, 26];
    const log = low !== null,
      values = series.flatMap(([, points]) => points.map(([, v]) => v));
    const scale = log ? (v) => Math.log10(Math.max(v, 10 ** low)) : (v) => v;
    const from = log ? low : Math.min(0, ...values),
      to = scale(Math.max(...values));
    const gap = (log ? [1, 2, 5] : [0.2, 0.5, 1, 2, 5, 10, 20]).find((u) => to - from <= 5 * u) || 50;
    const unit = log ? 1 : gap,
      least = unit * Math.floor(from / unit);
    const high = unit * Math.ceil(Math.max(to, least + unit) / unit - 1e-9);
    const x = (k) => left + ((width - left - right) * k) / Math.max(end, 1);
    const y = (v) => top + ((height - top - bottom) * (high - scale(v))) / (high - least);
    const marks = [],
      ticks = [1, 2, 5, 10, 20, 50, 100].find((s) => end / s <= (width > 400 ? 9 : 5)) || 200;
    for (let e = least; e <= high + unit / 2; e += gap) {
      const at = y(log ? 10 ** e : e),
        zero = !log && Math.abs(e) < gap / 2;
      marks.push(g("line", { class: zero ? "grid zero" : "grid", x1: left, x2: width - right, y1: at, y2: at }));
      marks.push(
        g(
          "text",
          { x: left - 6, y: at + 4, "text-anchor": "end" },
          log ? power(e) : (zero ? 0 : e).toFixed(1).replace("-", "−"),
        ),
      );
    }
    for (let k = 0; k <= end; k += ticks)
      marks.push(g("text", { x: x(k), y: height - 8, "text-anchor": "middle" }, String(k)));
    if (line) {
      marks.push(g("line", { class: "criterion", x1: left, x2: width - right, y1: y(line), y2: y(line) }));
      const place = { x: width - right - 12, y: y(line) + 15, "text-anchor": "end" }; // where no way goes on
      marks.push(g("text", { class: "criterion", ...place }, `settled: ${power(Math.log10(line))}`));
    }
    for (const [colour, points] of series) {
      const shown = points.filter(([k]) => k <= t);
      if (!shown.length) continue;
      marks.push(
        g("polyline", {
          points: shown.map(([k, v]) => `${x(k).toFixed(1)},${y(v).toFixed(1)}`).join(" "),
          stroke: colour,
        }),
      );
      marks.push(g("circle", { cx: x(shown.at(-1)[0]), cy: y(shown.at(-1)[1]), r: 4, fill: colour }));
    }
    svg.replaceChildren(...marks);
  };
  const watcher = new ResizeObserver(draw);
  watcher.observe(svg);
  return {
    el,
    stop: () => watcher.disconnect(),
    update: (...now) => {
      last = now;
      draw();
    },
    say: (text) => svg.setAttribute("aria-label", text),
  };
}

// -- the digit --------------------------------------------------------------------------------------------------

/** The pad to draw on, with the mouse, a finger, or the arrow keys and the space bar; and the samples. */
function digitPicker(data, change) {
  const size = 280,
    pad = h("canvas", {
      class: "pad",
      width: size,
      height: size,
      tabindex: 0,
      role: "application",
      "aria-label": "Drawing pad. Arrow keys move the pen, the space bar puts it down or lifts it, Escape wipes.",
    });
  let strokes = [],
    image = null,
    down = false,
    pen = [0.5, 0.5],
    keyed = false;

  const draw = () => {
    const c = pad.getContext("2d");
    c.clearRect(0, 0, size, size);
    c.fillStyle = c.strokeStyle = inkOf(pad);
    if (image)
      image.forEach((v, i) => {
        c.globalAlpha = v;
        c.fillRect(10 * (i % 28), 10 * Math.floor(i / 28), 10, 10);
      });
    c.globalAlpha = 1;
    c.lineWidth = 22;
    c.lineCap = c.lineJoin = "round";
    for (const stroke of strokes) {
      c.beginPath();
      stroke.concat([stroke[0]].slice(stroke.length - 1)).forEach(([x, y]) => c.lineTo(size * x, size * y));
      c.stroke();
    }
    if (keyed) {
      c.strokeStyle = COLOURS["even-odd"];
      c.lineWidth = 3;
      c.strokeRect(size * pen[0] - 11, size * pen[1] - 11, 22, 22);
    }
  };
  const wipe = () => {
    if (image) {
      image = null;
      strokes = [];
    }
  };
  const done = () => {
    if (strokes.length) change(raster(strokes), null);
  };
  const point = (e) => {
    const box = pad.getBoundingClientRect();
    return [(e.clientX - box.left) / box.width, (e.clientY - box.top) / box.height];
  };
  const clear = () => {
    image = null;
    strokes = [];
    down = false;
    draw();
    change(new Float64Array(784), null);
  };

  pad.addEventListener("pointerdown", (e) => {
    wipe();
    keyed = false;
    down = true;
    strokes.push([point(e)]);
    pad.setPointerCapture(e.pointerId);
    draw();
  });
  pad.addEventListener("pointermove", (e) => {
    if (down && !keyed) {
      strokes.at(-1).push(point(e));
      draw();
    }
  });
  for (const end of ["pointerup", "pointercancel"])
    pad.addEventListener(end, () => {
      if (down) {
        down = false;
        done();
      }
    });
  pad.addEventListener("blur", () => {
    if (keyed && down) done();
    keyed = down = false;
    draw();
  });
  pad.addEventListener("keydown", (e) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (!move && e.key !== " " && e.key !== "Escape") return;
    e.preventDefault();
    if (e.key === "Escape") return clear();
    keyed = true;
    if (move) pen = pen.map((v, k) => Math.max(0.03, Math.min(0.97, v + 0.03 * move[k])));
    else if (down) {
      down = false;
      done();
    } else {
      wipe();
      down = true;
      strokes.push([]);
    }
    if (down) strokes.at(-1).push([...pen]);
    draw();
  });

  const show = (sample) => {
    image = sample.image;
    strokes = [];
    draw();
    change(sample.image, sample.label);
  };
  const buttons = data.samples.map((sample, i) => {
    const canvas = pixels(28, 28, "");
    const many = data.samples.slice(0, i).filter((s) => s.label === sample.label).length + 1;
    const button = h(
      "button",
      {
        type: "button",
        class: "sample",
        "aria-label": `test digit ${sample.label}, number ${many}`,
        onclick: () => show(sample),
      },
      canvas,
    );
    return { button, paint: () => paint(canvas, sample.image, inkOf(button)) };
  });
  const usual = buttons.length - data.cycling;
  const theme = () => {
    buttons.forEach((b) => b.paint());
    draw();
  };
  const el = h("div", { class: "picker" }, [
    h("div", {}, [
      pad,
      h("div", { class: "row" }, [
        h("button", { type: "button", onclick: clear }, "Wipe"),
        h("span", { class: "hint mouse" }, "Draw a digit here, or pick one."),
        h("span", { class: "hint keys" }, "Arrows move, space draws."),
      ]),
    ]),
    h("div", {}, [
      h(
        "div",
        { class: "samples", role: "group", "aria-label": "Digits of MNIST's test set" },
        buttons.slice(0, usual).map((b) => b.button),
      ),
      h("p", { class: "hint" }, "Synchronous updates of 7 layers never settle on these:"),
      h(
        "div",
        { class: "samples", role: "group", "aria-label": "Digits that never settle" },
        buttons.slice(usual).map((b) => b.button),
      ),
    ]),
  ]);
  return { el, show, theme };
}

// -- one way of settling ------------------------------------------------------------------------------------------

/** A card: how far it is, what it reads, the ten outputs, and the neurons of every layer. */
function card(name) {
  const colour = COLOURS[name],
    count = h("strong", { class: "count" }, "0"),
    badge = h("span", { class: "badge" });
  const reads = h("p", { class: "reads" }),
    rises = h("p", { class: "rises" }),
    layers = h("div", { class: "layers" });
  const bars = g("svg", { class: "bars", viewBox: "0 0 200 78", role: "img" });
  const rects = Array.from({ length: 10 }, (_, i) => g("rect", { x: 20 * i + 3, width: 14, fill: colour }));
  const digits = rects.map((_, i) => g("text", { x: 20 * i + 10, y: 75, "text-anchor": "middle" }, String(i)));
  bars.append(g("line", { class: "axis", x1: 0, x2: 200, y1: 62, y2: 62 }), ...rects, ...digits);
  const el = h("article", { class: "card", style: `--way: ${colour}`, "data-way": name }, [
    h("header", {}, [h("h3", {}, name), h("p", { class: "meaning" }, MEANING[name])]),
    h("div", { class: "state" }, [
      h("div", {}, [h("p", {}, [count, " iterations"]), reads]),
      h("div", {}, [badge, rises]),
    ]),
    h("div", { class: "out" }, [bars]),
    layers,
  ]);
  let canvases = [];

  const layout = (net) => {
    canvases = net.layers.slice(1, -1).map((n, i) => {
      const width = Math.min(32, n);
      return { l: i + 1, canvas: pixels(width, Math.ceil(n / width), `the ${n} neurons of layer ${i + 1}`) };
    });
    layers.replaceChildren(
      ...canvases.toReversed().map(({ l, canvas }) => h("div", { class: "layer" }, [h("span", {}, String(l)), canvas])),
    );
  };
  const update = (run, t) => {
    const k = Math.min(t, run.states.length - 1),
      s = run.states[k],
      y = output(s),
      answer = argmax(y);
    const over = k === run.states.length - 1,
      settled = over && run.status === "converged";
    count.textContent = k;
    badge.textContent = settled
      ? "✓ settled"
      : !over
        ? "settling …"
        : run.status === "cycling"
          ? "never settles"
          : "not settled";
    badge.className = `badge ${settled ? "settled" : over ? "unsettled" : ""}`;
    reads.textContent = k ? `reads ${answer}` : " ";
    const up = run.energies.slice(1, k + 1).filter((E, i) => E > run.energies[i] + 1e-9 * (1 + Math.abs(E))).length;
    rises.textContent = up ? `energy rose ${up} ×` : "energy never rose";
    rects.forEach((rect, i) => {
      const v = Math.max(-0.12, Math.min(1.15, y[i]));
      rect.setAttribute("y", v > 0 ? 62 - 50 * v : 62);
      rect.setAttribute("height", 50 * Math.abs(v));
      rect.setAttribute("opacity", i === answer && k ? 1 : 0.45);
      digits[i].setAttribute("class", i === answer && k ? "best" : "");
    });
    bars.setAttribute("aria-label", `outputs of 0 to 9: ${Array.from(y, (v) => v.toFixed(2)).join(", ")}`);
    for (const { l, canvas } of canvases) paint(canvas, s[l].map(rho), colour);
    Object.assign(el.dataset, { iterations: k, status: over ? run.status : "settling", answer });
  };
  return { el, layout, update };
}

// -- the two chains -----------------------------------------------------------------------------------------------

/** Layers against time. Squares and circles are the two chains; what a nudge has reached is filled. */
function lattice(title, onlyOne, pick) {
  const svg = g("svg", { class: "lattice", role: "img" }),
    el = h("figure", {}, [h("figcaption", {}, title), svg]);
  const update = (change, at, when) => {
    const L = change.length - 1,
      times = change[1].length - 1,
      dx = 30,
      dy = 34;
    const X = (n) => 44 + dx * n,
      Y = (l) => 20 + dy * (L - l),
      one = (l, n) => (l + n) % 2 === 0;
    const marks = [],
      nodes = [];
    for (let l = 1; l <= L; l++) {
      marks.push(g("text", { x: 24, y: Y(l) + 4, "text-anchor": "end" }, `s${"₀₁₂₃₄₅₆₇₈"[l]}`));
      for (let n = 0; n <= times; n++) {
        const colour = CHAINS[+one(l, n)],
          hit = change[l][n] > 0,
          start = l === at && n === when;
        const common = {
          stroke: colour,
          fill: hit ? colour : "none",
          class: `${hit ? "hit" : ""} ${start ? "start" : ""}`,
        };
        if (onlyOne && !one(l, n)) {
          nodes.push(g("circle", { class: "skipped", cx: X(n), cy: Y(l), r: 2 }));
          continue;
        }
        for (const j of [l - 1, l + 1]) {
          if (j < 1 || j > L || n === times) continue;
          const live = hit && change[j][n + 1] > 0;
          marks.push(
            g("line", { x1: X(n), y1: Y(l), x2: X(n + 1), y2: Y(j), stroke: colour, class: live ? "live" : "idle" }),
          );
        }
        const node = one(l, n)
          ? g("circle", { cx: X(n), cy: Y(l), r: 8, ...common })
          : g("rect", { x: X(n) - 7, y: Y(l) - 7, width: 14, height: 14, ...common });
        node.addEventListener("click", () => pick(l, n));
        nodes.push(node);
      }
    }
    const step = onlyOne ? 2 : 1;
    for (let n = 0; n <= times; n += step)
      marks.push(g("text", { x: X(n), y: Y(1) + 30, "text-anchor": "middle" }, String(n / step)));
    svg.setAttribute("viewBox", `0 0 ${X(times) + 16} ${Y(1) + 38}`);
    svg.replaceChildren(...marks, ...nodes);
    const reached = change
      .slice(1)
      .flatMap((row, i) => row.map((v, n) => [v > 0, one(i + 1, n)]))
      .filter(([hit]) => hit);
    const round = reached.filter(([, c]) => c).length;
    svg.setAttribute(
      "aria-label",
      `${title}: a nudge of layer ${at} at time ${when} reaches ${round} circles and ${onlyOne ? 0 : reached.length - round} squares`,
    );
    Object.assign(el.dataset, { circles: round, squares: reached.length - round });
  };
  return { el, update };
}

function chainsView() {
  const times = () => (matchMedia("(max-width: 700px)").matches ? 9 : 14);
  let net = null,
    x = null,
    at = 2,
    when = 0;
  const both = lattice("Synchronous: two chains; the numbers are iterations", false, (l, n) => set(l, n));
  const one = lattice("Even-odd: one chain; the numbers are sweeps", true, (l, n) => set(l, n));
  const layer = slider("nudge layer", { min: 1, max: 2, step: 1, value: at }, (v) => set(v, when));
  const time = slider("at time", { min: 0, max: 8, step: 1, value: when }, (v) => set(at, v));
  const verdict = h("p", { class: "verdict", role: "status" });
  const set = (l, n) => {
    [at, when] = [l, n];
    layer.set(at);
    time.set(when);
    draw();
  };
  const draw = () => {
    const change = ripple(net, x, at, when, times());
    both.update(change, at, when);
    one.update(change, at, when);
  };
  const update = (newNet, newX, run) => {
    [net, x] = [newNet, newX];
    layer.input.max = net.layers.length - 1;
    at = Math.min(at, net.layers.length - 1);
    layer.set(at);
    draw();
    verdict.textContent =
      run.status === "converged"
        ? `On this digit the two chains end at the same place: after ${run.states.length - 1} iterations they differ by less than 10⁻⁴ of the state.`
        : run.status === "cycling"
          ? "On this digit the two chains end at different places. The network shows one, then the other, and so swings for ever."
          : `On this digit the two chains still differ after ${run.states.length - 1} iterations.`;
  };
  const el = h("section", { class: "chains" }, [
    h("h2", {}, "Two chains that never meet"),
    h(
      "p",
      {},
      "When all layers are updated at once, a layer takes its new state from its neighbours one step before. So the circles feed only circles and the squares only squares: two separate computations (the paper's Appendix E). Nudge a layer, by a click or with the sliders: the filled marks are those that change. Even-odd updates compute the circles alone.",
    ),
    h("div", { class: "row" }, [layer.el, time.el]),
    h("div", { class: "pair" }, [both.el, one.el]),
    verdict,
  ]);
  return { el, update };
}

// -- backwards ----------------------------------------------------------------------------------------------------

function backwardsView(data) {
  let net = null,
    x = null,
    label = 3,
    from = "mean",
    going = null,
    shown = null;
  const canvas = pixels(28, 28, "the pixels that the network remembers"),
    gapChart = chart("energy that the label costs, by step (below 0: holding the label led to a deeper rest)", null, {
      height: 150,
    });
  const said = h("p", { class: "verdict", role: "status" });
  const labels = choice(
    "label",
    Array.from({ length: 10 }, (_, i) => [i, String(i)]),
    label,
    (v) => {
      label = v;
      start();
    },
  );
  const starts = choice(
    "start from",
    [
      ["mean", "the mean digit"],
      ["digit", "the digit above"],
    ],
    from,
    (v) => {
      from = v;
      start();
    },
  );
  const theme = () => {
    if (shown) paint(canvas, shown, inkOf(canvas));
  };
  const start = () => {
    cancelAnimationFrame(going);
    const steps = recall(net, from === "mean" ? data.mean : x, label),
      gaps = [];
    const frame = () => {
      const { value, done } = steps.next();
      if (done) {
        el.dataset.done = true;
        return;
      }
      gaps.push([gaps.length, value.gap]);
      shown = value.x;
      theme();
      gapChart.update([[COLOURS["even-odd"], gaps]], Infinity, 60);
      const answer = argmax(output(rest(net, value.x, zeros(net), { sweeps: 100, tol: 1e-3 })));
      said.textContent = `Step ${gaps.length - 1}. Shown these pixels without a label, the network reads ${answer}.`;
      Object.assign(el.dataset, { gap: value.gap, answer, label });
      going = requestAnimationFrame(frame);
    };
    delete el.dataset.done;
    frame();
  };
  const el = h("section", { class: "backwards" }, [
    h("h2", {}, "The network run backwards"),
    h(
      "p",
      {},
      "Hold the label and free the pixels. They move so as to lower the energy that the label costs, on average over noisy copies of the image: the energy at rest with the label held, minus the energy at rest without it. At zero the network gives this answer by itself.",
    ),
    h("div", { class: "row" }, [labels.el, starts.el]),
    h("div", { class: "recall" }, [canvas, h("div", {}, [gapChart.el, said])]),
  ]);
  const update = (newNet, newX) => {
    [net, x] = [newNet, newX];
    start();
  };
  return {
    el,
    update,
    theme,
    stop: () => {
      cancelAnimationFrame(going);
      gapChart.stop();
    },
  };
}

// -- all of it ----------------------------------------------------------------------------------------------------

function render({ model, el: root }) {
  const bytes = model.get("networks"),
    data = readNetworks(
      bytes instanceof ArrayBuffer ? bytes : bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength),
    );
  const now = {
    depth: model.get("depth") ?? 7,
    gain: model.get("gain") ?? 1,
    noise: 0,
    hidden: 0,
    speed: 8,
    t: 0,
    playing: false,
  };
  let image = data.samples[0].image,
    x = null,
    net = null,
    runs = {},
    end = 0,
    clock = 0,
    last = 0,
    later = 0;
  now.omega = model.get("omega") ?? data.networks[now.depth].omega;

  const cards = Object.fromEntries(Object.keys(WAYS).map((name) => [name, card(name)]));
  const energies = chart("energy above the lowest rest, by iteration", -6),
    residuals = chart("residual: how much each iteration changes the state", -5, { line: TOL });
  const chains = chainsView(),
    backwards = backwardsView(data),
    seen = pixels(28, 28, "the image that the network sees");
  const caption = h("figcaption"),
    facts = h("p", { class: "facts" }),
    said = h("p", { class: "verdict", role: "status" });

  const draw = () => {
    const t = Math.floor(now.t),
      shown = Object.entries(runs);
    for (const [name, run] of shown) cards[name].update(run, t);
    energies.update(
      shown.map(([name, run]) => [COLOURS[name], run.above]),
      t,
      end,
    );
    residuals.update(
      shown.map(([name, run]) => [COLOURS[name], run.residuals.map((r, k) => [k + 2, r])]),
      t,
      end,
    );
    timeline.input.max = end;
    timeline.set(t);
    play.textContent = now.playing ? "❚❚ Pause" : "▶ Play";
    const ended = shown
      .filter(([, run]) => t >= run.states.length - 1 && run.status === "converged")
      .sort((a, b) => a[1].states.length - b[1].states.length);
    said.textContent =
      ended.map(([name, run]) => `${name}: settled after ${run.states.length - 1}`).join(" · ") ||
      (t ? "None has settled yet." : "At the start all neurons are 0.");
    root.firstChild.dataset.t = t;
  };
  const tick = (time) => {
    if (!now.playing) return;
    now.t = Math.min(end, now.t + (Math.max(0, Math.min(time - last, 100)) * now.speed) / 1000); // a frame may be older than `last`
    last = time;
    if (now.t >= end) now.playing = false;
    draw();
    clock = requestAnimationFrame(tick);
  };
  const go = (playing) => {
    now.playing = playing;
    cancelAnimationFrame(clock);
    last = performance.now();
    if (playing && now.t >= end) now.t = 0;
    draw();
    if (playing) clock = requestAnimationFrame(tick);
  };
  const compute = () => {
    net = scaled(data.networks[now.depth], now.gain);
    x = disturb(image, now);
    runs = Object.fromEntries(
      Object.entries(WAYS).map(([name, way]) => [name, settle(net, x, way, { omega: now.omega, maxIter: MAX_ITER })]),
    );
    const best = Object.values(runs).reduce((a, b) => (b.energies.at(-1) < a.energies.at(-1) ? b : a));
    const lowest = Math.min(
      ...Object.values(runs).flatMap((run) => run.energies),
      energy(net, drive(net, x), rest(net, x, best.states.at(-1))),
    );
    for (const run of Object.values(runs)) run.above = run.energies.map((E, k) => [k, E - lowest]);
    end = Math.max(...Object.values(runs).map((run) => run.states.length - 1));
    paint(seen, x, inkOf(seen));
    energies.say("energy of the four ways against the iteration");
    residuals.say(
      Object.entries(runs)
        .map(([name, run]) => `${name}: ${run.status} after ${run.states.length - 1}`)
        .join(", "),
    );
    model.set("image", Array.from(x));
    for (const key of ["depth", "gain", "omega"]) model.set(key, now[key]);
    model.save_changes();
    now.t = 0;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (still) now.t = end;
    go(!still);
    clearTimeout(later); // the slower views, once the sliders rest
    later = setTimeout(() => {
      chains.update(net, x, runs.synchronous);
      backwards.update(net, x);
    }, 150);
  };
  const rebuild = () => {
    const known = data.networks[now.depth];
    for (const c of Object.values(cards)) c.layout(known);
    facts.textContent = `Layers of ${known.layers.join(" – ")} neurons, trained for ${known.epochs} epochs; it reads ${(100 * known.test_accuracy).toFixed(1)} % of MNIST's test digits (at gain 1). Iterations on average: ${Object.entries(
      known.iterations,
    )
      .map(([name, n]) => `${name} ${n.toFixed(1)}`)
      .join(", ")}.`;
  };

  const picker = digitPicker(data, (v, label) => {
    image = v;
    caption.textContent = label === null ? "what the network sees" : `what the network sees, a ${label}`;
    compute();
  });
  const percent = (v) => `${Math.round(100 * v)} %`,
    digits = (n) => (v) => v.toFixed(n);
  const noise = slider("noise", { min: 0, max: 1, step: 0.05, value: 0, text: percent }, (v) => {
    now.noise = v;
    compute();
  });
  const hidden = slider("hide from below", { min: 0, max: 0.9, step: 0.05, value: 0, text: percent }, (v) => {
    now.hidden = v;
    compute();
  });
  const omega = slider(
    "ω, over-relaxation",
    { min: 1, max: 1.95, step: 0.05, value: now.omega, text: digits(2) },
    (v) => {
      now.omega = v;
      compute();
    },
  );
  const gain = slider(
    "gain of the weights",
    { min: 0.5, max: 4, step: 0.1, value: now.gain, text: (v) => `× ${v.toFixed(1)}` },
    (v) => {
      now.gain = v;
      compute();
    },
  );
  const depth = choice(
    "layers",
    Object.keys(data.networks).map((d) => [+d, d]),
    now.depth,
    (v) => {
      now.depth = v;
      now.omega = data.networks[v].omega;
      omega.set(now.omega);
      rebuild();
      compute();
    },
  );
  const play = h("button", { type: "button", class: "play", onclick: () => go(!now.playing) }, "▶ Play");
  const step = h(
    "button",
    {
      type: "button",
      onclick: () => {
        go(false);
        now.t = Math.min(end, Math.floor(now.t) + 1);
        draw();
      },
    },
    "Step",
  );
  const again = h(
    "button",
    {
      type: "button",
      onclick: () => {
        now.t = 0;
        go(false);
      },
    },
    "To start",
  );
  const finish = h(
    "button",
    {
      type: "button",
      onclick: () => {
        go(false);
        now.t = end;
        draw();
      },
    },
    "To end",
  );
  const timeline = slider("iteration", { min: 0, max: 1, step: 1, value: 0 }, (v) => {
    go(false);
    now.t = v;
    draw();
  });
  const speed = slider("speed", { min: 1, max: 40, step: 1, value: now.speed, text: (v) => `${v} / s` }, (v) => {
    now.speed = v;
  });

  root.replaceChildren(
    h("div", { class: "playground", onkeydown: keep }, [
      h("section", { class: "top" }, [
        picker.el,
        h("div", { class: "settings" }, [
          h("figure", { class: "seen" }, [seen, caption]),
          h("div", { class: "sliders" }, [noise.el, hidden.el, depth.el, gain.el, omega.el]),
          facts,
        ]),
      ]),
      h("section", { class: "run" }, [
        h("div", { class: "transport" }, [play, step, again, finish, timeline.el, speed.el]),
        h(
          "div",
          { class: "cards" },
          Object.values(cards).map((c) => c.el),
        ),
        said,
        h(
          "div",
          { class: "legend", "aria-hidden": true },
          Object.entries(COLOURS).map(([name, c]) => h("span", { style: `--way: ${c}` }, name)),
        ),
        h("div", { class: "pair" }, [energies.el, residuals.el]),
        h(
          "p",
          { class: "note" },
          "An iteration updates every neuron once, in all four ways. The network has settled when an iteration changes its state by less than 10⁻⁴ of it; the paper's count of iterations is smaller by two. For the two even-odd ways in the middle, the state is that of the layers of the output's parity, as in the paper; the others follow from them. Over-relaxed steps are clipped so that the energy never rises.",
        ),
      ]),
      chains.el,
      backwards.el,
    ]),
  );
  const theme = matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => {
    picker.theme();
    backwards.theme();
    paint(seen, x, inkOf(seen));
  };
  theme.addEventListener("change", repaint);
  const placed = new ResizeObserver(repaint); // JupyterLab may put it into the page only after this
  placed.observe(seen);
  const themed = new MutationObserver(repaint); // and has a theme of its own
  themed.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  rebuild();
  picker.show(data.samples[model.get("sample") ?? 0]);
  repaint();
  return () => {
    now.playing = false;
    cancelAnimationFrame(clock);
    clearTimeout(later);
    theme.removeEventListener("change", repaint);
    placed.disconnect();
    themed.disconnect();
    for (const view of [energies, residuals, backwards]) view.stop();
  };
}

export default { render };
