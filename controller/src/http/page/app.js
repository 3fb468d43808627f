// Starts Affinode's dashboard: passes the messages of the stream to the parts of the
// page.
import { beginCalls, watchCallsOf } from "./calls.js";
import { addEvent } from "./feed.js";
import { drawTimeline } from "./detail.js";
import { put } from "./format.js";
import { setAutoOffload } from "./actions.js";
import { drawHeader, refreshToday } from "./header.js";
import { actHere, pinHere, arrange, begin, chosen, drawRow, drawSpark, opened, step, tickRow, visible } from "./rows.js";
import { follow } from "./stream.js";
import { forget, replace, store, take } from "./store.js";
import "./theme.js";

const byId = (id) => document.getElementById(id);

function live(yes, refused = "", onlyShows = null) {
  if (onlyShows !== null) {
    document.body.classList.toggle("only-shows", onlyShows);
    byId("auto").disabled = onlyShows;
  }
  byId("link-why").hidden = !refused;
  put(byId("link-why"), refused && `The controller refused this page: ${refused}`);
  byId("link").classList.toggle("live", yes);
  byId("link-text").textContent = yes ? "Live" : "Reconnecting";
  if (yes) refreshToday();
}

// The page is drawn at most once per frame, even if changes arrive more often.
const dirty = new Set();
let drawing = false;
function draw(keys) {
  for (const key of keys) dirty.add(key);
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const key of dirty) drawRow(key);
    dirty.clear();
    arrange();
    drawHeader();
  });
}

begin();
beginCalls();
follow("api/v1/events?watch=node", {
  live,
  node(node) {
    replace(node);
    draw(store.containers.keys());
  },
  change(change) {
    if (change.node) {
      const { containers, ...head } = change.node;
      store.node = head;
    }
    change.containers.forEach(take);
    change.gone.forEach(forget);
    draw(change.containers.map((container) => container.key));
  },
  event: addEvent,
});

let beat = 0;
setInterval(() => {
  beat += 1;
  for (const key of visible()) {
    tickRow(key);
    if (beat % 2 === 0) drawSpark(key);
  }
  if (beat % 15 === 0) {
    for (const [key, node] of opened()) if (store.containers.has(key)) drawTimeline(node, store.containers.get(key));
  }
}, 1000);

byId("auto").addEventListener("click", (event) => setAutoOffload(event.currentTarget.getAttribute("aria-checked") !== "true"));

byId("help-open").addEventListener("click", () => byId("help").showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const filter = event.target;
  if (filter.type === "search") {
    if (event.key !== "Escape") return;
    filter.value = "";
    filter.dispatchEvent(new Event("input"));
    filter.blur();
    return;
  }
  const keys = {
    "/": () => byId("filter").focus(), "?": () => byId("help").showModal(),
    j: () => step(1), k: () => step(-1), c: () => chosen() && watchCallsOf(chosen()),
  };
  const moves = { o: () => actHere("offload"), r: () => actHere("restore"), p: () => pinHere() };
  if (!document.body.classList.contains("only-shows")) Object.assign(keys, moves);
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
