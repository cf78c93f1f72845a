// Sliders that run the step again at other speeds. The same answers come from the command that is shown below them.

class WhatIf {
  constructor(box, data, steps, onRun) {
    this.box = box; this.data = data; this.steps = steps; this.onRun = onRun; this.factors = new Map();
    const controls = box.querySelector(".controls");
    for (const axis of data.axes) if (axis.size > 1) this.control(controls, `link:${axis.name}`, `rate of link ${axis.name}`);
    this.control(controls, "device", "speed of the devices");
    this.control(controls, "host", "speed of the host");
    box.querySelector(".reset").addEventListener("click", () => this.reset());
    this.plan = this.simulate();
    this.show(this.plan);
    setTimeout(() => this.sensitivity(), 200); // nobody has scrolled there yet
  }

  control(controls, key, label) {
    const id = `factor-${key.replace(":", "-")}`;
    const slider = element("input", { type: "range", min: -3.5, max: 3.5, step: 0.01, value: 0, id: `${id}-slider`, "aria-label": `${label}, as a power of two` });
    const number = element("input", { type: "number", min: 0.01, max: 100, step: "any", value: 1, id });
    slider.addEventListener("input", () => { number.value = digits(2 ** Number(slider.value)); this.changed(); });
    number.addEventListener("input", () => { if (Number(number.value) > 0) { slider.value = Math.log2(Number(number.value)); this.changed(); } });
    controls.append(element("div", { class: "control" }, element("label", { for: id }, label), slider, element("span", { class: "times" }, "×"), number));
    this.factors.set(key, { slider, number });
  }

  settings() {
    const links = {};
    let device = 1, host = 1;
    for (const [key, { number }] of this.factors) {
      const value = Number(number.value) > 0 ? Number(number.value) : 1;
      if (key === "device") device = value; else if (key === "host") host = value; else links[key.slice(5)] = value;
    }
    return { links, device, host };
  }

  simulate(settings = this.settings()) {
    return this.steps.map((step) => { const run = simulateStep(step, settings); run.hostSpeed = settings.host; return run; });
  }

  changed() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; const runs = this.simulate(); this.show(runs); this.onRun(runs, this.isChanged()); });
  }

  isChanged() { return [...this.factors.values()].some(({ number }) => Number(number.value) !== 1); }

  reset() {
    for (const { slider, number } of this.factors.values()) { slider.value = 0; number.value = 1; }
    this.changed();
  }

  show(runs) {
    const slowest = runs.reduce((a, b) => (b.total > a.total ? b : a)), before = this.plan.reduce((a, b) => (b.total > a.total ? b : a));
    const put = (name, value, text) => { const at = this.box.querySelector(`[data-number="${name}"]`); if (at) { at.textContent = text; at.dataset.value = value; } };
    put("step_seconds", slowest.total, secondsText(slowest.total));
    put("sum_seconds", slowest.sum, secondsText(slowest.sum));
    put("exposed_seconds", slowest.exposed, secondsText(slowest.exposed));
    put("lower_bound_seconds", slowest.bound, secondsText(slowest.bound));
    put("ratio", slowest.total / before.total, `${digits(slowest.total / before.total)} × the plan's`);
    const { work, price, devices } = this.data;
    if (work) put("rate", work.count / slowest.total, `${countText(work.count / slowest.total)} ${work.unit} a second`);
    if (work && price) put("cost", (price * devices * slowest.total) / 3600 / work.count * 1e6, `${digits((price * devices * slowest.total) / 3600 / work.count * 1e6)} a million ${work.unit}`);
    slowest.step.streams.forEach((stream, s) => put(`busy ${stream}`, slowest.busy[s], `${secondsText(slowest.busy[s])}, ${digits((100 * slowest.busy[s]) / slowest.total)} % of the step`));
    const { links, device, host } = this.settings(), words = ["shardwright simulate", this.data.file];
    for (const [axis, rate] of Object.entries(links)) if (rate !== 1) words.push(`--link-rate ${axis}=${rate}`);
    if (device !== 1) words.push(`--device-speed ${device}`);
    if (host !== 1) words.push(`--host-speed ${host}`);
    this.box.querySelector(".command").textContent = words.join(" ");
  }

  // What doubling each speed would give: which of them is worth money.
  sensitivity() {
    const body = this.box.querySelector(".sensitivity tbody"), plan = Math.max(...this.plan.map((run) => run.total)), found = [];
    for (const key of this.factors.keys()) {
      const settings = { links: {}, device: 1, host: 1 };
      if (key.startsWith("link:")) settings.links[key.slice(5)] = 2; else settings[key] = 2;
      found.push([key.startsWith("link:") ? `link ${key.slice(5)}` : key === "device" ? "devices" : "host", Math.max(...this.simulate(settings).map((run) => run.total))]);
    }
    found.sort((a, b) => a[1] - b[1]);
    body.replaceChildren(...found.map(([name, total]) => element("tr", {}, element("th", { scope: "row" }, `${name} twice as fast`), element("td", {}, secondsText(total)), element("td", {}, `${digits((100 * (plan - total)) / plan)} % less`))));
  }
}
