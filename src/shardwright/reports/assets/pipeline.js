// A step of a pipeline simulated in the page: a twin of simulator/play.py and of what simulator/timeline.py tells of it.
// What it computes is tested against `shardwright simulate --json` at many settings, numbers of micro-batches among them.

// One stage for one size of micro-batch: its events, by the pass they belong to.
function decodeProgram(packed) {
  const step = decodeStep(packed), { forward, weights, home, updates } = packed.passes, isHome = new Uint8Array(step.count);
  for (const number of home) isHome[number] = 1;
  const between = (from, to) => { const found = []; for (let i = from; i < to; i += 1) if (!isHome[i]) found.push(i); return Int32Array.from(found); };
  return {
    ...packed.passes, step, isHome, sums: home.filter((number) => !updates.includes(number)),
    numbers: { F: between(0, forward), B: between(forward, step.count), I: between(forward, weights), W: between(weights, step.count) },
  };
}

// The streams of one rank and the host that issues their work (engine.py, Streams); the last stream leads to other stages.
class Streams {
  constructor(processor) { this.processor = processor; this.load = new Load(); this.free = new Map(); this.clock = 0; }
  until(stream) { return this.free.get(stream) ?? 0; }
  wait(stream, until) { // who computes also issues
    this.free.set(stream, Math.max(this.until(stream), until));
    if (this.processor) this.clock = Math.max(this.clock, until);
  }
  place(name, stream, seconds, host, ready) {
    this.clock += host;
    const start = Math.max(this.until(name), this.clock, ready), { processor } = this;
    let end = start + seconds;
    if (processor && seconds) {
      if (stream === processor.stream) end = this.load.finish(start, seconds);
      else if (stream in processor.shares) this.disturb(start, end, processor.shares[stream], processor.seconds[stream] ?? 0);
    }
    this.free.set(name, end);
    return [start, end];
  }
  disturb(start, end, share, seconds) {
    const issuedBy = Math.min(start + seconds, end);
    this.load.add(start, issuedBy, 1);
    this.load.add(issuedBy, end, share);
  }
}

const PASS = /^(\d+)([FIWB])(\d+)$/; // stage, kind and micro-batch of a pass
const COMPUTES = "compute", OUT = "to other stages";

// Run some events of a program; when the first starts and the last ends (play.py, _run).
function runEvents(streams, program, numbers, times, speeds) {
  const { step } = program;
  let first = Infinity, last = 0;
  for (const number of numbers) {
    const s = step.stream[number], name = step.streams[s];
    let ready = 0;
    for (let k = step.offsets[number]; k < step.offsets[number + 1]; k += 1) ready = Math.max(ready, times.ends[step.earlier[k]]);
    const seconds = step.latency[number] + step.wire[number] / (speeds.links[name] ?? 1) + step.local[number] / speeds.device;
    const [start, end] = streams.place(name, s, seconds, step.host[number] / speeds.host, ready);
    times.starts[number] = start; times.ends[number] = end;
    if (end > start) { first = Math.min(first, start); last = Math.max(last, end); }
  }
  return { first, last };
}

class PipelineModel {
  constructor(packed) { this.packed = packed; this.variants = packed.variants; this.decoded = new Map(); }

  program(number) {
    if (!this.decoded.has(number)) this.decoded.set(number, decodeProgram(this.packed.programs[number]));
    return this.decoded.get(number);
  }

  run(whatIf = {}) {
    const wanted = whatIf.microbatches ?? this.packed.microbatches, variant = this.variants.find((one) => one.microbatches === wanted);
    const programs = variant.programs.map((row) => row.map((number) => this.program(number)));
    return new Play(this.packed.stages, variant, programs, { links: whatIf.links ?? {}, device: whatIf.device ?? 1, host: whatIf.host ?? 1 }).run();
  }
}

const AGAINST = { START: 0, DEVICE: 1, ARRIVES: 2 }; // why a pass starts when it does

// All devices of the schedule together, event by event (play.py, _Play).
class Play {
  constructor(stages, variant, programs, speeds) {
    Object.assign(this, { stages, variant, programs, speeds, rate: speeds.links.stages ?? 1, arrived: new Map(), times: new Map(), sent: [] });
    this.devices = variant.orders.map((text, device) => text.split(" ").map((word, place) => {
      const [, stage, kind, mb] = word.match(PASS);
      return { stage: Number(stage), kind, mb: Number(mb), device, place };
    }));
    this.stagesOf = this.devices.map((_, d) => stages.map((stage, s) => (stage.device === d ? s : -1)).filter((s) => s >= 0));
    this.largest = variant.rows.indexOf(Math.max(...variant.rows));
    this.crossed = new Map(); // size, stage, as its source, back -> borders
    variant.borders.forEach((borders, size) => borders.forEach((one, number) => {
      for (const [stage, source] of [[one.source, true], [one.target, false]]) for (const back of one.grad ? [false, true] : [false]) {
        const key = `${size} ${stage} ${source} ${back}`;
        this.crossed.set(key, [...(this.crossed.get(key) ?? []), [number, one]]);
      }
    }));
  }

  program(stage, mb) { return this.programs[stage][mb < 0 ? this.largest : this.variant.sizes[mb]]; }

  timesOf(stage, mb) { // when the events of a micro-batch's passes run; -1: of what follows them
    const inside = this.stages.length === 1 && this.variant.sizes.length === 1; // the backward pass reduces gradients as it goes
    const key = `${stage} ${mb < 0 && inside ? 0 : mb}`;
    if (!this.times.has(key)) { const { count } = this.program(stage, mb).step; this.times.set(key, { starts: new Float64Array(count), ends: new Float64Array(count) }); }
    return this.times.get(key);
  }

  borders({ kind, stage, mb }, leaving) {
    if (kind === "W") return [];
    const back = kind !== "F";
    return this.crossed.get(`${this.variant.sizes[mb]} ${stage} ${leaving !== back} ${back}`) ?? [];
  }

  needs(action) {
    const found = [];
    for (const [number] of this.borders(action, false)) {
      const one = this.arrived.get(`${number} ${action.mb} ${action.kind !== "F"}`);
      if (!one) return null;
      found.push(one);
    }
    return found;
  }

  run() {
    const count = this.devices.length, heads = new Array(count).fill(0), ready = [], blocked = new Set(this.devices.keys());
    this.streams = this.devices.map((_, d) => new Streams(this.programs[this.stagesOf[d][0]][this.largest].step.processor));
    this.now = new Array(count).fill(0); this.bytes = new Array(count).fill(0); this.waits = this.devices.map(() => []);
    for (;;) {
      for (const device of [...blocked].sort((a, b) => a - b)) {
        const action = this.devices[device][heads[device]], needs = action && this.needs(action);
        if (!needs) continue;
        ready.push({ begins: Math.max(this.now[device], ...needs.map((one) => one.end)), device, needs });
        blocked.delete(device);
      }
      if (!ready.length) break;
      let best = 0;
      ready.forEach((one, i) => { if (one.begins < ready[best].begins || (one.begins === ready[best].begins && one.device < ready[best].device)) best = i; });
      const [{ begins, device, needs }] = ready.splice(best, 1);
      this.pass(this.devices[device][heads[device]], begins, needs);
      heads[device] += 1; blocked.add(device);
    }
    this.close();
    return this.told();
  }

  pass(action, begins, needs) {
    const { device, stage, kind, mb } = action, streams = this.streams[device], program = this.program(stage, mb);
    const waited = Math.max(0, ...needs.filter((one) => one.end >= begins).map((one) => begins - Math.max(this.now[device], one.left)));
    if (waited > 0) this.waits[device].push([begins - waited, begins]);
    const late = needs.find((one) => one.end >= begins && begins > this.now[device]);
    action.against = late ? AGAINST.ARRIVES : action.place ? AGAINST.DEVICE : AGAINST.START;
    action.cause = late ? late.from : this.devices[device][action.place - 1] ?? null;
    action.hop = late ? late.end - late.left : 0;
    if (needs.length) streams.wait(COMPUTES, begins);
    const { first, last } = runEvents(streams, program, program.numbers[kind], this.timesOf(stage, mb), this.speeds);
    action.start = first > last ? begins : first;
    action.end = first > last ? begins : last;
    this.now[device] = action.end;
    this.send(action);
  }

  send(action) {
    const { device, kind, mb, end: at } = action, back = kind !== "F";
    for (const [number, one] of this.borders(action, true)) {
      const target = this.stages[back ? one.source : one.target].device, way = one.ways[back ? 1 : 0];
      let start = at, end = at;
      if (way.link) {
        const [latency, wire, share, seconds] = way.link;
        [start, end] = this.streams[device].place(OUT, OUT, latency + wire / this.rate, 0, at);
        this.bytes[device] += way.bytes;
        this.sent.push({ name: one.name, back, mb, device, target, bytes: way.bytes, start, end });
        for (const streams of [this.streams[device], this.streams[target]]) if (streams.processor) streams.disturb(start, end, share, seconds);
      }
      this.arrived.set(`${number} ${mb} ${back}`, { left: at, end, from: action });
    }
  }

  // Gradients home, sums between stages that share a parameter, the optimizer.
  close() {
    const known = this.now[this.stages[this.stages.length - 1].device], begins = [], after = (device, end, which) => this.stagesOf[device].reduce((most, stage) => {
      const program = this.programs[stage][this.largest];
      return Math.max(most, runEvents(this.streams[device], program, program[which], this.timesOf(stage, -1), this.speeds).last);
    }, end);
    const summed = this.streams.map((streams, device) => {
      const apart = this.stagesOf[device].some((stage) => this.programs[stage][this.largest].sums.length), start = apart ? Math.max(this.now[device], known) : this.now[device];
      if (apart) streams.wait(COMPUTES, start); // the loss is told when the passes of its stage are through
      begins.push(start);
      return after(device, start, "sums");
    });
    const busy = summed.map((end, d) => end - begins[d]);
    for (const [devices, latency, wire] of this.variant.ties) {
      const seconds = latency + wire / this.rate, end = Math.max(...devices.map((d) => summed[d])) + seconds;
      for (const d of devices) { summed[d] = end; busy[d] += seconds; this.streams[d].wait(COMPUTES, end); }
    }
    this.closing = this.streams.map((streams, device) => {
      const end = Math.max(after(device, summed[device], "updates"), streams.clock);
      return { start: begins[device], end, busy: busy[device] + end - summed[device] };
    });
  }

  // Seconds in which a stage communicates, or its device waits for what is on its way, and nothing computes there.
  exposed(stage) {
    const { device } = this.stages[stage], talk = [...this.waits[device]], compute = [];
    const take = (own, mb, numbers) => {
      const { step } = this.program(own, mb), { starts, ends } = this.timesOf(own, mb);
      for (const i of numbers) if (ends[i] > starts[i]) { if (step.stream[i] === 0) compute.push([starts[i], ends[i]]); else if (own === stage) talk.push([starts[i], ends[i]]); }
    };
    for (const { stage: own, mb, kind } of this.devices[device]) take(own, mb, this.program(own, mb).numbers[kind]);
    for (const own of this.stagesOf[device]) for (const which of ["sums", "updates"]) take(own, -1, this.program(own, -1)[which]);
    return uncovered(talk, compute);
  }

  // What simulator/timeline.py tells of it.
  told() {
    const { devices, variant } = this, total = Math.max(...this.closing.map((one) => one.end));
    const busy = devices.map((order, d) => order.reduce((sum, action) => sum + (action.end - action.start), 0) + this.closing[d].busy);
    const memory = devices.map((_, d) => Math.max(...this.memoryCurve(d)));
    return Object.assign(this, {
      total, busy, memory, bubble: Math.max(0, 1 - busy.reduce((a, b) => a + b, 0) / (total * devices.length)),
      makespan: Math.max(...devices.map((order) => order[order.length - 1].end)) - Math.min(...devices.map((order) => order[0].start)),
      sentBytes: Math.max(...this.bytes),
      told: this.stages.map(({ device }, s) => ({
        busy: devices[device].reduce((sum, action) => sum + (action.stage === s ? action.end - action.start : 0), 0) + this.closing[device].busy,
        bubble: Math.max(0, 1 - busy[device] / total), exposed: this.exposed(s), memory: memory[device],
      })),
      at: (stage, mb) => this.program(stage, mb), order: variant.order,
    });
  }

  memoryCurve(device) {
    const mine = this.stagesOf[device].map((stage) => this.programs[stage][this.largest].bytes), there = mine.reduce((sum, one) => sum + one.resting, 0);
    const held = new Map(), kept = new Map(), curve = [], order = this.devices[device], sum = (values) => [...values].reduce((a, b) => a + b, 0);
    order.forEach((action, place) => {
      const { stage, kind, mb } = action, here = this.program(stage, mb).bytes, key = `${stage} ${mb}`;
      if (kind !== "F" && this.variant.sizes.length > 1) kept.set(stage, here.kept);
      held.delete(key);
      curve.push(there + sum(kept.values()) + sum(held.values()) + here.peaks[kind] + (order[place + 1] ? this.receives(order[place + 1]) : 0));
      held.set(key, kind === "F" ? here.held : kind === "I" ? here.held_for_weights : 0);
    });
    return [...curve, there + mine.reduce((a, one) => a + one.kept, 0) + Math.max(...mine.map((one) => one.closing))];
  }

  receives({ stage, kind, mb }) {
    if (kind === "W") return 0;
    let total = 0;
    for (const one of this.variant.borders[this.variant.sizes[mb]]) {
      if (stage === (kind === "F" ? one.target : one.source) && (kind === "F" || one.grad)) total += one.ways[kind === "F" ? 0 : 1].into;
    }
    return total;
  }
}

// All events of one device in time: {run, device, starts, ends, numbers (of the events), actions, place(stage, mb, number)}.
function deviceEvents(run, device) {
  const starts = [], ends = [], numbers = [], actions = [], places = new Map();
  const put = (action, list, slot = action.mb) => {
    const times = run.timesOf(action.stage, slot);
    for (const number of list) { places.set(`${action.stage} ${action.mb} ${number}`, starts.length); starts.push(times.starts[number]); ends.push(times.ends[number]); numbers.push(number); actions.push(action); }
  };
  for (const action of run.devices[device]) put(action, run.program(action.stage, action.mb).numbers[action.kind]);
  const { start, end } = run.closing[device];
  for (const stage of run.stagesOf[device]) put({ stage, kind: "close", mb: -1, device, start, end }, run.program(stage, -1).sums, -1);
  for (const stage of run.stagesOf[device]) put({ stage, kind: "close", mb: -1, device, start, end }, run.program(stage, -1).updates, -1);
  return { run, device, starts, ends, numbers, actions, place: (stage, mb, number) => places.get(`${stage} ${mb} ${number}`) };
}

// The storages of one device over the whole step, in the form that memoryOverTime and aliveAt read.
function deviceMemory(events) {
  const { run, device } = events, rows = [];
  for (const stage of run.stagesOf[device]) {
    run.variant.sizes.forEach((_, mb) => {
      const program = run.program(stage, mb), held = program.step.storages, last = program.step.count - 1, received = new Set(program.received);
      for (let s = 0; s < held.count; s += 1) {
        const came = held.born[s] < 0 && received.has(held.what(s)), born = came ? program.numbers.F[0] : held.born[s], dies = held.dies[s];
        const stays = !came && (dies >= last || program.isHome[dies]), late = born >= 0 && program.isHome[born];
        if ((born < 0 || stays || late) && mb > 0) continue; // gradients of later micro-batches are added to the first's
        const from = born < 0 ? -1 : events.place(stage, late ? -1 : mb, born), to = born < 0 || stays || late ? events.place(stage, -1, dies) ?? events.starts.length - 1 : events.place(stage, mb, dies) ?? events.starts.length - 1;
        if (from !== undefined) rows.push([held, s, from, to, mb, born < 0]);
      }
    });
  }
  const of = (what) => (i) => rows[i][0][what](rows[i][1]);
  const storages = {
    count: rows.length, bytes: Float64Array.from(rows, ([held, s]) => held.bytes[s]), born: Int32Array.from(rows, (row) => row[2]), dies: Int32Array.from(rows, (row) => row[3]),
    kind: of("kind"), module: of("module"), what: (i) => `${of("what")(i)}${rows[i][5] ? "" : `, micro-batch ${rows[i][4]}`}`,
  };
  return { step: { storages }, starts: events.starts, ends: events.ends, total: run.total };
}
