// Shows the CUDA calls of processes while they are watched: sums by function over the
// last seconds, and the latest recorded calls.
import { amount, clock, count, el, nanoseconds, put } from "./format.js";
import { store } from "./store.js";
import { follow } from "./stream.js";

const WINDOW = 25;  // batches, five a second
const LAST = 60;    // recorded calls that are shown

const byId = (id) => document.getElementById(id);
let stop = null;      // ends the stream; null: not watching
let batches = [];
let last = [];
let paused = false, missed = 0, drawing = false;

function scope() {
  const [key, pid] = byId("calls-of").value.split(" ");
  return { key, pid: pid ? Number(pid) : null };
}

function watch(yes) {
  stop?.abort();
  stop = null;
  batches = [];
  last = [];
  missed = 0;
  byId("calls-watch").setAttribute("aria-pressed", String(yes));
  put(byId("calls-watch"), yes ? "Stop watching" : "Watch");
  byId("calls-body").hidden = !yes;
  byId("calls-pause").hidden = !yes;
  put(byId("calls-note"), yes ? "Waiting for calls" : "Calls are recorded only while they are watched.");
  if (!yes) return;
  stop = new AbortController();
  const { key } = scope();
  follow(`api/v1/calls${key ? `?container=${key}` : ""}`, { live: (yes, refused) => refused && put(byId("calls-note"), refused), calls: take }, stop.signal);
  draw();
}

function take(batch) {
  if (paused) {
    missed += 1;
    put(byId("calls-pause"), `Paused, ${missed} new`);
    return;
  }
  const { pid } = scope();
  if (pid) batch.processes = batch.processes.filter((process) => process.pid === pid);
  batches.push(batch);
  if (batches.length > WINDOW) batches.shift();
  for (const process of batch.processes) for (const call of process.recorded) last.push({ ...call, when: batch.unix_ms, process });
  last = last.slice(-500);
  draw();
}

// The calls are drawn at most once per frame, even if batches arrive more often.
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (stop) show();
  });
}

function show() {
  const wanted = byId("calls-filter").value.trim().toLowerCase();
  const matches = (name) => name.toLowerCase().includes(wanted);
  const seconds = Math.max(0.001, batches.reduce((sum, batch) => sum + batch.elapsed_ms, 0) / 1000);
  const functions = new Map(), mute = new Set(), pids = new Set();
  let all = 0, recorded = 0, dropped = 0;
  for (const batch of batches) for (const process of batch.processes) {
    all += process.calls;
    dropped += process.dropped;
    pids.add(process.pid);
    if (process.one_in === 0) mute.add(process.pid);
    for (const f of process.functions) {
      recorded += f.recorded;
      if (!matches(f.name)) continue;
      const sum = functions.get(f.name) ?? { name: f.name, calls: 0, recorded: 0, bytes: 0, failed: 0, total_ns: 0, longest_ns: 0 };
      for (const field of ["calls", "recorded", "bytes", "failed", "total_ns"]) sum[field] += f[field];
      sum.longest_ns = Math.max(sum.longest_ns, f.longest_ns);
      functions.set(f.name, sum);
    }
  }
  const rows = [...functions.values()].sort((a, b) => b.calls - a.calls || (a.name < b.name ? -1 : 1)).slice(0, 60);
  byId("calls-rows").replaceChildren(...rows.map((f) => el("tr", {},
    el("th", { scope: "row" }, el("code", {}, f.name)),
    el("td", { class: "n" }, (f.recorded < f.calls ? "~" : "") + count(f.calls / seconds)),
    el("td", { class: "n" }, nanoseconds(f.total_ns / f.recorded)), el("td", { class: "n" }, nanoseconds(f.longest_ns)),
    el("td", { class: "n" }, f.bytes ? `${amount(f.bytes / seconds)}/s` : "–"),
    el("td", { class: f.failed ? "n warn" : "n" }, String(f.failed)))));
  byId("calls-last").replaceChildren(...last.filter((call) => matches(call.name)).slice(-LAST).reverse().map((call) => el("li", {},
    el("time", { datetime: new Date(call.when).toISOString() }, clock(call.when)),
    el("span", { title: call.process.container }, `${call.process.command} ${call.process.pid}/${call.thread}`),
    el("code", {}, call.name),
    el("span", { class: "why" }, [nanoseconds(call.duration_ns), call.bytes ? amount(call.bytes) : "", call.result ? `returned ${call.result}` : "",
      call.stands_for > 1 ? `1 of ${count(call.stands_for)}` : ""].filter(Boolean).join(" · ")))));
  const words = [`${count(all / seconds)} calls per second in ${pids.size} ${pids.size === 1 ? "process" : "processes"}`];
  if (recorded < all - dropped) words.push(`1 in ${count(Math.max(1, all / Math.max(1, recorded)))} recorded`);
  words.push(`${count(dropped)} dropped`);
  if (mute.size) words.push(`${mute.size} with a library that is too old to record calls`);
  put(byId("calls-note"), batches.length ? words.join(", ") : "Waiting for calls");
}

// Fills the list from which the user chooses a container or a process.
function offer() {
  const select = byId("calls-of"), chosen = select.value;
  const options = [el("option", { value: "" }, "All containers")];
  for (const container of [...store.containers.values()].sort((a, b) => (a.name < b.name ? -1 : 1))) {
    const group = el("optgroup", { label: container.name }, el("option", { value: container.key }, container.name));
    if (container.processes.length > 1) {
      for (const p of container.processes) group.append(el("option", { value: `${container.key} ${p.pid}` }, `${p.command} ${p.pid}`));
    }
    options.push(group);
  }
  select.replaceChildren(...options);
  select.value = chosen;
  if (select.selectedIndex < 0) select.value = "";
}

export function watchCallsOf(key) {
  offer();
  byId("calls-of").value = key;
  watch(true);
  byId("calls-watch").focus();
  byId("calls-title").scrollIntoView({ block: "nearest" });
}

export function beginCalls() {
  byId("calls-watch").addEventListener("click", () => watch(stop === null));
  for (const moment of ["pointerdown", "focus"]) byId("calls-of").addEventListener(moment, offer);
  byId("calls-of").addEventListener("change", () => { if (stop) watch(true); });
  byId("calls-filter").addEventListener("input", draw);
  byId("calls-pause").addEventListener("click", () => {
    paused = !paused;
    missed = 0;
    byId("calls-pause").setAttribute("aria-pressed", String(paused));
    put(byId("calls-pause"), paused ? "Paused" : "Pause");
  });
  watch(false);
}
