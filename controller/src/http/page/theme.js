// Sets the theme: light, dark, or that of the system.
const byId = (id) => document.getElementById(id);
const THEMES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("theme") ?? "system";
function dress() {
  document.documentElement.dataset.theme = theme === "system" ? (system.matches ? "dark" : "light") : theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  dress();
});
system.addEventListener("change", dress);
dress();
