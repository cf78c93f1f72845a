// Bytes alive over the step, stacked by kind, over the same window of time as the timeline.

const KINDS = [ // bottom to top
  "parameters", "optimizer state", "optimizer state", "gradients", "buffers", "inputs", "activations", "activation gradients",
  "gathered copies", "communication buffers", "temporaries", "library workspace",
];

class MemoryChart {
  constructor(box, view, limit) {
    this.box = box; this.view = view; this.limit = limit;
    this.canvas = box.querySelector("canvas"); this.said = box.querySelector("[aria-live]");
    view.listeners.push(() => this.ask());
    this.timeAt = movable(this.canvas, view, this.left(), (event) => this.tell(this.timeAt(event.offsetX)));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  left() { return window.innerWidth < 640 ? 52 : 76; }

  show(storages) {
    this.storages = storages; this.curve = memoryOverTime(storages);
    const order = this.curve.kinds.map((_, k) => k).sort((a, b) => KINDS.indexOf(this.curve.kinds[a]) - KINDS.indexOf(this.curve.kinds[b]));
    this.order = order;
    this.most = this.curve.total.reduce((a, b) => Math.max(a, b), 0);
    this.legend();
    this.ask();
  }

  legend() {
    const list = this.box.querySelector(".legend");
    list.replaceChildren(...this.order.map((k) => element("li", {}, swatch(`var(--kind-${slug(this.curve.kinds[k])})`), this.curve.kinds[k])));
  }

  ask() {
    if (this.asked || !this.storages) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  draw() {
    const { pen, width, height } = sized(this.canvas, 260), left = this.left(), bottom = height - 22, { view, curve } = this;
    const near = this.limit && this.limit < 2.2 * this.most, top = 1.08 * Math.max(this.most, near ? this.limit : 0);
    const y = (bytes) => bottom - (bytes / top) * (bottom - 10), x = (t) => left + ((t - view.from) / (view.to - view.from)) * (width - left);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    for (const level of ticks(0, top, 4)) {
      pen.fillStyle = themed("line"); pen.fillRect(left, Math.round(y(level)), width - left, 1);
      pen.fillStyle = themed("soft"); pen.fillText(bytesText(level), 2, y(level), left - 6);
    }
    for (const t of ticks(view.from, view.to, width / 110)) {
      pen.fillStyle = themed("soft"); within(pen, secondsText(t), Math.round(x(t)) + 3, height - 8, width);
    }
    // Per pixel the moment with the most bytes, so that no peak is lost.
    const columns = Math.max(1, Math.round(width - left)), picked = new Int32Array(columns).fill(-1);
    let place = place0(curve.times, view.from);
    for (let c = 0; c < columns; c += 1) {
      const until = view.from + ((c + 1) / columns) * (view.to - view.from);
      let best = place;
      while (place + 1 < curve.times.length && curve.times[place + 1] <= until) {
        place += 1;
        if (curve.total[place] > curve.total[best]) best = place;
      }
      picked[c] = best;
    }
    const base = new Float64Array(columns);
    for (const k of this.order) {
      const level = curve.levels[k];
      pen.fillStyle = themed(`kind-${slug(curve.kinds[k])}`) || themed("soft");
      pen.beginPath(); pen.moveTo(left, y(base[0]));
      for (let c = 0; c < columns; c += 1) pen.lineTo(left + c + 0.5, y(base[c]));
      for (let c = columns - 1; c >= 0; c -= 1) { base[c] += picked[c] < 0 ? 0 : level[picked[c]]; pen.lineTo(left + c + 0.5, y(base[c])); }
      pen.closePath(); pen.fill();
    }
    if (near) {
      pen.strokeStyle = themed("alarm"); pen.setLineDash([6, 4]); pen.lineWidth = 1.5;
      pen.beginPath(); pen.moveTo(left, y(this.limit)); pen.lineTo(width, y(this.limit)); pen.stroke(); pen.setLineDash([]);
      pen.fillStyle = themed("ink"); pen.fillText(`limit ${bytesText(this.limit)}`, left + 6, y(this.limit) + 10);
    }
    const peak = curve.total.indexOf(this.most), px = x(curve.times[peak]);
    if (px >= left) {
      pen.strokeStyle = themed("ink"); pen.lineWidth = 1; pen.beginPath(); pen.moveTo(px, y(this.most) - 3); pen.lineTo(px, bottom); pen.stroke();
      pen.fillStyle = themed("ink"); pen.textAlign = px > width - 120 ? "right" : "left";
      pen.fillText(`peak ${bytesText(this.most)}`, px + (px > width - 120 ? -5 : 5), Math.max(y(this.most) - 8, 8)); pen.textAlign = "left";
    }
  }

  lines(second) {
    const place = place0(this.curve.times, second);
    return [
      `${bytesText(this.curve.total[place])} alive at ${secondsText(second)}`,
      ...aliveAt(this.storages, second).map((s) => `${bytesText(s.bytes)} ${s.kind}: ${s.what}${s.module ? ` (${s.module})` : ""}`),
    ];
  }

  hover(event) {
    if (event.buttons || event.offsetX < this.left() || !this.curve) { tip.hide(); return; }
    tip.show(event.clientX, event.clientY, this.lines(this.timeAt(event.offsetX)));
  }

  tell(second) { this.at = second; this.said.textContent = this.lines(second).join(". ") + "."; }

  key(event) {
    const { view } = this, keys = { "+": () => view.zoom(2), "=": () => view.zoom(2), "-": () => view.zoom(0.5), 0: () => view.reset() };
    if (event.key in keys) { keys[event.key](); event.preventDefault(); }
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const by = (event.key === "ArrowRight" ? 1 : -1) * (view.to - view.from) / 40;
    this.tell(Math.min(Math.max((this.at ?? view.from) + by, 0), view.whole));
  }
}

function slug(text) { return text.replaceAll(" ", "-").replace("optimizer", "optimizer"); }

// The last change at or before a time.
function place0(times, time) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= time) low = middle; else high = middle - 1;
  }
  return low;
}
