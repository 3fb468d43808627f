// The list of containers, one row per container. A row is created once. Later, only its
// parts that differ are changed.
import { action, move, pin } from "./actions.js";
import { detail, drawDetail, drawTimeline, tickDetail } from "./detail.js";
import { bytes, count, duration, el, put, svg, ticking, took } from "./format.js";
import { idleMs, lastCall, nodeNow, store } from "./store.js";

const ORDER = ["Lost", "Queued", "Restoring", "Closing", "Offloading", "Active", "Idle", "Offloaded", "Unregistered"];
const COLUMNS = [
  ["Container", (c) => c.name, 1], ["State", (c) => ORDER.indexOf(c.state), 1], ["Activity", (c) => store.activity.get(c.key)?.at(-1) ?? 0, -1],
  ["VRAM", (c) => c.vram_bytes, -1], ["In host RAM", (c) => c.offloaded_bytes, -1], ["Wake", (c) => c.last_wake_ms, -1],
  ["Policy", (c) => c.mode, 1], ["Why", (c) => c.reason_text, 1],
];
const NUMBERS = new Set(["VRAM", "In host RAM", "Wake"]);
const GROUPS = [["All", () => true], ["Active", (s) => s === "Active"], ["Idle", (s) => s === "Idle"], ["Offloaded", (s) => s === "Offloaded"],
  ["Moving", (s) => ["Closing", "Offloading", "Restoring"].includes(s)], ["Waiting", (s) => s === "Queued" || s === "Lost"]];

const byId = (id) => document.getElementById(id);
const items = new Map(); // key -> its elements
let sort = { column: 0, way: 1 }, group = "All", wanted = "", here = null, order = "";

export function begin() {
  const head = byId("head");
  COLUMNS.forEach(([title, , way], column) => {
    const button = el("button", { type: "button", onclick: () => {
      sort = { column, way: sort.column === column ? -sort.way : way };
      markSort();
      arrange();
    } }, title);
    head.append(el("div", { role: "columnheader", class: NUMBERS.has(title) ? "cell n" : "cell" }, button));
  });
  head.append(el("div", { role: "columnheader", class: "cell" }, el("span", { class: "hidden" }, "Actions")));
  markSort();
  for (const [name] of GROUPS) {
    byId("chips").append(el("button", { type: "button", "aria-pressed": String(name === group), "data-group": name, onclick: (event) => {
      group = name;
      for (const chip of byId("chips").children) chip.setAttribute("aria-pressed", String(chip === event.currentTarget));
      arrange();
    } }, name));
  }
  byId("filter").addEventListener("input", (event) => {
    wanted = event.target.value.trim().toLowerCase();
    arrange();
  });
}

function markSort() {
  [...byId("head").children].forEach((cell, column) => {
    if (column === sort.column) cell.setAttribute("aria-sort", sort.way > 0 ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  });
}

function make(key) {
  const arrow = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" });
  arrow.append(svg("path", { d: "M6 4l4 4-4 4", fill: "none", stroke: "currentColor", "stroke-width": 1.6 }));
  const label = el("span"), space = el("small");
  const name = el("button", { type: "button", class: "name", "aria-expanded": "false", onclick: () => toggle(key), onfocus: () => point(key) }, arrow, el("span", {}, label, space));
  const word = el("span"), since = el("small"), soon = el("div", { class: "soon", hidden: true }, el("i"));
  const state = el("div", { class: "cell state", role: "cell" }, el("span", { class: "mark", "aria-hidden": "true" }), el("div", {}, word, since, soon));
  const called = el("small");
  const spark = svg("svg", { class: "spark", viewBox: "0 0 60 22", preserveAspectRatio: "none", role: "img", "aria-label": "Activity is not known yet" });
  spark.append(svg("path", { class: "work" }), svg("path"));
  const cell = ([cls, label]) => el("div", { class: `cell ${cls}`, role: "cell", "data-label": label });
  const [vram, offloaded, wake, policy, why, act] = [["n", "VRAM"], ["n two", "In host RAM"], ["n two", "Wake"], ["policy two", "Policy"], ["why"], ["act"]].map(cell);
  const two = (box) => box.appendChild(el("span")) && box.appendChild(el("small"));
  const moves = two(offloaded), p99 = two(wake), after = two(policy);
  const button = el("button", { type: "button", class: "move", onclick: () => press(key) });
  const tack = el("button", { type: "button", class: "ghost", onclick: () => pinHere(key) });
  act.append(button, tack);
  const row = el("div", { class: "row", role: "row" }, el("div", { class: "cell", role: "cell" }, name), state,
    el("div", { class: "cell activity", role: "cell" }, spark, called), vram, offloaded, wake, policy, why, act);
  const item = el("div", { class: "item", "data-key": key }, row);
  return { item, row, name, label, space, state, word, since, soon, spark, called, vram, offloaded, moves, wake, p99, policy, after, why, button, tack, detail: null };
}

function press(key) {
  const container = store.containers.get(key), what = container && action(container);
  if (what) move(container, what.verb);
}

export function drawRow(key) {
  const container = store.containers.get(key);
  if (!container) return;
  let parts = items.get(key);
  if (!parts) items.set(key, parts = make(key));
  put(parts.label, container.pod || container.id);
  put(parts.space, container.pod ? `${container.pod_namespace} / ${container.container}` : container.namespace);
  parts.name.title = container.name;
  if (parts.item.dataset.state !== container.state) parts.item.dataset.state = container.state;
  put(parts.word, container.state);
  put(parts.vram, bytes(container.vram_bytes));
  put(parts.offloaded.firstChild, bytes(Math.max(0, container.offloaded_bytes - (container.disk_bytes ?? 0))));
  put(parts.moves, container.offloads ? `${count(container.offloads)} ${container.offloads === 1 ? "offload" : "offloads"}` : "");
  put(parts.wake.firstChild, container.restores ? took(container.last_wake_ms) : "–");
  put(parts.p99, container.wake_p99_ms ? `p99 ${took(container.wake_p99_ms)}` : "");
  const moving = !container.pinned && !["manual", "off"].includes(container.mode);
  put(parts.policy.firstChild, container.pinned ? "pinned" : container.mode);
  put(parts.after, moving ? `idle: ${duration(container.idle_after_ms)}` : "");
  put(parts.why, container.reason_text);
  parts.why.title = container.reason_text;
  const what = action(container);
  parts.button.disabled = !what;
  put(parts.button, what?.label ?? { Unregistered: "Offload", Queued: "Waiting", Lost: "Lost" }[container.state] ?? "Moving");
  parts.button.setAttribute("aria-label", `${what?.label ?? "Nothing to do for"} ${container.name}`);
  put(parts.tack, container.pinned ? "Unpin" : "Pin");
  parts.tack.setAttribute("aria-label", `${container.pinned ? "Unpin" : "Pin"} ${container.name}`);
  tickRow(key);
  if (parts.detail) drawDetail(parts.detail, container);
}

// Updates the parts of a row that change as time passes.
export function tickRow(key) {
  const container = store.containers.get(key), parts = items.get(key);
  if (!container || !parts) return;
  const idle = idleMs(container), most = Math.max(1, container.idle_after_ms), left = most - idle;
  // At the end of the idle timeout, only the mode eager is certain to offload. In other
  // modes, an offload also depends on waiters.
  const counts = container.state === "Active" && container.reason === "recent-calls";
  const what = container.mode === "eager" && !container.pinned ? "offload" : "idle";
  put(parts.since, counts && idle > 1500 ? `${what} in ${ticking(left)}` : `for ${ticking(nodeNow() - container.since_unix_ms)}`);
  parts.soon.hidden = !counts;
  const last = lastCall(container);
  put(parts.called, last ? `${ticking(idle)} · ${last.replace(/^cu/, "")}` : "");
  parts.called.title = last ? `The last call was ${last}, ${ticking(idle)} ago` : "";
  if (parts.detail) tickDetail(parts.detail, container);
  if (counts) parts.soon.firstChild.style.width = `${Math.min(100, 100 * idle / most)}%`;
}

// Draws the calls per second as a line, scaled to their maximum. Behind the line is the
// utilization of the GPU, scaled to 100 %.
export function drawSpark(key) {
  const list = store.activity.get(key), work = store.work.get(key), parts = items.get(key);
  if (!list || !parts) return;
  const most = Math.max(1, ...list), x = (i) => ((60 - list.length + i) * 60 / 59).toFixed(1);
  const line = list.map((rate, i) => `${i ? "L" : "M"}${x(i)} ${(20.5 - 18 * rate / most).toFixed(1)}`).join("");
  const area = work.some(Boolean) ? `M${x(0)} 22${work.map((share, i) => `L${x(i)} ${(22 - 0.2 * (share ?? 0)).toFixed(1)}`).join("")}L${x(work.length - 1)} 22Z` : "";
  const [behind, before] = parts.spark.children;
  behind.setAttribute("d", area);
  before.setAttribute("d", line);
  const share = work.at(-1) === null ? "" : `, GPU ${work.at(-1)} % busy with this container`;
  parts.spark.setAttribute("aria-label", `${Math.round(list.at(-1))} calls per second now, at most ${Math.round(most)}${share}`);
}

export function visible() {
  const low = innerHeight + 200;
  return [...byId("rows").children].filter((item) => {
    const box = item.getBoundingClientRect();
    return box.bottom > -200 && box.top < low;
  }).map((item) => item.dataset.key);
}

// Filters and sorts the rows. An element is moved only if its position differs.
export function arrange() {
  const all = [...store.containers.values()];
  const test = GROUPS.find(([name]) => name === group)[1];
  for (const chip of byId("chips").children) {
    const belongs = GROUPS.find(([name]) => name === chip.dataset.group)[1];
    put(chip, `${chip.dataset.group} ${all.filter((c) => belongs(c.state)).length}`);
  }
  const shown = all.filter((c) => test(c.state) && (!wanted || `${c.name} ${c.state} ${c.reason_text} ${c.mode}`.toLowerCase().includes(wanted)));
  const pick = COLUMNS[sort.column][1];
  const keyed = shown.map((c) => [pick(c), c.name, c.key]);
  keyed.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * sort.way || (a[1] < b[1] ? -1 : 1));
  const keys = keyed.map((entry) => entry[2]);
  for (const key of [...items.keys()]) {
    if (!store.containers.has(key)) {
      items.get(key).item.remove();
      items.delete(key);
    }
  }
  const next = keys.join();
  if (next !== order) {
    order = next;
    const focused = document.activeElement;
    byId("rows").replaceChildren(...keys.map((key) => {
      if (!items.has(key)) drawRow(key);
      return items.get(key).item;
    }));
    if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }
  put(byId("count"), shown.length === all.length ? String(all.length) : `${shown.length} of ${all.length}`);
  byId("empty").hidden = shown.length > 0;
  put(byId("empty"), all.length ? "No container matches." : "No GPU container of runtime class affinode runs on this node.");
}

function toggle(key) {
  const parts = items.get(key);
  if (parts.detail) {
    parts.detail.parentNode.remove();
    parts.detail = null;
  } else {
    parts.detail = detail();
    parts.item.append(el("div", { role: "row" }, parts.detail));
    const container = store.containers.get(key);
    drawDetail(parts.detail, container);
    drawTimeline(parts.detail, container);
  }
  parts.item.classList.toggle("open", Boolean(parts.detail));
  parts.name.setAttribute("aria-expanded", String(Boolean(parts.detail)));
}

export function opened() {
  return [...items].filter(([, parts]) => parts.detail).map(([key, parts]) => [key, parts.detail]);
}

function point(key) {
  items.get(here)?.item.classList.remove("here");
  here = key;
  items.get(key)?.item.classList.add("here");
}

export function step(by) {
  const all = [...byId("rows").children];
  if (!all.length) return;
  const now = all.findIndex((item) => item.dataset.key === here);
  const next = all[Math.max(0, Math.min(all.length - 1, now + by))];
  items.get(next.dataset.key).name.focus();
  next.scrollIntoView({ block: "nearest" });
}

// Key of the container to which keyboard commands apply. null: there is none.
export function chosen() {
  return store.containers.has(here) ? here : null;
}

export function pinHere(key = here) {
  const container = store.containers.get(key);
  if (container) pin(container);
}

export function actHere(verb) {
  const container = store.containers.get(here);
  if (container && action(container)?.verb === verb) move(container, verb);
}
