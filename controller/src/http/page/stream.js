// Reads the node's stream of server-sent events. It uses fetch, so that it can send a
// token. After an error it connects again and continues after the last received event,
// until the caller's signal aborts it.

const QUIET_MS = 40000; // the node sends a message at least every 15 s

export function token() {
  return sessionStorage.getItem("token");
}

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.status === 401) await askForToken((await reply.clone().json()).error);
  return reply;
}

let asking = null;
function askForToken(why) {
  document.getElementById("token-why").textContent = `${why[0].toUpperCase()}${why.slice(1)}.`;
  asking ??= new Promise((done) => {
    const dialog = document.getElementById("token");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("token", document.getElementById("token-value").value.trim());
      asking = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

export async function follow(path, on, until) {
  let last = null, wait_ms = 250;
  let refused = ""; // the controller's reason if it refuses the stream
  while (!until?.aborted) {
    const stop = new AbortController();
    until?.addEventListener("abort", () => stop.abort(), { signal: stop.signal });
    let silence;
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => stop.abort(), QUIET_MS);
    };
    try {
      alive();
      const headers = last ? { "Last-Event-ID": last } : {};
      const reply = await ask(path, { headers, signal: stop.signal });
      if (!reply.ok) {
        refused = (await reply.json()).error ?? reply.statusText;
        throw new Error(refused);
      }
      refused = "";
      wait_ms = 250;
      on.live(true, "", reply.headers.get("affinode-actions") === "off");
      const text = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await text.read();
        if (done) break;
        alive();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const fields = Object.fromEntries(block.split("\n").map((line) => {
            const colon = line.indexOf(": ");
            return [line.slice(0, colon), line.slice(colon + 2)];
          }));
          if (fields.id) last = fields.id;
          if (fields.data) on[fields.event]?.(JSON.parse(fields.data));
        }
      }
    } catch (error) {
      console.debug("stream:", error.message);
    }
    clearTimeout(silence);
    on.live(false, refused);
    stop.abort();
    if (until?.aborted) return;
    await new Promise((done) => setTimeout(done, wait_ms));
    wait_ms = Math.min(wait_ms * 2, 5000);
  }
}
