// The estimator: the same sums as flashgen.lab.estimate, again with each keystroke.

// The least and the greatest key minus query that a band allows, as Mask.diagonals computes them.
function diagonals(bands, lenQ, lenK) {
  let lower = -lenQ, upper = lenK;
  for (const [band, shift] of [[bands.bottom_right, lenK - lenQ], [bands.top_left, 0]]) {
    if (band.left !== null) lower = Math.max(lower, shift - band.left);
    if (band.right !== null) upper = Math.min(upper, shift + band.right);
  }
  return [lower, upper];
}

// Of the tiles of a row that begins with query q: [first visited, after the last, first full, after the last].
function tilesOfRow(q, bounds, lenQ, lenK, tileQ, tileK) {
  const [lower, upper] = bounds;
  const last = Math.min(q + tileQ, lenQ) - 1;
  const begin = Math.max(0, q + lower), end = Math.min(lenK, last + upper + 1);
  if (lower > upper || begin >= end) return [0, 0, 0, 0];
  const first = Math.floor(begin / tileK), after = Math.ceil(end / tileK);
  const firstFull = Math.max(first, Math.ceil((last + lower) / tileK));
  const reach = q + upper;
  const afterFull = Math.min(after, reach >= lenK - 1 ? after : Math.floor((reach + 1) / tileK));
  return [first, after, firstFull, Math.max(firstFull, afterFull)];
}

function countTiles(data, n) {
  const rows = Math.ceil(n.len_q / n.tile_q), columns = Math.ceil(n.len_kv / n.tile_kv);
  const tiles = rows * columns;
  if (data.bands === null) {
    // Only the tile map knows this mask: the shares stay those of the map.
    const all = data.empty + data.partial + data.full;
    const share = (count) => (all ? Math.round((tiles * count) / all) : 0);
    const partial = share(data.partial), full = Math.min(tiles - partial, share(data.full));
    return { tiles, partial, full, empty: tiles - partial - full };
  }
  const bounds = diagonals(data.bands, n.len_q, n.len_kv);
  let processed = 0, full = 0;
  for (let row = 0; row < rows; row++) {
    const at = tilesOfRow(row * n.tile_q, bounds, n.len_q, n.len_kv, n.tile_q, n.tile_kv);
    processed += at[1] - at[0];
    full += at[3] - at[2];
  }
  return { tiles, partial: processed - full, full, empty: tiles - processed };
}

function estimate(data, n) {
  const found = countTiles(data, n);
  const itemsize = data.itemsizes[n.dtype];
  const processed = found.partial + found.full;
  const naiveScores = n.len_q * n.len_kv, tileScores = processed * n.tile_q * n.tile_kv;
  return {
    ...found,
    processed,
    naive_scores: naiveScores,
    tile_scores: tileScores,
    relative_work: naiveScores ? tileScores / naiveScores : 0,
    flops: 2 * (n.head_dim + n.head_dim_v) * tileScores,
    workspace_saved: naiveScores * itemsize,
    tile_bytes: ((n.tile_q + n.tile_kv) * n.head_dim + n.tile_kv * n.head_dim_v) * itemsize,
  };
}

function scaled(value, base, units) {
  let unit = 0;
  while (value >= base && unit < units.length - 1) { value /= base; unit++; }
  return `${unit ? value.toPrecision(4).replace(/\.?0+$/, "") : value} ${units[unit]}`;
}

function startEstimator(data) {
  const form = document.getElementById("estimator-inputs");
  const error = document.getElementById("estimator-error");
  const whole = (n) => n.toLocaleString("en-US");
  const bytes = (n) => scaled(n, 1024, ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  const texts = {
    processed: (r) => `${whole(r.processed)} of ${whole(r.tiles)}`,
    naive_scores: (r) => whole(r.naive_scores),
    tile_scores: (r) => whole(r.tile_scores),
    relative_work: (r) => `${(100 * r.relative_work).toFixed(1)} %`,
    flops: (r) => scaled(r.flops, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]),
    workspace_saved: (r) => bytes(r.workspace_saved),
    tile_bytes: (r) => bytes(r.tile_bytes),
  };

  function inputs() {
    const numbers = {};
    let wrong = "";
    for (const input of form.elements) {
      if (input.tagName === "SELECT") { numbers[input.name] = input.value; continue; }
      const value = /^\s*\d+\s*$/.test(input.value) ? Number(input.value) : NaN;
      const least = Number(input.min), most = Number(input.max);
      const good = value >= least && value <= most;
      input.setAttribute("aria-invalid", String(!good));
      const name = input.labels[0].firstChild.textContent.trim();
      if (!good && !wrong) wrong = `${name}: give a whole number from ${whole(least)} to ${whole(most)}.`;
      numbers[input.name] = value;
    }
    error.textContent = wrong;
    return wrong ? null : numbers;
  }

  function draw(numbers) {
    const live = document.getElementById("live");
    if (!live || data.bands === null) return;
    const rows = Math.ceil(numbers.len_q / numbers.tile_q), columns = Math.ceil(numbers.len_kv / numbers.tile_kv);
    const stepQ = numbers.tile_q * Math.ceil(rows / 64), stepK = numbers.tile_kv * Math.ceil(columns / 64);
    const down = Math.ceil(numbers.len_q / stepQ), across = Math.ceil(numbers.len_kv / stepK);
    const bounds = diagonals(data.bands, numbers.len_q, numbers.len_kv);
    const paths = { partial: "", full: "" };
    const run = (from, to, row) => (to > from ? `M${from} ${row}h${to - from}v1H${from}z` : "");
    for (let row = 0; row < down; row++) {
      const at = tilesOfRow(row * stepQ, bounds, numbers.len_q, numbers.len_kv, stepQ, stepK);
      paths.partial += run(at[0], at[1], row);
      paths.full += run(at[2], at[3], row);
    }
    live.setAttribute("viewBox", `0 0 ${across} ${down}`);
    const ratio = Math.max(1 / 6, Math.min(2, numbers.len_q / numbers.len_kv));
    live.style.aspectRatio = `1 / ${ratio}`;
    live.querySelector(".empty").setAttribute("d", `M0 0h${across}v${down}H0z`);
    for (const kind of ["partial", "full"]) live.querySelector(`.${kind}`).setAttribute("d", paths[kind]);
  }

  function update() {
    const numbers = inputs();
    if (numbers === null) return;
    const result = estimate(data, numbers);
    for (const [name, text] of Object.entries(texts)) {
      const output = document.getElementById(`out-${name}`);
      output.textContent = text(result);
      output.dataset.value = String(result[name]);
    }
    for (const kind of ["full", "partial"]) {
      const part = document.querySelector(`#tile-bar .${kind}`);
      part.style.width = `${result.tiles ? (100 * result[kind]) / result.tiles : 0}%`;
      part.dataset.value = String(result[kind]);
    }
    document.getElementById("tile-kinds").textContent =
      `${whole(result.full)} full, ${whole(result.partial)} partial, ${whole(result.empty)} skipped`;
    draw(numbers);
  }

  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
}

const data = JSON.parse(document.getElementById("page-data").textContent);
if (data.map !== null) startMap(data.map);
startEstimator(data.estimator);
