// Shows the details below a container's row: reason, states of the last hours,
// processes.
import { bytes, clock, count, duration, el, nanoseconds, put, svg, ticking, took } from "./format.js";
import { ask } from "./stream.js";
import { calls, idleMs, lastCall, nodeNow } from "./store.js";

const HOURS_MS = 6 * 3600 * 1000;
const rates = new Map(); // pid -> [calls, when, rate]

function rate(process) {
  const now = performance.now(), before = rates.get(process.pid);
  if (!before) rates.set(process.pid, [process.calls, now, 0]);
  else if (now - before[1] > 900) rates.set(process.pid, [process.calls, now, Math.max(0, process.calls - before[0]) / ((now - before[1]) / 1000)]);
  return rates.get(process.pid)[2];
}

// Text of the hook overhead per call: the highest value that a process of the container
// measured.
function hook(container) {
  const most = Math.max(0, ...container.processes.map((process) => process.call_cost_ps ?? 0));
  return most ? `, the hook adds ${nanoseconds(most / 1000)} to each` : "";
}

const sum = (container, name) => container.processes.reduce((all, process) => all + (process[name] ?? 0), 0);

// Text of the memory that the last offload did not have to copy.
function spared(container) {
  const [same, zero] = [sum(container, "unchanged_bytes"), sum(container, "zero_bytes")];
  return (same ? `; ${bytes(same)} were unchanged, not copied` : "") + (zero ? `; ${bytes(zero)} were all zero, not stored` : "");
}

// Host memory of the copies that a resident container retains for its next offload.
function kept(container) {
  const now = sum(container, "kept_bytes");
  return now ? [fact("Retained in host RAM", bytes(now))] : [];
}

// Share of the offloaded content that is on disk and not in host memory.
function onDisk(container) {
  const share = Math.round((100 * container.disk_bytes) / Math.max(1, container.offloaded_bytes));
  return container.disk_bytes ? [fact("On disk", `${bytes(container.disk_bytes)}, ${share} % of the offloaded content`)] : [];
}

// VRAM that stays on the GPU while the container is offloaded, and the reasons.
function stays(container) {
  const reasons = (container.staying_reasons || []).join(", ") || "context";
  return container.staying_bytes ? [fact("Stays on the GPU", `${bytes(container.staying_bytes)}: ${reasons}`)] : [];
}

function fact(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

export function detail() {
  const node = el("div", { class: "detail", role: "cell", "aria-colspan": 9 });
  node.append(el("p", { class: "reason" }), el("dl", { class: "facts" }), el("div", { class: "timeline" }), el("div", { class: "processes", role: "region", tabindex: 0, "aria-label": "Processes" }));
  return node;
}

export function drawDetail(node, container) {
  const [reason, facts, , processes] = node.children;
  node.setAttribute("aria-label", `Details of ${container.name}`);
  reason.replaceChildren(`${container.state}: ${container.reason_text}`);
  for (const warning of container.warnings) reason.append(el("br"), el("span", { class: "warn" }, warning));
  facts.replaceChildren(
    fact("Id", container.id), fact("Image", container.image || "–"),
    fact("Policy", `${container.mode}, idle after ${duration(container.idle_after_ms)}${container.idle_after_ms < container.idle_timeout_ms ? ` (learned; at most ${duration(container.idle_timeout_ms)})` : ""}, priority ${container.priority}`),
    fact("Offloads", String(container.offloads)), fact("Returns", String(container.restores)),
    fact("Last offload", container.offloads ? `${took(container.last_offload_ms)}${spared(container)}` : "–"),
    fact("Last wake", container.restores ? `${took(container.last_wake_ms)}, of which the restore took ${took(container.last_restore_ms)}; 99 % of the wakes took at most ${took(container.wake_p99_ms)}` : "–"),
    ...stays(container), ...kept(container), ...onDisk(container),
    fact("CUDA calls", `${count(calls(container))}${hook(container)}`), fact("Last call", el("span", { class: "last" })));
  tickDetail(node, container);
  const rows = container.processes.map((p) => el("tr", {},
    el("td", { class: "n" }, String(p.pid)), el("td", {}, p.command), el("td", {}, p.phase),
    el("td", { class: "n" }, bytes(p.vram_bytes)), el("td", { class: "n" }, bytes(p.offloaded_bytes)),
    el("td", { class: "n" }, Number.isFinite(p.utilization_percent) ? `${p.utilization_percent} %` : "–"), el("td", { class: "n" }, count(p.calls)), el("td", { class: "n" }, count(rate(p))),
    el("td", {}, p.last_call ? el("code", {}, p.last_call) : "–"), el("td", { class: "n" }, String(p.waiters)),
    el("td", { class: "warn" }, p.hazards.join(", "))));
  const titles = ["Pid", "Program", "Phase", "VRAM", "In host RAM", "GPU", "Calls", "Calls/s", "Last call", "Waiting", ""];
  const right = new Set([0, 3, 4, 5, 6, 7, 9]);
  processes.replaceChildren(el("h3", {}, "Processes"), container.processes.length
    ? el("table", {}, el("thead", {}, el("tr", {}, ...titles.map((title, i) => el("th", { scope: "col", class: right.has(i) ? "n" : undefined }, title)))), el("tbody", {}, ...rows))
    : el("p", { class: "quiet" }, "No process of the container uses CUDA now."));
}

// Updates the text that changes as time passes: the age of the last call.
export function tickDetail(node, container) {
  const name = lastCall(container);
  put(node.querySelector(".last"), name ? `${name}, ${ticking(idleMs(container))} ago` : "–");
}

export async function drawTimeline(node, container) {
  const box = node.children[2], now = nodeNow(), since = now - HOURS_MS;
  const reply = await ask(`api/v1/history?key=${container.key}&since_ms=${Math.floor(since)}`);
  if (!reply.ok) return box.replaceChildren(el("p", { class: "quiet" }, "There is no history."));
  const { spans } = await reply.json();
  // The time axis begins with the container's first span, so that a young container
  // fills the width. It covers at least ten minutes.
  const begin = Math.max(since, Math.min(spans[0]?.from_ms ?? now, now - 600000));
  const x = (ms) => 1000 * (Math.max(ms, begin) - begin) / (now - begin);
  const picture = svg("svg", { viewBox: "0 0 1000 34", preserveAspectRatio: "none", role: "img" });
  const total = {};
  for (const span of spans) {
    const to = span === spans.at(-1) ? now : span.to_ms;
    const bar = svg("rect", { x: x(span.from_ms), y: 0, width: Math.max(0.8, x(to) - x(span.from_ms)), height: 34, class: `f-${span.state}` });
    const title = svg("title");
    title.textContent = `${span.state} for ${duration(to - span.from_ms)} from ${clock(span.from_ms)}: ${span.reason}`;
    bar.append(title);
    picture.append(bar);
    total[span.state] = (total[span.state] ?? 0) + to - Math.max(span.from_ms, begin);
  }
  const words = Object.entries(total).filter(([state, ms]) => state !== "Unregistered" && ms > 500).sort((a, b) => b[1] - a[1]);
  picture.setAttribute("aria-label", `From ${clock(begin)}: ${words.map(([state, ms]) => `${state} ${duration(ms)}`).join(", ")}`);
  const wakes = spans.map((span) => span.wake_ms).filter(Boolean).sort((a, b) => a - b);
  const p99 = wakes.length ? `, ${wakes.length} ${wakes.length === 1 ? "wake" : "wakes"}, 99 % took at most ${took(wakes[Math.ceil(wakes.length * 0.99) - 1])}` : "";
  box.replaceChildren(el("h3", {}, `Timeline${p99}`), picture,
    el("div", { class: "axis" }, el("span", {}, clock(begin)), el("span", {}, clock((begin + now) / 2)), el("span", {}, "now")),
    el("div", { class: "legend" }, ...words.map(([state, ms]) => el("span", {}, el("i", { class: `f-${state}` }), el("b", {}, duration(ms)), ` ${state}`))));
}
