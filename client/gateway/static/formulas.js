// TeX's formulas as MathML, made of elements: what is common in answers. What is not known is shown
// as it was written.
const MATHML = "http://www.w3.org/1998/Math/MathML";
const FORMULA_CHARS_MAX = 4000;
const DEPTH_MAX = 40;

// Without a prototype: no word of a formula finds what it did not name.
const own = (held) => Object.assign(Object.create(null), held);
const pairs = (text) => own(Object.fromEntries(text.trim().split(/\s+/).map((each) => each.split("="))));
const LETTERS = pairs(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ
  iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ
  varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
  infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ forall=∀ exists=∃ nexists=∄
  top=⊤ bot=⊥ angle=∠ triangle=△ square=□ blacksquare=■ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ prime=′ degree=°
  imath=ı jmath=ȷ wp=℘ checkmark=✓`);
const SIGNS = pairs(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗
  odot=⊙ wedge=∧ land=∧ vee=∨ lor=∨ neg=¬ lnot=¬ cap=∩ cup=∪ setminus=∖ le=≤ leq=≤ leqslant=⩽ ge=≥ geq=≥
  geqslant=⩾ ne=≠ neq=≠ equiv=≡ approx=≈ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ in=∈ notin=∉ ni=∋ subset=⊂
  subseteq=⊆ subsetneq=⊊ supset=⊃ supseteq=⊇ to=→ rightarrow=→ longrightarrow=⟶ leftarrow=← gets=← Rightarrow=⇒
  implies=⟹ Leftarrow=⇐ iff=⟺ Leftrightarrow=⇔ leftrightarrow=↔ mapsto=↦ uparrow=↑ downarrow=↓ perp=⊥ parallel=∥
  mid=∣ nmid=∤ vdash=⊢ models=⊨ colon=: prec=≺ succ=≻ asymp=≍ therefore=∴ because=∵ rightleftharpoons=⇌
  hookrightarrow=↪ dagger=† lt=< gt=>`);
const LARGE = pairs(`sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀`);
const INTEGRALS = pairs(`int=∫ iint=∬ iiint=∭ oint=∮`);
const FENCES = pairs(`langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ lvert=| rvert=| vert=| lVert=‖ rVert=‖
  Vert=‖ |=‖ {={ }=} lbrace={ rbrace=} lbrack=[ rbrack=] backslash=∖`);
const NAMES = new Set(`arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom ker lg ln log Pr sec
  sin sinh tan tanh`.split(/\s+/));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin det gcd Pr".split(" "));
const ACCENTS = pairs("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ dot=˙ ddot=¨ tilde=~ widetilde=~ overbrace=⏞");
const UNDER = pairs("underline=_ underbrace=⏟");
const SPACES = own({ ",": ".17em", ":": ".22em", ">": ".22em", ";": ".28em", " ": ".3em", "!": "-.17em", quad: "1em", qquad: "2em", enspace: ".5em", thinspace: ".17em" });
const SILENT = new Set("displaystyle textstyle scriptstyle limits nolimits nonumber notag left. hline middle bigl bigr Bigl Bigr biggl biggr Biggl Biggr big Big bigg Bigg bigm Bigm".split(" "));
const TEXTS = new Set("text textrm textbf textit textsf texttt mbox hbox mathrm operatorname textnormal".split(" "));
const ALPHABETS = own({
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, "C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ"],
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, ""],
  mathcal: [0x1d49c, 0x1d4b6, 0, "B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"],
  mathfrak: [0x1d504, 0x1d51e, 0, "C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ"],
});
Object.assign(ALPHABETS, { boldsymbol: ALPHABETS.mathbf, bm: ALPHABETS.mathbf, mathscr: ALPHABETS.mathcal, Bbb: ALPHABETS.mathbb });
const AROUND = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{" };
const TABLES = new Set([...Object.keys(AROUND), ..."matrix smallmatrix array aligned align align* alignedat gather gather* gathered split equation equation* dcases rcases multline".split(" ")]);

function tag(name, children = [], attributes = {}) {
  const made = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const row = (nodes) => (nodes.length === 1 ? nodes[0] : tag("mrow", nodes));

function styled(char, [upper, lower, digit, special]) {
  const known = special && pairs(special)[char];
  if (known) return known;
  const code = char.codePointAt(0);
  if (char >= "A" && char <= "Z") return String.fromCodePoint(upper + code - 65);
  if (char >= "a" && char <= "z") return String.fromCodePoint(lower + code - 97);
  return digit && char >= "0" && char <= "9" ? String.fromCodePoint(digit + code - 48) : char;
}

class Reader {
  constructor(text) {
    this.tokens = text.match(/\\(?:[a-zA-Z]+|[^])|\d+(?:\.\d+)?|\s+|[^]/gu) || [];
    this.at = 0;
    this.depth = 0;
  }
  peek() {
    while (this.tokens[this.at]?.trim() === "") this.at += 1;
    return this.tokens[this.at];
  }
  next() {
    const token = this.peek();
    if (token === undefined) throw new Error("it ends too early");
    this.at += 1;
    return token;
  }
  take(wanted) {
    if (this.peek() !== wanted) return false;
    this.at += 1;
    return true;
  }
  until(ends) {
    if ((this.depth += 1) > DEPTH_MAX) throw new Error("too deep");
    const found = [];
    while (this.peek() !== undefined && !ends(this.peek())) found.push(this.scripted());
    this.depth -= 1;
    return found;
  }
  group() { // An argument: a group or one atom.
    if (!this.take("{")) {
      if ((this.depth += 1) > DEPTH_MAX) throw new Error("too deep");
      const one = this.atom();
      this.depth -= 1;
      return one;
    }
    const found = this.until((token) => token === "}");
    if (!this.take("}")) throw new Error("a brace is open");
    return row(found);
  }
  raw() { // An argument as it was written.
    if (!this.take("{")) return this.next();
    let text = "", open = 1;
    for (;;) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new Error("a brace is open");
      this.at += 1;
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!open) return text;
      text += token.replace(/^\\(?=[^a-zA-Z])/, "");
    }
  }
  scripted() {
    const base = this.atom();
    let below = null, above = null, primes = "";
    for (;;) {
      if (this.take("'")) primes += "′";
      else if (!below && this.take("_")) below = this.group();
      else if (!above && this.take("^")) above = this.group();
      else break;
    }
    if (primes) above = above ? row([tag("mo", [primes]), above]) : tag("mo", [primes]);
    const made = !below && !above ? base : this.#around(base, below, above);
    return base.named ? row([made, tag("mspace", [], { width: ".17em" })]) : made;
  }
  #around(base, below, above) {
    const around = base.around === true, kind = (under, over, both) => (below && above ? both : below ? under : over);
    const name = around ? kind("munder", "mover", "munderover") : kind("msub", "msup", "msubsup");
    return tag(name, [base, below, above].filter(Boolean));
  }
  fence() {
    const token = this.next(), known = FENCES[token.slice(1)] || SIGNS[token.slice(1)];
    return token[0] === "\\" ? known || token : token === "." ? "" : token === "<" ? "⟨" : token === ">" ? "⟩" : token;
  }
  atom() {
    const token = this.next();
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (token === "{") { this.at -= 1; return this.group(); }
    if (token === "}" || token === "&") throw new Error("out of place");
    if (token === "_" || token === "^") { this.at -= 1; return tag("mrow"); }
    if (token === "~") return tag("mspace", [], { width: ".3em" });
    if (/^\d/.test(token)) return tag("mn", [token]);
    if (/^\p{L}/u.test(token)) return tag("mi", [token]);
    return tag("mo", [token === "-" ? "−" : token === "*" ? "∗" : token], /[()[\]|/]/.test(token) ? { stretchy: "false" } : {});
  }
  command(name) {
    if (LETTERS[name]) return tag("mi", [LETTERS[name]], /^[A-Z]/.test(name) ? { mathvariant: "normal" } : {});
    if (SIGNS[name]) return tag("mo", [SIGNS[name]]);
    if (INTEGRALS[name]) return tag("mo", [INTEGRALS[name]], { largeop: "true" });
    if (LARGE[name] || LIMITS.has(name)) {
      const made = LARGE[name] ? tag("mo", [LARGE[name]], { largeop: "true", movablelimits: "true" }) : tag("mo", [name.replace(/^(lim|arg)(?=...)/, "$1 ")], { movablelimits: "true" });
      return Object.assign(made, { around: true });
    }
    if (NAMES.has(name)) return Object.assign(tag("mi", [name]), { named: true });
    if (FENCES[name]) return tag("mo", [FENCES[name]], { stretchy: "false" });
    if (SPACES[name]) return tag("mspace", [], { width: SPACES[name] });
    if (SILENT.has(name)) return tag("mrow");
    if (TEXTS.has(name)) return tag("mtext", [this.raw().replaceAll(" ", "\u00a0")]);
    if (ALPHABETS[name]) return tag("mi", [Array.from(this.raw(), (each) => styled(each, ALPHABETS[name])).join("")], { mathvariant: "normal" });
    if (ACCENTS[name]) return Object.assign(tag("mover", [this.group(), tag("mo", [ACCENTS[name]])], { accent: "true" }), { around: name === "overbrace" });
    if (UNDER[name]) return Object.assign(tag("munder", [this.group(), tag("mo", [UNDER[name]])]), { around: name === "underbrace" });
    if (/^[dtc]?frac$/.test(name)) return tag("mfrac", [this.group(), this.group()]);
    if (/^[dt]?binom$/.test(name)) {
      return tag("mrow", [tag("mo", ["("]), tag("mfrac", [this.group(), this.group()], { linethickness: "0" }), tag("mo", [")"])]);
    }
    if (name === "sqrt") return this.root();
    if (name === "left") return this.between();
    if (name === "begin") return this.table(this.raw());
    if (name === "overset" || name === "stackrel") { const over = this.group(); return tag("mover", [this.group(), over]); }
    if (name === "underset") { const under = this.group(); return tag("munder", [this.group(), under]); }
    if (name === "pmod") return tag("mrow", [tag("mo", ["("]), tag("mi", ["mod"]), tag("mspace", [], { width: ".3em" }), this.group(), tag("mo", [")"])]);
    if (name === "bmod" || name === "mod") return tag("mo", ["mod"]);
    if (name === "not") return tag("mo", [`${this.atom().textContent}\u0338`]);
    if (name === "boxed") return tag("mrow", [this.group()], { class: "boxed" });
    if (name === "tag") return tag("mtext", [`  (${this.raw()})`]);
    if (name === "label" || name === "color" || name === "hspace" || name === "vspace") { this.raw(); return tag("mrow"); }
    if (name === "\\") return tag("mspace", [], { linebreak: "newline" });
    if (/^[%#&$_]$/.test(name)) return tag("mo", [name]);
    if (name === "right" || name === "end") throw new Error("out of place");
    return tag("mtext", [`\\${name}`]);
  }
  root() {
    if (!this.take("[")) return tag("msqrt", [this.group()]);
    const degree = row(this.until((token) => token === "]"));
    this.take("]");
    return tag("mroot", [this.group(), degree]);
  }
  between() {
    const left = this.fence(), inner = this.until((token) => token === "\\right");
    if (!this.take("\\right")) throw new Error("a fence is open");
    const right = this.fence(), side = (char, form) => (char ? [tag("mo", [char], { fence: "true", form, stretchy: "true" })] : []);
    return tag("mrow", [...side(left, "prefix"), ...inner, ...side(right, "postfix")]);
  }
  table(kind) {
    if (!TABLES.has(kind)) throw new Error("unknown");
    if (kind === "array" || kind === "alignedat") this.raw();
    const rows = [], stop = (token) => token === "&" || token === "\\\\" || token === "\\end";
    let cells = [];
    for (;;) {
      cells.push(tag("mtd", this.until(stop)));
      const token = this.next();
      if (token === "&") continue;
      if (cells.length > 1 || cells[0].childNodes.length) rows.push(tag("mtr", cells));
      cells = [];
      if (token === "\\end") { this.raw(); break; }
    }
    const aligned = /^(align|split|cases|dcases|rcases)/.test(kind);
    const made = tag("mtable", rows, { class: kind.includes("cases") ? "cases" : aligned ? "aligned" : "", ...(kind.includes("matrix") ? {} : { displaystyle: "true" }) });
    const [left, right] = AROUND[kind] || (kind === "dcases" ? "{" : kind === "rcases" ? [null, "}"] : "");
    const side = (char, form) => (char ? [tag("mo", [char], { fence: "true", form, stretchy: "true" })] : []);
    return tag("mrow", [...side(left, "prefix"), made, ...side(right, "postfix")]);
  }
}

export function formula(text, display) {
  try {
    if (text.length > FORMULA_CHARS_MAX) throw new Error("too long");
    const reader = new Reader(text), found = reader.until(() => false);
    const made = tag("math", [tag("semantics", [tag("mrow", found), tag("annotation", [text.trim()], { encoding: "application/x-tex" })])]);
    if (display) made.setAttribute("display", "block");
    return made;
  } catch {
    const made = document.createElement("code");
    made.textContent = text.trim();
    made.className = "tex";
    return made;
  }
}
