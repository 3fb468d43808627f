// Shows the node: its GPUs, and the VRAM that offloads freed.
import { bytes, duration, el, put } from "./format.js";
import { ask } from "./stream.js";
import { store } from "./store.js";
import { drawTeams, hours } from "./teams.js";

const byId = (id) => document.getElementById(id);
let today = null;

function parts(gpu) {
  let used = 0, idle = 0;
  for (const container of store.containers.values()) {
    for (const process of container.processes) {
      for (const device of process.vram) {
        if (device.uuid !== gpu.uuid) continue;
        if (container.state === "Idle") idle += device.bytes; else used += device.bytes;
      }
    }
  }
  const other = Math.max(0, gpu.vram_used_bytes - used - idle - gpu.copier_vram_bytes);
  const free = Math.max(0, gpu.vram_total_bytes - gpu.vram_used_bytes - gpu.vram_reserved_bytes);
  return [
    ["used", "in use", used], ["idle", "held idle", idle], ["other", "others", other],
    ["copier", "copier", gpu.copier_vram_bytes],
    ["reserved", "promised", gpu.vram_reserved_bytes], ["free", "free", free],
  ];
}

function card(gpu) {
  const all = parts(gpu);
  const meter = el("div", { class: "meter", role: "img", "aria-label": `${bytes(gpu.vram_used_bytes)} of ${bytes(gpu.vram_total_bytes)} VRAM in use` });
  for (const [name, , size] of all) {
    if (name === "free" || !size) continue;
    const piece = el("i", { class: `s-${name}` });
    piece.style.width = `${100 * size / gpu.vram_total_bytes}%`;
    meter.append(piece);
  }
  const legend = el("div", { class: "legend" });
  for (const [name, word, size] of [...all, ["offloaded", "offloaded", gpu.vram_reclaimed_bytes]]) {
    if (!size && !["used", "free", "offloaded"].includes(name)) continue;
    legend.append(el("span", {}, el("i", { class: `s-${name}` }), el("b", {}, bytes(size).replace("–", "0")), ` ${word}`));
  }
  return el("article", { class: "gpu", "aria-label": `GPU ${gpu.index}` },
    el("div", { class: "title" },
      el("b", {}, `GPU ${gpu.index}`), el("span", { class: "quiet" }, gpu.name.replace(/\s*\(?[Ss]imulated\)?/, "") || gpu.name),
      gpu.simulated ? el("span", { class: "tag" }, "simulated") : "",
      el("span", { class: "busy num" }, `${gpu.utilization_percent}% busy, ${gpu.utilization_minute_percent}% over a minute`)),
    meter, legend);
}

export function drawHeader() {
  const { node } = store;
  if (!node) return;
  put(byId("node"), `${node.node}  ${node.version}`);
  document.title = `Affinode · ${node.node}`;
  const auto = byId("auto");
  auto.setAttribute("aria-checked", String(node.auto_offload));
  put(auto, `Auto-offload: ${node.auto_offload ? "on" : "off"}`);
  byId("gpu-error").hidden = !node.gpu_error;
  put(byId("gpu-error"), node.gpu_error ? `GPUs cannot be read: ${node.gpu_error}` : "");
  byId("gpus").replaceChildren(...node.gpus.map(card));
  const all = [...store.containers.values()];
  const sum = (pick) => all.reduce((total, container) => total + pick(container), 0);
  // Offloaded memory that is all zero. It is freed from VRAM but not stored in host
  // memory.
  const zeros = (container) => container.processes.reduce((all, p) => all + (p.offloaded.length ? Math.min(p.zero_bytes || 0, p.copied_out_bytes || 0) : 0), 0);
  // Identical memory of several processes is stored once, by the copier.
  const copiers = (pick) => node.gpus.reduce((all, gpu) => all + (pick(gpu) || 0), 0);
  const each = sum((container) => Math.max(0, container.offloaded_bytes - zeros(container) - (container.disk_bytes || 0)));
  const stored = copiers((gpu) => gpu.copier_stored_bytes);
  const offloaded = Math.max(0, each - copiers((gpu) => gpu.copier_shared_bytes)) + stored;
  const saved = Math.max(0, copiers((gpu) => gpu.copier_shared_bytes) - stored);
  const queued = all.filter((container) => container.state === "Queued").length;
  const rows = [
    ["Offloaded, in host RAM", bytes(offloaded).replace("–", "0"), node.host_free_bytes ? `of ${bytes(offloaded + node.host_free_bytes)}` : ""],
    ...(node.host_pool_used_bytes ? [["Host pool", bytes(node.host_pool_used_bytes), `of ${bytes(node.host_pool_bytes)}`]] : []),
    ...(saved ? [["Saved by dedup", bytes(saved), ""]] : []),
    ["Held idle", bytes(sum((c) => (c.state === "Idle" ? c.vram_bytes : 0))).replace("–", "0"), ""],
    ["Waiting for VRAM", String(queued), queued === 1 ? "container" : "containers"],
    ["GPU hours freed, 24 h", today ? hours(today.returned) : "–", today?.price ?? ""],
    ["Controller up", duration(Date.now() + store.offset_ms - node.started_unix_ms), ""],
  ];
  const tiles = byId("tiles");
  if (tiles.children.length !== rows.length) {
    tiles.replaceChildren(...rows.map(([name]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("span"), el("small")))));
  }
  rows.forEach(([, value, note], i) => {
    const [figure, small] = tiles.children[i].lastChild.children;
    put(figure, value);
    put(small, note ? ` ${note}` : "");
  });
}

// Reads the GPU hours of the last day from the history, again every minute.
export async function refreshToday() {
  try {
    const reply = await ask("api/v1/report");
    if (!reply.ok) return;
    const report = await reply.json();
    const returned = report.rows.reduce((sum, row) => sum + row.returned_gpu_seconds, 0);
    const price = returned / 3600 * report.price_per_gpu_hour;
    today = { returned, price: report.price_per_gpu_hour ? `${price.toFixed(2)} ${report.currency}` : "" };
    drawHeader();
    drawTeams(report);
  } catch { /* the request is repeated in a minute */ }
}
setInterval(refreshToday, 60000);
