// Words, units and small helpers that every part of the page shares.

function secondsText(seconds) {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) if (seconds >= scale) return `${digits(seconds / scale)} ${unit}`;
  return seconds === 0 ? "0 s" : `${digits(seconds * 1e9)} ns`;
}

function bytesText(bytes) {
  for (const [scale, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (bytes >= scale) return `${digits(bytes / scale)} ${unit}`;
  return `${Math.round(bytes)} B`;
}

function countText(count) {
  for (const [scale, unit] of [[1e9, " billion"], [1e6, " million"]]) if (count >= scale) return `${digits(count / scale)}${unit}`;
  return Math.round(count).toLocaleString("en");
}

// Three digits, as Python's .3g writes them.
function digits(x) {
  return String(Number(x.toPrecision(3)));
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes = {}, ...children) { // an SVG element
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function swatch(colour, className = "swatch") {
  const made = element("span", { class: className, "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}

// A colour that the style sheet defines, in the theme that is on; asked for once per theme, for thousands of bars.
const colours = new Map();
function themed(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

const ACTS = { // what a bar of the timeline is
  forward: "forward", backward: "backward", weights: "gradients of weights", recompute: "recomputed forward", update: "optimizer update",
  parameters: "parameters on their way", activations: "activations on their way", gradients: "gradients on their way",
  statistics: "statistics between pieces", host: "the host issuing", bubble: "bubble: nothing to do",
};

// A canvas as wide as its parent, sharp on any screen.
function sized(canvas, height) {
  const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// Text that is written only where all of it fits.
function within(pen, text, x, y, width) { if (x + pen.measureText(text).width <= width) pen.fillText(text, x, y); }

// The window of time that timeline and memory show together.
class View {
  constructor(total) { this.whole = total; this.from = 0; this.to = total; this.listeners = []; }
  set(from, to) {
    const least = this.whole * 1e-6, span = Math.min(Math.max(to - from, least), this.whole);
    this.from = Math.min(Math.max(from, 0), this.whole - span);
    this.to = this.from + span;
    this.changed();
  }
  reset(total = this.whole) { this.whole = total; this.from = 0; this.to = total; this.changed(); }
  zoom(factor, at = (this.from + this.to) / 2) { this.set(at - (at - this.from) / factor, at + (this.to - at) / factor); }
  pan(share) { const by = share * (this.to - this.from); this.set(this.from + by, this.to + by); }
  changed() { for (const listener of this.listeners) listener(); }
}

// Ticks at round times.
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) found.push(t);
  return found;
}

// Drag, wheel with Ctrl, two fingers: how every picture over time is moved.
function movable(canvas, view, left, onTap) {
  const pointers = new Map();
  let moved = 0, spread = 0;
  const span = () => canvas.clientWidth - left;
  const timeAt = (x) => view.from + ((x - left) / span()) * (view.to - view.from);
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); view.zoom(2 ** (-event.deltaY / 200), timeAt(event.offsetX)); }
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault(); view.pan((event.deltaX || event.deltaY) / span());
    }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX); moved = 0;
    try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone already */ }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    if (pointers.size === 2) {
      const [a, b] = [...pointers.values()], apart = Math.abs(a - b);
      if (spread > 8 && apart > 8) view.zoom(apart / spread, timeAt((a + b) / 2));
      spread = apart; moved += 9;
    } else if (event.offsetX !== before) {
      moved += Math.abs(event.offsetX - before);
      if (moved > 4) view.pan(-(event.offsetX - before) / span());
    }
  });
  const up = (event) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && moved <= 4 && onTap) onTap(event);
    spread = 0;
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("dblclick", (event) => view.zoom(3, timeAt(event.offsetX)));
  return timeAt;
}

// One note that follows the pointer.
const tip = {
  show(x, y, lines) {
    this.box ??= document.body.appendChild(element("div", { class: "tip", "aria-hidden": "true" }));
    this.box.replaceChildren(...lines.map((line, i) => element(i ? "div" : "strong", {}, line)));
    this.box.hidden = false;
    const width = this.box.offsetWidth, height = this.box.offsetHeight;
    this.box.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - width - 8))}px`;
    this.box.style.top = `${y + 18 + height > window.innerHeight ? y - height - 12 : y + 18}px`;
  },
  hide() { if (this.box) this.box.hidden = true; },
};
