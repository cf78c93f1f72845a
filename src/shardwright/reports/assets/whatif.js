// Sliders that run the step again at other speeds, and with other numbers of micro-batches. The same answers come from the
// command that is shown below them.

class WhatIf {
  constructor(box, data, model, onRun) {
    this.box = box; this.data = data; this.model = model; this.onRun = onRun; this.factors = new Map();
    this.counts = data.step.variants.map((variant) => variant.microbatches);
    for (const name of data.step.links) this.control(`link:${name}`, name === "stages" ? "rate of links between stages" : `rate of link ${name}`);
    this.control("device", "speed of the devices");
    this.control("host", "speed of the host");
    if (this.counts.length > 1) this.microbatches();
    box.querySelector(".reset").addEventListener("click", () => this.reset());
    this.plan = this.simulate();
    this.show(this.plan);
    setTimeout(() => this.sensitivity(), 200); // nobody has scrolled there yet
  }

  microbatches() {
    const said = element("output", { class: "count", for: "factor-microbatches" });
    this.count = element("input", { type: "range", min: 0, max: this.counts.length - 1, step: 1, value: this.counts.indexOf(this.data.step.microbatches), id: "factor-microbatches" });
    this.count.say = () => { const count = this.counts[Number(this.count.value)]; said.textContent = String(count); this.count.setAttribute("aria-valuetext", `${count} micro-batches`); };
    this.count.addEventListener("input", () => { this.count.say(); this.changed(); });
    this.count.say();
    this.box.querySelector(".controls").append(element("div", { class: "control" }, element("label", { for: "factor-microbatches" }, "micro-batches"), this.count, element("span", {}), said));
  }

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
    return { links, device, host, microbatches: this.count ? this.counts[Number(this.count.value)] : this.data.step.microbatches };
  }

  simulate(settings = this.settings()) { return this.model.run(settings); }

  changed() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; const run = this.simulate(); this.show(run); this.onRun(run, this.isChanged()); });
  }

  isChanged() { return [...this.factors.values()].some(({ number }) => Number(number.value) !== 1) || this.settings().microbatches !== this.data.step.microbatches; }

  reset() {
    for (const { slider, number } of this.factors.values()) { slider.value = 0; number.value = 1; }
    if (this.count) { this.count.value = this.counts.indexOf(this.data.step.microbatches); this.count.say(); }
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

  command() {
    const { links, device, host, microbatches } = this.settings(), words = ["shardwright simulate", this.data.file];
    for (const [axis, rate] of Object.entries(links)) if (rate !== 1) words.push(`--link-rate ${axis}=${rate}`);
    if (device !== 1) words.push(`--device-speed ${device}`);
    if (host !== 1) words.push(`--host-speed ${host}`);
    if (microbatches !== this.data.step.microbatches) words.push(`--microbatches ${microbatches}`);
    this.box.querySelector(".command").textContent = words.join(" ");
  }

  show(run) {
    const most = Math.max(...run.memory), bound = Math.max(...run.groups.map((_, g) => run.bound(g))), share = (part) => `${digits((100 * part) / run.total)}\u00a0% of the step`;
    this.rates(run.total, this.plan.total);
    this.put("sum_seconds", run.sum, secondsText(run.sum));
    this.put("exposed_seconds", run.exposedSeconds, secondsText(run.exposedSeconds));
    this.put("lower_bound_seconds", bound, secondsText(bound));
    this.put("peak_bytes", most, `${bytesText(most)}${most > this.data.limit ? `, more than the ${bytesText(this.data.limit)} there are` : ""}`);
    this.put("order", run.variant.microbatches, `${run.variant.order}, ${run.variant.microbatches} micro-batches of ${run.variant.rows.join(" or ")} rows`);
    this.put("bubble", run.bubble, `${digits(100 * run.bubble)} % of all devices' time`);
    this.put("makespan", run.makespan, secondsText(run.makespan));
    this.put("sent_bytes", run.sentBytes, bytesText(run.sentBytes));
    run.told.forEach((stage, s) => this.put(`busy stage ${s}`, stage.busy, `${secondsText(stage.busy)}, bubble ${digits(100 * stage.bubble)}\u00a0%`));
    run.loads.forEach((load, g) => load.forEach((busy, stream) => this.put(`busy ${g} ${stream}`, busy, `${secondsText(busy)}, ${share(busy)}`)));
    this.command();
  }

  // What doubling each speed, or another number of micro-batches, would give: which of them is worth money.
  sensitivity() {
    const given = this.data.step.microbatches, found = [], asked = this.doubled();
    for (const microbatches of this.counts) if (microbatches !== given) asked.push([`${microbatches} micro-batches`, { links: {}, device: 1, host: 1, microbatches }]);
    const next = () => { // one after the other, so that nobody waits for all of them
      const [name, settings] = asked.shift();
      found.push([name, this.simulate(settings).total]);
      if (asked.length) setTimeout(next, 30); else this.gains(found, this.plan.total);
    };
    next();
  }

  doubled() {
    return [...this.factors.keys()].map((key) => {
      const settings = { links: {}, device: 1, host: 1, microbatches: this.data.step.microbatches };
      if (key.startsWith("link:")) settings.links[key.slice(5)] = 2; else settings[key] = 2;
      const name = key === "link:stages" ? "links between stages" : key.startsWith("link:") ? `link ${key.slice(5)}` : key === "device" ? "devices" : "host";
      return [`${name} twice as fast`, settings];
    });
  }

  gains(found, plan) {
    found.sort((a, b) => a[1] - b[1]);
    const change = (total) => { const share = Math.abs((100 * (plan - total)) / plan); return share < 0.005 ? "no change" : `${digits(share)}\u00a0% ${total < plan ? "less" : "more"}`; };
    this.box.querySelector(".sensitivity tbody").replaceChildren(...found.map(([name, total]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, secondsText(total)), element("td", {}, change(total)))));
  }
}
