// A thousand rows. A stand-in for the controller serves the page's own files and a
// stream of synthetic containers, a tenth of which change every second.
//
//   node many.mjs <folder of the page> [<folder for screenshots>]
import { check, open, serve, until } from "./browser.mjs";

const [folder, shots] = process.argv.slice(2);
const COUNT = 1000;
const GIB = 2 ** 30;
const STATES = [
  ["Active", "recent-calls", "the time since the last CUDA call is less than the idle timeout"], ["Idle", "managed-memory", "the container uses managed memory (cuMemAllocManaged), which the driver cannot checkpoint: process 4211"],
  ["Offloaded", "idle-timeout", "the container made no CUDA call for the idle timeout"], ["Offloaded", "idle-timeout", "the container made no CUDA call for the idle timeout"],
  ["Offloaded", "pressure", "another container needed the VRAM of this container"], ["Queued", "called", "the container waits for VRAM that other containers hold"], ["Restoring", "called", "a CUDA call arrived"],
];
const SPACES = ["research", "notebooks", "inference", "team-vision"], PODS = ["jupyter-anna", "llama-70b-server", "rag-embedder", "sdxl-worker", "finetune-night"];

function container(i, round) {
  const [state, reason, reason_text] = STATES[(i * 3 + (i % 10 === 0 ? round : 0)) % STATES.length];
  const offloaded = state === "Offloaded" || state === "Queued", size = (1 + i % 23) * GIB / 2, uuid = `GPU-${i % 8}`;
  const devices = [{ uuid, bytes: size }];
  return {
    name: `${SPACES[i % 4]}/${PODS[i % 5]}-${i}/main`, key: i.toString(16).padStart(32, "0"), namespace: "k8s.io", id: `c${i}`, sandbox_id: "", pod_namespace: SPACES[i % 4],
    pod: `${PODS[i % 5]}-${i}`, container: "main", image: "registry.example/ml:1", state, since_unix_ms: Date.now() - (i + 1) * 61000, idle_ms: state === "Active" ? i * 250 : i * 9000,
    reason, reason_text, vram_bytes: offloaded ? 0 : size, offloaded_bytes: offloaded ? size : 0, offloads: i % 9, restores: i % 8, last_offload_ms: 800, last_wake_ms: 200 + i * 3, wake_p99_ms: i % 8 ? 260 + i * 5 : 0, last_restore_ms: 180,
    mode: i % 6 ? "eager" : "pressure", idle_timeout_ms: 300000, idle_after_ms: i % 3 ? 300000 : 92000, priority: 0, warnings: [],
    processes: [{ pid: 10000 + i, command: "python3", phase: offloaded ? "Checkpointed" : "Open", vram_bytes: offloaded ? 0 : size, offloaded_bytes: offloaded ? size : 0, calls: 1000 * i + round * (i % 900),
      inflight: 0, waiters: 0, hazards: [], last_call: "cuLaunchKernel", polls: 0, call_cost_ps: 2400, held_us: 0, utilization_percent: i % 5 ? Math.floor(50 + 45 * Math.sin(i + round / 4)) : null, vram: offloaded ? [] : devices, offloaded: offloaded ? devices : [] }],
  };
}
const gpus = [...Array(8).keys()].map((index) => ({ index, uuid: `GPU-${index}`, name: "NVIDIA H200", simulated: false, vram_total_bytes: 140 * GIB * 8, vram_used_bytes: 90 * GIB * 8,
  vram_reclaimed_bytes: 50 * GIB * 8, vram_reserved_bytes: 0, utilization_percent: 37 + index * 5, utilization_minute_percent: 31 + index * 5,
  copier_shared_bytes: index === 0 ? 48 * GIB : 0, copier_stored_bytes: index === 0 ? 24 * GIB : 0 }));
const head = { node: "gpu-node-17", version: "0.1.0", controller_pid: 7, started_unix_ms: Date.now() - 86400000, gpu_error: null, host_used_bytes: 400 * GIB, host_free_bytes: 900 * GIB, dashboard: null, gpus };

const server = await serve(folder, {
  "/api/v1/events": (request, reply) => {
    reply.writeHead(200, { "content-type": "text/event-stream" });
    const send = (name, value) => reply.write(`event: ${name}\ndata: ${JSON.stringify(value)}\n\n`);
    send("node", { ...head, containers: [...Array(COUNT).keys()].map((i) => container(i, 0)) });
    let round = 0;
    const timer = setInterval(() => {
      round += 1;
      send("change", { node: null, containers: [...Array(COUNT / 10).keys()].map((i) => container(i * 10, round)), gone: [] });
    }, 1000);
    request.on("close", () => clearInterval(timer));
  },
});

for (const colorScheme of ["light", "dark"]) {
  const began = performance.now();
  const { browser, page } = await open(server.url, { colorScheme });
  await until("a thousand rows", async () => (await page.locator(".item").count()) === COUNT);
  check(`${colorScheme}: a thousand rows are there`, true, `${Math.round(performance.now() - began)} ms after the browser was started`);
  const ready = await page.evaluate(() => performance.getEntriesByType("paint").map((p) => `${p.name} ${Math.round(p.startTime)} ms`).join(", "));
  console.log(`     ${ready}`);
  // The frame rate during changes and scrolling is only printed, because the machine may be busy.
  const frames = await page.evaluate(() => new Promise((done) => {
    const times = [];
    let last = performance.now();
    const step = (now) => {
      times.push(now - last);
      last = now;
      scrollBy(0, 40);
      if (times.length < 240) requestAnimationFrame(step); else done(times.slice(1).sort((a, b) => a - b));
    };
    requestAnimationFrame(step);
  }));
  const at = (share) => frames[Math.floor(frames.length * share)].toFixed(1);
  console.log(`     frames while scrolling: median ${at(0.5)} ms, 95% ${at(0.95)} ms, worst ${frames.at(-1).toFixed(1)} ms`);
  await page.evaluate(() => scrollTo(0, 0));
  await page.locator("#filter").fill("jupyter-anna-5");
  await until("the filter", async () => (await page.locator(".item").count()) < 60);
  check(`${colorScheme}: the filter narrows`, (await page.locator(".item").count()) > 0, `${await page.locator(".item").count()} rows`);
  await page.locator("#filter").fill("");
  await page.waitForTimeout(4500);
  if (shots) await page.screenshot({ path: `${shots}/many-${colorScheme}.png` });
  await browser.close();
}
server.close();
