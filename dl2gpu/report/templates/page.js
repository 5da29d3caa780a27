"use strict";
(() => {
  const root = document.documentElement;
  const kept = {
    get(name) { try { return localStorage.getItem(name); } catch { return null; } },
    set(name, value) { try { localStorage.setItem(name, value); } catch { /* not kept */ } },
  };
  const asked = kept.get("dl2gpu-theme");
  if (asked === "light" || asked === "dark") root.dataset.theme = asked;
  const dark = () => root.dataset.theme
    ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const byId = (id) => document.getElementById(id);
  const theme = byId("theme");
  const label = () => {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} theme`);
  };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept.set("dl2gpu-theme", root.dataset.theme);
    label();
  });
  label();
  const help = byId("help");
  const keys = byId("keys");
  keys.hidden = false;
  keys.addEventListener("click", () => help.showModal());
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = byId(button.dataset.copy).textContent;
      const said = button.textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(byId(button.dataset.copy));
        button.textContent = "Selected: press Ctrl+C";
      }
      setTimeout(() => { button.textContent = said; }, 2500);
    });
  }
  // a long timeline opens where it hangs
  for (const pane of document.querySelectorAll(".tl .x")) {
    pane.scrollLeft = Number(pane.dataset.at || 0);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const go = { n: "next", p: "previous", u: "up" }[event.key];
    if (go && byId(go)) byId(go).click();
    else if (event.key === "t") theme.click();
    else if (event.key === "?") help.showModal();
    else if (event.key === "/" && byId("filter")) { event.preventDefault(); byId("filter").focus(); }
    else if ((event.key === "j" || event.key === "k") && byId("jobs")) {
      const links = [...document.querySelectorAll("#jobs tbody a")];
      const at = links.indexOf(document.activeElement);
      const to = links[event.key === "j" ? at + 1 : Math.max(at - 1, 0)];
      if (to) to.focus();
    }
  });
})();
