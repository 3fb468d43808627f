// What the page knows of the node, and how it got busy over the last minutes.

const SAMPLES = 60;      // of a sparkline
const SAMPLE_MS = 2000;  // between two

export const store = {
  node: null,              // the node without its containers
  containers: new Map(),   // key -> container
  received: new Map(),     // key -> when, on this page's clock
  activity: new Map(),     // key -> calls per second, oldest first
  work: new Map(),         // key -> busy share of its GPUs in percent, or null, oldest first
  counted: new Map(),      // key -> [calls, when]
  offset_ms: 0,            // the node's clock minus ours
};

export function calls(container) {
  return container.processes.reduce((sum, process) => sum + process.calls, 0);
}

// How busy its work keeps GPUs, in percent; null where NVML does not tell by process.
export function utilization(container) {
  const known = container.processes.map((process) => process.utilization_percent).filter(Number.isFinite);
  return known.length ? Math.min(100, known.reduce((sum, share) => sum + share, 0)) : null;
}

// The function that was called last, of the process that has called at all.
export function lastCall(container) {
  return container.processes.map((process) => process.last_call).find(Boolean) ?? "";
}

export function take(container) {
  store.containers.set(container.key, container);
  store.received.set(container.key, performance.now());
}

export function replace(node) {
  const { containers, ...head } = node;
  store.node = head;
  const here = new Set(containers.map((container) => container.key));
  for (const key of [...store.containers.keys()]) if (!here.has(key)) forget(key);
  containers.forEach(take);
}

export function forget(key) {
  for (const map of [store.containers, store.received, store.activity, store.work, store.counted]) map.delete(key);
}

// How long no call was made, counted on since the node said it. While a container is in
// use its figure is renewed with every look.
export function idleMs(container) {
  return container.idle_ms + (performance.now() - store.received.get(container.key));
}

export function nodeNow() {
  return Date.now() + store.offset_ms;
}

function add(map, key, value) {
  const list = map.get(key) ?? [];
  list.push(value);
  if (list.length > SAMPLES) list.shift();
  map.set(key, list);
}

export function sample() {
  const now = performance.now();
  for (const container of store.containers.values()) {
    const total = calls(container), before = store.counted.get(container.key);
    store.counted.set(container.key, [total, now]);
    if (!before) continue;
    add(store.activity, container.key, Math.max(0, total - before[0]) / ((now - before[1]) / 1000));
    add(store.work, container.key, utilization(container));
  }
}

setInterval(sample, SAMPLE_MS);
