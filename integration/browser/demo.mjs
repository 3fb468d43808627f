// The dashboard on a live controller with three containers: `first` and `second` move only
// on request, `watched` makes CUDA calls all the time.
//
//   node demo.mjs <address of the dashboard> [<folder for screenshots>]
import { barriers, check, open, until } from "./browser.mjs";

const [url, shots] = process.argv.slice(2);
const { browser, page, complaints } = await open(url);
const row = (name) => page.locator(".item", { hasText: name });
const state = (name, wanted) => until(`${name} to be ${wanted}`, async () => (await row(name).getAttribute("data-state")) === wanted);
const node = async () => (await fetch(`${url}/api/v1/node`)).json();

await until("three rows", async () => (await page.locator(".item").count()) === 3);
check("all containers are listed", (await page.locator(".item").count()) === 3);
check("it is live", (await page.locator("#link-text").textContent()) === "Live");
check("the GPU is named as simulated", (await page.locator(".gpu .tag").textContent()) === "simulated");
await state("first", "Idle");

// A move by mouse. The row and the node's figures change without a reload.
await row("first").getByRole("button", { name: "Offload first" }).or(row("first").locator(".act .move")).first().click();
check("a click offloads", Boolean(await state("first", "Offloaded")));
const known = (await node()).containers.find((container) => container.id === "first");
check("the controller says the same", known.state === "Offloaded" && known.vram_bytes === 0, `${known.offloaded_bytes} bytes in host memory`);
check("VRAM of the copier is shown", Boolean(await until("the copier", async () => (await page.locator(".s-copier").count()) > 0)), await page.locator(".gpu").first().textContent());
await until("a toast about it", async () => (await page.locator(".toast").count()) > 0);
check("the requester is recorded", (await page.locator(".feed li", { hasText: "request" }).count()) > 0);

check("the host memory that it takes is shown with what there is", /MiB of .* [GT]iB/.test(await page.locator("#tiles").textContent()), await page.locator("#tiles div").first().textContent());

// The same with the keyboard only.
await page.keyboard.press("j");
check("j goes to the first row", (await page.evaluate(() => document.activeElement.className)) === "name");
await page.keyboard.press("Enter");
check("Enter opens it", (await page.locator(".detail").count()) === 1);
await until("the timeline", async () => (await page.locator(".timeline rect").count()) > 0);
check("the timeline has spans", (await page.locator(".timeline rect").count()) > 0, `${await page.locator(".timeline rect").count()}`);
check("the last call has a name and an age", /cu[A-Z].* ago/.test(await page.locator(".detail .last").textContent()), await page.locator(".detail .last").textContent());
check("processes are listed", (await page.locator(".detail tbody tr").count()) === 1, await page.locator(".detail tbody code").first().textContent());
if (shots) await page.screenshot({ path: `${shots}/open.png` });
await page.keyboard.press("r");
check("r restores", Boolean(await until("first to be resident", async () => ["Active", "Idle"].includes(await row("first").getAttribute("data-state")))));
check("its row says how long the wake took, and 99 of 100", Boolean(await until("the wake", async () => /\d m?s ?p99 [\d.]+ m?s/.test(await row("first").locator(".two").nth(1).textContent()))), await row("first").locator(".two").nth(1).textContent());
check("and that it was offloaded once", (await row("first").locator(".two").first().textContent()).includes("1 offload"));
await page.keyboard.press("Enter");
check("Enter closes it", (await page.locator(".detail").count()) === 0);
await page.keyboard.press("/");
await page.keyboard.type("second");
await until("the filter", async () => (await page.locator(".item").count()) === 1);
check("/ filters", (await page.locator(".item").count()) === 1);
await page.keyboard.press("Escape");
check("Escape clears the filter", Boolean(await until("three rows again", async () => (await page.locator(".item").count()) === 3)));

// The list of events can be paused.
await page.locator("#feed-pause").click();
const before = await page.locator(".feed li").count();
await row("second").locator(".act .move").click();
if (await page.locator("#confirm[open]").count()) await page.locator("#confirm-yes").click();
await state("second", "Offloaded");
check("a paused feed stands still", (await page.locator(".feed li").count()) === before);
await page.locator("#feed-pause").click();
check("and goes on", Boolean(await until("the feed", async () => (await page.locator(".feed li").count()) > before)));

// The table of teams has the figures of the report, and can be grouped by claim.
await until("the table of teams", async () => (await page.locator("#teams-rows tr").count()) > 0);
const report = await (await fetch(`${url}/api/v1/report`)).json();
const teams = new Set(report.rows.map((row) => row.namespace));
check("each team has a line", (await page.locator("#teams-rows tr").count()) === teams.size, await page.locator("#teams-rows").textContent());
check("with four figures", (await page.locator("#teams-rows tr").first().locator("td").count()) === 4);
await page.locator("#teams-by").selectOption("claim");
check("containers without a claim are named so", (await page.locator("#teams-rows").textContent()).includes("(no claim)"));
await page.locator("#teams-by").selectOption("team");

// Call tracing. No calls are shown before it. Then calls are shown by name, filtered, paused, and ended.
const functions = () => page.locator("#calls-rows tr").count();
check("calls are not traced at first", await page.locator("#calls-body").isHidden());
await page.locator("#calls-watch").click();
const sync = page.locator("#calls-rows tr", { hasText: "cuStreamSynchronize" });
check("watched calls flow by name", Boolean(await until("a function", async () => (await sync.count()) > 0)), await sync.first().textContent());
check("single calls are listed", Boolean(await until("a call", async () => (await page.locator("#calls-last li").count()) > 0)), await page.locator("#calls-last li").first().textContent());
check("what was dropped is told", (await page.locator("#calls-note").textContent()).includes("dropped"), await page.locator("#calls-note").textContent());
await page.locator("#calls-filter").fill("nothing is called this");
check("the filter hides functions", Boolean(await until("no function", async () => (await functions()) === 0)));
await page.locator("#calls-filter").fill("streamsync");
check("and shows them", Boolean(await until("the function again", async () => (await functions()) === 1)));
await page.locator("#calls-filter").fill("");
await page.locator("#calls-pause").click();
await until("batches to be held", async () => (await page.locator("#calls-pause").textContent()).includes("new"));
const held = await page.locator("#calls-rows").innerHTML();
const waiting = await page.locator("#calls-pause").textContent();
await until("more of them", async () => (await page.locator("#calls-pause").textContent()) !== waiting);
check("a paused stream stands still", (await page.locator("#calls-rows").innerHTML()) === held);
await page.locator("#calls-pause").click();
check("and goes on", Boolean(await until("new figures", async () => (await page.locator("#calls-rows").innerHTML()) !== held)));
for (const scheme of ["light", "dark"]) {
  await page.emulateMedia({ colorScheme: scheme });
  await row("first").locator(".name").click();
  await until("the detail", async () => (await page.locator(".timeline rect").count()) > 0);
  const facts = await page.locator(".facts").first().textContent();
  check(`${scheme}: what is kept in host memory is told`, facts.includes("Retained in host RAM"), facts);
  const found = await barriers(page);
  check(`${scheme}: axe finds no serious barrier`, found.length === 0, found.join("; "));
  if (shots) await page.screenshot({ path: `${shots}/calls-${scheme}.png`, fullPage: true });
  await row("first").locator(".name").click();
}
await page.emulateMedia({ colorScheme: "light" });

// On a narrow screen, nothing extends beyond the edge, and everything can be reached.
await page.setViewportSize({ width: 390, height: 844 });
await row("first").locator(".name").click();
await until("the detail", async () => (await page.locator(".timeline rect").count()) > 0);
const wide = await page.evaluate(() => document.documentElement.scrollWidth);
check("390 pixels are enough", wide === 390, `${wide}`);
const narrow = await barriers(page);
check("narrow: axe finds no serious barrier", narrow.length === 0, narrow.join("; "));
if (shots) await page.screenshot({ path: `${shots}/narrow.png`, fullPage: true });
await row("first").locator(".name").click();
await page.setViewportSize({ width: 1280, height: 800 });
const cut = await page.evaluate(() => [...document.querySelectorAll("#rows .act button")].filter((e) => e.getBoundingClientRect().right > document.querySelector(".table").getBoundingClientRect().right).length);
check("1280 pixels show every button of a row", cut === 0, `${cut} cut off`);
await page.setViewportSize({ width: 1440, height: 900 });
await page.locator("#calls-of").focus();
await page.locator("#calls-of").selectOption({ label: (await node()).containers.find((c) => c.id === "second").name });
check("one container's calls are none of another's", Boolean(await until("an empty table", async () => (await functions()) === 0)));
await page.locator("#calls-watch").click();
check("the watch ends", await page.locator("#calls-body").isHidden());

// By keyboard: the calls of a row, a confirmation, and every control in turn.
await row("watched").locator(".name").focus();
await page.keyboard.press("c");
check("c watches the calls of a row", Boolean(await until("its calls", async () => (await sync.count()) > 0)), await page.locator("#calls-of").evaluate((e) => e.selectedOptions[0].text));
await page.keyboard.press("Enter");
check("Enter ends the watch", await page.locator("#calls-body").isHidden());
await row("watched").locator(".name").focus();
await page.keyboard.press("o");
await until("the question", async () => (await page.locator("#confirm[open]").count()) === 1);
check("o on one in use asks first, and takes the focus", await page.evaluate(() => document.activeElement.closest("dialog")?.id === "confirm"));
await page.keyboard.press("Escape");
check("Escape says no", Boolean(await until("no question", async () => (await page.locator("#confirm[open]").count()) === 0)));
await page.locator(".skip").focus();
const reached = new Set(["skip Skip to containers"]);
for (let n = 0; n < 80; n += 1) {
  await page.keyboard.press("Tab");
  const at = await page.evaluate(() => {
    const e = document.activeElement, style = getComputedStyle(e);
    return e === document.body ? null : { mark: e.id || `${e.className} ${e.getAttribute("aria-label") ?? e.textContent}`, seen: style.outlineStyle !== "none" || style.boxShadow !== "none" };
  });
  if (!at) break;
  reached.add(at.mark);
  if (!at.seen) check("what has the focus shows it", false, at.mark);
}
const missed = await page.evaluate((marks) => [...document.querySelectorAll("button, input, select, a")].filter((e) => e.checkVisibility() && !e.disabled)
  .map((e) => e.id || `${e.className} ${e.getAttribute("aria-label") ?? e.textContent}`).filter((mark) => !marks.includes(mark)), [...reached]);
check("Tab reaches every control", missed.length === 0, missed.join("; ") || `${reached.size} stops`);

// Operator overrides: a pin for one container, and the switch for the node.
await row("first").locator(".act .ghost").click();
check("a click pins", Boolean(await until("the pin", async () => (await node()).containers.find((c) => c.id === "first").pinned)));
check("the row says so", Boolean(await until("the word", async () => (await row("first").locator(".policy").textContent()) === "pinned")));
await row("first").locator(".act .ghost").click();
check("and another lets it go", Boolean(await until("no pin", async () => !(await node()).containers.find((c) => c.id === "first").pinned)));
await page.locator("#auto").click();
await page.locator("#confirm-yes").click();
check("the switch turns auto-offload off", Boolean(await until("the switch", async () => (await node()).auto_offload === false && (await page.locator("#auto").getAttribute("aria-checked")) === "false")));
await page.locator("#auto").click();
check("and on again", Boolean(await until("the switch", async () => (await node()).auto_offload === true)));

// The controller is killed, and a shim starts the next one.
await page.waitForTimeout(4000); // What ended is on disk within three seconds.
const pid = (await node()).controller_pid;
process.kill(pid, "SIGKILL");
await until("the page to notice", async () => (await page.locator("#link-text").textContent()) === "Reconnecting");
check("the page says that it reconnects", true);
const back = await until("the next controller", async () => (await page.locator("#link-text").textContent()) === "Live" && (await node()).controller_pid !== pid);
check("it goes on with the next controller", Boolean(back));
check("which lists the offloaded container", Boolean(await state("second", "Offloaded")));
await row("second").locator(".name").click();
check("the history outlives the controller", Boolean(await until("spans from before", async () => (await page.locator(".timeline rect").count()) > 2)));

// Requirements of screen readers: all controls have names, and there is one main heading.
const nameless = await page.evaluate(() => [...document.querySelectorAll("button, input, select, a")].filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label"))).map((e) => e.outerHTML.slice(0, 80)));
check("everything that can be pressed has a name", nameless.length === 0, nameless.join());
check("every row belongs to a table", await page.evaluate(() => [...document.querySelectorAll("[role=row]")].every((e) => e.closest("[role=table]"))));
const loud = complaints.filter((text) => !text.includes("ERR_") && !text.includes("Failed to load resource"));
check("the browser has nothing to complain about", loud.length === 0, loud.join("; "));
if (shots) await page.screenshot({ path: `${shots}/live.png` });
await browser.close();
