// Shows how the GPUs were used in the last 24 hours by each team (namespace) or resource
// claim, from the node's report.
import { el } from "./format.js";

const byId = (id) => document.getElementById(id);
let shown = null;

export function hours(seconds) {
  const h = seconds / 3600;
  return h === 0 ? "0" : h < 0.01 ? "<0.01" : h.toFixed(h < 10 ? 2 : 1);
}

// Adds up the rows of the report for each team or claim. The largest use comes first.
function groups(rows, by) {
  const sums = new Map();
  for (const row of rows) {
    const name = by === "claim" ? row.claim || `${row.namespace} (no claim)` : row.namespace;
    const sum = sums.get(name) ?? { name, figures: [0, 0, 0, 0] };
    const figures = [row.requested_gpu_seconds, row.used_gpu_seconds, row.resident_gpu_seconds, row.returned_gpu_seconds];
    sum.figures = sum.figures.map((seconds, i) => seconds + (figures[i] || 0));
    sums.set(name, sum);
  }
  return [...sums.values()].sort((one, other) => other.figures[2] - one.figures[2] || one.name.localeCompare(other.name));
}

export function drawTeams(report = shown) {
  shown = report;
  byId("teams").hidden = !report?.rows.length;
  if (!report) return;
  const price = report.price_per_gpu_hour;
  const cell = (seconds) => {
    const worth = price ? el("small", { class: "quiet" }, ` ${(seconds / 3600 * price).toFixed(2)} ${report.currency}`) : "";
    return el("td", { class: "n" }, hours(seconds), worth);
  };
  const rows = groups(report.rows, byId("teams-by").value);
  byId("teams-rows").replaceChildren(...rows.map(({ name, figures }) =>
    el("tr", {}, el("th", { scope: "row" }, name), ...figures.map(cell))));
}

byId("teams-by").addEventListener("change", () => drawTeams());
