// Offloads or restores a container at the user's request. Asks for confirmation first
// if the program in the container would notice the move.
import { bytes, el, took } from "./format.js";
import { ask } from "./stream.js";

const byId = (id) => document.getElementById(id);

export function action(container) {
  if (["Active", "Idle"].includes(container.state)) return { verb: "offload", label: "Offload" };
  if (container.state === "Offloaded") return { verb: "restore", label: "Restore" };
  return null;
}

export function toast(text, bad = false) {
  const node = el("div", { class: bad ? "toast bad" : "toast" }, text);
  byId("toasts").append(node);
  setTimeout(() => node.remove(), bad ? 12000 : 5000);
}

function confirm(title, text, yes) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

export async function pin(container) {
  const verb = container.pinned ? "unpin" : "pin";
  const done = container.pinned ? "is unpinned" : "is pinned to the GPU";
  await change(`api/v1/containers/${container.key}/${verb}`, `${container.name} ${done}`, container.name);
}

export async function setAutoOffload(on) {
  if (!on && !await confirm("Turn auto-offload off?", "No container of this node is offloaded automatically until you turn auto-offload on again.", "Turn off")) return;
  await change(`api/v1/auto-offload/${on ? "on" : "off"}`, `Auto-offload is ${on ? "on" : "off"}`, "Auto-offload");
}

async function change(path, done, name) {
  try {
    const reply = await ask(path, { method: "POST" });
    const said = await reply.json();
    if (reply.ok) toast(done); else toast(`${name}: ${said.error ?? said.reason_text}`, true);
  } catch (error) {
    toast(`${name}: cannot reach the controller (${error.message})`, true);
  }
}

export async function move(container, verb) {
  if (verb === "offload" && container.state === "Active") {
    const wake = container.last_wake_ms ? ` The last restore took ${took(container.last_wake_ms)}.` : "";
    const sure = await confirm(`Offload ${container.name}?`,
      `The container is in use. ${bytes(container.vram_bytes)} of VRAM move to host memory. The container's next CUDA call waits until this memory is restored.${wake}`, "Offload");
    if (!sure) return;
  }
  try {
    const reply = await ask(`api/v1/containers/${container.key}/${verb}`, { method: "POST" });
    const said = await reply.json();
    if (!reply.ok) return toast(`${container.name} was not ${verb}ed: ${said.error ?? said.reason_text}`.replace("restoreed", "restored"), true);
    const moved = said.bytes ? `: ${bytes(said.bytes)} in ${took(said.elapsed_ms)}` : "";
    toast(`${container.name} is ${verb === "offload" ? "offloaded" : "restored"}${moved}`);
  } catch (error) {
    toast(`${container.name}: cannot reach the controller (${error.message})`, true);
  }
}
