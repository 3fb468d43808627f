// Shows the events, the newest first.
import { bytes, clock, el, took } from "./format.js";

const MOST = 200;
const list = document.getElementById("feed");
const pause = document.getElementById("feed-pause");
let held = null; // events that arrived while paused

pause.addEventListener("click", () => {
  const paused = held === null;
  pause.setAttribute("aria-pressed", String(paused));
  const waiting = held ?? [];
  held = paused ? [] : null;
  pause.textContent = paused ? "Paused" : "Pause";
  waiting.forEach(show);
});

export function addEvent(event) {
  if (held === null) return show(event);
  held.push(event);
  if (held.length > MOST) held.shift();
  pause.textContent = `Paused, ${held.length} new`;
}

function show(event) {
  const state = event.kind === "state";
  const moved = event.bytes ? `${bytes(event.bytes)}${event.elapsed_ms ? ` in ${took(event.elapsed_ms)}` : ""}` : "";
  list.prepend(el("li", {},
    el("time", { datetime: new Date(event.unix_ms).toISOString() }, clock(event.unix_ms)),
    el("span", { title: event.container }, event.container || "node"),
    el("span", { class: "to", "data-state": event.to }, state ? `${event.from} → ${event.to}` : event.kind),
    el("span", { class: "why", title: event.text }, [moved, event.text].filter(Boolean).join(" · "))));
  while (list.children.length > MOST) list.lastChild.remove();
}
