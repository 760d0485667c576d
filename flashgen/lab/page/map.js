// The tile map: the pointer or the arrow keys choose a cell, whose range and state are shown beside the map.
function startMap(map) {
  const svg = document.getElementById("tile-map");
  const cells = svg.querySelector(".fg-cells");
  const readout = document.getElementById("readout");
  const columns = map.rows[0].length;
  const stepQ = map.down * map.tile_q, stepK = map.across * map.tile_kv;
  const box = cells.getBBox();
  const names = ["empty: skipped", "partial: pairs are tested", "full: no pair is tested"];
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  cursor.id = "cursor";
  cursor.setAttribute("visibility", "hidden");
  cells.after(cursor);
  cursor.setAttribute("transform", cells.getAttribute("transform"));
  let row = 0, column = 0;

  function line(tag, text) {
    const made = document.createElement(tag);
    made.textContent = text;
    return made;
  }

  function show(i, j) {
    row = Math.max(0, Math.min(map.rows.length - 1, i));
    column = Math.max(0, Math.min(columns - 1, j));
    const q = row * stepQ, k = column * stepK;
    const qEnd = Math.min(q + stepQ, map.len_q), kEnd = Math.min(k + stepK, map.len_kv);
    const kind = Number(map.rows[row][column]);
    const many = map.down * map.across > 1;
    const format = (n) => n.toLocaleString("en-US");
    const state = many && kind === 1 ? "partial, or a mixture of tiles" : names[kind];
    readout.replaceChildren(
      line("b", `queries ${format(q)} to ${format(qEnd - 1)}`),
      line("b", `keys ${format(k)} to ${format(kEnd - 1)}`),
      line("span", state),
    );
    if (many) readout.append(line("span", `${map.down} × ${map.across} tiles`));
    const at = { x: (k / map.len_kv) * box.width, y: (q / map.len_q) * box.height };
    const size = { width: ((kEnd - k) / map.len_kv) * box.width, height: ((qEnd - q) / map.len_q) * box.height };
    for (const [name, value] of Object.entries({ ...at, ...size })) cursor.setAttribute(name, value);
    cursor.setAttribute("visibility", "visible");
  }

  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(cells.getScreenCTM().inverse());
    if (at.x < 0 || at.y < 0 || at.x >= box.width || at.y >= box.height) return;
    show(
      Math.floor(((at.y / box.height) * map.len_q) / stepQ),
      Math.floor(((at.x / box.width) * map.len_kv) / stepK),
    );
  });
  svg.addEventListener("focus", () => show(row, column));
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const ends = { Home: [row, 0], End: [row, columns], PageUp: [0, column], PageDown: [map.rows.length, column] };
    if (event.key in moves) show(row + moves[event.key][0], column + moves[event.key][1]);
    else if (event.key in ends) show(...ends[event.key]);
    else return;
    event.preventDefault();
  });
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "application");
  svg.setAttribute("aria-describedby", "readout");
}
