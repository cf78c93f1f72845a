// How the model is split: a module tree whose repeated blocks stand once, and a drawing of who holds which part of a tensor.

class SplitTree {
  constructor(box, data) {
    const rows = data.split;
    this.box = box; this.rows = rows; this.data = data; this.meanings = data.meanings;
    this.list = box.querySelector(".tree"); this.count = box.querySelector(".count"); this.drawing = box.querySelector(".drawing");
    const search = box.querySelector("input[type=search]"), minor = box.querySelector("input[type=checkbox]");
    const refresh = () => this.show(search.value, minor.checked);
    search.addEventListener("input", refresh);
    minor.addEventListener("change", refresh);
    box.querySelector(".open-all").addEventListener("click", () => this.list.querySelectorAll("details").forEach((d) => { d.open = true; }));
    box.querySelector(".close-all").addEventListener("click", () => this.list.querySelectorAll("details").forEach((d) => { d.open = false; }));
    refresh();
    const first = rows.find((row) => row.row === "parameter" && row.tensor.shape.length > 1) ?? rows[0];
    if (first) this.pick(first);
  }

  axes(row) { return axesOf(this.data, row); }

  words(row) {
    const cuts = row.row === "operator" ? row.cuts.map((cut) => this.meanings[cut]) : row.tensor.layout;
    return [...stageWords(this.data, row), row.module, row.name, row.target ?? "", row.row, ...cuts].join(" ").toLowerCase();
  }

  show(text, withMinor) {
    const wanted = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const shown = this.rows.filter((row) => {
      const words = this.words(row);
      return (withMinor || !row.minor || wanted.length) && wanted.every((word) => words.includes(word));
    });
    const root = { name: "", children: new Map(), rows: [], times: 1 };
    for (const row of shown) {
      let node = root;
      for (const part of [...stageWords(this.data, row), ...(row.module ? row.module.split(".") : [])]) {
        if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), rows: [], times: 1 });
        node = node.children.get(part);
      }
      node.rows.push(row);
    }
    this.list.replaceChildren(...this.branch(root, 0, wanted.length > 0));
    const all = this.rows.length;
    this.count.textContent = wanted.length ? `${shown.length} of ${all} rows match` : `${shown.length} rows, repeated blocks once`;
    this.count.dataset.rows = shown.length;
  }

  branch(node, depth, all) {
    const made = [];
    for (const child of node.children.values()) {
      let name = child.name, inner = child;
      const stage = child.name.startsWith("stage ");
      while (!stage && inner.children.size === 1 && !inner.rows.length) { inner = [...inner.children.values()][0]; name += `.${inner.name}`; }
      const times = stage ? 1 : repeats(inner);
      const summary = element("summary", {}, element("span", { class: "module" }, name), times > 1 ? element("span", { class: "times" }, `× ${times}`) : null, this.strip(inner));
      const details = element("details", all || depth < (this.data.step.stages.length > 1 ? 1 : 2) ? { open: true } : {}, summary, element("div", { class: "inner" }, ...this.branch(inner, depth + 1, all)));
      made.push(details);
    }
    for (const row of node.rows) made.push(this.line(row));
    return made;
  }

  // The cuts of everything below, as one thin strip per axis.
  strip(node) {
    const counts = {};
    const walk = (n) => { n.rows.forEach((r) => (r.cuts ?? []).forEach((c) => { if (!r.minor) counts[c] = (counts[c] ?? 0) + 1; })); n.children.forEach(walk); };
    walk(node);
    const strip = element("span", { class: "strip", "aria-hidden": "true" });
    for (const [cut, count] of Object.entries(counts)) {
      const part = element("span", {}); part.style.flexGrow = count; part.style.background = `var(--cut-${slug(cut)})`; strip.append(part);
    }
    return strip;
  }

  line(row) {
    const chips = row.row === "operator"
      ? row.cuts.map((cut, a) => this.chip(cut, `${this.axes(row)[a].name}: ${cut}`, this.meanings[cut]))
      : row.tensor.layout.map((placed, a) => element("span", { class: "chip plain" }, `${this.axes(row)[a].name}: ${layoutWord(placed)}`));
    const what = row.row === "operator" ? (row.target === row.name ? "" : row.target) : `parameter ${row.tensor.shape.join(" × ")}`;
    return element("button", { type: "button", class: `row ${row.row}`, onclick: () => this.pick(row), "data-name": row.name },
      element("span", { class: "name" }, row.name), element("span", { class: "what" }, what),
      row.times > 1 ? element("span", { class: "times" }, `× ${row.times}`) : null, element("span", { class: "chips" }, ...chips));
  }

  chip(cut, text, meaning) { return element("span", { class: "chip", title: meaning }, swatch(`var(--cut-${slug(cut)})`), text); }

  pick(row) {
    const axes = this.axes(row), where = [...stageWords(this.data, row), row.module].filter(Boolean).map((word) => `${word} · `).join("");
    const parts = [element("h3", {}, `${where}${row.name}`)];
    if (row.row === "operator") {
      parts.push(element("p", { class: "hint" }, `${row.target}, ${row.source || "no source line"}${row.times > 1 ? `, ${row.times} alike` : ""}. ` +
        row.cuts.map((cut, a) => `${axes[a].name} (${axes[a].size}) ${this.meanings[cut]}${row.loops[a] ? `, loop ${row.loops[a]}` : ""}`).join("; ") + "."));
      const why = element("button", { type: "button", onclick: () => this.onWhy?.(row.name) }, "Why this split?");
      parts.push(why);
      for (const [title, tensors] of [["makes", row.makes], ["reads", row.reads]]) for (const tensor of tensors) parts.push(this.tensor(title, tensor, row));
    } else {
      const words = row.tensor.layout.map((placed, a) => `${axes[a].name} (${axes[a].size}): ${layoutWord(placed)}`).join("; ");
      parts.push(element("p", { class: "hint" }, `At rest, ${bytesText(row.bytes)} on each rank${row.regathered ? "; gathered for use, freed, gathered again for backward" : ""}. ${words}.`));
      parts.push(this.tensor("rests", row.tensor, row));
    }
    this.drawing.replaceChildren(...parts);
  }

  tensor(verb, tensor, row) {
    return element("figure", {}, element("figcaption", {}, `${verb} ${tensor.name} · ${tensor.dtype} [${tensor.shape.join(", ")}] · ${tensor.layout.map(layoutWord).join(", ")}`), layoutDrawing(tensor, this.axes(row), ranksOf(this.data, row)));
  }
}

// The mesh that a row speaks of: that of its stage.
function axesOf(data, row) { return data.step.stages[row.stage].axes; }

function ranksOf(data, row) { return data.step.stages[row.stage].ranks; }

// Which stage a row is of, where there are several.
function stageWords(data, row) { return data.step.stages.length > 1 ? [`stage ${row.stage} · ${rankWord(data.step.stages[row.stage].ranks)}`] : []; }

function repeats(node) {
  let most = 0;
  const walk = (n) => { n.rows.forEach((row) => { most = Math.max(most, row.times); }); n.children.forEach(walk); };
  walk(node);
  return most;
}

function layoutWord(placed) {
  if (placed === "R") return "whole";
  if (placed.startsWith("P")) return `partial ${placed.slice(2, -1)}`;
  return placed.endsWith("+halo") ? `dim ${placed.slice(1, -5)} with halo` : `dim ${placed.slice(1)} cut`;
}

const MOST_CELLS = 16;

// A tensor as a rectangle: cut dims divided, every cell with the ranks that hold it, hatched where the values are partial sums.
function layoutDrawing(tensor, axes, ranks) {
  const cuts = new Map(); // dim -> axes that cut it
  tensor.layout.forEach((placed, a) => {
    if (placed.startsWith("S")) { const dim = Number(placed.slice(1).replace("+halo", "")); cuts.set(dim, [...(cuts.get(dim) ?? []), a]); }
  });
  const partial = tensor.layout.some((placed) => placed.startsWith("P"));
  const dims = tensor.shape.length, cutDims = [...cuts.keys()].sort((a, b) => a - b);
  // Rows and columns of the drawing: the dims that are cut, else the last two.
  let rowDim = cutDims[0] ?? (dims > 1 ? dims - 2 : -1), columnDim = cutDims[1] ?? -1;
  if (columnDim < 0 && dims > 1) {
    if (rowDim === dims - 1) { columnDim = rowDim; rowDim = dims - 2; } else columnDim = dims - 1;
  }
  if (dims === 1) { columnDim = 0; rowDim = -1; }
  const pieces = (dim) => (cuts.get(dim) ?? []).reduce((n, a) => n * axes[a].size, 1);
  const rows = rowDim < 0 ? 1 : pieces(rowDim), columns = columnDim < 0 ? 1 : pieces(columnDim);
  const shownRows = shownCells(rows), shownColumns = shownCells(columns);
  const width = 300, cell = Math.max(22, Math.min(44, 176 / shownRows.length)), height = dims ? cell * shownRows.length : 30, left = 62, top = 20;
  const svg = drawn("svg", { viewBox: `0 0 ${width + left + 6} ${height + top + 6}`, role: "img", class: "layout",
    "aria-label": describeLayout(tensor, axes, rows, columns) });
  const label = (dim, x, y, anchor) => {
    if (dim >= 0) svg.append(drawn("text", { x, y, "text-anchor": anchor, class: "dim" }, `dim ${dim}: ${tensor.shape[dim]}`));
  };
  label(columnDim, left + width / 2, 13, "middle");
  if (rowDim >= 0) svg.append(drawn("text", { x: 0, y: 0, transform: `translate(14 ${top + height / 2}) rotate(-90)`, "text-anchor": "middle", class: "dim" }, `dim ${rowDim}`),
    drawn("text", { x: 0, y: 0, transform: `translate(32 ${top + height / 2}) rotate(-90)`, "text-anchor": "middle", class: "dim" }, String(tensor.shape[rowDim])));
  shownRows.forEach((r, i) => shownColumns.forEach((c, j) => {
    const x = left + (j * width) / shownColumns.length, y = top + i * (height / shownRows.length);
    const w = width / shownColumns.length, h = height / shownRows.length;
    if (r === null || c === null) { svg.append(drawn("text", { x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle", class: "dim" }, "…")); return; }
    const holders = ranksHolding(tensor, axes, cuts, rowDim, r, columnDim, c).map((place) => ranks?.[place] ?? place);
    svg.append(drawn("rect", { x: x + 0.5, y: y + 0.5, width: w - 1, height: h - 1, class: `cell tone${(r + c) % 2}${partial ? " partial" : ""}` },
      drawn("title", {}, `ranks ${rankText(holders, 1e9)}`)));
    const text = rankText(holders, Math.floor(w / 7));
    if (text) svg.append(drawn("text", { x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle", class: "ranks" }, text));
  }));
  return svg;
}

function shownCells(count) {
  if (count <= MOST_CELLS) return [...Array(count).keys()];
  return [...Array(MOST_CELLS - 2).keys(), null, count - 1];
}

function describeLayout(tensor, axes, rows, columns) {
  const words = tensor.layout.map((placed, a) => `${axes[a].name}: ${layoutWord(placed)}`).join(", ");
  return `Tensor ${tensor.name} of shape ${tensor.shape.join(" by ") || "scalar"} in ${rows * columns} parts; ${words}`;
}

function ranksHolding(tensor, axes, cuts, rowDim, row, columnDim, column) {
  const total = axes.reduce((n, axis) => n * axis.size, 1), found = [];
  const place = (coordinates, dim) => (cuts.get(dim) ?? []).reduce((at, a) => at * axes[a].size + coordinates[a], 0);
  for (let rank = 0; rank < total; rank += 1) {
    let rest = rank; const coordinates = new Array(axes.length);
    for (let a = axes.length - 1; a >= 0; a -= 1) { coordinates[a] = rest % axes[a].size; rest = Math.floor(rest / axes[a].size); }
    if (place(coordinates, rowDim) === row && (columnDim === rowDim || place(coordinates, columnDim) === column)) found.push(rank);
  }
  return found;
}

// 0–3 for neighbours, 0, 8, 16 … for others; shortened to what fits.
function rankText(ranks, room) {
  const runs = [];
  for (const rank of ranks) {
    const top = runs[runs.length - 1];
    if (top && top[1] === rank - 1) top[1] = rank; else runs.push([rank, rank]);
  }
  const words = runs.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`)), whole = words.join(", ");
  if (whole.length <= room) return whole;
  const short = `${words[0]}, … (${ranks.length})`;
  return short.length <= room ? short : words[0].length <= room ? words[0] : "";
}
