// Markdown as elements. What a model writes is hostile: it becomes text nodes of elements that are
// made here, links go to https, http and mailto alone, nothing is loaded, and every loop is bounded.
import { coloured } from "./colours.js";
import { copyText, make } from "./dom.js";
import { formula } from "./formulas.js";

const RICH_CHARS_MAX = 1 << 17; // What is longer goes on as plain text.
const DEPTH_MAX = 8; // Of lists and quotes in one another.
const OPEN_MARKS_MAX = 16; // Emphasis and links that are open at a time; the oldest is text then.
const RUN_MAX = 6; // A longer run of * or _ is text.
const SHORT_LINE = 1000; // Rules and the heads of tables are not longer.
const COLUMNS_MAX = 64;
const FORMULA_LINES_MAX = 100;
const COPIED_MS = 1600;

// Blocks: lines in, plain data out.

const BULLET = /^([-*+]|\d{1,9}[.)])(?:[ \t]|$)/;
const RULE = /^([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const FENCE = /^(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const indentOf = (line) => line.length - line.trimStart().length;
const withoutTabs = (line) => line.replaceAll("\r", "").replace(/^[ \t]+/, (gap) => gap.replaceAll("\t", "    "));
const cut = (line, width) => line.slice(Math.min(width, indentOf(line)));

function cells(line) {
  const found = [];
  let cell = "", at = 0;
  const text = line.trim();
  if (text[0] === "|") at = 1;
  for (; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") { cell += "|"; at += 1; }
    else if (text[at] === "|") { found.push(cell.trim()); cell = ""; }
    else cell += text[at];
  }
  if (cell.trim() || text.at(-1) !== "|") found.push(cell.trim());
  return found;
}

function columnsAt(lines, at) {
  const under = lines[at + 1];
  if (under === undefined || !lines[at].includes("|") || !under.includes("-")) return null;
  if (under.length > SHORT_LINE || lines[at].length > 100 * SHORT_LINE) return null;
  const marks = cells(under);
  if (!marks.every((each) => /^:?-+:?$/.test(each)) || marks.length > COLUMNS_MAX) return null;
  if (cells(lines[at]).length !== marks.length) return null;
  return marks.map((each) => (each.at(-1) !== ":" ? "" : each[0] === ":" ? "center" : "end"));
}

function formulaEnd(lines, at) {
  const line = lines[at].trim();
  const close = { $$: "$$", "\\[": "\\]" }[line.slice(0, 2)];
  if (!close) return -1;
  const last = Math.min(lines.length, at + FORMULA_LINES_MAX);
  for (let end = at; end < last; end += 1) {
    const text = lines[end].trim();
    if (text.endsWith(close) && (end > at || text.length > 3)) return end;
  }
  return -1;
}

const isRule = (line) => line.length < SHORT_LINE && RULE.test(line.trim());

function begins(lines, at) {
  const line = lines[at].trimStart();
  return /^(?:#{1,6}(?:[ \t]|$)|>)/.test(line) || FENCE.test(line) || BULLET.test(line)
    || isRule(line) || columnsAt(lines, at) !== null || formulaEnd(lines, at) >= 0;
}

// Each block says in which line it begins.
export function parse(lines, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const from = at, line = lines[at].trim();
    if (!line) { at += 1; continue; }
    let made = null;
    const fence = FENCE.exec(line), heading = /^#{1,6}(?=[ \t]|$)/.exec(line);
    const columns = columnsAt(lines, at), end = formulaEnd(lines, at);
    if (fence) [made, at] = fenced(lines, at, fence);
    else if (heading) {
      made = { kind: "heading", level: heading[0].length, text: headingText(line.slice(heading[0].length)) };
      at += 1;
    } else if (isRule(line)) {
      made = { kind: "rule" };
      at += 1;
    } else if (depth < DEPTH_MAX && line[0] === ">") [made, at] = quoted(lines, at, depth);
    else if (depth < DEPTH_MAX && BULLET.test(line)) [made, at] = listed(lines, at, depth);
    else if (columns) [made, at] = tabled(lines, at, columns);
    else if (end >= 0) {
      made = { kind: "formula", text: lines.slice(at, end + 1).join("\n").trim().slice(2, -2) };
      at = end + 1;
    } else [made, at] = said(lines, at);
    made.line = from;
    found.push(made);
  }
  return found;
}

function headingText(text) {
  const bare = text.trim();
  let end = bare.length;
  while (end && bare[end - 1] === "#") end -= 1;
  return end < bare.length && (!end || /\s/.test(bare[end - 1])) ? bare.slice(0, end).trimEnd() : bare;
}

function fenced(lines, at, fence) {
  const indent = indentOf(lines[at]), body = [];
  let next = at + 1, closed = false;
  for (; next < lines.length && !closed; next += 1) {
    const line = lines[next].trim();
    closed = line.length >= fence[1].length && line.length < SHORT_LINE && line[0] === fence[1][0]
      && line === line[0].repeat(line.length);
    if (!closed) body.push(cut(lines[next], indent));
  }
  return [{ kind: "code", language: fence[2].trim().split(/[\s{,]/)[0].slice(0, 32), text: body.join("\n") }, next];
}

function quoted(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length && lines[next].trimStart()[0] === ">"; next += 1) {
    inner.push(lines[next].trimStart().slice(1).replace(/^ /, ""));
  }
  return [{ kind: "quote", blocks: parse(inner, depth + 1) }, next];
}

function listed(lines, at, depth) {
  const base = indentOf(lines[at]), first = BULLET.exec(lines[at].trimStart())[1], type = first.at(-1);
  const items = [];
  let next = at, loose = false;
  while (next < lines.length && indentOf(lines[next]) < base + 2) {
    const line = lines[next].trimStart(), mark = BULLET.exec(line);
    if (!mark || mark[1].at(-1) !== type || isRule(line)) break;
    const rest = line.slice(mark[1].length), gap = indentOf(rest);
    const width = mark[1].length + (gap > 4 || gap === rest.length ? 1 : gap);
    const inner = [rest.slice(Math.min(gap, width - mark[1].length))];
    next += 1;
    for (; next < lines.length; next += 1) {
      const text = lines[next].trim(), before = lines[next - 1].trim();
      if (text && indentOf(lines[next]) < base + 2 && (!before || begins(lines, next))) break;
      inner.push(cut(lines[next], base + width));
    }
    let blanks = 0;
    while (inner.length && !inner.at(-1).trim()) { inner.pop(); blanks += 1; }
    const task = /^\[([ xX])\] /.exec(inner[0] || "");
    if (task) inner[0] = inner[0].slice(task[0].length);
    const blocks = parse(inner, depth + 1);
    loose = loose || blocks.filter((each) => each.kind === "text").length > 1;
    items.push({ task: task && task[1] !== " ", isTask: Boolean(task), blocks, blanks });
  }
  loose = loose || items.slice(0, -1).some((each) => each.blanks > 0);
  const start = Number.parseInt(first, 10);
  return [{ kind: "list", ordered: !Number.isNaN(start), start, loose, items }, next];
}

function tabled(lines, at, columns) {
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].trim() && lines[next].includes("|"); next += 1) {
    rows.push(cells(lines[next]).slice(0, columns.length));
  }
  return [{ kind: "table", columns, head: cells(lines[at]), rows }, next];
}

function said(lines, at) {
  const text = [lines[at].trim()];
  let next = at + 1;
  for (; next < lines.length && lines[next].trim() && !begins(lines, next); next += 1) {
    text.push(lines[next].trim());
  }
  return [{ kind: "text", text: text.join("\n") }, next];
}

// Inline: text in, nodes out. One walk with a stack of what is open; each mark looks at a bounded
// number of frames, and what closes code or a formula is searched once.

const SPECIAL = /[\\`*_~[\]!$<&]|\bhttps?:\/\//g;
const LINK_END = /\([ \t]*<?((?:[^\s()<>]|\([^\s()<>]*\)){0,2000})>?(?:[ \t]+(?:"[^"\n]*"|'[^'\n]*'))?[ \t]*\)/y;
const BARE = /https?:\/\/[^\s<>"`[\]]{1,2000}/y;
const POINTED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BREAK = /<br[ \t]*\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(amp|lt|gt|quot|apos|nbsp|ndash|mdash|hellip|times|rarr|larr|deg|middot|copy));/iy;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—",
  hellip: "…", times: "×", rarr: "→", larr: "←", deg: "°", middot: "·", copy: "©" };
const PUNCTUATION = /[\p{P}\p{S}]/u;

function linkTo(address) {
  let url;
  try { url = new URL(address); } catch { return null; }
  if (!["https:", "http:", "mailto:"].includes(url.protocol)) return null;
  const made = make("a");
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.title = url.href.slice(0, 300);
  return made;
}

// Where its text does not say so, a link names the host that it goes to.
function named(link, nodes) {
  link.append(...nodes);
  link.querySelectorAll("a").forEach((each) => each.replaceWith(...each.childNodes));
  link.querySelectorAll(".host").forEach((each) => each.remove());
  const host = new URL(link.href).host;
  if (!host || link.textContent.includes(host)) return [link];
  return [link, make("span", "host", ` (${host})`)];
}

function entity(found) {
  if (found[3]) return ENTITIES[found[3].toLowerCase()];
  const code = found[1] ? Number(found[1]) : Number.parseInt(found[2], 16);
  return code > 31 && code < 0x110000 && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
}

// The runs of backticks by length, each looked up from where the walk is.
function ticksOf(text) {
  const runs = new Map();
  for (const found of text.matchAll(/`+/g)) {
    const held = runs.get(found[0].length) || { places: [], next: 0 };
    held.places.push(found.index);
    runs.set(found[0].length, held);
  }
  return (length, from) => {
    const held = runs.get(length);
    while (held && held.next < held.places.length && held.places[held.next] < from) held.next += 1;
    return held?.places[held.next] ?? -1;
  };
}

// The next place of a text from where the walk is; one that is not there is searched once.
function seeker(text) {
  const known = new Map();
  return (what, from) => {
    const at = known.get(what);
    if (at !== undefined && (at < 0 || at >= from)) return at;
    known.set(what, text.indexOf(what, from));
    return known.get(what);
  };
}

// `$` closes behind what is no blank, and before what is no digit: prices are none.
function dollarsOf(text) {
  const places = [];
  for (let at = text.indexOf("$"); at >= 0; at = text.indexOf("$", at + 1)) {
    if (at && /[^\s\\$]/.test(text[at - 1]) && !/[\d$]/.test(text[at + 1] || "")) places.push(at);
  }
  let next = 0;
  return (from) => {
    while (next < places.length && places[next] < from) next += 1;
    return places[next] ?? -1;
  };
}

export function inline(text) {
  const root = { nodes: [] }, stack = [root];
  const closingTicks = ticksOf(text), seek = seeker(text), closingDollar = dollarsOf(text);
  const put = (node) => stack.at(-1).nodes.push(node);
  const sticky = (pattern, at) => { pattern.lastIndex = at; return pattern.exec(text); };

  function asText(frame, into) {
    into.nodes.push(frame.sort === "[" ? frame.source : frame.sort.repeat(frame.count));
    for (const node of frame.nodes) into.nodes.push(node);
  }
  function closeAbove(at) {
    while (stack.length > at + 1) { const frame = stack.pop(); asText(frame, stack.at(-1)); }
  }
  function open(frame) {
    stack.push(frame);
    if (stack.length > OPEN_MARKS_MAX) asText(stack.splice(1, 1)[0], root);
  }

  function emphasis(at) {
    const sort = text[at];
    let end = at;
    while (text[end] === sort) end += 1;
    let count = end - at;
    const before = text[at - 1] || " ", after = text[end] || " ";
    const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const within = sort === "_";
    const opens = left && (!within || !right || PUNCTUATION.test(before));
    const closes = right && (!within || !left || PUNCTUATION.test(after));
    if (count > RUN_MAX || (sort === "~" && count !== 2)) { put(text.slice(at, end)); return end; }
    while (closes && count) {
      const place = stack.findLastIndex((each) => each.sort === sort
        && !((each.both || opens) && (each.total + end - at) % 3 === 0 && (each.total % 3 || (end - at) % 3)));
      if (place < 1) break;
      closeAbove(place);
      const frame = stack[place], used = Math.min(2, count, frame.count);
      const made = make(sort === "~" ? "s" : used === 2 ? "strong" : "em");
      made.append(...inChunks(frame.nodes));
      frame.count -= used;
      count -= used;
      frame.nodes = [made];
      if (!frame.count) { stack.pop(); put(made); }
    }
    if (count && opens) open({ sort, count, total: end - at, both: closes, nodes: [] });
    else if (count) put(sort.repeat(count));
    return end;
  }

  function bracket(at) {
    const place = stack.findLastIndex((each) => each.sort === "[");
    const found = place > 0 && sticky(LINK_END, at + 1);
    const link = found && linkTo(found[1]);
    if (!link) {
      if (place > 0) { closeAbove(place); asText(stack.pop(), stack.at(-1)); }
      put("]");
      return at + 1;
    }
    closeAbove(place);
    const frame = stack.pop();
    for (const node of named(link, frame.nodes.length ? inChunks(frame.nodes) : [found[1]])) put(node);
    return at + 1 + found[0].length;
  }

  function backslash(at) {
    const next = text[at + 1] || "", close = { "(": "\\)", "[": "\\]" }[next];
    const end = close ? seek(close, at + 2) : -1;
    if (end > at + 2) { put(formula(text.slice(at + 2, end), next === "[")); return end + 2; }
    const bare = /[!-/:-@[-`{-~]/.test(next);
    put(bare ? next : "\\");
    return at + (bare ? 2 : 1);
  }

  function dollar(at) {
    const twice = text[at + 1] === "$", from = at + (twice ? 2 : 1);
    const fits = !/[\s$]/.test(text[from] || " ");
    const end = !twice ? (fits ? closingDollar(from + 1) : -1) : seek("$$", from);
    if (end <= from) { put(text.slice(at, from)); return from; }
    put(formula(text.slice(from, end), twice));
    return end + (twice ? 2 : 1);
  }

  function backticks(at) {
    let from = at;
    while (text[from] === "`") from += 1;
    const end = closingTicks(from - at, from);
    if (end < 0) { put(text.slice(at, from)); return from; }
    const held = text.slice(from, end).replaceAll("\n", " ");
    const padded = held.length > 2 && held[0] === " " && held.at(-1) === " " && held.trim();
    put(make("code", "", padded ? held.slice(1, -1) : held));
    return end + from - at;
  }

  function address(at) {
    let [found] = sticky(BARE, at);
    const left = (found.match(/\(/g) || []).length, right = (found.match(/\)/g) || []).length;
    let spare = right - left;
    while (".,;:!?')*_~$".includes(found.at(-1)) && (found.at(-1) !== ")" || spare > 0)) {
      if (found.at(-1) === ")") spare -= 1;
      found = found.slice(0, -1);
    }
    const link = linkTo(found);
    if (link) link.textContent = found;
    put(link || found);
    return at + found.length;
  }

  function angle(at) {
    const pointed = sticky(POINTED, at), link = pointed && linkTo(pointed[1]);
    if (link) {
      link.textContent = pointed[1];
      put(link);
      return at + pointed[0].length;
    }
    const broken = sticky(BREAK, at);
    put(broken ? make("br") : "<");
    return at + (broken ? broken[0].length : 1);
  }

  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text), next = found ? found.index : text.length;
    if (next > at) put(text.slice(at, next));
    if (!found) break;
    at = next;
    const sort = found[0];
    if (sort.length > 1) at = BARE.test((BARE.lastIndex = at, text)) ? address(at) : (put(sort), at + sort.length);
    else if (sort === "\\") at = backslash(at);
    else if (sort === "`") at = backticks(at);
    else if (sort === "$") at = dollar(at);
    else if (sort === "<") at = angle(at);
    else if (sort === "[" || (sort === "!" && text[at + 1] === "[")) {
      const source = sort === "[" ? "[" : "![";
      open({ sort: "[", source, nodes: [] });
      at += source.length;
    } else if (sort === "]") at = bracket(at);
    else if (sort === "&") {
      const known = sticky(ENTITY, at);
      put(known ? entity(known) : "&");
      at += known ? known[0].length : 1;
    } else if (sort === "!") { put("!"); at += 1; }
    else at = emphasis(at);
  }
  closeAbove(0);
  return inChunks(root.nodes);
}

// Texts beside one another as one; a function's arguments are bounded.
function inChunks(nodes) {
  const whole = document.createDocumentFragment();
  let text = "";
  for (const node of nodes) {
    if (typeof node === "string") { text += node; continue; }
    if (text) whole.append(text);
    text = "";
    whole.append(node);
  }
  if (text) whole.append(text);
  return [whole];
}

// Elements of blocks. A heading is at most one level below the one before it.

function withInline(made, text) {
  made.dir = "auto";
  made.append(...inline(text));
  return made;
}

function scrolling(made, label) {
  const box = make("div", "scrolls");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", label);
  box.append(made);
  return box;
}

const MAKERS = {
  text: (each) => withInline(make("p"), each.text),
  rule: () => make("hr"),
  formula: (each) => scrolling(formula(each.text, true), "Formula"),
  heading: (each, levels) => {
    levels.last = Math.min(each.level + 2, levels.last + 1, 6);
    return withInline(make(`h${levels.last}`, `size${Math.min(each.level, 4)}`), each.text);
  },
  quote: (each, levels) => {
    const made = make("blockquote");
    for (const inner of each.blocks) made.append(element(inner, levels));
    return made;
  },
  list: (each, levels) => {
    const made = make(each.ordered ? "ol" : "ul", each.loose ? "" : "tight");
    if (each.ordered && each.start !== 1) made.start = each.start;
    for (const item of each.items) made.append(listItem(item, each.loose, levels));
    return made;
  },
  table: (each) => {
    const made = make("table"), head = make("thead"), body = make("tbody");
    const row = (kind, texts) => {
      const line = make("tr");
      each.columns.forEach((side, at) => line.append(withInline(make(kind, side), texts[at] || "")));
      return line;
    };
    head.append(row("th", each.head));
    for (const texts of each.rows) body.append(row("td", texts));
    made.append(head, body);
    return scrolling(made, "Table");
  },
  code: (each) => {
    const made = make("figure", "code"), head = make("figcaption", "", each.language || "text");
    const copy = make("button", "quiet", "Copy"), pre = make("pre"), code = make("code");
    copy.type = "button";
    copy.addEventListener("click", () => tellCopied(copy, each.text));
    code.append(coloured(each.text, each.language));
    pre.append(code);
    pre.tabIndex = 0;
    head.append(copy);
    made.append(head, pre);
    return made;
  },
};

function listItem(item, loose, levels) {
  const made = make("li", item.isTask ? "task" : "");
  if (item.isTask) made.append(make("span", "box", item.task ? "☑ " : "☐ "));
  made.dir = "auto";
  item.blocks.forEach((inner, at) => {
    if (inner.kind === "text" && !loose) {
      if (at) made.append("\n");
      made.append(...inline(inner.text));
    } else made.append(element(inner, levels));
  });
  return made;
}

function element(block, levels) {
  return MAKERS[block.kind](block, levels);
}

export async function tellCopied(button, text) {
  const label = button.dataset.label || button.textContent;
  button.dataset.label = label;
  button.textContent = (await copyText(text)) ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = label; }, COPIED_MS);
}

// A text that grows, drawn into an element. Blocks that can no longer change are not read again, and
// those that did not change keep their elements: a selection further up stays.
export function markdownView(into) {
  let settled = 0, shown = [], level = 2, plain = null, written = RICH_CHARS_MAX;

  function writePlain(text) {
    if (!plain) into.append(plain = make("p", "plain"));
    plain.append(text.slice(written));
    written = text.length;
  }

  function write(text) {
    if (plain) { writePlain(text); return; }
    const rich = text.slice(settled, RICH_CHARS_MAX), lines = rich.split("\n");
    lines.forEach((line, at) => { lines[at] = withoutTabs(line); });
    const blocks = parse(lines), sources = blocks.map((each, at) => (
      lines.slice(each.line, blocks[at + 1]?.line).join("\n").trimEnd()));
    const levels = { last: level };
    blocks.forEach((each, at) => {
      const key = `${each.kind} ${levels.last} ${sources[at]}`;
      if (shown[at]?.key === key) { levels.last = shown[at].level; return; }
      const made = element(each, levels);
      if (shown[at]) shown[at].made.replaceWith(made); else into.append(made);
      shown[at] = { key, made, level: levels.last };
    });
    for (const each of shown.splice(blocks.length)) each.made.remove();
    if (text.length > RICH_CHARS_MAX) { writePlain(text); return; }
    // The last line may be written on and become something else; what began before it goes on.
    const open = blocks.findLastIndex((each) => each.line < lines.length - 1);
    if (open < 1) return;
    settled += text.slice(settled).split("\n", blocks[open].line).join("\n").length + 1;
    level = shown[open - 1].level;
    shown = shown.slice(open);
  }
  return { write };
}
