// Sliders that run the step again at other speeds. The same answers come from the command that is shown below them.

class WhatIf {
  constructor(box, data, steps, onRun) {
    this.box = box; this.data = data; this.steps = steps; this.onRun = onRun; this.factors = new Map();
    for (const name of this.links()) this.control(`link:${name}`, name === "stages" ? "rate of links between stages" : `rate of link ${name}`);
    this.control("device", "speed of the devices");
    this.control("host", "speed of the host");
    this.more();
    box.querySelector(".reset").addEventListener("click", () => this.reset());
    this.plan = this.simulate();
    this.show(this.plan);
    setTimeout(() => this.sensitivity(), 200); // nobody has scrolled there yet
  }

  links() { return this.data.axes.filter((axis) => axis.size > 1).map((axis) => axis.name); }

  more() {} // further controls

  control(key, label) {
    const id = `factor-${key.replace(":", "-")}`;
    const slider = element("input", { type: "range", min: -3.5, max: 3.5, step: 0.01, value: 0, id: `${id}-slider`, "aria-label": `${label}, as a power of two` });
    const number = element("input", { type: "number", min: 0.01, max: 100, step: "any", value: 1, id });
    slider.addEventListener("input", () => { number.value = digits(2 ** Number(slider.value)); this.changed(); });
    number.addEventListener("input", () => { if (Number(number.value) > 0) { slider.value = Math.log2(Number(number.value)); this.changed(); } });
    this.box.querySelector(".controls").append(element("div", { class: "control" }, element("label", { for: id }, label), slider, element("span", { class: "times" }, "×"), number));
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

  put(name, value, text) {
    const at = this.box.querySelector(`[data-number="${name}"]`);
    if (at) { at.textContent = text; at.dataset.value = value; }
  }

  // What follows from the length of a step.
  rates(total, before) {
    const { work, price, devices } = this.data, cost = work && price ? ((price * devices * total) / 3600 / work.count) * 1e6 : 0;
    this.put("step_seconds", total, secondsText(total));
    this.put("ratio", total / before, `${digits(total / before)} × the plan's`);
    if (work) this.put("rate", work.count / total, `${countText(work.count / total)} ${work.unit} a second`);
    if (work && price) this.put("cost", cost, `${digits(cost)} a million ${work.unit}`);
  }

  command(more = []) {
    const { links, device, host } = this.settings(), words = ["shardwright simulate", this.data.file];
    for (const [axis, rate] of Object.entries(links)) if (rate !== 1) words.push(`--link-rate ${axis}=${rate}`);
    if (device !== 1) words.push(`--device-speed ${device}`);
    if (host !== 1) words.push(`--host-speed ${host}`);
    this.box.querySelector(".command").textContent = [...words, ...more].join(" ");
  }

  show(runs) {
    const slowest = slowestOf(runs);
    this.rates(slowest.total, slowestOf(this.plan).total);
    this.put("sum_seconds", slowest.sum, secondsText(slowest.sum));
    this.put("exposed_seconds", slowest.exposed, secondsText(slowest.exposed));
    this.put("lower_bound_seconds", slowest.bound, secondsText(slowest.bound));
    slowest.step.streams.forEach((stream, s) => this.put(`busy ${stream}`, slowest.busy[s], `${secondsText(slowest.busy[s])}, ${digits((100 * slowest.busy[s]) / slowest.total)} % of the step`));
    this.command();
  }

  // What doubling each speed would give: which of them is worth money.
  sensitivity() {
    this.gains(this.doubled((settings) => slowestOf(this.simulate(settings)).total), slowestOf(this.plan).total);
  }

  doubled(total) {
    return [...this.factors.keys()].map((key) => {
      const settings = { links: {}, device: 1, host: 1 };
      if (key.startsWith("link:")) settings.links[key.slice(5)] = 2; else settings[key] = 2;
      const name = key === "link:stages" ? "links between stages" : key.startsWith("link:") ? `link ${key.slice(5)}` : key === "device" ? "devices" : "host";
      return [`${name} twice as fast`, total(settings)];
    });
  }

  gains(found, plan) {
    found.sort((a, b) => a[1] - b[1]);
    const change = (total) => { const share = Math.abs((100 * (plan - total)) / plan); return share < 0.005 ? "no change" : `${digits(share)}\u00a0% ${total < plan ? "less" : "more"}`; };
    this.box.querySelector(".sensitivity tbody").replaceChildren(...found.map(([name, total]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, secondsText(total)), element("td", {}, change(total)))));
  }
}

function slowestOf(runs) { return runs.reduce((a, b) => (b.total > a.total ? b : a)); }
