// Replays a recording of another machine's dashboard. A stand-in for the controller serves the page's
// own files, and the recorded replies of that machine's controller at their original times.
//
//   node recorded.mjs <folder of the page> <recording.jsonl> [<folder for screenshots>]
import { readFileSync } from "node:fs";
import { check, open, serve, until } from "./browser.mjs";

const [folder, recording, shots] = process.argv.slice(2);
const parts = readFileSync(recording, "utf8").trim().split("\n").map((line) => JSON.parse(line));
const whole = parts.find(({ text }) => text.includes("event: node\n"));
const node = JSON.parse(whole.text.split("\n").find((line) => line.startsWith("data: ")).slice(6));
const recorded = (what) => (request, reply) => {
  reply.writeHead(200, { "content-type": "application/json" });
  reply.end(readFileSync(recording.replace(/\.jsonl$/, `-${what}.json`)));
};
const server = await serve(folder, {
  "/api/v1/events": (request, reply) => {
    reply.writeHead(200, { "content-type": "text/event-stream" });
    const timers = parts.map(({ ms, text }) => setTimeout(() => reply.write(text), ms));
    request.on("close", () => timers.forEach(clearTimeout));
  },
  "/api/v1/history": recorded("history"),
  "/api/v1/report": recorded("report"),
});

// The page's clock is set to that machine's time, so that it shows the recorded ages.
const time = Math.max(...node.containers.map((container) => container.since_unix_ms)) + 1000;
const { browser, page, complaints } = await open(server.url, {}, time);
await until("all containers", async () => (await page.locator(".item").count()) === node.containers.length);
check("all containers are listed", (await page.locator(".item").count()) === node.containers.length, node.containers.map((container) => container.name).join(", "));
const named = node.gpus[0].name.replace(/\s*Simulated/, "");
check("the GPU has its name", (await page.locator(".gpu").first().textContent()).includes(named), node.gpus[0].name);
const busy = page.locator(".item[data-state=Active]").first();
await busy.locator(".name").click();
await page.waitForTimeout(Math.max(0, parts.at(-1).ms - 1500));
const share = page.locator(".detail tbody tr").first().locator("td").nth(5);
check("a process has its share of the GPU", /^\d+ %$/.test(await share.textContent()), await share.textContent());
for (const colorScheme of shots ? ["light", "dark"] : []) {
  await page.emulateMedia({ colorScheme });
  await page.screenshot({ path: `${shots}/recorded-${colorScheme}.png`, fullPage: true });
}
check("the page has no complaint", complaints.length === 0, complaints.join("; "));
await browser.close();
server.close();
