// The state of the node as the page knows it, and the activity of the last minutes.

const SAMPLES = 60;      // number of samples in a sparkline
const SAMPLE_MS = 2000;  // time between two samples

export const store = {
  node: null,              // the node without its containers
  containers: new Map(),   // key -> container
  received: new Map(),     // key -> time of receipt, on the clock of this page
  activity: new Map(),     // key -> calls per second, oldest first
  work: new Map(),         // key -> GPU utilization by its processes in percent (null: unknown), oldest first
  counted: new Map(),      // key -> [number of calls, time at which it was read]
  offset_ms: 0,            // clock of the node minus clock of this page
};

export function calls(container) {
  return container.processes.reduce((sum, process) => sum + process.calls, 0);
}

// Utilization of the GPUs by a container, in percent. null: NVML reports no utilization
// of its processes.
export function utilization(container) {
  const known = container.processes.map((process) => process.utilization_percent).filter(Number.isFinite);
  return known.length ? Math.min(100, known.reduce((sum, share) => sum + share, 0)) : null;
}

// Name of the last CUDA function of a container. If several processes have made calls,
// that of the first process in the list counts.
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

// Time since the last call: the idle time that the node reported, plus the time since
// that report. While a container is in use, every observation of the node reports it
// again.
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
