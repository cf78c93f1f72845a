// A step simulated in the page: a twin of simulator/engine.py, simulator/what_if.py, simulator/play.py and of what
// simulator/timeline.py tells. What it computes is tested against `shardwright simulate --json` at many settings, numbers of
// micro-batches among them.

const LEAST_SPEED = 0.1; // of simulator/engine.py

// Columns over tables -> typed arrays that the simulation can run over many times.
function decodeStep(packed) {
  const count = packed.stream.length;
  const words = reader(packed.words), floats = reader(packed.numbers);
  const offsets = new Int32Array(count + 1);
  packed.waits.forEach((list, i) => { offsets[i + 1] = offsets[i] + list.length; });
  const earlier = new Int32Array(offsets[count]);
  packed.waits.forEach((list, i) => list.forEach((distance, k) => { earlier[offsets[i] + k] = i - distance; }));
  // In the order in which packing.py wrote them.
  const columns = {};
  for (const name of ["kind", "phase", "name", "module", "collective", "carries"]) columns[name] = words(packed[name]);
  for (const name of ["bytes", "latency", "wire", "local", "host"]) columns[name] = Float64Array.from(floats(packed[name]));
  const held = packed.storages, bytes = Float64Array.from(floats(held.bytes));
  const kinds = words(held.kind), whats = words(held.what), modules = words(held.module);
  let at = 0;
  const born = Int32Array.from(held.born, (step) => { at += step; return at; });
  const word = (column) => (index) => column[index];
  return {
    streams: packed.streams, count, processor: packed.processor, stream: Int32Array.from(packed.stream),
    latency: columns.latency, wire: columns.wire, local: columns.local, host: columns.host, bytes: columns.bytes, offsets, earlier,
    kind: word(columns.kind), phase: word(columns.phase), name: word(columns.name), module: word(columns.module),
    collective: word(columns.collective), carries: word(columns.carries),
    storages: {
      count: born.length, bytes, born, dies: Int32Array.from(held.lives, (life, i) => born[i] + life),
      kind: word(kinds), what: word(whats), module: word(modules),
    },
  };
}

// Columns say how far back in a table the entry stands; 0 is the next entry that was not read yet.
function reader(table) {
  let known = 0;
  return (column) => column.map((back) => (back === 0 ? table[known++] : table[known - back]));
}

// One stage for one size of micro-batch: its events, by the kind of pass that they belong to (R: reductions, U: the update).
function decodeProgram(packed) {
  const step = decodeStep(packed), once = new Uint8Array(step.count), passes = {};
  for (const [kind, runs] of Object.entries(packed.passes)) {
    passes[kind] = Int32Array.from(runs.flatMap(([from, to]) => Array.from({ length: to - from }, (_, i) => from + i)));
  }
  for (const kind of ["R", "U"]) for (const number of passes[kind]) once[number] = 1;
  return { step, passes, once, apart: packed.apart, received: packed.received, held: packed.held };
}

// What else a processor has to do while it communicates for itself (engine.py, _Load).
class Load {
  constructor() { this.spans = []; } // [end, start, share], ordered
  add(start, end, share) {
    if (!(end > start)) return;
    const span = [end, start, share];
    let low = 0, high = this.spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (before(span, this.spans[middle])) high = middle; else low = middle + 1;
    }
    this.spans.splice(low, 0, span);
  }
  finish(start, work) {
    let now = start, first = 0;
    while (first < this.spans.length && this.spans[first][0] <= start) first += 1;
    for (let place = first; place < this.spans.length; place += 1) {
      const end = this.spans[place][0];
      if (end <= now) continue;
      const later = this.spans.slice(place);
      const borders = [...new Set([end, ...later.map((s) => s[1]).filter((begin) => now < begin && begin < end)])];
      borders.sort((a, b) => a - b);
      for (const border of borders) {
        let taken = 0;
        for (const [, begin, share] of later) if (begin <= now) taken += share;
        const speed = Math.max(1 - taken, LEAST_SPEED);
        if (work <= speed * (border - now)) return now + work / speed;
        work -= speed * (border - now);
        now = border;
      }
    }
    return now + work;
  }
}

function before(a, b) {
  for (let i = 0; i < 3; i += 1) if (a[i] !== b[i]) return a[i] < b[i];
  return false;
}

// The streams of one rank and the host that issues their work (engine.py, Streams).
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

const STREAM = -1, HOST = -2, NOTHING = -3; // why an event starts when it does, where no other event is the reason
const PASS = /^(\d+)([FIWB])(\d+)$/; // stage, kind and micro-batch of a pass
const COMPUTES = "compute", OUT = "to other stages";

class Times { // of the events of one micro-batch of a stage
  constructor(count) {
    for (const what of ["starts", "ends", "issued", "seconds"]) this[what] = new Float64Array(count);
    this.cause = new Int32Array(count).fill(NOTHING);
  }
}

// Run some events of a program; when the first starts and the last ends (play.py, _run).
function runEvents(streams, program, numbers, times, speeds) {
  const { step } = program;
  let first = Infinity, last = 0;
  for (const number of numbers) {
    const s = step.stream[number], name = step.streams[s], host = step.host[number] / speeds.host;
    const free = streams.until(name), issued = streams.clock + host;
    let ready = 0, cause = Math.max(free, issued) === 0 ? NOTHING : free >= issued ? STREAM : HOST;
    for (let k = step.offsets[number]; k < step.offsets[number + 1]; k += 1) {
      const end = times.ends[step.earlier[k]];
      if (end > ready) { ready = end; if (end > free && end > issued) cause = step.earlier[k]; }
    }
    const seconds = step.latency[number] + step.wire[number] / (speeds.links[name] ?? 1) + step.local[number] / speeds.device;
    const [start, end] = streams.place(name, s, seconds, host, ready);
    times.starts[number] = start; times.ends[number] = end; times.issued[number] = streams.clock;
    times.seconds[number] = seconds; times.cause[number] = cause;
    if (end > start) { first = Math.min(first, start); last = Math.max(last, end); }
  }
  return { first, last };
}

class StepModel {
  constructor(packed) { this.packed = packed; this.variants = packed.variants; this.decoded = new Map(); }

  program(number) {
    if (!this.decoded.has(number)) this.decoded.set(number, decodeProgram(this.packed.programs[number]));
    return this.decoded.get(number);
  }

  // whatIf = {links: {axis: factor}, device: factor, host: factor, microbatches}
  run(whatIf = {}) {
    const wanted = whatIf.microbatches ?? this.packed.microbatches, variant = this.variants.find((one) => one.microbatches === wanted);
    const programs = variant.programs.map((row) => row.map((number) => this.program(number)));
    return new Play(this.packed.stages, variant, programs, { links: whatIf.links ?? {}, device: whatIf.device ?? 1, host: whatIf.host ?? 1 }).run();
  }
}

const AGAINST = { START: 0, GROUP: 1, ARRIVES: 2 }; // why a pass starts when it does

// All groups of ranks together, event by event (play.py, _Play).
class Play {
  constructor(stages, variant, programs, speeds) {
    Object.assign(this, { stages, variant, programs, speeds, rate: speeds.links.stages ?? 1, arrived: new Map(), times: new Map() });
    this.groups = variant.orders.map((text, group) => text.split(" ").map((word, place) => {
      const [, stage, kind, mb] = word.match(PASS);
      return { stage: Number(stage), kind, mb: Number(mb), group, place };
    }));
    this.stagesOf = this.groups.map((_, g) => stages.map((stage, s) => (stage.group === g ? s : -1)).filter((s) => s >= 0));
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
    const program = this.program(stage, mb), key = `${stage} ${mb < 0 && !program.apart ? 0 : mb}`;
    if (!this.times.has(key)) this.times.set(key, new Times(program.step.count));
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
    const count = this.groups.length, heads = new Array(count).fill(0), ready = [], blocked = new Set(this.groups.keys());
    this.streams = this.groups.map((_, g) => new Streams(this.programs[this.stagesOf[g][0]][this.largest].step.processor));
    this.now = new Array(count).fill(0); this.sent = new Array(count).fill(0); this.waits = this.groups.map(() => []);
    for (;;) {
      for (const group of [...blocked].sort((a, b) => a - b)) {
        const action = this.groups[group][heads[group]], needs = action && this.needs(action);
        if (!needs) continue;
        ready.push({ begins: Math.max(this.now[group], ...needs.map((one) => one.end)), group, needs });
        blocked.delete(group);
      }
      if (!ready.length) break;
      let best = 0;
      ready.forEach((one, i) => { if (one.begins < ready[best].begins || (one.begins === ready[best].begins && one.group < ready[best].group)) best = i; });
      const [{ begins, group, needs }] = ready.splice(best, 1);
      this.pass(this.groups[group][heads[group]], begins, needs);
      heads[group] += 1; blocked.add(group);
    }
    this.close();
    return this.told();
  }

  pass(action, begins, needs) {
    const { group, stage, kind, mb } = action, streams = this.streams[group], program = this.program(stage, mb);
    const waited = Math.max(0, ...needs.filter((one) => one.end >= begins).map((one) => begins - Math.max(this.now[group], one.left)));
    if (waited > 0) this.waits[group].push([begins - waited, begins]);
    const late = needs.find((one) => one.end >= begins && begins > this.now[group]);
    action.against = late ? AGAINST.ARRIVES : action.place ? AGAINST.GROUP : AGAINST.START;
    action.cause = late ? late.from : this.groups[group][action.place - 1] ?? null;
    action.hop = late ? late.end - late.left : 0;
    if (needs.length) streams.wait(COMPUTES, begins);
    const { first, last } = runEvents(streams, program, program.passes[kind], this.timesOf(stage, mb), this.speeds);
    action.start = first > last ? begins : first;
    action.end = first > last ? begins : last;
    this.now[group] = action.end;
    this.send(action);
  }

  send(action) {
    const { group, kind, mb, end: at } = action, back = kind !== "F";
    for (const [number, one] of this.borders(action, true)) {
      const target = this.stages[back ? one.source : one.target].group, way = one.ways[back ? 1 : 0];
      let start = at, end = at;
      if (way.link) {
        const [latency, wire, share, seconds] = way.link;
        [start, end] = this.streams[group].place(OUT, OUT, latency + wire / this.rate, 0, at);
        this.sent[group] += way.bytes;
        for (const streams of [this.streams[group], this.streams[target]]) if (streams.processor) streams.disturb(start, end, share, seconds);
      }
      this.arrived.set(`${number} ${mb} ${back}`, { left: at, end, from: action });
    }
  }

  // Gradients that are reduced apart, sums between stages that share a parameter, the optimizer.
  close() {
    const known = this.now[this.stages[this.stages.length - 1].group], begins = [], after = (group, end, kind) => this.stagesOf[group].reduce((most, stage) => {
      const program = this.programs[stage][this.largest];
      return Math.max(most, runEvents(this.streams[group], program, program.passes[kind], this.timesOf(stage, -1), this.speeds).last);
    }, end);
    const reduced = this.streams.map((streams, group) => {
      const apart = this.stagesOf[group].some((stage) => this.programs[stage][this.largest].passes.R.length), start = apart ? Math.max(this.now[group], known) : this.now[group];
      if (apart) streams.wait(COMPUTES, start); // the loss is told when the passes of its stage are through
      begins.push(start);
      return after(group, start, "R");
    });
    const busy = reduced.map((end, g) => end - begins[g]);
    for (const [groups, latency, wire] of this.variant.ties) {
      const seconds = latency + wire / this.rate, end = Math.max(...groups.map((g) => reduced[g])) + seconds;
      for (const g of groups) { reduced[g] = end; busy[g] += seconds; this.streams[g].wait(COMPUTES, end); }
    }
    this.closing = this.streams.map((streams, group) => {
      const end = Math.max(after(group, reduced[group], "U"), streams.clock);
      return { start: begins[group], end, busy: busy[group] + end - reduced[group] };
    });
  }

  // Everything that a rank of a group does, in the order of issue: visit(action, times, program, number).
  visit(group, visit) {
    for (const action of this.groups[group]) {
      const program = this.program(action.stage, action.mb), times = this.timesOf(action.stage, action.mb);
      for (const number of program.passes[action.kind]) visit(action, times, program, number);
    }
    const { start, end } = this.closing[group];
    for (const kind of ["R", "U"]) for (const stage of this.stagesOf[group]) {
      const action = { stage, kind: "close", mb: -1, group, start, end }, program = this.program(stage, -1), times = this.timesOf(stage, -1);
      for (const number of program.passes[kind]) visit(action, times, program, number);
    }
  }

  // Seconds in which a group, or one of its stages, communicates or waits for what is on its way, and nothing computes there.
  exposed(group, stage = null) {
    const talk = [...this.waits[group]], compute = [];
    this.visit(group, (action, { starts, ends, seconds }, { step }, i) => {
      if (!(seconds[i] > 0)) return;
      if (step.stream[i] === 0) compute.push([starts[i], ends[i]]);
      else if (stage === null || action.stage === stage) talk.push([starts[i], ends[i]]);
    });
    return uncovered(talk, compute);
  }

  // What simulator/timeline.py tells of it.
  told() {
    const { groups, variant } = this, total = Math.max(...this.closing.map((one) => one.end));
    const busy = groups.map((order, g) => order.reduce((sum, action) => sum + (action.end - action.start), 0) + this.closing[g].busy);
    const memory = groups.map((_, g) => this.needed(g)), loads = groups.map((_, g) => this.load(g));
    return Object.assign(this, {
      total, busy, memory, loads, bubble: Math.max(0, 1 - busy.reduce((a, b) => a + b, 0) / (total * groups.length)),
      makespan: Math.max(...groups.map((order) => order[order.length - 1].end)) - Math.min(...groups.map((order) => order[0].start)),
      sentBytes: Math.max(...this.sent),
      exposedSeconds: Math.max(...groups.map((_, g) => this.exposed(g))),
      sum: Math.max(...loads.map((load) => [...load.values()].reduce((a, b) => a + b, 0))),
      told: this.stages.map(({ group }, s) => ({
        busy: groups[group].reduce((sum, action) => sum + (action.stage === s ? action.end - action.start : 0), 0) + this.closing[group].busy,
        bubble: Math.max(0, 1 - busy[group] / total), exposed: this.exposed(group, s), memory: memory[group],
      })),
      order: variant.order,
    });
  }

  // Seconds that every stream of a group works.
  load(group) {
    const found = new Map(this.stagesOf[group].flatMap((stage) => this.program(stage, -1).step.streams.map((name) => [name, 0])));
    this.visit(group, (_, { seconds }, { step }, i) => { const name = step.streams[step.stream[i]]; found.set(name, found.get(name) + seconds[i]); });
    return found;
  }

  // No schedule of a group's events is shorter.
  bound(group) {
    const events = groupEvents(this, group), ends = new Float64Array(events.count);
    let longest = 0, issuing = 0;
    for (let k = 0; k < events.count; k += 1) {
      const { step } = events.programs[k], number = events.numbers[k];
      let start = 0;
      for (let w = step.offsets[number]; w < step.offsets[number + 1]; w += 1) start = Math.max(start, ends[events.before(k, step.earlier[w])] ?? 0);
      ends[k] = events.seconds[k] + start;
      longest = Math.max(longest, ends[k]);
      issuing += step.host[number] / this.speeds.host;
    }
    return Math.max(longest, issuing, ...this.loads[group].values());
  }

  // Bytes that a rank of a group must have.
  needed(group) {
    const { planned } = this.program(this.stagesOf[group][0], -1).held;
    if (planned !== null) return planned;
    const mine = this.stagesOf[group].map((stage) => this.programs[stage][this.largest].held), there = mine.reduce((sum, one) => sum + one.resting, 0);
    const held = new Map(), kept = new Map(), order = this.groups[group], sum = (values) => [...values].reduce((a, b) => a + b, 0);
    let most = there + mine.reduce((a, one) => a + one.kept, 0) + Math.max(...mine.map((one) => one.closing));
    order.forEach((action, place) => {
      const { stage, kind, mb } = action, here = this.program(stage, mb).held, key = `${stage} ${mb}`;
      if (kind !== "F" && this.variant.sizes.length > 1) kept.set(stage, here.kept);
      held.delete(key);
      most = Math.max(most, there + sum(kept.values()) + sum(held.values()) + here.peaks[kind] + (order[place + 1] ? this.receives(order[place + 1]) : 0));
      held.set(key, kind === "F" ? here.held : kind === "I" ? here.held_for_weights : 0);
    });
    return most;
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

// The length of some spans without what others cover.
function uncovered(some, others) {
  const talk = merged(some), compute = merged(others);
  let common = 0;
  for (let i = 0, j = 0; i < talk.length && j < compute.length;) {
    common += Math.max(0, Math.min(talk[i][1], compute[j][1]) - Math.max(talk[i][0], compute[j][0]));
    if (talk[i][1] < compute[j][1]) i += 1; else j += 1;
  }
  return talk.reduce((sum, [start, end]) => sum + (end - start), 0) - common;
}

function merged(spans) {
  const found = [];
  spans.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (const [start, end] of spans) {
    const top = found[found.length - 1];
    if (top && start <= top[1]) top[1] = Math.max(top[1], end); else found.push([start, end]);
  }
  return found;
}

// All events of one rank of a group in the order of issue, as columns; `place` and `before` find an event of the same
// micro-batch, or of what follows the passes, by its number in its program.
function groupEvents(run, group) {
  const found = { run, group, starts: [], ends: [], issued: [], seconds: [], cause: [], numbers: [], actions: [], programs: [] };
  const places = new Map(), latest = new Map(), key = ({ stage, mb }, number) => `${stage} ${mb} ${number}`;
  run.visit(group, (action, times, program, number) => {
    places.set(key(action, number), found.starts.length); latest.set(`${action.stage} ${number}`, found.starts.length);
    for (const what of ["starts", "ends", "issued", "seconds", "cause"]) found[what].push(times[what][number]);
    found.numbers.push(number); found.actions.push(action); found.programs.push(program);
  });
  found.count = found.starts.length;
  found.place = (stage, mb, number) => places.get(`${stage} ${mb} ${number}`);
  found.before = (k, number) => { // what follows the passes waits for the last micro-batch
    const action = found.actions[k];
    return places.get(key(action, number)) ?? latest.get(`${action.stage} ${number}`);
  };
  return found;
}

// The storages of one rank over the whole step: bytes, kind, what and module, from event to event.
function groupMemory(events) {
  const { run, group } = events, several = run.variant.sizes.length > 1, rows = [];
  for (const stage of run.stagesOf[group]) {
    run.variant.sizes.forEach((_, mb) => {
      const program = run.program(stage, mb), held = program.step.storages, last = program.step.count - 1, received = new Set(program.received);
      for (let s = 0; s < held.count; s += 1) {
        const came = held.born[s] < 0 && received.has(held.what(s)), born = came ? program.passes.F[0] : held.born[s], dies = held.dies[s];
        const stays = !came && (dies >= last || program.once[dies]), late = born >= 0 && program.once[born];
        if ((born < 0 || stays || late) && mb > 0) continue; // gradients of later micro-batches are added to the first's
        const from = born < 0 ? -1 : events.place(stage, late ? -1 : mb, born), to = events.place(stage, born < 0 || stays || late ? -1 : mb, dies) ?? events.count - 1;
        if (from !== undefined) rows.push([held, s, from, to, mb, born < 0]);
      }
    });
  }
  const of = (what) => (i) => rows[i][0][what](rows[i][1]);
  return {
    run, count: rows.length, bytes: Float64Array.from(rows, ([held, s]) => held.bytes[s]), ...turns(events, rows),
    kind: of("kind"), module: of("module"), what: (i) => `${of("what")(i)}${rows[i][5] || !several ? "" : `, micro-batch ${rows[i][4]}`}`,
  };
}

// When storages come and go, by the event in whose turn they do: memory is taken and given back in the order of issue, so that no
// event's turn comes before that of an earlier one.
function turns(events, rows) {
  const clock = new Float64Array(events.count + 1);
  for (let k = 0, now = 0; k < events.count; k += 1) { now = Math.max(now, events.starts[k]); clock[k] = now; }
  clock[events.count] = events.run.closing[events.group].end;
  return { clock, from: Int32Array.from(rows, (row) => Math.max(row[2], 0)), to: Int32Array.from(rows, (row) => (row[5] ? events.count + 1 : row[3] + 1)) };
}

// Bytes alive over the seconds of the step, per kind: {times, kinds, levels: [per kind], total}.
function memoryOverTime(storages) {
  const kinds = [], places = {}, changes = [], { clock } = storages;
  for (let i = 0; i < storages.count; i += 1) {
    const kind = storages.kind(i);
    if (!(kind in places)) { places[kind] = kinds.length; kinds.push(kind); }
    changes.push([storages.from[i], places[kind], storages.bytes[i]]);
    if (storages.to[i] < clock.length) changes.push([storages.to[i], places[kind], -storages.bytes[i]]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  const times = [], levels = kinds.map(() => []), total = [], now = kinds.map(() => 0);
  for (let i = 0; i < changes.length; i += 1) {
    now[changes[i][1]] += changes[i][2];
    if (i + 1 < changes.length && changes[i + 1][0] === changes[i][0]) continue;
    times.push(clock[changes[i][0]]);
    kinds.forEach((_, k) => levels[k].push(now[k]));
    total.push(now.reduce((a, b) => a + b, 0));
  }
  return { times, kinds, levels, total };
}

// The largest storages alive at a second.
function aliveAt(storages, second, most = 6) {
  const alive = [];
  for (let i = 0; i < storages.count; i += 1) if (storages.clock[storages.from[i]] <= second && second < (storages.clock[storages.to[i]] ?? Infinity)) alive.push(i);
  alive.sort((a, b) => storages.bytes[b] - storages.bytes[a]);
  return alive.slice(0, most).map((i) => ({
    bytes: storages.bytes[i], kind: storages.kind(i), what: storages.what(i), module: storages.module(i),
  }));
}

function eventTitle(step, i) {
  const talk = step.collective(i);
  return talk ? `${talk.replaceAll("_", "-")} of ${step.name(i)}` : `${step.phase(i)} of ${step.name(i)}`;
}

// Events on the chain that decides when a group is done, last first; where it begins with the host's issuing, `issuedTo` says up to
// which event.
function decidingChain(events) {
  const { starts, ends, count } = events, chain = [], previous = new Int32Array(count), last = new Map();
  const stream = (k) => events.programs[k].step.stream[events.numbers[k]];
  for (let k = 0; k < count; k += 1) { previous[k] = last.get(stream(k)) ?? -1; last.set(stream(k), k); }
  let at = -1;
  for (let k = 0; k < count; k += 1) if (at < 0 || ends[k] > ends[at]) at = k;
  while (at >= 0) {
    chain.push(at);
    const cause = events.cause[at];
    if (cause === HOST) return { chain, issuedTo: at };
    if (cause === STREAM) at = ends[previous[at]] === starts[at] ? previous[at] : ends.findIndex((end, k) => k < at && end === starts[at]);
    else at = cause >= 0 ? events.before(at, cause) : -1;
  }
  return { chain, issuedTo: -1 };
}
