// A chat over this gateway's own /v1. What peers, models and people wrote becomes text nodes alone.
import { answer, hasKey, keepKey, modelNames } from "./asking.js";
import { addNode, asMarkdown, Chats, messagesOf, newChat, pathOf, titleOf, turnTo, versionsOf } from "./chats.js";
import { make } from "./dom.js";
import { markdownView, tellCopied } from "./markdown.js";
import { routeView } from "./route.js";

const SETTINGS = "anabranch-settings";
const NEAR_END_PX = 90;
const SAVE_MS = 1500; // While an answer comes, what came is kept this often.
const SLOW_SHARE = 4; // Of a writer's time, one part of this many is spent on drawing.
const UNDO_MS = 8000;
const WEEK_MS = 7 * 86_400_000;
const find = (id) => document.getElementById(id);
const talk = find("talk"), box = find("box"), send = find("send"), models = find("model"), blank = find("empty");
// A phone's keyboard has no Shift+Enter: there Enter begins a line, and the button sends.
const byFinger = matchMedia("(pointer: coarse)").matches && !matchMedia("(any-pointer: fine)").matches;
const chats = await Chats.open();
const running = new Map(); // The answer that is being made, by chat.
let settings = { system: "", temperature: null, keeps: true };
let chat = newChat(), ready = false, toastEnds = 0;

function icon(name) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const used = document.createElementNS("http://www.w3.org/2000/svg", "use");
  used.setAttribute("href", `#i-${name}`);
  made.setAttribute("class", "icon");
  made.setAttribute("aria-hidden", "true");
  made.append(used);
  return made;
}

function button(text, kind, action) {
  const made = make("button", kind, text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

function iconButton(name, label, action) {
  const made = button("", "bare", action);
  made.setAttribute("aria-label", label);
  made.append(icon(name));
  return made;
}

function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

function toast(text, label, action) {
  clearTimeout(toastEnds);
  const close = () => find("toast").replaceChildren();
  find("toast").replaceChildren(make("span", "", text), button(label, "", () => { close(); action(); }));
  toastEnds = setTimeout(close, UNDO_MS);
}

// Models and the key

function showKey(open) {
  find("key").hidden = false;
  find("key").setAttribute("aria-expanded", String(open));
  find("keybox").hidden = !open;
  if (open) find("keyfield").focus(); else box.focus();
}

async function listModels() {
  try {
    const names = await modelNames();
    models.replaceChildren(...names.map((name) => {
      const option = make("option", "", name);
      option.value = name;
      return option;
    }));
    models.disabled = names.length < 2;
    ready = true;
    notice("");
    if (hasKey()) showKey(false);
  } catch (error) {
    if (error.status !== 401) notice(`The gateway’s models cannot be read: ${error.message}`);
    else {
      if (hasKey()) notice("This key is not valid here.");
      showKey(true);
    }
  }
  settle();
}

function useKey() {
  const text = find("keyfield").value.trim();
  if (!text) return;
  find("keyfield").value = "";
  keepKey(text);
  listModels();
}

// The list of chats

async function save(one = chat) {
  if (!one.nodes.length) return;
  try {
    await chats.save(one, settings.keeps);
  } catch (error) {
    notice(`This browser does not keep this chat: ${error.message}`);
  }
}

function ageOf(updated) {
  if (new Date(updated).toDateString() === new Date().toDateString()) return "Today";
  return Date.now() - updated < WEEK_MS ? "Last 7 days" : "Earlier";
}

async function listChats() {
  const wanted = find("seek").value.trim().toLowerCase();
  const found = (await chats.list()).filter((each) => each.title.toLowerCase().includes(wanted));
  const groups = new Map();
  for (const each of found) groups.set(ageOf(each.updated), [...(groups.get(ageOf(each.updated)) || []), each]);
  find("chats").replaceChildren(...[...groups].flatMap(([age, heads]) => {
    const list = make("ul");
    list.append(...heads.map(chatEntry));
    return [make("h2", "", age), list];
  }));
  const kept = chats.db && settings.keeps ? "Kept in this browser alone." : "Kept until you close this page.";
  find("keptwhere").textContent = found.length || wanted ? kept : `No chats yet. ${kept}`;
}

function chatEntry(head) {
  const entry = make("li", head.id === chat.id ? "here" : ""), open = button(head.title, "open", () => openChat(head.id));
  open.title = head.title;
  if (head.id === chat.id) open.setAttribute("aria-current", "page");
  entry.append(open, iconButton("rename", `Rename ${head.title}`, () => renameChat(entry, head)),
    iconButton("delete", `Delete ${head.title}`, () => deleteChat(head.id)));
  return entry;
}

function renameChat(entry, head) {
  const field = make("input");
  field.value = head.title;
  field.setAttribute("aria-label", "The chat’s name");
  let over = false;
  const end = async (keeps) => {
    if (over) return;
    over = true;
    const title = titleOf(field.value), one = head.id === chat.id ? chat : await chats.read(head.id);
    if (keeps && title && one) { one.title = title; await save(one); }
    await listChats();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  entry.replaceChildren(field);
  field.select();
}

async function deleteChat(id) {
  const gone = id === chat.id ? chat : await chats.read(id);
  running.get(id)?.control.abort();
  await chats.remove(id);
  if (id === chat.id) show(newChat(settings));
  await listChats();
  toast("Chat deleted.", "Undo", async () => { await save(gone); show(gone); listChats(); });
}

async function openChat(id) {
  showList(false);
  const found = running.get(id)?.chat || await chats.read(id);
  if (found) show(found);
  listChats();
  if (!byFinger) box.focus();
}

function showList(open) {
  document.body.classList.toggle("listing", open);
  find("menu").setAttribute("aria-expanded", String(open));
  if (open) find("new").focus();
}

// The conversation

function show(one) {
  chat = one;
  draw();
  talk.scrollTop = talk.scrollHeight;
  notice("");
  find("set").classList.toggle("changed", Boolean(chat.system) || chat.temperature !== null);
  settle();
}

function draw() {
  const path = pathOf(chat);
  talk.replaceChildren(...(path.length ? path.map(messageBox) : [blank]));
  document.title = chat.title ? `${chat.title} – Anabranch chat` : "Anabranch chat";
  find("title").textContent = chat.title || "New chat";
}

function messageBox(place) {
  const run = running.get(chat.id);
  if (run?.place === place) return run.view.box;
  return chat.nodes[place].role === "user" ? questionBox(place) : answerBox(place);
}

function versionsBox(one, place) {
  const all = versionsOf(one, place), at = all.indexOf(place), box = make("span", "versions");
  if (all.length < 2) return [];
  const turn = (to) => {
    if (running.has(one.id)) return;
    turnTo(one, all[to]);
    save(one);
    follow(draw);
  };
  const before = button("‹", "quiet", () => turn(at - 1)), after = button("›", "quiet", () => turn(at + 1));
  before.setAttribute("aria-label", "The version before");
  after.setAttribute("aria-label", "The next version");
  before.disabled = !at;
  after.disabled = at === all.length - 1;
  box.append(before, make("span", "", `${at + 1}/${all.length}`), after);
  return [box];
}

function copyButton(text) {
  const made = button("Copy", "quiet copy", () => tellCopied(made, text));
  return made;
}

function questionBox(place) {
  const { text } = chat.nodes[place], made = make("article", "said"), tools = make("div", "tools");
  made.dataset.place = place;
  const said = make("p", "mine", text);
  said.dir = "auto";
  tools.append(...versionsBox(chat, place), copyButton(text), button("Edit", "quiet editing", () => edit(made, place)));
  made.append(make("h2", "unseen", "You"), said, tools);
  return made;
}

function edit(made, place) {
  if (running.has(chat.id)) return;
  const form = make("div", "edit"), field = make("textarea"), row = make("div", "row");
  const end = () => { made.replaceWith(questionBox(place)); box.focus(); };
  const resend = () => {
    const text = field.value.trim();
    if (!text || running.has(chat.id)) return;
    const parent = addNode(chat, chat.nodes[place].parent, { role: "user", text, at: Date.now() });
    draw();
    makeAnswer(parent);
  };
  field.value = chat.nodes[place].text;
  field.setAttribute("aria-label", "Edit your message");
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); end(); }
    if (sends(event)) { event.preventDefault(); resend(); }
  });
  row.append(button("Cancel", "", end), button("Send", "main resend", resend));
  form.append(field, row);
  made.replaceChildren(make("h2", "unseen", "You"), form);
  grow(field);
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function editLast() {
  const place = pathOf(chat).findLast((at) => chat.nodes[at].role === "user");
  const made = place !== undefined && talk.querySelector(`.said[data-place="${place}"]`);
  if (made) edit(made, place);
}

// An answer's parts; what it holds is written by `write`, `think` and `route.show`.
function answerView() {
  const made = make("article", "answer"), route = routeView();
  const thoughts = make("details", "thoughts"), thought = make("p"), summary = make("summary", "", "Thinking…");
  const text = make("div", "text"), foot = make("div", "tools"), markdown = markdownView(text);
  thoughts.append(summary, thought);
  thoughts.hidden = true;
  text.setAttribute("aria-live", "polite");
  text.setAttribute("aria-busy", "true");
  made.append(make("h2", "unseen", "Answer"), route.box, thoughts, text, foot);
  let source = "", wanted = false;

  function drawText() {
    wanted = false;
    const began = performance.now();
    follow(() => markdown.write(source.trimStart()));
    return performance.now() - began;
  }
  function write(more) {
    if (!source) summary.textContent = "Thoughts";
    source += more;
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(() => {
      if (!wanted) return;
      const spent = drawText();
      if (spent < 16) return;
      wanted = true; // One that takes long is drawn less often.
      setTimeout(() => { if (wanted) drawText(); }, SLOW_SHARE * spent);
    });
  }
  function think(more) {
    thoughts.hidden = false;
    thought.append(more);
  }
  function end(failed) {
    drawText();
    summary.textContent = "Thoughts";
    text.setAttribute("aria-busy", "false");
    route.end(failed);
  }
  return { box: made, route, foot, write, think, end };
}

function answerBox(place) {
  const node = chat.nodes[place], view = answerView();
  if (node.route) view.route.show(node.route);
  view.route.box.open = false;
  if (node.thoughts) view.think(node.thoughts);
  view.write(node.text);
  finish(view, place, chat);
  return view.box;
}

// What stands below an answer that has ended.
function finish(view, place, one) {
  const node = one.nodes[place], parts = [node.figures, node.ended ? "" : "broken off"];
  view.end(Boolean(node.note));
  if (node.note) {
    const note = make("p", "note", node.note);
    note.setAttribute("role", "alert");
    view.box.insertBefore(note, view.foot);
  }
  view.foot.replaceChildren(...versionsBox(one, place), ...(node.text ? [copyButton(node.text)] : []),
    button(node.text ? "Regenerate" : "Try again", "quiet again", () => again(place)),
    make("span", "figures", parts.filter(Boolean).join(" · ")));
}

// Another answer to the same question; one that came to nothing is replaced.
function again(place) {
  if (running.has(chat.id)) return;
  const { parent, text } = chat.nodes[place];
  chat.leaf = parent;
  box.focus({ preventScroll: true });
  makeAnswer(parent, text ? -1 : place);
}

// Stays at the end of the conversation, unless its reader scrolled up.
const nearEnd = () => talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_END_PX;

function follow(change) {
  const near = nearEnd();
  change();
  if (near) talk.scrollTop = talk.scrollHeight;
  find("down").hidden = nearEnd();
}

function figures(usage, started, first, ended) {
  const parts = [];
  if (usage && first) {
    const tokens = usage.completion_tokens, seconds = (ended - first) / 1000;
    parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first) {
    const ms = first - started;
    parts.push(`first after ${ms < 950 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`}`);
  }
  return parts.join(" · ");
}

// The answer to the message at `parent`, as a new node, or in place of one that came to nothing.
async function makeAnswer(parent, instead = -1) {
  const one = chat, started = performance.now(), control = new AbortController(), view = answerView();
  const messages = messagesOf(one, parent), model = models.value;
  const fresh = { role: "assistant", text: "", thoughts: "", model, at: Date.now(), ended: false };
  let place = instead;
  if (place < 0) place = addNode(one, parent, fresh);
  else { one.nodes[place] = { ...fresh, parent }; one.leaf = place; }
  const node = one.nodes[place];
  one.updated = Date.now();
  running.set(one.id, { chat: one, place, control, view });
  draw();
  talk.scrollTop = talk.scrollHeight;
  settle();
  save(one).then(listChats);
  let first = 0, saved = performance.now(), ending = null, failed = null;
  const comes = () => {
    if (!first) { first = performance.now(); view.route.flows(); }
    if (performance.now() - saved > SAVE_MS) { saved = performance.now(); save(one); }
  };
  try {
    ending = await answer(model, messages, one.temperature, control.signal, {
      route: (route) => { node.route = route; follow(() => view.route.show(route)); },
      thought: (more) => { comes(); node.thoughts += more; follow(() => view.think(more)); },
      text: (more) => { comes(); node.text += more; view.write(more); },
    });
  } catch (error) {
    failed = error;
  }
  const stopped = control.signal.aborted, parts = [figures(ending?.usage, started, first, performance.now())];
  if (ending?.plain) parts.push("no chat model: it goes on writing your text");
  if (ending?.finish === "length") parts.push("cut at the length limit");
  if (stopped) parts.push("stopped");
  Object.assign(node, { ended: true, figures: parts.filter(Boolean).join(" · ") });
  if (failed && !stopped) node.note = failed.message;
  running.delete(one.id);
  follow(() => finish(view, place, one));
  if (failed?.status === 401) showKey(true);
  settle();
  if (await chats.read(one.id)) await save(one);
  listChats();
}

// What is written and sent

function settle() {
  const busy = running.has(chat.id);
  send.replaceChildren(icon(busy ? "stop" : "send"));
  send.setAttribute("aria-label", busy ? "Stop" : "Send");
  send.classList.toggle("stop", busy);
  send.disabled = !busy && !(ready && box.value.trim());
}

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && (!byFinger || event.ctrlKey);
}

function submit() {
  const text = box.value.trim();
  if (running.has(chat.id) || !text || send.disabled) return;
  box.value = "";
  grow(box);
  chat.leaf = addNode(chat, chat.leaf, { role: "user", text, at: Date.now() });
  makeAnswer(chat.leaf);
  if (byFinger) box.blur();
}

function stop() {
  running.get(chat.id)?.control.abort();
}

function startAnew() {
  showList(false);
  show(newChat(settings));
  listChats();
  box.focus();
}

// Settings and export

function readSettings() {
  try { settings = { ...settings, ...JSON.parse(localStorage.getItem(SETTINGS) || "{}") }; } catch { /* as at first */ }
  chat = newChat(settings);
}

async function useSettings() {
  const typed = find("temperature"), { rangeUnderflow, rangeOverflow } = typed.validity;
  chat.system = find("system").value.trim();
  chat.temperature = typed.value && !rangeUnderflow && !rangeOverflow ? Number(typed.value) : null;
  settings = { system: chat.system, temperature: chat.temperature, keeps: find("keeps").checked };
  try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* for this page alone */ }
  find("set").classList.toggle("changed", Boolean(chat.system) || chat.temperature !== null);
  if (!settings.keeps) await chats.remove(chat.id);
  await save();
  listChats();
}

function showSettings() {
  find("system").value = chat.system;
  find("temperature").value = chat.temperature ?? "";
  find("keeps").checked = settings.keeps;
  find("asmarkdown").disabled = find("asjson").disabled = !chat.nodes.length;
  find("settings").showModal();
}

function download(text, kind, ending) {
  const link = make("a"), name = (chat.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = `${name}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 0);
}

async function clearAll() {
  running.forEach((run) => run.control.abort());
  running.clear();
  await chats.clear();
  find("settings").close();
  startAnew();
}

send.addEventListener("click", () => { if (running.has(chat.id)) stop(); else submit(); if (!byFinger) box.focus(); });
box.addEventListener("input", () => { grow(box); settle(); });
box.addEventListener("keydown", (event) => {
  if (sends(event)) { event.preventDefault(); submit(); }
  if (event.key === "ArrowUp" && !box.value && !event.isComposing) { event.preventDefault(); editLast(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (document.body.classList.contains("listing")) { showList(false); find("menu").focus(); } else if (!find("settings").open) stop();
});
talk.addEventListener("scroll", () => { find("down").hidden = nearEnd(); }, { passive: true });
find("down").addEventListener("click", () => { talk.scrollTop = talk.scrollHeight; });
find("new").addEventListener("click", startAnew);
find("menu").addEventListener("click", () => showList(true));
find("scrim").addEventListener("click", () => showList(false));
find("seek").addEventListener("input", listChats);
find("key").addEventListener("click", () => showKey(find("keybox").hidden));
find("keysave").addEventListener("click", useKey);
find("keyfield").addEventListener("keydown", (event) => { if (event.key === "Enter") useKey(); });
find("set").addEventListener("click", showSettings);
find("settings").addEventListener("change", useSettings);
find("settings").addEventListener("close", useSettings);
find("done").addEventListener("click", () => find("settings").close());
find("clear").addEventListener("click", clearAll);
find("asmarkdown").addEventListener("click", () => download(asMarkdown(chat), "text/markdown", "md"));
find("asjson").addEventListener("click", () => download(JSON.stringify(chat, null, 2), "application/json", "json"));
addEventListener("focus", listChats); // Another tab may have kept some.

readSettings();
box.enterKeyHint = byFinger ? "enter" : "send";
if (!byFinger) box.focus();
listModels();
listChats();
settle();
