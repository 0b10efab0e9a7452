// The server renders; this asks for a newer page and takes the parts of it that differ.
import { copyText } from "./dom.js";

const LOOK_MS = 3000, ANSWER_MS = 10000;
let shown = document.documentElement.dataset.state;

function take(fresh) {
  const chosen = document.querySelector("input:checked");
  if (chosen && fresh.getElementById(chosen.id)) fresh.getElementById(chosen.id).checked = true;
  // What a reader opened or scrolled stays as it is.
  for (const each of document.querySelectorAll("details[open]")) {
    const again = fresh.getElementById(each.id);
    if (again) again.open = true;
  }
  const before = [...document.querySelector("main").children];
  const after = [...fresh.querySelector("main").children];
  if (before.length !== after.length) {
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    return;
  }
  before.forEach((part, at) => {
    if (part.outerHTML === after[at].outerHTML) return;
    const scrolled = [...part.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    part.replaceWith(after[at]);
    [...after[at].querySelectorAll(".scroll")].forEach((each, n) => { each.scrollLeft = scrolled[n] || 0; });
  });
}

function lost() {
  const verdict = document.querySelector(".verdict");
  verdict.className = "verdict not-known";
  verdict.querySelector("h1").textContent = document.title = "Not known";
  verdict.querySelector("p").textContent =
    "The server of this page does not answer; what is below is as old as it says.";
  document.body.classList.add("stale");
  shown = "";
}

async function look() {
  try {
    const signal = AbortSignal.timeout(ANSWER_MS);
    const head = await fetch("/", { method: "HEAD", signal });
    if (!head.ok) throw new Error(head.status);
    // A proxy that compresses marks the tag as weak.
    if ((head.headers.get("ETag") || "").replace(/^W\//, "") !== `"${shown}"`) {
      const page = new DOMParser().parseFromString(
        await (await fetch("/", { signal })).text(), "text/html");
      const { id, dataset } = document.activeElement;
      take(page);
      if (id) document.getElementById(id)?.focus();
      else if (dataset.copy) document.querySelector(`[data-copy="${CSS.escape(dataset.copy)}"]`)?.focus();
      document.title = page.title;
      shown = page.documentElement.dataset.state;
      document.body.classList.remove("stale");
    }
  } catch (error) {
    lost();
  }
  setTimeout(look, LOOK_MS);
}

async function copy(button) {
  if (!(await copyText(button.dataset.copy))) return;
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), LOOK_MS);
}

document.documentElement.classList.add("scripted");
document.addEventListener("click", (event) => {
  if (event.target.matches(".copy")) copy(event.target);
});
setTimeout(look, LOOK_MS);
