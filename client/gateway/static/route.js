// The route of an answer: who holds which layers, who left, around whom it went on.
import { make } from "./dom.js";

const place = (stage) => `${stage.peer} ${stage.start} ${stage.end}`;
const listed = (peers) => peers.map((each) => String(each.name)).join(", ");

export function routeView() {
  const box = make("details", "route"), line = make("summary", "", "Route");
  const stages = make("ol", "stages"), event = make("p", "event");
  event.setAttribute("role", "status");
  box.append(line, stages, event);
  box.open = true;
  box.hidden = true;
  let before = null, fresh = new Set(), lost = [], rerouted = [], wasOpen = false;

  function tell(text, kind) {
    event.textContent = text;
    event.className = `event ${kind}`;
  }

  function say(route) {
    const waits = route.waits_for ? ` Waiting: ${route.waits_for}` : "";
    if (route.state === "open") {
      if (rerouted.length) tell(`Rerouted around ${listed(rerouted)}.`, "over");
      else tell(wasOpen ? "" : "Through these volunteers; the prompt is on its way…", "");
    } else if (lost.length && wasOpen) {
      tell(`${listed(lost)} left; rerouting…${waits}`, "now");
    } else if (lost.length) {
      tell(`${listed(lost)} did not take it; looking for another route…${waits}`, "now");
    } else {
      tell(`Looking for a route…${waits}`, waits ? "now" : "");
    }
  }

  function draw(route) {
    const gone = new Set(route.state === "open" ? [] : route.lost.map((each) => each.peer));
    stages.replaceChildren(...route.stages.map((each) => {
      const stage = make("li", "stage"), layers = each.end - each.start;
      stage.classList.toggle("gone", gone.has(each.peer));
      stage.classList.toggle("fresh", fresh.has(place(each)));
      stage.style.flexGrow = String(Math.max(1, layers));
      stage.title = `${each.name}: layers ${each.start} to ${each.end - 1}`;
      const span = layers === 1 ? `layer ${each.start}` : `layers ${each.start}–${each.end - 1}`;
      stage.append(make("span", "water"), make("span", "name", String(each.name)), make("span", "layers", span));
      return stage;
    }));
    const count = route.stages.length, times = route.failovers;
    line.textContent = (count ? `Route over ${count} ${count === 1 ? "volunteer" : "volunteers"}` : "Route")
      + (times ? ` · ${times === 1 ? "one" : times} left on the way` : "");
  }

  function show(route) {
    box.hidden = false;
    if (route.lost.length) lost = route.lost;
    if (route.state === "open") {
      // One that only moved, or was asked too early, may be on the route again.
      const here = new Set(route.stages.map((each) => each.peer));
      if (wasOpen && lost.length) rerouted = lost.filter((each) => !here.has(each.peer));
      lost = [];
      const places = route.stages.map(place);
      if (before && before.join() !== places.join()) fresh = new Set(places.filter((each) => !before.includes(each)));
      before = places;
    } else {
      fresh = new Set();
    }
    say(route);
    draw(route);
    stages.classList.toggle("flowing", route.state === "open");
    stages.classList.toggle("seeking", route.state !== "open");
    wasOpen = wasOpen || route.state === "open";
  }

  function flows() {
    if (!rerouted.length) tell("", "");
  }

  function end(failed) {
    stages.classList.remove("flowing");
    if (failed) tell(event.textContent.replace("; rerouting…", "."), "");
    else flows();
  }
  return { box, show, flows, end };
}
