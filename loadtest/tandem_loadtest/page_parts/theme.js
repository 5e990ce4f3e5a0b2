// The button that changes the theme, light colours on paper, and colours by name for what draws.
//
//     Theme.colour("--ink")       the colour of the theme
//     Theme.listen(draw)          calls `draw` when the theme changes
"use strict";
const Theme = (() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const listeners = [];
  let colours = new Map();

  // Charts need colours, not names of custom properties; the browser resolves light-dark().
  function colour(name) {
    if (!colours.has(name)) {
      probe.style.color = `var(${name})`;
      colours.set(name, getComputedStyle(probe).color);
    }
    return colours.get(name);
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function changed() {
    button.setAttribute("aria-pressed", String(isDark()));
    colours = new Map();
    listeners.forEach((listener) => listener());
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    changed();
  });
  dark.addEventListener("change", changed);

  // Paper is white and has a width of its own, which observers of sizes report.
  let before;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    changed();
  });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    changed();
  });
  changed();
  return { colour, listen: (listener) => listeners.push(listener) };
})();
