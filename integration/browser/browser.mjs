// A headless Chromium for the tests, and helpers that all of them use.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
// Root in a container cannot use the sandbox. Only the project's own pages are opened.
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];

// `time`: time that the page's clock shows, in milliseconds since 1970.
export async function open(url, options = {}, time = null) {
  const browser = await chromium.launch({ executablePath, headless: true, args });
  const page = await browser.newPage({ viewport: { width: 1440, height: 900 }, ...options });
  const complaints = [];
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(error.message));
  if (time) await page.clock.install({ time });
  await page.goto(url);
  return { browser, page, complaints };
}

// A stand-in for the controller. It serves the page's own files, and fixed replies for some paths.
const KINDS = { html: "text/html", css: "text/css", js: "text/javascript", svg: "image/svg+xml" };
export async function serve(folder, answers) {
  const server = createServer((request, reply) => {
    const path = new URL(request.url, "http://x").pathname;
    if (answers[path]) return answers[path](request, reply);
    const file = path === "/" ? "index.html" : path.slice(1);
    try {
      const body = readFileSync(`${folder}/${file}`);
      reply.writeHead(200, { "content-type": KINDS[file.split(".").pop()] });
      reply.end(body);
    } catch {
      reply.writeHead(404, { "content-type": "application/json" });
      reply.end("{}");
    }
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}/`, close: () => server.close() };
}

export function check(what, fine, seen = "") {
  console.log(`${fine ? "ok  " : "FAIL"} ${what}${seen === "" ? "" : `  (${seen})`}`);
  if (!fine) process.exitCode = 1;
}

// Serious faults that axe-core finds in the present page.
export async function barriers(page) {
  // axe-core is not loaded as a script of the page, because the page's security policy would refuse that.
  await page.evaluate(readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8"));
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const grave = violations.filter((found) => ["serious", "critical"].includes(found.impact));
  return grave.map((found) => `${found.id}: ${found.nodes.slice(0, 3).map((node) => node.target.join(" ")).join(", ")}`);
}

export async function until(what, test, timeout_ms = 20000) {
  const end = Date.now() + timeout_ms;
  for (;;) {
    const found = await test().catch(() => false);
    if (found) return found;
    if (Date.now() > end) {
      check(what, false, "not in time");
      return false;
    }
    await new Promise((done) => setTimeout(done, 50));
  }
}
