// How a HAM settles, in four ways. Numbers only: node runs this file as a browser does. All in float64.
//
// A network is {layers, W, b}: W[l] (n_{l+1} × n_l, row by row) joins layers l and l + 1, b[l] belongs to layer l, and
// layer 0 is the input x. A state is an array s of layers, s[1] … s[L]; s[0] is not used.

export const TOL = 1e-4; // the paper's criterion
export const KAPPA = 4; // max |ρ''/ρ'| of ρ(s) = σ(4s − 2)

// name → even and odd layers in turn, or all at once; with Anderson acceleration; over-relaxed
export const WAYS = {
  synchronous: {},
  "even-odd": { evenOdd: true },
  "even-odd + Anderson": { evenOdd: true, anderson: true },
  "over-relaxed even-odd": { evenOdd: true, relaxed: true },
};

const range = (a, b) => Array.from({ length: b - a + 1 }, (_, i) => a + i);

// -- the network ------------------------------------------------------------------------------------------------

export const rho = (s) => 1 / (1 + Math.exp(2 - 4 * s));

/** L with ∂L/∂s = ρ: softplus(4s − 2)/4, without overflow. */
export function lagrangian(s) {
  const u = 4 * s - 2;
  return (Math.max(u, 0) + Math.log1p(Math.exp(-Math.abs(u)))) / 4;
}

const half = (bits) => {
  const sign = bits & 0x8000 ? -1 : 1,
    exponent = (bits >> 10) & 31,
    fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
};

/** The networks by their depth and the sample digits, of which the last ones cycle, in a safetensors file (an ArrayBuffer). */
export function readNetworks(buffer) {
  const view = new DataView(buffer),
    start = 8 + Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  const tensor = (name) => {
    const {
      dtype,
      data_offsets: [a, b],
    } = header[name];
    if (dtype === "U8") return new Uint8Array(buffer, start + a, b - a);
    return Float64Array.from({ length: (b - a) / 2 }, (_, i) => half(view.getUint16(start + a + 2 * i, true)));
  };
  const networks = {};
  for (const [depth, facts] of Object.entries(JSON.parse(header.__metadata__.networks))) {
    const links = range(0, facts.layers.length - 2);
    const W = links.map((l) => tensor(`${depth}.links.${l}.W`));
    networks[depth] = { ...facts, W, b: [null, ...links.map((l) => tensor(`${depth}.b.${l}`))] };
  }
  const mean = Float64Array.from(tensor("mean"), (v) => v / 255),
    labels = tensor("labels"),
    pixels = tensor("samples");
  const images = Array.from(labels, (_, i) =>
    Float64Array.from(pixels.subarray(784 * i, 784 * i + 784), (v) => v / 255),
  );
  return {
    networks,
    samples: images.map((image, i) => ({ image, label: labels[i] })),
    cycling: +header.__metadata__.cycling,
    mean,
  };
}

/** The network with all its weights, but not its biases, times the gain. */
export const scaled = (net, gain) => (gain === 1 ? net : { ...net, W: net.W.map((w) => w.map((v) => gain * v)) });

/** h += W r */
function push(W, r, h) {
  for (let i = 0, k = 0; i < h.length; i++) {
    let sum = 0;
    for (let j = 0; j < r.length; j++, k++) sum += W[k] * r[j];
    h[i] += sum;
  }
  return h;
}

/** h += Wᵀ r */
function pull(W, r, h) {
  for (let i = 0, k = 0; i < r.length; i++) for (let j = 0; j < h.length; j++, k++) h[j] += W[k] * r[i];
  return h;
}

/** b + U ρ(x), layer by layer: constant while the network settles. */
export const drive = (net, x) => net.b.map((b, l) => (l === 1 ? push(net.W[0], x.map(rho), b.slice()) : b));

/** h_l = W_{l−1} ρ(s_{l−1}) + W_lᵀ ρ(s_{l+1}) + drive_l, from the activations r = ρ(s). */
function field(net, d, r, l) {
  const h = d[l].slice();
  if (l > 1) push(net.W[l - 1], r[l - 1], h);
  if (l < net.layers.length - 1) pull(net.W[l], r[l + 1], h);
  return h;
}

/** E(s) = Σ s ρ − L(s) − drive ρ, less ρ_{l+1} W_l ρ_l of every link: Eq. (3) without the terms of the input alone. */
export function energy(net, d, s) {
  const r = s.map((layer) => layer && layer.map(rho));
  let E = 0;
  for (let l = 1; l < net.layers.length; l++) {
    const up = l > 1 ? push(net.W[l - 1], r[l - 1], new Float64Array(r[l].length)) : null;
    for (let i = 0; i < r[l].length; i++) {
      E += r[l][i] * (s[l][i] - d[l][i] - (up ? up[i] : 0)) - lagrangian(s[l][i]);
    }
  }
  return E;
}

export const zeros = (net) => net.layers.map((n, l) => (l ? new Float64Array(n) : null));

// -- sweeps -----------------------------------------------------------------------------------------------------

/**
 * One iteration s ↦ f(s), with every neuron updated once: {f, kept, join}.
 *
 * `kept` are the layers that f looks at. In even-odd sweeps without relaxation these are the layers of the output's
 * parity: the others follow from them, and `join` puts them into the field of the newest. `held` layers do not move.
 */
export function sweep(net, d, way, { omega = 1, held = [] } = {}) {
  const L = net.layers.length - 1,
    all = range(1, L);
  const of = (parity) => all.filter((l) => (L - l) % 2 === parity);
  const blocks = way.evenOdd ? [of(1), of(0)] : [all];
  const relaxed = way.relaxed && omega > 1;
  const clip = relaxed ? (-2 * Math.log(omega - 1)) / (KAPPA * omega) : 0;

  const settled = (h, s) => {
    // s ← h, and beyond by (ω − 1) of the way, but never by more than keeps the energy down
    if (relaxed) for (let i = 0; i < h.length; i++) h[i] += (omega - 1) * Math.max(-clip, Math.min(clip, h[i] - s[i]));
    return h;
  };
  const turn = (s, r, block) => {
    const moving = block.filter((l) => !held.includes(l));
    const fields = moving.map((l) => field(net, d, r, l));
    moving.forEach((l, i) => {
      s[l] = settled(fields[i], s[l]);
    });
  };
  const f = (before) => {
    const s = before.slice(),
      r = s.map((layer) => layer && layer.map(rho));
    for (const block of blocks) {
      turn(s, r, block);
      for (const l of block) r[l] = s[l].map(rho);
    }
    return s;
  };
  const join = (s) => {
    if (!way.evenOdd || way.relaxed) return s;
    const joined = s.slice();
    turn(
      joined,
      s.map((layer) => layer && layer.map(rho)),
      blocks[0],
    );
    return joined;
  };
  return { f, join, kept: way.evenOdd && !way.relaxed ? blocks[1] : all };
}

const dot = (a, b, kept) =>
  kept.reduce((sum, l) => {
    for (let i = 0; i < a[l].length; i++) sum += a[l][i] * b[l][i];
    return sum;
  }, 0);
const combine = (terms, kept) => {
  // Σ c · s over the terms [c, s], in the kept layers
  const sum = [];
  for (const l of kept) sum[l] = terms[0][1][l].map((_, i) => terms.reduce((v, [c, s]) => v + c * s[l][i], 0));
  return sum;
};
const norm = (a, kept) => Math.sqrt(dot(a, a, kept));
const distance = (a, b, kept) =>
  norm(
    combine(
      [
        [1, a],
        [-1, b],
      ],
      kept,
    ),
    kept,
  );

/** ‖g − before‖/‖g‖ over the kept layers. */
export const residual = (g, before, kept) => distance(g, before, kept) / norm(g, kept);

// -- Anderson acceleration --------------------------------------------------------------------------------------

/** A x = 1 for a small matrix, by elimination with pivots. */
function solveOnes(A) {
  const n = A.length,
    M = A.map((row) => [...row, 1]);
  for (let k = 0; k < n; k++) {
    const p = range(k, n - 1).reduce((best, i) => (Math.abs(M[i][k]) > Math.abs(M[best][k]) ? i : best), k);
    [M[k], M[p]] = [M[p], M[k]];
    for (let i = k + 1; i < n; i++) {
      const q = M[i][k] / M[k][k];
      for (let j = k; j <= n; j++) M[i][j] -= q * M[k][j];
    }
  }
  const x = Array(n).fill(0);
  for (let i = n - 1; i >= 0; i--)
    x[i] = (M[i][n] - range(i + 1, n - 1).reduce((v, j) => v + M[i][j] * x[j], 0)) / M[i][i];
  return x;
}

/** next(z, g): the iterate after z, whose map value is g. Mixes the last m map values after one plain step. */
export function anderson(kept, { m = 4, mu = 1e-10 } = {}) {
  const F = [],
    G = []; // the newest last
  return (z, g) => {
    F.push(
      combine(
        [
          [1, g],
          [-1, z],
        ],
        kept,
      ),
    );
    G.push(g);
    if (F.length > m) (F.shift(), G.shift());
    if (F.length === 1) return g;
    const gram = F.map((a, i) => F.map((b, j) => dot(a, b, kept) + (i === j ? mu : 0)));
    const alpha = solveOnes(gram),
      sum = alpha.reduce((a, b) => a + b);
    if (!alpha.every((a) => Number.isFinite(a / sum))) return g;
    const mixed = g.slice();
    Object.assign(
      mixed,
      combine(
        G.map((s, i) => [alpha[i] / sum, s]),
        kept,
      ),
    );
    const taken = distance(g, mixed, kept) / norm(mixed, kept) < norm(F.at(-1), kept) / norm(z, kept);
    return taken ? mixed : g; // the safeguard
  };
}

// -- settling ---------------------------------------------------------------------------------------------------

/**
 * The network on the input x from s⁰ = 0 until the criterion: every state on the way, with its energy and residual.
 *
 * states[k] and energies[k] are those after k iterations. residuals[k] compares the map values k + 1 and k + 2, and
 * `iterations` is the paper's count, the first k with residuals[k] < tol: k + 2 iterations were made to see it.
 */
export function settle(net, x, way, { omega = 1, tol = TOL, maxIter = 200 } = {}) {
  const d = drive(net, x),
    { f, join, kept } = sweep(net, d, way, { omega });
  const next = way.anderson ? anderson(kept) : (z, g) => g;
  const states = [zeros(net)],
    residuals = [],
    recent = [];
  let z = states[0],
    status = "max iter";
  for (let k = 0; k < maxIter; k++) {
    const g = f(z);
    states.push(join(g));
    recent.push(g);
    if (k > 0) residuals.push(residual(g, recent.at(-2), kept));
    if (recent.length > 3) recent.shift();
    const r = residuals.at(-1);
    if (r < tol || Number.isNaN(r)) {
      status = r < tol ? "converged" : "not finite";
      break;
    }
    z = next(z, g);
  }
  if (status === "max iter" && residual(recent.at(-1), recent[0], kept) < 1e-3 * residuals.at(-1)) status = "cycling";
  const iterations = residuals.length - (status === "converged" ? 1 : 0);
  return { states, residuals, energies: states.map((s) => energy(net, d, s)), iterations, status };
}

/** The ten numbers of the output layer. */
export const output = (s) => s.at(-1);

export const argmax = (values) => values.reduce((best, v, i) => (v > values[best] ? i : best), 0);

// -- the two chains of a synchronous network (Appendix E) -----------------------------------------------------------

/** ‖change of layer l at time n‖ after a nudge of layer `at` at time `when`: [l][n], exactly 0 where nothing arrives. */
export function ripple(net, x, at, when, times) {
  const { f } = sweep(net, drive(net, x), WAYS.synchronous);
  let s = zeros(net),
    nudged = s;
  const change = net.layers.map(() => [0]);
  for (let n = 0; n <= times; n++) {
    if (n > 0) ((s = f(s)), (nudged = n > when ? f(nudged) : s));
    if (n === when) nudged = s.map((layer, l) => (l === at ? layer.map((v) => v + 0.1) : layer));
    for (let l = 1; l < s.length; l++) change[l][n] = distance(nudged, s, [l]);
  }
  return change;
}

// -- noise --------------------------------------------------------------------------------------------------------

/** A generator of normal numbers, always the same for a seed: mulberry32, then Box and Muller. */
export function normals(seed) {
  let a = seed;
  const uniform = () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

const unit = (v) => Math.max(0, Math.min(1, v));

/** The image with its lower part hidden, then with noise on every pixel. */
export function disturb(image, { noise = 0, hidden = 0, seed = 1 } = {}, normal = normals(seed)) {
  const shown = 784 - 28 * Math.round(28 * hidden);
  return image.map((v, i) => unit((i < shown ? v : 0) + noise * normal()));
}

// -- backwards: from a label to pixels ----------------------------------------------------------------------------

/** Where the network comes to rest from the state s, by even-odd sweeps with the layers `held`. */
export function rest(net, x, s, { held = [], sweeps = 1000, tol = 1e-10 } = {}) {
  const { f, join } = sweep(net, drive(net, x), WAYS["even-odd"], { held });
  for (let k = 0, r = Infinity; k < sweeps && r > tol; k++) {
    const before = s;
    s = f(s);
    r = residual(s, before, range(1, s.length - 1));
  }
  return join(s);
}

/**
 * What a label costs: E(at rest with the label held) − E(at rest without it), and how it falls: {gap, down}.
 *
 * The gap is 0 where the network gives that answer by itself; terms of the input alone cancel. By the envelope theorem
 * its gradient by x is −ρ'(x) ⊙ Uᵀ(ρ(s₁ held) − ρ(s₁ free)); `down` is the opposite.
 */
export function gap(net, x, label, options = {}) {
  const L = net.layers.length - 1,
    d = drive(net, x),
    start = zeros(net);
  const free = rest(net, x, start, options);
  const held = rest(
    net,
    x,
    start.with(
      L,
      start[L].map((_, i) => (i === label ? 1 : 0)),
    ),
    { ...options, held: [L] },
  );
  const pulled = pull(
    net.W[0],
    held[1].map((v, i) => rho(v) - rho(free[1][i])),
    new Float64Array(x.length),
  );
  const down = pulled.map((v, i) => 4 * rho(x[i]) * (1 - rho(x[i])) * v);
  return { gap: energy(net, d, held) - energy(net, d, free), down };
}

/** The 3 × 3 binomial blur of a 28 × 28 image: symmetric and positive, so that a blurred gradient still descends. */
function blur(v) {
  const along = (a, stride) =>
    a.map((c, i) => {
      const k = Math.floor(i / stride) % 28; // the place in its row or column
      return ((k > 0 ? a[i - stride] : 0) + 2 * c + (k < 27 ? a[i + stride] : 0)) / 4;
    });
  return along(along(v, 1), 28);
}

/**
 * The network run backwards: images x on which the label costs less and less energy, one after the other, {x, gap}.
 *
 * Stochastic gradient descent on the gap, on average over noisy copies of x: without noise a change that no eye sees is
 * enough for any answer. Each step follows the blurred gradient of two copies; the steps become shorter.
 */
export function* recall(net, x, label, { steps = 60, length = 0.5, noise = 0.4, copies = 2, seed = 1 } = {}) {
  const normal = normals(seed),
    rough = { sweeps: 40, tol: 1e-3 };
  for (let k = 0; k <= steps; k++) {
    const found = Array.from({ length: copies }, () => gap(net, disturb(x, { noise }, normal), label, rough));
    yield { x, gap: found.reduce((sum, { gap }) => sum + gap / copies, 0) };
    const step = blur(x.map((_, i) => found.reduce((sum, { down }) => sum + down[i], 0)));
    const scale = (length * (1 - k / steps)) / (Math.hypot(...step) || 1);
    x = x.map((v, i) => unit(v + scale * step[i]));
  }
}
