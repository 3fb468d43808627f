// The page of all nodes: polls the figures of the nodes and links to their dashboards.
import { bytes, duration, el, put, ticking } from "./format.js";
import { ask } from "./stream.js";
import "./theme.js";

const LOOK_MS = 3000;    // interval between two polls
const EACH_MS = 2;       // added to the interval for each node
const SOON_MS = 700;     // interval until each node was polled once
const LATEST_MS = 15000; // time limit of a poll

const HEALTH = { Unreachable: "Unreachable", NotServed: "Not served", Troubled: "Sees no GPU", Asking: "Asking", Resting: "At rest", Serving: "Serving" };
const WORST = Object.keys(HEALTH);
const figure = (name) => (node) => node.figures?.[name] ?? 0;
const COLUMNS = [
  ["Node", (n) => n.name, 1], ["Health", (n) => WORST.indexOf(n.health), 1], ["VRAM in use", (n) => share(n), -1],
  ["Reclaimable", figure("vram_reclaimable_bytes"), -1], ["Resident", figure("resident_bytes"), -1], ["Offloaded", figure("offloaded_bytes"), -1],
  ["Waiting", figure("waiting"), -1], ["Host RAM left", figure("host_free_bytes"), -1], ["Controller", (n) => n.figures?.version ?? "", 1], ["Why", (n) => n.why, 1],
];
const NUMBERS = new Set(["Reclaimable", "Resident", "Offloaded", "Waiting", "Host RAM left"]);
const troubled = (n) => ["Unreachable", "NotServed", "Troubled"].includes(n.health) || n.figures?.lost > 0;
const GROUPS = [["All", () => true], ["Serving", (n) => n.health === "Serving"], ["At rest", (n) => n.health === "Resting"], ["Trouble", troubled], ["Waiting", (n) => n.figures?.waiting > 0]];

const byId = (id) => document.getElementById(id);
const items = new Map(); // name -> elements of the row
let listed = null, offset_ms = 0;
let sort = { column: 0, way: 1 }, group = "All", wanted = "", order = "";

function share(node) {
  const { vram_used_bytes: used = 0, vram_total_bytes: total = 0 } = node.figures ?? {};
  return total ? used / total : -1;
}

const containers = (n) => `${n} ${n === 1 ? "container" : "containers"}`;

function make(name) {
  const label = el("b", {}, name), kind = el("span"), tag = el("span", { class: "tag", hidden: true }, "simulated");
  const link = el("a", { class: "node", href: `nodes/${encodeURIComponent(name)}/`, title: `Dashboard of ${name}` }, label, el("small", {}, kind, tag));
  const word = el("span"), seen = el("small");
  const used = el("span"), meter = el("div", { class: "meter", role: "img" });
  const cell = (cls, title) => el("div", { class: `cell figure ${cls}`, role: "cell", "data-label": title });
  const two = (box) => (box.append(el("span"), el("small")), box);
  const parts = { label, kind, tag, link, word, seen, used, meter,
    reclaim: cell("n reclaim", "Reclaimable"), resident: two(cell("n two resident", "Resident")), offloaded: two(cell("n two offloaded", "Offloaded")), waiting: cell("n waiting", "Waiting"),
    host: cell("n host", "Host RAM left"), version: two(cell("version two", "Controller")), why: el("div", { class: "cell why", role: "cell" }) };
  const row = el("div", { class: "row", role: "row" }, el("div", { class: "cell", role: "cell" }, link),
    el("div", { class: "cell state health", role: "cell" }, el("span", { class: "mark", "aria-hidden": "true" }), el("div", {}, word, seen)),
    el("div", { class: "cell figure use", role: "cell" }, used, meter), parts.reclaim, parts.resident, parts.offloaded, parts.waiting, parts.host, parts.version, parts.why);
  parts.item = el("div", { class: "item" }, row);
  return parts;
}

// Zero is shown as 0; an unknown figure stays empty.
const size = (n) => (n ? bytes(n) : "0");

function drawRow(node) {
  let parts = items.get(node.name);
  if (!parts) items.set(node.name, parts = make(node.name));
  const f = node.figures, some = (text) => (f ? text(f) : "–");
  if (parts.item.dataset.health !== node.health) parts.item.dataset.health = node.health;
  put(parts.kind, f ? (f.gpus ? `${f.gpus} × ${f.gpu_name.replace(/\s*\(?[Ss]imulated\)?/, "") || f.gpu_name}` : "no GPU") : "");
  parts.tag.hidden = !f?.simulated;
  put(parts.word, HEALTH[node.health] ?? node.health);
  put(parts.used, f?.vram_total_bytes ? `${size(f.vram_used_bytes)} of ${bytes(f.vram_total_bytes)}` : "–");
  drawMeter(parts.meter, f);
  put(parts.reclaim, some((f) => size(f.vram_reclaimable_bytes)));
  put(parts.resident.firstChild, some((f) => size(f.resident_bytes)));
  put(parts.resident.lastChild, f?.resident ? containers(f.resident) : "");
  put(parts.offloaded.firstChild, some((f) => size(f.offloaded_bytes)));
  put(parts.offloaded.lastChild, f?.offloaded ? containers(f.offloaded) : "");
  put(parts.waiting, some((f) => String(f.waiting)));
  parts.waiting.classList.toggle("many", f?.waiting > 0);
  put(parts.host, some((f) => bytes(f.host_free_bytes)));
  put(parts.version.firstChild, some((f) => f.version));
  const lost = f?.lost ? `${containers(f.lost)} lost. ` : "";
  put(parts.why, lost + node.why);
  parts.why.title = parts.why.textContent;
  tickRow(node);
}

function drawMeter(meter, f) {
  const total = f?.vram_total_bytes ?? 0;
  const drawn = JSON.stringify([f?.vram_used_bytes, f?.vram_reclaimable_bytes, total]);
  if (meter.dataset.drawn === drawn) return;
  meter.dataset.drawn = drawn;
  meter.replaceChildren();
  if (!total) return;
  const idle = Math.min(f.vram_reclaimable_bytes, f.vram_used_bytes);
  for (const [name, part] of [["used", f.vram_used_bytes - idle], ["idle", idle]]) {
    const piece = el("i", { class: `s-${name}` });
    piece.style.width = `${100 * part / total}%`;
    meter.append(piece);
  }
  meter.setAttribute("aria-label", `${bytes(f.vram_used_bytes)} of ${bytes(total)} VRAM in use, ${bytes(idle)} of it reclaimable`);
}

// Updates the texts of a row that change as time passes.
function tickRow(node) {
  const parts = items.get(node.name), now = Date.now() + offset_ms;
  const last = node.seen_unix_ms ? `seen ${ticking(now - node.seen_unix_ms)} ago` : "not seen yet";
  put(parts.seen, node.health === "Unreachable" ? last : node.figures && !node.figures.auto_offload ? "auto-offload off" : "");
  put(parts.version.lastChild, node.figures && node.health !== "Unreachable" ? `up ${duration(now - node.figures.started_unix_ms)}` : "");
}

function visible() {
  const test = GROUPS.find(([name]) => name === group)[1];
  const fits = (node) => `${node.name} ${node.figures?.gpu_name ?? ""} ${HEALTH[node.health]} ${node.why}`.toLowerCase().includes(wanted);
  const [, by] = COLUMNS[sort.column];
  return listed.nodes.filter((node) => test(node) && fits(node)).sort((a, b) => {
    const [x, y] = [by(a), by(b)];
    return (x < y ? -sort.way : x > y ? sort.way : 0) || a.name.localeCompare(b.name);
  });
}

function arrange() {
  if (!listed) return;
  const nodes = visible(), next = nodes.map((node) => node.name).join("\n");
  if (next !== order) {
    order = next;
    const at = document.activeElement;
    byId("rows").replaceChildren(...nodes.map((node) => items.get(node.name).item));
    if (at?.isConnected) at.focus({ preventScroll: true });
  }
  const all = listed.nodes.length;
  put(byId("count"), nodes.length === all ? String(all) : `${nodes.length} of ${all}`);
  byId("empty").hidden = nodes.length > 0;
  put(byId("empty"), all ? "No node matches." : "No node has an agent of this installation yet.");
}

function drawTiles() {
  const nodes = listed.nodes, sum = (name) => nodes.reduce((total, node) => total + figure(name)(node), 0);
  const serving = nodes.filter((node) => node.health === "Serving").length, resting = nodes.filter((node) => node.health === "Resting").length;
  const trouble = nodes.filter(troubled).length, waiting = sum("waiting");
  const rows = [
    ["Nodes serving", String(serving), `of ${nodes.length}${resting ? `, ${resting} at rest` : ""}${trouble ? `, ${trouble} in trouble` : ""}`],
    ["GPUs", String(sum("gpus")), ""],
    ["VRAM in use", size(sum("vram_used_bytes")), `of ${size(sum("vram_total_bytes"))}`],
    ["Reclaimable now", size(sum("vram_reclaimable_bytes")), ""],
    ["Offloaded, in host RAM", size(sum("offloaded_bytes")), sum("offloaded") ? containers(sum("offloaded")) : ""],
    ["Waiting for VRAM", String(waiting), waiting ? (waiting === 1 ? "container" : "containers") : ""],
  ];
  const tiles = byId("tiles");
  if (!tiles.children.length) tiles.replaceChildren(...rows.map(([name]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("span"), el("small")))));
  rows.forEach(([, value, note], i) => {
    const [main, small] = tiles.children[i].lastChild.children;
    put(main, value);
    put(small, note ? ` ${note}` : "");
  });
}

function show(answer) {
  listed = answer;
  offset_ms = answer.unix_ms - Date.now();
  const here = new Set(answer.nodes.map((node) => node.name));
  for (const name of [...items.keys()]) if (!here.has(name)) items.delete(name);
  answer.nodes.forEach(drawRow);
  drawTiles();
  arrange();
}

function link(live, why = "") {
  byId("link").classList.toggle("live", live);
  put(byId("link-text"), live ? "Live" : "Reconnecting");
  const more = live && listed?.left_out ? `${listed.left_out} more nodes are not shown.` : "";
  byId("alert").hidden = !why && !more;
  put(byId("alert"), why ? `The list is not shown: ${why}` : more);
}

async function look() {
  let wait = LOOK_MS;
  try {
    const reply = await ask("api/v1/fleet", { signal: AbortSignal.timeout(LATEST_MS) });
    const answer = await reply.json();
    if (reply.ok) {
      show(answer);
      link(true);
      wait = answer.nodes.some((node) => node.health === "Asking") ? SOON_MS : LOOK_MS + EACH_MS * answer.nodes.length;
    } else {
      if (reply.status === 401) wait = 0;
      link(false, reply.status === 401 ? "" : answer.error ?? reply.statusText);
    }
  } catch (error) {
    console.debug("look:", error.message);
    link(false);
  }
  setTimeout(look, wait);
}

function step(way) {
  const links = [...document.querySelectorAll("#rows .node")];
  const at = links.indexOf(document.activeElement);
  links[at < 0 ? (way > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, at + way))]?.focus();
}

function markSort() {
  [...byId("head").children].forEach((cell, column) => {
    if (column === sort.column) cell.setAttribute("aria-sort", sort.way > 0 ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  });
}

COLUMNS.forEach(([title, , way], column) => {
  const button = el("button", { type: "button", onclick: () => {
    sort = { column, way: sort.column === column ? -sort.way : way };
    markSort();
    arrange();
  } }, title);
  byId("head").append(el("div", { role: "columnheader", class: NUMBERS.has(title) ? "cell n" : title === "Controller" ? "cell version" : "cell" }, button));
});
markSort();
for (const [name] of GROUPS) {
  byId("chips").append(el("button", { type: "button", "aria-pressed": String(name === group), onclick: (event) => {
    group = name;
    for (const chip of byId("chips").children) chip.setAttribute("aria-pressed", String(chip === event.currentTarget));
    arrange();
  } }, name));
}
byId("filter").addEventListener("input", (event) => {
  wanted = event.target.value.trim().toLowerCase();
  arrange();
});
byId("help-open").addEventListener("click", () => byId("help").showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.type === "search") {
    if (event.key !== "Escape") return;
    event.target.value = "";
    event.target.dispatchEvent(new Event("input"));
    event.target.blur();
    return;
  }
  const keys = { "/": () => byId("filter").focus(), "?": () => byId("help").showModal(), j: () => step(1), k: () => step(-1) };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
setInterval(() => listed?.nodes.forEach(tickRow), 1000);
look();
