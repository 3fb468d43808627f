// Formats numbers for people, in the same way as the command `affinode`.

const GIB = 2 ** 30, MIB = 2 ** 20;

export function bytes(n) {
  if (!n) return "–";
  if (n < MIB) return "<1 MiB";
  if (n >= 1000 * GIB) return `${(n / GIB / 1024).toFixed(2)} TiB`;
  return n < 10 * GIB ? `${Math.floor(n / MIB)} MiB` : `${(Math.floor(n / GIB * 10) / 10).toFixed(1)} GiB`;
}

export function duration(ms) {
  const s = Math.max(0, Math.floor(ms / 1000)), two = (n) => String(n).padStart(2, "0");
  if (s < 10) return `${(Math.max(0, ms) / 1000).toFixed(1)} s`;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}m${two(s % 60)}`;
  if (s < 86400) return `${Math.floor(s / 3600)}h${two(Math.floor(s / 60) % 60)}`;
  return `${Math.floor(s / 86400)}d${two(Math.floor(s / 3600) % 24)}h`;
}

// Formats a duration that is updated every second: below 10 s without tenths of a
// second.
export function ticking(ms) {
  return ms < 10000 ? `${Math.max(0, Math.floor(ms / 1000))} s` : duration(ms);
}

export function took(ms) {
  return ms < 1000 ? `${ms} ms` : duration(ms);
}

export function count(n) {
  if (n < 10000) return String(Math.round(n));
  if (n < 1e6) return `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k`;
  return n < 1e9 ? `${(n / 1e6).toFixed(1)}M` : `${(n / 1e9).toFixed(1)}G`;
}

// Formats a duration in nanoseconds: `812 ns`, `3.0 µs`, `14.2 ms`, `2.50 s`.
export function nanoseconds(ns) {
  if (!(ns >= 1000)) return `${Math.round(ns || 0)} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} µs`;
  return ns < 1e9 ? `${(ns / 1e6).toFixed(1)} ms` : `${(ns / 1e9).toFixed(2)} s`;
}

// Formats a size of any magnitude.
export function amount(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit + 1 < units.length) {
    n /= 1024;
    unit += 1;
  }
  return `${unit ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString([], { hour12: false });
}

// Creates an element. Children that are strings become text, never markup, because
// names come from containers.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Sets a text only if it differs, so that a page of a thousand rows is not drawn again.
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
