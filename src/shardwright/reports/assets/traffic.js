// Who sends how much to whom: rank against rank, coloured by what carries it (an axis' link, or those between stages), darker where it is more.

const MOST_SHOWN = 64;

class TrafficMatrix {
  constructor(box, data) {
    this.box = box; this.data = data.traffic; this.names = data.traffic.names; this.canvas = box.querySelector("canvas"); this.said = box.querySelector("[aria-live]");
    this.ranks = data.traffic.ranks;
    this.group = Math.ceil(this.ranks / MOST_SHOWN);
    this.cells = Math.ceil(this.ranks / this.group);
    this.collect();
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  collect() {
    const sent = new Map(); // cell -> [bytes per name]
    const add = (from, to, name, bytes) => {
      const key = Math.floor(from / this.group) * this.cells + Math.floor(to / this.group);
      if (!sent.has(key)) sent.set(key, new Float64Array(this.names.length));
      sent.get(key)[this.names.indexOf(name)] += bytes;
    };
    for (const { ranks, axes, flows } of this.data.blocks) {
      let stride = 1; const places = {};
      for (let a = axes.length - 1; a >= 0; a -= 1) { places[axes[a].name] = { size: axes[a].size, stride }; stride *= axes[a].size; }
      for (const flow of flows) {
        const { size, stride: step } = places[flow.axis];
        ranks.forEach((rank, place) => {
          const at = Math.floor(place / step) % size;
          for (const other of peers(at, size, flow.to)) add(rank, ranks[place + (other - at) * step], flow.axis, flow.bytes);
        });
      }
    }
    for (const [from, to, bytes] of this.data.pairs) add(from, to, this.names[this.names.length - 1], bytes);
    this.sent = sent;
    this.most = 0;
    for (const bytes of sent.values()) this.most = Math.max(this.most, bytes.reduce((x, y) => x + y, 0));
  }

  draw() {
    const left = 64, side = Math.min(this.canvas.parentElement.clientWidth - left - 4, 520), size = side / this.cells;
    const { pen } = sized(this.canvas, side + 30);
    this.left = left; this.size = size;
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.fillStyle = themed("lane"); pen.fillRect(left, 26, side, side);
    for (const [key, bytes] of this.sent) {
      const row = Math.floor(key / this.cells), column = key % this.cells, total = bytes.reduce((x, y) => x + y, 0);
      const axis = bytes.indexOf(Math.max(...bytes));
      pen.globalAlpha = 0.25 + 0.75 * (Math.log1p((total / this.most) * 63) / Math.log(64));
      pen.fillStyle = themed(`axis-${axis % 5}`);
      pen.fillRect(left + column * size + 0.5, 26 + row * size + 0.5, Math.max(size - 1, 1), Math.max(size - 1, 1));
    }
    pen.globalAlpha = 1; pen.fillStyle = themed("soft");
    const every = Math.max(1, Math.ceil(24 / size));
    for (let i = 0; i < this.cells; i += every) {
      pen.textAlign = "right"; pen.fillText(String(i * this.group), left - 6, 26 + (i + 0.5) * size);
      pen.textAlign = "center"; pen.fillText(String(i * this.group), left + (i + 0.5) * size, 16);
    }
    pen.textAlign = "left"; pen.fillText("from", 2, 34); pen.fillText("to", left - 22, 12);
  }

  lines(row, column) {
    const name = (cell) => (this.group === 1 ? `rank ${cell}` : `ranks ${cell * this.group}–${Math.min((cell + 1) * this.group, this.ranks) - 1}`);
    const bytes = this.sent.get(row * this.cells + column);
    if (!bytes) return [`${name(row)} sends nothing to ${name(column)}`];
    return [`${name(row)} to ${name(column)}`, ...[...bytes].map((b, a) => (b ? `${bytesText(b)} a step ${this.names[a].startsWith("between") ? this.names[a] : `over ${this.names[a]}`}` : null)).filter(Boolean)];
  }

  hover(event) {
    const column = Math.floor((event.offsetX - this.left) / this.size), row = Math.floor((event.offsetY - 26) / this.size);
    if (row < 0 || column < 0 || row >= this.cells || column >= this.cells) { tip.hide(); return; }
    tip.show(event.clientX, event.clientY, this.lines(row, column));
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.place ??= [0, 0];
    this.place = this.place.map((x, i) => Math.min(Math.max(x + moves[event.key][i], 0), this.cells - 1));
    this.said.textContent = this.lines(...this.place).join(". ") + ".";
  }
}

function peers(place, size, to) {
  if (to === "next") return size > 1 ? [(place + 1) % size] : [];
  if (to === "all") return [...Array(size).keys()].filter((other) => other !== place);
  return [place - 1, place + 1].filter((other) => other >= 0 && other < size);
}
