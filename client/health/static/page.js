"use strict";
// The server renders; this looks for a newer state and takes the newer page's middle.
let shown = document.documentElement.dataset.state;
async function look() {
  try {
    const state = await (await fetch("/api/v1/state")).json();
    if (String(state.generated_unix_s) === shown) return;
    const text = await (await fetch("/")).text();
    const page = new DOMParser().parseFromString(text, "text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.title = page.title;
    shown = page.documentElement.dataset.state;
    document.body.classList.remove("stale");
  } catch (error) {
    document.body.classList.add("stale");
  }
}
setInterval(look, 5000);
