// The page of all nodes. A stand-in for its server serves the page's own files and nodes of every
// kind, later very many nodes.
//
//   node fleet.mjs <folder of the fleet's page> <folder of a node's page> [<folder for screenshots>]
import { cpSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { barriers, check, open, serve, until } from "./browser.mjs";

const [folder, shared, shots] = process.argv.slice(2);
const GIB = 2 ** 30;

// Combines the files as the server does.
const files = mkdtempSync(join(tmpdir(), "fleet-"));
for (const name of ["style.css", "icon.svg", "format.js", "stream.js", "theme.js"]) cpSync(join(shared, name), join(files, name));
cpSync(shared, join(files, "nodes/dev-box"), { recursive: true });
for (const name of ["index.html", "fleet.css", "fleet.js"]) cpSync(join(folder, name), join(files, name));

function figures(i, more = {}) {
  const gpus = 8, total = gpus * 140 * GIB, used = Math.floor(total * (0.15 + 0.8 * ((i * 37) % 100) / 100)), resident = 3 + i % 9;
  return { version: "0.1.0", started_unix_ms: Date.now() - 86400000 * (1 + i % 40), gpu_error: null, auto_offload: i % 7 !== 3, gpus, gpu_name: "NVIDIA H200", simulated: false,
    vram_total_bytes: total, vram_used_bytes: used, vram_reclaimable_bytes: Math.floor(used * (i % 4) / 8), resident_bytes: Math.floor(used * 0.97), resident,
    offloaded_bytes: (i % 5) * 61 * GIB, offloaded: i % 5, waiting: i % 11 === 4 ? 2 : 0, lost: 0, host_free_bytes: 900 * GIB - (i % 5) * 61 * GIB, ...more };
}
const node = (i, more = {}) => ({ name: `gpu-${String(i).padStart(3, "0")}.eu-west.example`, health: "Serving", why: "", seen_unix_ms: Date.now(), figures: figures(i), ...more });
const kinds = () => [
  node(1), node(2), node(3), node(4), node(5), node(6),
  node(7, { health: "Resting", why: "no controller runs; it starts with the first GPU container", figures: null }),
  node(8, { health: "Unreachable", why: "no connection to 10.42.7.19:9411: Connection refused (os error 111)", seen_unix_ms: Date.now() - 754000 }),
  node(9, { health: "Unreachable", why: "no agent runs on the node, or it has no address yet", seen_unix_ms: null, figures: null }),
  node(10, { health: "NotServed", why: "not installed: containerd did not come back after a restart; its configuration is as it was", figures: null }),
  node(11, { health: "Troubled", why: "NVML: Driver/library version mismatch", figures: figures(11, { gpus: 0, vram_total_bytes: 0, vram_used_bytes: 0, vram_reclaimable_bytes: 0, resident_bytes: 0, resident: 0, offloaded_bytes: 0, offloaded: 0 }) }),
  node(12, { name: "dev-box", figures: figures(12, { gpus: 1, gpu_name: "Simulated H200", simulated: true, vram_total_bytes: GIB, vram_used_bytes: 64 * 2 ** 20, vram_reclaimable_bytes: 32 * 2 ** 20, resident_bytes: 64 * 2 ** 20, resident: 1, host_free_bytes: 5 * GIB }) }),
  node(13, { health: "Asking", seen_unix_ms: null, figures: null }),
];
let nodes = kinds(), token = "", fails = false;
const server = await serve(files, {
  "/api/v1/fleet": (request, reply) => {
    const json = (status, value) => {
      reply.writeHead(status, { "content-type": "application/json" });
      reply.end(JSON.stringify(value));
    };
    if (fails) return request.socket.destroy();
    if (token && request.headers.authorization !== `Bearer ${token}`) return json(401, { error: "send a Kubernetes token" });
    return json(200, { unix_ms: Date.now(), left_out: 0, nodes });
  },
  // The path of a node's name leads to the node's own dashboard.
  "/nodes/dev-box/": (request, reply) => {
    reply.writeHead(200, { "content-type": "text/html" });
    reply.end(readFileSync(join(shared, "index.html")));
  },
  "/nodes/dev-box/api/v1/events": (request, reply) => {
    reply.writeHead(200, { "content-type": "text/event-stream" });
    const head = { node: "dev-box", version: "0.1.0", controller_pid: 7, started_unix_ms: Date.now() - 60000, gpu_error: null, auto_offload: true, host_used_bytes: 0, host_free_bytes: GIB, dashboard: null, gpus: [] };
    reply.write(`event: node\ndata: ${JSON.stringify({ ...head, containers: [] })}\n\n`);
  },
});

const { browser, page, complaints } = await open(server.url);
const rows = () => page.locator(".item").count();
const row = (name) => page.locator(".item", { hasText: name });
await until("all nodes", async () => (await rows()) === nodes.length);
check("all nodes are listed", (await rows()) === nodes.length);
check("it is live", (await page.locator("#link-text").textContent()) === "Live");
check("an unreachable node says why, and when it was seen", /Unreachable.*seen 12m3\d ago.*Connection refused/.test(await row("gpu-008").textContent()), await row("gpu-008").textContent());
check("one never seen says so", (await row("gpu-009").textContent()).includes("not seen yet"));
check("what it had is still shown", (await row("gpu-008").locator(".use").textContent()).includes("TiB") || (await row("gpu-008").locator(".use").textContent()).includes("GiB"));
check("the tiles add up", /Nodes serving7 of 13, 1 at rest, 4 in trouble/.test(await page.locator("#tiles").textContent()), await page.locator("#tiles").textContent());
check("a simulated GPU is named so", await row("dev-box").locator(".tag").isVisible());

for (const scheme of ["light", "dark"]) {
  await page.emulateMedia({ colorScheme: scheme });
  const found = await barriers(page);
  check(`${scheme}: axe finds no serious barrier`, found.length === 0, found.join("; "));
  if (shots) await page.screenshot({ path: `${shots}/fleet-${scheme}.png`, fullPage: true });
}
await page.emulateMedia({ colorScheme: "light" });

// By mouse: groups and order. By keyboard: filter, rows, and a node.
await page.getByRole("button", { name: "Trouble" }).click();
check("a group narrows", (await rows()) === 4, `${await rows()}`);
await page.getByRole("button", { name: "All" }).click();
await page.getByRole("button", { name: "Health" }).click();
check("the worst come first", (await page.locator(".item").first().getAttribute("data-health")) === "Unreachable");
await page.getByRole("button", { name: "Node", exact: true }).click();
await page.keyboard.press("/");
await page.keyboard.type("dev-");
check("/ filters", Boolean(await until("one row", async () => (await rows()) === 1)));
await page.keyboard.press("Escape");
check("Escape clears the filter", Boolean(await until("all rows", async () => (await rows()) === nodes.length)));
await page.keyboard.press("j");
check("j goes to the first node", await page.evaluate(() => document.activeElement === document.querySelector("#rows .node")));
await page.keyboard.press("Enter");
await until("its dashboard", async () => (await page.title()) === "Affinode · dev-box");
check("Enter follows to its dashboard", page.url().endsWith("/nodes/dev-box/") && (await page.title()) === "Affinode · dev-box", page.url());
check("which is live", (await page.locator("#link-text").textContent()) === "Live");
if (shots) await page.screenshot({ path: `${shots}/fleet-node.png` });
await page.getByRole("link", { name: "All nodes" }).click();
check("and leads back", page.url() === server.url, page.url());
await until("all nodes again", async () => (await rows()) === nodes.length);

// On a narrow screen, nothing extends beyond the edge.
await page.setViewportSize({ width: 390, height: 844 });
const wide = await page.evaluate(() => document.documentElement.scrollWidth);
check("390 pixels are enough", wide === 390, `${wide}`);
const narrow = await barriers(page);
check("narrow: axe finds no serious barrier", narrow.length === 0, narrow.join("; "));
if (shots) await page.screenshot({ path: `${shots}/fleet-narrow.png`, fullPage: true });
await page.setViewportSize({ width: 1440, height: 900 });

// The server cannot be reached for a while, then it requires a token.
fails = true;
check("the page says that it reconnects", Boolean(await until("the page to notice", async () => (await page.locator("#link-text").textContent()) === "Reconnecting")));
check("and keeps what it had", (await rows()) === nodes.length);
fails = false;
token = "a-long-and-secret-token";
await until("the question for a token", async () => (await page.locator("#token[open]").count()) === 1);
check("it asks for a token and says why", (await page.locator("#token-why").textContent()).startsWith("Send a Kubernetes token"));
if (shots) await page.screenshot({ path: `${shots}/fleet-token.png` });
await page.locator("#token-value").fill(token);
await page.keyboard.press("Enter");
check("and goes on with it", Boolean(await until("it to be live", async () => (await page.locator("#link-text").textContent()) === "Live")));

nodes = [...Array(1000).keys()].map((i) => node(i));
check("a thousand nodes are listed", Boolean(await until("a thousand rows", async () => (await rows()) === 1000)));
if (shots) await page.screenshot({ path: `${shots}/fleet-many.png` });
nodes = [];
check("and none", Boolean(await until("no row", async () => (await page.locator("#empty").isVisible()))), await page.locator("#empty").textContent());
const loud = complaints.filter((text) => !text.includes("ERR_") && !text.includes("Failed to load resource"));
check("the browser has nothing to complain about", loud.length === 0, loud.join("; "));
await browser.close();
server.close();
rmSync(files, { recursive: true });
