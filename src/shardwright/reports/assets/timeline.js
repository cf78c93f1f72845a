// Time from left to right, one row per stream: bars that can be zoomed, moved, pointed at and walked through with the keyboard.
// A group is {title, rows: [{label, ids}], start(i), end(i), act(i), text(i, room), lines(i), onChain(i)}; `room`: the least width of a bar with text.

const ROW = 26, GROUP = 22, AXIS = 24;

class Timeline {
  constructor(box, view, groups) {
    this.box = box; this.view = view; this.groups = groups; this.selected = null; this.chain = false;
    this.canvas = box.querySelector("canvas.bars");
    this.overview = box.querySelector("canvas.overview");
    this.said = box.querySelector("[aria-live]");
    view.listeners.push(() => this.ask());
    this.timeAt = movable(this.canvas, view, this.left(), (event) => this.tap(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    const slide = (event) => {
      if (!event.buttons) return;
      const middle = (event.offsetX / this.overview.clientWidth) * view.whole, half = (view.to - view.from) / 2;
      view.set(middle - half, middle + half);
    };
    this.overview.addEventListener("pointerdown", slide);
    this.overview.addEventListener("pointermove", slide);
    this.asked = false;
  }

  left() { return window.innerWidth < 640 ? 64 : 120; }

  ask() { // draw once a frame, however often asked
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  rows() {
    const found = [];
    let top = AXIS;
    for (const group of this.groups) {
      if (group.title) { found.push({ group, title: group.title, top }); top += GROUP; }
      for (const row of group.rows) { found.push({ group, row, top }); top += ROW; }
      top += 6;
    }
    this.height = top;
    return found;
  }

  draw() {
    const rows = this.rows(), left = this.left(), { view } = this;
    const { pen, width } = sized(this.canvas, this.height);
    const scale = (width - left) / (view.to - view.from), x = (t) => left + (t - view.from) * scale;
    const ink = themed("ink"), faint = themed("line"), bars = {};
    for (const act of Object.keys(ACTS)) bars[act] = themed(`act-${act}`);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    for (const t of ticks(view.from, view.to, width / 110)) {
      pen.fillStyle = faint; pen.fillRect(Math.round(x(t)), AXIS - 4, 1, this.height);
      pen.fillStyle = themed("soft"); within(pen, secondsText(t), Math.round(x(t)) + 3, 10, width);
    }
    this.shown = 0;
    for (const { group, row, title, top } of rows) {
      pen.fillStyle = ink;
      if (title) { pen.font = "600 12px system-ui, sans-serif"; pen.fillText(title, 4, top + GROUP / 2); pen.font = "12px system-ui, sans-serif"; continue; }
      pen.fillText(window.innerWidth < 640 ? row.short ?? row.label : row.label, 4, top + ROW / 2, left - 8);
      pen.fillStyle = themed("lane"); pen.fillRect(left, top + 2, width - left, ROW - 4);
      pen.save(); pen.beginPath(); pen.rect(left, top, width - left, ROW); pen.clip();
      let drawnTo = -1, drawnAct = "";
      for (let k = firstAfter(row.ids, view.from, group.end); k < row.ids.length; k += 1) {
        const i = row.ids[k], start = group.start(i);
        if (start > view.to) break;
        const from = x(start), to = Math.max(x(group.end(i)), from + 0.5), act = group.act(i);
        if (to < drawnTo && act === drawnAct && to - from < 1) continue; // below a pixel, and there is colour already
        pen.globalAlpha = this.chain && !group.onChain?.(i) ? 0.25 : 1;
        pen.fillStyle = bars[act] ?? ink;
        pen.fillRect(from, top + 2, Math.max(to - from - (to - from > 3 ? 0.75 : 0), 0.5), ROW - 4);
        pen.globalAlpha = 1;
        drawnTo = Math.ceil(to); drawnAct = act; this.shown += 1;
        if (to - from < 1) { // what else begins and ends within this pixel would be painted over it
          k = Math.max(k, firstAfter(row.ids, view.from + (drawnTo - left) / scale, group.end, k) - 1);
        }
        if (to - from > (group.room ?? 44)) {
          pen.save(); pen.beginPath(); pen.rect(from + 1, top, to - from - 2, ROW); pen.clip();
          pen.fillStyle = themed(`on-${act}`) || "#fff";
          pen.fillText(group.text(i, to - from), Math.max(from, left) + (to - from > 44 ? 5 : 3), top + ROW / 2);
          pen.restore();
        }
      }
      pen.restore();
    }
    if (this.selected) {
      const { group, row, i } = this.selected, place = rows.find((r) => r.group === group && r.row === row);
      if (place) {
        pen.strokeStyle = ink; pen.lineWidth = 2;
        pen.strokeRect(Math.max(x(group.start(i)), left), place.top + 1, Math.max((group.end(i) - group.start(i)) * scale, 3), ROW - 2);
      }
    }
    this.drawOverview();
  }

  drawOverview() {
    const { pen, width, height } = sized(this.overview, 22), { view } = this, group = this.groups[0], row = group.rows[0];
    const scale = width / view.whole;
    pen.fillStyle = themed("lane"); pen.fillRect(0, 0, width, height);
    pen.globalAlpha = 0.55;
    for (let k = 0; k < row.ids.length; k += 1) {
      const i = row.ids[k], from = group.start(i) * scale, to = Math.max(group.end(i) * scale, from + 1);
      pen.fillStyle = themed(`act-${group.act(i)}`);
      pen.fillRect(from, 3, to - from, height - 6);
      k = Math.max(k, firstAfter(row.ids, Math.ceil(to) / scale, group.end, k) - 1);
    }
    pen.globalAlpha = 1; pen.strokeStyle = themed("ink"); pen.lineWidth = 2;
    pen.strokeRect(view.from * scale + 1, 1, Math.max((view.to - view.from) * scale - 2, 4), height - 2);
  }

  at(event) {
    const place = this.rows().find((r) => r.row && event.offsetY >= r.top && event.offsetY < r.top + ROW);
    if (!place || event.offsetX < this.left()) return null;
    const { group, row } = place, time = this.timeAt(event.offsetX);
    const slack = (2 * (this.view.to - this.view.from)) / (this.canvas.clientWidth - this.left());
    const k = firstAfter(row.ids, time - slack, group.end), i = row.ids[k];
    return k < row.ids.length && group.start(i) <= time + slack ? { group, row, i, k } : null;
  }

  hover(event) {
    const found = event.buttons ? null : this.at(event);
    if (found) tip.show(event.clientX, event.clientY, found.group.lines(found.i)); else tip.hide();
  }

  tap(event) { this.select(this.at(event)); }

  select(found) {
    this.selected = found;
    this.said.textContent = found ? found.group.lines(found.i).join(". ") + "." : "";
    this.ask();
  }

  key(event) {
    const { view } = this, rows = this.rows().filter((r) => r.row && r.row.ids.length);
    const keys = { "+": () => view.zoom(2), "=": () => view.zoom(2), "-": () => view.zoom(0.5), 0: () => view.reset(), Home: () => view.reset() };
    if (event.key in keys) { keys[event.key](); event.preventDefault(); return; }
    if (!event.key.startsWith("Arrow") || event.ctrlKey || event.altKey || event.metaKey || !rows.length) return;
    event.preventDefault();
    if (event.shiftKey) { view.pan(event.key === "ArrowRight" ? 0.25 : event.key === "ArrowLeft" ? -0.25 : 0); return; }
    let number = rows.findIndex((r) => this.selected && r.row === this.selected.row), k = 0;
    if (number < 0) { number = 0; k = firstAfter(rows[0].row.ids, view.from, rows[0].group.end); }
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") k = this.selected.k + (event.key === "ArrowRight" ? 1 : -1);
    else {
      const time = this.selected.group.start(this.selected.i);
      number = Math.min(Math.max(number + (event.key === "ArrowDown" ? 1 : -1), 0), rows.length - 1);
      k = firstAfter(rows[number].row.ids, time, rows[number].group.end);
    }
    const { group, row } = rows[number];
    k = Math.min(Math.max(k, 0), row.ids.length - 1);
    const i = row.ids[k];
    this.select({ group, row, i, k });
    if (group.start(i) < view.from || group.end(i) > view.to) {
      const half = (view.to - view.from) / 2;
      view.set(group.start(i) - half, group.start(i) + half);
    }
  }
}

// The first of these events that ends after a time; on one stream they are in order.
function firstAfter(ids, time, end, from = 0) {
  let low = from, high = ids.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end(ids[middle]) > time) high = middle; else low = middle + 1;
  }
  return low;
}
