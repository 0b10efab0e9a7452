// Colours for code: comments, strings, numbers, words. One pass, in spans of text nodes.
import { make } from "./dom.js";

const COLOURED_CHARS_MAX = 1 << 16;
const WORDS = {
  c: `abstract any as async await bool boolean break byte case catch char class const constexpr continue
    crate default defer delete do double dyn else enum export extends extern false final finally float fn
    for from func function go goto if impl implements import in instanceof int interface let long loop
    map match mod mut namespace new nil null nullptr number of operator override package private protected
    pub public range return self short signed sizeof static string struct super switch template this throw
    throws trait true try type typedef typename typeof undefined union unsafe unsigned use using val var
    virtual void volatile when where while yield`,
  hash: `alias and as assert async await begin break case class continue def del do done elif else elsif end
    ensure esac except export False false fi finally for from function global if import in is lambda local
    match module next nil None nonlocal not null or pass raise require rescue return self set source then
    True true try unless until when while with yield`,
  sql: `add all alter and as asc begin between by case commit constraint create cross default delete desc
    distinct drop else end exists foreign from full group having if in index inner insert into is join key
    left like limit not null offset on or order outer over partition primary references right rollback
    select set table then union unique update using values view when where with`,
};
const STRING = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const NUMBER = String.raw`\b(?:0[xb][\da-f_]+|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)\b`;
const grammar = (comment, string = STRING) => new RegExp(
  `(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)`, "giu");
const FAMILIES = {
  c: grammar(String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`, "`(?:[^`\\\\]|\\\\[^])*`?|" + STRING),
  hash: grammar(String.raw`#[^\n]*`, `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING}`),
  sql: grammar(String.raw`--[^\n]*|/\*[^]*?(?:\*/|$)`),
  markup: /(?<comment><!--[^]*?(?:-->|$))|(?<word><\/?[\w:-]+|\/?>)|(?<string>"[^"]*"?)|(?<name>[\w:-]+)/giu,
  css: /(?<comment>\/\*[^]*?(?:\*\/|$))|(?<string>"[^"\n]*"?|'[^'\n]*'?)|(?<number>#[\da-f]{3,8}\b|\b\d[\d.]*(?:[a-z]+|%)?)|(?<word>@[\w-]+)|(?<name>[\w-]+)/giu,
  diff: /(?<add>^\+[^\n]*)|(?<drop>^-[^\n]*)|(?<number>^@@[^\n]*)/gmu,
};
const OF_LANGUAGE = {
  hash: "python py python3 ruby rb bash sh shell zsh console yaml yml toml ini dockerfile makefile make perl r julia elixir nix conf",
  sql: "sql mysql postgresql sqlite lua haskell hs ada",
  markup: "html xml svg vue xhtml",
  css: "css scss less",
  diff: "diff patch",
  "": "text txt plain plaintext markdown md output log",
};

function familyOf(language) {
  const name = language.toLowerCase();
  const found = Object.keys(OF_LANGUAGE).find((each) => OF_LANGUAGE[each].split(" ").includes(name));
  return found ?? (name ? "c" : "");
}

const known = Object.fromEntries(Object.entries(WORDS).map(([family, words]) => [family, new Set(words.split(/\s+/))]));

export function coloured(code, language) {
  const made = document.createDocumentFragment(), family = familyOf(language);
  if (!family || code.length > COLOURED_CHARS_MAX) {
    made.append(code);
    return made;
  }
  let end = 0;
  for (const found of code.matchAll(FAMILIES[family])) {
    const kind = kindOf(found, family, code[found.index + found[0].length]);
    if (!kind) continue;
    made.append(code.slice(end, found.index), make("span", `of-${kind}`, found[0]));
    end = found.index + found[0].length;
  }
  made.append(code.slice(end));
  return made;
}

function kindOf(found, family, next) {
  const kind = Object.keys(found.groups).find((each) => found.groups[each] !== undefined);
  if (kind === "name") return next === "=" || next === ":" ? "call" : "";
  if (kind !== "word" || !known[family]) return kind;
  const word = family === "sql" ? found[0].toLowerCase() : found[0];
  if (known[family].has(word)) return "word";
  return next === "(" ? "call" : "";
}
