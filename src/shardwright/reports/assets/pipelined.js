// How a simulated pipeline looks: all devices' passes and bubbles, the streams of one kind of rank, its memory, its what-ifs.

const PASSES = { F: "forward", I: "gradient of inputs", W: "gradient of weights", B: "backward", close: "sums between replicas and optimizer update" };
const PASS_ACTS = { F: "forward", I: "backward", B: "backward", W: "weights", close: "update", bubble: "bubble" };

function passName({ stage, kind, mb }) { return `${PASSES[kind]} of ${kind === "close" ? "" : `micro-batch ${mb}, `}stage ${stage}`; }

// Devices from top to bottom, their passes from left to right; what is left open is a bubble.
function passesGroup(run, stages, title) {
  const bars = [], rows = run.devices.map((order, d) => {
    const ids = [];
    let free = 0;
    const put = (bar) => { ids.push(bars.length); bars.push(bar); };
    const idle = (until, next) => { if (until - free > 1e-12 * run.total) put({ kind: "bubble", start: free, end: until, next, device: d }); };
    for (const action of order) { idle(action.start, action); put(action); free = action.end; }
    const { start, end } = run.closing[d];
    if (end > start) { idle(start, { kind: "close", stage: run.stagesOf[d][0], mb: -1 }); put({ kind: "close", stage: run.stagesOf[d][0], mb: -1, start: Math.max(start, free), end }); free = end; }
    idle(run.total, null);
    const { ranks } = stages[run.stagesOf[d][0]];
    return { label: `stage ${run.stagesOf[d].join(", ")} · ${rankWord(ranks)}`, short: `stage ${run.stagesOf[d].join(", ")}`, ids };
  });
  const chain = new Set(decidingPasses(run));
  const waits = (action) => {
    if (action.kind === "close") return "begins when the loss is known";
    if (action.against === AGAINST.START) return "starts with the step";
    if (action.against === AGAINST.DEVICE) return "starts when its device is done with what came before";
    return `waits for ${passName(action.cause)}${action.hop ? `, which is on its way for ${secondsText(action.hop)}` : ""}`;
  };
  return {
    title, rows, run, room: 13,
    start: (i) => bars[i].start, end: (i) => bars[i].end, act: (i) => PASS_ACTS[bars[i].kind], onChain: (i) => chain.has(bars[i]),
    text: (i, room) => (bars[i].kind === "bubble" ? (room > 60 ? "bubble" : "") : passText(bars[i], room)),
    lines: (i) => {
      const bar = bars[i], long = `${secondsText(bar.end - bar.start)}, from ${secondsText(bar.start)} to ${secondsText(bar.end)}`;
      if (bar.kind === "bubble") return ["bubble: the device waits", long, bar.next ? `for ${passName(bar.next)}, which ${waits(bar.next)}` : "for the slowest device to end the step"];
      const program = bar.kind === "close" ? null : run.at(bar.stage, bar.mb);
      return [passName(bar), long, ...(program ? [`${run.variant.rows[run.variant.sizes[bar.mb]]} rows, ${bytesText(program.bytes.held)} held until its backward pass`, waits(bar)] : []), ...(chain.has(bar) ? ["on the chain that decides the step"] : [])];
    },
  };
}

// The recorded passes of every rank, as the predicted ones are shown.
function measuredPasses(measured, stages) {
  const bars = [], rows = measured.ranks.map(({ rank, passes, times, closing }) => {
    const ids = [], put = (bar) => { ids.push(bars.length); bars.push(bar); };
    passes.split(" ").forEach((word, k) => { const [, stage, kind, mb] = word.match(PASS); put({ stage, kind, mb, start: times[k][0], end: times[k][1] }); });
    const mine = stages.map((stage, s) => (stage.ranks.includes(rank) ? s : -1)).filter((s) => s >= 0);
    for (const [start, end] of closing) put({ stage: mine[0], kind: "close", mb: -1, start, end });
    return { label: `rank ${rank} · stage ${mine.join(", ")}`, short: `rank ${rank}`, ids };
  });
  return {
    title: measured.title, rows, room: 13,
    start: (i) => bars[i].start, end: (i) => bars[i].end, act: (i) => PASS_ACTS[bars[i].kind], onChain: () => true,
    text: (i, room) => passText(bars[i], room),
    lines: (i) => [passName(bars[i]), `measured ${secondsText(bars[i].end - bars[i].start)}, from ${secondsText(bars[i].start)}`],
  };
}

function passText({ kind, mb }, room) {
  if (kind === "close") return room > 44 ? "update" : "";
  return room > 90 ? `${mb} · ${PASSES[kind]}` : `${mb}`;
}

function rankWord(ranks) { return ranks.length > 1 ? `ranks ${ranks[0]}–${ranks[ranks.length - 1]}` : `rank ${ranks[0]}`; }

function decidingPasses(run) {
  let slowest = 0;
  run.closing.forEach((one, d) => { if (one.end > run.closing[slowest].end) slowest = d; });
  const chain = [];
  for (let at = run.devices[slowest][run.devices[slowest].length - 1]; at; at = at.cause) chain.push(at);
  return chain;
}

// The streams of one kind of rank, event by event.
function streamsGroup(events, title) {
  const { run } = events, program = (k) => run.program(events.actions[k].stage, events.actions[k].mb), rows = new Map();
  const names = [...new Set(run.stagesOf[events.device].flatMap((stage) => run.program(stage, -1).step.streams))];
  names.forEach((name, s) => rows.set(name, { label: s ? `link ${name}` : "compute", ids: [] }));
  for (let k = 0; k < events.starts.length; k += 1) {
    const { step } = program(k);
    if (events.ends[k] > events.starts[k]) rows.get(step.streams[step.stream[events.numbers[k]]]).ids.push(k);
  }
  return {
    title, rows: [...rows.values()].filter((row) => row.ids.length), run,
    start: (k) => events.starts[k], end: (k) => events.ends[k], onChain: () => true,
    act: (k) => { const { step } = program(k), i = events.numbers[k]; return step.carries(i) || (events.actions[k].kind === "W" ? "weights" : step.phase(i)); },
    text: (k) => { const { step } = program(k), i = events.numbers[k]; return step.collective(i).replaceAll("_", "-") || step.name(i); },
    lines: (k) => {
      const { step } = program(k), i = events.numbers[k], lines = [eventTitle(step, i), `${secondsText(events.ends[k] - events.starts[k])}, from ${secondsText(events.starts[k])}`, `in ${passName(events.actions[k])}`];
      if (step.module(i)) lines.push(`module ${step.module(i)}`);
      if (step.bytes[i]) lines.push(`${bytesText(step.bytes[i])} over ${step.streams[step.stream[i]]}, ${ACTS[step.carries(i)]}`);
      return lines;
    },
  };
}

// Sliders of a pipeline: the speeds, and how many micro-batches.
class PipelineWhatIf extends WhatIf {
  links() { return this.data.pipeline.links; }

  more() {
    const packed = this.data.pipeline, counts = packed.variants.map((variant) => variant.microbatches), said = element("output", { class: "count", for: "factor-microbatches" });
    this.count = element("input", { type: "range", min: 0, max: counts.length - 1, step: 1, value: counts.indexOf(packed.microbatches), id: "factor-microbatches" });
    const say = () => { const count = counts[Number(this.count.value)]; said.textContent = String(count); this.count.setAttribute("aria-valuetext", `${count} micro-batches`); };
    this.count.addEventListener("input", () => { say(); this.changed(); });
    this.setMicrobatches = (count) => { this.count.value = counts.indexOf(count); say(); };
    say();
    this.box.querySelector(".controls").append(element("div", { class: "control" }, element("label", { for: "factor-microbatches" }, "micro-batches"), this.count, element("span", {}), said));
  }

  settings() { return { ...super.settings(), microbatches: this.data.pipeline.variants[Number(this.count.value)].microbatches }; }

  simulate(settings = this.settings()) { return this.steps.run(settings); }

  isChanged() { return super.isChanged() || this.settings().microbatches !== this.data.pipeline.microbatches; }

  reset() { this.setMicrobatches(this.data.pipeline.microbatches); super.reset(); }

  show(run) {
    const { microbatches } = this.settings();
    this.rates(run.total, this.plan.total);
    this.put("bubble", run.bubble, `${digits(100 * run.bubble)} % of all devices' time`);
    this.put("makespan", run.makespan, secondsText(run.makespan));
    this.put("peak_bytes", Math.max(...run.memory), `${bytesText(Math.max(...run.memory))}${Math.max(...run.memory) > this.data.limit ? `, more than the ${bytesText(this.data.limit)} there are` : ""}`);
    this.put("sent_bytes", run.sentBytes, bytesText(run.sentBytes));
    this.put("order", run.variant.microbatches, `${run.variant.order}, ${run.variant.microbatches} micro-batches of ${run.variant.rows.join(" or ")} rows`);
    run.told.forEach((stage, s) => this.put(`busy stage ${s}`, stage.busy, `${secondsText(stage.busy)}, bubble ${digits(100 * stage.bubble)}\u00a0%`));
    this.command(microbatches === this.data.pipeline.microbatches ? [] : [`--microbatches ${microbatches}`]);
  }

  sensitivity() {
    const given = this.data.pipeline.microbatches, found = [], asked = this.doubled((settings) => ({ ...settings, microbatches: given }));
    for (const { microbatches } of this.data.pipeline.variants) if (microbatches !== given) asked.push([`${microbatches} micro-batches`, { links: {}, device: 1, host: 1, microbatches }]);
    const next = () => { // one after the other, so that nobody waits for all of them
      const [name, settings] = asked.shift();
      found.push([name, this.simulate(settings).total]);
      if (asked.length) setTimeout(next, 30); else this.gains(found, this.plan.total);
    };
    next();
  }
}

function pipelinePage(data) {
  const model = new PipelineModel(data.pipeline), view = new View(1), banner = document.querySelector(".banner");
  const memory = new MemoryChart(document.getElementById("memory"), view, data.limit), choices = [...document.querySelectorAll("select.device")];
  let timeline = null, waiting = 0, shown = null, device = Number(choices[0]?.value ?? 0);
  const groups = (run) => {
    const events = deviceEvents(run, device), { ranks } = data.pipeline.stages[run.stagesOf[device][0]];
    shown = events;
    const { measured } = data, spans = measured?.spans[device], said = measured ? "predicted, " : "";
    return [
      passesGroup(run, data.pipeline.stages, `${said}all stages`), ...(measured ? [measuredPasses(measured, data.pipeline.stages)] : []),
      streamsGroup(events, `${said}streams of each of ${rankWord(ranks)}, stage ${run.stagesOf[device].join(", ")}`), ...(spans ? [measuredGroup(spans)] : []),
    ];
  };
  const whatIf = new PipelineWhatIf(document.getElementById("what-if"), data, model, (run, changed) => {
    timeline.again(run);
    banner.hidden = !changed;
    clearTimeout(waiting);
    waiting = setTimeout(() => memory.show(deviceMemory(shown)), 60);
  });
  timeline = timelineOf(groups(whatIf.plan), view, groups);
  memory.show(deviceMemory(shown));
  drawings.push(memory);
  for (const choice of choices) {
    choice.addEventListener("change", () => {
      device = Number(choice.value);
      for (const other of choices) other.value = choice.value;
      const { from, to } = view;
      timeline.again(whatIf.simulate());
      view.set(from, to);
      memory.show(deviceMemory(shown));
    });
  }
  banner.querySelector("button").addEventListener("click", () => whatIf.reset());
  return { data, model, view, timeline, memory, whatIf, ...otherSections(data) };
}
